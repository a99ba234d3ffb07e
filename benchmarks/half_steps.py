"""Steps of 32 tokens beside today's chunks of 64, kernel by kernel: whether they pay, before they are chosen.

    python benchmarks/half_steps.py [--out FILE]

Takes about a minute on a GPU, most of it compilation. Four tables, of microseconds of kernels back to back:

* `recurrence` on tiles of noise, as they come from memory and from a window of 4 chunk slots, which stays in the L2: a chunk of
  64 tokens in steps should take at most 1.35 us from the L2.
* `prepare` as it is, and without the inverse and w: whether its time follows its instructions.
* `recurrence` over one sequence and eight of the same work, from a window of chunk slots: what a change of work tile costs, and
  how much of it is the final state, K first or V first.
* both kernels and the whole call, in chunks and in steps; errors of o and the final state against float64.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

import flashdelta as fd
from flashdelta import hopper
from flashdelta.hopper import build, prepare, prepare_steps, recurrence
from flashdelta.hopper.launch import layout, prepare_inputs, steps_layout
from flashdelta.program.launch import Launch
from flashdelta.program.program import Outputs
from flashdelta.program.workspace import Workspace
from flashdelta.runtime.call import check
from flashdelta.testing.cases import Case
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import relative_error, truth
from flashdelta.tools.bench.timing import Timer, sustained
from flashdelta.triton.launch import StageCall

KIMI = {"why": "", "K": 128, "V": 128, "gate": "lower_bound", "lower_bound": -5.0, "beta": "logit", "l2norm": True}
SHAPES = {
    "T8192 H64": {"T": 8192, "H": 64, "HV": 64},
    "8 x 1024 H64": {"lengths": (1024,) * 8, "H": 64, "HV": 64},
}
STATES = {"no states": {"final": False}, "K first": {}, "V first": {"v_first": True}}
SMALL = {"H": 4, "HV": 4, "T": 512, "state": torch.float32}
PLAIN = {"gate": "none", "lower_bound": None, "safe": True, "beta": "value"}
ACCURACY = {
    "random gates": {"memory": "random"},
    "slow gates": {"memory": "slow"},
    "pinned gates": {"hard": "pinned"},
    "g = 0": PLAIN | {"hard": "g0"},
    "g = -5": PLAIN | {"hard": "g-5"},
    "one key, beta 1.94": PLAIN | {"hard": "same_keys_2"},
    "beta to 2": PLAIN | {"hard": "beta_to_2"},
    "norms of keys": PLAIN | {"hard": "key_norms"},
}


def altered(module: ModuleType, folder: Path, name: str, *changes: tuple[str, str]) -> ModuleType:
    """The module with some of its text replaced, under another name."""
    text = Path(module.__file__ or "").read_text()
    for before, after in changes:
        if before not in text:
            raise ValueError(f"{module.__name__} has no {before!r}")
        text = text.replace(before, after)
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{hopper.__name__}.{name}", path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def stage_call(shape: dict, steps: bool) -> tuple[StageCall, Outputs]:
    call = make_call(Case(name="half steps", **(KIMI | shape)), torch.bfloat16, "cuda")
    problem, t = check(fd.chunk_kda, **call)
    t = prepare_inputs(t)
    workspace = Workspace.allocate((steps_layout if steps else layout)(problem), t.q.device)
    return StageCall(problem, t, 90, workspace), Outputs.of(problem, t)


def noise(call: StageCall) -> None:
    call.workspace["tiles"].normal_(std=0.05)
    call.workspace["decay"].uniform_(0.2, 1.0)
    call.workspace["semaphores"].zero_()


def scan(module: ModuleType, call: StageCall, outputs: Outputs, steps: bool) -> Launch:
    return module.recurrence(call, outputs["o"], outputs.get("final_state"), None, steps=steps)


def microseconds(launches: dict[str, Callable[[], object]], timer: Timer) -> dict[str, float]:
    return {name: 1000 * ms for name, ms in sustained(launches, timer).items()}


def of_recurrence(shape: dict, windowed: ModuleType, timer: Timer) -> dict[str, float]:
    runs = {}
    for steps in (False, True):
        call, outputs = stage_call(shape, steps)
        noise(call)
        for where, module in (("memory", recurrence), ("the L2", windowed)):
            runs[f"{'steps' if steps else 'chunks'} from {where}"] = scan(module, call, outputs, steps).run
    return microseconds(runs, timer)


def of_tiles(windowed: ModuleType, timer: Timer) -> dict[str, float]:
    runs = {}
    for label, options in STATES.items():
        for name, shape in SHAPES.items():
            call, outputs = stage_call(shape | options, False)
            noise(call)
            runs[f"{name}, {label}"] = scan(windowed, call, outputs, False).run
    return microseconds(runs, timer)


def of_prepare(shape: dict, cut: ModuleType, timer: Timer) -> dict[str, float]:
    call, _ = stage_call(shape, False)
    return microseconds({"whole": prepare.prepare(call).run, "no inverse, no w": cut.prepare(call).run}, timer)


def of_both(shape: dict, timer: Timer) -> dict[str, float]:
    runs: dict[str, Callable[[], object]] = {}
    for steps, first in ((False, prepare.prepare), (True, prepare_steps.prepare_steps)):
        call, outputs = stage_call(shape, steps)
        launches = first(call), scan(recurrence, call, outputs, steps)
        label = "steps" if steps else "chunks"
        runs |= {f"{label}: prepare": launches[0].run, f"{label}: recurrence": launches[1].run}
        runs[f"{label}: both"] = functools.partial(lambda a, b: (a.run(), b.run()), *launches)
    return microseconds(runs, timer)


def errors(options: dict) -> dict[str, tuple[float, ...]]:
    call = make_call(Case(name="errors", **(KIMI | SMALL | options)), torch.bfloat16, "cuda")
    if options.get("gate") == "none":
        call["g"] = call["g"].to(torch.bfloat16)
    want = truth(call)
    problem, t = check(fd.chunk_kda, **call, split=1, backend="hopper")
    found = {}
    for steps in (False, True):
        with mock.patch.object(build, "STEPS_FROM", 1 if steps else 1 << 30):
            got = build.build(problem, t).run()
        found["steps" if steps else "chunks"] = tuple(
            relative_error(got[name], x) for name, x in zip(("o", "final_state"), want)
        )
    return found


def show(title: str, found: dict[str, float], chunks: int) -> None:
    print(f"\n{title}")
    for name, us in found.items():
        print(f"  {name:28} {us:8.1f} us, {us / chunks:6.3f} us a chunk of {chunks}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    timer = Timer(torch.device("cuda"))
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wrap = "chunk = (slot + i) * scheduler.HV + tile.head", "chunk = ((slot + i) % 4) * scheduler.HV + tile.head"
        windowed = altered(recurrence, folder, "recurrence_window", wrap)
        cut = altered(
            prepare,
            folder,
            "prepare_cut",
            ("    X = inverse(minus_A, buffers)\n", "    X = minus_A\n"),
            ("    store_w(tiles, high, low, buffers)\n", ""),
        )
        for shape_name, shape in SHAPES.items():
            # of `recurrence` 128 CTAs have 128 chunks each
            results[shape_name] = {
                "recurrence": of_recurrence(shape, windowed, timer),
                "prepare": of_prepare(shape, cut, timer),
                "both": of_both(shape, timer),
            }
            for title, found in results[shape_name].items():
                show(f"{shape_name}: {title}", found, 128)
    results["change of work tile"] = of_tiles(windowed, timer)
    show("change of work tile", results["change of work tile"], 128)
    print("\nerrors of o and the final state, chunks and steps")
    results["errors"] = {name: errors(options) for name, options in ACCURACY.items()}
    for name, found in results["errors"].items():
        print(f"  {name:20}", *(f"{label} {o:.3e} {state:.3e}  " for label, (o, state) in found.items()))
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
