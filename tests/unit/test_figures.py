"""The figures in sentences of docs/: each is what a file in benchmarks/results holds, or stands in the tuning log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from flashdelta.tools.bench.excerpts import GRAPH_RATIOS, RESULTS, gated, rows_of, times_of_kernels
from flashdelta.tools.bench.profiling import RESERVED_SHARED_BYTES
from flashdelta.tools.bench.ranks import EFFICIENCY
from flashdelta.tools.bench.report import load
from flashdelta.tools.bench.workloads import BY_GRAPH, PREFILL, value
from tests.support import documents

DOCS = Path(__file__).parents[2] / "docs"


def each(rows: Iterable[dict], path: str) -> list[float]:
    """What the rows hold under a path, or the quotient of two; those that hold nothing are left out."""
    found = [value(row, path) for row in rows]
    return [x for x in found if x is not None]


def span(numbers: Sequence[float], places: int = 1) -> str:
    return f"{min(numbers):.{places}f} to {max(numbers):.{places}f}"


def percent(numbers: Sequence[float]) -> str:
    return f"{round(min(numbers) * 100)} to {round(max(numbers) * 100)} %"


def mean(numbers: Sequence[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def half_steps(name: str, us: str) -> float:
    return times_of_kernels("h200")[name][us]


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
    errors = {
        (name, of): value(x, f"ours.error.{of}/fla.error.{of}")
        for name, x in train.items()
        for of in x["ours"]["error"]
    }
    cancels = [errors.pop(key) for key in list(errors) if key[0].endswith("random gates") and key[1] == "A_log"]
    yield f"no gradient's error is more than {math.ceil(max(errors.values()) * 10) / 10} times FLA's"
    yield f"a sum that nearly cancels: {span(cancels)} times"
    for contender, said in (("cudnn", "takes {} times our time"), ("cudnn_ready", "{} times with ready inputs")):
        yield said.format(span(each(train.values(), f"{contender}.sustained_ms/ours.sustained_ms"), 2))
    unfit = {name for name, x in train.items() if value(x, "cudnn.sustained_ms") is None}
    assert unfit == {name for name in train if name.endswith("random gates") or name.startswith("GVA")}
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


CHUNK_BYTES = {"steps": 7 * 64 * 64 * 2 + 4 * 128 * 4, "chunks": 8 * 64 * 64 * 2 + 128 * 4}
"""What `prepare` leaves for a chunk and head with K = 128: tiles and decays."""
ROWS_BYTES = 64 * 128 * 2
"""Of a chunk and head of q, k, v, o or, in bfloat16, g; beta is left out."""

MACHINE_CODE = Path(__file__).parents[1] / "compile" / "machine_code" / "triton-3.6.0.tsv"
NEWEST = MACHINE_CODE.with_name("triton-3.9.0.tsv")


def recorded(records: Path) -> list[dict[str, str]]:
    """Kernels' machine code on sm_90."""
    titles, *lines = (line.split("\t") for line in records.read_text().splitlines())
    rows = (dict(zip(titles, line, strict=True)) for line in lines)
    return [row for row in rows if row["arch"] == "90"]


def costs(variant: str, kernel: str) -> dict[str, int]:
    """Of a kernel's recorded machine code on sm_90."""
    (found,) = (row for row in recorded(MACHINE_CODE) if (row["variant"], row["kernel"]) == (variant, kernel))
    return {name: int(x) for name, x in found.items() if x.isdigit()}


def spills(own: bool) -> list[tuple[int, int, int]]:
    """By the oldest Triton and by the newest: how many recorded kernels spill, of how many, and the most bytes. Hopper's own
    kernels, or those for any GPU."""
    found = []
    for records in (MACHINE_CODE, NEWEST):
        each = [int(row["spill_bytes"]) for row in recorded(records) if row["variant"].startswith("hopper") == own]
        found.append((sum(x > 0 for x in each), len(each), max(each)))
    return found


def both_forms() -> Iterator[str]:
    """Lines of a table: `prepare` in steps and in chunks, `recurrence` in steps and in chunks."""
    steps, chunks = "hopper steps K128 V128 fixed length", "hopper K128 V128 fixed length"
    prepare = [costs(steps, "prepare_steps_kernel"), costs(chunks, "prepare_kernel")]
    recurrence = [costs(variant, "recurrence_kernel") for variant in (steps, chunks)]
    both = [*prepare, *recurrence]
    lines = {
        "registers, spilled bytes of a thread": [f"{x['registers']}, {x['spill_bytes']}" for x in both],
        "shared memory of a CTA, bytes": [f"{x['shared_bytes']:,}" for x in both],
        "CTAs on an SM": [
            min(2**16 // (x["registers"] * threads), 228 * 2**10 // (x["shared_bytes"] + RESERVED_SHARED_BYTES))
            for x, threads in zip(both, (128, 128, 256, 256), strict=True)
        ],
        # beside the tile of the output: tiles, v and decays of a chunk
        "pipeline stages": [
            *("", ""),
            *((x["shared_bytes"] - 8192) // (y + 8192) for x, y in zip(recurrence, CHUNK_BYTES.values(), strict=True)),
        ],
        "instructions, places that wait for MMAs": [f"{x['instructions']:,}, {x['mma_waits']}" for x in both],
    }
    for name, cells in lines.items():
        yield f"| {name} |" + "".join(f" {x} |" if x else " |" for x in cells)


def prefill() -> Iterator[str]:
    yield from both_forms()
    both = [half_steps("T8192 H64", f"{form}: both") for form in ("steps", "chunks")]
    yield "the kernels of T=8192, H=64 take {:.0f} us instead of {:.0f}".format(*both)
    steps, chunks = CHUNK_BYTES.values()
    yield f"2,048 bytes of decays: {steps:,} bytes"
    yield f"one decay of a channel: {chunks:,} bytes"
    yield f"At T=8192, HV=64 that is {steps * 8192 / 1e6:.0f} and {chunks * 8192 / 1e6:.0f} MB"
    documents = {gpu: load(RESULTS / f"prefill-hopper-{gpu}.json") for gpu in ("h200", "h100")}
    copies = {gpu: document["ceilings"]["copy_tb_s"] for gpu, document in documents.items()}
    rates = [
        f"{copies[gpu]:.2f} TB/s and {document['ceilings']['gemm_tflop_s']:.0f} TFLOP/s on an {gpu.upper()}"
        for gpu, document in documents.items()
    ]
    yield ", ".join(rates)
    yield f"`recurrence` in steps takes {half_steps('T8192 H64', 'steps: recurrence') / 128:.1f} us per chunk"
    less = []
    for gpu in ("h200", "h100"):
        times = times_of_kernels(gpu)
        less += [(1 - times[x]["steps: both"] / times[x]["chunks: both"]) * 100 for x in ("8 x 1024 H32", "T8192 H32")]
    packed, one, *there = less
    yield f"Packed calls of 32 heads gain {packed:.0f} % from them; one sequence loses {-one:.0f} %"
    yield "(on an H100 they gain {:.0f} and {:.0f} %)".format(*there)
    h100, h200 = (rows_of(f"prefill-hopper-{gpu}") for gpu in ("h100", "h200"))
    yield f"has {copies['h100'] / copies['h200']:.2f} of an H200's memory bandwidth"
    ours = [rows["T8192 H64"]["ours"]["sustained_ms"] for rows in (h100, h200)]
    yield "T8192 H64: {:.3f} ms sustained, compared with {:.3f} on an H200".format(*ours)
    plain = {name: row for name, row in h100.items() if "," not in name and "softplus" not in name}
    many = [x for x, row in plain.items() if row["shape"]["HV"] >= 64 and row["shape"]["K"] == 128 and x in h200]
    longer = [h100[name]["ours"]["sustained_ms"] / h200[name]["ours"]["sustained_ms"] for name in many]
    yield f"From 64 heads on, with bounded gates and K = 128, it takes {span(longer)} times as long"
    in_ms = [
        met
        for row in h100.values()
        for words, met in row["bounds"].items()
        if re.fullmatch("<= .* ms sustained", words)
    ]
    yield f"it misses {sum(met is False for met in in_ms)} of the {len(in_ms)} bounds in ms, which are an H200's"
    shapes = {name: row["shape"] for name, row in plain.items()}
    large = [plain[x] for x, s in shapes.items() if s["HV"] >= 64 and s["K"] == 128 and s["T"] >= 8192]
    yield f"calls with bounded gates are {span(each(large, 'sustained_speedup'))} times as fast as FLA"
    document = load(RESULTS / "revisions" / "prefill-h200.json")
    yield f"commit `{document['about']['base']}`"
    ratios = each(document["rows"], "ratio")
    yield f"takes {mean(ratios):.2f} of the time in the geometric mean of {len(ratios)} rows, {span(ratios, 2)}"
    yield from errors_of_revisions(document["rows"])
    yield from checkpoints(h200, h100, copies["h100"])
    yield from beside_cudnn(h200, h100)


def errors_of_revisions(rows: list[dict]) -> Iterator[str]:
    def after_of_before(kind: str, output: str) -> list[float]:
        return [row["errors"]["ours"][kind][output] / row["errors"]["base"][kind][output] for row in rows]

    o, state = (after_of_before("rmse", output) for output in ("o", "state"))
    yield f"Root mean square errors are {span(o, 3)} of those before in `o` and {span(state, 3)} in states"
    largest = [*after_of_before("max_error", "o"), *after_of_before("max_error", "state")]
    yield f"largest single errors {span(largest, 2)}"


def checkpoints(h200: dict[str, dict], h100: dict[str, dict], copy_tb_s: float) -> Iterator[str]:
    (bound,) = (x for x in PREFILL[0].bounds if x.of == "checkpoint")
    yield f"It may take {(bound.limit - 1) * 100:.0f} % of a call"
    cost, cold, longer = {}, {}, {}
    for gpu, rows in (("h200", h200), ("h100", h100)):
        found = {name: row for name, row in rows.items() if bound.words in row["bounds"]}
        kept = [name for name, row in found.items() if row["bounds"][bound.words]]
        yield f"On an {gpu.upper()} {len(kept)} of {len(found)} rows"
        cost[gpu], cold[gpu] = (
            {name: value(row, f"checkpoint.{path}/ours.{path}") * 100 - 100 for name, row in found.items()}
            for path in ("sustained_ms", "ms.median")
        )
        longer[gpu] = {
            name: (value(row, "checkpoint.ms.median") - value(row, "ours.ms.median")) * 1e3
            for name, row in found.items()
        }
        if gpu == "h100":
            assert kept == [
                x for x in found if (s := found[x]["shape"])["HV"] >= 64 and s["T"] >= 8192 and not s["lengths"]
            ]
            yield f"({span([cost[gpu][name] for name in kept])} %)"
        else:
            long = [x for x in found if (s := found[x]["shape"])["T"] >= 8192 and not s["lengths"]]
            assert kept == [x for x in long if x != "T8192 H96"]
    packed = [x for name, x in cost["h100"].items() if "packed" in name]
    one, short = (cost["h100"][name] for name in ("T8192 H32", "T1024 H64"))
    yield f"T8192 H32 takes {one:.1f} %, T1024 H64 {short:.1f} %, packed calls {span(packed)} %"
    missed = [cost["h200"][x] for x in ("T8192 H96", "T1024 H64", "packed 20 random H64", "packed 6 uneven H96")]
    yield f"T8192 H96, which takes {missed[0]:.1f} %"
    yield f"T1024 H64 takes {missed[1]:.1f} %"
    yield "packed 20 random H64 {:.1f} % and packed 6 uneven H96 {:.1f} %".format(*missed[2:])
    state, workspace = 128 * 128 * 4, CHUNK_BYTES["steps"]
    yield f"A state is {state // 2**10} KiB in float32"
    scanned, call = workspace + 2 * ROWS_BYTES, 2 * workspace + 5 * ROWS_BYTES
    yield f"`recurrence` moves {scanned / 2**10:.0f} KiB, the whole call {call / 2**10:.0f}"
    assert round(call / state) == 3
    chunks = math.ceil(state / call / (bound.limit - 1))
    yield f"fewer than {chunks} chunks ({chunks * 64:,} tokens) miss the bound"
    in_chunks = {}
    for name, more in cost["h100"].items():
        shape = h100[name]["shape"]
        lengths = shape["lengths"] or [shape["T"]]
        in_chunks[name] = more / 100 * sum(-(-x // 64) for x in lengths) / len(lengths)
    most = in_chunks.pop("T8192 H32")
    yield f"as long as {span([*in_chunks.values()])} chunks (T8192 H32: {most:.1f})"
    chunks = round(1 / (bound.limit - 1))
    yield f"fewer than {chunks} chunks ({chunks * 64:,} tokens) miss the bound"
    row = h100["packed 20 random H64"]
    stored = {name: len(h100[name]["shape"]["lengths"] or [0]) * 64 * state for name in longer["h100"]}
    us = stored["packed 20 random H64"] / copy_tb_s / 1e6
    yield f"stores {stored['packed 20 random H64'] / 1e6:.0f} MB, {us:.0f} us at an H100's copy rate"
    yield f"takes {(row['checkpoint']['sustained_ms'] - row['ours']['sustained_ms']) * 1e3:.0f} us longer"
    assert all(max(cold[gpu], key=cold[gpu].__getitem__) == "T1024 H64" for gpu in cold)
    whole = [f"{min(x.values()):.0f} to {max(x.values()):.0f} % on an {gpu.upper()}" for gpu, x in cold.items()]
    yield f"a checkpoint costs {' and '.join(whole)}"
    first, second = (
        f"{longer['h100'][name]:.0f} us{more} for {stored[name] / 1e6:.0f} MB"
        for name, more in (("T16384 H64", " longer"), ("packed 8 x 1024 H64", ""))
    )
    yield f"T16384 H64 takes {first}, packed 8 x 1024 H64 {second}"


def beside_cudnn(h200: dict[str, dict], h100: dict[str, dict]) -> Iterator[str]:
    found = {
        (gates, gpu): [
            row
            for benchmark in ("prefill-hopper", "shards", "split-hopper")
            for row in gated(benchmark, gpu, gates).values()
        ]
        for gates in ("random", "slow")
        for gpu in ("h200", "h100")
    }
    random, slow = ([*found[gates, "h200"], *found[gates, "h100"]] for gates in ("random", "slow"))
    eager = min(each([*random, *slow], "cudnn.ms.median/ours.ms.median"))
    yield f"takes at least {math.floor(eager * 10) / 10} times as long as ours"
    both = ([*found["random", gpu], *found["slow", gpu]] for gpu in ("h200", "h100"))
    least = [math.floor(min(each(some, "cudnn_ready.ms.median/ours.ms.median")) * 100) / 100 for some in both]
    yield "(with ready inputs {:.2f} times on an H200, {:.2f} times on an H100)".format(*least)
    split = rows_of("split-hopper-h200").values()
    rows = [*h200.values(), *rows_of("shards-h200").values(), *split]
    graphs, calls = (each(rows, f"cudnn_cute.{x}/ours.{x}") for x in ("graph_ms.median", "ms.median"))
    yield f"{span(graphs, 2)} times our time by graph and at least {math.floor(min(calls) * 10) / 10} times as eager calls"
    yield f"in {len(graphs)} rows of `prefill`, `shards` and `split` on an H200"
    of_split = [row["name"] for row in split if value(row, "cudnn_cute.ms.median")]
    assert all(name.endswith(" H4, random gates") for name in of_split)
    yield f"with which {len(of_split)} rows of `split` ran"
    gates = [row for row in rows if row["name"].endswith(" gates") and value(row, "cudnn_cute.graph_ms.median")]
    yield f"{len(gates)} of them with random or slow gates"
    slower = each(
        [row for row in gates if "slow" in row["name"]], "cudnn_cute.graph_ms.median/cudnn_ready.graph_ms.median"
    )
    yield f"it takes {span(slower, 2)} of the first engine's time for the same inputs"
    same, ready = GRAPH_RATIOS.values()
    assert max(each(slow, same)) < 1
    limit = BY_GRAPH["random"]
    assert max(each(gated("prefill-hopper", "h200", "random").values(), same)) < 1
    shards = {gpu: gated("shards", gpu, "random").items() for gpu in ("h200", "h100")}
    above = [(gpu, x) for gpu in shards for x, row in shards[gpu] if value(row, same) > limit]
    assert above == [("h100", "T1024 H4")]
    short = [rows_of(f"shards-{gpu}")["T1024 H4, random gates"] for gpu in ("h200", "h100")]
    here, there = each(short, same)
    us = (short[0][who]["graph_ms"]["median"] * 1e3 for who in ("ours", "cudnn"))
    yield "T1024 H4 takes {:.2f} on an H200, {:.1f} us and cuDNN {:.1f}".format(here, *us)
    yield f"An H100 misses the bound with {there:.3f}"
    yield f"takes up to {1 / min(each(slow, ready)):.0f} times our time even with ready inputs"
    packed = [value(h100[f"packed {x} H64, slow gates"], ready) for x in ("8 x 1024", "20 random")]
    yield "takes {:.2f} of the time of ready inputs in packed 8 x 1024 H64 and {:.2f} in packed 20".format(*packed)
    rows_kib, steps, chunks = (x / 2**10 for x in (ROWS_BYTES, *CHUNK_BYTES.values()))
    yield f"have {4 * rows_kib:.0f} KiB, g has {rows_kib:.0f} in bfloat16 and {2 * rows_kib:.0f} in float32"
    yield f"{steps:.0f} KiB in steps and {chunks:.1f} in whole chunks"
    yield f"moves {5 * rows_kib + 2 * steps:.0f} or {5 * rows_kib + 2 * chunks:.0f} KiB"
    yield f"cuDNN moves {6 * rows_kib:.0f} with ready inputs"
    pair = [rows["T8192 H64, random gates"] for rows in (h200, h100)]
    ours, cudnn = ([row[who]["graph_ms"]["median"] * 1e3 for row in pair] for who in ("ours", "cudnn"))
    yield "takes ours {:.0f} us by graph on an H200 and {:.0f} on an H100".format(*ours)
    yield "cuDNN {:.0f} and {:.0f}, which is {:.2f} and {:.2f}.".format(*cudnn, *each(pair, same))
    yield "FLA takes {:.2f} and {:.2f} ms, sustained".format(*each(pair, "fla.sustained_ms"))


def prepare() -> Iterator[str]:
    steps, chunks = (half_steps("T8192 H64", f"{form}: prepare") for form in ("steps", "chunks"))
    yield f"{steps:.0f} us against {chunks:.0f} us for whole chunks"


def split() -> Iterator[str]:
    rows = [row for name, row in rows_of("split-hopper-h200").items() if not name.endswith("gates")]
    cut = [row for row in rows if max(row["segments"]) > 1]
    gain = [row["gain"] for row in cut]
    few, more = (mean([row["gain"] for row in cut if row["shape"]["H"] == H]) for H in (4, 8))
    yield f"Of the {len(rows)} batches {len(cut)} are split. They run {mean(gain):.2f} times as fast as whole"
    yield f"(4 heads {few:.2f}, 8 heads {more:.2f}), {max(gain):.2f} at best and {min(gain):.2f} at worst"
    yield f"all {len(rows)} batches run {mean(each(rows, 'speedup')):.1f} times as fast in the geometric mean"
    errors = [x for of in ("o", "state") for x in each(rows, f"ours.error.{of}/whole.error.{of}")]
    yield f"at most {math.ceil(max(errors) * 100) / 100}x those of whole sequences in every row"
    random = gated("split-hopper", "h200", "random").values()
    beside = [x for of in ("o", "state") for x in each(random, f"ours.error.{of}/fla.error.{of}")]
    yield f"with random ones errors are at most {math.ceil(max(beside) * 100) / 100}x FLA's"
    slow = gated("split-hopper", "h200", "slow").values()
    assert max(x for of in ("o", "state") for x in each(slow, f"ours.error.{of}/fla.error.{of}")) < 1
    cut_or_not = [x for of in ("o", "state") for x in each(slow, f"ours.error.{of}/whole.error.{of}")]
    assert max(cut_or_not) * 100 <= math.ceil(max(errors) * 100)
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


MILLION = {
    ">= 0.85 of one GPU's rate sustained": True,
    ">= 0.85 by one cold call of either relay": True,
    "<= 0.4 of FLA's": None,
}


def parallel() -> Iterator[str]:
    rows = rows_of("cp-h200")

    few = {name: row for name, row in rows.items() if " H8 " in name}
    stacks = {name: row for name, row in rows.items() if name.startswith("4 layers")}
    many = {name: row for name, row in rows.items() if row["ranks"] > 1 and name not in few and name not in stacks}
    two = [row for row in many.values() if row["ranks"] == 2]
    forwards, steps = ([row for row in two if row["name"].startswith(f"{short} ")] for short in ("fwd", "fwd+bwd"))
    missed = [(row["name"], words) for row in two for words, met in row["bounds"].items() if met is False]
    assert missed == [(f"fwd H64 {n}K x 2", ">= 0.77 by one cold call of either relay") for n in (32, 128)]
    # FLA has no time beside a million tokens with gradients
    assert all(row["met"] or row["name"] in dict(missed) or row["bounds"] == MILLION for row in two)
    whole = [row for row in forwards if "packed" not in row["name"]]
    for row in whole:
        (wanted, _), H = EFFICIENCY[2, row["shape"]["H"], row["shape"]["T"] // 1024], row["shape"]["H"]
        first = " a rank" if row["shape"]["T"] == 8192 and H == 32 else ""
        rates = f"{row['efficiency']:.3f} | {row['sustained_efficiency']:.2f} | {unrelayed(row, 'ms.median'):.3f}"
        rates += f" | {unrelayed(row, 'sustained_ms'):.3f}"
        yield f"| H{H}, {row['shape']['T'] // 1024}K{first} | {wanted:.2f} | {rates} |"
    yield f"forwards reach {span(each(forwards, 'sustained_efficiency'), 2)} of one GPU's rate"
    yield f"with gradients {span(each(steps, 'sustained_efficiency'), 2)}"
    yield f"forward reaches {span(each(forwards, 'efficiency'), 2)}"
    yield f"`relay=False` one sequence reaches {span([unrelayed(row, 'ms.median') for row in whole], 2)}"
    for said, name in (
        ("8K tokens a rank", "8K x 2"),
        ("8K, ranks joined after each layer", "8K x 2 joined"),
        ("32K", "32K x 2"),
        ("32K, ranks joined after each layer", "32K x 2 joined"),
    ):
        row = stacks[f"4 layers H32 {name}"]
        relayed = f"{row['sustained_efficiency']:.2f}, {row['efficiency']:.2f}"
        formed = f"{unrelayed(row, 'sustained_ms'):.2f}, {unrelayed(row, 'ms.median'):.2f}"
        yield f"| {said} | {relayed} | {formed} |"
    gains = [
        (value(row, f"ours.{how}/no_relay.{how}") - 1) * 100
        for name, row in stacks.items()
        for how in ("ms.median", "sustained_ms")
        if "joined" in name
    ]
    yield f"gains {span(gains, 0)} % where they do"
    longest = rows["fwd H32 512K x 2"]["ours"]
    yield f"take {longest['sustained_ms']:.1f} ms and {longest['peak_bytes'] / 2**30:.1f} GiB a GPU"
    longest = rows["fwd+bwd H32 512K x 2"]
    gib = longest["ours"]["peak_bytes"] / 2**30
    yield f"With gradients they take {longest['ours']['sustained_ms']:.1f} ms and {gib:.1f} GiB"
    yield f"{longest['sustained_efficiency']:.2f} of one GPU's rate (wanted: {EFFICIENCY[2, 32, 512][1]:.2f})"
    packed = each((row for row in two if "packed" in row["name"]), "fla.ms.median/ours.ms.median")
    one = each((row for row in two if "packed" not in row["name"]), "fla.ms.median/ours.ms.median")
    yield f"FLA takes {span(packed)} times as long for sequences that rank boundaries cut, and up to {max(one):.1f} times"
    alone = {name: row for name, row in rows.items() if row["ranks"] == 1}
    faster = {name: f"{row['sustained_efficiency']:.2f}" for name, row in alone.items()}
    yield f"{faster['fwd+bwd H4 32K']} and {faster['fwd+bwd H4 128K']} times as fast as whole at 32K and 128K tokens"
    yield f"`disable_recompute` {faster['fwd+bwd H4 32K kept']} and {faster['fwd+bwd H4 128K kept']} times"
    times = {name: f"{row['efficiency']:.2f}" for name, row in alone.items()}
    cold = (f"{times[f'fwd+bwd H4 32K{x}']} and {times[f'fwd+bwd H4 128K{x}']}" for x in ("", " kept"))
    yield "A single cold step is {} times as fast, {} then".format(*cold)
    gathered = [row for name, row in many.items() if " H32 8K x " in name]
    gains = [(1 - x) * 100 for x in each(gathered, "gather.ms.median/ours.ms.median")]
    yield f"of 32 heads and 8K tokens a rank it makes {span(gains, 0)} % faster"
    short = alone["fwd+bwd H4 32K kept"]["ours"]
    assert sum(kernel["ms"] for kernel in short["kernels"]) > short["sustained_ms"]
    yield f"At 32K its kernels take all of {short['sustained_ms']:.2f} ms"
    reached = [f"{rows[f'fwd+bwd H{H} 32K x 4']['sustained_efficiency']:.3f}" for H in (32, 64)]
    yield "32K tokens a rank reach {} of one GPU's rate with 32 heads (wanted: 0.80) and {} with 64".format(*reached)
    four = each((row for row in rows.values() if row["ranks"] == 4), "fla.ms.median/ours.ms.median")
    yield f"FLA takes {span(four)} times as long. A million"
    million = rows["fwd+bwd H32 256K x 4"]
    ours, one = (million[x]["sustained_ms"] for x in ("ours", "one"))
    yield f"take {ours:.1f} ms and {million['ours']['peak_bytes'] / 2**30:.0f} GiB a GPU; one GPU takes {one:.1f} ms"
    least = [row for name, row in rows.items() if re.fullmatch(r"fwd H64 \d+K x 4", name)]
    yield f"Forwards of 64 heads reach least, {span(each(least, 'sustained_efficiency'), 2)}"
    brief = rows["fwd+bwd H32 8K x 4"]
    yield "takes {:.2f} ms sustained by copies, {:.2f} by an all-gather".format(
        *(brief[x]["sustained_ms"] for x in ("ours", "gather"))
    )
    exchange = [rows["fwd H32 8K x 2"][x]["ms"]["median"] * 1e3 for x in ("exchange", "exchange_gather")]
    yield "(over two GPUs {:.0f} and {:.0f} us at 2 MiB, cold)".format(*exchange)
    ratio = each(many.values(), "gather.sustained_ms/ours.sustained_ms")
    gain, loss = 100 - min(ratio) * 100, max(ratio) * 100 - 100
    yield f"makes whole calls of 32 and 64 heads between {gain:.0f} % faster and {loss:.0f} % slower"
    above = {name: (row["modelled"] - row["sustained_efficiency"]) * 100 for name, row in many.items()}
    most, usual = max(above.values()), max(abs(x) for name, x in above.items() if " 8K" not in name)
    yield f"is up to {most:.0f} points above these short calls, and within {usual:.0f} of all others"
    long = [f"{rows[f'fwd H8 {n}K x 2']['sustained_efficiency']:.3f}" for n in (32, 128)]
    yield "8 heads reach {} and {} of one GPU's rate back to back".format(*long)
    shortest = rows["fwd H8 8K x 2"]
    yield f"{shortest['sustained_efficiency']:.3f} by copies"
    yield f"reaches {value(shortest, 'one.sustained_ms/gather.sustained_ms'):.3f}"


def unrelayed(row: dict, how: str) -> float:
    """The rate of two GPUs without relay, by one of two times: a share of one GPU's."""
    return value(row, f"one.{how}/no_relay.{how}")


def readme() -> Iterator[str]:
    whole = [row for name, row in rows_of("toolchains-h200").items() if ":" not in name]
    longer = max(each(whole, OTHER) + each(whole, OTHER_SUSTAINED))
    yield f"[up to {math.ceil(longer * 100 - 100)} % longer]"
    step = rows_of("decode-h200")["N128 H32 fp32"]
    yield f"With float32 states that decoding step is {step['speedup']:.2f} times as fast as FLA's"
    engines = [row for name, row in rows_of("engines-h100").items() if " decode " in name]
    yield f"decoding is {span(each(engines, 'engine_ratio'), 2)} times as fast"


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


OTHER, OTHER_SUSTAINED = "other.ms.median/ours.ms.median", "other.sustained_ms/ours.sustained_ms"
"""Another Triton's time over that of the oldest."""


def machine_code() -> Iterator[str]:
    (some, all_kernels, most), (later, _, later_most) = spills(own=True)
    yield f"spill: {some} of {all_kernels} on 3.6.0, up to {most} bytes, and {later} on 3.9.0, up to {later_most}"
    (some, all_kernels, _), (later, *_) = spills(own=False)
    yield f"spill in {some} and {later} of {all_kernels}"
    level, newer = rows_of("toolchains-h200-level-2"), rows_of("toolchains-h200-triton-3.8")
    longer = {name: value(row, OTHER) - 1 for name, row in level.items()}
    recurrence = [x for name, x in longer.items() if re.fullmatch(r"prefill .*: recurrence_kernel", name)]
    yield f"`recurrence` took {percent(recurrence)} longer"
    yield f"`reverse` {longer['train B1 T8192 H32: reverse_kernel'] * 100:.0f} %"
    yield f"`wy` as an operator {longer['wy B1 T8192 H32'] * 100:.0f} %"
    toolchains = rows_of("toolchains-h200")
    oldest = {name: value(row, OTHER) for name, row in toolchains.items()}
    slower = [x * 100 - 100 for name, x in oldest.items() if ": recurrence_kernel" in name and "triton" not in name]
    yield f"`recurrence` takes {-min(slower):.0f} % less time to {max(slower):.0f} % more"
    prefills = [row for name, row in toolchains.items() if name.startswith("prefill ") and ":" not in name]
    cold, sustained = ([x * 100 - 100 for x in each(prefills, of)] for of in (OTHER, OTHER_SUSTAINED))
    yield f"Whole calls of the prefill take {-min(cold):.0f} % less to {max(cold):.0f} % more cold"
    yield f"{-min(sustained):.0f} % less to {max(sustained):.0f} % more back to back"
    yield f"a training step {100 - oldest['train B1 T8192 H32'] * 100:.0f} % less"
    portable = oldest["triton prefill T8192 H64: recurrence_kernel"] * 100 - 100
    yield f"The portable `recurrence` takes {portable:.0f} % more, without a spill"
    yield f"`gate_sums` is {1 / oldest['train B1 T8192 H32: gate_sums_kernel']:.1f} times as fast"
    packed = [x for name, x in longer.items() if name.startswith("prefill packed") and ":" not in name]
    yield f"whole packed prefills {percent(packed)}"
    calls = [value(row, OTHER) - 1 for name, row in newer.items() if name.startswith("prefill") and ":" not in name]
    yield f"3.8.0 took {percent(calls)} longer"
    calls = [value(row, OTHER) - 1 for name, row in rows_of("toolchains-h200-triton-3.7").items() if ":" not in name]
    yield f"in {percent(calls)} more time"


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
    "../README": readme,
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
