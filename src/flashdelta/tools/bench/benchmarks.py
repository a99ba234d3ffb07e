"""The benchmarks by name: their rows, what makes a row's calls, and what is said of it."""

from __future__ import annotations

import torch

from . import contenders, layer, models, ranks, serving, startup, workloads
from .runner import Benchmark
from .timing import Effort, float32_ceilings
from .workloads import quotient, value, with_gates

PROMPTS = ("fla", "flash_kda", "cula", "cudnn")


def decode_extra(row: dict, document: dict) -> dict:
    """Time a token against a step without speculative tokens: the row's own, or another row."""
    S = row["shape"]["S"]
    base = next((x for x in document["rows"] if S and x["name"] == row["name"].removesuffix(f" S{S}")), None)
    bare = value(row, "bare.ms.median") or value(base, "ours.ms.median")
    cost = quotient(value(row, "ours.ms.median"), bare)
    return {"token_cost": None if cost is None else cost / (1 + S)}


def fp32_extra(row: dict, document: dict) -> dict:
    """Shares of the copy rate, and of the rate of products in TF32 (of which 3xTF32 takes three) or float32."""
    shares = {}
    for name, products, ceiling in (("ours", 3, "tf32_tflop_s"), ("ieee", 1, "fp32_tflop_s")):
        ms = value(row, f"{name}.ms.median")
        copy = quotient(row["floor_ms"], ms)
        shares[name] = copy and {
            "copy": copy,
            "products": products * row["flop"] / ms / 1e9 / document["ceilings"][ceiling],
        }
    return {"shares": shares}


def models_extra(row: dict, document: dict) -> dict:
    """The GPU time of the kernels, and what share of its layer's the KDA part's is."""
    layer = next((x for x in document["rows"] if x["name"] == f"{row['name'].removesuffix(' KDA')} block"), None)
    ms = {name: sum(x["ms"] for x in value(row, f"{name}.kernels") or ()) or None for name in ("ours", "fla")}
    return {"kernel_ms": ms, "share": {name: quotient(x, value(layer, f"kernel_ms.{name}")) for name, x in ms.items()}}


COMMON = ("backend", "json", "rows", "fla", "no_fla", "repeats", "device", "wide")

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "prefill",
            "Time the forward over whole prompts beside other libraries, with errors and floor",
            workloads.PREFILL,
            contenders.prefill,
            more=with_gates(workloads.PREFILL),
            peers=PROMPTS,
            options=(*COMMON, "plot"),
        ),
        Benchmark(
            "shards",
            "Time ten shards of shipped models, by CUDA graph, with random and with slow gates",
            workloads.SHARDS,
            contenders.prefill,
            effort=Effort(rounds=50),
            prefer="graph_ms",
            peers=("cudnn", "flash_kda"),
            options=COMMON,
        ),
        Benchmark(
            "classic",
            "Time 52 usual shapes beside other libraries, with RMS and maximum errors",
            workloads.CLASSIC,
            contenders.prefill,
            effort=Effort(rounds=20),
            peers=PROMPTS,
            options=(*COMMON, "plot"),
        ),
        Benchmark(
            "split",
            "Time long sequences over few heads, split and whole, beside FLA with its own split",
            workloads.SPLIT,
            contenders.split,
            more=with_gates(workloads.SPLIT),
            effort=Effort(rounds=20),
            # by CUDA graph, as launches take longer than short sequences
            over={"gain": ("whole", "ours"), "cu_seqlens_cpu_gain": ("whole", "cu_seqlens_cpu")},
            peers=PROMPTS,
            options=(*COMMON, "plot"),
        ),
        Benchmark(
            "kernels",
            "Time the forward's kernels one by one, beside the ceilings of memory and arithmetic",
            workloads.PREFILL,
            contenders.kernels,
            quick=("T8192 H64",),
            effort=Effort(rounds=20),
            profiled_calls=None,
            peers=(),
            options=("backend", "json", "rows", "repeats", "device", "wide"),
        ),
        Benchmark(
            "decode",
            "Time steps of decoding over a paged pool beside FLA, with shares of the copy rate",
            workloads.DECODE,
            contenders.decode,
            quick=(
                *(f"N{N} H32 {state}" for state in workloads.STATES for N in (1, 32, 128, 256)),
                "N32 H32 fp32 S3",
            ),
            effort=Effort(rounds=7, min_rounds=3, budget_ms=100.0, warmup_ms=2.0),
            derive=decode_extra,
            peers=("fla_decode",),
            options=(*COMMON, "quick"),
        ),
        Benchmark(
            "train",
            "Time training steps beside FLA, with memory, errors of all gradients, and kernels",
            workloads.TRAIN,
            contenders.train,
            more=with_gates(workloads.TRAIN, graphs=False),
            quick=("B1 T8192 H32", "packed 20 random H32"),
            effort=Effort(rounds=20),
            grad=torch.enable_grad,
            peers=("fla", "cudnn"),
            options=(*COMMON, "quick", "plot"),
        ),
        Benchmark(
            "wy",
            "Time the fused backward of the WY step beside FLA's kernel, with errors by gradient",
            workloads.WY,
            contenders.wy,
            quick=("B1 T1024 H32", "B1 T8192 H32", "packed random 10 of 8192 H32", "B1 T8192 H8 HV32"),
            effort=Effort(rounds=20),
            prefer="graph_ms",
            grad=torch.no_grad,
            peers=("fla_wy",),
            options=(*COMMON, "quick", "plot"),
        ),
        Benchmark(
            "fp32",
            "Time the float32 prefill in both precisions, and the C library, beside FLA",
            workloads.PREFILL_FP32,
            contenders.fp32,
            quick=tuple(
                row.name for row in workloads.PREFILL_FP32 if row.name.startswith(("B1 H32 T1024", "B1 H32 T4096"))
            ),
            effort=Effort(rounds=50, min_rounds=5, budget_ms=1000.0, warmup_ms=10.0),
            derive=fp32_extra,
            ceilings=float32_ceilings,
            options=("json", "rows", "fla", "no_fla", "quick", "library", "repeats", "device", "wide"),
        ),
        Benchmark(
            "models",
            "Time layers of FLA and Hugging Face on flashdelta and on FLA, whole and the KDA part",
            workloads.MODELS,
            models.models,
            quick=tuple(row.name for row in workloads.MODELS if row.call.B == 1 and row.call.T <= 8192),
            derive=models_extra,
            grad=models.session,
            options=("json", "rows", "fla", "no_fla", "quick", "repeats", "device", "wide"),
        ),
        Benchmark(
            "layer",
            "Time the layer but its projections: steps in one launch, training steps, single kernels",
            workloads.LAYER,
            layer.layer,
            quick=tuple(f"decode N{N} H32 {state}" for state in workloads.STATES for N in (8, 128)),
            effort=Effort(rounds=7, min_rounds=3, budget_ms=100.0, warmup_ms=2.0),
            over={"chain_ratio": ("chain", "ours"), "gated_ratio": ("fla_gated", "ours")},
            derive=layer.layer_extra,
            grad=torch.enable_grad,
            peers=layer.PEERS,
            options=(*COMMON, "quick", "plot"),
        ),
        Benchmark(
            "engines",
            "Time layers of vLLM and SGLang on flashdelta and on the engines' own Triton kernels",
            workloads.SERVED,
            serving.served,
            effort=Effort(rounds=20),
            over={"engine_ratio": ("engine", "ours")},
            peers=("engine",),
            options=("json", "rows", "repeats", "device", "wide"),
        ),
        Benchmark(
            "cp",
            "Time sequences over 2, 4 or 8 GPUs beside one GPU with as many tokens and FLA's context parallelism",
            ranks.ROWS,
            measure=ranks.measure,
            more=ranks.MORE,
            quick=tuple(row.name for row in ranks.ROWS if " 8K x" in row.name),
            effort=Effort(rounds=30),
            ceilings=None,
            options=("backend", "json", "rows", "fla", "no_fla", "quick", "repeats", "device", "wide"),
        ),
        Benchmark(
            "startup",
            "Time the first calls of a fresh process, with the kernel cache empty and then filled",
            startup.ROWS,
            measure=startup.measure,
            ceilings=None,
            peers=(),
            options=("backend", "json", "tokens", "device", "wide"),
        ),
    )
}
"""But for `toolchains`, which imports Triton, and Triton is for Linux only."""


def benchmark_of(name: str) -> Benchmark:
    if name == "toolchains":
        from .toolchains import BENCHMARK

        return BENCHMARK
    return BENCHMARKS[name]
