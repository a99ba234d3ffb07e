"""The figures in sentences of docs/: each is what a file in benchmarks/results holds, or stands in the tuning log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from flashdelta.tools.bench.excerpts import RESULTS, rows_of
from flashdelta.tools.bench.report import load
from flashdelta.tools.bench.workloads import value
from tests.support import documents

DOCS = Path(__file__).parents[2] / "docs"


def each(rows: Iterable[dict], path: str) -> list[float]:
    """What the rows hold under a path, or the quotient of two; those that hold nothing are left out."""
    found = [value(row, path) for row in rows]
    return [x for x in found if x is not None]


def span(numbers: Sequence[float], places: int = 1) -> str:
    return f"{min(numbers):.{places}f} to {max(numbers):.{places}f}"


def percent(numbers: Sequence[float]) -> str:
    return f"{min(numbers) * 100:.0f} to {max(numbers) * 100:.0f} %"


def mean(numbers: Sequence[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def half_steps(name: str, us: str) -> float:
    return load(RESULTS / "tuning" / "half_steps-h200.json")["times"][name][us]


def backward() -> Iterator[str]:
    train, wy = rows_of("train-hopper-h200"), rows_of("wy-hopper-h200")
    row = train["B1 T8192 H32"]
    time, memory = (
        each(train.values(), "ours.ms.median/fla.ms.median"),
        each(train.values(), "ours.peak_above_bytes/fla.peak_above_bytes"),
    )
    yield f"{span(time, 2)} of FLA's time and {span(memory, 2)} of its memory above the inputs"
    yield f"{row['ours']['ms']['median']:.2f} ms from an idle GPU (FLA {row['fla']['ms']['median']:.2f})"
    yield f"{row['ours']['sustained_ms']:.2f} sustained (FLA {row['fla']['sustained_ms']:.2f})"
    yield f"hide it behind the GPU's {row['ours']['sustained_ms']:.2f} ms"
    errors = [value(x, f"ours.error.{of}/fla.error.{of}") for x in train.values() for of in x["ours"]["error"]]
    yield f"no gradient's error is more than {math.ceil(max(errors) * 10) / 10} times FLA's"
    ours, fla = (sum(kernel["ms"] for kernel in row[who]["kernels"]) for who in ("ours", "fla"))
    yield f"{ours:.2f} in kernels (FLA {fla:.2f})"
    yield f"{row['ours']['peak_above_bytes'] / 2**30:.2f} GiB above"
    shares = each(wy.values(), "ours.graph_ms.median/fla.graph_ms.median")
    yield f"{1 / mean(shares):.2f} times as fast as FLA's kernel in the geometric mean"
    yield f"{wy['B1 T8192 H32']['share_of_floor'] * 100:.0f} % of the copy rate at T8192 H32"
    yield f"at most {max(shares):.2f} of FLA's time, {sum(x <= 0.33 for x in shares)} of them at most 0.33"
    short = wy["B1 T512 H32"]
    us = [short[who][how]["median"] * 1e3 for who in ("ours", "fla") for how in ("ms", "graph_ms")]
    yield "T512 takes {:.0f} us instead of {:.0f} (FLA {:.0f} instead of {:.0f})".format(*us)
    house = {row["row"]: row for row in load(RESULTS / "revisions" / "house-h200.json")["rows"]}
    kept, whole = house["train 8K H32, kept"]["ours"] / 1e3, house["train 8K H32"]["ours"] / 1e3
    yield f"a step takes {kept:.2f} ms instead of {whole:.2f}"
    yield f"costs {house['train, replay']['ours'] / 1e3:.2f} ms of host time"


def wy() -> Iterator[str]:
    yield f"{rows_of('wy-hopper-h200')['B1 T8192 H32']['share_of_floor'] * 100:.0f} % of the copy rate at T=8192, H=32"


def decode() -> Iterator[str]:
    for gpu, said in (
        ("h200", "commit included, takes {} us in float32 and {} in bfloat16."),
        ("h100", "On an H100 the three ways take {} and {},"),
    ):
        rows = rows_of(f"decode-{gpu}")
        fp32, bf16 = (rows[f"verify N32 H32 {state} S7"] for state in ("fp32", "bf16"))
        yield said.format(*(f"{row['ours']['ms']['median'] * 1e3:.1f}" for row in (fp32, bf16)))
        states, slots = (
            [f"{row[who]['ms']['median'] * 1e3:.0f}" for row in (fp32, bf16)] for who in ("states", "slots")
        )
        if gpu == "h200":
            yield f"A state per token and its copy take {states[0]} and {states[1]}."
            yield f"which needs no copy, takes {slots[0]} and {slots[1]}."
        else:
            yield f"{states[0]} and {states[1]}, {slots[0]} and {slots[1]} ("
    rows = rows_of("decode-h200")
    few = [
        row
        for name, row in rows.items()
        if re.match(r"verify N(8|32) .*bf16 (softplus )?S3", name) and row["shape"]["v_first"]
    ]
    yield f"states in slots of their own take {span(each(few, 'slots.ms.median/ours.ms.median'), 2)} of a replay"
    longer: list[float] = []
    for S in (3, 7):
        found = [rows[f"verify N32 H32 {state} K first S{S}"] for state in ("fp32", "bf16")]
        fp32, bf16 = (f"{x:.2f}" for x in each(found, "ours.ms.median/slots.ms.median"))
        steps = [rows[f"N32 H32 {state} K first"] for state in ("fp32", "bf16")]
        longer += [x["ours"]["ms"]["median"] / y["ours"]["ms"]["median"] for x, y in zip(found, steps, strict=True)]
        yield f"3 drafts take {fp32} (float32) and {bf16} (bfloat16)" if S == 3 else f"7 drafts {fp32} and {bf16}"
    yield f"verification takes {span(longer)} times as long as a step"
    size = {K: math.ceil((3 * K + 4) / 16) * 16 * 4 / (K * K * 4) * 100 for K in (64, 128)}
    yield f"that is {size[128]:.1f} % of a float32 state and {2 * size[128]:.1f} % of a bfloat16 one"
    yield f"with 64 it is {size[64]:.1f} and {2 * size[64]:.0f} %"


def fp32() -> Iterator[str]:
    document = load(RESULTS / "fp32-h200.json")
    rows = document["rows"]
    assert min(each(rows, "fla.ms.median/ours.ms.median")) > 1 and max(each(rows, "ours.error.o")) < 1e-5
    accuracy = each(rows, "fla.error.o/ours.error.o")
    yield f"{min(accuracy) // 100 * 100:.0f} to {round(max(accuracy), -2):.0f} times as accurate"
    off = max(abs(x - 1) for x in each(rows, "c.ms.median/ours.ms.median"))
    yield f"the same within {math.ceil(off * 1000) / 10} %"
    yield f"({document['ceilings']['tf32_tflop_s']:.0f} TFLOP/s)"
    early = sorted(each((row for row in rows if not value(row, "c.host_changed_us")), "c.host_us"))
    late = each((row for row in rows if value(row, "c.host_changed_us")), "c.host_us")
    yield f"{span(late)} us, and {early[0]:.1f} and {early[1]:.1f} in the two rows"
    yield f"a call takes {span(each(rows, 'c.host_changed_us'))} us"
    yield f"which takes {document['ctypes us']:.1f} us of them"
    yield f"costs the host {rows_of('fp32-h200')['B1 H32 T4096 K128 C64']['ours']['host_us']:.0f} us"


def prefill() -> Iterator[str]:
    document = load(RESULTS / "kernels-hopper-h200.json")
    yield f"{document['ceilings']['copy_tb_s']:.2f} TB/s, and {document['ceilings']['gemm_tflop_s']:.0f} TFLOP/s"
    kernels = {kernel["stage"]: kernel for kernel in document["rows"][0]["ours"]["kernels"]}
    yield f"`recurrence` takes {kernels['recurrence']['us_per_chunk']:.2f} us per chunk at H = 64"
    yield f"us per chunk at H = 64 and {half_steps('T8192 H32', 'chunks: recurrence') / 128:.2f} us at H = 32"
    both = [half_steps("T8192 H64", f"{form}: both") for form in ("steps", "chunks")]
    yield "the kernels of T=8192, H=64 take {:.0f} us instead of {:.0f}".format(*both)
    less = []
    for gpu in ("h200", "h100"):
        times = load(RESULTS / "tuning" / f"half_steps-{gpu}.json")["times"]
        less += [(1 - times[x]["steps: both"] / times[x]["chunks: both"]) * 100 for x in ("8 x 1024 H32", "T8192 H32")]
    yield "Packed calls of 32 heads gain {:.0f} % from steps, and one sequence {:.0f} %".format(*less[:2])
    yield "half_steps-h100.json) {:.0f} and {:.0f} %)".format(*less[2:])
    h100, h200, shards = (rows_of(name) for name in ("prefill-hopper-h100", "prefill-hopper-h200", "shards-h100"))
    copies = [load(RESULTS / f"prefill-hopper-{gpu}.json")["ceilings"]["copy_tb_s"] for gpu in ("h100", "h200")]
    yield f"has {copies[0] / copies[1]:.2f} of an H200's memory bandwidth"
    ours = [rows["T8192 H64"]["ours"]["sustained_ms"] for rows in (h100, h200)]
    yield "T8192 H64: {:.3f} ms sustained, compared with {:.3f} on an H200".format(*ours)
    plain = {name: row for name, row in h100.items() if "," not in name and "softplus" not in name}
    many = [name for name, row in plain.items() if row["shape"]["HV"] >= 64 and name in h200]
    longer = [h100[name]["ours"]["sustained_ms"] / h200[name]["ours"]["sustained_ms"] for name in many]
    yield f"From 64 heads on it takes {span(longer)} times as long"
    shapes = {name: row["shape"] for name, row in plain.items()}
    large = [plain[x] for x, s in shapes.items() if s["HV"] >= 64 and s["K"] == 128 and s["T"] >= 8192]
    yield f"calls with bounded gates are {span(each(large, 'sustained_speedup'))} times as fast as FLA"
    half = [h100[f"T8192 H32{gates}"] for gates in ("", ", random gates", ", slow gates")]
    yield f"T8192 H32 is {span(each(half, 'sustained_speedup'))} times as fast"
    yield f"where FLA takes {span(each(half, 'fla.sustained_ms'), 2)} ms"
    random, slow = ([row for name, row in h100.items() if f"{kind} gates" in name] for kind in ("random", "slow"))
    eager = "cudnn.ms.median/ours.ms.median"
    yield f"with random gates {span(each(random, eager))} times"
    yield f"with slow ones {min(each(slow, eager)):.1f} to {max(each(slow, eager)):.0f}."
    graph = "cudnn.graph_ms.median/ours.graph_ms.median"
    yield f"T8192 H4 takes {value(h100['T8192 H4, random gates'], graph):.2f} of our time"
    yield f"0.{value(shards['T1024 H4, random gates'], graph) * 100:.0f}. Its kernels alone"
    ready = "cudnn_ready.graph_ms.median/ours.graph_ms.median"
    yield f"take {min(each(random, ready)):.2f} to {max(each(random, ready)):.1f} of our time with random gates"
    yield f"{min(each(slow, ready)):.2f} to {max(each(slow, ready)):.0f} with slow ones"
    cost = {name: x - 1 for name, row in h100.items() if (x := value(row, "checkpoint.sustained_ms/ours.sustained_ms"))}
    short = cost.pop("T1024 H64")
    one, packed = ([x for name, x in cost.items() if ("packed" in name) == wanted] for wanted in (False, True))
    yield f"costs {span([x * 100 for x in one])} % of a call of one sequence, {short * 100:.1f} % of T1024 H64"
    yield f"{span([x * 100 for x in packed])} % of packed calls"
    copied = 20 * 64 * 128 * 128 * 4 / load(RESULTS / "prefill-hopper-h100.json")["ceilings"]["copy_tb_s"] / 1e6
    yield f"are 84 MB, {copied:.0f} us at the copy rate"
    yield f"compared with {h100['packed 20 random H64']['ours']['sustained_ms'] * 1e3:.0f} us"
    document = load(RESULTS / "revisions" / "prefill-h100.json")
    best, *others, worst = sorted(document["rows"], key=lambda row: row["ratio"])
    assert max(each(others, "ratio")) <= 1
    yield f"Commit `{document['about']['base']}`"
    ratios = each(document["rows"], "ratio")
    yield f"takes {mean(ratios):.2f} of the time in the geometric mean of {len(ratios)} rows"
    times = "{row} {verb} {ours:.1f} us instead of {base:.1f}, a ratio of {ratio:.2f}"
    yield times.format(verb="gains most:", **best)
    yield "One row is slower: " + times.format(verb="takes", **worst)
    ours, base = (sum(worst["kernels"][who].values()) for who in ("ours", "base"))
    yield f"add up to {ours:.0f} us instead of {base:.0f}"


def prepare() -> Iterator[str]:
    times = load(RESULTS / "tuning" / "half_steps-h200.json")["times"]["T8192 H64"]
    yield f"{times['steps: prepare']:.0f} us against {times['chunks: prepare']:.0f} us for whole chunks"
    kernels = rows_of("kernels-hopper-h200")["T8192 H64"]["ours"]["kernels"]
    yield f"kernel of whole chunks takes {kernels[0]['ms'] * 1e3:.0f} us"


def split() -> Iterator[str]:
    rows = list(rows_of("split-hopper-h200").values())
    cut = [row for row in rows if max(row["segments"]) > 1]
    gain = [row["gain"] for row in cut]
    few, more = (mean([row["gain"] for row in cut if row["shape"]["H"] == H]) for H in (4, 8))
    yield f"Of the {len(rows)} batches {len(cut)} are split. They run {mean(gain):.2f} times as fast as whole"
    yield f"(4 heads {few:.2f}, 8 heads {more:.2f}), {max(gain):.2f} at best and {min(gain):.2f} at worst"
    yield f"all {len(rows)} batches run {mean(each(rows, 'speedup')):.1f} times as fast in the geometric mean"
    errors = [x for of in ("o", "state") for x in each(rows, f"ours.error.{of}/whole.error.{of}")]
    yield f"at most {math.ceil(max(errors) * 100) / 100}x those of whole sequences in every row"
    trials = {row["case"]: row for row in load(RESULTS / "tuning" / "trials-h200.json")["rows"]}
    heads = [trials[f"T8192 H{H}, random gates"] for H in (4, 8, 12)]
    tried, without = ([f"{row[how]:.0f}" for row in heads] for how in ("tried", "without"))
    yield f"take {tried[0]}, {tried[1]} and {tried[2]} us instead of {without[0]}, {without[1]} and {without[2]}"
    slow = [
        row["tried"] / row["without"] for name, row in trials.items() if "slow" in name and row["segments_tried"] > 1
    ]
    yield f"With slow gates the trials cost {min(slow) * 100 - 100:.0f} to {max(slow) * 100 - 100:.0f} %"
    long = trials["128K H8, random gates"]
    yield f"128K tokens of 8 heads take {long['tried']:,.0f} us instead of {long['without']:,.0f}"


def layer() -> Iterator[str]:
    rows = rows_of("layer-h100")
    steps = {name: row for name, row in rows.items() if name.startswith("decode")}
    fp32, bf16 = (
        each((row for name, row in steps.items() if name.endswith(f"H32 {state}")), "ours.ms.median/bare.ms.median")
        for state in ("fp32", "bf16")
    )
    yield f"takes {span(fp32, 2)} of a step of attention alone in float32, {span(bf16, 2)} in bfloat16"
    many = [row for row in steps.values() if row["shape"]["N"] >= 128]
    yield f"From 128 sequences on, a step moves its states at {percent(each(many, 'share_of_floor'))} of the copy rate"
    yield f"{sum(row['met'] is False for row in steps.values())} of the {len(steps)} rows miss"
    h200, h100 = (load(RESULTS / f"decode-{gpu}.json")["ceilings"]["copy_tb_s"] for gpu in ("h200", "h100"))
    yield f"whose memory is {h200 / h100:.1f} times as fast"
    fp32, bf16 = more_bytes()
    yield f"the launch moves {fp32} more than a step of attention alone, which has 1.3 KB of rows (bfloat16 states: {bf16})"
    yield f"with the {fp32} (bfloat16: {bf16}) more bytes"
    norm = [rows[f"prefill T8192 H{H}, norm"]["norm_share"] for H in (32, 64)]
    yield "takes {:.0f} % of a call with 32 heads and {:.0f} % with 64".format(*(x * 100 for x in norm))
    train = rows["train T8192 H32"]
    ours, fla = (train[who]["sustained_ms"] for who in ("ours", "fla"))
    yield f"0.14 ms in addition to {ours:.2f}: {(ours + 0.14) / fla:.2f} of FLA's time instead of {ours / fla:.2f}"
    rate = "copy.sustained_ms/ours.sustained_ms"
    ahead = [row for name, row in rows.items() if re.match(r"(convolution|norm) T", name)]
    yield f"reach {min(each(ahead, rate)) * 100:.0f} to {min(1.0, max(each(ahead, rate))) * 100:.0f} % of the rate of a copy"
    norms = [row for name, row in rows.items() if name.startswith("norm backward")]
    yield f"The norm's backward pass reaches {percent(each(norms, rate))}."
    short, longer = (value(rows[f"convolution backward T{T}"], rate) for T in (768, 2048))
    yield f"The convolution's reaches {short * 100:.0f} % at 768 tokens and {longer * 100:.0f} % at 2048"


def parallel() -> Iterator[str]:
    rows = rows_of("cp-h200")

    two = [row for name, row in rows.items() if "x 2" in name]
    assert all(row["met"] for row in two)
    forwards, steps = ([row for row in two if (row["table"] == "forward") is wanted] for wanted in (True, False))
    yield f"forwards reach {span(each(forwards, 'sustained_efficiency'), 2)} of one GPU's rate"
    yield f"with gradients {span(each(steps, 'sustained_efficiency'), 2)}"
    yield f"forward reaches {span(each(forwards, 'efficiency'), 2)}"
    longest = rows["fwd H32 512K x 2"]["ours"]
    yield f"take {longest['sustained_ms']:.1f} ms and {longest['peak_bytes'] / 2**30:.1f} GiB a GPU"
    yield f"32K tokens a rank reach {rows['fwd+bwd H32 32K x 4']['sustained_efficiency']:.3f} of one GPU's rate (wanted: 0.80)"
    million = rows["fwd+bwd H32 256K x 4"]
    ours, one = (million[x]["sustained_ms"] for x in ("ours", "one"))
    yield f"take {ours:.1f} ms and {million['ours']['peak_bytes'] / 2**30:.0f} GiB a GPU; one GPU takes {one:.1f} ms"
    brief = rows["fwd+bwd H32 8K x 4"]
    yield "takes {:.2f} ms sustained by copies, {:.2f} by an all-gather".format(
        *(brief[x]["sustained_ms"] for x in ("ours", "gather"))
    )
    exchange = [rows["fwd H32 8K x 2"][x]["ms"]["median"] * 1e3 for x in ("exchange", "exchange_gather")]
    yield "({:.0f} and {:.0f} us at 2 MiB, cold)".format(*exchange)
    ratio = each(rows.values(), "gather.sustained_ms/ours.sustained_ms")
    yield f"makes whole calls between {100 - min(ratio) * 100:.0f} % faster and {max(ratio) * 100 - 100:.0f} % slower"
    above = {name: (row["modelled"] - row["sustained_efficiency"]) * 100 for name, row in rows.items()}
    most, usual = max(above.values()), max(abs(x) for name, x in above.items() if " 8K" not in name)
    yield f"is up to {most:.0f} points above these short calls, and within {usual:.0f} of all others"


def integrations() -> Iterator[str]:
    models, engines = rows_of("models-h100"), rows_of("engines-h100")
    for who, said in (
        ("FLA", "{} and {} times less for prefill (8K, 64K), {} and {} for training"),
        ("HF", "{}, {}, {} and {}."),
    ):
        rows = (f"{who} {call} KDA" for call in ("prefill 8K", "prefill 64K", "train 4x2048", "train 1x8192"))
        yield said.format(*(f"{models[name]['sustained_speedup']:.1f}" for name in rows))
    blocks = {
        x: [row for name, row in models.items() if name.startswith(x) and name.endswith("block")] for x in ("FLA", "HF")
    }
    fla, hf = (each((row for row in rows if row["table"] != "decode"), "sustained_speedup") for rows in blocks.values())
    assert f"{min(hf):.1f}" == f"{max(hf):.1f}"
    yield f"Whole blocks gain {span(fla)} times with FLA and {min(hf):.1f} times with Hugging Face"
    steps = [row for rows in blocks.values() for row in rows if row["table"] == "decode"]
    yield f"as long as before, {span(each(steps, 'sustained_speedup'), 2)} times"
    faster = "engine.sustained_ms/ours.sustained_ms"
    for H, said in (
        (32, "prefill is {} times as fast as the engines' own kernels"),
        (12, "heads, prefill is {} times as fast"),
    ):
        prefills = [row for name, row in engines.items() if "prefill" in name and name.endswith(f"H{H}")]
        yield said.format(span(each(prefills, faster)))
    decode = [row for name, row in engines.items() if " decode " in name]
    theirs = [row["share_of_floor"] / row["engine_ratio"] for row in decode]
    yield f"move their states at {percent(theirs)} of the copy rate"
    ours = percent(each(decode, "share_of_floor"))
    yield f"Ours move them at {ours} and are {span(each(decode, 'engine_ratio'), 2)} times as fast"
    room = {
        state: [1 / x for row, x in zip(decode, theirs, strict=True) if row["shape"]["state"] == state]
        for state in ("fp32", "bf16")
    }
    yield f"would be {span(room['fp32'], 2)} times as fast in float32 and {span(room['bf16'], 2)} in bfloat16"
    limits = (DOCS.parent / "tests" / "gpu" / "test_engines.py").read_text()
    prefill, step = re.search(r"^ALLOWED, ALLOWED_OF_FEW = ([\d.]+), ([\d.]+)$", limits, re.MULTILINE).groups()
    yield f"The error of a prefill may be {prefill} times theirs, and that of a step, which depends on chance, {step} times"
    whole = [row for name, row in engines.items() if "whole step" in name]
    yield f"Kimi-K3's whole step is {span(each(whole, 'engine_ratio'), 2)} times as fast"


def machine_code() -> Iterator[str]:
    level, newer = rows_of("toolchains-h200-level-2"), rows_of("toolchains-h200-triton-3.8")
    ratio = "other.ms.median/ours.ms.median"
    longer = {name: value(row, ratio) - 1 for name, row in level.items()}
    recurrence = [x for name, x in longer.items() if re.fullmatch(r"prefill .*: recurrence_kernel", name)]
    yield f"`recurrence` takes {percent(recurrence)} longer"
    yield f"`reverse` {longer['train B1 T8192 H32: reverse_kernel'] * 100:.0f} %"
    yield f"`wy` as an operator {longer['wy B1 T8192 H32'] * 100:.0f} %"
    oldest = {name: value(row, ratio) for name, row in rows_of("toolchains-h200").items()}
    prepare = [x - 1 for name, x in oldest.items() if name.endswith(": prepare_kernel")]
    yield f"spills 8 bytes and takes {percent(prepare)} longer"
    yield f"spills 16 bytes and takes {oldest['wy B1 T8192 H32: wy_kernel'] * 100 - 100:.0f} % longer"
    cut = rows_of("toolchains-h200")["prefill T32768 H4: recurrence_kernel"]
    cold, busy = (value(cut, path) * 100 - 100 for path in (ratio, "other.sustained_ms/ours.sustained_ms"))
    yield f"in the split call (24 bytes, {cold:.0f} %, {busy:.0f} % under load)"
    portable = oldest["triton prefill T8192 H64: recurrence_kernel"] * 100 - 100
    yield f"the portable `recurrence` ({portable:.0f} %, without a spill)"
    yield f"`finish` is {1 / oldest['train B1 T8192 H32: finish_kernel']:.1f} times as fast"
    packed = [x for name, x in longer.items() if name.startswith("prefill packed") and ":" not in name]
    yield f"whole packed prefills {percent(packed)}"
    calls = [value(row, ratio) - 1 for name, row in newer.items() if name.startswith("prefill") and ":" not in name]
    yield f"3.8.0 takes {percent(calls)} longer"


def diagnose() -> Iterator[str]:
    host: dict[str, list[float]] = {}
    for row in load(RESULTS / "revisions" / "house-h200.json")["rows"]:
        host.setdefault(row["row"], []).append(row["ours"])
    recurrent = each(load(RESULTS / "decode-h200.json")["rows"], "ours.host_us")
    yield (
        f"costs an H200's host {host['commit, replay'][0]:.0f} us (`commit`), {span(recurrent, 0)} (`recurrent_kda`), "
        f"{span(host['prefill, replay'], 0)} (`chunk_kda`) or {host['train, replay'][0]:.0f} (forward and backward)"
    )
    us = [half_steps(f"T8192 H64{gate}", "steps: prepare") for gate in ("", " softplus", " softplus, forgetful")]
    slower = [x / us[0] for x in us[1:]]
    yield f"take {span(slower, 2)} times as long with 64 heads"


def more_bytes() -> tuple[str, str]:
    """What a step of the layer moves beyond one of attention, float32 and bfloat16 states, by KB of a head (layer.md)."""
    state, windows, rows, attention = 128, 4.5, 1.5, 1.3
    fp32, bf16 = ((x + windows + rows) / (x + attention) - 1 for x in (state, state / 2))
    return f"{fp32 * 100:.1f} %", f"{bf16 * 100:.1f} %"


def fused_decode() -> Iterator[str]:
    yield f"it moves {more_bytes()[0]} more than attention alone with float32 states"


def serving() -> Iterator[str]:
    rows = rows_of("startup-triton-h200")
    empty, filled = (rows[f"{what}: H=32 T=8192"]["seconds"] for what in ("empty cache", "new process, cache filled"))
    yield f"takes {empty:.1f} s (`triton` backend), and {filled:.1f} s in a new process"


PAGES = {
    "backward": backward,
    "decode": decode,
    "fp32-and-c": fp32,
    "hopper-prefill": prefill,
    "howto/diagnose": diagnose,
    "integrations": integrations,
    "kernels/fused-decode": fused_decode,
    "kernels/prepare": prepare,
    "kernels/wy": wy,
    "layer": layer,
    "machine-code": machine_code,
    "parallel": parallel,
    "split": split,
    "start/serving": serving,
}


NOT_HELD = {
    "numerics": "limits of tests, and steps of dtypes: nothing measured",
    "start/coming-from": "a limit of tests",
    "start/serving": "bytes by count, beside what a sentence holds",
    "log/tuning": "what the others are held to",
}
"""Pages whose figures no test holds, and why."""

NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.`/^-])(?:(?:{NUMBER}(?:,? (?:to|and|or|instead of|against) |, ))*{NUMBER} ?"
    r"(?P<unit>us|ms|s|%|x|times|points|[TG]B/s|TFLOP/s)(?![\w/]| \d)"
    rf"(?: (?:to|of|instead of|against) {NUMBER}\b)?|0\.\d\d+(?![\w.]))"
)
"""Numbers with a unit of measurement and those that share it, as in `7, 8 us instead of 9`; shares such as 0.85."""


def paragraphs(text: str) -> list[str]:
    """Prose: no code, tables or generated parts."""
    text = documents.BLOCK.sub("", text)
    text = re.sub(r"<!-- tables: .*?<!-- end of tables -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:\||    ).*$", "", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\* )", text)]


def numbers(text: str) -> set[float]:
    return {float(x.replace(",", "")) for x in re.findall(NUMBER, text)}


def unheld(text: str, held: Sequence[str]) -> list[str]:
    """Figures in no held sentence, and in no section of the tuning log that their paragraph links to."""
    sections = documents.sections((DOCS / "log" / "tuning.md").read_text())
    found = []
    for part in paragraphs(text):
        spans = [match.span() for sentence in held for match in re.finditer(re.escape(sentence), part)]
        log = numbers(" ".join(sections.get(x, "") for x in re.findall(r"tuning\.md#([\w-]+)\)", part)))
        for match in FIGURE.finditer(part):
            scales = (1, 1000, 1 / 1000) if match["unit"] in ("us", "ms") else (1,)
            logged = all(any(round(x * scale, 9) in log for scale in scales) for x in numbers(match[0]))
            if not logged and not any(start <= match.start() and match.end() <= end for start, end in spans):
                found.append(match[0])
    return found


def missing(page: str, sentences: Iterable[str]) -> list[str]:
    text = " ".join((DOCS / f"{page}.md").read_text().split())
    return [sentence for sentence in sentences if sentence not in text]


ALL = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [page for page in ALL if page not in NOT_HELD])
def test_every_figure_is_held_or_in_the_log(page: str):
    assert unheld((DOCS / f"{page}.md").read_text(), list(PAGES.get(page, tuple)())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 7 us.", ["7 us"]),
        ("It takes 331, 295 and 322 us instead of 401.", ["331, 295 and 322 us instead of 401"]),
        ("It takes 0.85 of the time.", ["0.85"]),
        ("It is 2.5 times as fast, 3.1x, at 4.2 TB/s.", ["2.5 times", "3.1x", "4.2 TB/s"]),
        ("Held: 7 us. Not held: 8 us.", ["8 us"]),
        ("Triton 3.6.0, 4 x 4 blocks, 64 KB, 2^40 times, `7 us`", []),
        ("```text\n7 us\n```\n\n| 7 us |\n\n<!-- tables: x -->\n7 us\n<!-- end of tables -->", []),
        ("Before 331 us, then 322 ([log](log/tuning.md#prepare-bounded-decays)).", []),
        ("Before 0.331 ms ([log](log/tuning.md#prepare-bounded-decays)).", []),
        ("Before 337 us ([log](log/tuning.md#prepare-bounded-decays)).", ["337 us"]),
        ("Before 331 us, not 337 us ([log](log/tuning.md#prepare-bounded-decays)).", ["337 us"]),
        ("Before 331 us instead of 337 ([log](log/tuning.md#prepare-bounded-decays)).", ["331 us instead of 337"]),
        ("Before 331 us ([log](log/tuning.md#host)).", ["331 us"]),
        ("Before 331 us ([log](log/tuning.md#nothing)).", ["331 us"]),
        ("* Before 331 us.\n* Then ([log](log/tuning.md#prepare-bounded-decays)).", ["331 us"]),
    ],
)
def test_a_figure_that_nothing_holds_is_found(text: str, found: list[str]):
    assert unheld(text, ["Held: 7 us."]) == found


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_the_recorded_ones(page: str):
    assert missing(page, PAGES[page]()) == []


@pytest.mark.parametrize("page", PAGES)
def test_another_figure_is_found(page: str):
    """Each sentence with its last digit changed."""
    others = [
        re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), sentence) for sentence in PAGES[page]()
    ]
    assert missing(page, others) == others
