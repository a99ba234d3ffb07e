"""Tables of docs/ that show a few figures of a file in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from .report import load, markdown_table
from .workloads import value

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
    for kernel in ("prepare", "recurrence", "reverse", "wy", "intra", "finish"):
        found = [column[f"{kernel}_kernel"] for column in columns]
        twice = ", twice" if found[0]["launches"] == 2 else ""
        table.append([f"`{kernel}`{twice}", *(f"{x['ms'] * 1e3:.0f}" for x in found)])
    return markdown_table(table)


def kernels() -> str:
    """Of docs/hopper-prefill.md: what the kernels of whole chunks reach."""
    found = {kernel["stage"]: kernel for kernel in rows_of("kernels-hopper-h200")["T8192 H64"]["ours"]["kernels"]}
    both = [found["prepare"], found["recurrence"]]
    lines = {
        "time": [f"{x['ms'] * 1e3:.0f} us" for x in both],
        "memory traffic, share of the copy": [f"{x['tb_s']:.2f} TB/s, {x['share_of_copy']:.0%}" for x in both],
        "products, share of the matrix product": [
            f"{x['tflop_s']:.0f} TFLOP/s, {x['share_of_gemm']:.0%}" for x in both
        ],
        "registers, spilled bytes of a thread": [f"{x['registers']}, {x['spill_bytes']}" for x in both],
        "CTAs on an SM": [str(x["ctas_per_sm"]) for x in both],
    }
    return markdown_table(
        [["H = 64, in chunks", "`prepare`", "`recurrence`"], *([name, *x] for name, x in lines.items())]
    )


HALF_STEPS_SHOWN = ("T8192 H32", "T8192 H64", "T8192 H64 softplus", "8 x 1024 H32", "8 x 1024 H64")


def half_steps() -> str:
    """Of docs/hopper-prefill.md: whole chunks beside steps of 32 tokens."""
    times = load(RESULTS / "tuning" / "half_steps-h200.json")["times"]
    table = [["us", "chunks: `prepare`", "`recurrence`", "both", "steps: `prepare`", "`recurrence`", "both"]]
    parts = [f"{form}: {what}" for form in ("chunks", "steps") for what in ("prepare", "recurrence", "both")]
    table += [[name, *(f"{times[name][part]:.0f}" for part in parts)] for name in HALF_STEPS_SHOWN]
    return markdown_table(table)


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
