"""Situations that users reported, in core operators: a row each, with what must come of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdelta as fd
from flashdelta.problem import device_checks
from flashdelta.tools.cli import demo, doctor

from ..support.cases import BY_NAME, Case, case_id
from ..support.gradients import gradients, incoming
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import as_recurrent, assert_close, float64
from ..support.readouts import OPERATORS, check_layer, check_readout
from ..support.scalar_decay import CASES, expanded, gated_delta_net, scalar_call

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_a_readout_past_float16(op: Callable, dtype: torch.dtype):
    check_readout(op, dtype, "reference")


@pytest.mark.parametrize("tokens", [4, 70], ids=["token by token", "in chunks"])
def test_a_layer_in_float16(tokens: int):
    check_layer(tokens, "reference")


@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda], ids=lambda op: op.__name__)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gated_delta_net_is_kda_with_g_expanded(case: Case, op: Callable):
    """And so are its gradients, those of g `[B, T, HV]` and dt_bias `[HV]` too."""
    call = float64(scalar_call(case, torch.float64))

    def run(**given: Any) -> tuple:
        return op(**expanded(given if op is fd.chunk_kda else as_recurrent(given)))[:2]

    for name, found, want in zip(("o", "final_state"), run(**call), gated_delta_net(**call)):
        assert_close(name, found, want, 1e-11)
    found, want = (gradients(call, *incoming(call), f) for f in (run, gated_delta_net))
    assert found.keys() == want.keys()
    for name, x in want.items():
        assert_close(f"grad of {name}", found[name], x, 1e-9)


def sequences(**changes: Any) -> dict[str, Any]:
    """Log decays as they are, of 70 tokens."""
    return make_call(BY_NAME["decay"]) | changes


def positive(call: dict[str, Any]) -> dict[str, Any]:
    g = call["g"].clone()
    g[0, -1, 0, 0] = 0.25
    return call | {"g": g}


def step(*slots: int, **changes: Any) -> dict[str, Any]:
    """A token each of so many sequences over a pool of 4 slots."""
    N = len(slots)
    q, k, v = torch.randn(3, N, 1, 2, 32)
    call = {"q": q, "k": k, "v": v, "g": -torch.rand(N, 1, 2, 32), "beta": torch.rand(N, 1, 2)}
    pool = {"initial_state": torch.zeros(4, 2, 32, 32), "ssm_state_indices": torch.tensor(slots)}
    return call | pool | changes


def read_only() -> dict[str, Any]:
    """A step from a pool that it does not write."""
    source = {"initial_state_source": torch.zeros(4, 2, 32, 32), "initial_state_indices": torch.tensor([1])}
    return step(1, initial_state=None, ssm_state_indices=None, update_state=False, null_index="non_positive", **source)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def pooled(*slots: int, **changes: Any) -> dict[str, Any]:
    pool = {"state_pool": torch.zeros(4, 2, 32, 64), "state_v_first": False, "use_qk_l2norm_in_kernel": True}
    return sequences(**pool, state_indices=torch.tensor(slots), initial_state=None, output_final_state=False) | changes


def marked(offset: int, index: int) -> dict[str, Any]:
    return {"checkpoint_offsets": torch.tensor([offset]), "checkpoint_indices": torch.tensor([index])}


def regular(rows: int, *lengths: int) -> dict[str, Any]:
    buffer = {"checkpoint_states": torch.zeros(rows, 2, 32, 64), "checkpoint_every": 64}
    return sequences(**buffer, cu_seqlens=offsets(*lengths))


def committed(slot: int, count: int) -> dict[str, Any]:
    states = {"initial_state": torch.zeros(4, 2, 32, 32), "intermediate_states": torch.zeros(4, 3, 2, 32, 32)}
    return states | {"ssm_state_indices": torch.tensor([slot]), "num_accepted_tokens": torch.tensor([count])}


def replayed(count: int) -> dict[str, Any]:
    """A row of a replay buffer that has recorded two tokens of three."""
    records = fd.replay_buffer(4, 2, 2, 32, 32)
    verify = step(1) | {"num_spec_tokens": 2, "update_state": False, "intermediate_states": records}
    verify |= {name: verify[name].expand(1, 2, *[-1] * (verify[name].dim() - 2)) for name in TOKEN_TENSORS}
    fd.recurrent_kda(**verify, cu_seqlens=offsets(0, 2))
    return committed(1, count) | {"intermediate_states": records}


def convolved(**changes: Any) -> dict[str, Any]:
    return {"x": torch.randn(1, 20, 8), "weight": torch.randn(8, 4)} | changes


def normed(x: torch.dtype, z: torch.dtype, weight: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(3, 32, dtype=x), "z": torch.randn(3, 32, dtype=z), "weight": torch.ones(32, dtype=weight)}


def prefilled(decay: float) -> dict[str, Any]:
    q, k, v, g = torch.randn(4, 1, 2, 64, 64)
    return {"q": q, "k": k, "v": v, "g": torch.full_like(g, decay), "beta": torch.rand(1, 2, 64)}


HALF, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


ASKED = "FLASHDELTA_CHECK=1"
REFUSED: dict[Callable, dict[str, tuple[Callable[[], dict], str]]] = {
    fd.chunk_kda: {
        "a bound that no gate reads": (lambda: sequences(lower_bound=-5.0), "lower_bound must .*; got -5"),
        "offsets fall": (lambda: sequences(cu_seqlens=offsets(0, 50, 20, 70)), ".* non-decreasing; got 50"),
        "offsets pass the end": (lambda: sequences(cu_seqlens=offsets(0, 71)), ".* at most T = 70"),
        "a slot past the pool": (lambda: pooled(4), "state_indices must be below 4, the number of slots; got 4"),
        "a checkpoint past the pool": (lambda: pooled(0, **marked(16, 4)), "checkpoint_indices must be"),
        "a checkpoint past the buffer": (
            lambda: sequences(checkpoint_states=torch.zeros(3, 2, 32, 64), **marked(16, 3)),
            "checkpoint_indices must be below 3, the number of rows; got 3",
        ),
        "a checkpoint past the end": (
            lambda: pooled(0, **marked(80, 1)),
            "checkpoint_offsets must be at most the sequence's 70 tokens; got 80",
        ),
        "too few rows for checkpoints of packed sequences": (
            lambda: regular(2, 0, 65, 70),
            "checkpoint_states must be of a row for each of the 3 checkpoints; got 2 rows",
        ),
        "offsets on the host that are others": (
            lambda: sequences(cu_seqlens=offsets(0, 30, 70), cu_seqlens_cpu=offsets(0, 40, 70)),
            r"cu_seqlens_cpu must be equal to cu_seqlens \[0, 30, 70\]; got \[0, 40, 70\]",
        ),
        "a null index that nothing reads": (
            lambda: sequences(null_index="non_positive"),
            "null_index must be 'negative' without state_indices",
        ),
        "a decay per head": (
            lambda: sequences() | {"g": -torch.rand(1, 70, 2)},
            r"g must be of shape .* = \[1, 70, 2, 32\] \(.* g\[\.\.\., None\]\.expand.*; got shape \[1, 70, 2\]$",
        ),
        "a promise that the gate can't keep": (
            lambda: make_call(BY_NAME["softplus"]) | {"safe_gate": True},
            "safe_gate must be False with the gate 'softplus'",
        ),
    },
    fd.recurrent_kda: {
        "a bound that no gate reads": (lambda: step(0, lower_bound=-5.0), "lower_bound must .*; got -5"),
        "a slot past the pool": (lambda: step(1, 4), "ssm_state_indices must be below 4, the number of slots"),
        "a slot for two": (lambda: step(1, 1), "ssm_state_indices must be distinct"),
        "a null index that nothing reads": (
            lambda: step(0, ssm_state_indices=None, initial_state=None, null_index="non_positive"),
            "null_index must be 'negative' without ssm_state_indices",
        ),
    },
    fd.short_convolution: {
        "a checkpoint past the buffer": (
            lambda: convolved(checkpoint_states=torch.zeros(3, 8, 3), **marked(16, 3)),
            "checkpoint_indices must be below 3, the number of rows",
        ),
        "a null index that nothing reads": (lambda: convolved(null_index="non_positive"), "null_index must be"),
    },
    fd.commit: {
        "a count past the states kept": (lambda: committed(1, 99), "num_accepted_tokens must be .*; got 99"),
        "a count past the records": (lambda: replayed(3), "num_accepted_tokens must be at most the 2 tokens"),
    },
    fd.gated_rms_norm: {
        "gates in float32 beside rows in 16 bits": (
            lambda: normed(HALF, F32, F32),
            "z must be of dtype float16 beside x in float16; got float32",
        ),
        "two dtypes of 16 bits": (
            lambda: normed(HALF, HALF, BF16),
            "weight must be of dtype float32 or float16 beside x in float16; got bfloat16",
        ),
    },
}
"""Per operator and situation: the call, and the start of what is said."""

REFUSED_IF_ASKED: dict[Callable, dict[str, tuple[Callable[[], dict], str]]] = {
    fd.kda_prefill: {"a log decay above 0": (lambda: prefilled(0.5), "g must be .* see gate.; got 0.5")},
    fd.chunk_kda: {
        "a log decay above 0": (lambda: positive(sequences()), "g must be of log decays at most 0"),
        "a promise that does not hold": (
            lambda: sequences(safe_gate=True) | {"g": torch.full((1, 70, 2, 32), -6.0)},
            r"g must be of log decays in \[-5, 0\], as safe_gate promises; got -6",
        ),
    },
    fd.recurrent_kda: {"a log decay above 0": (lambda: positive(step(1)), "g must be of log decays .*; got 0.25")},
}


SITUATIONS = [(op, name) for table in (REFUSED, REFUSED_IF_ASKED) for op, rows in table.items() for name in rows]


@pytest.mark.parametrize(("op", "situation"), SITUATIONS)
@pytest.mark.parametrize("asked", [False, True], ids=["by default", ASKED])
def test_refused(op: Callable, situation: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    always = REFUSED.get(op, {})
    call, said = always.get(situation) or REFUSED_IF_ASKED[op][situation]
    monkeypatch.setattr(device_checks, "ENABLED", asked)
    given = call()
    answer = fd.supports(op, **given)
    if asked or situation in always:
        assert not answer and re.match(said, answer.reason)
        with pytest.raises((ValueError, TypeError), match=f"^{said}"):
            op(**given)
    else:
        assert answer
        op(**given)


TAKEN: dict[str, tuple[Callable, Callable[[], dict]]] = {
    "null slots": (fd.recurrent_kda, lambda: step(1, -1, -7)),
    "padding of no sequence": (fd.chunk_kda, lambda: positive(sequences(cu_seqlens=offsets(0, 20, 20, 60)))),
    "padding of a null sequence": (fd.recurrent_kda, lambda: positive(step(-1))),
    "a promise that holds": (fd.chunk_kda, lambda: sequences(safe_gate=True) | {"g": torch.full((1, 70, 2, 32), -5.0)}),
    "rows in float32, all else in 16 bits": (fd.gated_rms_norm, lambda: normed(F32, HALF, HALF)),
    "a weight in 16 bits": (fd.gated_rms_norm, lambda: normed(F32, F32, BF16)),
    "a null index of what is read only": (fd.recurrent_kda, read_only),
    "not a number": (fd.chunk_kda, lambda: sequences() | {"g": torch.full((1, 70, 2, 32), torch.nan)}),
}


@pytest.mark.parametrize("situation", TAKEN)
@pytest.mark.parametrize("asked", [False, True], ids=["by default", ASKED])
def test_taken(situation: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    op, call = TAKEN[situation]
    monkeypatch.setattr(device_checks, "ENABLED", asked)
    given = call()
    assert fd.supports(op, **given)
    op(**given)


# ---- the command line ---------------------------------------------------------------------------------------------------


def test_the_demo_uses_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(demo, "demo_model", lambda *_, **__: (seen.append(torch.get_num_threads()), 1 / 0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            demo.run_demo(prompt="a", tokens=1, temperature=0.0, seed=0, backend="auto", device=torch.device("cpu"))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_doctor_says_what_takes_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(doctor.integrations, "NAMES", ("vllm",))
    report = doctor.examine(torch.device("cpu"))
    said = capsys.readouterr().err
    assert "checking a call" in said and "looking for vllm" in said
    doctor.examine(torch.device("cpu"), progress=False)
    assert capsys.readouterr().err == ""
    report["environment"]["versions"]["cudnn"] = None
    doctor.show(report, doctor.Console())
    assert "frontend" in capsys.readouterr().out


def test_make_demo_installs_the_command_alone_and_says_each_step(tmp_path: Path):
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("echo") for line in lines) >= 4 and "GB" in done.stdout
    assert any("'.[cli]'" in line for line in lines) and "test" not in done.stdout.replace(str(tmp_path), "")
