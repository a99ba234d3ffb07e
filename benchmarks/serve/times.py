"""Times of a server: time to the first token, steps, tokens per second, drafts; off and on in turn."""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable

from agree import LAYERS
from models import MODES, SCENARIOS, accepted, counters, repeated, run, tokens
from together import Worker

PROMPTS = (1024, 8192, 65536)
BATCHES = (1, 32, 128)
STEPS = 48
REQUESTS, LONG, SHORT = 64, 8192, 32
"""Load under which tokens per second are counted: requests at once, tokens in, tokens out."""


def rows(llm, name: str) -> dict[str, Callable[[], float]]:
    """Measurements by name: each call makes one more, in ms or tokens per second."""
    fresh, lengths = itertools.count(10_000), itertools.count(1)
    gc.collect()
    gc.disable()  # a garbage collection takes as long as many steps

    def first_token(n: int) -> float:
        return 1e3 * run(llm, [tokens(next(fresh), n)], 1)[0]

    def seconds(prompts: list, n: int) -> float:
        return run(llm, prompts, n)[0]

    def calls(prompts: list, n: int) -> int:
        """Python functions that are entered: the host's work, whatever its speed."""
        count = itertools.count()
        sys.setprofile(lambda frame, event, arg: event == "call" and next(count))
        run(llm, prompts, n)
        sys.setprofile(None)
        return next(count)

    def busy(prompts: list, n: int) -> float:
        """The GPU's seconds: all its kernels."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run(llm, prompts, n)
        return sum(x.self_device_time_total for x in found.key_averages()) / 1e6

    def step(what: Callable[[list, int], float], batch: int, scale: float = 1e3, steps: int = STEPS) -> float:
        """What each step of a batch adds."""
        first, whole = (what([tokens(next(fresh), 64) for _ in range(batch)], n) for n in (1, 1 + steps))
        return scale * (whole - first) / steps

    def inside(n: int, gpu: bool) -> float:
        """KDA layers' own code in a prefill, which runs eagerly: the GPU's time of all layers together, or else the median of
        their host times."""
        import torch

        layers = llm.apply_model(lambda model: [x for x in model.modules() if type(x).__name__ in LAYERS.values()])[0]
        spans: list[tuple] = []

        def clocked(theirs, **call):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begin = time.perf_counter()
            theirs(**call)
            spans.append((1e3 * (time.perf_counter() - begin), start, end))
            end.record()

        for layer in layers:
            layer._forward = functools.partial(clocked, layer._forward)
        first_token(n)
        for layer in layers:
            del layer._forward
        if gpu:
            return sum(start.elapsed_time(end) for _, start, end in spans)
        return statistics.median(host for host, _, _ in spans)

    def rate(prompts: list[list[int]], n: int) -> float:
        return sum(len(p) + n for p in prompts) / run(llm, prompts, n)[0]

    def drafting(kind: str) -> float:
        """Accepted tokens per draft, or tokens per second."""
        before = counters(llm, "spec_decode")
        few = {"allowed_token_ids": [*range(16, 20)]}  # so that some drafts are right
        seconds = run(llm, [repeated(next(fresh), 512) for _ in range(32)], 128, [few] * 32)[0]
        return accepted(llm, before) if kind == "accepted" else 32 * 128 / seconds

    if SCENARIOS[name].drafts:
        return {
            "tokens/s, 32 drafting requests": functools.partial(drafting, "rate"),
            "count of accepted tokens per draft": functools.partial(drafting, "accepted"),
        }
    found: dict[str, Callable[[], float]] = {
        **{f"first token of {n}": functools.partial(first_token, n) for n in PROMPTS[:2]},
        **{f"step of {batch}": functools.partial(step, seconds, batch) for batch in BATCHES},
        "count of Python calls in a step of 32": functools.partial(step, calls, 32, 1.0),
    }
    if SCENARIOS[name].heads != 32:  # a shard: what its fused step and its number of heads change
        return found
    return found | {
        f"first token of {PROMPTS[2]}": functools.partial(first_token, PROMPTS[2]),
        # a length that no call had before
        f"first token of about {PROMPTS[0]}, each length new": lambda: first_token(PROMPTS[0] - next(lengths)),
        "host time of a layer's prefill": functools.partial(inside, PROMPTS[0], False),
        **{f"all KDA layers in a prefill of {n}": functools.partial(inside, n, True) for n in PROMPTS[:2]},
        f"tokens/s, {REQUESTS} requests of {LONG} in, {SHORT} out": lambda: rate(
            [tokens(next(fresh), LONG) for _ in range(REQUESTS)], SHORT
        ),
        # profiled, so last
        **{f"GPU time of a step of {batch}": functools.partial(step, busy, batch, steps=16) for batch in BATCHES},
    }


REPEATS = {"first token of 65536": 2, "tokens/s, 64": 2, "GPU time": 1, "count": 1}
"""How often a row is measured per process, by how it begins; else 7 times."""


def in_turn(workers: list[Worker], until: float, wave: int, keep: Callable[[dict], None], some: str = "") -> None:
    """Asks engines of one scenario for one number at a time, off and on in turn, each first in every other turn: the speed of
    a host drifts by half within a minute, and cancels in the ratio of two neighbours."""
    for scenario in dict.fromkeys(worker.case.split(":")[0] for worker in workers):
        group = [worker for worker in workers if worker.case.split(":")[0] == scenario]
        found = (group[0].ask("rows", until) or {"rows": []})["rows"]
        for row in (row for row in found if any(part in row for part in some.split(","))):
            for n in range(next((x for begin, x in REPEATS.items() if row.startswith(begin)), 7)):
                answers = {w.case.split(":")[1]: w.ask(row, until) for w in (group if (wave + n) % 2 else group[::-1])}
                if None in answers.values():
                    print(*(line for w in group for line in w.log().splitlines()[-8:]), sep="\n", flush=True)
                    return
                numbers = {mode: x["found"] for mode, x in answers.items()}
                keep({"scenario": scenario, "row": row, "wave": wave} | numbers)


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
    """A row per scenario and number: medians of all processes, and the median ratio of neighbours, with the smallest and the
    largest that a pair of processes had."""
    found: list[dict] = []
    for scenario, name in dict.fromkeys((s["scenario"], s["row"]) for s in samples):
        each = [s for s in samples if (s["scenario"], s["row"]) == (scenario, name)]
        row: dict = {"scenario": scenario, "row": name}
        for mode in (x for x in each[0] if x in MODES):
            row[mode] = {"median": statistics.median(s[mode] for s in each)}
            if mode != "off" and "off" in each[0] and not name.startswith("count"):
                power = -1 if name.startswith("tokens/s") else 1  # more is better
                found_in = {s["wave"] for s in each}
                waves = [[(s["off"] / s[mode]) ** power for s in each if s["wave"] == w] for w in found_in]
                medians = [statistics.median(x) for x in waves]
                gain = statistics.median(itertools.chain(*waves))
                row[mode] |= {"gain": gain, "least": min(medians), "most": max(medians), "processes": len(waves)}
        found.append(row)
    return found


def table(rows: list[dict]) -> str:
    """In Markdown: medians, the gain and in brackets the least and the most of a pair of processes."""
    lines = ["| model | what | off | on | gain |", "| --- | --- | ---: | ---: | ---: |"]
    for row in sorted(rows, key=lambda row: row["scenario"]):
        for mode in ("on", "fused"):
            if "off" in row and mode in row and not row["row"].endswith("calls in a step of 32"):
                name, x = row["scenario"] + (", fused" if mode == "fused" else ""), row[mode]
                gain = f"{x['gain']:.2f} ({x['least']:.2f}-{x['most']:.2f})" if "gain" in x else ""
                what = row["row"] + ("" if row["row"].startswith(("tokens", "count")) else ", ms")
                off, on = (f"{x:,.{0 if x > 1000 else 2}f}" for x in (row["off"]["median"], x["median"]))
                lines.append(f"| {name} | {what} | {off} | {on} | {gain} |")
    return "\n".join(lines)
