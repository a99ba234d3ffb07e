"""The command line, through typer's runner."""

from __future__ import annotations

import importlib.metadata
import json
import signal
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashdelta
from flashdelta import backends
from flashdelta.backends import ReferenceBackend

pytest.importorskip("typer")
from typer.testing import CliRunner

from flashdelta.tools.cli import demo
from flashdelta.tools.cli.app import app
from flashdelta.tools.cli.demo import DemoResult
from flashdelta.tools.cli.verify import CASES, run_verify

from ..support.refusals import says

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


class WrongBackend(ReferenceBackend):
    """The reference, with an output one per cent too large or a NaN in the state."""

    def __init__(self, damage):
        self.name = damage

    def build(self, problem, t):
        program = super().build(problem, t)
        return SimpleNamespace(recorded=None, run=lambda record=None: self.damaged(program.run()))

    def damaged(self, found):
        if self.name == "large":
            return found | {"o": found["o"] * 1.01}
        if self.name == "raises":
            raise RuntimeError("kernel fell over")
        state = found["final_state"]
        return found | {
            "final_state": torch.where(torch.arange(state.numel()).reshape(state.shape) == 0, torch.nan, state)
        }


@pytest.fixture(params=["large", "nan", "raises"])
def wrong_backend(request, monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (WrongBackend(request.param), ReferenceBackend()))
    return request.param


def test_doctor_json():
    result = run("doctor", "--device", "cpu", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["self_check"]["passed"]
    assert report["environment"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["environment"]["versions"]["flashdelta"] == flashdelta.__version__
    assert {v["name"] for v in report["backends"]["verdicts"]} == {b.name for b in backends.BACKENDS}


def test_doctor_lists_integrations(monkeypatch):
    from flashdelta.integrations import _fla
    from flashdelta.integrations.engine import Engine

    monkeypatch.setattr(_fla, "is_installed", lambda: False)
    monkeypatch.setattr(Engine, "version", lambda engine: None)
    rows = json.loads(run("doctor", "--device", "cpu", "--json").stdout)["integrations"]
    found = {row["name"]: (row["state"], row["version"]) for row in rows}
    transformers = found.pop("transformers")
    assert found == dict.fromkeys(("fla", "vllm", "sglang"), ("not installed", None))
    assert transformers in (("not installed", None), ("off", metadata.version("transformers")))
    text = run("doctor", "--device", "cpu").stdout
    assert "integration transformers" in text
    assert all(f"integration {name}: not installed; pip install" in text for name in ("fla", "vllm", "sglang"))


def test_doctor_says_why_a_backend_cannot_run():
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0
    assert "backend triton: no; tensors are on the CPU" in result.stdout.replace("\n", " ")
    assert "self-check passed" in result.stdout


def test_doctor_fails_on_a_wrong_backend(wrong_backend):
    result = run("doctor", "--device", "cpu", "--json")
    assert result.exit_code == 1
    check = json.loads(result.stdout)["self_check"]
    assert not check["passed"]
    if wrong_backend == "raises":
        assert check["problem"] == "RuntimeError: kernel fell over"


def test_verify_on_a_cpu_says_what_nobody_checked():
    result = run("verify", "--quick", "--device", "cpu")
    assert result.exit_code == 0
    *_, passed, unchecked = result.stdout.splitlines()
    assert passed.endswith("checks passed (reference)")
    assert unchecked == "not checked, as they can't run on cpu: hopper, triton"


def test_verify_tells_the_wrong_backend_from_the_right_one(wrong_backend):
    report = run_verify(torch.device("cpu"), cases=CASES[:3], progress=False)
    assert not report["passed"]
    status = {"large": "wrong", "nan": "NaN", "raises": "raised"}[wrong_backend]
    assert {(row["backend"], row["status"]) for row in report["rows"]} == {
        (wrong_backend, status),
        ("reference", "passed"),
    }


def test_verify_of_a_backend_that_cannot_run_here_does_not_pass():
    result = run("verify", "--quick", "--device", "cpu", "--backend", "triton")
    assert result.exit_code == 1
    assert "nothing was checked" in result.stdout


DEMO = DemoResult(
    prompt="A [function] ",
    continuation="returns [/red].",
    prefill_tokens_per_s=12345.6,
    decode_tokens_per_s=789.0,
    backend="reference",
    device="cpu",
    dtype="float32",
    parameters=700_000,
    agreement_error=1.5e-6,
    checked=True,
)


def test_demo_hands_its_options_on_and_prints_the_text(monkeypatch):
    asked = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: asked.update(options) or DEMO)
    result = run("demo", "--prompt", "A", "--tokens", "5", "--temperature", "0", "--seed", "3", "--device", "cpu")
    assert result.exit_code == 0
    assert asked == {"prompt": "A", "tokens": 5, "temperature": 0.0, "seed": 3, "backend": "auto", "device": "cpu"}
    for expected in ("A [function] returns [/red].", "12,346 tokens/s", "789 tokens/s", "check passed", "1.5e-06"):
        assert expected in result.stdout


def test_demo_json_and_exit_code_of_a_failed_check(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", lambda **options: replace(DEMO, checked=False))
    result = run("demo", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {**asdict(DEMO), "checked": False}


KNOWN = f"must be one of {', '.join(['auto', *(backend.name for backend in backends.BACKENDS)])}; got 'cuda'"
REFUSED = {
    "demo --device cpu --prompt=": "prompt must ...; got an empty text",
    "demo --device cpu --prompt=é": "prompt must be printable ASCII characters and newlines...; got 'é'",
    **{f"{command} --backend cuda": KNOWN for command in ("verify", "demo")},
    **{f"doctor --device {name}": f"device must ...; got '{name}'" for name in ("gpu", "meta", "cuda:99")},
    "export --out out --arch=sm_75": "arch must be one of sm_80, sm_86...; got 'sm_75'",
    "export --out out --arch=sm_90 --op=prefill": "op must be one of prefill_f32...; got 'prefill'",
    "export --out out --arch=sm_90 --size=64,64,16": "size must be one of 64,64,32...; got '64,64,16'",
    "export --out out --arch=sm_90 --gate=softplus": "gate must be one of none...; got 'softplus'",
    "export --out out --arch=sm_90 --precision=tf32": "precision must be one of ieee...; got 'tf32'",
    f"export --out {__file__}/out --arch=sm_90": f"out must be a folder that can be written...; got {__file__}/out",
}
"""The frame breaks lines, long paths too: spaces do not count."""


@pytest.fixture
def no_work(monkeypatch):
    """What takes long must not begin."""

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


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"flashdelta {flashdelta.__version__}\n")


WORK = {
    "doctor": "doctor.examine",
    "verify": "verify.run_verify",
    "demo": "demo.run_demo",
    "export --out out --arch=sm_90": "export.compile_kernels",
}
"""Commands, and where they spend their time."""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("command", WORK, ids=lambda command: command.replace(str(ROOT), ""))
def test_ctrl_c_leaves_one_line_and_no_file(command, tmp_path, monkeypatch):
    def work(*arguments, **named):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(f"flashdelta.tools.cli.{WORK[command]}", work)
    monkeypatch.chdir(tmp_path)
    result = run(*command.split(" "))
    said = result.stderr.splitlines()
    # export has said what it does
    assert (result.exit_code, said[-1]) == (130, "flashdelta: interrupted")
    assert len(said) == 1 + (command.startswith("export"))
    assert not any(tmp_path.iterdir())
