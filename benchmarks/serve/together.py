"""Processes that start together and work one at a time: most of an engine's start is host code, and what two engines take is
compared a moment apart, off and on in turn."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

COMPILED = re.compile(r"JIT compilation during inference: (.*?)\. This causes")
"""Pattern of what vLLM's monitor says of a kernel that is compiled while it serves."""


def environment(mode: str, work: str) -> dict[str, str]:
    """One process, no network, and of plugins only flashdelta's, if at all."""
    plugin = "flashdelta" if mode.startswith(("on", "fused")) else ""
    cache = os.environ.get("VLLM_CACHE_ROOT", f"{work}/vllm_cache")
    own = {"VLLM_PLUGINS": plugin, "FLASHDELTA_VLLM_FUSED": str(int(mode == "fused")), "VLLM_CACHE_ROOT": cache}
    quiet = "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONUNBUFFERED"
    off = "USE_FLASHINFER_SAMPLER", "KIMI_K3_GEMM_AR", "ENABLE_GEMM_RS", "USE_DEEP_GEMM", "ENABLE_V1_MULTIPROCESSING"
    own |= dict.fromkeys(quiet, "1") | {f"VLLM_{name}": "0" for name in off}
    own |= dict.fromkeys(("VLLM_HOST_IP", "VLLM_LOOPBACK_IP"), "127.0.0.1")
    return os.environ | own | dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")


class Worker:
    """A process of this program for one case, `SCENARIO:MODE`. It is told what to do by lines, and answers by files."""

    def __init__(self, case: str, arguments: list[str], work: str):
        self.case, self.path, self.asked = case, os.path.join(work, case.replace(":", "-")), 0
        for old in Path(work).glob(f"{case.replace(':', '-')}.[0-9]*.json"):
            old.unlink()
        with open(f"{self.path}.log", "w") as log:
            command, mode = [sys.executable, sys.argv[0], *arguments, "--child", case], case.split(":")[1]
            self.process = Popen(command, env=environment(mode, work), stdin=PIPE, stdout=log, stderr=STDOUT)

    def answer(self, until: float) -> dict | None:
        """The next answer; None if the process ended without one, or took too long."""
        file = f"{self.path}.{self.asked}.json"
        while not os.path.exists(file):
            if self.process.poll() is not None or time.monotonic() > until:
                return None
            time.sleep(0.02)
        self.asked += 1
        with open(file) as f:
            return json.load(f)

    def ask(self, what: str, until: float) -> dict | None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return None
        return self.answer(until)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return Path(f"{self.path}.log").read_text(errors="replace")

    def compiled(self) -> list[str]:
        return sorted({*COMPILED.findall(self.log())})


def serve_lines(case: str, work: str, answers) -> None:
    """The child's side: answers the start, and each line of its input, with what `answers(line)` gives."""
    path = os.path.join(work, case.replace(":", "-"))
    write(f"{path}.0.json", answers(""))
    for n, line in enumerate(sys.stdin, 1):
        write(f"{path}.{n}.json", answers(line.strip()))
    os._exit(0)  # not waiting for engines' threads


def write(path: str, found: object) -> None:
    with open(f"{path}.part", "w") as f:
        json.dump(found, f)
    os.replace(f"{path}.part", path)


def start(cases: list[str], arguments: list[str], work: str, until: float) -> tuple[list[Worker], dict[str, dict]]:
    """Those that came up, with what each said of itself; the others' last lines are printed."""
    begin = time.monotonic()
    workers = [Worker(case, arguments, work) for case in cases]
    said = {worker.case: worker.answer(until) for worker in workers}
    for worker in workers:
        if said[worker.case] is None:
            worker.end()
            print(f"---- {worker.case} did not start:", *worker.log().splitlines()[-15:], sep="\n", flush=True)
    up = [worker for worker in workers if said[worker.case] is not None]
    print(f"{len(up)} of {len(workers)} engines after {time.monotonic() - begin:.0f} s", flush=True)
    return up, {case: found for case, found in said.items() if found is not None}
