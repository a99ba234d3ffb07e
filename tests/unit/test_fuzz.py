"""A short run of the fuzzer by the reference, and what shows that it can fail."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdelta as fd
from flashdelta.problem import operations
from flashdelta.problem.arguments import Operation
from flashdelta.reference import gate

from ..fuzz import draw, modes, mutate, runner, truth
from ..fuzz.memory import LAYOUTS, Memory, token_place

CPU = torch.device("cpu")
CASES = 12


def run(*arguments: str) -> int:
    return runner.main([*arguments, "--device", "cpu", "--seconds", "600"])


@pytest.mark.parametrize("part", runner.PARTS)
def test_a_short_run_finds_nothing(part: str, tmp_path: Path):
    file = tmp_path / "fuzz.json"
    assert run("--part", part, "--cases", str(CASES), "--json", str(file)) == 0
    document = json.loads(file.read_text())
    assert document["cases"] == CASES == sum(row["cases"] for row in document["rows"])
    assert document["seed"] == 0 and document["ran"].startswith("reference alone")


def failures(capsys: pytest.CaptureFixture) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m tests.fuzz")]


def test_a_failure_prints_the_line_that_reruns_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    exact = gate.beta_of
    monkeypatch.setattr(gate, "beta_of", lambda problem, t: exact(problem, t) * 1.1)
    assert run("--part", "calls", "--cases", "8") == 1
    first = failures(capsys)[0]
    words = first.split("  #")[0].split()[3:]
    assert run(*words) == 1
    monkeypatch.undo()
    assert run(*words) == 0


def end_at_the_third(part: str, seed: int, number: int, device: torch.device) -> runner.Outcome:
    if number == 2:
        os._exit(7)
    return runner.Outcome(part, number, "commit", "right")


def work_that_ends(*arguments: Any) -> None:
    runner.run_case = end_at_the_third
    runner.work(*arguments)


def test_a_process_that_ends_is_a_failure_of_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runner, "work", work_that_ends)
    file = tmp_path / "fuzz.json"
    assert run("--part", "calls", "--cases", "6", "--jobs", "2", "--json", str(file)) == 1
    document = json.loads(file.read_text())
    assert document["cases"] == 1 + 1 + 3 and document["jobs"] == 2
    (failure,) = document["failures"]
    assert (failure["part"], failure["case"]) == ("calls", 2) and failure["message"] == "its process ended with 7"
    assert failure["rerun"].endswith("--part calls --seed 0 --case 2 --device cpu")


def test_a_run_that_is_killed_leaves_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runner, "SAVED_EVERY", 0.0)
    tally = runner.Tally(5, CPU, file=tmp_path / "fuzz.json")
    for number in range(3):
        tally.add(runner.Outcome("calls", number, "commit", "right"))
        assert json.loads(tally.file.read_text())["cases"] == number + 1


def cases(op: str, wanted: str | None) -> Iterator[draw.Spec]:
    for number in range(10_000):
        spec = draw.draw_spec(1, number, CPU)
        tensor = next(spec.places[name] for name in ("q", "x", "initial_state") if name in spec.places)
        if spec.op == op and (wanted is None or wanted in spec.places) and 0 not in tensor.shape:
            yield spec


def first_case(op: str, *, wanted: str | None = None) -> draw.Spec:
    return next(cases(op, wanted))


def test_a_byte_beside_a_tensor_shows(monkeypatch: pytest.MonkeyPatch):
    spec = first_case("chunk_kda", wanted="out")
    case = modes.Case(spec, CPU, 0)
    results = case.run()
    case.hold(results)
    case.contents.memories["q"].bytes[-1] ^= 1
    with pytest.raises(AssertionError, match="q: bytes changed"):
        case.hold(results)


def test_a_slot_that_no_sequence_has_must_stay():
    spec = first_case("fused_recurrent_kda", wanted="state_pool")
    case = modes.Case(spec, CPU, 0)
    results = case.run()
    case.hold(results)
    stored = {claim.index[0] for claim in case.claims if claim.target == "state_pool"}
    pool = case.call["state_pool"]
    for slot in set(range(len(pool))) - stored:
        pool[slot, 0, 0, 0] += 1
        with pytest.raises(AssertionError, match="state_pool: bytes changed"):
            case.hold(results)
        pool[slot, 0, 0, 0] -= 1


def test_a_tangent_is_judged_by_the_state_before_the_call():
    case = modes.Case(first_case("chunk_kda", wanted="state_pool"), CPU, 0)
    before = case.call["state_pool"].clone()
    mutate.SURROUNDINGS["forward_mode"](case)
    case.run()
    assert not torch.equal(case.call["state_pool"], before), "a call that writes no state shows nothing"


def test_what_is_wanted_stays_when_a_pool_is_written():
    pool = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    want = truth.Slots("state_pool", truth.arguments({"state_pool": pool})["state_pool"]).read(1)
    pool.fill_(1.0)
    assert want.eq(0.0).all()


def test_a_call_without_tokens_has_no_tangent():
    spec = next(
        spec
        for spec in (draw.draw_spec(1, number, CPU) for number in range(10_000))
        if spec.op == "chunk_kda" and 0 in spec.places["v"].shape and "state_pool" not in spec.places
    )
    mutate.SURROUNDINGS["forward_mode"](modes.Case(spec, CPU, 0))


def test_a_product_of_two_rounded_numbers_may_be_off_twice():
    exact = torch.tensor([[1 + 0.9 * 2**-24] * 2], dtype=torch.float64)
    claim = truth.Claim("x", (), truth.product_of(1)(exact), read=truth.product_of(1))
    modes.hold_claim(claim, {"x": exact.float()}, torch.float64)
    with pytest.raises(AssertionError, match="relative error"):
        modes.hold_claim(claim, {"x": exact.float() + 2**-23}, torch.float64)


@pytest.mark.parametrize("op, name", [("fused_kda_decode", "conv_state"), ("commit", "intermediate_states")])
def test_a_written_argument_may_lie_elsewhere(op: str, name: str):
    written = False
    for spec in itertools.islice(cases(op, name), 4):
        case = modes.Case(spec, CPU, 0)
        own, elsewhere = case.call[name], case.call[name].clone()
        assert mutate.judge(case, case.call | {name: elsewhere}, frozenset({name})) == "right"
        written |= not torch.equal(elsewhere, own)
    assert written, "calls that write nothing there show nothing"


@pytest.mark.parametrize("op", draw.OPERATORS)
def test_each_operation_is_drawn(op: str):
    drawn = [draw.draw_spec(0, number, CPU) for number in range(200)]
    assert sum(spec.op == op for spec in drawn) >= 3
    assert {spec.op for spec in drawn} == set(draw.OPERATORS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(8))
def test_a_seed_begins_with_each_operator_and_keeps_its_variants(seed: int, device: str):
    drawn = [draw.draw_spec(seed, number, torch.device(device)).op for number in range(300)]
    first = drawn[: len(draw.OPERATORS)]
    assert first == [*draw.OPERATORS]
    assert set(drawn) == set(first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_elements_share_memory_but_expanded_ones(layout: str):
    place = token_place(draw.Random(0), (2, 3, 2, 4), torch.float32, layout)
    memory = Memory(place, CPU)
    x = torch.arange(48.0).view(2, 3, 2, 4)
    memory.fill(x)
    assert torch.equal(memory.tensor, x[:1, :, :1].expand_as(x) if layout == "expanded" else x)
    assert not memory.changed(memory.bytes.clone(), [])


def test_the_operators_are_all_public_ones():
    public = {fd.chunk_kda, fd.fused_recurrent_kda, fd.recurrent_kda, fd.commit, fd.kda_prefill, fd.fused_kda_decode}
    public |= {fd.short_convolution, fd.gated_rms_norm, fd.kernels.chunk_bwd_wy_dqkg}
    assert {function for function, _ in draw.OPERATORS.values()} == public
    checked = [x for x in vars(operations).values() if isinstance(x, Operation)]
    assert len(public) == len(checked)
