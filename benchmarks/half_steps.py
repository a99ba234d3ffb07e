"""Steps of 32 tokens beside chunks of 64: from how many heads on they pay.

    python benchmarks/half_steps.py [--out FILE]

Takes about a minute on a GPU, most of it compilation. Microseconds of both kernels back to back, alone and together, in chunks
and in steps; then errors of o and the final state against float64. The tuning log has what was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch

import flashdelta as fd
from flashdelta.hopper import build, prepare, prepare_steps, recurrence
from flashdelta.hopper.launch import layout, prepare_inputs, steps_layout
from flashdelta.program.program import Outputs
from flashdelta.program.workspace import Workspace
from flashdelta.runtime.call import check
from flashdelta.testing.cases import Case
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import relative_error, truth
from flashdelta.tools.bench.environment import environment
from flashdelta.tools.bench.report import new_document, save, script_parser
from flashdelta.tools.bench.timing import Timer, sustained
from flashdelta.triton.launch import StageCall

KIMI = {"why": "", "K": 128, "V": 128, "gate": "lower_bound", "lower_bound": -5.0, "beta": "logit", "l2norm": True}
SOFTPLUS = {"gate": "softplus", "lower_bound": None}
SHAPES = {
    **{f"T8192 H{H}": {"T": 8192, "H": H, "HV": H} for H in (16, 32, 48, 64)},
    **{f"8 x 1024 H{H}": {"lengths": (1024,) * 8, "H": H, "HV": H} for H in (16, 32, 64)},
    **{f"T8192 H{H} K64": {"T": 8192, "H": H, "HV": H, "K": 64, "V": 64} for H in (32, 64, 96)},
    "T8192 H64 K64 softplus": {"T": 8192, "H": 64, "HV": 64, "K": 64, "V": 64} | SOFTPLUS,
    "T8192 H64 softplus": {"T": 8192, "H": 64, "HV": 64} | SOFTPLUS,
    "T8192 H64 softplus, forgetful": {"T": 8192, "H": 64, "HV": 64, "memory": "new"} | SOFTPLUS,
    "8 x 1024 H64 softplus": {"lengths": (1024,) * 8, "H": 64, "HV": 64} | SOFTPLUS,
}
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
    "softplus": SOFTPLUS,
    "softplus, forgetful": SOFTPLUS | {"memory": "new"},
    "softplus, long memory": SOFTPLUS | {"memory": "long"},
    "g = -50": PLAIN | {"safe": False, "hard": "g-50"},
}


def stage_call(shape: dict, steps: bool) -> tuple[StageCall, Outputs]:
    call = make_call(Case(name="half steps", **(KIMI | shape)), torch.bfloat16, "cuda")
    problem, t = check(fd.chunk_kda, **call)
    t, _ = prepare_inputs(t)  # dense: nothing is copied
    workspace = Workspace.allocate((steps_layout if steps else layout)(problem), t.q.device)
    return StageCall(problem, t, 90, workspace), Outputs.of(problem, t)


def microseconds(launches: dict[str, Callable[[], object]], timer: Timer) -> dict[str, float]:
    return {name: 1000 * ms for name, ms in sustained(launches, timer).items()}


def of_both(shape: dict, timer: Timer) -> dict[str, float]:
    runs: dict[str, Callable[[], object]] = {}
    for steps, first in ((False, prepare.prepare), (True, prepare_steps.prepare_steps)):
        call, outputs = stage_call(shape, steps)
        launches = first(call), recurrence.recurrence(call, outputs["o"], outputs.get("final_state"), None, steps=steps)
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
        with mock.patch.object(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1 if steps else 1 << 30)):
            got = build.build(problem, t).run()
        found["steps" if steps else "chunks"] = tuple(
            relative_error(got[name], x) for name, x in zip(("o", "final_state"), want)
        )
    return found


def show(title: str, found: dict[str, float], chunks: int) -> None:
    print(f"\n{title}")
    for name, us in found.items():
        print(f"  {name:28} {us:8.1f} us, {us / chunks:6.3f} us a chunk of {chunks}")


PARSER = script_parser(__doc__)


def main() -> None:
    out, device = PARSER.parse_args().out, torch.device("cuda")
    timer = Timer(device)
    results: dict = new_document("half_steps", environment(device)) | {"times": {}, "errors": {}}
    for name, shape in SHAPES.items():
        results["times"][name] = of_both(shape, timer)
        show(name, results["times"][name], 128)
        if out is not None:
            save(results, out)
    print("\nerrors of o and the final state, chunks and steps")
    for name, options in ACCURACY.items():
        results["errors"][name] = found = errors(options)
        print(f"  {name:20}", *(f"{label} {o:.3e} {state:.3e}  " for label, (o, state) in found.items()))
    if out is not None:
        save(results, out)


if __name__ == "__main__":
    main()
