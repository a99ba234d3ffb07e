"""Segments on trial beside calls without: what it brings where gates forget, and costs where they don't.

    python benchmarks/trials.py [--out FILE]

Takes about two minutes on a GPU. Microseconds by CUDA graph, back to back: of shards of shipped models, and of long sequences.
Beside them how far the outputs lie apart, and into how many segments the longest sequence is cut. The tuning log has what was
measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import torch

import flashdelta as fd
from flashdelta.hopper import segments
from flashdelta.runtime.call import CACHE
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import relative_error
from flashdelta.tools.bench.environment import environment
from flashdelta.tools.bench.report import new_document, save, script_parser
from flashdelta.tools.bench.timing import Run, Timer, capture, sustained
from flashdelta.tools.bench.workloads import GATES, SHARDS

LONG = {
    "T8192 H4": (8192, 4),
    "T8192 H8": (8192, 8),
    "T8192 H12": (8192, 12),
    "128K H8": (131072, 8),
}
CASES = [
    *(row.call for row in SHARDS),
    *(
        replace(SHARDS[0].call, name=f"{name}, {memory} gates", T=T, H=H, HV=H, memory=memory)
        for name, (T, H) in LONG.items()
        for memory in GATES
    ),
]
LINE = "{case:30} {segments_without:3} {segments_tried:3} {without:8.1f} {tried:8.1f} us {ratio:5.2f} apart {o:.1e} {state:.1e}"


def graph_of(call: dict, tries: bool) -> tuple[Run, tuple, int]:
    CACHE.clear()  # else a call like an earlier one replays that one's launches
    try:
        with contextlib.nullcontext() if tries else mock.patch.object(segments, "may_try", lambda problem: False):
            longest = max(fd.explain(fd.chunk_kda, **call).segments or (1,))
            replay, results = capture(lambda: fd.chunk_kda(**call))
    finally:
        CACHE.clear()
    return replay, results, longest


def measured(case, timer: Timer) -> dict:
    call = make_call(case, torch.bfloat16, "cuda") | {"backend": "hopper"}
    without, want, segments_without = graph_of(call, False)
    tried, found, segments_tried = graph_of(call, True)
    without(), tried()
    o, state = (relative_error(x.double(), y.double()) for x, y in zip(found, want))
    us = {name: 1000 * ms for name, ms in sustained({"without": without, "tried": tried}, timer).items()}
    counts = {"segments_without": segments_without, "segments_tried": segments_tried}
    return {"case": case.name, **us, "ratio": us["tried"] / us["without"], **counts, "o": o, "state": state}


PARSER = script_parser(__doc__)


def main() -> None:
    out, device = PARSER.parse_args().out, torch.device("cuda")
    timer = Timer(device)
    results = new_document("trials", environment(device))
    for case in CASES:
        results["rows"].append(measured(case, timer))
        print(LINE.format_map(results["rows"][-1]), flush=True)
        if out is not None:
            save(results, out)


if __name__ == "__main__":
    main()
