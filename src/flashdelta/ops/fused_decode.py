"""`fused_kda_decode`: a step of decoding of the whole layer but its projections."""

from __future__ import annotations

from torch import Tensor

from ..problem import operations
from ..problem.problem import GateName, NullIndex
from ..runtime.call import Dispatcher


def fused_kda_decode(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    gate: GateName | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    beta_is_logit: bool = True,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    state_v_first: bool = True,
    null_index: NullIndex = "negative",
    backend: str = "auto",
) -> Tensor:
    r"""One step of decoding of a layer, in one launch: what lies between its projections (Kimi Linear, arXiv 2510.26692,
    section 4).

        q, k, v = silu(conv(x));   o = rmsnorm(KDA(q, k, v, g, beta)) * norm_weight * sigmoid(output_gate)

    as `short_convolution`, `recurrent_kda` and `gated_rms_norm` compute it, with windows and states in pools; all in float32,
    rounded once. Arguments as in FlashInfer's and vLLM's `fused_kda_decode`, where they have one. No gradients. The call
    allocates nothing if `output` is given, reads no tensor on the host, and can be captured in a CUDA graph and replayed with
    other indices and data.

    Examples:
        >>> x, filters, windows = torch.randn(2, 192), torch.randn(192, 4), torch.zeros(8, 192, 3)
        >>> g, z, beta = torch.randn(2, 1, 64), torch.randn(2, 1, 64), torch.randn(2, 1)
        >>> slots, states = torch.tensor([3, 0]), torch.zeros(8, 1, 64, 64)
        >>> gate, norm = (torch.zeros(1), torch.zeros(64)), torch.ones(64)  # A_log, dt_bias
        >>> y = fd.fused_kda_decode(x, filters, windows, g, beta, *gate, slots, states, z, norm)
        >>> y.shape
        torch.Size([2, 1, 1, 64])

    A sequence whose slot is null (see `null_index`) or past the pools' end is null: its outputs are zero and it stores nothing.

    Args:
        x: `[N, 2 * H * K + HV * V]`, bfloat16, float16 or float32 (float64: reference backend), rows any distance apart: q, k
            and v of a token side by side, before the convolution. `HV % H == 0`; K and V are 32, 64 or 128. With
            `num_spec_tokens` each `1 + num_spec_tokens` rows are a sequence. Packed (`cu_seqlens`): `[tokens, ..]`.
        weight: the convolution's, `[D, W]` or `[D, 1, W]`, `D` the channels of x, or `[3, W, D / 3]` where q, k and v have as
            many channels; float32 or dtype of x; `W` in 2 to 4.
        conv_state: `[slots, D, L]`, float32 or dtype of x, any strides that do not overlap: the pool of the last inputs, read
            and written in place. A sequence's `W - 1` last inputs begin at place 0, or `num_accepted_tokens - 1`; places from
            0 on receive the last `W - 2` of them, then the call's tokens. `L` is `W - 1 + num_spec_tokens` or more. It may lie
            interleaved with `state` in one buffer; that the two do not overlap is for the caller to see to.
        raw_g: `[N, HV, K]`, also flat or with a dimension of 1 before; float32 or dtype of x: the gate's input (see `gate`).
        raw_beta: `[N, HV]`, or with a dimension of 1 before; float32 or dtype of x: the logit of the write strength.
        A_log: the gate's, as in `chunk_kda`.
        dt_bias: the gate's, as in `chunk_kda`.
        state_indices: `[N]` int32 or int64: each sequence's slot, in both pools. With `num_spec_tokens` and without
            `intermediate_states` `[N, 1 + num_spec_tokens]`: the slot that receives the state after each token; the first is
            that of the sequence's window. Any strides. No two sequences may have one slot.
        state: `[slots, HV, V, K]` (`[slots, HV, K, V]` without `state_v_first`), float32 or bfloat16: the pool of states, read
            and written in place. Dense inside a slot; slots may lie any pitch apart.
        output_gate: `[N, HV, V]`, also flat or with a dimension of 1 before; dtype of x.
        norm_weight: `[V]`, float32 or dtype of x.
        lower_bound: in `[-5, 0)`, the floor of the `lower_bound` gate; None: the `softplus` gate.
        norm_eps: added to the mean of squares; above 0, and within float32.
        output: `[N, 1, HV, V]` (`[N, 1 + num_spec_tokens, HV, V]`; packed `[1, tokens, HV, V]`), dtype of x or float32, written
            and returned instead of a new tensor. Must not share memory with an input.
        bias: `[D]`, float32 or dtype of x: the convolution's.
        scale: factor on the attention's output; `K ** -0.5` by default.
        gate: names the gate directly, as in `chunk_kda`: with `"none"` `raw_g` is the log decay.
        use_qk_l2norm_in_kernel: divide q and k rows by `sqrt(sum x^2 + 1e-6)`.
        beta_is_logit: `sigmoid(raw_beta)` is the write strength; with `allow_neg_eigval`, `2 sigmoid(raw_beta)`.
        cu_seqlens: `[N + 1]` int32 or int64: token offsets of packed sequences of up to `1 + num_spec_tokens` tokens, from 0,
            non-decreasing. A sequence without tokens leaves its slots alone. So does a longer one, which FLASHDELTA_CHECK=1
            refuses. Its rows of the output, and those of no sequence, are undefined.
        num_spec_tokens: `S` in 1 to 16: `1 + S` tokens per sequence (packed: up to).
        num_accepted_tokens: `[N]` int32 or int64, with `num_spec_tokens`: how many tokens of the round before were accepted.
            They say where the window begins and, without `intermediate_states`, from which slot the sequence starts, that of
            the last accepted token. A count outside `1 .. 1 + S` makes it null. None: 1 everywhere.
        intermediate_states: made by `replay_buffer`, with `num_spec_tokens`: the pool of states is only read, and what each
            token changes goes to row `intermediate_state_indices[n]` (`[N]`, null below 0; by default the slot's index), for
            `commit` to replay. Windows are written all the same, and need the counts of `commit` in the next round.
        state_v_first: states are `[.., V, K]` (else `[.., K, V]`).
        null_index: which indices are null: `"negative"`, or `"non_positive"` (slot 0 is reserved, as both engines have it).
        backend: `"auto"`, `"hopper"` (one token per sequence, `K == V`), `"triton"` or `"reference"`; see `explain`.

    Returns:
        `o [N, 1, HV, V]` (`[N, 1 + num_spec_tokens, HV, V]`; packed `[1, tokens, HV, V]`), in x's dtype.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    tensors = (
        x, weight, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, output_gate, norm_weight,
        output, bias,
        cu_seqlens, num_accepted_tokens, intermediate_states, intermediate_state_indices,
    )  # fmt: skip
    options = (
        lower_bound, norm_eps, scale, gate, use_qk_l2norm_in_kernel, beta_is_logit, allow_neg_eigval, num_spec_tokens,
        state_v_first, null_index, backend,
    )  # fmt: skip
    return _dispatch(tensors, options)["o"]


_dispatch = Dispatcher(operations.FUSED_DECODE, fused_kda_decode)
