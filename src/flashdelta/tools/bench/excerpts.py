"""Tables of docs/ that show a few figures of a file in benchmarks/results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .profiling import STAGES, chunk_counts
from .report import load, markdown_table
from .workloads import PREFILL, value

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(name: str) -> dict[str, dict]:
    """The rows of a file, by name."""
    return {row["name"]: row for row in load(RESULTS / f"{name}.json")["rows"]}


FP32_SHOWN = (
    *("B1 H8 T1024 K64 C32", "B1 H32 T4096 K64 C32", "B4 H32 T16384 K64 C32", "B1 H8 T1024 K128 C64"),
    *("B1 H8 T16384 K128 C64", "B1 H32 T4096 K128 C64", "B1 H32 T16384 K128 C64", "B4 H32 T16384 K128 C64"),
)


def fp32() -> str:
    """Of docs/fp32-and-c.md."""
    rows = rows_of("fp32-h200")
    titles = ["case", "3xTF32", "C library", "float32", "FLA float32", "FLA bf16", "share of TF32 MMAs", "of the copy"]
    titles += ["error: 3xTF32", "float32", "FLA float32", "FLA bf16"]
    table = [titles]
    for name in FP32_SHOWN:
        row = rows[name]
        times = [value(row, f"{who}.ms.median") for who in ("ours", "c", "ieee", "fla", "fla_bf16")]
        shares = [row["shares"]["ours"][of] for of in ("products", "copy")]
        errors = [row[who]["error"]["o"] for who in ("ours", "ieee", "fla", "fla_bf16")]
        cells = ["" if ms is None else f"{ms:.3f}" for ms in times]
        table.append([name, *cells, *(f"{x:.0%}" for x in shares), *(f"{x:.1e}" for x in errors)])
    return markdown_table(table)


def training() -> str:
    """Of docs/backward.md: kernels of a training step."""
    rows = rows_of("train-hopper-h200")
    columns = []
    for name in ("B1 T8192 H32", "B1 T8192 H32 softplus"):
        columns.append({kernel["kernel"]: kernel for kernel in rows[name]["ours"]["kernels"]})
    table = [["us", "bounded", "softplus"]]
    last = "finish" if "finish_kernel" in columns[0] else "gate_sums"
    for kernel in ("prepare", "recurrence", "reverse", "wy", "intra", last):
        found = [column[f"{kernel}_kernel"] for column in columns]
        twice = ", twice" if found[0]["launches"] == 2 else ""
        table.append([f"`{kernel}`{twice}", *(f"{x['ms'] * 1e3:.0f}" for x in found)])
    return markdown_table(table)


def times_of_kernels(gpu: str) -> dict[str, dict[str, float]]:
    """Us of `prepare` and `recurrence` back to back, by call, in whole chunks and in steps of 32 tokens."""
    return load(RESULTS / "tuning" / f"half_steps-{gpu}.json")["times"]


def kernels() -> str:
    """Of docs/hopper-prefill.md: what both forms of the kernels reach at T8192 H64."""
    name = "T8192 H64"
    chunks = next(row.call for row in PREFILL if row.name == name)
    steps = replace(chunks, chunk_size=32)
    # a step has a second decay of each channel, which the contract of a chunk of 32 has not
    more = {"steps": 4 * sum(chunk_counts(steps)) * steps.HV * steps.K, "chunks": 0}
    table = [[name]]
    for stage in STAGES:
        table[0] += [f"`{stage}`, us", "of the copy", "of the products"]
    for form, case in (("steps", steps), ("chunks", chunks)):
        for gpu in ("h200", "h100"):
            ceilings = load(RESULTS / f"prefill-hopper-{gpu}.json")["ceilings"]
            cells = [f"{form}, {gpu.upper()}"]
            for stage, work_of in STAGES.items():
                us, work = times_of_kernels(gpu)[name][f"{form}: {stage}"], work_of(case)
                tb_s, tflop_s = (work.bytes + more[form]) / us / 1e6, work.flop / us / 1e6
                cells += [
                    f"{us:.0f}",
                    f"{tb_s / ceilings['copy_tb_s']:.0%}",
                    f"{tflop_s / ceilings['gemm_tflop_s']:.0%}",
                ]
            table.append(cells)
    return markdown_table(table)


HALF_STEPS_SHOWN = ("T8192 H32", "8 x 1024 H32", "T8192 H64", "T8192 H64 softplus")


def half_steps() -> str:
    """Of docs/hopper-prefill.md: whole chunks beside steps of 32 tokens."""
    times = times_of_kernels("h200")
    table = [["us", "chunks: `prepare`", "`recurrence`", "both", "steps: `prepare`", "`recurrence`", "both"]]
    parts = [f"{form}: {what}" for form in ("chunks", "steps") for what in ("prepare", "recurrence", "both")]
    table += [[name, *(f"{times[name][part]:.0f}" for part in parts)] for name in HALF_STEPS_SHOWN]
    return markdown_table(table)


GRAPH_RATIOS = {name: f"ours.graph_ms.median/{name}.graph_ms.median" for name in ("cudnn", "cudnn_ready")}
"""Our time over cuDNN's by CUDA graph: of the same call, and of one whose inputs are made ready before."""


def gated(benchmark: str, gpu: str, gates: str) -> dict[str, dict]:
    """The rows with random or slow gates that cuDNN has times of, by what comes before that in their name; none where the GPU
    has no such file."""
    ending = f", {gates} gates"
    path = GRAPH_RATIOS["cudnn"]
    rows = rows_of(f"{benchmark}-{gpu}") if (RESULTS / f"{benchmark}-{gpu}.json").exists() else {}
    return {
        x.removesuffix(ending): row for x, row in rows.items() if x.endswith(ending) and value(row, path) is not None
    }


def beside_cudnn() -> str:
    """Of docs/hopper-prefill.md: our time over cuDNN's, where cuDNN's is less for the same call, and of all rows."""
    sources = [(path, gpu) for path in GRAPH_RATIOS.values() for gpu in ("h200", "h100")]
    table = [["ours over cuDNN, by graph", "same call: H200", "H100", "ready inputs: H200", "H100"]]
    wholes = []
    for benchmark, what in (("prefill-hopper", "prefill"), ("shards", "shards"), ("split-hopper", "split")):
        for gates in ("random", "slow"):
            found = [
                {name: value(row, path) for name, row in gated(benchmark, gpu, gates).items()} for path, gpu in sources
            ]
            ahead = [x for x in found[0] if max(column.get(x, 0.0) for column in found[:2]) >= 1.005]
            of = " (`split`)" if what == "split" else ""
            table += [[f"{x}{of}, {gates} gates", *(f"{c[x]:.2f}" if x in c else "-" for c in found)] for x in ahead]
            ranges = [f"{min(c.values()):.2f} to {max(c.values()):.2f}" if c else "-" for c in found]
            wholes.append([f"{len(found[0])} rows of `{what}`, {gates} gates", *ranges])
    return markdown_table([*table, *wholes])


FEW_HEADS_SHOWN = (
    *("T8192 H4", "T8192 H8", "T8192 H12", "T32768 H4", "T32768 H8", "T131072 H4", "T131072 H8"),
    *("128K + 5 x 1K H4", "64K+512+256+128 H8"),
)


def few_heads() -> str:
    """Of docs/split.md: rows of `bench prefill` with few heads, whose bounds are for sustained times."""
    rows = rows_of("prefill-hopper-h200")
    table = [["ms", "segments", "CUDA graph", "sustained", "bound"]]
    for name in FEW_HEADS_SHOWN:
        row = rows[name]
        (bound,) = row["bounds"]
        times = [row["ours"]["graph_ms"]["median"], row["ours"]["sustained_ms"]]
        segments = " ".join(str(n) for n in row["segments"])
        table.append(
            [name, segments, *(f"{ms:.3f}" for ms in times), bound.removeprefix("<= ").removesuffix(" ms sustained")]
        )
    return markdown_table(table)


FLA_STEP = ("fused_recurrent_kda_fwd", "causal_conv1d_update", "layer_norm_gated_fwd", "kda_gate_fwd")


def step_parts() -> str:
    """Of docs/layer.md: FLA's kernels of a step of the layer beside our one."""
    rows = rows_of("layer-h100")
    table = [["N, states, us", "FLA: step, convolution, norm, gate", "ours, one launch"]]
    for N in (8, 128):
        for state in ("fp32", "bf16"):
            row = rows[f"decode N{N} H32 {state}"]
            (ours,) = row["ours"]["kernels"]
            found = {kernel["kernel"].removesuffix("_kernel"): kernel["ms"] for kernel in row["fla"]["kernels"]}
            parts = " + ".join(f"{found[name] * 1e3:.1f}" for name in FLA_STEP)
            table.append([f"{N}, {state}", parts, f"{ours['ms'] * 1e3:.1f}"])
    return markdown_table(table)


LAYERS_BYTES = {"fp32": 1.036, "bf16": 1.072}
"""What a step of the layer moves, over attention alone."""


def missed_steps() -> str:
    """Of docs/layer.md: rows that miss the bound over FLA's kernels, and what attention alone takes of FLA's time."""
    table = [["row", "bound", "attention alone", "with the layer's bytes", "ours"]]
    for name, row in rows_of("layer-h100").items():
        if name.startswith("decode") and row["met"] is False:
            (bound,) = (text for text, met in row["bounds"].items() if not met)
            alone, ours = (value(row, f"{who}.ms.median/fla.ms.median") for who in ("bare", "ours"))
            more = alone * LAYERS_BYTES[row["shape"]["state"]]
            limit = bound.removeprefix("<= ").removesuffix(" of FLA's")
            table.append([name.removeprefix("decode "), limit, *(f"{x:.2f}" for x in (alone, more, ours))])
    return markdown_table(table)
