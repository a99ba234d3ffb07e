"""Training on a CPU: mixed precision, activation checkpointing, and the examples with the records of their losses."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

import flashdelta as fd

from ..support.cases import Case, case_id, named
from ..support.gradients import INPUTS
from ..support.inputs import make_call
from .test_nn import attention, tiny_model

ROOT = Path(__file__).parents[2]


def example(name: str):
    problem = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(problem)
    sys.modules[problem.name] = module  # where its dataclasses look their annotations up, and other examples find it
    problem.loader.exec_module(module)
    return module


# ---- as trainers run it ---------------------------------------------------------------------------------------------------


def test_autocast_keeps_parameters_and_their_gradients_in_float32():
    layer = attention(torch.float32, num_heads=2)
    x = torch.randn(2, 70, 48)
    exact = torch.autograd.grad(layer(x)[0].square().mean(), list(layer.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y.float().square().mean(), list(layer.parameters()))
    for x, want in zip(found, exact):
        assert x.dtype == torch.float32
        assert (x - want).norm() <= 5e-2 * want.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_give_the_same_gradients(reentrant: bool):
    layer = attention(torch.float32, num_heads=2)
    x = torch.randn(2, 70, 48, requires_grad=True)
    parameters = list(layer.parameters())

    def found(y: torch.Tensor) -> list[torch.Tensor]:
        for p in (x, *parameters):
            p.grad = None
        y.square().sum().backward()
        return [p.grad for p in (x, *parameters)]

    want = found(layer(x)[0])
    again = found(checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant))
    assert all(torch.equal(x, y) for x, y in zip(again, want))


@pytest.mark.parametrize("case", named("bounded", "softplus", "packed", "gva2"), ids=case_id)
def test_checkpointed_call_gives_the_same_gradients(case: Case):
    call = make_call(case) | {"return_intermediate_states": False}
    leaves = {name: call[name].clone().requires_grad_() for name in INPUTS if call.get(name) is not None}

    def step(**leaves: torch.Tensor) -> torch.Tensor:
        return fd.chunk_kda(**call | leaves)[0]

    direct = torch.autograd.grad(step(**leaves).square().sum(), list(leaves.values()))
    kept = checkpoint(step, **leaves, use_reentrant=False).square().sum()
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(kept, list(leaves.values())), direct))


# ---- the example ----------------------------------------------------------------------------------------------------------


def options_of(module, tmp_path: Path, *arguments: str) -> argparse.Namespace:
    few = [
        "--steps",
        "4",
        "--every",
        "2",
        "--batch",
        "2",
        "--length",
        "33",
        "--device",
        "cpu",
        "--backend",
        "reference",
    ]
    return module.parse([*few, "--out", str(tmp_path / "model.safetensors"), *arguments])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """The example with a model and a text that fit a test."""
    module = example("train_tiny_lm")
    monkeypatch.setattr(module, "CONFIG", tiny_model().config)
    whole = module.corpus([])
    monkeypatch.setattr(module, "corpus", lambda extra: (whole[0][:5000], whole[1][:200]))
    return module


@pytest.mark.parametrize("autocast", [False, True])
def test_training_records_its_losses(small, tmp_path: Path, autocast: bool):
    options = options_of(small, tmp_path, *(["--autocast"] if autocast else []))
    model, record = small.train(options, Console(file=io.StringIO()))
    found = json.loads(json.dumps(record.as_json(options)))
    assert found["text"] == [5000, 200] and list(found["held_out"]) == ["2", "4"] and len(found["train"]) == 4
    assert all(3 < loss < 6 for loss in (*found["train"], *found["held_out"].values()))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert options.out.stat().st_size > 10_000


def test_a_run_is_held_against_the_reference(small, tmp_path: Path):
    def run(loss: float) -> dict:
        held_out = {"2": 3.0, "4": loss}
        return {"text": [5, 2], "held_out": held_out, "train": [4.0] * 30, "settings": {"backend": "x"}, "on": "CPU"}

    assert small.compare(run(2.019), run(2.0)) == (True, "held out 2.0190, reference 2.0000: +0.95%")
    assert small.compare(run(1.9), run(2.0))[0] is True
    assert small.compare(run(2.021), run(2.0))[0] is False
    assert small.compare(run(float("nan")), run(2.0))[0] is False
    with pytest.raises(ValueError, match=r"^compare: got a run on \[5, 3\] characters"):
        small.compare(run(2.0), run(2.0) | {"text": [5, 3]})
    with pytest.raises(ValueError, match=r"^compare: got a run with other evaluations"):
        small.compare(run(2.0), run(2.0) | {"held_out": {"3": 2.0}})
    pytest.importorskip("matplotlib")
    small.plot(run(2.0), run(2.1), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_picture_of_the_demos_model_is_of_two_kept_runs(small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The GPU run's file has what the record in examples/README.md has; the picture shows both runs."""
    figure = pytest.importorskip("matplotlib.figure")
    examples, drawn = ROOT / "examples", []
    reference, gpu = (json.loads((examples / f"tiny_lm_losses{x}.json").read_text()) for x in ("", "_gpu"))
    rows = re.findall(r"^\| (\d+) \| [\d.]+ \| ([\d.]+) \|$", (examples / "README.md").read_text(), re.MULTILINE)
    assert rows and {step: float(loss) for step, loss in rows}.items() <= gpu["held_out"].items()
    assert gpu["held_out"].keys() <= reference["held_out"].keys()
    last = {name: losses for name, losses in reference["held_out"].items() if name in gpu["held_out"]}
    assert small.compare(gpu, reference | {"held_out": last})[0]
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    small.plot(gpu, reference, tmp_path / "plot.png")
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    reference, ours = "reference, CPU", "auto, NVIDIA H200"
    assert set(lines) == {f"{reference}: training, means of 20 steps", f"{reference}: held out", f"{ours}: held out"}
    assert lines[f"{reference}: held out"].get_linewidth() > lines[f"{ours}: held out"].get_linewidth()


# ---- Kimi-Linear ----------------------------------------------------------------------------------------------------------

FEW = "--steps=4 --every=2 --batch=2 --length=70 --warmup=2 --device=cpu"


@pytest.fixture
def kimi(small, monkeypatch: pytest.MonkeyPatch):
    """The example with a smaller model yet, on the small text."""
    module = example("train_kimi_linear")
    monkeypatch.setattr(module, "SMALL", module.SMALL | {"hidden_size": 64, "linear_head_dim": 32})
    return module


def exit_code_of(module, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["example", *FEW.split(), *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    return stopped.value.code


@pytest.mark.slow
def test_kimi_linear_learns_the_same_with_flashdelta_and_without(kimi, tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("fla")
    on, off, picture = (tmp_path / name for name in ("on.json", "off.json", "both.png"))
    assert exit_code_of(kimi, monkeypatch, "--no-flashdelta", "--losses", off) == 0
    assert "KDA by PyTorch\n" in capsys.readouterr().out
    assert exit_code_of(kimi, monkeypatch, "--losses", on, "--compare", off) == 0
    said = capsys.readouterr().out
    assert "KDA by flashdelta, reference backend\n" in said and "characters a second\nheld out" in said
    ours, theirs = (json.loads(path.read_text()) for path in (on, off))
    assert ours["settings"] == theirs["settings"] | {"backend": "flashdelta"} and ours["text"] == [5000, 200]
    for losses in (ours, theirs):
        assert len(losses["train"]) == 4 and list(losses["held_out"]) == ["2", "4"]
    # float32, and rounded to 1e-5 in the file
    assert ours["train"] == pytest.approx(theirs["train"], abs=5e-5)
    assert ours["held_out"] == pytest.approx(theirs["held_out"], abs=5e-5)
    assert theirs["train"][3] < theirs["train"][0] - 0.1
    pytest.importorskip("matplotlib")
    options = kimi.parse([*FEW.split(), "--compare", str(off), "--plot", str(picture)])
    assert kimi.report(ours, options, Console(file=io.StringIO()), "both") == 0
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_kimi_linear_runs_on_what_it_says(kimi, monkeypatch):
    pytest.importorskip("fla")
    file = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    decorated = file.chunk_kimi_delta_attention
    with kimi.running("PyTorch"):
        assert file.chunk_kimi_delta_attention.__code__.co_filename == file.__file__
    assert file.chunk_kimi_delta_attention is decorated and decorated.__code__.co_filename != file.__file__
    with kimi.running("flashdelta"):
        assert kimi.status("fla").state == "active" and file.chunk_kimi_delta_attention is decorated
    assert kimi.status("fla").state == "possible"
    monkeypatch.setenv("FLA_FLASHDELTA", "0")
    with pytest.raises(SystemExit, match=r"off \(FLA_FLASHDELTA=0\); --no-flashdelta trains without"):
        kimi.train(kimi.parse(FEW.split()), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--layers 0", "argument --layers: got 0, wanted 1 or more"),
        ("--steps -1", "argument --steps: got -1, wanted 1 or more"),
        ("--flashdelta=yes", "argument --flashdelta/--no-flashdelta: ignored explicit argument 'yes'"),
        ("--backend triton", "unrecognized arguments: --backend triton"),
        ("--compare {other}", "is of a run with other length, real"),
        ("--compare {other}.txt", "--compare: there is no file"),
        ("--device cuda:99", "--device: got cuda:99, and PyTorch finds no GPU"),
    ],
)
def test_kimi_linear_refuses_what_it_cannot_do(kimi, tmp_path: Path, monkeypatch, capsys, arguments: str, message: str):
    monkeypatch.setattr(kimi, "installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = vars(kimi.parse(FEW.split())) | {"length": 71, "real": True}
    (tmp_path / "other.json").write_text(json.dumps({"settings": {name: settings[name] for name in kimi.SAME}}))
    with pytest.raises(SystemExit):
        kimi.parse([*FEW.split(), *arguments.format(other=tmp_path / "other.json").split()])
    assert message in capsys.readouterr().err


def test_kimi_linear_says_what_is_missing(kimi, monkeypatch, capsys):
    monkeypatch.setattr(kimi, "installed", lambda package: package == "transformers")
    assert kimi.parse(["--no-flashdelta", *FEW.split()]).flashdelta is False
    with pytest.raises(SystemExit):
        kimi.parse(FEW.split())
    assert "fla is not installed: pip install" in capsys.readouterr().err


def test_kimi_linear_of_real_widths_has_settings_of_its_own(kimi, monkeypatch):
    monkeypatch.setattr(kimi, "installed", lambda package: True)
    small, real, given = (kimi.parse(arguments.split()) for arguments in ("", "--real", "--real --steps 7"))
    assert (small.length, real.length, real.steps, given.steps) == (128, 1024, 200, 7)
