"""`flashdelta bench cp` without a GPU: processes over gloo with a clock that stands still, its rows, and the model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashdelta.tools.bench import pages, ranks, report, scaling
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import judge, run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.bench.workloads import model, select, value

CPU = torch.device("cpu")


class Clock:
    """Calls, and reports how many calls it has seen, which is the same on every rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call) -> float:
        call()
        self.calls += 1
        return float(self.calls)


def setup(**changes) -> Setup:
    return Setup(CPU, Clock(), Effort(rounds=3), backend="reference", **changes)


def small(name: str, ranks_: int, table: str) -> ranks.RanksRow:
    case = model(name, "fits a CPU", 2, T=70, K=32, V=32, final=False)
    return ranks.RanksRow(case, table, ranks=ranks_, differentiates=table != ranks.FORWARD)


ROWS = [
    small("forward", 2, ranks.FORWARD),
    small("step", 2, "packed"),
    small("alone", 1, ranks.ALONE),
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """In the first row with FLA, whose kernels fail on a CPU, on every rank."""
    folder = tmp_path_factory.mktemp("cp")
    beside = setup(peers={"fla": print}, peer_rows=frozenset([ROWS[0].name]))
    return run(BENCHMARKS["cp"], beside, folder / "results.json", ROWS)


@pytest.mark.slow
def test_processes_measure_every_contender(document: dict):
    forward, step, alone = document["rows"]
    assert [row["ranks"] for row in document["rows"]] == [2, 2, 1]
    assert (
        {"one", "ours", "gather", "exchange", "exchange_gather", "fla"} <= forward.keys()
        and "fla" not in step
        and "exchange_backward" not in forward
    )
    assert {"exchange_backward", "exchange_backward_gather"} <= step.keys()
    assert not {"gather", "exchange", "exchange_backward"} & alone.keys()
    assert [row["ours"].get("exchange") for row in document["rows"]] == ["gather", "gather", None]
    for row in document["rows"]:
        names = ("one", "ours", "gather", *(f"exchange{x}{y}" for x in ("", "_backward") for y in ("", "_gather")))
        timed = [name for name in names if name in row]
        # in turns: each of the contenders has the clock's first reading once
        assert sorted(row[name]["ms"]["min"] for name in timed) == [*range(1, len(timed) + 1)]
        assert all(row[name]["ms"]["samples"] == 3 and row[name]["problem"] is None for name in timed)
        assert row["ours"]["error"]["o"] < 1e-2
        assert row["efficiency"] == row["one"]["ms"]["median"] / row["ours"]["ms"]["median"]
        assert row["modelled"] is None and row["speedup"] is None


@pytest.mark.slow
def test_what_fails_is_said_and_not_timed(document: dict):
    found = document["rows"][0]["fla"]
    assert found["problem"] and "ms" not in found
    assert len(report.show(document, VIEWS["cp"], wide=True)) > 0


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
    # a million tokens
    assert rows["fwd+bwd H32 512K x 2"].call.T * 2 == 2**20
    assert rows["fwd+bwd H32 128K x 8"].call.T * 8 == 2**20


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


def test_a_row_has_the_prediction_of_the_model():
    (row,) = select(ranks.ROWS, ["fwd+bwd H32 8K x 2"])
    found = ranks.described(row, {"one": {"ms": {"median": 2.0}}, "ours": {"ms": {"median": 2.5}}, "fla": {"ms": None}})
    assert found["efficiency"] == 0.8 and found["speedup"] is None
    assert found["modelled"] == pytest.approx(2.0 / (2.0 + scaling.added_us(8192, 32, 2, 140.9) / 1e3))


# ---- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_takes_what_was_measured():
    for mib, us in scaling.GATHER_US:
        assert scaling.exchange_us(mib, 2, "gather") == us
    for mib, us in scaling.PUT_US:
        # the rank copies its own packet and what it has got, and each byte is read and written
        copied = 4 * mib * 2**20 / 4.24e6
        assert scaling.exchange_us(mib, 2, "put") == pytest.approx(us + 5 + copied)
    assert scaling.exchange_us(36, 2, "gather") == (55 + 290) / 2 and scaling.exchange_us(128, 2, "gather") > 500
    train = report.load(pages.RESULTS / "train-hopper-h200.json")
    for heads, us in scaling.REVERSE_US.items():
        row = next(row for row in train["rows"] if row["name"] == f"B1 T8192 H{heads}")
        kernels = {kernel["kernel"]: kernel["ms"] for kernel in row["ours"]["kernels"]}
        assert kernels["reverse_kernel"] * 1e3 == pytest.approx(us, abs=0.1)
        assert value(train, "ceilings.copy_tb_s") == pytest.approx(scaling.COPY_TB_S, abs=0.01)


def test_the_model_adds_what_a_rank_does_more():
    # 128 chunks, as many CTAs as SMs or twice as many; without M half as many, and memory decides
    assert scaling.transitions_us(8192, 32, 4) == pytest.approx(128 * 0.57)
    assert scaling.transitions_us(8192, 64, 4) == pytest.approx(2 * 128 * 0.57)
    assert scaling.transitions_us(8192, 32, 2) == pytest.approx(128 * 0.57)
    assert scaling.transitions_us(8192, 64, 2) == pytest.approx(128 * 64 * 57_856 / 4.24e6)
    assert scaling.merge_us(32, 4) == pytest.approx(3 * 2 * 2.3)
    # 4 MiB from one rank, 12 from three; of c half as much
    assert scaling.exchange_us(4, 2, "put") == pytest.approx(22.7, abs=0.1)
    assert scaling.exchange_us(4, 4, "put") == pytest.approx(54.0, abs=0.1)
    assert scaling.added_us(8192, 32, 2, None) == pytest.approx(73.0 + 22.7 + 4.6, abs=0.1)
    assert scaling.added_us(8192, 32, 2, None, "gather") == pytest.approx(73.0 + 36 + 4.6, abs=0.1)
    with_reverse = scaling.added_us(8192, 32, 2, 140.9)
    assert with_reverse == pytest.approx(73.0 + 22.7 + 4.6 + 140.9 + 16.1 + 9.2, abs=0.2)
    assert scaling.efficiency(1.0, 8192, 8, 2, True) is None and scaling.efficiency(1.0, 8192, 32, 1, True) is None


def test_efficiency_falls_with_ranks_and_rises_with_tokens():
    for differentiates in (False, True):
        found = [[scaling.efficiency(T / 8192, T, 32, n, differentiates) for n in (2, 4, 8)] for T in (8192, 32768)]
        assert all(a > b for line in found for a, b in itertools.pairwise(line))
        assert all(a < b for a, b in zip(*found))
