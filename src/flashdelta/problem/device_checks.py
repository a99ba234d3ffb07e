"""What FLASHDELTA_CHECK=1 verifies: the values of tensors that live on the device, read on the host (a synchronisation).

Without it a call reads none of them, and bad values lead nowhere outside the tensors. The variable is read once, when the
package is imported: asking the environment costs half a microsecond a call.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import torch

from .errors import wrong

if TYPE_CHECKING:
    from .problem import Problem, Tensors
    from .wy_spec import WySpec

CHECKPOINT_MULTIPLE = 16


ENABLED = os.environ.get("FLASHDELTA_CHECK") == "1"


def enabled() -> bool:
    return ENABLED and not torch.compiler.is_compiling()


def check_offsets(cu_seqlens: torch.Tensor, T: int) -> None:
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise wrong("cu_seqlens", f"first offset {offsets[0]}", "0")
    for a, b in itertools.pairwise(offsets):
        if b < a:
            raise wrong("cu_seqlens", f"offsets that fall from {a} to {b}", "offsets that never fall")
    if offsets[-1] > T:
        raise wrong("cu_seqlens", f"last offset {offsets[-1]}", f"at most T = {T}")


def check_rows(problem: WySpec, cu_seqlens: torch.Tensor) -> None:
    """`h` must hold every chunk of a packed batch."""
    chunks = int(((cu_seqlens.diff() + problem.chunk_size - 1) // problem.chunk_size).sum())
    if chunks > problem.rows:
        raise wrong("h", f"{problem.rows} rows", f"one for each of the {chunks} chunks")


def check_pool(problem: Problem, t: Tensors) -> None:
    """Every index must be null or name a slot, no slot may be written twice, and checkpoints must lie where they can."""
    lengths = _lengths(problem, t)
    claim = Claims(problem.lowest_index, problem.pool_slots).claim
    for index, length in zip(t.state_indices.tolist(), lengths):
        claim("state_indices", index, length > 0)
    if t.checkpoint_offsets is None:
        return
    rows = zip(t.checkpoint_offsets.tolist(), t.checkpoint_indices.tolist(), lengths)
    for offsets, indices, length in rows:
        _check_checkpoints([offset for offset in offsets if offset != 0], length)
        for offset, index in zip(offsets, indices):
            if offset != 0:
                claim("checkpoint_indices", index, length > 0)


class Claims:
    """Slots of a pool as they are handed out: none may be written twice, and none past the end."""

    def __init__(self, lowest: int, slots: int):
        self.lowest, self.slots = lowest, slots
        self.written: set[int] = set()

    def claim(self, argument: str, index: int, stored: bool) -> None:
        if index >= self.slots:
            raise wrong(argument, f"index {index}", f"indices below the pool's {self.slots} slots")
        if index < self.lowest or not stored:
            return
        if index in self.written:
            raise wrong(argument, f"slot {index} again", "another slot for every state that is stored")
        self.written.add(index)


def _lengths(problem: Problem, t: Tensors) -> list[int]:
    return [problem.T] * problem.N if t.cu_seqlens is None else t.cu_seqlens.diff().tolist()


def check_decode(problem: Problem, t: Tensors) -> None:
    """No sequence may be too long, every index must be null or name a slot, no slot may be written twice, and counts of
    accepted tokens must be possible."""
    lengths = _lengths(problem, t)
    for length in lengths:
        if length > problem.most_tokens:
            raise wrong("cu_seqlens", f"a sequence of {length} tokens", f"at most {problem.most_tokens}")
    if t.source_indices is not None:
        sources = Claims(problem.lowest_index, t.source_pool.shape[0])
        for index in t.source_indices.tolist():
            sources.claim("initial_state_indices", index, stored=False)
    if t.state_indices is not None:
        slots = Claims(problem.lowest_index, problem.pool_slots)
        for row, length in zip(t.state_indices.reshape(len(lengths), -1).tolist() if lengths else (), lengths):
            for i, index in enumerate(row):
                slots.claim("ssm_state_indices", index, stored=problem.update_state and i < length)
    if t.intermediate_indices is not None:
        rows = Claims(problem.lowest_index, t.intermediate_states.shape[0])
        for index, length in zip(t.intermediate_indices.tolist(), lengths):
            rows.claim("intermediate_state_indices", index, stored=length > 0)
    if t.num_accepted_tokens is not None:
        for count, length in zip(t.num_accepted_tokens.tolist(), lengths):
            if length > 0 and not 1 <= count <= problem.most_tokens:
                raise wrong("num_accepted_tokens", count, f"1 to {problem.most_tokens}")


def _check_checkpoints(offsets: list[int], length: int) -> None:
    """The offsets of one sequence that are not 0."""
    for before, offset in itertools.pairwise([0, *offsets]):
        if offset % CHECKPOINT_MULTIPLE != 0:
            raise wrong("checkpoint_offsets", f"offset {offset}", f"a multiple of {CHECKPOINT_MULTIPLE}")
        if offset <= before:
            raise wrong("checkpoint_offsets", f"{offset} after {before}", "offsets above 0 that rise in a row")
        if offset > length:
            raise wrong("checkpoint_offsets", f"offset {offset}", f"at most the sequence's {length} tokens")
