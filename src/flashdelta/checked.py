"""What FLASHDELTA_CHECK=1 verifies: the values of tensors that live on the device, read on the host (a synchronisation).

Without it a call reads none of them, and bad values lead nowhere outside the tensors.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import torch

from .errors import wrong

if TYPE_CHECKING:
    from .spec import KdaSpec, KdaTensors

CHECKPOINT_MULTIPLE = 16


def enabled() -> bool:
    return os.environ.get("FLASHDELTA_CHECK") == "1" and not torch.compiler.is_compiling()


def check_offsets(cu_seqlens: torch.Tensor, T: int) -> None:
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise wrong("cu_seqlens", f"first offset {offsets[0]}", "0")
    for a, b in itertools.pairwise(offsets):
        if b < a:
            raise wrong("cu_seqlens", f"offsets that fall from {a} to {b}", "offsets that never fall")
    if offsets[-1] > T:
        raise wrong("cu_seqlens", f"last offset {offsets[-1]}", f"at most T = {T}")


def check_pool(spec: KdaSpec, t: KdaTensors) -> None:
    """Every index must be null or name a slot, no slot may be written twice, and checkpoints must lie where they can."""
    lengths = [spec.T] * spec.N if t.cu_seqlens is None else t.cu_seqlens.diff().tolist()
    written: set[int] = set()

    def claim(argument: str, index: int, stored: bool) -> None:
        if index >= spec.pool_slots:
            raise wrong(argument, f"index {index}", f"indices below the pool's {spec.pool_slots} slots")
        if index < spec.lowest_index or not stored:
            return
        if index in written:
            raise wrong(argument, f"slot {index} again", "another slot for every state that is stored")
        written.add(index)

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


def _check_checkpoints(offsets: list[int], length: int) -> None:
    """The offsets of one sequence that are not 0."""
    for before, offset in itertools.pairwise([0, *offsets]):
        if offset % CHECKPOINT_MULTIPLE != 0:
            raise wrong("checkpoint_offsets", f"offset {offset}", f"a multiple of {CHECKPOINT_MULTIPLE}")
        if offset <= before:
            raise wrong("checkpoint_offsets", f"{offset} after {before}", "offsets above 0 that rise in a row")
        if offset > length:
            raise wrong("checkpoint_offsets", f"offset {offset}", f"at most the sequence's {length} tokens")
