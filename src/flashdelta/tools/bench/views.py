"""How each benchmark's document is shown; benchmarks/README.md says what the columns mean."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from . import workloads
from .contenders import CUDNN, GRADIENTS, TITLES
from .report import Column, KernelPlot, Plot, View, kernel_name, mean, short
from .training import LEAVES
from .workloads import FLASH_KDA_MEAN, FLASH_KDA_OF_FLA, over_flash_kda, value

MET = Column("met", "met", "met")
BOUND = Column("bound", "bounds", "keys", wide=True)
RATIOS = (Column("ratio", "speedup", "x"), Column("sustained", "sustained_speedup", "x"))
FLOOR = (Column("floor ms", "floor_ms", wide=True), Column("of copy", "share_of_floor", "%", wide=True))


def both(title: str, keys: str, form: str = "", scale: float = 1.0) -> tuple[Column, ...]:
    """Wide columns of ours and of FLA's, whose names take the place of `{}` in the title."""
    paths = {who: " ".join(f"{name}.{key}" for key in keys.split()) for name, who in (("ours", "ours"), ("fla", "FLA"))}
    return tuple(Column(title.format(who), found, form, scale, wide=True) for who, found in paths.items())


OURS, FLA = Column("ours ms", "ours.ms.median"), Column("FLA ms", "fla.ms.median")
SUSTAINED = both("{} sustained ms", "sustained_ms")
ERRORS = both("error {}: o, state", "error.o error.state", "e")
TIMES = {"": "ms.median", "graph ": "graph_ms.median", "sustained ": "sustained_ms"}
"""Paths by what is said of a time."""


def times_of(names: Sequence[str], unit: str, paths: Mapping[str, str], scale: float = 1.0) -> tuple[Column, ...]:
    """Wide columns of times of libraries."""
    return tuple(
        Column(f"{TITLES[name]} {said}{unit}", f"{name}.{path}", scale=scale, wide=True)
        for said, path in paths.items()
        for name in names
    )


def errors_of(names: Sequence[str], results: Sequence[str]) -> tuple[Column, ...]:
    """Wide columns of errors of libraries."""
    return tuple(
        Column(
            f"error {TITLES[name]}: {', '.join(results)}",
            " ".join(f"{name}.error.{x}" for x in results),
            "e",
            wide=True,
        )
        for name in names
    )


def ratios(names: Sequence[str], paths: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Times of libraries over ours."""
    return tuple(
        (f"{TITLES[name]}/ours{', ' if said else ''}{said.strip()}", f"{name}.{path}/ours.{path}")
        for name in names
        for said, path in paths.items()
    )


OTHERS = ("flash_kda", "cula", *CUDNN)
"""Beside FLA."""

PEERS = (*times_of(OTHERS, "ms", TIMES), *errors_of(OTHERS, ("o", "state")))
PEER_TITLES = tuple((name, TITLES[name]) for name in ("fla", *OTHERS))

ABSOLUTE = (
    *both("o {}: RMSE, max", "rmse.o max_error.o", "e"),
    *both("state {}: RMSE, max", "rmse.state max_error.state", "e"),
)
PEER_RATIOS = (*View.ratios, *ratios(OTHERS, TIMES))


def prefill_lines(row: dict) -> list[dict]:
    """With FlashKDA's time over ours where it can be derived."""
    return [{**row, "flash_kda_ratio": over_flash_kda(row)}]


def prefill_summary(document: dict) -> list[str]:
    """FlashKDA's times over ours, derived, and whether their mean is what it must be."""
    found = [x for row in document["rows"] if (x := over_flash_kda(row)) is not None]
    if not found:
        return []
    whole = len(found) == len(FLASH_KDA_OF_FLA)
    met = "yes" if statistics.geometric_mean(found) >= FLASH_KDA_MEAN else "NO"
    judged = f"; mean >= {FLASH_KDA_MEAN:g}x: {met}" if whole else ""
    return [mean("FlashKDA/ours, sustained, derived from FLA's times", found) + judged]


PREFILL = View(
    (
        *(OURS, Column("graph", "ours.graph_ms.median"), FLA, *RATIOS, *SUSTAINED, *FLOOR),
        Column("FlashKDA/ours, derived", "flash_kda_ratio", "x", wide=True),
        *(*ERRORS, *ABSOLUTE, *PEERS, BOUND, MET),
    ),
    prefill_lines,
    titles=PEER_TITLES,
    ratios=(*PEER_RATIOS, ("with a checkpoint/ours, sustained", "checkpoint.sustained_ms/ours.sustained_ms")),
    summary=prefill_summary,
)

# ---- shards ----------------------------------------------------------------------------------------------------------

US = 1e3
AT_SHARDS = (*CUDNN, "flash_kda")
EAGER = {"eager ": "ms.median", "sustained ": "sustained_ms"}
SHARDS = View(
    (
        *(Column(f"{TITLES[x].split()[-1]} us", f"{x}.graph_ms.median", scale=US) for x in ("ours", *CUDNN)),
        Column("ratio", "cudnn.graph_ms.median/ours.graph_ms.median", "x"),
        Column("FlashKDA us", "flash_kda.graph_ms.median", scale=US, wide=True),
        *times_of(("ours", *AT_SHARDS), "us", EAGER, US),
        Column("floor us", "floor_ms", scale=US, wide=True),
        *errors_of(("ours", *AT_SHARDS), ("o", "state")),
        *(BOUND, MET),
    ),
    titles=tuple((name, TITLES[name]) for name in AT_SHARDS),
    ratios=ratios(AT_SHARDS, {"graph ": "graph_ms.median", **EAGER}),
)

# ---- split -----------------------------------------------------------------------------------------------------------


def is_split(row: dict) -> bool:
    return max(row["segments"] or (), default=1) > 1


def split_summary(document: dict) -> list[str]:
    """What splitting gains where it is done, and costs where it is not, as a share of the whole call's time."""
    rows = [row for row in document["rows"] if row["gain"] is not None]
    lines = [mean("split rows, whole/ours", [row["gain"] for row in rows if is_split(row)])]
    costs = []
    for key, where in (("gain", "at most"), ("cu_seqlens_cpu_gain", "where the host has the lengths")):
        gains = [row[key] for row in rows if not is_split(row) and row.get(key)]
        costs += [f"{max(1 / gain - 1 for gain in gains):.1%} {where}"] if gains else []
    return [*lines, f"whole rows: planning costs {', '.join(costs)}" if costs else ""]


SPLIT = View(
    (
        OURS,
        Column("whole", "whole.ms.median"),
        FLA,
        Column("gain", "gain", "x"),
        *RATIOS,
        *SUSTAINED,
        Column("segments", "segments", "list", wide=True),
        Column("floor ms", "floor_ms", wide=True),
        *ERRORS,
        Column("error whole: o, state", "whole.error.o whole.error.state", "e", wide=True),
        *(*PEERS, BOUND, MET),
    ),
    titles=(*PEER_TITLES, ("whole", "whole")),
    ratios=PEER_RATIOS,
    summary=split_summary,
)

# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel_lines(row: dict) -> list[dict]:
    return [
        {**row, "name": f"{row['name']} {kernel['kernel'].removesuffix('_kernel')}", "kernel": kernel}
        for kernel in value(row, "ours.kernels") or ()
    ]


def kernels_summary(document: dict) -> list[str]:
    """Each row's whole call beside the sum of its kernels."""
    lines = []
    for row in document["rows"]:
        total = sum(kernel["ms"] for kernel in value(row, "ours.kernels") or ())
        times = {"call": value(row, "ours.ms.median"), "CUDA graph": value(row, "ours.graph_ms.median")}
        times |= {"kernels": total, "floor": row["floor_ms"]}
        said = ", ".join(f"{title} {short(ms)} ms" for title, ms in times.items() if ms)
        lines += [f"{row['name']} ({row['backend']}): {said}"] if total else []
    return lines


KERNELS = View(
    (
        Column("ms", "kernel.ms"),
        Column("launches", "kernel.launches", "i", wide=True),
        Column("GB", "kernel.bytes", scale=1e-9, wide=True),
        Column("TB/s", "kernel.tb_s", wide=True),
        Column("of copy", "kernel.share_of_copy", "%"),
        Column("GFLOP", "kernel.flop", scale=1e-9, wide=True),
        Column("TFLOP/s", "kernel.tflop_s", wide=True),
        Column("of GEMM", "kernel.share_of_gemm", "%"),
        Column("us/chunk", "kernel.us_per_chunk", wide=True),
        Column("CTAs", "kernel.ctas", "i", wide=True),
        Column("threads", "kernel.threads", "i", wide=True),
        Column("regs", "kernel.registers", "i"),
        Column("spill B", "kernel.spill_bytes", "i"),
        Column("shared KiB", "kernel.shared_bytes", scale=1 / 1024, wide=True),
        Column("CTAs/SM", "kernel.ctas_per_sm", "i"),
        Column("waves", "kernel.waves", wide=True),
    ),
    kernel_lines,
    titles=(),
    summary=kernels_summary,
)

# ---- decode ----------------------------------------------------------------------------------------------------------

VERIFYING = {
    "states": "a state a token and commit",
    "slots": "a state a token in slots",
    "verify": "replay without commit",
    "bare": "a bare step",
}
"""What stands beside replay with its commit."""


def verify_summary(document: dict) -> list[str]:
    """Of rows of verification, what the table has no room for: `--wide` has the times of each."""
    rows = [row for row in document["rows"] if "verify" in row]
    parts = [(f"{said}/replay", f"{name}.ms.median/ours.ms.median") for name, said in VERIFYING.items()]
    return [mean(said, [value(row, path) for row in rows]) for said, path in parts] if rows else []


DECODE = View(
    (
        Column("ours us", "ours.ms.median", scale=US),
        Column("FLA us", "fla.ms.median", scale=US),
        *RATIOS,
        *both("{} sustained us", "sustained_ms", scale=US),
        Column("floor us", "floor_ms", scale=US, wide=True),
        Column("of copy", "share_of_floor", "%"),
        Column("FLA of copy", "floor_ms/fla.ms.median", "%", wide=True),
        Column("a token", "token_cost", wide=True),
        *(Column(f"{name} us", f"{name}.ms.median", scale=US, wide=True) for name in VERIFYING),
        *both("{} host us", "host_us"),
        *ERRORS,
        BOUND,
        MET,
    ),
    summary=verify_summary,
)

# ---- train, wy -------------------------------------------------------------------------------------------------------

GIB = 2.0**-30


def by_result(title: str, key: str, names: Sequence[str]) -> tuple[Column, ...]:
    return both(f"{title} {{}}: {' '.join(names)}", " ".join(f"{key}.{name}" for name in names), "e")


AT_TRAINING = ("cudnn", "cudnn_ready")
TRAIN_TITLES = tuple((name, TITLES[name]) for name in ("fla", *AT_TRAINING))
COLD_AND_WARM = {said: path for said, path in TIMES.items() if said != "graph "}


def train_summary(document: dict) -> list[str]:
    """The longest kernels of each row."""
    lines = []
    for row in document["rows"]:
        for name, title in (("ours", "ours"), *TRAIN_TITLES):
            kernels = value(row, f"{name}.kernels")
            if kernels:
                total = sum(kernel["ms"] for kernel in kernels)
                longest = ", ".join(f"{kernel_name(kernel['kernel'])} {kernel['ms']:.3f}" for kernel in kernels[:8])
                lines.append(f"{row['name']}, {title}: kernels {total:.3f} ms: {longest}")
    return lines


TRAIN = View(
    (
        Column("fwd ms", "ours.forward_ms.median", wide=True),
        OURS,
        FLA,
        Column("fwd ratio", "fla.forward_ms.median/ours.forward_ms.median", "x", wide=True),
        *RATIOS,
        *SUSTAINED,
        *FLOOR,
        *both("GiB {}", "peak_bytes", scale=GIB),
        Column("memory", "ours.peak_above_bytes/fla.peak_above_bytes"),
        *by_result("error", "error", LEAVES),
        *times_of(AT_TRAINING, "ms", {"fwd ": "forward_ms.median", **COLD_AND_WARM}),
        Column("GiB cuDNN", "cudnn.peak_bytes", scale=GIB, wide=True),
        *errors_of(("cudnn",), LEAVES),
        BOUND,
        MET,
    ),
    titles=TRAIN_TITLES,
    ratios=(*View.ratios, *ratios(AT_TRAINING, COLD_AND_WARM)),
    summary=train_summary,
)
WY = View(
    (
        Column("ms", "ours.ms.median", wide=True),
        Column("ours ms", "ours.graph_ms.median"),
        Column("FLA ms", "fla.graph_ms.median"),
        *RATIOS,
        *SUSTAINED,
        *FLOOR,
        *both("GiB {}", "peak_above_bytes", scale=GIB),
        *by_result("error", "error", GRADIENTS),
        *by_result("largest", "max_error", GRADIENTS),
        MET,
    ),
)

# ---- fp32 ------------------------------------------------------------------------------------------------------------


def fp32_summary(document: dict) -> list[str]:
    """How many rows meet each bound."""
    lines = []
    for words in document["rows"][0]["bounds"] if document["rows"] else ():
        judged = [row for row in document["rows"] if row["bounds"].get(words) is not None]
        met = sum(row["bounds"][words] for row in judged)
        lines.append(f"{words}: {f'{met} of {len(judged)} rows' if judged else 'not measured'}")
    us = document["protocol"].get("ctypes us") or document.get("ctypes us")
    return [*lines, f"of the C host us, ctypes takes {us:.1f}" if us is not None else ""]


FP32 = View(
    (
        OURS,
        Column("ieee", "ieee.ms.median"),
        Column("C ms", "c.ms.median"),
        FLA,
        Column("FLA bf16 ms", "fla_bf16.ms.median", wide=True),
        *RATIOS,
        *SUSTAINED,
        *FLOOR,
        Column("ours: of TF32", "shares.ours.products", "%", wide=True),
        Column("ieee: of copy, fp32", "shares.ieee.copy shares.ieee.products", "%", wide=True),
        Column("error o, w, u", "ours.error.o ours.error.w ours.error.u", "e", wide=True),
        Column("ieee: error o", "ieee.error.o", "e", wide=True),
        Column("FLA: error o, bf16", "fla.error.o fla_bf16.error.o", "e", wide=True),
        Column("host us", "ours.host_us", wide=True),
        Column("C host us: same, other", "c.host_us c.host_changed_us", wide=True),
        MET,
    ),
    titles=(("ieee", "ieee"), ("c", "C library"), ("fla", "FLA float32"), ("fla_bf16", "FLA bf16")),
    summary=fp32_summary,
)

# ---- models ----------------------------------------------------------------------------------------------------------


def models_summary(document: dict) -> list[str]:
    """The ratios of whole layers, and of their KDA parts."""
    parts = {part: [row for row in document["rows"] if row["name"].endswith(part)] for part in ("block", "KDA")}
    ratios = [(f"{part}, {title}", path, rows) for part, rows in parts.items() for title, path in View.ratios]
    return [mean(title, [value(row, path) for row in rows]) for title, path, rows in ratios]


MODELS = View(
    (
        Column("on ms", "ours.ms.median"),
        Column("off ms", "fla.ms.median"),
        *RATIOS,
        Column("kernels", "kernel_ms.fla/kernel_ms.ours", "x"),
        Column("share", "share.ours", "%"),
        Column("share off", "share.fla", "%", wide=True),
        *SUSTAINED,
        *(
            Column(f"{who} kernels ms", f"kernel_ms.{name}", wide=True)
            for name, who in (("ours", "ours"), ("fla", "FLA"))
        ),
        *both("largest error {}", "error", "largest"),
        BOUND,
        MET,
    ),
    ratios=(),
    summary=models_summary,
)

# ---- layer -----------------------------------------------------------------------------------------------------------

LAYER_STEPS = (("chain", "single operators"), ("fla_gated", "FLA, gate inside"), ("bare", "a bare step"))


def layer_summary(document: dict) -> list[str]:
    """What is no table's: the ratios of steps by state, and what a norm in the last kernel of a prefill could gain."""
    lines = []
    for name, said in (("fla", "FLA's kernels"), *LAYER_STEPS):
        for state in ("fp32", "bf16"):
            rows = [row for row in document["rows"] if row["shape"].get("state") == state]
            lines.append(
                mean(f"{said}/ours, {state}", [value(row, f"{name}.ms.median/ours.ms.median") for row in rows])
            )
    for row in document["rows"]:
        share = value(row, "norm_share")
        lines += [f"{row['name']}: {share:.1%} of the time"] if share is not None else []
    return lines


LAYER = View(
    (
        *(Column(title, f"{name}.ms.median", scale=US) for title, name in (("ours us", "ours"), ("FLA us", "fla"))),
        Column("bare us", "bare.ms.median", scale=US),
        Column("chain us", "chain.ms.median", scale=US, wide=True),
        Column("gate inside us", "fla_gated.ms.median", scale=US, wide=True),
        *RATIOS,
        Column("copy us", "copy.ms.median", scale=US, wide=True),
        Column("of copy", "share_of_floor", "%"),
        Column("beside a copy", "copy.sustained_ms/ours.sustained_ms", "%", wide=True),
        Column("memory", "beyond_bytes.ours/beyond_bytes.fla", wide=True),
        *both("{} sustained us", "sustained_ms", scale=US),
        Column("copy sustained us", "copy.sustained_ms", scale=US, wide=True),
        *both("{} host us", "host_us"),
        *both("{} GiB beyond results", "beyond_bytes", scale=GIB),
        *both("largest error {}", "error", "largest"),
        BOUND,
        MET,
    ),
    titles=(("fla", "FLA"), *LAYER_STEPS, ("copy", "a copy")),
    ratios=(),
    summary=layer_summary,
)

# ---- engines ---------------------------------------------------------------------------------------------------------

ENGINES = View(
    (
        OURS,
        Column("engine ms", "engine.ms.median"),
        Column("ratio", "engine_ratio", "x"),
        Column("sustained", "engine.sustained_ms/ours.sustained_ms", "x"),
        *FLOOR,
        *errors_of(("ours", "engine"), ("o",)),
        BOUND,
        MET,
    ),
    titles=(("engine", "engine"),),
    ratios=(("engine/ours", "engine_ratio"),),
)

# ---- cp --------------------------------------------------------------------------------------------------------------

CP = View(
    (
        Column("ours ms", "ours.ms.median", wide_title="ours, cold ms"),
        Column("1 GPU", "one.ms.median", wide_title="1 GPU, cold ms"),
        Column("rate", "efficiency", "%", wide_title="rate, cold"),
        Column("sustained", "sustained_efficiency", "%", wide_title="rate, sustained"),
        Column("model", "modelled", "%", wide_title="model, sustained"),
        Column("FLA ms", "fla.ms.median", wide_title="FLA, cold ms"),
        Column("ratio", "speedup", "x", wide_title="FLA/ours, cold"),
        Column("without relay, cold ms", "no_relay.ms.median", wide=True),
        Column("rate without relay, cold", "one.ms.median/no_relay.ms.median", "%", wide=True),
        Column("by gather, cold ms", "gather.ms.median", wide=True),
        Column("exchange, cold ms", "exchange.ms.median", wide=True),
        Column("exchange by gather, cold ms", "exchange_gather.ms.median", wide=True),
        Column("GiB", "ours.peak_bytes", scale=GIB, wide=True),
        *both("largest difference to 1 GPU's call, {}", "error", "largest"),
        Column("bound (FLA's cold)", BOUND.paths, BOUND.form, wide=True),
        MET,
    ),
    ratios=(
        *(("FLA/ours", "speedup"), ("one GPU/ours", "efficiency")),
        ("one GPU/ours, sustained", "sustained_efficiency"),
    ),
)

# ---- startup, toolchains ---------------------------------------------------------------------------------------------

STARTUP = View((Column("s", "seconds"), MET), titles=(), ratios=())


def counted(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in totals.items() if n or what == "failed")


def fuzz_summary(document: dict) -> list[str]:
    """Totals, seeds, and the line that reruns each failure."""
    lines = [f"ran: {document['ran']}"]
    for part, totals in document["totals"].items():
        rows = [row for row in document["rows"] if row["part"] == part]
        seeds = ", ".join(str(row["seed"]) for row in rows)
        commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
        lines.append(f"{part}: {counted(totals)}; commits {commits}; seeds {seeds}")
        operators = sum((Counter(row["operators"]) for row in rows), Counter())
        lines.append(f"{part} by operator: {counted(dict(operators.most_common()))}")
    failed = [(row, failure) for row in document["rows"] for failure in row["failures"]]
    return lines + [f"failed at {row['commit'][:7]}: {x['rerun']}: {x['message'][:200]}" for row, x in failed]


FUZZ = View(
    (
        *(Column(title, title, "i") for title in ("cases", "right", "refused", "failed")),
        Column("s", "seconds", "i"),
        Column("jobs", "jobs", "i", wide=True),
        Column("commit", "commit", "commit"),
        Column("torch", "versions.torch", "s", wide=True),
        Column("triton", "versions.triton", "s", wide=True),
    ),
    titles=(),
    ratios=(),
    summary=fuzz_summary,
)


def tests_summary(document: dict) -> list[str]:
    """Totals, the sanitizers' tests, what failed, was skipped and did not run."""
    lines = [counted(document["totals"]) + f" in {document['seconds']:.0f} s"]
    if not document["finished"]:
        lines.append(f"not finished; not run: {len(document['not run'])}")
    lines += [f"sanitizer: {x['test']}: {x['outcome']} in {x['seconds']:.0f} s" for x in document["sanitizers"]]
    lines += [f"failed: {x['test']}: {x['said'][:200]}" for x in document["failures"]]
    return lines + [f"{x['tests']} skipped: {x['reason'][:200]}" for x in document["skips"]]


TESTS = View(
    (
        *(Column(title, title, "i") for title in ("passed", "failed", "skipped", "missing")),
        Column("s", "seconds"),
    ),
    titles=(),
    ratios=(),
    summary=tests_summary,
)


RATIOS_BY_TOOLCHAIN = (
    ("other/ours, cold", "other.ms.median/ours.ms.median"),
    ("other/ours, sustained", "other.sustained_ms/ours.sustained_ms"),
)


def toolchain_lines(row: dict) -> list[dict]:
    """A kernel stands below its call."""
    return [{**row, "name": "  " + row["kernel"].removesuffix("_kernel")} if "kernel" in row else row]


def toolchains_summary(document: dict) -> list[str]:
    """How the results differ, and the ratios over all kernels."""
    differences = [value(row, "ours.error.difference") for row in document["rows"]]
    judged = [float(x) for x in differences if x is not None]
    bits = (
        f"the same bits in {judged.count(0.0)} of {len(judged)} rows, largest difference {max(judged, default=0):.1e}"
    )
    names = [f"{key} Triton {found['triton']}" for key, found in document["toolchains"].items()]
    kernels = [row for row in document["rows"] if "kernel" in row]
    ratios = [mean(title, [value(row, path) for row in kernels]) for title, path in RATIOS_BY_TOOLCHAIN]
    return [", ".join(names), f"results: {bits}", *ratios]


TOOLCHAINS = View(
    (
        Column("regs", "registers", "values"),
        Column("spill B", "spill_bytes", "values"),
        Column("ours us", "ours.ms.median", scale=US),
        Column("other us", "other.ms.median", scale=US),
        *(Column(title, path) for title, (_, path) in zip(("ratio", "busy"), RATIOS_BY_TOOLCHAIN)),
    ),
    toolchain_lines,
    titles=(("other", "other"),),
    ratios=(),
    summary=toolchains_summary,
)

VIEWS = {
    "prefill": PREFILL,
    "classic": PREFILL,
    "shards": SHARDS,
    "split": SPLIT,
    "kernels": KERNELS,
    "decode": DECODE,
    "train": TRAIN,
    "wy": WY,
    "fp32": FP32,
    "models": MODELS,
    "layer": LAYER,
    "engines": ENGINES,
    "cp": CP,
    "startup": STARTUP,
    "toolchains": TOOLCHAINS,
    "fuzz": FUZZ,
    "tests": TESTS,
}
_PREFILL_LINES = (
    ("FLA", "fla.ms.median"),
    ("{ours}", "ours.ms.median"),
    ("{ours}, CUDA graph", "ours.graph_ms.median"),
)
PLOTS: dict[str, Plot | KernelPlot] = {
    "prefill": Plot(workloads.PREFILL, 64, "KDA prefill", _PREFILL_LINES),
    "classic": Plot(workloads.CLASSIC, 64, "KDA prefill", _PREFILL_LINES),
    "split": Plot(
        workloads.SPLIT, 4, "KDA prefill, few heads", (*_PREFILL_LINES, ("{ours}, not split", "whole.ms.median"))
    ),
    "wy": Plot(
        workloads.WY,
        32,
        "Backward of the WY step",
        (("FLA", "fla.graph_ms.median"), ("{ours}", "ours.graph_ms.median")),
        floor="all tensors",
    ),
    "train": KernelPlot(
        (("fla", "FLA"), ("ours", "flashdelta")), "Forward and backward by kernel, {name}, K = V = 128, bf16"
    ),
    "layer": KernelPlot(
        (("fla", "FLA"), ("chain", "single operators"), ("ours", "one launch"), ("bare", "attention alone")),
        "A step of the layer by kernel, {name}, K = V = 128",
        unit="us",
    ),
}
