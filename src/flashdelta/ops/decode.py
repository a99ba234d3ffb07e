"""`recurrent_kda`, a step of decoding over a pool of states, and `commit`, which ends a read-only verification."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from ..problem import operations
from ..problem.arguments import check_int, check_int_in, find_device, positive
from ..problem.errors import by_keyword, named_options, rule
from ..problem.problem import DECODE_TOKENS, GateName, NullIndex, record_width
from ..runtime.call import Dispatcher


@named_options
def recurrent_kda(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *positional: NoReturn,
    mixed_qkv: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    output: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    gate: GateName | None = None,
    state_v_first: bool = True,
    null_index: NullIndex = "negative",
    update_state: bool = True,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""One step of decoding: one to seventeen tokens per sequence, from states in a pool to states in a pool.

    Examples:
        >>> q, k, v, g = (torch.randn(4, 1, 2, 64) for _ in "qkvg")
        >>> pool, slots = torch.zeros(16, 2, 64, 64), torch.tensor([3, 0, 7, -1])
        >>> states = {"initial_state": pool, "ssm_state_indices": slots}
        >>> o, pool = fd.recurrent_kda(q, k, v, -g.abs(), torch.rand(4, 1, 2), **states)
        >>> o.shape
        torch.Size([4, 1, 2, 64])

    The recurrence of `chunk_kda` (Kimi Linear, arXiv 2510.26692, eq. 1), token by token in float32; a state in bfloat16 is
    read, updated in float32 and rounded once. Arguments as in FlashInfer's `recurrent_kda`, whose defaults these are: states
    V first, L2 norm on. No gradients. The call allocates nothing if `output` is given and `initial_state` receives the states,
    reads no tensor on the host, and can be captured in a CUDA graph and replayed with other indices and data.

    An index that is null (see `null_index`) or past the pool's end names no slot. A sequence whose start has no slot is null:
    its outputs are zero and it stores nothing. With `initial_state_source`, so is one whose first target has no slot. On a CPU
    values are checked as FLASHDELTA_CHECK=1 checks them, but for decays.

    Args:
        q: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend); `K` a power of two up to 256; at
            most 17 tokens per sequence. Packed (`cu_seqlens`): `[1, tokens, H, K]`. Any strides, read in place if dense in K.
        k: as q.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0`; `V` as `K`.
        g: `[B, T, HV, K]`, float32 or dtype of q: log decay per step (natural log), or the gate's input (see `gate`).
        beta: `[B, T, HV]`, float32 or dtype of q: write strength in `[0, 2)`, or its logit.
        mixed_qkv: `[tokens, 2 * H * K + HV * V]`, rows any distance apart: q, k and v of a token side by side, in their
            place. `g` may then be `[tokens, HV * K]` and `beta` `[tokens, HV]`. Without `cu_seqlens` each row is a sequence
            (each `1 + num_spec_tokens` rows are one). HV, K and V are `initial_state`'s.
        A_log: the gate's, as in `chunk_kda`.
        dt_bias: the gate's, as in `chunk_kda`.
        scale: factor on the output; `K ** -0.5` by default.
        initial_state: `[slots, HV, V, K]` (`[slots, HV, K, V]` without `state_v_first`), float32 or bfloat16: the pool, read
            and written in place. Dense inside a slot; slots may lie any pitch apart. Without `ssm_state_indices` sequence `n`
            has slot `n` of `N`. None: states start at zero and are dropped.
        output_final_state: return the states: `initial_state`, or without one a new float32 tensor `[N, HV, V, K]`.
        use_qk_l2norm_in_kernel: divide q and k rows by `sqrt(sum x^2 + 1e-6)` first.
        use_gate_in_kernel: g is the gate's input: `softplus` gate, or `lower_bound` gate if `lower_bound` is given.
        lower_bound: in `[-5, 0)`, the floor of the `lower_bound` gate; refused with others, which would ignore it.
        cu_seqlens: `[N + 1]` int32 or int64: token offsets of packed sequences (then `B == 1`), from 0, non-decreasing. Lengths
            are 0 to 17 (to `1 + num_spec_tokens`). A sequence without tokens leaves its slots alone. So does a longer one, and
            `commit` replays nothing of it; FLASHDELTA_CHECK=1 refuses it. Its rows of `o`, and those outside all sequences,
            are undefined.
        ssm_state_indices: `[N]` int32 or int64: each sequence's slot. With `num_spec_tokens`, `[N, 1 + num_spec_tokens]`: the
            slot that receives the state after each token. Any strides. No two states may be stored to one slot.
        num_spec_tokens: `S` in 1 to 16: verify `1 + S` tokens per sequence (packed: up to) in one launch.
        num_accepted_tokens: `[N]` int32 or int64, with `num_spec_tokens`: the sequence starts from slot
            `ssm_state_indices[n, accepted - 1]`, the last accepted token's of the round before. A count outside `1 .. 1 + S`
            makes it null. None: 1 everywhere.
        output: `[B, T, HV, V]`, q's dtype or float32 (in float16 a readout of more than 65504 would be infinite), written and
            returned instead of a new `o`. Must not share memory with an input.
        initial_state_source: a second, read-only pool: sequences start from it, and `initial_state` only receives states.
        initial_state_indices: `[N]` int32 or int64: each sequence's slot in `initial_state_source`.
        beta_is_logit: `sigmoid(beta)` is the write strength; with `allow_neg_eigval`, `2 sigmoid(beta)`.
        gate: names the gate directly, as in `chunk_kda`.
        state_v_first: states are `[.., V, K]` (else `[.., K, V]`).
        null_index: which indices are null: `"negative"`, or `"non_positive"` (slot 0 is reserved).
        update_state: with False the pool is read-only; `ssm_state_indices` is then `[N]`.
        intermediate_states: `[slots, 1 + S, HV, V, K]`, with `update_state=False` and `num_spec_tokens`: receives the state
            after each token, in row `intermediate_state_indices[n]` (`[N]`, null below 0; by default the index the sequence
            starts from). Their dtype is the pool's. `commit` copies the accepted one to the pool. Or a buffer made by
            `replay_buffer`: receives what each token changes, for `commit` to replay, in 2.4 % of the memory of float32 states
            with K = V = 128. No two sequences may name one row of it; null ones leave theirs alone, whatever it is.
        backend: `"auto"`, `"hopper"` (V first: one token per sequence with states in bfloat16, or several into a replay
            buffer), `"triton"` or `"reference"`; see `explain`.

    Returns:
        `(o [B, T, HV, V], states or None)`; `o` has v's dtype, or `output`'s. With `mixed_qkv` it is `[N, T, HV, V]`, or packed
        `[1, tokens, HV, V]`.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    if positional:
        raise by_keyword(recurrent_kda, positional)
    tensors = (
        q, k, v, g, beta, mixed_qkv, A_log, dt_bias, initial_state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens, output, initial_state_source, initial_state_indices, intermediate_states,
        intermediate_state_indices,
    )  # fmt: skip
    options = (
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, num_spec_tokens,
        beta_is_logit, allow_neg_eigval, gate, state_v_first, null_index, update_state, backend,
    )  # fmt: skip
    found = _dispatch(tensors, options)
    return found["o"], initial_state if output_final_state and initial_state is not None else found.get("final_state")


def commit(
    initial_state: Tensor,
    intermediate_states: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    *,
    intermediate_state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    state_v_first: bool = True,
    backend: str = "auto",
) -> None:
    """Brings the state after each sequence's last accepted token to the pool: the second half of a read-only verification
    (`recurrent_kda` with `update_state=False`).

    Examples:
        >>> pool, slots = torch.zeros(16, 2, 64, 64), torch.tensor([3, 0])
        >>> # as left by `recurrent_kda(intermediate_states=kept, update_state=False)`
        >>> kept, rows = torch.randn(2, 4, 2, 64, 64), torch.tensor([0, 1])
        >>> counts = torch.tensor([4, 1])
        >>> fd.commit(pool, kept, slots, counts, intermediate_state_indices=rows)

    `initial_state[ssm_state_indices[n]] <- intermediate_states[row, num_accepted_tokens[n] - 1]`, or with a replay buffer the
    first `num_accepted_tokens[n]` tokens recorded in the row are applied to the slot's state, which must be the one that
    verification started from: the result is within 1e-6 of the states kept, and one rounding. A null index, one past the end,
    or a count outside `1 .. 1 + S` stores nothing, and neither does a count past what is recorded. A record is good for one
    commit: every sequence that has a slot empties its row, whatever the count. Commit each row that was verified, before it is
    verified again or given to another sequence. One launch, no allocation, nothing read on the host.

    Args:
        initial_state: `[slots, HV, V, K]` (or K first), float32 or bfloat16: the pool, written in place. Slots may lie any
            pitch apart.
        intermediate_states: `[rows, 1 + S, HV, V, K]`, the pool's dtype; or the replay buffer, see `replay_buffer`.
        ssm_state_indices: `[N]` int32 or int64: each sequence's slot. No two sequences may have the same.
        num_accepted_tokens: `[N]` int32 or int64.
        intermediate_state_indices: `[N]`: each sequence's row; by default its slot's index. No two sequences may have the same
            row of a replay buffer.
        null_index: as in `recurrent_kda`.
        state_v_first: as in `recurrent_kda`. Copies of states are the same in either layout; records are not, so the flag must
            be that of the verification.
        backend: as in `recurrent_kda`.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    tensors = (initial_state, intermediate_states, ssm_state_indices, num_accepted_tokens, intermediate_state_indices)
    _dispatch_commit(tensors, (null_index, state_v_first, backend))


def replay_buffer(
    rows: int, num_spec_tokens: int, HV: int, K: int, V: int, *, device: torch.device | str | None = None
) -> Tensor:
    """An empty replay buffer for `recurrent_kda(intermediate_states=...)`: a row for each sequence of `1 + num_spec_tokens`
    tokens that awaits its `commit`.

    Examples:
        >>> buffer = fd.replay_buffer(8, num_spec_tokens=3, HV=2, K=64, V=64)  # eight sequences

    Per token and head it holds `exp(g)` and `k` `[K]`, then `u` `[V]`, with `S_t = diag(exp(g)) S_(t-1) + k u^T` (Kimi Linear,
    arXiv 2510.26692, eq. 1), then four numbers, which in the row's first token say how many tokens are recorded. Rows of a
    larger buffer may lie any pitch apart; a multiple of 16 numbers avoids further compilations.

    Args:
        rows: how many; at most as many sequences are verified at once. Without `intermediate_state_indices` a sequence's row is
            its slot's index: as many as the pool has.
        num_spec_tokens: `S` in 1 to 16.
        HV: value heads.
        K: key channels, a power of two up to 256.
        V: value channels, a power of two up to 256.
        device: of the buffer; PyTorch's default device by default.

    Returns:
        `[rows, 1 + num_spec_tokens, HV, width]` float32, zeros; `width` is `2 K + V + 4` up to a multiple of 16.

    Raises:
        ValueError, TypeError: a number that does not fit, or a device that is not there.
    """
    check_int("rows", rows)
    rule("rows", rows >= 0, "0 or more", rows)
    positive("HV", HV)
    check_int_in("num_spec_tokens", num_spec_tokens, range(1, DECODE_TOKENS))
    for name, value in (("K", K), ("V", V)):
        check_int_in(name, value, operations.DECODE_HEAD_DIMS)
    device = None if device is None else find_device(device)
    shape = (rows, 1 + num_spec_tokens, HV, record_width(K, V))
    rule("rows", math.prod(shape) < 1 << 61, "a buffer of fewer than 2^61 numbers", rows)
    return torch.zeros(shape, dtype=torch.float32, device=device)


_dispatch = Dispatcher(operations.DECODE, recurrent_kda)
_dispatch_commit = Dispatcher(operations.COMMIT, commit)
