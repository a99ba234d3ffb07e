"""The command line, through typer's runner."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

import flashdelta
from flashdelta import backends
from flashdelta.backends import ReferenceBackend

pytest.importorskip("typer")
from typer.testing import CliRunner

from flashdelta.tools.cli.app import app
from flashdelta.tools.cli.verify import CASES, run_verify
from flashdelta.tools.files import whole_folder

from ..support.refusals import says

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


class WrongBackend(ReferenceBackend):
    """The reference, with an output one per cent too large or a NaN in the state."""

    def __init__(self, damage):
        self.name = damage

    def build(self, problem, t):
        plan = super().build(problem, t)
        execute = plan.execute
        plan.execute = lambda tensors: self.damaged(execute(tensors))
        return plan

    def damaged(self, found):
        if self.name == "large":
            return found | {"o": found["o"] * 1.01}
        if self.name == "raises":
            raise RuntimeError("kernel fell over")
        state = found["final_state"].clone()
        state.view(-1)[0] = torch.nan
        return found | {"final_state": state}


@pytest.fixture(params=["large", "nan", "raises"])
def wrong_backend(request, monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (WrongBackend(request.param), ReferenceBackend()))
    monkeypatch.setattr(backends, "NAMES", ("auto", request.param, "reference"))
    return request.param


def test_doctor_lists_integrations(monkeypatch):
    from flashdelta.integrations import _fla
    from flashdelta.integrations.engine import Engine

    monkeypatch.setattr(_fla, "is_installed", lambda: False)
    monkeypatch.setattr(Engine, "version", lambda engine: None)
    report = json.loads(run("doctor", "--device", "cpu", "--json").stdout)
    assert report["self_check"]["passed"]
    assert report["environment"]["versions"]["flashdelta"] == flashdelta.__version__
    assert {v["name"] for v in report["backends"]["verdicts"]} == {b.name for b in backends.BACKENDS}
    found = {row["name"]: (row["state"], row["version"]) for row in report["integrations"]}
    transformers = found.pop("transformers")
    assert found == dict.fromkeys(("fla", "vllm", "sglang"), ("not installed", None))
    assert transformers in (("not installed", None), ("off", metadata.version("transformers")))
    text = run("doctor", "--device", "cpu").stdout
    assert "integration transformers" in text
    assert all(f"integration {name}: not installed; pip install" in text for name in ("fla", "vllm", "sglang"))


def test_verify_on_a_cpu_says_what_nobody_checked(monkeypatch):
    monkeypatch.setitem(run_verify.__kwdefaults__, "cases", CASES[:3])
    result = run("verify", "--quick", "--device", "cpu")
    assert result.exit_code == 0
    *_, passed, unchecked = result.stdout.splitlines()
    assert passed.endswith("checks passed (reference)")
    assert unchecked == "not checked, as they can't run on cpu: hopper, triton"


def test_doctor_and_verify_tell_the_wrong_backend_from_the_right_one(wrong_backend):
    result = run("doctor", "--device", "cpu", "--json")
    check = json.loads(result.stdout)["self_check"]
    assert result.exit_code == 1 and not check["passed"]
    assert wrong_backend != "raises" or check["problem"] == "RuntimeError: kernel fell over"
    report = run_verify(torch.device("cpu"), cases=CASES[:3], progress=False)
    assert not report["passed"]
    status = {"large": "wrong", "nan": "NaN", "raises": "raised"}[wrong_backend]
    found = {(row["backend"], row["status"]) for row in report["rows"]}
    assert found == {(wrong_backend, status), ("reference", "passed")}


KNOWN = f"must be one of {', '.join(['auto', *(backend.name for backend in backends.BACKENDS)])}; got 'cuda'"
REFUSED = {
    "demo --device cpu --prompt=": "prompt must ...; got an empty text",
    "demo --device cpu --prompt=é": "prompt must be printable ASCII characters and newlines...; got 'é'",
    "demo --device cpu --requests=2 --prompt=": "prompt must ...; got an empty text",
    **{f"demo --device cpu --{x}=-1": f"Invalid value for '--{x}'" for x in ("tokens", "temperature", "slots")},
    **{f"{command} --backend cuda": KNOWN for command in ("verify", "demo")},
    **{f"doctor --device {name}": f"device must ...; got '{name}'" for name in ("gpu", "meta", "cuda:99")},
    "export --out out --arch=sm_75": "arch must be one of sm_80, sm_86...; got 'sm_75'",
    f"export --out {__file__}/out --arch=sm_90": f"out must be a folder that can be written...; got {__file__}/out",
}
"""The frame breaks lines, long paths too: spaces do not count."""


@pytest.fixture
def no_work(monkeypatch):
    """Long work must not begin."""

    def begin(*arguments, **named):
        raise AssertionError("must not begin")

    monkeypatch.setattr("flashdelta.tools.cli.export.compile_kernels", begin)


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command.replace(str(ROOT), ""))
def test_wrong_commands_are_refused_and_write_nothing(command, tmp_path, monkeypatch, no_work):
    monkeypatch.chdir(tmp_path)
    result = run(*command.split(" "))
    assert result.exit_code == 2
    # the frame may break the line anywhere
    assert says("".join(REFUSED[command].split()), "".join(result.stderr.replace("│", " ").split()))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_an_unfinished_folder_leaves_nothing(exists: bool, tmp_path: Path):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
        (folder / "kept").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_folder("out", folder) as unfinished:
        (unfinished / "kept").write_text("new")
        raise KeyboardInterrupt
    left = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({"kept": "old"} if exists else {})
    assert folder.exists() == exists
