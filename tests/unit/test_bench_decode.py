"""`bench decode` without a GPU."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace

import pytest
import torch

import flashdelta
from flashdelta.tools.bench import decode, report
from flashdelta.tools.bench.decode import DECODE, QUICK, Bound, DecodeCase, Pools, run_decode
from flashdelta.tools.bench.peers import DecodePeer
from flashdelta.tools.bench.protocol import Ceilings, Effort

SMALL = DecodeCase(N=3, H=1, HV=2, K=32, reason="fits a CPU", fla=True, host=True, bound=Bound(must=0.88, aim=0.94))


class FakeTimer:
    """Runs the call and says 1 ms."""

    def __call__(self, run):
        run()
        return 1.0


def dry_run(tmp_path, cases, fla=None):
    return run_decode(
        cases,
        device=torch.device("cpu"),
        fla=fla or DecodePeer(None, "FLA is not here"),
        effort=Effort(rounds=3, warmup_ms=0.0),
        path=tmp_path / "results.json",
        timer=FakeTimer(),
        ceilings=Ceilings(copy_tb_s=4.3, gemm_tflop_s=700.0),
        pool_bytes=2**20,
        walk_bytes=2**17,
        launches=4,
        host_calls=2,
    )


def shown(document):
    console = report.wide_console(record=True, file=io.StringIO())
    console.print(report.decode_table(document))
    return console.export_text()


def test_rows_are_what_the_issue_asks_for():
    names = [case.name for case in DECODE]
    assert len(set(names)) == len(names) == 120
    heads = [(32, 32), (12, 12), (16, 64), (64, 128), (32, 128)]
    for N, (H, HV), state in itertools.product((1, 4, 8, 16, 32, 64, 128, 256), heads, ("fp32", "bf16")):
        assert (
            sum(
                (c.N, c.H, c.HV, c.state, c.K, c.gate, c.S, c.v_first) == (N, H, HV, state, 128, "lower_bound", 0, True)
                for c in DECODE
            )
            == 1
        )
    assert {
        "N128 H32 bf16 softplus",
        "N128 H32 fp32 none",
        "N1 H32 bf16 K first",
        "N32 H32 fp32 S7",
        "N4 H32 K64 bf16",
    } <= set(names)
    assert all(case.name in names for case in QUICK)
    assert all(case.N * case.tokens * case.state_bytes <= 2**32 for case in DECODE)


def test_bounds_are_the_anchors():
    bounds = {case.name: case.bound.words() for case in DECODE if case.bound is not None}
    assert bounds == {
        **{f"N1 H32 {state}": "<= 5 us" for state in ("fp32", "bf16")},
        **{f"N{N} H32 {state}": ">= 88%" for N in (128, 256) for state in ("fp32", "bf16")},
        **{f"N32 H32 {state}": ">= 85%" for state in ("fp32", "bf16")},
        "N8 H32 fp32": "<= 12 us",
        "N8 H32 bf16": "<= 8 us",
    }
    assert Bound(must=5, aim=4, unit="us").met(4.9, 0.1) and not Bound(must=0.88, aim=0.94).met(4.9, 0.87)


def test_bytes_of_the_states():
    case = DecodeCase(N=256, reason="")
    assert case.moved_bytes == 2 * 256 * 32 * 128 * 128 * 4
    assert replace(case, S=3, state="bf16").moved_bytes == 5 * 256 * 32 * 128 * 128 * 2


CASES = [
    SMALL,
    replace(SMALL, state="bf16"),
    replace(SMALL, gate="softplus"),
    replace(SMALL, gate="none", v_first=False),
    replace(SMALL, S=3),
    replace(SMALL, N=1),
]


def test_dry_run_measures_and_saves_every_row(tmp_path):
    document = dry_run(tmp_path, CASES)
    assert [row["ours"]["problem"] for row in document["rows"]] == [None] * len(CASES)
    row, problem = document["rows"][0], document["rows"][4]
    assert row["launches"] == 4 and row["ours"]["us"] == pytest.approx(1e3 / 4)
    assert row["floor_us"] == pytest.approx(SMALL.moved_bytes / 4.3e6)
    assert row["share"] == pytest.approx(row["floor_us"] / 250)
    assert row["ours"]["error_o"] < 5e-3 and row["ours"]["error_state"] < 5e-3 and row["ours"]["host_us"] > 0
    assert (row["gate"], row["met"], row["fla"]["problem"]) == (">= 88%", None, "FLA is not here")
    assert problem["token_cost"] == pytest.approx(problem["ours"]["us"] / 4 / row["ours"]["us"])
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    text = shown(document)
    for expected in ("N3 H1 HV2 K32 fp32 S3", "250.00", "copy 4.30 TB/s"):
        assert expected in text
    assert report.decode_summary(document)[1] == "correctness: all rows passed"


def test_fla_is_timed_beside_us_on_the_same_pool(tmp_path):
    """A stand-in that takes what FLA takes."""

    def step(*, inplace_final_state, use_beta_sigmoid_in_kernel, out, **call):
        assert inplace_final_state
        flashdelta.recurrent_kda(**call, beta_is_logit=use_beta_sigmoid_in_kernel, output=out)

    document = dry_run(tmp_path, CASES[:4], DecodePeer(step))
    for row in document["rows"]:
        assert row["speedup"] == pytest.approx(1.0) and row["share_fla"] == pytest.approx(row["share"])
        assert (
            row["fla"]["error_o"] == row["ours"]["error_o"] and row["fla"]["error_state"] == row["ours"]["error_state"]
        )


@pytest.mark.parametrize("damage", ["wrong", "unwritten", "raises"])
def test_a_wrong_kernel_is_not_timed(tmp_path, monkeypatch, damage):
    right = flashdelta.recurrent_kda

    def kernel(*, backend, output=None, **call):
        if backend == "reference":
            return right(**call, backend=backend)
        if damage == "raises":
            raise RuntimeError("no such kernel\nand more")
        o, state = right(**call)
        if damage == "wrong":
            output.copy_(o * 1.02)
        return output, state

    monkeypatch.setattr(flashdelta, "recurrent_kda", kernel)
    document = dry_run(tmp_path, [SMALL])
    row = document["rows"][0]
    assert row["ours"]["us"] is None
    wanted = {
        "wrong": "wrong: error o 2",
        "unwritten": "wrong: error o nan",
        "raises": "RuntimeError: no such kernel",
    }
    assert wanted[damage] in row["ours"]["problem"]
    assert report.failures(document) == [row]
    assert ("wrong" in shown(document)) == (damage != "raises")


def test_a_failed_check_leaves_the_pool_as_it_was():
    pools = Pools(torch.device("cpu"), 2**18)
    setup = decode.DecodeSetup(
        torch.device("cpu"), FakeTimer(), None, "auto", DecodePeer(None), Effort(), pools, walk_bytes=2**15
    )
    step = decode.make_step(SMALL, setup)
    some = step.slots[0][:2].long()
    before = step.pool[some]
    decode.errors(step, decode.our_call(step, "auto"))
    assert torch.equal(step.pool[some], before)
