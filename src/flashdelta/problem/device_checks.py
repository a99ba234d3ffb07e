"""Checks of the values of tensors: FLASHDELTA_CHECK=1 reads them on the host (a synchronisation).

Without it a call on a GPU reads none of them, and bad values lead nowhere outside the tensors. On a CPU reading costs nothing:
offsets and slots are always checked there. The variable is read once, when the package is imported, and a change after that
does nothing: asking the environment at every call costs 0.8 us, a flag 0.02 us. `flashdelta doctor` says which it is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .errors import wrong
from .problem import Problem, Tensors, record_counts
from .switches import is_on

CHECKPOINT_MULTIPLE = 16

LOWEST_DECAY = -5.0
"""That `safe_gate` promises."""

ENABLED = is_on("FLASHDELTA_CHECK", False)

ON_CPU = os.environ.get("TRITON_INTERPRET") != "1"
"""Turns `check_on_cpu` on. Triton's interpreter shows what kernels do on a GPU."""

NameOf = Callable[[str], str]
"""The caller's name of a role."""


def enabled() -> bool:
    return ENABLED and not torch.compiler.is_compiling()


def check_on_cpu(t: Tensors, name_of: NameOf) -> None:
    """Offsets must be in order and within the tokens, and indices within the pool."""
    if t.cu_seqlens is not None:
        _check_offsets(t.cu_seqlens.tolist(), t.first.shape[1])
    pools = {"state_indices": t.state_pool, "source_indices": t.source_pool}
    for role, pool in (pools | {"intermediate_indices": t.intermediate_states}).items():
        indices = getattr(t, role)
        if indices is not None and pool is not None and indices.numel() > 0:
            of = ("pool's", "slots") if role in pools else ("buffer's", "rows")
            _check_slot(name_of(role), int(indices.max()), pool.shape[0], *of)


def check(problem: Problem, t: Tensors, name_of: NameOf, on_host: torch.Tensor | None = None) -> None:
    """Every index must be null or name a slot, no slot may be written twice, and checkpoints and counts must be possible.
    `on_host`: the offsets that the host has of `cu_seqlens`."""
    if t.cu_seqlens is not None:
        _check_offsets(t.cu_seqlens.tolist(), problem.T)
        _check_lengths(t.cu_seqlens.tolist(), problem)
        if on_host is not None and on_host.tolist() != t.cu_seqlens.tolist():
            raise wrong("cu_seqlens_cpu", f"{on_host.tolist()[:8]}", f"cu_seqlens' offsets {t.cu_seqlens.tolist()[:8]}")
    lengths = [problem.T] * problem.N if t.cu_seqlens is None else t.cu_seqlens.diff().tolist()
    pool = _Claims(problem.lowest_index, problem.pool_slots)
    if t.num_accepted_tokens is not None:
        _check_counts(t.num_accepted_tokens, lengths, problem)
    if t.state_indices is not None:
        rows = t.state_indices.reshape(problem.N, -1).tolist() if problem.N else []
        for row, length in zip(rows, lengths):
            for i, index in enumerate(row):
                stored = problem.update_state and (i < length if len(row) > 1 else length > 0)
                pool.claim(name_of("state_indices"), index, stored or problem.operation == "commit")
    if t.source_pool is not None and t.source_indices is not None:
        source = _Claims(problem.lowest_index, t.source_pool.shape[0])
        for index in t.source_indices.tolist():
            source.claim(name_of("source_indices"), index, stored=False)
    if problem.has_intermediate:
        _check_rows(problem, t, lengths, name_of)
    buffer = None if problem.checkpoint_rows is None else _Claims(0, problem.checkpoint_rows, "buffer's", "rows")
    if t.checkpoint_offsets is not None and t.checkpoint_indices is not None:
        multiple = 1 if problem.operation == "short_convolution" else CHECKPOINT_MULTIPLE
        _check_checkpoints(t.checkpoint_offsets, t.checkpoint_indices, lengths, buffer or pool, multiple)
    if problem.checkpoint_every > 0 and problem.checkpoint_rows is not None:
        rows = sum(-(-length // problem.checkpoint_every) for length in lengths)
        if rows > problem.checkpoint_rows:
            wanted = f"one for each of the {rows} checkpoints"
            raise wrong("checkpoint_states", f"{problem.checkpoint_rows} rows", wanted)
    if t.g is not None:
        _check_decays(problem, t, lengths, name_of("g"))


def _check_decays(problem: Problem, t: Tensors, lengths: list[int], name: str) -> None:
    """Checks tokens of sequences that are not null. A NaN passes: it stays in its sequence."""
    if problem.gate not in ("none", "logsigmoid"):
        return
    live = torch.ones(problem.N, dtype=torch.bool)
    if problem.operation in ("decode", "fused_decode"):
        starts = t.source_indices if t.source_pool is not None else t.state_indices
        if starts is not None:
            live = (starts.reshape(problem.N, -1)[:, 0] >= problem.lowest_index).cpu()
    g = t.g.flatten(0, 1)[: sum(lengths)]
    g = g[live.repeat_interleave(torch.tensor(lengths)).to(g.device)].float()
    decays = F.logsigmoid(g) if problem.gate == "logsigmoid" else g
    if bool((decays > 0).any()):
        largest = decays[decays > 0].max()
        raise ValueError(
            f"{name} must hold log decays of at most 0; got {largest:.4g} (use_gate_in_kernel=True takes gate inputs)"
        )
    if problem.safe_gate and bool((decays < LOWEST_DECAY).any()):
        lowest = decays[decays < LOWEST_DECAY].min()
        raise ValueError(f"safe_gate promises log decays in [-5, 0]; got {lowest:.4g} in {name}")


def _check_offsets(offsets: list[int], tokens: int) -> None:
    if offsets[0] != 0:
        raise wrong("cu_seqlens", f"first offset {offsets[0]}", "0")
    for a, b in itertools.pairwise(offsets):
        if b < a:
            raise wrong("cu_seqlens", f"offsets that fall from {a} to {b}", "offsets that never fall")
    if offsets[-1] > tokens:
        raise wrong("cu_seqlens", f"last offset {offsets[-1]}", f"at most T = {tokens}")


def _check_lengths(offsets: list[int], problem: Problem) -> None:
    for a, b in itertools.pairwise(offsets):
        if problem.operation in ("decode", "fused_decode") and b - a > problem.most_tokens:
            raise wrong("cu_seqlens", f"a sequence of {b - a} tokens", f"at most {problem.most_tokens}")
    if problem.operation == "wy":
        chunks = sum(-(-(b - a) // problem.chunk_size) for a, b in itertools.pairwise(offsets))
        if chunks > problem.rows:
            raise wrong("h", f"{problem.rows} rows", f"one for each of the {chunks} chunks")


def _check_slot(argument: str, index: int, slots: int, whose: str = "pool's", called: str = "slots") -> None:
    if index >= slots:
        raise wrong(argument, f"index {index}", f"indices below the {whose} {slots} {called}")


class _Claims:
    """Slots that a call names, or rows: none may be written twice, and none past the end."""

    def __init__(self, lowest: int, slots: int, whose: str = "pool's", called: str = "slots"):
        self.lowest, self.slots, self.whose, self.called = lowest, slots, whose, called
        self.written: set[int] = set()

    def claim(self, argument: str, index: int, stored: bool) -> None:
        _check_slot(argument, index, self.slots, self.whose, self.called)
        if index < self.lowest or not stored:
            return
        if index in self.written:
            one = self.called.removesuffix("s")
            raise wrong(argument, f"{one} {index} again", f"another {one} for every state that is stored")
        self.written.add(index)


def _check_counts(counts: torch.Tensor, lengths: list[int], problem: Problem) -> None:
    for count, length in zip(counts.tolist(), lengths):
        if length > 0 and not 1 <= count <= problem.most_tokens:
            raise wrong("num_accepted_tokens", count, f"1 to {problem.most_tokens}")


def _check_rows(problem: Problem, t: Tensors, lengths: list[int], name_of: NameOf) -> None:
    """Of `intermediate_states`: no row may be written twice, nor may more tokens be accepted than a row has."""
    if t.source_pool is not None:
        role, pool, given = "source_indices", t.source_pool, t.source_indices
    else:
        role, pool, given = "state_indices", t.state_pool, t.state_indices
    starts = [*range(problem.N)] if given is None else given.tolist()
    lowest = 0 if given is None else problem.lowest_index
    rows, lowest_row = starts, lowest
    if t.intermediate_indices is not None:  # null only below 0
        role, rows, lowest_row = "intermediate_indices", t.intermediate_indices.tolist(), 0
    claims = _Claims(lowest_row, problem.rows, "buffer's", "rows")
    counts = t.num_accepted_tokens.tolist() if problem.operation == "commit" else None
    for n, (start, row) in enumerate(zip(starts, rows)):
        live = lowest <= start < pool.shape[0]
        # a commit empties the records that it names
        written = problem.has_records or (problem.operation == "decode" and lengths[n] > 0)
        claims.claim(name_of(role), row, stored=live and written)
        if counts is not None and live and row >= lowest_row:
            has, what = problem.most_tokens, f"the {problem.most_tokens} tokens of a row"
            if problem.has_records:
                has = int(record_counts(problem, t.intermediate_states)[row].min())
                what = f"the {has} tokens that row {row} has recorded"
            if counts[n] > has:
                raise wrong("num_accepted_tokens", counts[n], f"at most {what}")


def _check_checkpoints(
    offsets: torch.Tensor, indices: torch.Tensor, lengths: list[int], pool: _Claims, multiple: int
) -> None:
    for n, (row, slots, length) in enumerate(zip(offsets.tolist(), indices.tolist(), lengths)):
        before = 0
        for offset, slot in zip(row, slots):
            if offset == 0:
                continue
            if offset % multiple != 0 and offset != length:  # where the sequence ends nothing is cut
                raise wrong("checkpoint_offsets", f"offset {offset} of sequence {n}", f"a multiple of {multiple}")
            if offset <= before:
                got = f"{offset} after {before} in sequence {n}" if before else f"offset {offset} of sequence {n}"
                raise wrong("checkpoint_offsets", got, "offsets above 0 that rise in a row")
            if offset > length:
                got = f"offset {offset} of sequence {n}"
                raise wrong("checkpoint_offsets", got, f"at most its {length} tokens")
            before = offset
            pool.claim("checkpoint_indices", slot, length > 0)
