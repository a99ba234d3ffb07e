"""Replays by value: for every operation, tensor and layout, calls in a row with other numbers, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.stages.copy import strided_copy
from flashdelta.runtime.call import CALLS

from ..full import FULL, thinned
from ..support import replay_checks as checks
from ..support.layouts import LAYOUTS, fresh, lay, refused, rotated, tensors_of
from ..support.oracle import poisoned_memory
from ..support.replays import Replays, replaying
from ..support.rows import BY_NAME, HOPPER, PAIRS, ROWS, Row, draft_and_commit
from ..support.virtual import on_ranks
from .interpreter import hopper_on_cpu, run


@pytest.fixture
def replays() -> Iterator[Replays]:
    with hopper_on_cpu(sms=4), replaying(run) as found:
        yield found


STRIDED = {
    "a row": lambda: torch.arange(300)[::2],
    "a long row": lambda: torch.arange(2560)[::2],
    "one number": lambda: torch.zeros(()).expand(3, 256),
    "flags": lambda: torch.arange(40).view(2, 20).bool().mT,
    "five dimensions": lambda: torch.arange(2 * 3 * 2 * 35 * 130).short().view(2, 35, 3, 130, 2).permute(4, 0, 2, 1, 3),
    "seven dimensions": lambda: (
        torch.arange(2 * 3 * 4 * 2 * 3 * 2 * 5.0).view(2, 3, 4, 2, 3, 2, 5).permute(6, 4, 2, 0, 5, 3, 1)
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_copies_of_strided_tensors(name: str):
    """To and from memory without gaps."""
    x = STRIDED[name]()
    dense, back = torch.zeros(x.shape, dtype=x.dtype), torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()
    for launch in (*strided_copy(x, dense), *strided_copy(dense, back)):
        run(launch)
    assert torch.equal(dense, x) and torch.equal(back, x)


N = len(LAYOUTS)
TURNS = [(*pair, turn) for i, pair in enumerate(PAIRS) for turn in (range(0, N, 3) if FULL else [i % N])]
"""Over which each operation's tensors are in several layouts; the GPU tier has every tensor in each."""


@pytest.mark.parametrize(("row", "backend", "turn"), TURNS, ids=str)
def test_every_tensor(row: Row, backend: str, turn: int, replays: Replays):
    checks.check_row(row, backend, rotated(row, turn), replays)


def test_rows_have_every_tensor_of_every_operation():
    ops = {draft_and_commit: (fd.recurrent_kda, fd.commit)}
    had = {(op, name) for row in ROWS for op in ops.get(row.op, (row.op,)) for name in tensors_of(row)}
    left = {name for op, call in CALLS.items() for name in call.tensors if (op, name) not in had}
    assert left == {"cu_seqlens_cpu", "border"}  # on the host, and of ranks


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_refused_layouts(row: Row):
    for name in tensors_of(row):
        for layout in refused(row, name):
            call = row.make(0)
            with pytest.raises(ValueError, match=rf"^{name} must be [^;]+; got strides"):
                row.op(**call | {name: lay(call[name], layout), "backend": "reference"})


STALE = thinned(ROWS, 8, 2)
"""Rows on which the checks must find a tensor that a replay did not read anew."""


@pytest.mark.parametrize(("row", "backend"), [(row, row.backends[-1]) for row in STALE], ids=str)
def test_a_stale_tensor_is_seen(row: Row, backend: str, replays: Replays):
    checks.check_stale(row, backend)


@pytest.mark.parametrize("first", thinned(range(N), 2))
def test_gradients_in_every_layout(first: int, replays: Replays):
    row, layouts = BY_NAME["chunk backward"], [*LAYOUTS]
    checks.check_row(row, "hopper", dict(zip(tensors_of(row)[-2:], (layouts * 2)[first:])), replays)


@pytest.mark.parametrize(
    "name", ["chunk packed h", "chunk pool", "verify records", "fused", "norm", "convolution pool"]
)
def test_inference_mode(name: str, replays: Replays):
    """Whose tensors do not count what writes them."""
    row = BY_NAME[name]
    with torch.inference_mode():
        checks.check_row(row, row.backends[-1], rotated(row, 1), replays)


@pytest.mark.parametrize(
    ("sliced", "recorded"),
    [(x, y) for i, x in enumerate(checks.SLICED) for y in (True, False) if FULL or i % 8 in ((0, 7) if y else (3, 4))],
    ids=str,
)
def test_slices_of_one_buffer(sliced: tuple, recorded: bool, replays: Replays):
    checks.check_slices(*sliced, recorded, replays)


@pytest.mark.parametrize("recorded", [True, False])
def test_one_tensor_for_two_inputs(recorded: bool, replays: Replays):
    """A call that was recorded so is none for two tensors."""
    row = BY_NAME["chunk backward"]
    for seed, same in enumerate((recorded, not recorded, recorded)):
        call = fresh(row, seed)
        call |= {"k": call["q"]} if same else {}
        want = checks.truth_of(row, call, {}, seed)
        checks.hold(checks.results_of(row, call | {"backend": "hopper"}, {}, seed), want)


FEW = ("sum of o", "sum of s", "transposed s", "a slice of s", "zeros of s")
LOSSES = [(loss, "hopper") for loss in (checks.LOSSES if FULL else FEW)]


@pytest.mark.parametrize(("loss", "backend"), [*LOSSES, ("sums", "triton"), ("zeros of o", "triton")])
def test_losses(loss: str, backend: str, replays: Replays):
    checks.check_loss(loss, backend)
    assert len(replays.repeated) == (1 + FULL) * len(replays.anew) > 0


@pytest.mark.parametrize("wrap", [checks.recomputed, checks.packed_and_unpacked, checks.compiled])
def test_wrapped_losses(wrap: Callable, replays: Replays):
    checks.check_loss("squares and a sum", "hopper", wrap)
    assert wrap is checks.compiled or replays.repeated


@pytest.mark.parametrize(
    ("ranks", "kept", "backend"),
    [(*world, b) for i, world in enumerate(checks.WORLDS) for b in (HOPPER if FULL else HOPPER[i - 1 : i])],
)
def test_ranks(ranks: int, kept: bool, backend: str, replays: Replays):
    with poisoned_memory():
        found = on_ranks(ranks, lambda group: checks.on_rank(group, backend, kept))
    checks.check_ranks(found)
    assert len(replays.repeated) == (1 + FULL) * len(replays.anew) > 0
