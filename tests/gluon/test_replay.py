"""Replays by value: for every operation, tensor and layout, calls in a row with other numbers, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.testing.oracle import float64, poisoned_memory
from flashdelta.testing.virtual import on_ranks

from ..support.cases import BY_NAME, LEAVES, PACKED, PAIRS, Row, chunk
from ..support.inputs import LAYOUTS, fresh, in_one_row, rotated, tensors_of
from ..support.ranks import Cut, incoming_of
from ..support.replays import Replays, check_row, hold, replaying, results_of
from .interpreter import hopper_on_cpu, run


@pytest.fixture
def replays() -> Iterator[Replays]:
    with hopper_on_cpu(sms=4), replaying(run) as found:
        yield found


def pair_id(pair: object) -> str:
    return str(pair)


TURNS = [(*pair, turn) for pair in PAIRS for turn in range(0, len(LAYOUTS), 3)]
"""Over which each tensor is in three layouts, and some tensor in each; the GPU tier has every tensor in each."""


@pytest.mark.parametrize(("row", "backend", "turn"), TURNS, ids=pair_id)
def test_every_tensor(row: Row, backend: str, turn: int, replays: Replays):
    check_row(row, backend, rotated(row, turn), replays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_every_layout(layout: str, replays: Replays):
    row = BY_NAME["chunk backward"]
    check_row(row, "hopper", dict.fromkeys(tensors_of(row)[-2:], layout), replays)


@pytest.mark.parametrize(
    "name", ["chunk packed h", "chunk pool", "verify records", "fused", "norm", "convolution pool"]
)
def test_inference_mode(name: str, replays: Replays):
    """Whose tensors do not count what writes them."""
    row = BY_NAME[name]
    with torch.inference_mode():
        check_row(row, row.backends[-1], rotated(row, 1), replays)


# ---- memory that inputs share -------------------------------------------------------------------------------------------

SLICES = {
    "decode mixed": (3, [*itertools.permutations(("mixed_qkv", "g", "beta"))]),
    "fused": (3, [*itertools.permutations(("x", "raw_g", "output_gate"))]),
    "chunk backward": (70, [("q", "k", "v", "g", "beta"), ("g", "v", "k", "q", "beta"), ("beta", "v", "q", "g", "k")]),
}
"""Of rows, and in which orders."""


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded in one buffer", "replayed in one buffer"])
@pytest.mark.parametrize(
    ("name", "backend", "order"),
    [(name, b, order) for name, (_, orders) in SLICES.items() for b in BY_NAME[name].backends for order in orders],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else x,
)
def test_slices_of_one_buffer(name: str, backend: str, order: tuple[str, ...], recorded: bool, replays: Replays):
    row = BY_NAME[name]
    for seed in range(3):
        call = in_one_row(fresh(row, seed), order, SLICES[name][0], shared=recorded == (seed == 0))
        want = results_of(row, float64(call) | {"backend": "reference"}, {}, seed)
        replays.clear()
        hold(results_of(row, call | {"backend": backend}, {}, seed), want)
        assert bool(replays.anew) == (seed == 0)


@pytest.mark.parametrize("shared", itertools.product((True, False), repeat=3))
def test_one_tensor_for_two_inputs(shared: tuple[bool, ...], replays: Replays):
    """A call that was recorded so is none for two tensors."""
    row = BY_NAME["chunk backward"]
    for seed, same in enumerate(shared):
        call = fresh(row, seed)
        call |= {"k": call["q"]} if same else {}
        want = results_of(row, float64(call) | {"backend": "reference"}, {}, seed)
        hold(results_of(row, call | {"backend": "hopper"}, {}, seed), want)


# ---- losses as users write them ------------------------------------------------------------------------------------------


class Zeros(torch.autograd.Function):
    """Whose gradient is known to be zeros, without memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch._efficientzerotensor(grad.shape, dtype=grad.dtype)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums": lambda o, s: o.sum() + s.to(o.dtype).sum(),
    "squares and a sum": lambda o, s: o.float().square().sum() + s.sum(),
    "sum of o": lambda o, s: o.sum(),
    "sum of s": lambda o, s: s.sum(),
    "means": lambda o, s: o.mean() + s.square().mean(),
    "transposed s": lambda o, s: (o.float() * 0.1).sum() + (s.mT * torch.arange(64.0)).sum(),
    "a slice of s": lambda o, s: s[:, :, 3].square().sum() + o[:, :7].sum(),
    "another module": lambda o, s: (o.flatten(2) @ torch.ones(128, 3).to(o)).square().mean() + (s @ s.mT).mean(),
    "zeros of o": lambda o, s: Zeros.apply(o).sum() + s.square().sum(),
    "zeros of s": lambda o, s: o.square().sum() + Zeros.apply(s).sum(),
}


def gradients(call: dict, loss: Callable, wrap: Callable = lambda step: step) -> dict[str, Tensor]:
    leaves = {name: call[name].detach().requires_grad_() for name in LEAVES}

    def step(*given: Tensor) -> tuple[Tensor, Tensor]:
        return fd.chunk_kda(**call | dict(zip(leaves, given)))

    loss(*wrap(step)(*leaves.values())).backward()
    return {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def check_loss(loss: str, backend: str, wrap: Callable = lambda step: step) -> None:
    for seed in range(3):
        call = fresh(BY_NAME["chunk backward"], seed)
        want = gradients(float64(call) | {"backend": "reference"}, LOSSES[loss])
        with poisoned_memory():
            found = gradients(call | {"backend": backend}, LOSSES[loss], wrap)
        hold(found, {name: x for name, x in want.items() if x.any()})
        assert all(not found[name].any() for name, x in want.items() if not x.any())


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, backend: str, replays: Replays):
    check_loss(loss, backend)
    assert len(replays.repeated) == 2 * len(replays.anew) > 0


def recomputed(step: Callable) -> Callable:
    return lambda *given: checkpoint(step, *given, use_reentrant=False)


def packed_and_unpacked(step: Callable) -> Callable:
    """Saved tensors come back elsewhere, and laid out otherwise."""

    def run_step(*given: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            return step(*given)

    return run_step


def compiled(step: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(step, backend="aot_eager")


@pytest.mark.parametrize("wrap", [recomputed, packed_and_unpacked, compiled])
def test_wrapped_losses(wrap: Callable, replays: Replays):
    check_loss("squares and a sum", "hopper", wrap)
    assert wrap is compiled or replays.repeated


# ---- ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "kept"), [(2, False), (2, True), (3, False)])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_ranks(backend: str, ranks: int, kept: bool, replays: Replays):
    cuts = []
    for seed in range(3):
        call = fresh(Row("ranks", fd.chunk_kda, chunk(replace(PACKED, lengths=(60, 0, 132)))), seed)
        incoming = incoming_of(call, seed)
        incoming = incoming[0], LAYOUTS["stride 0 in the last dimension"](incoming[1])
        cuts.append(Cut(call | {"output_final_state": True}, ranks, incoming))
    options = {"backend": backend, "disable_recompute": kept}
    with poisoned_memory():
        found = on_ranks(ranks, lambda group: [cut.run(group, **options) for cut in cuts])
    for i, cut in enumerate(cuts):
        exact = Cut(float64(cut.call), 1, tuple(x.double() for x in cut.incoming)).whole(backend="reference")
        joined = cut.joined([of_rank[i] for of_rank in found])
        hold(
            {f"gradient of {name}": x for name, x in joined.items()},
            {f"gradient of {name}": x for name, x in exact.items()},
        )
    assert len(replays.repeated) == 2 * len(replays.anew) > 0
