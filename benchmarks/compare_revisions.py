"""This checkout beside another revision of itself, in one process and in turns: host time of calls, GPU time, bits, memory.

    git worktree add build/base REV && python -m benchmarks.compare_revisions build/base --out FILE

Host rows: microseconds of a call until it returns, the GPU idle: a `replay` (a call like the ones before), and the `first` call
of a size. GPU rows: microseconds of a call back to back, warm. `benchmarks.prefill --kernels` has the times of each kernel.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashdelta.tools.environment import environment
from tests.support.cases import BF16, Case
from tests.support.decoding import make_step
from tests.support.inputs import make_call
from tests.support.oracle import as_recurrent
from tests.support.prefills import prefill_call
from tests.support.wy import WyCase, make_wy

from . import timing
from .files import save_json
from .gate import LEAVES
from .timing import Timer, peak_above
from .workloads import UNBOUNDED, decode_row, model

OTHER = "flashdelta_base"
ROUNDS = 20
BACK_TO_BACK = 20
Op = Callable[..., Any]
DEVICE = torch.device("cuda", 0)


def other_package(source: Path, folder: Path) -> None:
    """Copies the other revision under a name of its own, its operators too."""
    shutil.copytree(source / "src" / "flashdelta", folder / OTHER)
    for path in (folder / OTHER).rglob("*.py"):
        text = path.read_text().replace("flashdelta::", f"{OTHER}::").replace("ops.flashdelta", f"ops.{OTHER}")
        path.write_text(text.replace("kda_prefill::", f"{OTHER}_f::"))


def commit_of(base: Path) -> str | None:
    """None of files without a history of their own."""
    asked = ["git", f"--git-dir={base / '.git'}", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None


def prefill(T: int = 1024, H: int = 4, N: int = 0, options: dict | None = None, **changes: Any) -> dict:
    """A call as a model makes it; with `N` sequences it starts from states in a pool and leaves them there."""
    sizes = {"T": T, "v_first": True, "final": False, "lengths": (T // N,) * N if N else None, **changes}
    call = make_call(model(f"T{T} H{H}", "", H, **sizes), BF16, "cuda") | (options or {})
    pool = torch.zeros(N, H, 128, 128, device="cuda")
    return call | ({"state_pool": pool, "state_indices": torch.arange(N, device="cuda").int()} if N else {})


def decays(V: int = 128, gate: str = "none") -> dict:
    """Eight sequences; log decays in float32 as they are."""
    sizes = {"H": 32, "HV": 32, "K": 128, "V": V, "lengths": (1024,) * 8}
    return make_call(Case("decays", "", **sizes, gate=gate, wide_gate=gate == "none", final=False), BF16, "cuda")


def checkpointed(T: int = 65536, H: int = 4) -> dict:
    """A sequence over few heads, from and to a pool, with a state kept halfway."""
    half, second = torch.tensor([T // 2]).int().cuda(), torch.tensor([1]).int().cuda()
    pool = {"state_pool": torch.zeros(2, H, 128, 128, device="cuda"), "state_indices": second - 1}
    return prefill(T, H, 1, {**pool, "checkpoint_offsets": half, "checkpoint_indices": second})


def decode(N: int, S: int = 0, state: str = "bf16", **changes: Any) -> dict:
    """A paged step; with `S` drafts the state after each token goes to a slot of its own."""
    table = torch.arange(N * (1 + S)).view((N, 1 + S) if S else (N,)).tolist()
    indices = tuple(map(tuple, table)) if S else tuple(table)
    step = decode_row(N, state, S=S, **changes).call
    return make_step(replace(step, indices=indices, slots=N * (1 + S)), BF16, "cuda")


def commit(N: int = 4, H: int = 4) -> dict:
    states = {"initial_state": torch.zeros(N, H, 128, 128), "intermediate_states": torch.zeros(N, 2, H, 128, 128)}
    counts = {"ssm_state_indices": torch.arange(N).int(), "num_accepted_tokens": torch.ones(N).int()}
    return {name: x.cuda() for name, x in (states | counts).items()}


def sizes(T: int, H: int) -> dict[str, int]:
    return {"T": T, "H": H, "HV": H, "K": 128, "V": 128}


def float32(T: int = 512, H: int = 8) -> dict:
    return prefill_call(Case("float32", "", **sizes(T, H), l2norm=False), "cuda")


def wy(T: int = 2048, H: int = 8, **changes: Any) -> dict:
    return make_wy(WyCase("wy", "", **sizes(T, H), log2=True, **changes), BF16, "cuda")


def trained(call: dict) -> dict:
    for name in {*LEAVES} & call.keys():
        call[name].requires_grad_()
    return call


def step(op: Op) -> Op:
    ones = functools.cache(lambda shape, dtype: torch.ones(shape, dtype=dtype, device="cuda"))

    def forward_and_backward(**call: torch.Tensor) -> tuple:
        o, _ = op(**call)
        return torch.autograd.grad(o, [call[name] for name in LEAVES if name in call], ones(o.shape, o.dtype))

    return forward_and_backward


OPS: dict[str, Callable[[Any], Op]] = {
    "prefill": lambda fd: fd.chunk_kda,
    "recurrent": lambda fd: fd.fused_recurrent_kda,
    "decode": lambda fd: fd.recurrent_kda,
    "commit": lambda fd: fd.commit,
    "prefill fp32": lambda fd: fd.kda_prefill,
    "wy": lambda fd: fd.kernels.chunk_bwd_wy_dqkg,
    "train": lambda fd: step(fd.chunk_kda),
}
COLUMN = torch.arange(8).int().view(4, 2) // 2  # of a block table, as vLLM passes it


HOST = {
    "prefill": ("prefill", prefill),
    "prefill, pool": ("prefill", lambda: prefill(N=4)),
    "prefill, index column": ("prefill", lambda: prefill(N=4) | {"state_indices": COLUMN.cuda()[:, 0]}),
    "recurrent": ("recurrent", lambda: as_recurrent(prefill(8, 4))),
    "decode": ("decode", lambda: decode(16)),
    "decode, many": ("decode", lambda: decode(64)),
    "commit": ("commit", commit),
    "prefill fp32": ("prefill fp32", float32),
    "wy": ("wy", wy),
    "train": ("train", lambda: trained(prefill())),
}

GPU = {
    "prefill 8K H32": ("prefill", lambda: prefill(8192, 32)),
    "prefill 8K H96": ("prefill", lambda: prefill(8192, 96)),
    "prefill 32K H4": ("prefill", lambda: prefill(32768, 4)),
    "prefill 8x1K H32, pool": ("prefill", lambda: prefill(8192, 32, 8)),
    "decode 64": ("decode", lambda: decode(64)),
    "decode 256": ("decode", lambda: decode(256)),
    "decode 128, fp32": ("decode", lambda: decode(128, state="fp32")),
    "decode 32, 3 drafts": ("decode", lambda: decode(32, S=3)),
    "prefill fp32 4K H32": ("prefill fp32", lambda: float32(4096, 32)),
    "wy 8K H32": ("wy", lambda: wy(8192, 32)),
    "prefill 8K H32, fp32 decays": ("prefill", decays),
    "prefill 8K H32, softplus": ("prefill", lambda: prefill(8192, 32, **UNBOUNDED)),
    "prefill 64K H4, checkpoints": ("prefill", checkpointed),
    "train 8K H32 V64, unbounded": ("train", lambda: trained(decays(V=64, gate="logsigmoid"))),
    "train 8K H32, softplus": ("train", lambda: trained(prefill(8192, 32, **UNBOUNDED))),
    "train 8K H32": ("train", lambda: trained(prefill(8192, 32))),
    "train 8K H32, kept": ("train", lambda: trained(prefill(8192, 32, options={"disable_recompute": True}))),
}


def in_turns(runs: dict[str, Op], measure: Callable[[Op], float]) -> dict:
    """Medians of `ROUNDS` measurements of each, and their ratio."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for name in timing.turns(runs, ROUNDS):
        taken[name].append(measure(runs[name]))
    return compared({name: statistics.median(x) for name, x in taken.items()})


def compared(medians: dict[str, float]) -> dict:
    return {name: round(x, 2) for name, x in medians.items()} | {"ratio": round(medians["ours"] / medians["base"], 4)}


def host_rows(packages: dict) -> Iterator[dict]:
    for name, (kind, make) in HOST.items():
        call = make()
        runs = {which: functools.partial(OPS[kind](fd), **call) for which, fd in packages.items()}
        for run in runs.values():
            for _ in range(5):
                run()
        yield {"row": f"{name}, replay", **in_turns(runs, lambda run: timing.host_us(run, DEVICE, 20))}
    yield from first_rows(packages)


FIRST: dict[str, tuple[str, Callable[[int], dict]]] = {
    "prefill": ("prefill", lambda i: prefill(2048 + 16 * i)),
    "prefill, pool": ("prefill", lambda i: prefill(2048 + 16 * i, N=4)),
    "decode": ("decode", lambda i: decode(64 + i)),
}


def first_rows(packages: dict) -> Iterator[dict]:
    """First calls of sizes that were not seen before; the two revisions have sizes of their own, and go first in turns."""
    for name, (kind, make) in FIRST.items():
        taken: dict[str, list[float]] = {which: [] for which in packages}
        for i, which in enumerate(timing.turns(packages, 2 * ROUNDS)):
            run = functools.partial(OPS[kind](packages[which]), **make(i))
            taken[which].append(timing.host_us(run, DEVICE, 1, rounds=1))
        yield {"row": f"{name}, first", **compared({which: statistics.median(x) for which, x in taken.items()})}


def flat(x: object) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x.detach()]
    return [y for part in x for y in flat(part)] if isinstance(x, (tuple, list)) else []


def gpu_microseconds(timer: Timer, run: Op) -> float:
    run()  # so that the GPU is busy while the host prepares the first call that is timed
    return 1e3 * timer.span(run, BACK_TO_BACK) / BACK_TO_BACK


def gpu_rows(packages: dict) -> Iterator[dict]:
    timer = Timer(DEVICE)
    for name, (kind, make) in GPU.items():
        call = make()
        runs = {which: functools.partial(OPS[kind](fd), **call) for which, fd in packages.items()}
        written = {key: x.clone() for key, x in call.items() if key in ("state_pool", "initial_state")}
        results = {}
        for which, run in runs.items():
            for _ in range(3):
                for key, x in written.items():
                    call[key].copy_(x)
                results[which] = [*flat(run()), *(call[key].clone() for key in written)]
        same = all(torch.equal(a, b) for a, b in zip(results["ours"], results["base"], strict=True))
        memory = {f"peak_{which}": peak_above(run, DEVICE) for which, run in runs.items()}
        row = in_turns(runs, functools.partial(gpu_microseconds, timer))
        yield {"row": name, **row, "same_bits": same, **memory}
        del call, runs, results, written
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the other revision's files")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other_package(options.base, Path(folder))
        sys.path.insert(0, folder)
        packages = {"ours": importlib.import_module("flashdelta"), "base": importlib.import_module(OTHER)}
        torch.manual_seed(0)
        rows = []
        for row in itertools.chain(host_rows(packages), gpu_rows(packages)):
            rows.append(row)
            print(line(row), flush=True)
            if options.out:
                base = {"base": commit_of(options.base)}
                save_json({"about": environment(DEVICE) | base, "rows": rows}, options.out)


def line(row: dict) -> str:
    extra = "" if "same_bits" not in row else f"  bits {'same' if row['same_bits'] else 'DIFFER'}"
    extra += "" if "peak_ours" not in row else f"  peak {row['peak_ours'] - row['peak_base']:+d} B"
    return f"{row['row']:<30}{row['ours']:>10.2f}{row['base']:>10.2f}{row['ratio']:>8.4f}{extra}"


if __name__ == "__main__":
    main()
