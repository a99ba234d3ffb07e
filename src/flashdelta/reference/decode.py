"""The definition of KDA, the token-by-token recurrence, and of the stage `decode`, from a slot of a pool to slots of a pool.

For each sequence, token after token (docs/decode.md):

    S  <- diag(exp(g_t)) S
    S  <- S + beta_t k_t (v_t - k_t^T S)
    o_t = scale * q_t^T S

(Kimi Linear, arXiv 2510.26692, eq. 1, with the decay per key channel.) In float64 this is the truth every kernel is measured
against. In a step of decoding a sequence starts from the state its start index names and is null if that index names none:
its outputs are zero and it stores nothing. Nothing is stored of one with more than `Problem.most_tokens` tokens either. Runs
on any device up to float64 and never waits for one.
"""

import torch
from torch import Tensor

from ..problem.problem import CommitProblem, CommitTensors, StepProblem, StepTensors, record_counts
from .gate import elementwise_inputs
from .sequences import few_tokens, offsets_of
from .states import from_layout, gathered, named_slots, states_in, states_out, store, store_final, store_rows


def decode_kda(problem: StepProblem, t: StepTensors) -> tuple[Tensor, Tensor | None, None]:
    """`(o [B, T, HV, V], final_state or None, None)`; states go to the pool or to `intermediate_states`."""
    q, k, v, g, beta = (x.flatten(0, 1) for x in elementwise_inputs(problem, t))  # [B * T, ...]
    decay = g.exp()
    begins, lengths = offsets_of(problem, t)[:-1], few_tokens(problem, t)
    S, live, index = _starts(problem, t)
    recurrent = problem.operation == "recurrent"  # any number of tokens, and no sequence is null
    rows = index if t.intermediate_indices is None else t.intermediate_indices
    outputs = []
    if problem.has_records:
        counts = record_counts(problem, t.intermediate_states)
        store_rows(counts, rows, live, lengths.to(counts.dtype)[:, None, None].expand(-1, *counts.shape[1:]))
    most = int(lengths.max()) if recurrent and lengths.is_cpu and problem.N > 0 else problem.most_tokens
    for i in range(min(problem.T, most) if problem.N > 0 else 0):
        at = (begins + i).clamp(max=len(v) - 1)  # [N]
        inside = live & (i < lengths)
        decayed = decay[at][..., None] * S
        correction = beta[at][..., None] * (v[at] - torch.einsum("nhk,nhkv->nhv", k[at], decayed))
        updated = decayed + k[at][..., None] * correction[:, :, None, :]
        S = torch.where(inside[:, None, None, None], updated, S)
        outputs.append(torch.where(inside[:, None, None], torch.einsum("nhk,nhkv->nhv", q[at], S), 0.0))
        if t.intermediate_states is not None and problem.has_records:
            for part, x in zip(record_parts(problem, t.intermediate_states[:, i]), (decay[at], k[at], correction)):
                store_rows(part, rows, inside, x.to(part.dtype))
        elif t.intermediate_states is not None:
            store(problem, t.intermediate_states[:, i], rows, inside, S)
        elif t.state_indices is not None and problem.stores_each_state:
            store(problem, t.state_pool, t.state_indices[:, i], inside, S)
    if recurrent and problem.has_pool:
        store_final(problem, t, S)
    elif problem.has_pool and problem.update_state and not problem.stores_each_state:
        own = torch.arange(problem.N, device=S.device) if t.state_indices is None else t.state_indices
        store(problem, t.state_pool, own, live & (lengths > 0), S)
    final = states_out(problem, S, problem.final_dtype) if problem.output_final_state else None
    return _by_token(problem, t, begins, lengths, outputs).to(problem.output_dtype), final, None


def _starts(problem: StepProblem, t: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
    """The states `[N, HV, K, V]` where sequences start, whether there is one `[N]`, and the index `[N]` it was read at."""
    live, own = torch.ones(problem.N, dtype=torch.bool, device=t.v.device), torch.arange(problem.N, device=t.v.device)
    if problem.operation == "recurrent" or (t.state_pool is None and t.source_pool is None):
        return states_in(problem, t), live, own
    if t.source_pool is None and t.state_indices is None:
        return from_layout(problem, t.state_pool), live, own
    pool, index = (t.state_pool, t.state_indices) if t.source_pool is None else (t.source_pool, t.source_indices)
    if t.source_pool is not None and problem.update_state and t.state_indices is not None:
        first = t.state_indices if t.state_indices.dim() == 1 else t.state_indices[:, 0]
        live = named_slots(first, t.state_pool)[1]
    assert index is not None
    if index.dim() == 2:
        accepted = live.long() if t.num_accepted_tokens is None else t.num_accepted_tokens.long()
        live = (accepted >= 1) & (accepted <= problem.most_tokens)
        index = index.gather(1, torch.where(live, accepted - 1, 0)[:, None])[:, 0]
    live = live & named_slots(index, pool)[1]
    return from_layout(problem, gathered(pool, index, live)), live, index


def record_parts(problem: StepProblem | CommitProblem, records: Tensor) -> tuple[Tensor, ...]:
    """`exp(g)`, `k` and `v_new` of replay records `[.., record_width]`, as views."""
    sizes = [problem.K, problem.K, problem.V]
    return records[..., : sum(sizes)].split(sizes, dim=-1)


def _by_token(problem: StepProblem, t: StepTensors, begins: Tensor, lengths: Tensor, outputs: list[Tensor]) -> Tensor:
    """`o [B, T, HV, V]` from the outputs of the sequences' first, second, ... tokens; zeros for tokens of none."""
    if not outputs:
        return torch.zeros(t.v.shape, dtype=torch.float32, device=t.v.device)
    token = torch.arange(problem.B * problem.T, device=begins.device)
    sequence = (torch.searchsorted(begins, token, right=True) - 1).clamp(0, problem.N - 1)
    i = token - begins[sequence]
    covered = (i >= 0) & (i < lengths[sequence])
    o = torch.stack(outputs, dim=1)[sequence, i.clamp(0, len(outputs) - 1)]
    return torch.where(covered[:, None, None], o, 0.0).view(t.v.shape)


def commit(problem: CommitProblem, t: CommitTensors) -> dict[str, Tensor]:
    """`pool[slot_n] <- intermediate[row_n, accepted_n - 1]` for every `n` whose indices and count name a state. For a replay
    buffer that is the slot's state after the first `accepted_n` tokens recorded in the row, which is empty then."""
    states, accepted = t.intermediate_states, t.num_accepted_tokens.long()
    if problem.rows == 0 or states.shape[1] == 0:
        return {}
    rows = t.state_indices if t.intermediate_indices is None else t.intermediate_indices
    row, named = named_slots(rows, states)
    known = named & (accepted >= 1) & (accepted <= problem.most_tokens)
    if not problem.has_records:
        store_rows(t.state_pool, t.state_indices, known, states[row, (accepted - 1).clamp(0, problem.most_tokens - 1)])
        return {}
    counts = record_counts(problem, states)
    known &= accepted <= counts[row].flatten(1).amin(1)
    verified = named & named_slots(t.state_indices, t.state_pool)[1]
    S = from_layout(problem, gathered(t.state_pool, t.state_indices, known))
    for i in range(problem.most_tokens):
        decay, k, v_new = record_parts(problem, states[row, i])
        updated = decay[..., None] * S + k[..., None] * v_new[..., None, :]
        S = torch.where((i < accepted)[:, None, None, None], updated, S)
    store(problem, t.state_pool, t.state_indices, known, S)
    store_rows(counts, rows, verified, torch.zeros_like(counts[row]))
    return {}
