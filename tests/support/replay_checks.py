"""Calls in a row, of which the first is recorded and the others replay, against float64: each with other numbers, and in memory
that held NaN. On a CPU or on a GPU, inside `replaying` or `counting`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import flashdelta as fd

from .layouts import GRADIENTS, fresh, in_one_row, laid_out, lay
from .oracle import float64, poisoned_memory, relative_error
from .ranks import Cut, Found, incoming_of
from .replays import Replays
from .rows import BY_NAME, LEAVES, PACKED, Row, chunk

TOLERANCE, OF_GRADIENTS = 0.03, 0.2
"""In bfloat16, against float64: numbers of another call are wrong by their own size, and memory that nobody wrote is NaN. Of
gradients, which cancel in sums, those of `A_log` have the most."""


def results_of(row: Row, call: dict, layouts: dict[str, str], seed: int) -> dict[str, Tensor]:
    """What the call leaves, and the gradients of its leaves for incoming ones in their layouts."""
    call = call | {name: call[name].detach().requires_grad_() for name in row.leaves}
    found = row.op(**call)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    named = {f"result {i}": x.detach() for i, x in enumerate(results)}
    if row.leaves:
        source = torch.Generator().manual_seed(seed)
        incoming = []
        for name, x in zip(GRADIENTS, results):
            grad = torch.randn(x.shape, generator=source).bfloat16().to(x)
            incoming.append(lay(grad, layouts.get(name, "contiguous")))
        grads = torch.autograd.grad(results[: len(incoming)], [call[name] for name in row.leaves], incoming)
        named |= {f"gradient of {name}": x for name, x in zip(row.leaves, grads)}
    return named | {name: call[name] for name in row.writes if name not in row.tied}


def hold(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Against the truth."""
    errors = {name: relative_error(found[name].cpu(), x.cpu()) for name, x in want.items()}
    wrong = {
        name: x for name, x in errors.items() if not x <= (OF_GRADIENTS if name.startswith("gradient") else TOLERANCE)
    }
    assert not wrong, wrong


def check_row(
    row: Row, backend: str, layouts: dict[str, str], replays: Replays, calls: int = 3, device: str = "cpu"
) -> None:
    """The first call is recorded and the others replay it, each with other numbers, in memory that held NaN."""
    first = list[str]()
    for seed in range(calls):
        call = laid_out(row, fresh(row, seed, device), layouts)
        exact = float64(call) if row.op.__name__ != "kda_prefill" else call
        want = results_of(row, exact | {"backend": "reference"}, layouts, seed)
        replays.clear()
        with poisoned_memory():
            found = results_of(row, call | {"backend": backend}, layouts, seed)
        first = first or replays.anew.copy()
        assert first, "nothing was launched"
        assert (len(replays.anew), len(replays.repeated)) == ((len(first), 0) if seed == 0 else (0, len(first))), (
            "no replay"
        )
        hold(found, want)


# ---- memory that inputs share -------------------------------------------------------------------------------------------

SLICES = {
    "decode mixed": (3, [*itertools.permutations(("mixed_qkv", "g", "beta"))]),
    "fused": (3, [*itertools.permutations(("x", "raw_g", "output_gate"))]),
    "chunk backward": (70, [("q", "k", "v", "g", "beta"), ("g", "v", "k", "q", "beta"), ("beta", "v", "q", "g", "k")]),
}
"""Of rows, and in which orders."""

SLICED = [(name, b, order) for name, (_, orders) in SLICES.items() for b in BY_NAME[name].backends for order in orders]


def check_slices(
    name: str, backend: str, order: Sequence[str], recorded: bool, replays: Replays, device: str = "cpu"
) -> None:
    row = BY_NAME[name]
    for seed in range(3):
        call = in_one_row(fresh(row, seed, device), order, SLICES[name][0], shared=recorded == (seed == 0))
        want = results_of(row, float64(call) | {"backend": "reference"}, {}, seed)
        replays.clear()
        hold(results_of(row, call | {"backend": backend}, {}, seed), want)
        assert bool(replays.anew) == (seed == 0)


# ---- losses as users write them ------------------------------------------------------------------------------------------


class Zeros(torch.autograd.Function):
    """Whose gradient is known to be zeros, without memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch._efficientzerotensor(grad.shape, dtype=grad.dtype, device=grad.device)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums": lambda o, s: o.sum() + s.to(o.dtype).sum(),
    "squares and a sum": lambda o, s: o.float().square().sum() + s.sum(),
    "sum of o": lambda o, s: o.sum(),
    "sum of s": lambda o, s: s.sum(),
    "means": lambda o, s: o.mean() + s.square().mean(),
    "transposed s": lambda o, s: (o.float() * 0.1).sum() + (s.mT * torch.arange(64.0).to(s)).sum(),
    "a slice of s": lambda o, s: s[:, :, 3].square().sum() + o[:, :7].sum(),
    "another module": lambda o, s: (o.flatten(2) @ torch.ones(128, 3).to(o)).square().mean() + (s @ s.mT).mean(),
    "zeros of o": lambda o, s: Zeros.apply(o).sum() + s.square().sum(),
    "zeros of s": lambda o, s: o.square().sum() + Zeros.apply(s).sum(),
}


def loss_gradients(call: dict, loss: Callable, wrap: Callable = lambda step: step) -> dict[str, Tensor]:
    leaves = {name: call[name].detach().requires_grad_() for name in LEAVES}

    def step(*given: Tensor) -> tuple[Tensor, Tensor]:
        return fd.chunk_kda(**call | dict(zip(leaves, given)))

    loss(*wrap(step)(*leaves.values())).backward()
    return {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def check_loss(loss: str, backend: str, wrap: Callable = lambda step: step, device: str = "cpu") -> None:
    for seed in range(3):
        call = fresh(BY_NAME["chunk backward"], seed, device)
        want = loss_gradients(float64(call) | {"backend": "reference"}, LOSSES[loss])
        with poisoned_memory():
            found = loss_gradients(call | {"backend": backend}, LOSSES[loss], wrap)
        hold(found, {name: x for name, x in want.items() if x.any()})
        assert all(not found[name].any() for name, x in want.items() if not x.any())


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


# ---- ranks ---------------------------------------------------------------------------------------------------------------

WORLDS = [(2, False), (2, True), (3, False)]
"""How many ranks, and whether forwards leave what their backward passes need."""


REPEATED = "stride 0 in the last dimension"


class Expanded(Cut):
    """Whose gradients of final states are expanded."""

    def gradients(self, rank: int, spare: int = 0) -> tuple[Tensor, Tensor]:
        do, dht = super().gradients(rank, spare)
        return do, lay(dht, REPEATED)


@functools.cache
def cuts(ranks: int, device: str = "cpu") -> list[Cut]:
    """Calls in a row of one context's offsets."""
    row, found = Row("ranks", fd.chunk_kda, chunk(replace(PACKED, lengths=(60, 0, 132)))), []
    for seed in range(3):
        call = fresh(row, seed, device) | {"output_final_state": True}
        do, dht = incoming_of(call, seed)
        found.append(Expanded(call, ranks, (do, lay(dht, REPEATED))))
    return found


def on_rank(group: ProcessGroup, backend: str, kept: bool, device: str = "cpu") -> list[Found]:
    found = [cut.run(group, backend=backend, disable_recompute=kept) for cut in cuts(group.size(), device)]
    return [{name: x.cpu() for name, x in of_call.items()} for of_call in found]


def check_ranks(found: Sequence[list[Found]]) -> None:
    """What `on_rank` found on each."""
    for i, cut in enumerate(cuts(len(found))):
        exact = Cut(float64(cut.call), 1, tuple(x.double() for x in cut.incoming)).whole(backend="reference")
        joined = cut.joined([of_rank[i] for of_rank in found])
        hold(*({f"gradient of {name}": x for name, x in y.items()} for y in (joined, exact)))
