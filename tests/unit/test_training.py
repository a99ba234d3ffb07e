"""Training on a CPU: mixed precision, activation checkpointing, and the examples with the records of their losses."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from flashdelta.integrations import _fla

from .test_nn import attention, tiny_model

ROOT = Path(__file__).parents[2]


def example(name: str):
    problem = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(problem)
    sys.modules[problem.name] = module  # where its dataclasses look their annotations up, and other examples find it
    problem.loader.exec_module(module)
    return module


# ---- as trainers run it ---------------------------------------------------------------------------------------------------


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


# ---- the example ----------------------------------------------------------------------------------------------------------


def options_of(module, tmp_path: Path, *arguments: str) -> argparse.Namespace:
    few = "--steps 4 --every 2 --batch 2 --length 33 --device cpu --backend reference"
    return module.parse([*few.split(), "--out", str(tmp_path / "model.safetensors"), *arguments])


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
        assert kimi.status("fla").state == "active" and file.chunk_kimi_delta_attention in _fla.FLA.applied.wrappers
    assert file.chunk_kimi_delta_attention is decorated
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
