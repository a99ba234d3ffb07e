"""`flashdelta bench cp` without a GPU: processes over gloo with a clock that stands still, its rows, and the model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import flashdelta as fd
from flashdelta.hopper import build
from flashdelta.problem.context import context_parallel
from flashdelta.tools.bench import pages, ranks, report, scaling, workloads
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import judge, run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.training import LEAVES
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.bench.workloads import model, select, value

from ..support.forked import imported_once
from ..support.shared import folder_of_run, once

CPU = torch.device("cpu")


class Clock:
    """Calls, and reports how many calls it has seen, which is the same on every rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call) -> float:
        call()
        self.calls += 1
        return float(self.calls)

    def span(self, call, calls: int) -> float:
        return self(call) * calls


def setup(**changes) -> Setup:
    return Setup(CPU, Clock(), Effort(rounds=3), backend="reference", **changes)


def small(name: str, ranks_: int, table: str, **changes) -> ranks.RanksRow:
    case = model(name, "fits a CPU", 2, T=70, K=32, V=32, final=False)
    return ranks.RanksRow(case, table, ranks=ranks_, differentiates=table != ranks.FORWARD, **changes)


ROWS = [
    small("forward", 2, ranks.FORWARD),
    small("step", 2, "packed"),
    small("alone", 1, ranks.ALONE),
    small("kept", 1, ranks.ALONE, kept=True),
    small("stack", 2, ranks.STACK, layers=2, joined=True),
]


@pytest.mark.slow
def test_processes_measure_every_contender(document: dict):
    forward, step, alone, kept, stack = document["rows"]
    assert [row["ranks"] for row in document["rows"]] == [2, 2, 1, 1, 2]
    assert {"one", "ours", "no_relay", "gather", "exchange", "exchange_gather"} <= forward.keys()
    assert "exchange_backward" not in forward and "no_relay" not in step
    assert step["fla"] == {"problem": "not asked for"} and [*forward["ours"]["error"]] == ["o"]
    for row in (step, alone, kept):
        assert [*row["ours"]["error"]] == ["o", *LEAVES] and 0 <= max(row["ours"]["error"].values()) < 1e-2
    assert {"exchange_backward", "exchange_backward_gather"} <= step.keys()
    assert not {"gather", "exchange", "exchange_backward"} & alone.keys()
    assert {"one", "ours", "no_relay"} <= stack.keys() and "gather" not in stack
    assert [row["ours"].get("exchange") for row in document["rows"]] == ["gather", "gather", None, None, "gather"]
    for row in document["rows"]:
        names = (
            "one",
            "ours",
            "no_relay",
            "gather",
            *(f"exchange{x}{y}" for x in ("", "_backward") for y in ("", "_gather")),
        )
        timed = [name for name in names if name in row]
        # in turns: each of the contenders has the clock's first reading once
        assert sorted(row[name]["ms"]["min"] for name in timed) == [*range(1, len(timed) + 1)]
        assert all(row[name]["ms"]["samples"] == 3 and row[name]["problem"] is None for name in timed)
        assert row["efficiency"] == row["one"]["ms"]["median"] / row["ours"]["ms"]["median"]
        assert row["modelled"] is None and row["speedup"] is None
        assert all(row[name]["sustained_ms"] > 0 for name in timed)
        assert row["sustained_efficiency"] == row["one"]["sustained_ms"] / row["ours"]["sustained_ms"]
        assert [*row["seconds"]] == ["processes", "make", "first calls", "check", "time", "sustained", "profile"]
        assert all(x >= 0 for x in row["seconds"].values())
    # those of two ranks run already
    assert alone["seconds"]["processes"] > 0 and kept["seconds"]["processes"] > 0


@pytest.mark.slow
def test_what_fails_is_said_and_not_timed(document: dict):
    found = document["rows"][0]["fla"]
    assert found["problem"] and "ms" not in found and document["rows"][0]["ours"]["ms"]
    assert len(report.show(document, VIEWS["cp"], wide=True)) > 0


# ---- what is not timed ---------------------------------------------------------------------------------------------------


def damaged(what: str, position: int):
    """`chunk_kda`, whose result `what` is wrong: "o", or a gradient; on the rank `position`."""

    def wrong(**call):
        rank = torch.distributed.get_rank()
        if what != "o" and rank == position:
            given = call[what]
            given = given + 0.2 * (given - given.detach())
            call = call | {what: given}
        o, *others = fd.chunk_kda(**call)
        return (o * torch.nan if what == "o" and rank == position else o), *others

    return wrong


class Peer:
    """What a process finds of FLA: our reference on our context, right, or with a result that is wrong on one rank."""

    def __init__(self, what: str = "", position: int = 0):
        self.what, self.position = what, position

    def __call__(self, group, row, options):
        found = damaged(self.what, self.position) if self.what else fd.chunk_kda
        ranks.find = lambda name: found
        ranks._context_of_fla = lambda offsets, group: context_parallel(offsets, group=group)
        return RIGHT(group, row, options)


RIGHT = ranks._work


class Wrong(Peer):
    """Ours is wrong, FLA's right; the whole call has no context, and is."""

    def __call__(self, group, row, options):
        wrong = damaged(self.what, self.position)
        ranks.chunk_kda = lambda **call: wrong(**call) if call.get("split") is not False else fd.chunk_kda(**call)
        return Peer()(group, row, options)


class Refuses:
    """Ours raises on all ranks, FLA's and the call on one GPU don't."""

    def __call__(self, group, row, options):
        def refuse(**call):
            if "cp_context" in call:
                raise torch.OutOfMemoryError("no memory for ours")
            return fd.chunk_kda(**call)

        ranks.chunk_kda = refuse
        return Peer()(group, row, options)


class Raises:
    """A rank that ends with an error, and one that waits for it."""

    def __call__(self, group, row, options):
        if row.name == "forward":
            if group.rank() == 1:
                raise torch.OutOfMemoryError("no memory for 151 GB")
            torch.distributed.barrier()
        return RIGHT(group, row, options)


def measured(folder: Path, patch: pytest.MonkeyPatch, work: Callable, *rows: ranks.RanksRow) -> list[dict]:
    patch.setattr(ranks, "_work", work)
    beside = setup(peers={"fla": print})
    return run(BENCHMARKS["cp"], beside, folder / "results.json", list(rows))["rows"]


STEP = small("step", 2, ranks.STEP, bounds=(workloads.Bound("efficiency", 0.0, any_gpu=True),))
RESULTS = ("o", "beta", "A_log")


def serve(group: dist.ProcessGroup, asked: list[Connection]) -> None:
    """Runs what comes, each with `ranks` as it was."""
    own, before = asked[group.rank()], dict(vars(ranks))
    while task := own.recv():
        work, *arguments = task
        own.send(work(group, *arguments))
        vars(ranks).update(before)


@contextmanager
def pair() -> Iterator[Callable]:
    """An `on_processes` that starts two once, as that takes longer than the small calls; other numbers as ever."""
    started, (ours, theirs) = ranks.on_processes, zip(*(Pipe() for _ in range(2)))
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(started, 2, serve, theirs)

        def answer(one: Connection) -> dict:
            while not one.poll(0.05):
                if ended.done():
                    raise RuntimeError("the processes have ended") from ended.exception()
            return one.recv()

        def again(count: int, work: Callable, *arguments: object, **options: object) -> list[dict]:
            if count != 2:
                return started(count, work, *arguments, **options)
            for one in ours:
                one.send((work, *arguments))
            return [*map(answer, ours)]

        try:
            yield again
        finally:
            for one in ours:
                one.send(None)
        ended.result()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[object, dict]:
    """The document of `ROWS`; by whose result is wrong on one rank alone, and which, that row; the one where ours raises."""
    folder = folder_of_run(tmp_path_factory) / "ranks"

    def make() -> dict[object, dict]:
        folder.mkdir()
        beside = setup(peers={"fla": print}, peer_rows=frozenset([ROWS[0].name]))
        works: dict = {("fla", what): Peer(what, 1) for what in RESULTS}
        works |= {("ours", what): Wrong(what, 1) for what in RESULTS} | {"raises": Refuses()}
        with imported_once(), pair() as again, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "on_processes", again)
            document = run(BENCHMARKS["cp"], beside, folder / "document.json", ROWS)
            return {"document": document} | {key: measured(folder, patch, work, STEP)[0] for key, work in works.items()}

    return once(folder.with_suffix(".pt"), make)


@pytest.fixture
def document(found: dict[object, dict]) -> dict:
    """In the first row with FLA, whose kernels fail on a CPU, on every rank."""
    return found["document"]


def test_processes_that_start_at_once_take_no_time(monkeypatch):
    """Not less than none: what is left of the whole is rounded, not what is taken away."""
    laps = {name: 0.0006 for name in ("make", "first calls", "check", "time", "sustained", "profile")}
    now = iter((0.0, sum(laps.values())))
    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    found = {name: {"problem": "not timed"} for name in ("ours", "one", "fla")} | {"seconds": laps}
    monkeypatch.setattr(ranks, "on_processes", lambda *_, **__: [found])
    (row,) = ranks.measure(STEP, setup())
    assert row["seconds"] == {"processes": 0.0} | {name: 0.001 for name in laps}


@pytest.mark.slow
@pytest.mark.parametrize("what", RESULTS)
def test_what_is_wrong_is_not_timed(found: dict[object, dict], what: str):
    """On one rank alone, in a result or a gradient alone."""
    fla = found["fla", what]
    assert fla["fla"]["problem"].startswith(f"wrong: error {what}") and "ms" not in fla["fla"]
    assert fla["ours"]["problem"] is None and fla["met"] is True and fla["speedup"] is None
    ours = found["ours", what]
    assert f"wrong: error {what}" in ours["ours"]["problem"] and "ms" not in ours["ours"]
    assert ours["fla"]["problem"] is None and ours["fla"]["ms"] and max(ours["fla"]["error"].values()) < 1e-2
    assert ours["met"] is None and report.failures({"rows": [ours]}) == [ours]


@pytest.mark.slow
def test_a_split_call_is_checked_itself(tmp_path, monkeypatch):
    """Not a call over one rank."""
    with imported_once():
        (row,) = measured(tmp_path, monkeypatch, Wrong("o", 0), replace(STEP, table=ranks.ALONE, ranks=1))
    assert row["ours"]["problem"].startswith("wrong: error o") and row["fla"]["ms"] and row["one"]["ms"]
    assert row["fla"]["FLA_INTRACARD_CP"] == "1" and "FLA_INTRACARD_CP" not in os.environ


@pytest.mark.slow
def test_what_raises_leaves_the_others_of_its_row(found: dict[object, dict]):
    row = found["raises"]
    assert row["ours"]["problem"] == "OutOfMemoryError: no memory for ours" and "ms" not in row["ours"]
    assert row["one"]["ms"] and row["fla"]["ms"] and row["fla"]["problem"] is None and row["met"] is None


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others(tmp_path, monkeypatch):
    forward, alone = measured(tmp_path, monkeypatch, Raises(), ROWS[0], ROWS[2])
    assert forward["ours"]["problem"] == "torch.OutOfMemoryError: no memory for 151 GB"
    assert forward["efficiency"] is None and forward["fla"]["problem"] == forward["ours"]["problem"]
    assert alone["ours"]["problem"] is None and alone["ours"]["ms"]


def test_a_nan_of_one_rank_is_a_fault():
    assert ranks._faults("ours", {"o": float("inf"), "q": 1e-3}) == {"ours": "wrong: error o inf, tolerance 6e-03"}
    assert ranks._faults("ours", {"o": 5e-3, "q": 1.9e-2}) == {} and ranks._faults("fla", {"o": 4.9e-2}) == {}


def test_fla_takes_no_part_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    cuda = replace(setup(peers={"fla": print}), device=torch.device("cuda"))
    for gib in (150, 140):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        why = {row.name: ranks._why_no_fla(row, cuda) for row in ranks.ROWS if not row.layers}
        said = why.pop("fwd+bwd H32 512K x 2")
        assert said == ("takes about 141 GiB, the GPU has 140" if gib == 140 else None) and not any(why.values())


def test_the_last_words_of_a_process():
    said = "-- Process 1 terminated:\nTraceback\n  File x\ntorch.OutOfMemoryError: no room.\nSee the manual"
    assert ranks.last_words(RuntimeError(said)) == "torch.OutOfMemoryError: no room."
    assert ranks.last_words(RuntimeError("process 1 ended\nwith 9")) == "with 9"
    assert ranks.last_words(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("wanted", [2, 4, 8])
def test_too_few_gpus_are_named_before_anything_runs(wanted: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: wanted - 1)
    (row,) = select(ranks.ROWS, [f"fwd H32 32K x {wanted}"], ranks.MORE)
    said = rf"^device: got {wanted - 1} GPUs, wanted {wanted} for the row 'fwd H32 32K x {wanted}'"
    with pytest.raises(ValueError, match=said):
        next(ranks.measure(row, replace(setup(), device=torch.device("cuda"))))


def test_every_number_of_gpus_has_rows_and_bounds():
    rows = {row.name: row for row in (*ranks.ROWS, *ranks.MORE)}
    assert {row.ranks for row in ranks.ROWS} == {1, 2} and {row.ranks for row in ranks.MORE} == {4, 8}
    for count in scaling.RANKS:
        for heads in scaling.HEADS:
            for tokens in scaling.TOKENS:
                for kind in ("fwd", "fwd+bwd"):
                    row = rows[f"{kind} H{heads} {tokens}K x {count}"]
                    assert (row.call.H, row.call.T, row.ranks) == (heads, tokens * 1024, count)
        assert f"fwd+bwd H32 32K x {count} packed" in rows
    least = [next(bound.limit for bound in rows[f"fwd+bwd H32 32K x {count}"].bounds) for count in (2, 4, 8)]
    assert least == [0.85, 0.80, 0.75]
    assert [row.name for row in ranks.ROWS[-2:]] == ["fwd H32 512K x 2", "fwd+bwd H32 512K x 2"]
    assert [row.name for row in ranks.ROWS if row.table == ranks.ALONE] == [
        *("fwd+bwd H4 32K", "fwd+bwd H4 128K", "fwd+bwd H4 32K kept", "fwd+bwd H4 128K kept")
    ]
    assert all(row.bounds == (workloads.Bound("efficiency", 2.0),) for row in ranks.ROWS if row.ranks == 1)
    # a million tokens
    for count in scaling.RANKS:
        name = f"fwd+bwd H32 {1024 // count}K x {count}"
        assert rows[name].call.T * count == 2**20, name


def test_a_table_of_all_rows_fits_80_columns():
    """With what a run of many GPUs will find."""
    document = report.load(pages.RESULTS / "train-hopper-h200.json") | {"benchmark": "cp", "rows": []}
    for row in (*ranks.ROWS, *ranks.MORE):
        times = {"one": 123.456, "ours": 145.678, "exchange": 0.036, "fla": 412.3}
        found = {name: {"ms": {"median": ms}, "problem": None} for name, ms in times.items()}
        document["rows"].append(ranks.described(row, found))
        judge(document["rows"][-1], row.bounds, [], True)
    text = report.show(document, VIEWS["cp"])
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert len(report.show(document, VIEWS["cp"], wide=True)) > len(text)


def test_a_wide_table_says_which_times_are_cold_and_what_errors_are_against():
    """So does the page that has it."""
    said = {column.wide_title or column.title for column in VIEWS["cp"].columns} - {"GiB", "met"}
    errors = {title for title in said if "1 GPU's call" in title}
    assert len(errors) == 2 and all("cold" in title or "sustained" in title for title in said - errors)
    page = (pages.RESULTS.parents[1] / "docs" / "parallel.md").read_text()
    assert all(f"| {title} |" in page for title in said)


def test_a_row_has_the_prediction_of_the_model():
    (row,) = select(ranks.ROWS, ["fwd+bwd H32 8K x 2"])
    one = {"ms": {"median": 2.0}, "sustained_ms": 2.0}
    found = ranks.described(row, {"one": one, "ours": {"ms": {"median": 2.5}}, "fla": {"ms": None}})
    assert found["efficiency"] == 0.8 and found["speedup"] is None
    assert found["modelled"] == pytest.approx(2.0 / (2.0 + scaling.added_us(8192, 32, 2, scaling.REVERSE_US[32]) / 1e3))


# ---- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_takes_what_was_measured():
    for mib, us in scaling.GATHER_US:
        assert scaling.exchange_us(mib, 2, "gather") == us
    for mib, us in scaling.PUT_US:
        # the rank copies what it has got, and each byte is read and written
        copied = 2 * mib * 2**20 / 4.27e6
        assert scaling.exchange_us(mib, 2, "put") == pytest.approx(us + 5 + copied)
    assert scaling.exchange_us(36, 2, "gather") == (55 + 290) / 2 and scaling.exchange_us(128, 2, "gather") > 500
    train = report.load(pages.RESULTS / "train-hopper-h200.json")
    for heads, us in scaling.REVERSE_US.items():
        row = next(row for row in train["rows"] if row["name"] == f"B1 T8192 H{heads}")
        kernels = {kernel["kernel"]: kernel["ms"] for kernel in row["ours"]["kernels"]}
        assert kernels["reverse_kernel"] * 1e3 == pytest.approx(us, abs=0.1)
        assert value(train, "ceilings.copy_tb_s") == pytest.approx(scaling.COPY_TB_S, abs=0.01)


def test_the_model_adds_what_a_rank_does_more():
    # 128 chunks, as many CTAs as SMs or twice as many
    assert scaling.transitions_us(8192, 32) == pytest.approx(128 * 0.57)
    assert scaling.transitions_us(8192, 64) == pytest.approx(2 * 128 * 0.57)
    # forwards of as many heads as go through chunks in steps
    assert build.STEPS_FROM[128, True] == scaling.STEPS_FROM
    assert scaling.added_us(8192, 64, 4, None) - scaling.added_us(8192, 64, 4, 0.0) == pytest.approx(
        2 * 128 * (0.89 - 0.57) - 2 * scaling.merge_us(64, 4)
    )
    assert scaling.merge_us(32, 4) == pytest.approx(3 * 2 * 2.3)
    # 4 MiB from one rank, 12 from three; of two ranks b alone, as c, half as much
    assert scaling.exchange_us(4, 2, "put") == pytest.approx(20.7, abs=0.1)
    assert scaling.exchange_us(4, 4, "put") == pytest.approx(52.0, abs=0.1)
    assert scaling.added_us(8192, 32, 2, None) == pytest.approx(1.0 + 4.6, abs=0.1)
    assert scaling.added_us(8192, 32, 2, None, "gather") == pytest.approx(35.3 + 4.6, abs=0.1)
    assert scaling.added_us(8192, 32, 4, None) == pytest.approx(73.0 + 52.0 + 13.8, abs=0.1)
    assert scaling.added_us(8192, 32, 2, 140.9) == pytest.approx(140.9 + 2 * 15.1 + 9.2, abs=0.2)
    assert scaling.added_us(8192, 32, 2, 140.9, "gather") == pytest.approx(140.9 + 2 * 35.3 + 9.2, abs=0.2)
    # by put the exchange of c takes no time where the forward's recurrence runs again beside it
    assert scaling.added_us(8192, 32, 4, 140.9) == pytest.approx(73.0 + 52.0 + 3 * 13.8 + 140.9, abs=0.2)
    assert scaling.efficiency(1.0, 8192, 8, 2, True) is None and scaling.efficiency(1.0, 8192, 32, 1, True) is None


def test_efficiency_falls_with_ranks_and_rises_with_tokens():
    for differentiates in (False, True):
        found = [[scaling.efficiency(T / 8192, T, 32, n, differentiates) for n in (2, 4, 8)] for T in (8192, 32768)]
        assert all(a > b for line in found for a, b in itertools.pairwise(line))
        assert all(a < b for a, b in zip(*found))
