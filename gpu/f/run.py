"""F's decisive hour: `prepare` (persistent) and `recurrence` (half stages) on one SM, H200. From the root of a checkout:

    PYTHONPATH=src python3 .carry/f/run.py [--short]

README beside this file says how to read what it prints."""

import ctypes
import faulthandler
import subprocess
import sys
import time
from pathlib import Path

BEGAN = time.time()
HERE = Path(__file__).resolve().parent
sys.path[:0] = ["src", ".", str(HERE)]

import torch  # noqa: E402
import triton  # noqa: E402

import launches as M  # noqa: E402
from benchmarks import timing  # noqa: E402

SMS = M.SMS
PACKED = [1024] * 8
CASES = {"T8192 H64": (8192, 64, None), "8 x 1024 H64": (8192, 64, PACKED), "T8192 H32": (8192, 32, None), "T8192 H8": (8192, 8, None)}
COMPILED = {  # name: lengths, launch
    "prepare": (None, lambda m: m.prepare()),
    "prepare, flags": (None, lambda m: m.prepare(flags=True)),
    "prepare, prefetch": (None, lambda m: m.prepare(prefetch=True)),
    "prepare, prefetch, flags": (None, lambda m: m.prepare(prefetch=True, flags=True)),
    "recurrence": (None, lambda m: m.recurrence()),
    "recurrence, late v": (None, lambda m: m.recurrence(early=False)),
    "recurrence, flags": (None, lambda m: m.recurrence(flags=True)),
    "packed prepare": ([64, 64], lambda m: m.prepare()),
    "packed prepare, flags": ([64, 64], lambda m: m.prepare(flags=True)),
    "packed recurrence": ([64, 64], lambda m: m.recurrence()),
    "packed recurrence, flags": ([64, 64], lambda m: m.recurrence(flags=True)),
    "original prepare": (None, lambda m: m.original()[0]),
    "original recurrence": (None, lambda m: m.original()[1]),
    "packed original prepare": ([64, 64], lambda m: m.original()[0]),
    "packed original recurrence": ([64, 64], lambda m: m.original()[1]),
}
ROWS: list[str] = []
CUDA = ctypes.CDLL("libcuda.so.1")


def say(*x):
    print(f"[{time.time() - BEGAN:5.1f} s]", *x, flush=True)


def row(*x):
    ROWS.append(" ".join(x))
    say(ROWS[-1])


def compile_all():
    """In processes, into Triton's cache."""
    began = [(n, subprocess.Popen([sys.executable, __file__, "--compile", n], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
             for n in COMPILED]
    return began


def compile_one(name):
    lengths, make = COMPILED[name]
    make(M.Launches(M.call(128, 64, lengths))).compile()


def ready(launch):
    """Compiled and loaded, with all shared memory of an SM: kernels that want another share don't run beside each other."""
    kernel = launch.compiled()
    kernel.run  # noqa: B018
    function = ctypes.c_void_p(kernel.function)
    assert CUDA.cuFuncSetAttribute(function, 9, 100) == 0, "carve-out"
    most = ctypes.c_int()
    threads = 32 * kernel.metadata.num_warps
    CUDA.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(most), function, threads, ctypes.c_size_t(kernel.metadata.shared))
    key = launch.kernel.__name__, kernel.n_regs, kernel.n_spills, threads, kernel.metadata.shared, most.value
    KERNELS[key] = None
    return launch


KERNELS = {}


class Case:
    def __init__(self, T, H, lengths):
        self.m = m = M.Launches(M.call(T, H, lengths))
        self.scans = min(M.L.work_tiles(m.problem), SMS)
        self.room = 2 * self.scans + 4 * (SMS - self.scans)
        self.p = [ready(x) for x in (m.prepare(), m.prepare(4 * SMS), m.prepare(self.room))]
        self.r = ready(m.recurrence())
        self.pf, self.rf = ready(m.prepare(self.room, flags=True)), ready(m.recurrence(flags=True))
        ahead = not lengths  # a prefetch knows one sequence alone
        self.px = ready(m.prepare(self.room, prefetch=True)) if ahead else None
        self.pxf = ready(m.prepare(self.room, prefetch=True, flags=True)) if ahead else None
        self.op, self.orr = (ready(x) for x in m.original())
        self.side = torch.cuda.Stream(priority=-1)

    def both(self, p, r, delay=0):
        """At once: `recurrence` on a stream of higher priority. `delay`: cycles that `prepare` starts later."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            r.run()
        if delay:
            torch.cuda._sleep(delay)
        p.run()
        main.wait_stream(self.side)

    def runs(self):
        p2, p4, pr = self.p
        room = {} if self.room == 2 * SMS else {f"co-resident, prepare of {self.room} CTAs": lambda: self.both(pr, self.r)}
        return {
            "original, both": lambda: (self.op.run(), self.orr.run()),
            "CO-RESIDENT, 264 CTAs": lambda: self.both(p2, self.r),
            "co-resident, prepare 3 us later": lambda: self.both(p2, self.r, 5000),
            **room,
            **({"co-resident, prefetch": lambda: self.both(self.px, self.r)} if self.px else {}),
            "co-resident with flags": lambda: self.both(self.pf, self.rf),
            **({"co-resident with flags, prefetch": lambda: self.both(self.pxf, self.rf)} if self.px else {}),
            "same stream, 528 CTAs then": lambda: (p4.run(), self.r.run()),
            "original prepare": self.op.run,
            "prepare, 264 CTAs": p2.run,
            "prepare, 528 CTAs": p4.run,
            "original recurrence": self.orr.run,
            "recurrence, half stages": self.r.run,
        }

    def right(self):
        """Whether results are the original's, of the spike's kernels one after the other and with flags at once."""
        m = self.m
        found = []
        self.op.run(), self.orr.run()
        want = m.o.double(), m.state.double()
        for name, run in {"in order": lambda: (self.p[0].run(), self.r.run()), "flags": lambda: self.both(self.pf, self.rf)}.items():
            for x in (m.o, m.state, m.workspace["tiles"], m.workspace["decay"], m.flags):
                x.zero_()
            run()
            torch.cuda.synchronize()
            errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip((m.o, m.state), want)]
            found.append(f"{name}: o {errors[0]:.0e}, state {errors[1]:.0e}")
        return "; ".join(found) + f"; flags left {int(m.flags.abs().sum())}"

    def where(self, replay, scans, producers):
        """From records [SM, start, end] of the CTAs of a replay."""
        m = self.m
        m.prepared.zero_(), m.scanned.zero_()
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        p, r = m.prepared[:producers].cpu().tolist(), m.scanned[:scans].cpu().tolist()
        t0 = min(x[1] for x in p + r)
        on = {}
        for kind, rows in (("p", p), ("r", r)):
            for sm, start, end, _ in rows:
                on.setdefault(sm, []).append((kind, start - t0, end - t0))
        shared = 0
        for ctas in on.values():
            scan = [x for x in ctas if x[0] == "r"]
            beside = [x for x in ctas if x[0] == "p" and scan and x[1] < scan[0][2] * 0.5 and x[2] > scan[0][2] * 0.5]
            shared += len(scan) == 1 and len(beside) == 2
        counts = {}
        for ctas in on.values():
            kinds = "".join(sorted(x[0] for x in ctas))
            counts[kinds] = counts.get(kinds, 0) + 1
        pairs = sum(r[i][0] // 2 == r[i + 1][0] // 2 for i in range(0, len(r) - 1, 2))
        us = lambda rows, i, f: f"{(f(x[i] for x in rows) - t0) / 1e3:.1f}"
        self.shared = shared
        return (f"one recurrence and two prepare in the middle of its time on {shared} of {scans} SMs; CTAs on SMs {counts}; slices on a TPC "
                f"{pairs} of {len(r) // 2}\n{'':24}recurrence starts {us(r, 1, min)}..{us(r, 1, max)}, ends {us(r, 2, min)}..{us(r, 2, max)} us; "
                f"prepare starts {us(p, 1, min)}..{us(p, 1, max)}, ends {us(p, 2, min)}..{us(p, 2, max)} us")


def capture(run):
    return timing.many_in_a_graph(run, 1e9)[0]


def measure(name, case, timer):
    row(f"{name}: {case.right()}")
    runs = case.runs()
    case.where(lambda: case.both(case.p[0], case.r), case.scans, 264)
    if case.shared == 0:
        row(f"{name}: NOT CO-RESIDENT; left out what would wait for flags")
        runs = {n: f for n, f in runs.items() if "flags" not in n}
    once = {n: capture(f) for n, f in runs.items()}
    alone = timing.cold(once, timer, 15)
    many = {n: timing.many_in_a_graph(f, alone[n]) for n, f in runs.items()}
    loops = timing.sustained({n: g for n, (g, _) in many.items()}, timer)
    for n in runs:
        row(f"{name:13} {n:38} graph, cold {alone[n] * 1e3:7.1f} us   sustained {loops[n] / many[n][1] * 1e3:7.1f} us")
    for n, at in {"CO-RESIDENT, 264 CTAs": 264, "co-resident, prepare 3 us later": 264, "co-resident with flags": case.room}.items():
        if n in once:
            row(f"{name:13} {n}: {case.where(once[n], case.scans, at)}")
    # eager: the host is ahead behind a sleep
    taken = []
    for _ in range(5):
        torch.cuda._sleep(2_000_000)
        taken.append(timer.span(lambda: case.both(case.p[0], case.r), 1))
    row(f"{name:13} two streams without a graph, warm: {sorted(taken)[2] * 1e3:.1f} us")


def chain(timer):
    """(c): a chunk of 16 CTAs alone."""
    m = M.Launches(M.call(8192, 8))
    runs = {"original": m.original()[1], "half stages": m.recurrence(), "half stages, v late": m.recurrence(early=False)}
    many = {n: timing.many_in_a_graph(ready(x).run, 0.2) for n, x in runs.items()}
    loops = timing.sustained({n: g for n, (g, _) in many.items()}, timer)
    for n in runs:
        us = loops[n] / many[n][1] * 1e3
        row(f"(c) T8192 H8 recurrence alone, {n:20} {us:7.1f} us, {us / 128:.3f} us a chunk (wanted <= 1.35)")


def main():
    faulthandler.dump_traceback_later(150, exit=True)
    jobs = compile_all()
    torch.set_grad_enabled(False)
    device = torch.device("cuda")
    timer = timing.Timer(device)
    timing.TURN_MS, timing.WARMUP_MS = 25.0, 25.0
    say(torch.__version__, triton.__version__, torch.cuda.get_device_name())
    for name, job in jobs:
        log = job.communicate()[0]
        if job.returncode:
            say(name, "did not compile:", log[-1500:])
    say("compiled")
    assert torch.cuda.get_device_properties(device).multi_processor_count == SMS
    chain(timer)
    for name, shape in CASES.items():
        if "--short" not in sys.argv or name == "T8192 H64":
            case = None
            torch.cuda.empty_cache()
            case = Case(*shape)
            measure(name, case, timer)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; GO: T8192 H64 CO-RESIDENT <= 360 us")
    for kernel, registers, spills, threads, shared, most in KERNELS:
        print(f"{kernel}: {registers} registers, {spills} spilled words, {threads} threads, {shared} B shared, {most} CTAs an SM alone")
    print(*ROWS, sep="\n")


if "--compile" in sys.argv:
    compile_one(sys.argv[sys.argv.index("--compile") + 1])
else:
    main()
