"""This checkout beside another revision of itself, in one process and in turns: host time of calls, GPU time, bits, memory.

    git worktree add build/base REV && python benchmarks/compare_revisions.py build/base --out FILE

Host rows: microseconds of a call until it returns, the GPU idle: a `replay` (a call like the ones before), the `first` call of
a shape, the `second`, and one of `20 layers` at a length of its own. GPU rows: microseconds of a call back to back, warm.
Kernel rows (`--only kernels`): the same of the calls of `flashdelta bench prefill`, microseconds of each kernel in a call, and
the errors of both against float64, on the same inputs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import chunked_truth
from flashdelta.tools.bench import profiling
from flashdelta.tools.bench.checks import errors
from flashdelta.tools.bench.environment import environment
from flashdelta.tools.bench.report import save
from flashdelta.tools.bench.timing import Effort, Timer, peak_above, take_turns
from flashdelta.tools.bench.workloads import PREFILL

OTHER = "flashdelta_base"
ROUNDS = 20
BACK_TO_BACK = 20
BF16 = torch.bfloat16
Op = Callable[..., object]


def other_package(source: Path, folder: Path) -> None:
    """The other revision under a name of its own, its operators too."""
    shutil.copytree(source / "src" / "flashdelta", folder / OTHER)
    for path in (folder / OTHER).rglob("*.py"):
        text = path.read_text()
        for a, b in (
            ("flashdelta::", f"{OTHER}::"),
            ("ops.flashdelta", f"ops.{OTHER}"),
            ("kda_prefill::", f"{OTHER}_f::"),
        ):
            text = text.replace(a, b)
        path.write_text(text)


def commit_of(base: Path) -> str | None:
    """None of files without a history of their own."""
    if not (base / ".git").exists():
        return None
    asked = ["git", "-C", str(base), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def tokens(B: int, T: int, H: int, K: int = 128, dtype: torch.dtype = BF16) -> dict:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    return {"q": random(B, T, H, K), "k": random(B, T, H, K), "v": random(B, T, H, K), "g": random(B, T, H, K)} | {
        "beta": random(B, T, H)
    }


def gated(H: int, K: int = 128) -> dict:
    return {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, K, device="cuda")} | {
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
    }


def prefill(T: int = 1024, H: int = 4, N: int = 0, **others: object) -> dict:
    call = tokens(1, T, H) | gated(H) | {"use_beta_sigmoid_in_kernel": True, "state_v_first": True} | others
    if N:
        cuts = torch.linspace(0, T, N + 1).int()
        pool = torch.zeros(N, H, 128, 128, device="cuda")
        call |= {"cu_seqlens": cuts.cuda(), "state_pool": pool, "state_indices": torch.arange(N, device="cuda").int()}
    return call


def column(N: int) -> torch.Tensor:
    """Of a block table, as vLLM passes it."""
    return torch.arange(N, device="cuda").int().repeat_interleave(2).view(N, 2)[:, 0]


def packed(N: int, T: int = 8192, H: int = 32, K: int = 128, V: int = 128, **others: object) -> dict:
    """Offsets of N sequences; the inputs of `prefill` without a gate: log decays in float32 as they are."""
    call = tokens(1, T, H, max(K, V)) | {"use_qk_l2norm_in_kernel": True} | others
    call |= {name: call[name][..., :K].contiguous() for name in "qkg"} | {"v": call["v"][..., :V].contiguous()}
    call |= {"g": -call["g"].float().abs(), "beta": call["beta"].sigmoid()}
    return call | {"cu_seqlens": torch.linspace(0, T, N + 1).int().cuda()}


def checkpointed(T: int = 65536, H: int = 4) -> dict:
    """A sequence over few heads, from and to a pool, with states kept halfway."""
    pool = torch.zeros(2, H, 128, 128, device="cuda")
    whole, half, first, second = (torch.tensor(x).int().cuda() for x in ([0, T], [T // 2], [0], [1]))
    at = {"checkpoint_offsets": half, "checkpoint_indices": second, "cu_seqlens": whole}
    return prefill(T, H, state_pool=pool, state_indices=first, **at)


def trained(call: dict) -> dict:
    for name in LEAVES:
        call[name].requires_grad_()
    return call


def decode(N: int, H: int = 32, S: int = 0, state: torch.dtype = BF16, **others: object) -> dict:
    """With `S` drafts, the state after each token goes to a slot of its own."""
    pool = torch.zeros(N * (1 + S), H, 128, 128, device="cuda", dtype=state)
    indices = torch.arange(N * (1 + S), device="cuda").int().view((N, 1 + S) if S else (N,))
    options = {"beta_is_logit": True, "initial_state": pool, "ssm_state_indices": indices, "num_spec_tokens": S or None}
    return tokens(N, 1 + S, H) | gated(H) | options | others


def verify(N: int = 4, H: int = 4) -> dict:
    pool, rows = torch.zeros(N, H, 128, 128, device="cuda"), torch.zeros(N, 2, H, 128, 128, device="cuda")
    indices, counts = torch.arange(N, device="cuda").int(), torch.ones(N, device="cuda").int()
    return {
        "initial_state": pool,
        "intermediate_states": rows,
        "ssm_state_indices": indices,
        "num_accepted_tokens": counts,
    }


def float32(T: int = 512, H: int = 8) -> dict:
    call = tokens(1, T, 1, dtype=torch.float32) | {"beta": torch.rand(1, T, 1, device="cuda")}
    call["g"] = -call["g"].abs()
    call |= {name: torch.nn.functional.normalize(call[name], dim=-1) for name in "qk"}
    return {name: x.expand(-1, -1, H, *x.shape[3:]).transpose(1, 2).contiguous() for name, x in call.items()}


def wy(T: int = 2048, H: int = 8, **others: object) -> dict:
    x, NT = tokens(1, T, H), T // 64
    states = {name: torch.randn(1, NT, H, 128, 128, device="cuda").to(BF16) for name in ("h", "dh")}
    values = {name: torch.randn(1, T, H, 128, device="cuda").to(BF16) for name in ("v_new", "do", "dv")}
    own = {"g": -x["g"].float().abs().cumsum(1) / T, "beta": x["beta"].float().sigmoid()}
    A = torch.randn(1, T, H, 64, device="cuda").to(BF16)
    return x | own | states | values | {"A": A, "use_exp2": True} | others


def train(T: int = 1024, H: int = 4, **others: object) -> dict:
    return trained(prefill(T, H, **others))


LEAVES = ("q", "k", "v", "g", "beta")


def step(op: Op) -> Op:
    grads: list[torch.Tensor] = []

    def forward_and_backward(**call: torch.Tensor) -> tuple:
        o, _ = op(**call)
        if not grads:
            grads.append(torch.ones_like(o).detach())
        return torch.autograd.grad(o, [call[name] for name in LEAVES], grads[0])

    return forward_and_backward


CALLS: dict[str, tuple[Callable[[object], Op], Callable[..., dict]]] = {
    "prefill": (lambda fd: fd.chunk_kda, prefill),
    "prefill, pool": (lambda fd: fd.chunk_kda, lambda: prefill(N=4)),
    "prefill, index column": (lambda fd: fd.chunk_kda, lambda: prefill(N=4) | {"state_indices": column(4)}),
    "prefill, states": (lambda fd: fd.chunk_kda, lambda: prefill(return_intermediate_states=True)),
    "recurrent": (lambda fd: fd.fused_recurrent_kda, lambda: prefill(T=8)),
    "decode": (lambda fd: fd.recurrent_kda, lambda: decode(16)),
    "decode, many": (lambda fd: fd.recurrent_kda, lambda: decode(64)),
    "commit": (lambda fd: fd.commit, verify),
    "prefill fp32": (lambda fd: fd.kda_prefill, float32),
    "wy": (lambda fd: fd.kernels.chunk_bwd_wy_dqkg, wy),
    "train": (lambda fd: step(fd.chunk_kda), train),
    "train, kept": (lambda fd: step(fd.chunk_kda), lambda: train(disable_recompute=True)),
}

GPU = {
    "prefill 8K H32": ("prefill", lambda: prefill(8192, 32)),
    "prefill 8K H96": ("prefill", lambda: prefill(8192, 96)),
    "prefill 32K H4": ("prefill", lambda: prefill(32768, 4)),
    "prefill 8x1K H32, pool": ("prefill", lambda: prefill(8192, 32, 8)),
    "decode 64": ("decode", lambda: decode(64)),
    "decode 256": ("decode", lambda: decode(256)),
    "decode 128, fp32": ("decode", lambda: decode(128, state=torch.float32)),
    "decode 128, K first": ("decode", lambda: decode(128, state_v_first=False)),
    "decode 32, 3 drafts": ("decode", lambda: decode(32, S=3)),
    "recurrent 8x64 H32": ("recurrent", lambda: prefill(512, 32, 8)),
    "prefill fp32 4K H32": ("prefill fp32", lambda: float32(4096, 32)),
    "wy 8K H32": ("wy", lambda: wy(8192, 32)),
    "wy 8K H32, V first": ("wy", lambda: wy(8192, 32, state_v_first=True)),
    "prefill 8K H32, fp32 decays": ("prefill", lambda: packed(8)),
    "prefill 8K H32, softplus": ("prefill", lambda: prefill(8192, 32, lower_bound=None)),
    "prefill 64K H4, checkpoints": ("prefill", checkpointed),
    "train 8K H32, fp32 decays": ("train", lambda: trained(packed(8))),
    "train 8K H32 V64, unbounded": ("train", lambda: trained(packed(8, V=64, gate="logsigmoid"))),
    "train 8K H32 K64": ("train", lambda: trained(packed(8, K=64))),
    "train 8K H32, softplus": ("train", lambda: train(8192, 32, lower_bound=None)),
    "train 8K H32": ("train", lambda: train(8192, 32)),
    "train 8K H32, kept": ("train", lambda: train(8192, 32, disable_recompute=True)),
}


def microseconds(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * taken / times


def least_microseconds(call: Op) -> float:
    """The least of five times 20 calls: what else runs on the host only adds."""
    return min(microseconds(call, 20) for _ in range(5))


def in_turns(runs: dict[str, Op], measure: Callable[[Op], float]) -> dict:
    """The medians of `ROUNDS` measurements of each, and their ratio."""
    timings = take_turns(runs, measure, Effort(rounds=ROUNDS, min_rounds=ROUNDS, warmup_ms=0.0))
    return compared({name: timing.median for name, timing in timings.items()})


def compared(medians: dict[str, float]) -> dict:
    return {name: round(x, 2) for name, x in medians.items()} | {"ratio": round(medians["ours"] / medians["base"], 4)}


def host_rows(packages: dict) -> Iterator[dict]:
    for name, (op_of, make) in CALLS.items():
        call = make()
        runs = {which: functools.partial(op_of(fd), **call) for which, fd in packages.items()}
        for run in runs.values():
            for _ in range(5):
                run()
        yield {"row": f"{name}, replay", **in_turns(runs, least_microseconds)}
    yield from length_rows(packages)


def length_rows(packages: dict) -> list[dict]:
    """Calls of lengths that were not seen before; the two revisions have lengths of their own, and go first in turns."""
    names = ("first", "second", "third", "20 layers")
    taken = {name: {which: [] for which in packages} for name in names}
    length = 2048
    for i in range(2 * ROUNDS):
        for which in sorted(packages, reverse=i % 2 == 1):
            length += 16
            call = prefill(length)
            for name in names[:3]:
                taken[name][which].append(microseconds(lambda: packages[which].chunk_kda(**call), 1))  # noqa: B023
            length += 16
            calls = [prefill(length) for _ in range(20)]
            torch.cuda.synchronize()
            began = time.perf_counter()
            for call in calls:
                packages[which].chunk_kda(**call)
            taken["20 layers"][which].append(1e6 * (time.perf_counter() - began) / len(calls))
    medians = {name: {which: statistics.median(x) for which, x in times.items()} for name, times in taken.items()}
    return [{"row": f"prefill, {name}", **compared(x)} for name, x in medians.items()]


def flat(x: object) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x.detach()]
    return [y for part in x for y in flat(part)] if isinstance(x, (tuple, list)) else []


def gpu_microseconds(timer: Timer, run: Op) -> float:
    run()  # so that the GPU is busy while the host prepares the first call that is timed
    return 1e3 * timer.span(run, BACK_TO_BACK) / BACK_TO_BACK


def kernel_rows(packages: dict) -> Iterator[dict]:
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device)
    for row in PREFILL:
        call = make_call(row.call, BF16, device)
        runs = {which: functools.partial(fd.chunk_kda, **call) for which, fd in packages.items()}
        truth = chunked_truth(call)
        off = {which: errors(truth, ("o", "state"), flat(run()), absolute=True) for which, run in runs.items()}
        del truth
        turns = in_turns(runs, functools.partial(gpu_microseconds, timer))
        kernels = {which: kernel_microseconds(run, timer) for which, run in runs.items()}
        yield {"row": row.name, **turns, "kernels": kernels, "errors": off}
        del call, runs
        torch.cuda.empty_cache()


def kernel_microseconds(run: Op, timer: Timer) -> dict[str, float]:
    calls = profiling.profiled(lambda: timer.span(run, BACK_TO_BACK))
    found = profiling.times(calls, BACK_TO_BACK)
    return {kernel["kernel"]: round(1e3 * kernel["ms"], 2) for kernel in found}


def gpu_rows(packages: dict) -> Iterator[dict]:
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device)
    for name, (kind, make) in GPU.items():
        call = make()
        runs = {which: functools.partial(CALLS[kind][0](fd), **call) for which, fd in packages.items()}
        written = {key: x.clone() for key, x in call.items() if key in ("state_pool", "initial_state")}
        results = {}
        for which, run in runs.items():
            for _ in range(3):
                for key, x in written.items():
                    call[key].copy_(x)
                results[which] = [*flat(run()), *(call[key].clone() for key in written)]
        same = all(torch.equal(a, b) for a, b in zip(results["ours"], results["base"], strict=True))
        memory = {f"peak_{which}": peak_above(run, device) for which, run in runs.items()}
        row = in_turns(runs, functools.partial(gpu_microseconds, timer))
        yield {"row": name, **row, "same_bits": same, **memory}
        del call, runs, results, written
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the other revision's files")
    parser.add_argument("--base-commit", help="of files without a history of their own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("host", "gpu", "kernels"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other_package(options.base, Path(folder))
        sys.path.insert(0, folder)
        packages = {"ours": importlib.import_module("flashdelta"), "base": importlib.import_module(OTHER)}
        torch.manual_seed(0)
        rows = []
        kinds = {"host": host_rows, "gpu": gpu_rows, "kernels": kernel_rows}
        for kind in [options.only] if options.only else ("host", "gpu"):
            for row in kinds[kind](packages):
                rows.append(row)
                print(line(row), flush=True)
                if options.out:
                    base = {"base": options.base_commit or commit_of(options.base)}
                    save({"about": environment(torch.device("cuda")) | base, "rows": rows}, options.out)


def line(row: dict) -> str:
    extra = "" if "same_bits" not in row else f"  bits {'same' if row['same_bits'] else 'DIFFER'}"
    extra += "" if "peak_ours" not in row else f"  peak {row['peak_ours'] - row['peak_base']:+d} B"
    extra += "".join(f"  {which} {kernels}" for which, kernels in row.get("kernels", {}).items())
    return f"{row['row']:<30}{row['ours']:>10.2f}{row['base']:>10.2f}{row['ratio']:>8.4f}{extra}"


if __name__ == "__main__":
    main()
