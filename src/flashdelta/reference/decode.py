"""The definition of the stage `decode`: the token recurrence from a slot of a pool to slots of a pool.

For each sequence, token after token (docs/decode.md):

    S  <- diag(exp(g_t)) S
    S  <- S + beta_t k_t (v_t - k_t^T S)
    o_t = scale * q_t^T S

A sequence starts from the state its start index names and is null if that index names none: its outputs are zero and it
stores nothing. Nothing is stored of one with more than `Problem.most_tokens` tokens either. Runs on any device up to float64
and never waits for one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..problem.problem import CommitProblem, CommitTensors, PoolProblem, StepProblem, StepTensors, record_counts
from .gate import elementwise_inputs
from .sequences import few_tokens, offsets_of
from .states import from_layout, gathered, named_slots, states_in, states_out, store, store_rows


@dataclass(frozen=True)
class Starts:
    """Where sequences start: `states [N, HV, K, V]`, whether there is one (`live [N]`), the `index [N]` it was read at, and the
    `rule` by which an index is null."""

    states: torch.Tensor
    live: torch.Tensor
    index: torch.Tensor
    rule: PoolProblem


def decode_kda(problem: StepProblem, t: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """`(o [B, T, HV, V], final_state or None, None)`; states go to the pool or to `intermediate_states`."""
    q, k, v, g, beta = (x.flatten(0, 1) for x in elementwise_inputs(problem, t))  # [B * T, ...]
    decay = g.exp()
    begins, lengths = offsets_of(problem, t)[:-1], few_tokens(problem, t)
    starts = _starts(problem, t)
    S, outputs = starts.states, []
    if problem.has_records:
        _record_counts(problem, t, starts, lengths)
    for i in range(min(problem.T, problem.most_tokens) if problem.N > 0 else 0):
        at = (begins + i).clamp(max=len(v) - 1)  # [N]
        inside = starts.live & (i < lengths)
        decayed = decay[at][..., None] * S
        correction = beta[at][..., None] * (v[at] - torch.einsum("nhk,nhkv->nhv", k[at], decayed))
        updated = decayed + k[at][..., None] * correction[:, :, None, :]
        S = torch.where(inside[:, None, None, None], updated, S)
        o = torch.einsum("nhk,nhkv->nhv", q[at], S)
        outputs.append(torch.where(inside[:, None, None], o, 0.0))
        if problem.has_records:
            _record(problem, t, starts, i, inside, (decay[at], k[at], correction))
        elif problem.stores_each_state:
            _store_after(problem, t, starts, i, inside, S)
    if problem.has_pool and problem.update_state and not problem.stores_each_state:
        rule, index = own_slots(problem, t) if t.state_indices is None else (problem, t.state_indices)
        store(rule, t.state_pool, index, starts.live & (lengths > 0), S)
    final = states_out(problem, S, problem.state_dtype) if problem.output_final_state else None
    return _by_token(problem, t, begins, lengths, outputs).to(problem.output_dtype), final, None


def own_slots(problem: StepProblem, t: StepTensors) -> tuple[StepProblem, torch.Tensor]:
    """Slot `n` for sequence `n`, and a rule by which none of them is null."""
    return replace(problem, null_index="negative"), torch.arange(problem.N, device=t.v.device)


def any_row(problem: PoolProblem) -> PoolProblem:
    """A rule by which rows of a scratch buffer are null only below 0."""
    return replace(problem, null_index="negative")


def _starts(problem: StepProblem, t: StepTensors) -> Starts:
    everywhere = torch.ones(problem.N, dtype=torch.bool, device=t.v.device)
    if t.source_pool is not None:
        pool, index = t.source_pool, t.source_indices
        live = named_slots(problem, index, pool)[1]
        if problem.update_state and t.state_indices is not None:
            first = t.state_indices if t.state_indices.dim() == 1 else t.state_indices[:, 0]
            live = live & named_slots(problem, first, t.state_pool)[1]
    elif t.state_indices is not None:
        pool, index, known = t.state_pool, t.state_indices, everywhere
        if index.dim() == 2:
            accepted = everywhere.long() if t.num_accepted_tokens is None else t.num_accepted_tokens.long()
            known = (accepted >= 1) & (accepted <= problem.most_tokens)
            index = index.gather(1, torch.where(known, accepted - 1, 0)[:, None])[:, 0]
        live = known & named_slots(problem, index, pool)[1]
    else:
        states = states_in(problem, t) if t.state_pool is None else from_layout(problem, t.state_pool)
        rule, own = own_slots(problem, t)
        return Starts(states, everywhere, own, rule)
    return Starts(from_layout(problem, gathered(problem, pool, index, live)), live, index, problem)


def _store_after(
    problem: StepProblem, t: StepTensors, starts: Starts, i: int, inside: torch.Tensor, S: torch.Tensor
) -> None:
    """Stores the states after the `i`-th token of the sequences that have one."""
    if t.intermediate_states is not None:
        rule, rows = _row(problem, t, starts)
        store_rows(rule, t.intermediate_states[:, i], rows, inside, states_out(problem, S, t.intermediate_states.dtype))
    else:
        assert t.state_indices is not None
        store(problem, t.state_pool, t.state_indices[:, i], inside, S)


def _row(problem: StepProblem, t: StepTensors, starts: Starts) -> tuple[PoolProblem, torch.Tensor]:
    """The rows of `intermediate_states`, and the rule by which they are null."""
    if t.intermediate_indices is not None:
        return any_row(problem), t.intermediate_indices
    return starts.rule, starts.index


def _record_counts(problem: StepProblem, t: StepTensors, starts: Starts, lengths: torch.Tensor) -> None:
    """How many tokens of each sequence its row will hold."""
    counts = record_counts(problem, t.intermediate_states)
    values = lengths.to(counts.dtype)[:, None, None].expand(-1, *counts.shape[1:])
    rule, rows = _row(problem, t, starts)
    store_rows(rule, counts, rows, starts.live, values)


def _record(
    problem: StepProblem, t: StepTensors, starts: Starts, i: int, inside: torch.Tensor, token: tuple[torch.Tensor, ...]
) -> None:
    """Stores what the `i`-th token changes: `exp(g)`, `k` and `v_new`."""
    assert t.intermediate_states is not None
    rule, rows = _row(problem, t, starts)
    for part, values in zip(record_parts(problem, t.intermediate_states[:, i]), token):
        store_rows(rule, part, rows, inside, values.to(part.dtype))


def record_parts(problem: StepProblem | CommitProblem, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`exp(g)`, `k` and `v_new` of replay records `[.., record_width]`, as views."""
    sizes = [problem.K, problem.K, problem.V]
    return records[..., : sum(sizes)].split(sizes, dim=-1)


def _by_token(
    problem: StepProblem, t: StepTensors, begins: torch.Tensor, lengths: torch.Tensor, outputs: list[torch.Tensor]
) -> torch.Tensor:
    """`o [B, T, HV, V]` from the outputs of the sequences' first, second, ... tokens; zeros for tokens of none."""
    if not outputs:
        return torch.zeros(t.v.shape, dtype=torch.float32, device=t.v.device)
    token = torch.arange(problem.B * problem.T, device=begins.device)
    sequence = (torch.searchsorted(begins, token, right=True) - 1).clamp(0, problem.N - 1)
    i = token - begins[sequence]
    covered = (i >= 0) & (i < lengths[sequence])
    o = torch.stack(outputs, dim=1)[sequence, i.clamp(0, len(outputs) - 1)]
    return torch.where(covered[:, None, None], o, 0.0).view(t.v.shape)


def commit(problem: CommitProblem, t: CommitTensors) -> dict[str, torch.Tensor]:
    """`pool[slot_n] <- intermediate[row_n, accepted_n - 1]` for every `n` whose indices and count name a state. Of a replay
    buffer that is the slot's state after the first `accepted_n` tokens recorded in the row, which is empty then."""
    states, accepted = t.intermediate_states, t.num_accepted_tokens.long()
    if problem.rows == 0 or states.shape[1] == 0:
        return {}
    own = t.intermediate_indices is not None
    rule, rows = (any_row(problem), t.intermediate_indices) if own else (problem, t.state_indices)
    row, named = named_slots(rule, rows, states)
    known = named & (accepted >= 1) & (accepted <= problem.most_tokens)
    if problem.has_records:
        counts = record_counts(problem, states)
        known &= accepted <= counts[row].flatten(1).amin(1)
        verified = named & named_slots(problem, t.state_indices, t.state_pool)[1]
        S = from_layout(problem, gathered(problem, t.state_pool, t.state_indices, known))
        for i in range(problem.most_tokens):
            decay, k, v_new = record_parts(problem, states[row, i])
            updated = decay[..., None] * S + k[..., None] * v_new[..., None, :]
            S = torch.where((i < accepted)[:, None, None, None], updated, S)
        store(problem, t.state_pool, t.state_indices, known, S)
        store_rows(rule, counts, rows, verified, torch.zeros_like(counts[row]))
        return {}
    values = states[row, (accepted - 1).clamp(0, problem.most_tokens - 1)]
    store_rows(problem, t.state_pool, t.state_indices, known, values)
    return {}
