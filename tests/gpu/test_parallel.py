"""Sequences over ranks: virtual ones on one GPU, and processes with a GPU each, over NCCL."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from ..support.cases import BF16, FP32, Case
from ..support.examples import trains_on_one_curve
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import float64, same_bits
from ..support.processes import on_processes
from ..support.ranks import Cut, Found
from ..support.shared import folder_of_run, once
from .calls import KIMI, case_and_dtype, in_turn
from .ranks import CASES, TOLD, WAYS, cut_of, lose_a_rank, work, work_of_more

pytestmark = pytest.mark.gpu

RANKS = 2
PATIENCE = timedelta(minutes=2)
"""For a rank that does not come."""

VALUES, GRADIENTS, SUMS = 6e-3, 2e-2, 1e-1
"""Errors of results, of gradients and of those that are sums over all tokens, bfloat16. A sum of H numbers that mostly cancel:
of two heads and 8192 tokens 1/64 of its terms' sizes is left."""

WORSE, SUMMED = 1.05, {"A_log": 2.0, "dt_bias": 2.0}
"""How often as large as the whole call's, or another library's, an error may be; that of a sum over all tokens is one draw of
many roundings."""

LIMITS = {"o": VALUES, "final_state": VALUES, **dict.fromkeys(SUMMED, SUMS)}

MORE = 4
"""Ranks of which some wait for two others: they find `M`, too."""

two_gpus, more_gpus = (
    pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} GPUs") for n in (RANKS, MORE)
)


def truth_of(cut: Cut) -> Found:
    assert cut.incoming is not None
    exact = Cut(float64(cut.call), 1, tuple(x.double() for x in cut.incoming))
    return exact.whole(backend="reference")


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.cpu().double() - truth.cpu()).norm() / truth.cpu().norm())


def hold(found: Found, cut: Cut) -> None:
    """To the truth, and to the whole call's errors."""
    truth, whole = truth_of(cut), cut.whole(split=False)
    for name, x in truth.items():
        own, plain = error(found[name], x), error(whole[name], x)
        assert own <= LIMITS.get(name, GRADIENTS), f"{name}: {own:.2e}, of the whole call {plain:.2e}"
        assert own <= SUMMED.get(name, WORSE) * plain + 1e-4, f"{name}: {own:.2e}, of the whole call {plain:.2e}"


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        *((name, ranks, {"disable_recompute": ranks == MORE}) for name, ranks in in_turn([*CASES], RANKS, MORE)),
        ("packed", MORE, {}),
        *((name, RANKS, {"relay": False}) for name in ("through_all", "unbounded")),
    ],
    ids=case_and_dtype,
)
def test_virtual_ranks_find_what_one_finds(name: str, ranks: int, options: dict, backend: str):
    """The first of two may also send what it forms before its scan."""
    cut = replace(cut_of(CASES[name], ranks, backend), relay=options.get("relay", True))
    hold(cut.over_ranks(disable_recompute=options.get("disable_recompute", False)), cut)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_virtual_ranks_have_the_bits_of_a_split(ranks: int, backend: str):
    """One sequence, whole chunks, as many on each rank: results, and the gradients of tokens. Two ranks, each of which goes on
    from what the other's scan ends with, have those of no split."""
    cut = cut_of(replace(KIMI, name="ranks_bits", lengths=(64 * 8 * 4,)), ranks, backend)
    found, wanted = cut.over_ranks(), cut.whole(split=False if ranks == 2 else ranks)
    assert all(same_bits(found[name], wanted[name]) for name in ("o", "final_state", *TOKEN_TENSORS))


def test_virtual_ranks_of_many_heads(model: Case, other_backend: str):
    """In steps of 32 tokens. Where the first of two has whole chunks, the second goes on from the bits that one GPU has."""
    case = replace(model, name="ranks_steps", H=48, HV=48, lengths=(8, 1160), state=FP32, memory="long")
    cut = Cut(make_call(case, BF16, "cuda") | {"output_final_state": True, "backend": other_backend}, RANKS)
    whole, truth = cut.whole(), Cut(float64(cut.call), 1).whole(backend="reference")
    found = cut.over_ranks()
    assert all(same_bits(found[name], x) for name, x in whole.items())
    for ways in ({"ranks": 4}, {"relay": False}):
        for name, x in replace(cut, **ways).over_ranks().items():
            own, plain = error(x, truth[name]), error(whole[name], truth[name])
            assert own <= WORSE * plain + 1e-4, f"{name}, {ways}: {own:.2e}, of the whole call {plain:.2e}"


BACKENDS = ["hopper", "triton"]


@pytest.fixture(scope="module", params=BACKENDS)
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """Their findings with a backend. They run once, for the tests of all workers."""
    return of_processes(request.param, RANKS, work, tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((ranks, backend), marks=enough, id=f"{ranks}-{backend}")
        for ranks, enough in ((RANKS, two_gpus), (MORE, more_gpus))
        for backend in BACKENDS
    ],
)
def few_or_more(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The same of two, and what more of them find."""
    ranks, backend = request.param
    return of_processes(backend, ranks, work if ranks == RANKS else work_of_more, tmp_path_factory)


def of_processes(
    backend: str, ranks: int, function: Callable[..., dict], folders: pytest.TempPathFactory
) -> tuple[str, list[dict]]:
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("hopper: not a Hopper GPU")
    found = folder_of_run(folders) / f"ranks-{ranks}-{backend}.pt"
    return backend, once(found, lambda: on_processes(ranks, function, backend, device="cuda", timeout=PATIENCE))


@pytest.mark.parametrize("name", CASES)
def test_gpus_find_what_virtual_ranks_find(few_or_more: tuple[str, list[dict]], name: str):
    """To the bit, in gradients, too; and otherwise."""
    backend, found = few_or_more
    cut = cut_of(CASES[name], len(found), backend)
    joined, virtual = cut.joined([x[name] for x in found]), cut.over_ranks()
    for key, x in virtual.items():
        assert same_bits(joined[key], x.cpu()), key
    assert [x[f"{name} otherwise"] for x in found] == [[]] * len(found)
    hold(joined, cut)


@two_gpus
def test_a_million_tokens_are_the_whole_on_one(processes: tuple[str, list[dict]]):
    for found in processes[1]:
        errors = found["many tokens"]
        off = {name: error for name, error in errors.items() if not error <= LIMITS.get(name, GRADIENTS)}
        assert not off and {"o", *TOKEN_TENSORS, *SUMMED} < errors.keys()


@two_gpus
def test_gpus_of_one_host_put(processes: tuple[str, list[dict]]):
    assert [x["way"] for x in processes[1]] == ["put"] * RANKS


@pytest.mark.long
@pytest.mark.parametrize("of", ["", " backward"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_replays_with_other_lengths(few_or_more: tuple[str, list[dict]], way: str, of: str):
    """With the backward pass in it, too. Sums over all tokens are held to calls with as much room for sequences."""
    backend, found = few_or_more
    cases = (CASES["packed"], replace(CASES["packed"], name="ranks_other", lengths=(4000, 96)))
    for i, cut in enumerate(cut_of(case, len(found), backend) for case in cases):
        wanted = (cut if of else replace(cut, incoming=None)).over_ranks()
        joined = cut.joined([x[f"graph {way}{of}"][i] for x in found])
        assert joined.keys() == wanted.keys()
        assert all(same_bits(joined[key], x.cpu()) for key, x in wanted.items() if key not in SUMMED)
    assert all(x[f"graph {way}{of} alike"] for x in found)


@pytest.mark.parametrize("what", ["delays {}", "delays {} backward", "streams {}"])
@pytest.mark.parametrize("way", WAYS)
def test_late_ranks_change_nothing(few_or_more: tuple[str, list[dict]], way: str, what: str):
    assert all(found[what.format(way)] for found in few_or_more[1])


@two_gpus
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_hears_of_one_that_is_lost(way: str):
    """Within the group's timeout its call raises, or NCCL's watchdog ends it: it does not wait for ever."""
    with pytest.raises(ProcessExitedException) as ended:
        on_processes(RANKS, lose_a_rank, way, "triton", device="cuda", timeout=PATIENCE)
    assert ended.value.exit_code in (TOLD, -signal.SIGABRT)


@two_gpus
def test_sequences_over_two_gpus_train_on_the_curve_of_one(tmp_path: Path):
    """The example, by torchrun."""
    trains_on_one_curve(tmp_path, 1e-3)
