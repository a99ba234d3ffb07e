"""`chunk_kda`: whole sequences, in chunks; forward and backward."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..parallel.checks import broadcast_errors
from ..parallel.context import context_in_call
from ..problem import operations
from ..problem.errors import by_keyword, named_options
from ..problem.problem import GateName, NullIndex
from ..problem.split import known_lengths
from ..runtime.call import Dispatcher


@named_options
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *positional: NoReturn,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    gate: GateName | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_every: int | None = None,
    split: str | bool | int = "auto",
    batch_invariant: bool = False,
    cp_context: Any = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Kimi Delta Attention over whole sequences, in chunks.

    Examples:
        >>> q, k, v, g = (torch.randn(1, 128, 2, 64) for _ in "qkvg")
        >>> options = {"gate": "logsigmoid", "use_qk_l2norm_in_kernel": True}
        >>> o, state = fd.chunk_kda(q, k, v, g, torch.rand(1, 128, 2), **options, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 128, 2, 64]), torch.Size([1, 2, 64, 64]))

    Most calls take the first group of arguments alone: above all `initial_state`, `output_final_state`, `cu_seqlens`,
    `use_qk_l2norm_in_kernel` and a gate. Engines add the second, of which `state_pool` and `state_indices` come first. The
    third is for training at the limits, several GPUs and FLA's names.

    Per value head, with state `S [K, V]` (Kimi Linear, arXiv 2510.26692, eq. 1):

        S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - k_t^T S);   o_t = scale * q_t^T S

    Inputs may be strided views with a dense last dimension (slices of a fused projection are read in place). `state_pool` and
    the buffers `out`, `final_state` and `checkpoint_states` are written, nothing else is; they take part in no transform of
    `torch.func`. On a CPU, FLASHDELTA_CHECK's checks are always on, except that of decays. States may also be float64
    where q is. A sequence's result is bitwise independent of the rest of the batch, except for the plan of a split (see
    `split`), restarts there, and whether all sequences are short, which `batch_invariant` rules out. A call with gradients, or
    with g in float32, may differ in rounding from one without, as the backend `hopper` has forms of its kernels for each.

    Args:
        q: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend); `K` in {32, 64, 128, 256}.
        k: as q.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0` (value head `i` reads query/key head `i // (HV // H)`); `V` in
            {32, 64, 128, 256}.
        g: `[B, T, HV, K]`, float32 or dtype of q: log decay per step (natural log), or the gate's input (see `gate`).
        beta: `[B, T, HV]`, float32 or dtype of q: write strength in `[0, 2)`, or its logit.
        scale: factor on the output; `K ** -0.5` by default.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` if `state_v_first`), float32 or bfloat16. None means zeros.
        output_final_state: return the state after the last token, in `initial_state`'s dtype (float32 without one).
        use_qk_l2norm_in_kernel: divide q and k rows by `sqrt(sum x^2 + 1e-6)` first. False by default; with `state_pool` it
            must be given, since all calls over a pool must agree (`recurrent_kda` divides by default).
        use_gate_in_kernel: g is the gate's input: `softplus` gate, or `lower_bound` gate if `lower_bound` is given.
        use_beta_sigmoid_in_kernel: beta is a logit: `sigmoid(beta)` is the write strength.
        lower_bound: in `[-5, 0)`, the floor of the `lower_bound` gate; refused with others, which would ignore it.
        A_log: `[HV]` or `[1, 1, HV, 1]`, float32 or dtype of q. Read by the gates `softplus` (required) and `lower_bound`;
            refused with others, which would ignore it.
        dt_bias: `[HV * K]` or `[HV, K]`, float32 or dtype of q. Read by the same gates.
        gate: names the gate directly: `"none"` (g is the log decay), `"softplus"`: `-exp(A_log) softplus(g + dt_bias)`,
            `"lower_bound"`: `lower_bound * sigmoid(exp(A_log) (g + dt_bias))`, `"logsigmoid"`: `log sigmoid(g)`.
        cu_seqlens: `[N + 1]` int32 or int64 on the inputs' device: token offsets of packed sequences (then `B == 1`), from 0,
            non-decreasing, at most T; empty sequences are legal. The values are not read on the host: offsets outside `[0, T]`
            are clamped (on a CPU refused), rows of `o` outside all sequences are undefined, and FLASHDELTA_CHECK=1 verifies
            them.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`; see `explain`.

    Keyword Args: For serving engines:
        state_pool: `[slots, HV, K, V]` (`[slots, HV, V, K]` if `state_v_first`), float32 or bfloat16: the states of many
            sequences, read and written in place. Dense inside a slot; slots may lie any pitch apart. Instead of
            `initial_state` and `output_final_state`: a sequence starts from its slot's state and leaves its final state
            there. A sequence without tokens leaves its slot alone. Takes no gradients.
        state_indices: `[N]` int32 or int64, required with `state_pool`: each sequence's slot. A null index (see `null_index`),
            or one past the pool's end, starts from zeros and stores nothing. No two states may be stored to one slot. Like
            `cu_seqlens`, values are not read on the host; FLASHDELTA_CHECK=1 verifies them.
        null_index: which indices are null: `"negative"`, or with `state_pool` `"non_positive"` (slot 0 is reserved).
        has_initial_state: `[N]` bool: where False, the sequence starts from zeros though its index names a slot. None means
            True everywhere.
        state_v_first: states are `[.., V, K]`. False by default; with `state_pool` it must be given, since all calls over a
            pool must agree (`recurrent_kda` has V first by default).
        cu_seqlens_cpu: the same offsets on the host, if at hand; they are checked. They give `h` its exact length. If no
            sequence is long enough to be split, the call leaves out the kernels that plan a split, in a CUDA graph too; if all
            are short, `hopper` takes one launch. Both are right for any lengths of a replay.
        out: `[B, T, HV, V]`, written and returned instead of a new `o`. Must not share memory with an input.
            In q's dtype or float32 (docs/numerics.md says what float16 can't hold).
        final_state: `[N, HV, K, V]` (`[N, HV, V, K]` if `state_v_first`), float32 or bfloat16 whatever `initial_state` has,
            contiguous: written and returned instead of a new final state; implies `output_final_state`. A sequence without
            tokens leaves its initial state there, or zeros. Must not share memory with another argument (`state_pool` updates
            states in place; what counts are ranges of addresses, from a tensor's first element to its last), and takes no
            gradients.
        checkpoint_offsets: `[N]` or `[N, M]` int32 or int64, with `state_pool` or `checkpoint_states`: the state after so
            many tokens of the sequence is stored too. 0 means none; others must be strictly increasing multiples of 16, or the
            sequence's length (where the state is the final one); M at most 8 in a pool. FLASHDELTA_CHECK=1 refuses others.
            Without it offset `c_m` cuts the sequence at `d_m = clamp(c_m, d_{m-1}, L)` for L tokens, `d_{-1} = 0`, and stores
            the state if `0 < c_m == d_m`: those past the end, or below the cut before, store nothing, an equal one the same
            state. The chunk grid of a sequence starts anew at its cuts, whatever the index: if all are multiples of
            `chunk_size` they change no bit of the results, but where a call without offsets restarts (see `split`).
        checkpoint_indices: the slots for them, shaped like `checkpoint_offsets`; null as in `state_indices`. With
            `checkpoint_states` its rows, null if below 0 (row 0 is a row under any `null_index`); one past the end stores
            nothing. A row that two stored checkpoints name is undefined. FLASHDELTA_CHECK=1 refuses both.
        checkpoint_states: `[rows, HV, K, V]` (`[rows, HV, V, K]` if `state_v_first`), float32 or bfloat16 whatever other states
            have: a buffer that receives the checkpoints, with or without `state_pool`. Dense inside a row; rows may lie any
            pitch apart, and those of no checkpoint stay as they are. Must not share memory with another argument, nor may its
            rows lie between those of another. Takes no gradients.
        checkpoint_every: a multiple of 64 up to 2^30, with `checkpoint_states` and without offsets: the states before tokens
            0, n, 2n, ... of each sequence are stored, `ceil(L / n)` of a sequence of L tokens, none of an empty one. A
            sequence's rows lie one after another, and so do the sequences' (as `h` has chunks); row `b ceil(T / n) + i`
            without `cu_seqlens`. Bits change only where a call without it restarts (see `split`). Rows past the end of the
            buffer are not stored: packed sequences need at most `T // n + N`, and FLASHDELTA_CHECK=1 verifies that theirs fit;
            without `cu_seqlens` fewer than `B ceil(T / n)` are refused.
        batch_invariant: with `split="auto"`, a sequence's segments, and so the bits of its results, depend on it alone; over
            ranks also on where these cut it. Few heads then do without the kernel for batches of short sequences.

    Other Parameters: For training at the limits, several GPUs and FLA's names:
        allow_neg_eigval: with beta logits, the write strength is `2 sigmoid(beta)`.
        safe_gate: promises that every log decay lies in `[-5, 0]`, which makes the kernels faster. A gate with a
            `lower_bound` needs no promise; the unbounded `softplus` gate refuses one. Without it any decay is exact.
        disable_recompute: keep what the backward pass needs of the forward instead of computing it again: the bytes are in
            docs/start/training.md. Traced calls (`torch.compile`) and the reference compute it again. Without it an eager call
            with gradients keeps the maps of split sequences and the states between segments, if these take no more memory
            than v.
        return_intermediate_states: also return `h`, the state before every chunk, in q's dtype. Not differentiable. With many
            heads `o` may differ in rounding from that of a call without.
        chunk_size: 32 or 64 tokens.
        split: how many segments each sequence is cut into, which run at the same time (docs/split.md): a number up to 1024
            (fewer where a sequence has fewer chunks), False for none, or `"auto"`: as many as pay, with few heads and long
            sequences. The backward pass has the same segments. Results differ in rounding. With "auto"
            and few heads `hopper` also restarts where a chunk forgets the state before it: up to 2^-60 of that state
            may be dropped, and a NaN or an infinity in it (docs/split.md).
        cp_context: how packed sequences lie over the ranks of a process group (`parallel.context_parallel`; FLA's context does
            too): tensors are then this rank's tokens, and `cu_seqlens` and N the context's. Every rank must make the call, and
            run its backward pass. `initial_state` is read, and has a gradient, where the sequence starts; `final_state` is that
            after this rank's last token of the sequence, the true one where the sequence ends. A pool's slot is read where
            the sequence starts, and stored where it ends. Gradients of `A_log` and `dt_bias` are this rank's share. `split`
            cuts this rank's tokens. Takes no checkpoints.
        group: a process group: each batch row is one sequence over all its ranks, the tensors being this rank's tokens, at
            least one.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `return_intermediate_states`. `o [B, T, HV, V]` has v's dtype, or
        `out`'s; `final_state` is None unless asked for; `h [B, NT, HV, K, V]` (or V first) has `NT = ceil(T / chunk_size)`.
        Packed, the chunks of all sequences follow one another, and `NT` is their number if `cu_seqlens_cpu` is given, else
        `T // chunk_size + N`, with zeros in the rows past the last chunk. `checkpoint_offsets` `[N, M]` cut chunks, all
        of which have a state in `h`: `NT` is then `ceil(T / chunk_size) + M`, or at most `T // chunk_size + N (1 + M)`, with
        zeros past the last chunk. Workspace: docs/start/serving.md, "Memory".

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    if positional:
        raise by_keyword(chunk_kda, positional)
    border = None
    if (cp_context is not None or group is not None) and isinstance(q, Tensor):
        with broadcast_errors(cp_context, group):
            cp_context, cu_seqlens, border = context_in_call(cp_context, group, cu_seqlens, q)
        group = None
    tensors = (
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, A_log, dt_bias, out, final_state,
        state_pool, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices, checkpoint_states, border,
    )  # fmt: skip
    options = (
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, safe_gate, lower_bound, disable_recompute, return_intermediate_states, state_v_first,
        chunk_size, gate, backend, null_index, checkpoint_every, split, batch_invariant, cp_context, group,
    )  # fmt: skip
    known = None if cu_seqlens_cpu is None else known_lengths(cu_seqlens_cpu, chunk_size, q)
    found = _dispatch(tensors, options, known)
    if not return_intermediate_states:
        return found["o"], found.get("final_state")
    h = found["h"]
    if cu_seqlens_cpu is not None and checkpoint_offsets is None:
        h = h[:, : int(((cu_seqlens_cpu.diff() + chunk_size - 1) // chunk_size).sum())]
    return found["o"], found.get("final_state"), h


_dispatch = Dispatcher(operations.CHUNK, chunk_kda, extra_tensors=("border",))
