"""KDA in chunks, stage by stage, in PyTorch: what each kernel stage must compute.

With `C` tokens per chunk and `G = cumsum(g)` inside it (docs/algorithm.md derives this; the scale is in q):

    prepare     Akk     = strict_lower(beta_i <k_i, k_j exp(G_i - G_j)>)      [C, C]
                inverse = (I + Akk)^-1 diag(beta)                             [C, C]
                Aqk     = lower(<q_i, k_j exp(G_i - G_j)>)                    [C, C]
                w       = inverse (k exp(G))                                  [C, K]
                qg, kg  = q exp(G), k exp(G_C - G)                            [C, K]
                decay   = exp(G_C)                                            [K]
    recurrence  v_new   = inverse v - w S                                     [C, V]
                S      <- diag(decay) S + kg^T v_new                          [K, V]
    output      o       = qg S + Aqk v_new, with the S before                 [C, V]

Differentiable, for any device and dtype up to float64.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem.problem import ChunkProblem, ChunkTensors
from . import parallel
from .gate import elementwise_inputs
from .sequences import ChunkSlots, chunk_slots, lengths_of
from .states import states_in, states_out, store, store_final


@dataclass(frozen=True)
class Prepared:
    """Tiles that `prepare` leaves for `recurrence` and `output`, by chunk slot, batch row and value head.

    `w, qg, kg [S, B, HV, C, K]`; `inverse, Aqk [S, B, HV, C, C]`; `decay [S, B, HV, K]`.
    """

    w: Tensor
    qg: Tensor
    kg: Tensor
    inverse: Tensor
    Aqk: Tensor
    decay: Tensor


def to_chunks(x: Tensor, C: int, slots: ChunkSlots | None) -> Tensor:
    """`[B, T, HV, ...] -> [S, B, HV, C, ...]`, with zeros where a chunk has no token. With `slots`, those of all batch rows one
    after another: `[S, 1, HV, C, ...]`."""
    B, T = x.shape[:2]
    if slots is None:
        S = -(-T // C)
        x = torch.cat([x, x.new_zeros(B, S * C - T, *x.shape[2:])], dim=1).reshape(B, S, C, *x.shape[2:])
    else:
        valid = slots.valid.reshape(1, *slots.valid.shape, *[1] * (x.dim() - 2))
        x = torch.where(valid, x.flatten(0, 1)[None, slots.token], 0.0)
    return x.transpose(0, 1).transpose(2, 3)


def solve(system: Tensor, right: Tensor) -> Tensor:
    """`system^-1 right`, for a unit lower triangular system."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, solve: Callable[..., Tensor] = solve) -> Prepared:
    """`inverse = (I + Akk)^-1 diag(beta)`, `w = inverse (k exp(G))` and so on: stage `prepare`, parallel over chunks.

    Inputs are chunked, `[.., C, K]` and `beta [.., C]`; `solve(system, right)` forms `inverse`.
    """
    C = q.shape[-2]
    below = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(-1)
    # exp(G_i - G_j) for i >= j, the exponent summed for each pair on its own. A difference of two cumulative sums would
    # cancel where a step decays strongly, in value and in gradient, and be NaN for g = -inf (which forgets everything).
    pair = torch.where(below[..., None], g[..., :, None, :], 0.0).cumsum(-3).exp()
    weighted = pair * k[..., None, :, :]
    Akk = torch.einsum("...ik,...ijk->...ij", k, weighted).tril(-1) * beta[..., None]
    Aqk = torch.einsum("...ik,...ijk->...ij", q, weighted).tril()
    inverse = solve(torch.eye(C, dtype=q.dtype, device=q.device) + Akk, torch.diag_embed(beta))
    decayed = g.cumsum(-2).exp()
    w, qg, kg = inverse @ (k * decayed), q * decayed, k * pair[..., -1, :, :]
    return Prepared(w, qg, kg, inverse, Aqk, decay=decayed[..., -1, :])


def recur(p: Prepared, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Stage `recurrence`: `v_new = inverse v - w S` and `diag(decay) S + kg^T v_new`, from the state `S` before a chunk."""
    v_new = p.inverse @ v - p.w @ S
    return v_new, p.decay[..., None] * S + p.kg.transpose(-1, -2) @ v_new


def before_rank(problem: ChunkProblem, t: ChunkTensors, prepared: list[Prepared], v: Tensor, initial: Tensor) -> Tensor:
    """The initial states, with those that come from the ranks before."""
    packets, known = [], parallel.started_here(problem, t, initial)
    for n in parallel.outgoing(problem, t):
        M, b = parallel.identity(problem.HV, problem.K, problem.V, v)
        if prepared:
            slots = chunk_slots(problem, t)
            chunks = slice(int(slots.opening[n]), int(slots.opening[n] + slots.chunks[n]))
            for p, v_chunk in zip(prepared[chunks], v[chunks, 0]):
                M, b = (recur(p, values, S)[1][0] for values, S in ((torch.zeros_like(p.w), M), (v_chunk, b)))
        # where the sequence starts here, b is the state after it
        packets.append((M, M @ known[n] + b))
    return parallel.carried(problem, t, parallel.exchange(problem, t, packets, initial), initial)


def chunk_kda(problem: ChunkProblem, t: ChunkTensors) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`(o [B, T, HV, V], final_state or None, h or None)`; `h` holds the state before every chunk. With a pool, the final
    states go there, and the states at checkpoints there or to a buffer of their own."""
    C, empty = problem.chunk_size, problem.T == 0 or problem.N == 0
    cuts = problem.packed or problem.checkpoints > 0 or problem.ranks > 1
    slots = chunk_slots(problem, t) if cuts and not empty else None
    q, k, v, g, beta = elementwise_inputs(problem, t)
    initial = states_in(problem, t)
    q, k, v, g, beta = (to_chunks(x, C, slots) for x in (q, k, v, g, beta))
    S = initial if slots is None else initial.new_zeros(1, *initial.shape[1:])
    prepared: Iterable[Prepared] = (prepare(q[i], k[i], g[i], beta[i]) for i in range(0 if empty else q.shape[0]))
    if problem.ranks > 1:
        prepared = list(prepared)
        initial = before_rank(problem, t, prepared, v, initial)
    before, after, outputs = [], [], []
    for i, p in enumerate(prepared):
        if slots is not None:
            S = torch.where(slots.first[i], initial[slots.sequence[i]][None], S)
        before.append(S)
        v_new, new = recur(p, v[i], S)
        outputs.append(p.qg @ S + p.Aqk @ v_new)
        S = new
        after.append(S)
    if empty:
        o = t.v.new_zeros(t.v.shape, dtype=problem.output_dtype)
        o = o if problem.ranks == 1 else o + parallel.nothing(initial).to(o.dtype)
    else:
        o = from_chunks(torch.stack(outputs), problem, slots).to(problem.output_dtype)
    last = initial if empty else S
    if slots is not None and (problem.stores_final_state or problem.checkpoints > 0):
        states = torch.stack(after)[:, 0]
        last = states[slots.last]
        if t.checkpoint_indices is not None:
            reached = states[slots.reached].flatten(0, 1)
            buffer = t.state_pool if t.checkpoint_states is None else t.checkpoint_states
            store(problem, buffer, t.checkpoint_indices.flatten(), slots.stored.flatten(), reached)
    if problem.checkpoint_every > 0 and not empty:
        store(problem, t.checkpoint_states, *regular_checkpoints(problem, t, slots), torch.stack(before).flatten(0, 1))
    if problem.has_pool:
        store_final(problem, t, last)
    final = states_out(problem, last, problem.final_dtype) if problem.output_final_state else None
    if not problem.return_intermediate_states:
        return o, final, None
    none = initial.new_zeros(problem.B, problem.slots, *initial.shape[1:])
    h = none if empty else intermediate_states(problem, torch.stack(before), slots)
    return o, final, states_out(problem, h, problem.dtype)


def regular_checkpoints(problem: ChunkProblem, t: ChunkTensors, slots: ChunkSlots | None) -> tuple[Tensor, Tensor]:
    """The row of `checkpoint_states` for the state before the chunk of every slot, and batch row; and whether it goes there. A
    sequence's rows lie one after another, and so do the sequences'."""
    each = problem.checkpoint_every // problem.chunk_size
    rows = (lengths_of(problem, t) + problem.checkpoint_every - 1) // problem.checkpoint_every
    before = rows.cumsum(0) - rows
    if slots is None:
        chunk = torch.arange(problem.slots, device=rows.device)[:, None]
        first, used = before, torch.ones_like(rows, dtype=torch.bool)
    else:
        chunk = torch.arange(problem.B * problem.slots, device=rows.device) - slots.opening[slots.sequence]
        first, used = before[slots.sequence], slots.valid.any(-1)
    return (first + chunk // each).flatten(), (used & (chunk % each == 0)).flatten()


def from_chunks(o: Tensor, problem: ChunkProblem, slots: ChunkSlots | None) -> Tensor:
    """`[S, B, HV, C, V] -> [B, T, HV, V]`, for any `V`; zeros for tokens of no sequence."""
    o = o.transpose(2, 3).transpose(0, 1)
    _, S, C, _, V = o.shape
    if slots is None:
        return o.reshape(problem.B, S * C, problem.HV, V)[:, : problem.T].contiguous()
    # one row past the end takes what the invalid tokens of a chunk would write
    shape, tokens = (problem.B, problem.T, problem.HV, V), problem.B * problem.T
    index = torch.where(slots.valid, slots.token, tokens).reshape(-1)
    flat = o.reshape(S * C, problem.HV, V)
    return flat.new_zeros(tokens + 1, problem.HV, V).index_copy(0, index, flat)[:tokens].view(shape)


def intermediate_states(problem: ChunkProblem, before: Tensor, slots: ChunkSlots | None) -> Tensor:
    """The state before every chunk, `[S, B, HV, K, V] -> [B, NT, HV, K, V]`.

    Packed: `NT` is the bound `T // C + N (1 + M)`, the chunks of all sequences lie one after another without gaps, and the rows
    past the last chunk are zero.
    """
    if slots is not None and not problem.packed:
        # the slots of batch rows follow one another
        before = torch.where(slots.valid.any(-1).view(-1, *[1] * (before.dim() - 1)), before, 0.0)
        return before[:, 0].unflatten(0, (problem.B, problem.slots))
    if slots is not None:
        used = slots.valid.any(-1)
        # used slots keep their order; unused ones go to a row past the end
        row = torch.where(used, used.long().cumsum(0) - 1, problem.slots)
        before = before.new_zeros(problem.slots + 1, *before.shape[1:]).index_copy(0, row, before)[:-1]
    return before.transpose(0, 1)
