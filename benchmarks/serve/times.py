"""Times of a server: time to the first token, steps, tokens per second, drafts; off and on in turn."""

from __future__ import annotations

import functools
import itertools
import statistics
import time

from agree import LAYERS
from models import SCENARIOS, counters, repeated, run, tokens

PROMPTS = (1024, 8192, 65536)
BATCHES = (1, 32, 128)
STEPS = 96
REQUESTS, LONG, SHORT = 64, 8192, 32
"""Load under which tokens per second are counted: requests at once, tokens in, tokens out."""

RATES = ("tokens/s",)
"""Rows in which more is better begin so."""


def rounds(llm, name: str):
    """Measures once for each time that it is asked: rows by name, in ms or tokens per second."""
    fresh = itertools.count(10_000)
    lengths = itertools.count(1)

    def first_token(n: int) -> float:
        return 1e3 * run(llm, [tokens(next(fresh), n)], 1)[0]

    def step(batch: int) -> float:
        prompts = [[tokens(next(fresh), 64) for _ in range(batch)] for _ in range(2)]
        first, whole = (run(llm, p, n)[0] for p, n in zip(prompts, (1, 1 + STEPS)))
        return 1e3 * (whole - first) / STEPS

    def host(n: int) -> list[float]:
        """Milliseconds of each KDA layer's own code in a prefill, which runs eagerly."""
        layers = llm.apply_model(lambda model: [x for x in model.modules() if type(x).__name__ in LAYERS.values()])[0]
        spans: list[float] = []

        def clocked(theirs, **call):
            begin = time.perf_counter()
            theirs(**call)
            spans.append(1e3 * (time.perf_counter() - begin))

        for layer in layers:
            layer._forward = functools.partial(clocked, layer._forward)
        for _ in range(5):
            first_token(n)
        for layer in layers:
            del layer._forward
        return spans

    def measure() -> dict[str, list[float]]:
        if SCENARIOS[name].drafts:
            before = counters(llm, "spec_decode")
            prompts = [repeated(next(fresh), 512) for _ in range(32)]
            seconds = run(llm, prompts, 128)[0]
            after = counters(llm, "spec_decode")
            counts = {key.removeprefix("spec_decode_"): [after[key] - before.get(key, 0)] for key in after}
            found = {"tokens/s, 32 drafting requests": [32 * 128 / seconds]}
            return found | {f"count of {key}": x for key, x in counts.items() if "accepted" in key or "draft" in key}
        found = {f"first token of {n}": [first_token(n) for _ in range(9 if n < 4096 else 5 if n < 20_000 else 2)]
                 for n in PROMPTS}  # fmt: skip
        # each prompt of a length that no call had before
        found["first token of about 1024, each length new"] = [first_token(1024 - next(lengths)) for _ in range(9)]
        found["host time of a layer's prefill"] = host(PROMPTS[0])
        found |= {f"step of {batch}": [step(batch) for _ in range(3)] for batch in BATCHES}
        long = [tokens(next(fresh), LONG) for _ in range(REQUESTS)]
        rate = REQUESTS * (LONG + SHORT) / run(llm, long, SHORT)[0]
        return found | {f"tokens/s, {REQUESTS} requests of {LONG} in, {SHORT} out": [rate]}

    return measure


def warm(llm, name: str) -> None:
    """Every kind of batch once: prefills alone, packed, with decodes, hits of the prefix cache, graphs of all sizes."""
    make = repeated if SCENARIOS[name].drafts else tokens
    run(llm, [make(1, n) for n in (5, 70, 300, 2000)], 8)
    run(llm, [make(1, n) for n in (5, 70, 300, 2000)], 8)
    for n in (1024, LONG):
        run(llm, [make(2 + n, n)], 4)
    for batch in (2, 4, 8, 16, 32, 64, 128):
        run(llm, [make(100 * batch + i, 64) for i in range(batch)], 4)


def summary(samples: list[dict]) -> list[dict]:
    """A row for each scenario and number: the median over all processes, and the smallest and largest median of one. `samples`:
    of one process and one round each."""
    taken: dict = {}
    for s in samples:
        for key, x in s["rows"].items():
            taken.setdefault((s["scenario"], key), {}).setdefault(s["mode"], []).append(x)
    found: list[dict] = []
    for (scenario, key), modes in taken.items():
        row: dict = {"scenario": scenario, "row": key}
        for mode, each in modes.items():
            medians = sorted(map(statistics.median, each))
            row[mode] = {"median": statistics.median(itertools.chain(*each)), "processes": len(medians)}
            row[mode] |= {"least": medians[0], "most": medians[-1]}
        for mode in modes.keys() - {"off"} if "off" in modes and not key.startswith("count") else ():
            ratio = row["off"]["median"] / row[mode]["median"]
            row[mode]["gain"] = 1 / ratio if key.startswith(RATES) else ratio
        found.append(row)
    return found


def table(rows: list[dict]) -> str:
    """Writes medians in Markdown, in brackets the least and the most of a process."""
    lines = ["| model | what | off | on | gain |", "| --- | --- | ---: | ---: | ---: |"]

    def cell(x: dict) -> str:
        return f"{x['median']:,.4g} ({x['least']:,.4g} to {x['most']:,.4g})"

    for row in rows:
        for mode in ("on", "fused"):
            if "off" in row and mode in row:
                name = row["scenario"] + (", fused" if mode == "fused" else "")
                gain = f"{row[mode]['gain']:.2f}" if "gain" in row[mode] else ""
                unit = "" if row["row"].startswith(("tokens", "count")) else ", ms"
                lines.append(f"| {name} | {row['row']}{unit} | {cell(row['off'])} | {cell(row[mode])} | {gain} |")
    return "\n".join(lines)
