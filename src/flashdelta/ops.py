"""The public operators: documentation, one check of the arguments, and a call of the backend that fits."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import backends
from .backends import Verdict
from .problem.decode_spec import CALLED, GIVEN, CommitTensors, check_commit, check_decode, check_decode_arguments
from .problem.prefill import DEFAULT_PRECISION, INPUTS, Precision, PrefillGate, check_prefill
from .problem.problem import (
    OWN_NAMES,
    TENSOR_NAMES,
    GateName,
    NullIndex,
    Options,
    Problem,
    Tensors,
    check_arguments,
    check_call,
    check_out,
    check_overlap,
    is_plain,
)
from .problem.split import known_lengths
from .program import cache as plans
from .reference.sequences import chunks_of
from .runtime import autograd
from .runtime import torch_ops as library


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    gate: GateName | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    split: str | bool | int = "auto",
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Kimi Delta Attention over whole sequences, in chunks.

    Per value head, with state `S [K, V]` (Kimi Linear, arXiv 2510.26692, eq. 1):

        S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - k_t^T S);   o_t = scale * q_t^T S

    Inputs may be strided views with a dense last dimension (slices of a fused projection are read in place); they are
    never written, but for `state_pool`. A sequence's result does not depend, to the bit, on what else is in the batch, but for
    the plan of a split (see `split`).

    Args:
        q, k: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend); `K` in {32, 64, 128, 256}.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0` (value head `i` reads query/key head `i // (HV // H)`); `V` in
            {32, 64, 128, 256}.
        g: `[B, T, HV, K]`, float32 or dtype of q: log decay per step (natural log), or the gate's input (see `gate`).
        beta: `[B, T, HV]`, float32 or dtype of q: write strength in `[0, 2)`, or its logit.
        scale: factor on the output; `K ** -0.5` by default.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` if `state_v_first`), float32 or bfloat16. None means zeros.
        output_final_state: return the state after the last token, in `initial_state`'s dtype (float32 without one).
        use_qk_l2norm_in_kernel: divide q and k rows by `sqrt(sum x^2 + 1e-6)` first.
        use_gate_in_kernel: g is the gate's input: `softplus` gate, or `lower_bound` gate if `lower_bound` is given.
        use_beta_sigmoid_in_kernel: beta is a logit: `sigmoid(beta)` is the write strength.
        allow_neg_eigval: with beta logits, the write strength is `2 sigmoid(beta)`.
        safe_gate: promises that every log decay lies in `[-5, 0]`, which makes the kernels faster. A gate with a
            `lower_bound` needs no promise. Without it any decay is exact.
        lower_bound: in `[-5, 0)`, the floor of the `lower_bound` gate.
        disable_recompute: keep what the backward pass needs of the forward (tiles of chunks, states, pseudo-values: in 16 bits
            about `2 B T HV (3 K + 3 C + V + K V / C)` bytes for chunks of C tokens) instead of computing it again. A call
            with gradients then splits no sequence. Traced calls (`torch.compile`) and the reference compute it again.
        return_intermediate_states: also return `h`, the state before every chunk, in q's dtype. Not differentiable.
        state_v_first: states are `[.., V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64 on the inputs' device: token offsets of packed sequences (then `B == 1`), from
            0, never falling, at most T; empty sequences are legal. The values are not read on the host: offsets outside
            `[0, T]` are clamped, rows of `o` of no sequence are undefined, and FLASHDELTA_CHECK=1 verifies them.
        cu_seqlens_cpu: the same offsets on the host, if at hand. They give `h` its exact length, and a call in which no
            sequence is long enough to be split leaves out the kernels that would find that out (as does a graph of it).
        A_log: `[HV]` or `[1, 1, HV, 1]`, float32. Read by the gates `softplus` (required) and `lower_bound`.
        dt_bias: `[HV * K]` or `[HV, K]`, float32. Read by the same gates.
        chunk_size: 32 or 64 tokens.
        gate: names the gate directly: `"none"` (g is the log decay), `"softplus"`: `-exp(A_log) softplus(g + dt_bias)`,
            `"lower_bound"`: `lower_bound * sigmoid(exp(A_log) (g + dt_bias))`, `"logsigmoid"`: `log sigmoid(g)`.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`; see `explain`.
        out: `[B, T, HV, V]`, written and returned instead of a new `o`. Must not share memory with an input.
        state_pool: `[slots, HV, K, V]` (`[slots, HV, V, K]` if `state_v_first`), float32 or bfloat16: the states of many
            sequences, read and written in place. Dense inside a slot; slots may lie any pitch apart. Instead of
            `initial_state` and `output_final_state`: a sequence starts from its slot's state and leaves its final state
            there. A sequence without tokens leaves its slot alone. Takes no gradients.
        state_indices: `[N]` int32 or int64, required with `state_pool`: each sequence's slot. A null index (see `null_index`),
            or one past the pool's end, starts from zeros and stores nothing. No two states may be stored to one slot. Like
            `cu_seqlens`, values are not read on the host; FLASHDELTA_CHECK=1 verifies them.
        null_index: which indices are null: `"negative"`, or `"non_positive"` (slot 0 is reserved).
        has_initial_state: `[N]` bool: where False, the sequence starts from zeros though its index names a slot. None means
            True everywhere.
        checkpoint_offsets: `[N]` or `[N, M]` int32 or int64, with `state_pool`: the state after so many tokens of the sequence
            is stored too. 0 means none; others must be multiples of 16 that rise in a row, at most the sequence's length
            (where the state is the final one), and M at most 8. Offsets past the end are ignored. The chunk grid of a sequence
            starts anew at its checkpoints: an offset that is a multiple of `chunk_size` changes no bit of the results.
        checkpoint_indices: the slots for them, shaped like `checkpoint_offsets`; null as in `state_indices`.
        split: into how many segments, that run at the same time, each sequence is cut (docs/split.md): a number up to 1024
            (fewer where a sequence has fewer chunks), False for none, or `"auto"`, as many as pay, which few heads and long
            sequences do. Results differ in rounding.
        batch_invariant: with `split="auto"`, a sequence's segments, and so the bits of its results, depend on it alone.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `return_intermediate_states`. `o [B, T, HV, V]` has v's dtype;
        `final_state` is None unless asked for; `h [B, NT, HV, K, V]` (or V first) has `NT = ceil(T / chunk_size)`. Packed,
        the chunks of all sequences follow one another, and `NT` is their number if `cu_seqlens_cpu` is given, else the
        bound `T // chunk_size + N`, with zeros in the rows past the last chunk.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
    """
    given = (
        *(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens),
        *(state_pool, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices),
    )
    key, addresses = plans.key(
        (*given, out, cu_seqlens_cpu),
        (
            *("chunk", scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel),
            *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute),
            *(return_intermediate_states, state_v_first, chunk_size, gate, null_index, backend),
            *(split, type(split), batch_invariant, known_lengths(cu_seqlens_cpu, chunk_size)),
        ),
    )
    plan = plans.find(key)
    if plan is not None:
        return plan.run(given, out, addresses[:-1], _refusal)
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        chunk_size=chunk_size,
        gate=gate,
        null_index=null_index,
        split=split,
        batch_invariant=batch_invariant,
    )
    tensors = Tensors(*given)
    problem, tensors = check_call(tensors, options, cu_seqlens_cpu)
    o, final_state, h = _run(problem, tensors, backend, out, key, given, keep=disable_recompute)
    if not return_intermediate_states:
        return o, final_state
    if cu_seqlens_cpu is not None and cu_seqlens is not None:
        lengths = cu_seqlens_cpu.diff()
        h = h[:, : int(((lengths + chunk_size - 1) // chunk_size).sum())]
    return o, final_state, h


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gate: GateName | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token: the same function as `chunk_kda`, faster for a few tokens a sequence.

    Arguments, results, errors and source as in `chunk_kda`; the matrix products are exact float32 here.

    Returns:
        `(o [B, T, HV, V], final_state or None)`.
    """
    given = (
        *(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens),
        *(state_pool, state_indices, has_initial_state),
    )
    key, addresses = plans.key(
        (*given, out),
        (
            *("recurrent", scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel),
            *(use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, gate, null_index, backend),
        ),
    )
    plan = plans.find(key)
    if plan is not None:
        return plan.run(given, out, addresses, _refusal)
    options = Options(
        algorithm="recurrent",
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        gate=gate,
        null_index=null_index,
    )
    tensors = Tensors(*given)
    problem, tensors = check_call(tensors, options)
    o, final_state, _ = _run(problem, tensors, backend, out, key, given)
    return o, final_state


def recurrent_kda(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
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
    r"""One step of decoding: one to eight tokens a sequence, from states in a pool to states in a pool.

    The recurrence of `chunk_kda` (Kimi Linear, arXiv 2510.26692, eq. 1), token by token in float32; a state in bfloat16 is
    read, updated in float32 and rounded once. Arguments as in FlashInfer's `recurrent_kda`, whose defaults these are: states
    V first, L2 norm on. No gradients. The call allocates nothing if `output` is given and `initial_state` receives the states,
    reads no tensor on the host, and can be captured in a CUDA graph and replayed with other indices and data.

    An index that is null (see `null_index`) or past the pool's end names no slot. A sequence whose start has no slot is null:
    its outputs are zero and it stores nothing. With `initial_state_source`, so is one whose first target has no slot.

    Args:
        q, k: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend); `K` a power of two up to 256; at
            most 8 tokens a sequence. Packed (`cu_seqlens`): `[1, tokens, H, K]`. Any strides, read in place if dense in K.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0`; `V` as `K`.
        g: `[B, T, HV, K]`, float32 or dtype of q: log decay per step (natural log), or the gate's input (see `gate`).
        beta: `[B, T, HV]`, float32 or dtype of q: write strength in `[0, 2)`, or its logit.
        mixed_qkv: `[tokens, 2 * H * K + HV * V]`, rows any distance apart: q, k and v of a token side by side, instead of
            them. `g` may then be `[tokens, HV * K]` and `beta` `[tokens, HV]`. Without `cu_seqlens` each row is a sequence
            (each `1 + num_spec_tokens` rows are one). HV, K and V are `initial_state`'s.
        A_log, dt_bias: the gate's parameters, as in `chunk_kda`.
        scale: factor on the output; `K ** -0.5` by default.
        initial_state: `[slots, HV, V, K]` (`[slots, HV, K, V]` without `state_v_first`), float32 or bfloat16: the pool, read
            and written in place. Dense inside a slot; slots may lie any pitch apart. Without `ssm_state_indices` sequence `n`
            has slot `n` of `N`. None: states start at zero and are dropped.
        output_final_state: return the states: `initial_state`, or without one a new float32 tensor `[N, HV, V, K]`.
        use_qk_l2norm_in_kernel: divide q and k rows by `sqrt(sum x^2 + 1e-6)` first.
        use_gate_in_kernel: g is the gate's input: `softplus` gate, or `lower_bound` gate if `lower_bound` is given.
        lower_bound: in `[-5, 0)`, the floor of the `lower_bound` gate.
        cu_seqlens: `[N + 1]` int32 or int64: token offsets of packed sequences (then `B == 1`), from 0, never falling. Lengths
            0 to 8 (to `1 + num_spec_tokens`); further tokens of a sequence are not looked at. A sequence without tokens leaves
            its slots alone. Rows of `o` of no sequence are undefined.
        ssm_state_indices: `[N]` int32 or int64: each sequence's slot. With `num_spec_tokens`, `[N, 1 + num_spec_tokens]`: the
            slot that receives the state after each token. Any strides. No two states may be stored to one slot.
        num_spec_tokens: `S` in 1 to 7: verify `1 + S` tokens a sequence (packed: up to) in one launch.
        num_accepted_tokens: `[N]` int32 or int64, with `num_spec_tokens`: the sequence starts from slot
            `ssm_state_indices[n, accepted - 1]`, the last accepted token's of the round before. A count outside `1 .. 1 + S`
            makes it null. None: 1 everywhere.
        output: `[B, T, HV, V]`, written and returned instead of a new `o`. Must not share memory with an input.
        initial_state_source, initial_state_indices: a second pool, only read, and `[N]` each sequence's slot there: sequences
            start from it, and `initial_state` only receives states.
        beta_is_logit: `sigmoid(beta)` is the write strength; with `allow_neg_eigval`, `2 sigmoid(beta)`.
        gate: names the gate directly: `"none"`, `"softplus"`, `"lower_bound"` or `"logsigmoid"`, as in `chunk_kda`.
        state_v_first: states are `[.., V, K]` (else `[.., K, V]`).
        null_index: which indices are null: `"negative"`, or `"non_positive"` (slot 0 is reserved).
        update_state: with False the pool is only read; `ssm_state_indices` is `[N]` then.
        intermediate_states: `[slots, 1 + S, HV, V, K]`, with `update_state=False` and `num_spec_tokens`: receives the state
            after each token, in row `intermediate_state_indices[n]` (`[N]`; by default the index the sequence starts from).
            `commit` brings the accepted one to the pool.
        backend: `"auto"`, `"triton"` or `"reference"`; see `explain`.

    Returns:
        `(o [B, T, HV, V], states or None)`; `o` has v's dtype. With `mixed_qkv` `o` is `[N, T, HV, V]`, or packed
        `[1, tokens, HV, V]`.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
    """
    given = (
        *(mixed_qkv, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, ssm_state_indices),
        *(num_accepted_tokens, initial_state_source, initial_state_indices),
        *(intermediate_states, intermediate_state_indices),
    )
    key, addresses = plans.key(
        (*given, output),
        (
            *("decode", scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound),
            *(num_spec_tokens, beta_is_logit, allow_neg_eigval, gate, state_v_first, null_index, update_state, backend),
        ),
    )
    plan = plans.find(key)
    if plan is not None:
        o, final_state = plan.run(given, output, addresses, _decode_refusal)
    else:
        options = Options(
            algorithm="decode",
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=beta_is_logit,
            allow_neg_eigval=allow_neg_eigval,
            lower_bound=lower_bound,
            state_v_first=state_v_first,
            gate=gate,
            null_index=null_index,
        )
        problem, tensors = check_decode(dict(zip(GIVEN, given)), options, num_spec_tokens, update_state)
        o, final_state, _ = _run(problem, tensors, backend, output, key, given, CALLED)
    return o, initial_state if output_final_state and initial_state is not None else final_state


def commit(
    initial_state: Tensor,
    intermediate_states: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    *,
    intermediate_state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    backend: str = "auto",
) -> None:
    """Brings the state after each sequence's last accepted token to the pool: the second half of a read-only verification
    (`recurrent_kda` with `update_state=False`).

    `initial_state[ssm_state_indices[n]] <- intermediate_states[row, num_accepted_tokens[n] - 1]`. A null index, one past the
    end, or a count outside `1 .. 1 + S` stores nothing. One launch, no allocation, nothing read on the host.

    Args:
        initial_state: `[slots, HV, V, K]` (or K first), the pool, written in place. Slots may lie any pitch apart.
        intermediate_states: `[rows, 1 + S, HV, V, K]`, the pool's dtype.
        ssm_state_indices: `[N]` int32 or int64: each sequence's slot. No two sequences may have the same.
        num_accepted_tokens: `[N]` int32 or int64.
        intermediate_state_indices: `[N]`: each sequence's row; by default its slot's index.
        null_index, backend: as in `recurrent_kda`.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
    """
    given = (initial_state, intermediate_states, ssm_state_indices, num_accepted_tokens, intermediate_state_indices)
    problem, t = check_commit(CommitTensors(*given), null_index)
    chosen = backends.choose(problem, t.initial_state.device, backend)
    if torch.compiler.is_compiling() or not all(map(is_plain, t.present().values())):
        torch.ops.flashdelta.kda_commit(*given, null_index, chosen.name)
    else:
        chosen.commit(problem, t)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    *,
    scale: float | None = None,
    gate: PrefillGate = "none",
    precision: Precision = DEFAULT_PRECISION,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Kimi Delta Attention over whole sequences in float32, head first, with the chunk form's `w` and `u` as results.

    The function of `chunk_kda`, from zero states. With `G` the sums of log decays inside a chunk of `C` tokens and `T` the
    inverse of docs/algorithm.md, `w = T (k exp(G))` and `u = T v`: what a caller needs to run the recurrence itself. Any decay
    is exact: none is formed as a quotient. Also `torch.ops.kda_prefill.forward`. No gradients.

    Args:
        q, k: `[B, H, T, K]`, float32, contiguous, as all inputs; no norm is taken.
        v: `[B, H, T, V]`.
        g: `[B, H, T, K]`: log decay per step (natural log, at most 0), or its logit (see `gate`).
        beta: `[B, H, T]`: write strength in `[0, 2)`.
        chunk_size: `C`. `(K, V, C)` is one of (64, 64, 32), (64, 64, 64), (128, 128, 32) and (128, 128, 64).
        scale: factor on the output; `K ** -0.5` by default.
        gate: `"none"`: g is the log decay. `"logsigmoid"`: the log decay is `log sigmoid(g)`.
        precision: of the matrix products. `"tf32x3"`: three TF32 products for each, 21 mantissa bits or more, on tensor
            cores. `"ieee"`: float32 throughout, without tensor cores.
        backend: as in `chunk_kda`; `"reference"` computes in PyTorch.

    Returns:
        `(o [B, H, T, V], w [B, H, Nc, C, K], u [B, H, Nc, C, V])` with `Nc = ceil(T / C)`, float32. Rows of `w` and `u` past
        the last token are zero.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
    """
    given = dict(zip(INPUTS, (q, k, v, g, beta)))
    if not torch.compiler.is_compiling() and all(map(is_plain, given.values())):
        return library.prefill(given, chunk_size, scale, gate, precision, backend)
    problem, _ = check_prefill(given, chunk_size, scale, gate, precision)
    chosen = backends.choose(problem.call, q.device, backend)
    return torch.ops.kda_prefill.forward(
        *given.values(), chunk_size, scale=scale, gate=gate, precision=precision, backend=chosen.name
    )


def _refusal(given: tuple, out: Tensor) -> None:
    check_overlap("out", out, _present(TENSOR_NAMES, given))


def _decode_refusal(given: tuple, output: Tensor) -> None:
    check_overlap("output", output, _present(GIVEN, given))


def _present(names: tuple[str, ...], given: tuple) -> dict[str, Tensor]:
    return {name: x for name, x in zip(names, given) if x is not None}


def _run(
    problem: Problem,
    t: Tensors,
    backend: str,
    out: Tensor | None,
    key: tuple | None,
    given: tuple,
    called: Mapping[str, str] = OWN_NAMES,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    check_out(out, t, problem.requires_grad, called)
    chosen = backends.choose(problem, t.q.device, backend)
    if not torch.compiler.is_compiling() and all(map(is_plain, t.present().values())):
        if problem.requires_grad:
            call = autograd.Call(problem, chosen, keep)
            plans.remember(key, call.repeating)
            return *call.run(given), None
        results = chosen.run(problem, t, out)
        plans.remember(key, lambda: chosen.plan(problem, t, given, out))
        return results
    # by name: inside the operator gradients are off, and "auto" might choose another backend than `explain` says
    return library.forward(problem, t, chosen.name, out)


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: `chosen` backend (None if none can run the call) and every backend's verdict; of `chunk_kda` on
    it, how many `segments` each sequence is cut into (None where the lengths can't be read)."""

    chosen: str | None
    verdicts: tuple[Verdict, ...]
    segments: tuple[int, ...] | None = None

    def __str__(self) -> str:
        lines = [f"runs on: {self.chosen or 'no backend'}"]
        if self.segments is not None:
            split = f"segments of the sequences: {', '.join(map(str, self.segments))}"
            lines.append("  " + (split if max(self.segments, default=1) > 1 else "sequences stay whole"))
        for v in self.verdicts:
            state = "preferred" if v.preferred else "supported, not preferred" if v.supported else "not supported"
            lines.append(f"  {v.backend:<10} {state}: {v.reason}")
        return "\n".join(lines)


def _check_operator(op: Callable) -> None:
    if op not in (chunk_kda, fused_recurrent_kda, recurrent_kda):
        names = "flashdelta.chunk_kda, flashdelta.fused_recurrent_kda or flashdelta.recurrent_kda"
        raise ValueError(f"op: got {op!r}, wanted {names}")


def explain(op: Callable, *arguments: object, device: torch.device | str | None = None, **named: object) -> Explanation:
    """Says which backend would run `op(*arguments, **named)`, and why each other one would not; of `chunk_kda` also how
    sequences would be split. Runs no kernel, but reads `cu_seqlens`.

    Args:
        op: `chunk_kda`, `fused_recurrent_kda` or `recurrent_kda`; the rest are that function's own arguments (an unknown
            one is a `TypeError`, as in a call).
        device: judge for this device instead of the tensors' own; the tensors may then be on the meta device.

    Returns:
        An `Explanation`; `print` it, or read `chosen`, `verdicts` (`supported`, `preferred`, `reason`) and `segments`.

    Raises:
        ValueError, TypeError: as `op` itself would.
    """
    _check_operator(op)
    bound = inspect.signature(op).bind(*arguments, **named)
    bound.apply_defaults()
    given = bound.arguments
    if op is recurrent_kda:
        problem, tensors = check_decode_arguments(given)
        check_out(given["output"], tensors, problem.requires_grad, CALLED)
    else:
        problem, tensors = check_arguments(given, "chunk" if op is chunk_kda else "recurrent")
        check_out(given["out"], tensors, problem.requires_grad)
    device = tensors.q.device if device is None else torch.device(device)
    verdicts = tuple(backends.judge(problem, device))
    name = given["backend"]
    if name == "auto" and not any(v.supported for v in verdicts):
        return Explanation(None, verdicts)
    chosen = backends.choose(problem, device, name)
    segments = None
    if op is chunk_kda and is_plain(tensors.q) and tensors.q.device.type == device.type != "meta":
        segments = tuple(chosen.parts(problem, chunks_of(problem, tensors), device).tolist())
    return Explanation(chosen.name, verdicts, segments)


def warmup(
    head_dims: Iterable[tuple[int, int]] = ((128, 128),),
    *,
    op: Callable = chunk_kda,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    packed: Iterable[bool] = (False, True),
    cu_seqlens_dtype: torch.dtype = torch.int32,
    initial_state: Iterable[bool] = (False, True),
    output_final_state: Iterable[bool] = (True,),
    state_pool: Iterable[bool] = (False,),
    has_initial_state: Iterable[bool] = (False, True),
    checkpoints: Iterable[bool] = (False,),
    state_indices_dtype: torch.dtype = torch.int32,
    speculative: bool = False,
    gate: GateName = "lower_bound",
    lower_bound: float | None = -5.0,
    dt_bias: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    device: torch.device | str = "cuda",
    backend: str = "auto",
) -> int:
    """Compiles what serving will need, so that no call compiles later. Blocks until the device is done.

    Kernels depend on head dimensions, dtypes and options, hardly ever on head counts, lengths, strides that are multiples of
    16, or batch size; so a tiny call of each combination below compiles all of it. The exceptions are called, too: one token
    a sequence is a kind of its own for `fused_recurrent_kda` and `recurrent_kda`, and there few sequences are another than
    many; for `chunk_kda` so many tokens for so few heads that sequences may be split are another kind, and on Hopper so many
    heads that they would leave many multiprocessors idle.

    Args:
        head_dims: pairs `(K, V)`.
        op: `chunk_kda`, `fused_recurrent_kda` or `recurrent_kda`. The last is called over a pool, with slots by index: options
            about initial and final states, flags and checkpoints do not count, `state_pool` does not either.
        dtype, g_dtype, beta_dtype, state_dtype: of q/k/v, g and beta (default: `dtype`), and the states.
        packed, initial_state, output_final_state: the values each may take; every combination is compiled.
        state_pool: whether calls pass one; `initial_state` and `output_final_state` then count for calls without one, and
            `has_initial_state` and `checkpoints` say whether those with one pass flags and checkpoints.
        cu_seqlens_dtype, state_indices_dtype: int32 or int64; the latter of the checkpoint tensors too.
        speculative: whether `recurrent_kda` also verifies speculative tokens, in place and read-only, and `commit`s.
        dt_bias: whether calls pass one.
        device: where to run.
        The others: as in `chunk_kda`; `gate="softplus"` wants `lower_bound=None`.

    Returns:
        The number of calls made.

    Raises:
        ValueError, TypeError: as `op` itself would.
    """
    _check_operator(op)
    calls = 0
    make = functools.partial(torch.zeros, device=device)

    def call(B: int, T: int, H: int, K: int, V: int, **states: object) -> None:
        nonlocal calls
        logit = "beta_is_logit" if op is recurrent_kda else "use_beta_sigmoid_in_kernel"
        op(
            make(B, T, H, K, dtype=dtype),
            make(B, T, H, K, dtype=dtype),
            make(B, T, H, V, dtype=dtype),
            make(B, T, H, K, dtype=g_dtype or dtype),
            make(B, T, H, dtype=beta_dtype or dtype),
            **states,
            **{logit: use_beta_sigmoid_in_kernel},
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            lower_bound=lower_bound,
            state_v_first=state_v_first,
            A_log=make(H) if gate in ("softplus", "lower_bound") else None,
            dt_bias=make(H, K) if dt_bias else None,
            gate=gate,
            backend=backend,
        )
        calls += 1

    plain = list(itertools.product(initial_state, output_final_state))
    pooled = list(itertools.product(has_initial_state, checkpoints))
    ways = [(is_pool, way) for is_pool in state_pool for way in (pooled if is_pool else plain)]
    if op is recurrent_kda:
        ways = [(True, None)]
    for (K, V), is_packed, (is_pool, way) in itertools.product(head_dims, packed, ways):
        for B, T, H, N in _warm_sizes(op, is_packed, V, torch.device(device)):
            rows = 1 if is_pool else N  # all sequences of a pool but the first are null: one slot is enough
            state = make((rows, H, V, K) if state_v_first else (rows, H, K, V), dtype=state_dtype)
            index = make(N, dtype=state_indices_dtype)
            index[1:] = -1
            offsets = torch.tensor([0, *[T] * N], dtype=cu_seqlens_dtype, device=device) if is_packed else None
            if op is recurrent_kda:
                states = {"initial_state": state, "ssm_state_indices": index}
            elif is_pool:
                has_flags, has_checkpoints = way
                states = {"state_pool": state, "state_indices": index}
                states |= {"has_initial_state": make(N, dtype=torch.bool)} if has_flags else {}
                states |= {"checkpoint_offsets": index, "checkpoint_indices": index} if has_checkpoints else {}
            else:
                has_state, final = way
                states = {"initial_state": state if has_state else None, "output_final_state": final}
            call(B, T, H, K, V, **states, cu_seqlens=offsets)
            if op is recurrent_kda and speculative and T > 1:
                _warm_verification(call, (B, T, H, K, V), state, index, offsets, backend)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return calls


WARM_MANY = 160
"""Sequences, of two heads each, that are many for every backend's launch parameters; also slices of 64 value channels that no
Hopper GPU can deal out to its multiprocessors without leaving many idle, for which `hopper` has a kernel of its own."""


WARM_LONG = (1, 8192, 2, 1)
"""Sizes as of `_warm_sizes`: a sequence that is split."""

WARM_LONG_BATCH = (1, 7168, 12, 14)
"""A batch with sequences that may be split, or else leave multiprocessors idle."""


def _warm_sizes(op: Callable, is_packed: bool, V: int, device: torch.device) -> list[tuple[int, int, int, int]]:
    """Batch, tokens, heads and sequences of the calls that `warmup` makes of one kind."""
    if op is chunk_kda:
        if device.type != "cuda":
            return [(1, 65, 2, 1)]
        long = [WARM_LONG, WARM_LONG_BATCH] if is_packed else [WARM_LONG]
        return [(1, 65, 2, 1), (1, 65, WARM_MANY * 64 // max(V, 64), 1), *long]
    several = (1, 2 if op is recurrent_kda else 65, 2, 1)
    return [several] if is_packed else [(1, 1, 2, 1), (WARM_MANY, 1, 2, WARM_MANY), several]


def _warm_verification(
    call: Callable,
    sizes: tuple[int, int, int, int, int],
    state: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    backend: str,
) -> None:
    """Of one sequence of two tokens: with counts of accepted ones and without, and read-only."""
    one, slots = torch.ones_like(index), torch.zeros_like(index).repeat(1, 2)
    slots[:, 1] = -1  # a slot may receive one state only
    tokens = {"num_spec_tokens": 1, "initial_state": state, "cu_seqlens": offsets}
    for accepted in (None, one):
        call(*sizes, **tokens, ssm_state_indices=slots, num_accepted_tokens=accepted)
    rows = state.new_zeros(1, 2, *state.shape[1:])
    for own in (None, index):
        states = {"intermediate_states": rows, "intermediate_state_indices": own}
        call(*sizes, **tokens, ssm_state_indices=index, update_state=False, **states)
        commit(state, rows, index, one, intermediate_state_indices=own, backend=backend)
