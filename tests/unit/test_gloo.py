"""The same over processes: four of them, and gloo. What they compute is put together and compared here."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.nn import KimiDeltaAttention
from flashdelta.parallel import context_parallel, halo
from flashdelta.problem import device_checks

from ..full import FULL
from ..support.cases import Case
from ..support.examples import TRAIN_PARALLEL
from ..support.forked import imported_once
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.layers import make_layer, rows
from ..support.oracle import same_bits
from ..support.processes import on_processes
from ..support.ranks import Cut, Found, fla_context, incoming_of
from ..support.shared import folder_of_run, once

pytestmark = pytest.mark.long

RANKS = 4
CASES = {
    "packed": Case("gloo_packed", "", lengths=(40, 0, 50, 6), state=torch.float64, memory="long", chunk_size=32),
    "through_all": Case("gloo_all", "", lengths=(96,), gate="softplus", beta="logit", HV=4, chunk_size=32),
}


def cut_of(name: str) -> Cut:
    call = make_call(CASES[name], torch.float64) | {"output_final_state": True, "backend": "reference"}
    return Cut(call, RANKS, incoming_of(call))


def compiling(group: dist.ProcessGroup) -> dict:
    """Two of the ranks compile, the last one among them; the others make the same exchanges."""
    return {"fullgraph": True, "backend": "aot_eager", "disable": group.rank() not in (1, RANKS - 1) and not FULL}


def compiled(cut: Cut, group: dist.ProcessGroup) -> list[bool]:
    """Whether compiled calls have the bits of eager ones: by a context, and by `group=` alone, with a halo."""
    packed = cut.local(context_parallel(cut.call["cu_seqlens"], group=group))
    rows = make_call(Case("gloo_rows", "", B=2, T=40, chunk_size=32)) | {"backend": "reference", "group": group}

    def run(packed: dict, rows: dict) -> tuple[torch.Tensor, ...]:
        return *fd.chunk_kda(**packed), fd.chunk_kda(**rows)[0], halo(rows["q"].flatten(2), group, 3)

    both = (f(packed, rows) for f in (run, torch.compile(run, **compiling(group))))
    return [same_bits(a, b) for a, b in zip(*both)]


LAYERS = {"bounded": {}, "softplus": {"gate": "softplus", "conv_size": 3, "num_v_heads": 2}}
OFFSETS = (0, 40, 46, 90, 96)
"""Sequences of the layer: cut inside, and one whose halo is longer than what it has on the rank before."""


PAIR = (0, 2)
"""Ranks of a group of two."""
STEPS = ("plain", "checkpoint", "frozen", "one loss")


def step_of(
    layers: Sequence[KimiDeltaAttention], ranks: int, rank: int | None, cp_context: object = None, kind: str = "plain"
) -> Found:
    """Findings of layers, one after the other, on a rank's tokens, or on all: output and gradients. "frozen": of the last one's
    parameters alone; "one loss": of what the last of two ranks has found."""
    T = OFFSETS[-1] // ranks
    begin, end = (0, OFFSETS[-1]) if rank is None else (rank * T, (rank + 1) * T)
    x, grad = (row[None, begin:end].clone() for row in rows(2, OFFSETS[-1], dtype=torch.float64, device="cpu"))
    x.requires_grad_(kind != "frozen")
    where = {"cu_seqlens": torch.tensor(OFFSETS)} if rank is None else {"cp_context": cp_context}
    y, named = x, {}
    for i, layer in enumerate(layers):
        layer.zero_grad()
        layer.requires_grad_(kind != "frozen" or layer is layers[-1])
        if kind == "checkpoint":
            y = y + checkpoint(lambda x, layer=layer: layer(x, **where)[0], y, use_reentrant=False)
        else:
            y = y + layer(y, **where)[0]
        named |= dict(layer.named_parameters(str(i)))
    if kind == "one loss":
        grad[:, : max(T - begin, 0)] = 0.0
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in named.items()}
    return {name: each.clone() for name, each in found.items() if each is not None}


def two_layers() -> list[KimiDeltaAttention]:
    return [make_layer(torch.float64), make_layer(torch.float64, gate="softplus")]


def by_fla(group: dist.ProcessGroup) -> dict[str, Found]:
    """Findings of a layer with FLA's context, and of FLA's function, which flashdelta runs then."""
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    from flashdelta.integrations import fla

    context = build_cp_context(torch.tensor(OFFSETS), group=group, conv1d_kernel_size=4)
    found = {"layer of fla": step_of([make_layer(torch.float64)], RANKS, group.rank(), context)}
    tokens = fla_tokens(group.rank())
    o, _ = chunk_kda(**tokens, use_qk_l2norm_in_kernel=True, cp_context=context)
    o.square().sum().backward()
    fla.disable()
    return found | {"fla": {"o": o.detach()} | {name: x.grad for name, x in tokens.items()}}


def fla_tokens(rank: int | None) -> Found:
    """Tokens of a rank, or of all."""
    call, T = make_call(CASES["through_all"], torch.float64), OFFSETS[-1] // RANKS
    own = slice(None) if rank is None else slice(rank * T, (rank + 1) * T)
    tokens = {name: call[name][:, own].detach().clone() for name in TOKEN_TENSORS}
    tokens |= {"g": -tokens["g"].abs(), "beta": tokens["beta"].sigmoid()}
    return {name: x.requires_grad_() for name, x in tokens.items()}


def steps_of_two(rank: int) -> dict[str, Found]:
    pair = dist.new_group([*PAIR])
    if rank not in PAIR:
        return {}
    context = context_parallel(torch.tensor(OFFSETS), group=pair)
    return {f"two, {kind}": step_of(two_layers(), 2, pair.rank(), context, kind) for kind in STEPS}


def failure_without_the_last_rank(group: dist.ProcessGroup, seconds: int, comes: bool) -> tuple[str, float]:
    """The others' error, and after how long, when the last rank does not make the call: it `comes` later, or never."""
    brief = dist.new_group(timeout=timedelta(seconds=seconds))
    began, said = time.monotonic(), ""
    if group.rank() + 1 < RANKS:
        said = failure_of(brief)
    took = time.monotonic() - began
    if comes:
        dist.barrier()
    return said, took


def failure_of(brief: dist.ProcessGroup, **options: object) -> str:
    call = {name: x for name, x in make_call(CASES["through_all"], torch.float64).items() if name != "cu_seqlens"}
    try:
        fd.chunk_kda(**call | options, group=brief, backend="reference")
    except (RuntimeError, ValueError) as failure:
        return str(failure)
    return "nothing"


def work(group: dist.ProcessGroup) -> dict[str, object]:
    torch.set_num_threads(1)
    rank = group.rank()
    found: dict = {name: cut_of(name).run(group) for name in CASES}
    found["compiled"] = compiled(cut_of("packed"), group)
    offsets = torch.tensor(OFFSETS)
    for name, arguments in LAYERS.items():
        layer = make_layer(torch.float64, **arguments)
        context = context_parallel(offsets, group=group, conv_size=layer.conv_size, max_sequences=4)
        found[f"layer {name}"] = step_of([layer], RANKS, rank, context)
    layer = make_layer(torch.float64)
    context = context_parallel(offsets, group=group)
    layer.compile(**compiling(group))
    found["layer compiled"] = step_of([layer], RANKS, rank, context)
    found["layer compiled, of fla"] = step_of([layer], RANKS, rank, fla_context(group, offsets))
    if importlib.util.find_spec("fla") is not None:
        found |= by_fla(group)
    found |= steps_of_two(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checks, "ENABLED", True)
        found["refused"] = failure_of(group, **{"chunk_size": 48} if rank == 1 else {})
    found["late"] = failure_without_the_last_rank(group, 2, comes=True)
    return found | {"lost": failure_without_the_last_rank(group, 5, comes=False)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    with imported_once():
        return once(folder_of_run(tmp_path_factory) / "gloo.pt", lambda: on_processes(RANKS, work))


@pytest.mark.parametrize("name", CASES)
def test_processes_find_what_one_finds(found: list[dict[str, Found]], name: str):
    cut = cut_of(name)
    wanted, joined = cut.whole(), cut.joined([x[name] for x in found])
    assert joined.keys() == wanted.keys()
    for key, x in wanted.items():
        torch.testing.assert_close(joined[key], x, rtol=1e-10, atol=1e-11, msg=key)


def test_a_compiled_call_exchanges_too(found: list[dict]):
    assert [x["compiled"] for x in found] == [[True] * 4] * RANKS


@pytest.mark.parametrize("name", [*LAYERS, "compiled", "compiled, of fla", "of fla"])
def test_a_layer_finds_what_one_rank_finds(found: list[dict[str, Found]], name: str):
    """Outputs and gradients; those of parameters are added up. Of a compiled one the last rank needs nothing
    of the exchange of its halo's gradients, and takes part; FLA's context can come, which no call had before."""
    if name == "of fla":
        pytest.importorskip("fla")
    layer = make_layer(torch.float64, **LAYERS.get(name, {}))
    hold_layer(step_of([layer], RANKS, None), [x[f"layer {name}"] for x in found])


def test_the_function_of_fla_takes_its_context(found: list[dict[str, Found]]):
    """And flashdelta runs it: a CPU has no kernel of FLA's."""
    pytest.importorskip("fla")
    tokens = fla_tokens(None)
    o, _ = fd.chunk_kda(**tokens, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor(OFFSETS))
    o.square().sum().backward()
    wanted = {"o": o.detach()} | {name: x.grad for name, x in tokens.items()}
    for name, x in wanted.items():
        joined = torch.cat([rank["fla"][name] for rank in found], dim=1)
        torch.testing.assert_close(joined, x, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", STEPS)
def test_two_ranks_train_two_layers(found: list[dict[str, Found]], kind: str):
    """Each of two ranks goes on from what the other's scan ends with; these are not the first two of their processes."""
    hold_layer(step_of(two_layers(), 2, None, None, kind), [found[rank][f"two, {kind}"] for rank in PAIR])


@pytest.mark.parametrize(("which", "seconds"), [("late", 2), ("lost", 5)])
def test_ranks_hear_of_one_that_does_not_come(found: list[dict], which: str, seconds: int):
    """The group's timeout, or of a process that ended that the connection is gone: no rank waits for ever."""
    assert found[-1][which][0] == ""
    told = [(said.lower(), took) for said, took in (x[which] for x in found[:-1])]
    # one whose time is out closes its connections to the others
    assert which == "lost" or any("timed out" in said for said, _ in told), told
    assert all(("timed out" in said or "connection" in said) and took < seconds + 10 for said, took in told), told


def test_what_one_rank_refuses_the_others_hear(found: list[dict]):
    said = [x["refused"] for x in found]
    assert said.pop(1).startswith("chunk_size must be") and all("rank 1 rejected" in x for x in said), said


def hold_layer(wanted: Found, parts: list[Found]) -> None:
    for name, x in wanted.items():
        pieces = [part[name] for part in parts]
        joined = torch.cat(pieces, dim=1) if name in ("y", "x") else torch.stack(pieces).sum(0)
        # the gate's parameters are float32
        torch.testing.assert_close(joined, x, rtol=1e-5, atol=1e-6, msg=name)


def train(*arguments: str) -> int:
    """Runs the example's command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TRAIN_PARALLEL.parent)
        patch.setattr(sys, "argv", [TRAIN_PARALLEL.name, *arguments])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return importlib.import_module(TRAIN_PARALLEL.stem).main()


@pytest.mark.slow
def test_two_ranks_train_on_the_curve_of_one(tmp_path: Path):
    """The example, in processes that torchrun's launcher forks."""
    steps, one = ("--steps", "6", "--tokens", "128"), tmp_path / "one.json"
    assert train(*steps, "--losses", str(one)) == 0
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver")
    with imported_once():
        codes = elastic_launch(config, train)(*steps, "--compare", str(one), "--tolerance", "1e-5")
    losses = json.loads(one.read_text())
    assert codes == {0: 0, 1: 0} and losses[-1] < losses[0] - 0.5


def test_a_group_that_was_destroyed_is_refused():
    """Also where a later group has its name: a context would take that one's ranks for its own."""
    call = make_call(CASES["through_all"]) | {"backend": "reference"}
    x, offsets = call["q"].flatten(2), call.pop("cu_seqlens")

    def begin() -> dist.ProcessGroup:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist.group.WORLD

    group = begin()
    context = context_parallel(offsets, group=group)
    calls = (
        lambda: fd.chunk_kda(**call, cp_context=context),
        lambda: fd.chunk_kda(**call, group=group),
        lambda: context_parallel(offsets, group=group),
        lambda: halo(x, context, 3),
        lambda: halo(x, group, 3),
    )
    for run in calls:
        run()
    said = r"^(cp_context|group|context) must be .*; got a .* that was destroyed"
    for _ in range(2):
        dist.destroy_process_group()
        for run in calls:
            with pytest.raises(ValueError, match=said):
                run()
        begin()
    dist.destroy_process_group()
