"""Calls in a row, of which the first is recorded and the others replay, against float64: each with other numbers, and in memory
that held NaN. On a CPU or on a GPU, inside `replaying` or `counting`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.problem.problem import is_record
from flashdelta.program.plan import Plan

from ..full import FULL
from .layouts import GRADIENTS, fresh, in_one_row, laid_out, lay
from .oracle import float64, poisoned_memory, relative_error
from .ranks import Cut, Found, incoming_of
from .replays import Replays
from .rows import BY_NAME, LEAVES, PACKED, Row, chunk

TOLERANCES = {
    **{"gradient of A_log": 0.2, "gradient of beta": 0.05, "gradient of k": 0.05, "gradient of initial_state": 0.03},
    **{"gradient": 0.02, "": 8e-3},
}
"""Relative errors in bfloat16, against float64, by how names begin: twice those of the interpreters, but of results, which have
up to 0.006. Gradients are sums whose terms cancel. `check_stale` shows that calls differ by more."""


def results_of(row: Row, call: dict, layouts: dict[str, str], seed: int) -> dict[str, Tensor]:
    """The call's results, and the gradients of its leaves for incoming ones in their layouts."""
    call = call | {name: call[name].detach().requires_grad_() for name in row.leaves}
    found = row.op(**call)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    kind = "gradient" if row.op is fd.kernels.chunk_bwd_wy_dqkg else "result"
    named = {f"{kind} {i}": x.detach() for i, x in enumerate(results)}
    if row.leaves:
        source = torch.Generator().manual_seed(seed)
        incoming = []
        for name, x in zip(GRADIENTS, results):
            grad = torch.randn(x.shape, generator=source).bfloat16().to(x)
            incoming.append(lay(grad, layouts.get(name, "contiguous")))
        grads = torch.autograd.grad(results[: len(incoming)], [call[name] for name in row.leaves], incoming)
        named |= {f"gradient of {name}": x for name, x in zip(row.leaves, grads)}
    # of records, which are NaN where nobody wrote, the decays: only the product of what follows them is determined
    return named | {name: x[..., :64].nan_to_num(-1.0) if is_record(x := call[name]) else x for name in row.writes}


def truth_of(row: Row, call: dict, layouts: dict[str, str], seed: int) -> dict[str, Tensor]:
    """In float64, which a prefill does not take."""
    exact = call if row.op is fd.kda_prefill else float64(call)
    return results_of(row, exact | {"backend": "reference"}, layouts, seed)


def wrong_of(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Names that differ from the truth, and its error."""
    errors = {name: relative_error(found[name].cpu(), x.cpu()) for name, x in want.items()}
    limits = {name: next(TOLERANCES[x] for x in TOLERANCES if name.startswith(x)) for name in want}
    return {name: x for name, x in errors.items() if not x <= limits[name]}


def hold(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    wrong = wrong_of(found, want)
    assert not wrong, wrong


def in_a_row(device: str) -> range:
    """Seeds of calls of which the first is recorded and the others replay it. Interpreted ones are slow."""
    return range(3 if FULL or device != "cpu" else 2)


def check_row(row: Row, backend: str, layouts: dict[str, str], replays: Replays, device: str = "cpu") -> None:
    """The first call is recorded and the others replay it, each with other numbers, in memory that held NaN."""
    first = list[str]()
    for seed in in_a_row(device):
        call = laid_out(row, fresh(row, seed, device), layouts)
        want = truth_of(row, call, layouts, seed)
        replays.clear()
        with poisoned_memory():
            found = results_of(row, call | {"backend": backend}, layouts, seed)
        first = first or replays.anew.copy()
        assert first, "nothing was launched"
        assert (len(replays.anew), len(replays.repeated)) == ((len(first), 0) if seed == 0 else (0, len(first))), (
            "no replay"
        )
        hold(found, want)


def check_stale(row: Row, backend: str, device: str = "cpu") -> None:
    """A replay is wrong with the first call's address of any one tensor that its launches take."""
    execute, first, broken = Plan.execute, dict[Plan, list[int]](), (Plan.__new__(Plan), 0)
    alive = []

    def execute_broken(plan: Plan, tensors: Sequence[Tensor | None], addresses: object = None) -> dict[str, Tensor]:
        alive.append(tensors)
        now = [0 if x is None else x.data_ptr() for x in tensors]
        before = first.setdefault(plan, now.copy())
        if plan is broken[0]:
            now[broken[1]] = before[broken[1]]
        return execute(plan, tensors, now)

    def call_again(seed: int) -> dict[str, Tensor]:
        return results_of(row, fresh(row, seed, device) | {"backend": backend}, {}, seed)

    with mock.patch.object(Plan, "execute", execute_broken):
        call_again(0)
        for seed, plan in enumerate([*first], 1):  # of other numbers than an earlier plan's, which may have gone astray
            taken = {at for step in plan.steps or () for x in (step.places, step.described) for _, at, _ in x}
            roles = {at: role for role, (at, _) in zip(plan.memory.roles, plan.sources) if at in taken}
            want, unseen = truth_of(row, fresh(row, seed, device), {}, seed), set(roles.values())
            for at, role in roles.items():
                broken = plan, at
                if wrong_of(call_again(seed), want):
                    unseen.discard(role)
            assert roles and not unseen, unseen


# ---- memory that inputs share -------------------------------------------------------------------------------------------

SLICES = [
    *(("decode mixed", ("mixed_qkv", "g", "beta")), ("chunk backward", ("q", "k", "v", "g", "beta"))),
    *(("fused", ("x", "raw_g", "output_gate")), ("fused", ("conv_state", "state"))),
]
"""Layouts of rows, and in one order; in the other, too, so that of any two tensors either comes first."""

SLICED = [(name, b, order[::step]) for name, order in SLICES for b in BY_NAME[name].backends for step in (1, -1)]


def check_slices(
    name: str, backend: str, order: Sequence[str], recorded: bool, replays: Replays, device: str = "cpu"
) -> None:
    row = BY_NAME[name]
    for seed in in_a_row(device):
        call = fresh(row, seed, device)
        rows = next(n for n in call[order[0]].shape if n > 1)
        call = in_one_row(call, order, rows, shared=recorded == (seed == 0))
        want = truth_of(row, call, {}, seed)
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
    for seed in in_a_row(device):
        call = fresh(BY_NAME["chunk backward"], seed, device) | {"disable_recompute": wrap is packed_and_unpacked}
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
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: lay(x, "every second")):
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
    offsets = row.make(0)["cu_seqlens"].to(device)
    for seed in in_a_row(device):
        call = fresh(row, seed, device) | {"cu_seqlens": offsets, "output_final_state": True}
        do, dht = incoming_of(call, seed)
        found.append(Expanded(call, ranks, (do, lay(dht, REPEATED))))
    return found


def on_rank(group: ProcessGroup, backend: str, kept: bool, device: str = "cpu") -> list[Found]:
    found = [cut.run(group, backend=backend, disable_recompute=kept) for cut in cuts(group.size(), device)]
    return [{name: x.cpu() for name, x in of_call.items()} for of_call in found]


def check_ranks(found: Sequence[list[Found]]) -> None:
    """Checks the findings of `on_rank` on each."""
    for i, cut in enumerate(cuts(len(found))):
        exact = Cut(float64(cut.call), 1, tuple(x.double() for x in cut.incoming)).whole(backend="reference")
        joined = cut.joined([of_rank[i] for of_rank in found])
        results = ("o", "final_state")
        hold(*({x if x in results else f"gradient of {x}": y[x] for x in y} for y in (joined, exact)))
