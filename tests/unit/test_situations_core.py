"""Situations that users reported, in core operators: a row each, with what must come of it."""

from __future__ import annotations

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

from ..support.cases import BY_NAME
from ..support.inputs import make_call
from ..support.readouts import OPERATORS, check_layer, check_readout

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_a_readout_past_float16(op: Callable, dtype: torch.dtype):
    check_readout(op, dtype, "reference")


@pytest.mark.parametrize("tokens", [4, 70], ids=["token by token", "in chunks"])
def test_a_layer_in_float16(tokens: int):
    check_layer(tokens, "reference")


def sequences(**changes: Any) -> dict[str, Any]:
    """Log decays as they are, of 70 tokens."""
    return make_call(BY_NAME["decay"]) | changes


def positive(call: dict[str, Any], token: int = -1) -> dict[str, Any]:
    g = call["g"].clone()
    g[0, token, 0, 0] = 0.25
    return call | {"g": g}


def step(*slots: int, **changes: Any) -> dict[str, Any]:
    """A token each of so many sequences over a pool of 4 slots."""
    N = len(slots)
    q, k, v = torch.randn(3, N, 1, 2, 32)
    call = dict(
        q=q, k=k, v=v, g=-torch.rand(N, 1, 2, 32), beta=torch.rand(N, 1, 2), initial_state=torch.zeros(4, 2, 32, 32)
    )
    return call | {"ssm_state_indices": torch.tensor(slots)} | changes


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def pooled(*slots: int) -> dict[str, Any]:
    pool = {"state_pool": torch.zeros(4, 2, 32, 64), "state_v_first": False, "use_qk_l2norm_in_kernel": True}
    return sequences(**pool, state_indices=torch.tensor(slots), initial_state=None, output_final_state=False)


ALWAYS, ASKED = "always", "FLASHDELTA_CHECK=1"
REFUSED: dict[str, tuple[str, Callable, Callable[[], dict], str]] = {
    "a bound that no gate reads": (ALWAYS, fd.chunk_kda, lambda: sequences(lower_bound=-5.0), "lower_bound must .*; got -5"),
    "a bound, token by token": (ALWAYS, fd.recurrent_kda, lambda: step(0, lower_bound=-5.0), "lower_bound must .*; got -5"),
    "offsets fall": (ALWAYS, fd.chunk_kda, lambda: sequences(cu_seqlens=offsets(0, 50, 20, 70)), ".* non-decreasing; got 50"),
    "offsets pass the end": (ALWAYS, fd.chunk_kda, lambda: sequences(cu_seqlens=offsets(0, 71)), ".* at most T = 70"),
    "a slot past the pool": (ALWAYS, fd.recurrent_kda, lambda: step(1, 4), "ssm_state_indices must be below .* 4 slots; got"),
    "a slot past it, in chunks": (ALWAYS, fd.chunk_kda, lambda: pooled(4), "state_indices must be below .* 4 slots; got"),
    "a log decay above 0": (ASKED, fd.chunk_kda, lambda: positive(sequences()), "g must be of log decays at most 0"),
    "one of a step": (ASKED, fd.recurrent_kda, lambda: positive(step(1)), "g must be of log decays at most 0 .*; got 0.25"),
    "a promise that does not hold": (
        ASKED,
        fd.chunk_kda,
        lambda: sequences(safe_gate=True) | {"g": torch.full((1, 70, 2, 32), -6.0)},
        r"g must be of log decays in \[-5, 0\], as safe_gate promises; got -6",
    ),
}  # fmt: skip
"""By the situation: when it is refused, the call, and the start of what is said."""


@pytest.mark.parametrize("situation", REFUSED)
@pytest.mark.parametrize("asked", [False, True], ids=["by default", ASKED])
def test_refused(situation: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    when, op, call, said = REFUSED[situation]
    monkeypatch.setattr(device_checks, "ENABLED", asked)
    if asked or when == ALWAYS:
        with pytest.raises(ValueError, match=f"^{said}"):
            op(**call())
    else:
        op(**call())


TAKEN: dict[str, tuple[Callable, Callable[[], dict]]] = {
    "null slots": (fd.recurrent_kda, lambda: step(1, -1, -7)),
    "padding of no sequence": (fd.chunk_kda, lambda: positive(sequences(cu_seqlens=offsets(0, 20, 20, 60)))),
    "padding of a null sequence": (fd.recurrent_kda, lambda: positive(step(-1))),
    "a promise that holds": (fd.chunk_kda, lambda: sequences(safe_gate=True) | {"g": torch.full((1, 70, 2, 32), -5.0)}),
    "a promise about a gate that can't keep it": (fd.chunk_kda, lambda: make_call(BY_NAME["softplus"]) | {"safe_gate": True}),
    "not a number": (fd.chunk_kda, lambda: sequences() | {"g": torch.full((1, 70, 2, 32), torch.nan)}),
}  # fmt: skip


@pytest.mark.parametrize("situation", TAKEN)
@pytest.mark.parametrize("asked", [False, True], ids=["by default", ASKED])
def test_taken(situation: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    op, call = TAKEN[situation]
    monkeypatch.setattr(device_checks, "ENABLED", asked)
    op(**call())


# ---- the command line ---------------------------------------------------------------------------------------------------


def test_the_demo_uses_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(demo, "demo_model", lambda *_, **__: (seen.append(torch.get_num_threads()), 1 / 0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            demo.run_demo()
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
    done = subprocess.run(
        ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert sum(line.startswith("echo") for line in lines) >= 4 and "GB" in done.stdout
    assert any("'.[cli]'" in line for line in lines) and "test" not in done.stdout.replace(str(tmp_path), "")
