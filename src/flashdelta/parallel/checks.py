"""FLASHDELTA_CHECK=1 verifies of calls over ranks: that all make the same one, and that none of them refuses it."""

import contextlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..problem.device_checks import enabled
from ..problem.errors import rule, wrong
from ..problem.problem import ChunkProblem, settings_of
from .border import DIGEST, FIRST_RANK, LAST_RANK, OPEN_IN, OPEN_OUT
from .exchange import gather_numbers, group_named, is_group

MAY_DIFFER = {
    *("null_index", "output_final_state", "checkpoint_every", "safe_gate", "return_intermediate_states", "split"),
    *("batch_invariant", "disable_recompute", "longest_chunks", "all_chunks", "process_group", "rank"),
}
"""Settings of a problem that each rank has its own of."""

ALIKE = (
    *("B", "H", "HV", "K", "V", "dtype", "packed", "requires_grad"),
    *(name for name in settings_of(ChunkProblem) if name not in MAY_DIFFER),
)
"""Fields of problems that calls of all ranks have in common."""

REFUSED = [-1, 0, 0, 0, 0, 0]
"""Instead of a call's hash, that of its offsets, and its border: this rank refuses the call."""

SAME_OFFSETS = "the same offsets of all ranks' tokens on every rank"


def check_call_of_ranks(context: Any, problem: ChunkProblem, backend: str) -> None:
    """Checks that all ranks of a `ContextParallel` make the same call, by the same backend: not all exchange as much."""
    # of batch rows each rank may have as many tokens as it likes
    described = [getattr(problem, name) for name in ALIKE], problem.packed and problem.T, backend
    check_on_all_ranks(context, described, "cp_context" if problem.packed else "group")


def check_on_all_ranks(context: Any, described: object, name: str = "cp_context", border: Tensor | None = None) -> None:
    """Every rank must make the same call, which `described` tells, with the same offsets of all ranks' tokens, and where
    sequences go on must fit what the neighbours say. All refuse alike. `name`: the caller's, of the context. `border`: what
    the context is about to have instead of its own."""
    if context.ranks == 1 or not enabled():
        return
    own = (context.border if border is None else border).tolist()
    said = [zlib.crc32(repr(described).encode()), own[DIGEST], *own[OPEN_IN : LAST_RANK + 1]]
    numbers = _tell(said, context.name, context.ranks, context.device)
    calls, offsets, *_ = zip(*numbers)
    found = [border for _, _, *border in numbers]
    if REFUSED[0] in calls:
        raise wrong(name, f"one that rank {calls.index(REFUSED[0])} rejected", "of a call that every rank accepts")
    for r in range(context.ranks):
        if calls[r] != calls[0]:
            alike = "of calls with the same shapes, dtypes, options and backend"
            raise wrong(name, f"another call on rank {r} than on rank 0", alike)
        rule("cu_seqlens", offsets[r] == offsets[0], SAME_OFFSETS, f"other offsets on rank {r} than on rank 0")
    firsts = [first if opened == left >= 0 else r for r, (opened, left, first, _) in enumerate(found)]
    lasts = [last if opened == left >= 0 else r for r, (opened, left, _, last) in enumerate(found)]
    outer = found[0][OPEN_IN] >= 0 or found[-1][OPEN_OUT] >= 0
    for r, (a, b) in enumerate(itertools.pairwise(found)):
        left, opened = a[OPEN_OUT] >= 0, b[OPEN_IN] >= 0
        fits = b[FIRST_RANK] == firsts[r] and a[LAST_RANK] == lasts[r + 1]
        if outer or left != opened or (left and not fits):
            raise wrong("cu_seqlens", f"offsets on rank {r} that do not go on on rank {r + 1}", SAME_OFFSETS)


@contextlib.contextmanager
def broadcast_errors(*where: Any) -> Iterator[None]:
    """Tells the ranks that wait in `check_on_all_ranks` of a call that this rank refuses in the block. `where`: what the call
    has as context and group, fit or not; where none of them is a group or has one, nobody can be told."""
    try:
        yield
    except Exception:
        if enabled():
            _refuse(*where)
        raise


def _refuse(*where: Any) -> None:
    groups = [x if is_group(x) else getattr(x, "group", None) for x in where]
    group = next(filter(is_group, groups), None)
    if group is not None and group.size() > 1:
        device = next((x.device for x in where if isinstance(getattr(x, "device", None), torch.device)), None)
        # it was destroyed, or its collectives fail: the refusal itself is what to read
        with contextlib.suppress(RuntimeError, ValueError):
            _tell(REFUSED, group.group_name, group.size(), device)


def _tell(numbers: list[int], name: str, ranks: int, device: torch.device | None) -> list[list[int]]:
    """Numbers of all ranks, by tensors on a kind of device that the group alone decides: a rank may refuse its tensors'."""
    kinds = [x.type for x in group_named(name)._device_types]
    kind = "cpu" if "cpu" in kinds or not kinds else kinds[0]
    on = device if device is not None and device.type == kind else torch.device(kind)
    return gather_numbers(numbers, name, ranks, on)
