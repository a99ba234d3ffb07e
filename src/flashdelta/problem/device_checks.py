"""Checks of the values of tensors: FLASHDELTA_CHECK=1 reads them on the host (a synchronisation).

Without it a call on a GPU reads none of them, and bad values lead nowhere outside the tensors. On a CPU reading costs nothing:
offsets, indices and counts are always checked there, and only log decays are not. The variable is read once, when the package
is imported, and a change after that does nothing: asking the environment at every call costs 0.8 us, a flag 0.02 us.
`flashdelta doctor` says which it is.
"""

import itertools
import os
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import has_address
from .errors import rule, wrong
from .problem import (
    AttentionProblem,
    CommitProblem,
    ConvolutionProblem,
    PoolProblem,
    Problem,
    SequenceProblem,
    StepProblem,
    Tensors,
    WyProblem,
    record_counts,
)
from .switches import is_on

LOWEST_DECAY = -5.0
"""The least of `lower_bound`, and what `safe_gate` promises. Below it a 16-token block may decay by more than exp(80), which
float32 cannot hold as a quotient."""

ENABLED = is_on("FLASHDELTA_CHECK", False)

ON_CPU = os.environ.get("TRITON_INTERPRET") != "1"
"""Always checks calls on a CPU. Triton's interpreter shows what kernels do on a GPU."""

NameOf = Callable[[str], str]
"""The caller's name of a role."""

Found = Mapping[str, Tensor]


def enabled() -> bool:
    return ENABLED and not torch.compiler.is_compiling()


def due(t: Tensors, dry: bool) -> bool:
    """True if the values of a call's tensors are to be checked. A `dry` check reads nothing on a GPU."""
    if torch.compiler.is_compiling():
        return False
    return (ENABLED and not dry) or (ON_CPU and t.device.type == "cpu" and all(map(has_address, t.present().values())))


def check(problem: Problem, t: Tensors, name_of: NameOf, on_host: object = None) -> None:
    """Every index must be null or name a slot, no slot may be written twice, and checkpoints and counts must be possible; if
    `ENABLED`, log decays too. `on_host`: the offsets that the host has of `cu_seqlens`."""
    if not isinstance(problem, PoolProblem):
        return
    found = t.present()
    lengths = _check_lengths(problem, found, on_host)
    pool = _Claims(problem.lowest_index, problem.pool_slots)
    if isinstance(problem, StepProblem) and "num_accepted_tokens" in found:
        for count, length in zip(found["num_accepted_tokens"].tolist(), lengths):
            if length > 0 and not 1 <= count <= problem.most_tokens:
                raise wrong("num_accepted_tokens", count, f"from 1 to {problem.most_tokens}")
    if "state_indices" in found and problem.N > 0:
        stores = not isinstance(problem, StepProblem) or problem.update_state
        for row, length in zip(found["state_indices"].reshape(problem.N, -1).tolist(), lengths):
            for i, index in enumerate(row):
                pool.claim(name_of("state_indices"), index, stores and length > (i if len(row) > 1 else 0))
    if "source_indices" in found:
        source = _Claims(problem.lowest_index, found["source_pool"].shape[0])
        for index in found["source_indices"].tolist():
            source.claim(name_of("source_indices"), index, stored=False)
    if isinstance(problem, (StepProblem, CommitProblem)) and "intermediate_states" in found:
        _check_rows(problem, found, lengths, name_of)
    if isinstance(problem, SequenceProblem):
        _check_checkpoints(problem, found, lengths, pool)
    if ENABLED and isinstance(problem, AttentionProblem):
        _check_decays(problem, found, lengths, name_of("g"))


def _check_decays(problem: AttentionProblem, found: Found, lengths: list[int], name: str) -> None:
    """Checks tokens of sequences that are not null. A NaN passes: it stays in its sequence."""
    if problem.gate not in ("none", "logsigmoid"):
        return
    live = torch.ones(problem.N, dtype=torch.bool, device="cpu")
    starts = found.get("source_indices", found.get("state_indices"))
    if isinstance(problem, StepProblem) and problem.operation != "recurrent" and starts is not None:
        live = (starts.reshape(problem.N, -1)[:, 0] >= problem.lowest_index).cpu()
    g = found["g"].flatten(0, 1)[: sum(lengths)]
    g = g[live.repeat_interleave(torch.tensor(lengths, device="cpu")).to(g.device)].float()
    decays = F.logsigmoid(g) if problem.gate == "logsigmoid" else g
    if bool((decays > 0).any()):
        wanted = "of log decays at most 0 (a gate makes them of other inputs; see gate)"
        raise wrong(name, f"{decays[decays > 0].max():.4g}", wanted)
    if problem.safe_gate and bool((decays < LOWEST_DECAY).any()):
        wanted = "of log decays in [-5, 0], as safe_gate promises"
        raise wrong(name, f"{decays[decays < LOWEST_DECAY].min():.4g}", wanted)


def check_offsets(offsets: list[int], most: int, wanted: str) -> None:
    """Checks the values of `cu_seqlens`; the last is at most `most`, which is `wanted`."""
    rule("cu_seqlens", offsets[0] == 0, "offsets from 0 on", f"first offset {offsets[0]}")
    for a, b in itertools.pairwise(offsets):
        if b < a:
            raise wrong("cu_seqlens", f"{a} then {b}", "non-decreasing")
    rule("cu_seqlens", offsets[-1] <= most, f"at most {wanted}", f"last offset {offsets[-1]}")


def _check_lengths(problem: PoolProblem, found: Found, on_host: object) -> list[int]:
    """Checks the lengths of the sequences and returns them; a commit's have as many tokens as its rows."""
    if not isinstance(problem, SequenceProblem):
        return [2**31] * problem.N
    if "cu_seqlens" not in found:
        return [problem.T] * problem.N
    offsets = found["cu_seqlens"].tolist()
    check_offsets(offsets, problem.T, f"T = {problem.T}")
    if isinstance(on_host, Tensor) and on_host.tolist() != offsets:
        raise wrong("cu_seqlens_cpu", on_host.tolist()[:8], f"equal to cu_seqlens {offsets[:8]}")
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    most, limit = max(lengths, default=0), problem.most_tokens
    rule("cu_seqlens", most <= limit, f"of at most {limit} tokens per sequence", f"a sequence of {most}")
    if isinstance(problem, WyProblem):
        chunks = sum(-(-length // problem.chunk_size) for length in lengths)
        rule("h", chunks <= problem.rows, f"of a row for each of the {chunks} chunks", f"{problem.rows} rows")
    return lengths


class _Claims:
    """Slots that a call names, or rows: none may be written twice, and none past the end."""

    def __init__(self, lowest: int, slots: int, unit: str = "slots"):
        self.lowest, self.slots, self.unit = lowest, slots, unit
        self.written: set[int] = set()

    def claim(self, argument: str, index: int, stored: bool) -> None:
        if index >= self.slots:
            raise wrong(argument, index, f"below {self.slots}, the number of {self.unit}")
        if index < self.lowest or not stored:
            return
        if index in self.written:
            raise wrong(argument, f"duplicate index {index}", f"distinct: each state needs {self.unit} of its own")
        self.written.add(index)


def _check_rows(problem: StepProblem | CommitProblem, found: Found, lengths: list[int], name_of: NameOf) -> None:
    """Checks the rows of `intermediate_states`: no row may be written twice, nor may more tokens be accepted than a row has."""
    prefix = "source" if "source_pool" in found else "state"
    role, slots, given = f"{prefix}_indices", found[f"{prefix}_pool"].shape[0], found.get(f"{prefix}_indices")
    starts = [*range(problem.N)] if given is None else given.tolist()
    lowest = 0 if given is None else problem.lowest_index
    rows, lowest_row = starts, lowest
    if "intermediate_indices" in found:  # null only below 0
        role, rows, lowest_row = "intermediate_indices", found["intermediate_indices"].tolist(), 0
    claims = _Claims(lowest_row, problem.rows, "rows")
    counts = found["num_accepted_tokens"].tolist() if isinstance(problem, CommitProblem) else None
    for n, (start, row) in enumerate(zip(starts, rows)):
        live = lowest <= start < slots
        # a commit empties the records that it names
        written = problem.has_records or (counts is None and lengths[n] > 0)
        claims.claim(name_of(role), row, stored=live and written)
        if counts is not None and live and row >= lowest_row:
            has, what = problem.most_tokens, f"the {problem.most_tokens} tokens of a row"
            if problem.has_records:
                has = int(record_counts(problem, found["intermediate_states"])[row].min())
                what = f"the {has} tokens that row {row} has recorded"
            if counts[n] > has:
                raise wrong("num_accepted_tokens", counts[n], f"at most {what}")


def _check_checkpoints(problem: SequenceProblem, found: Found, lengths: list[int], pool: _Claims) -> None:
    rows, every = problem.checkpoint_rows, problem.checkpoint_every
    if rows is not None:
        pool = _Claims(0, rows, "rows")
        needed = sum(-(-length // every) for length in lengths) if every > 0 else 0
        rule("checkpoint_states", needed <= rows, f"of a row for each of the {needed} checkpoints", f"{rows} rows")
    if "checkpoint_offsets" not in found:
        return
    multiple = 1 if isinstance(problem, ConvolutionProblem) else 16
    for n, length in enumerate(lengths):
        before = 0
        for offset, slot in zip(found["checkpoint_offsets"][n].tolist(), found["checkpoint_indices"][n].tolist()):
            if offset == 0:
                continue
            name, got = "checkpoint_offsets", f"{f'{before} then ' if before else ''}{offset} for sequence {n}"
            fits = offset % multiple == 0 or offset == length  # where the sequence ends nothing is cut
            rule(name, fits, f"multiples of {multiple}", got)
            rule(name, offset > before, "positive, strictly increasing offsets per sequence", got)
            rule(name, offset <= length, f"at most the sequence's {length} tokens", got)
            before = offset
            pool.claim("checkpoint_indices", slot, length > 0)
