"""Shared by the scripts of this folder: trees beside each other, one worker process each, that take turns.

A tree is `<this folder>/<name>` with `src`, `tests`, `benchmarks` (pack.sh makes them). DRY=1: on a CPU, interpreted, tiny shapes.
"""
import json, os, statistics, subprocess, sys, time, traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRY = os.environ.get("DRY") == "1"
BEGAN = time.time()


def say(*x):
    print(f"[{time.time() - BEGAN:5.1f} s]", *x, flush=True)


def require(**trees):
    """`name=[(file, text that it has), ...]`. Ends with status 3 and a list of what is missing."""
    missing = []
    for name, marks in trees.items():
        for file, text in marks:
            path = HERE / name / file
            if not path.is_file():
                missing.append(f"{path}: no such file")
            elif text not in path.read_text():
                missing.append(f"{path}: lacks {text!r}")
    if missing:
        print("SELF-CHECK FAILED", *missing, sep="\n   ", flush=True)
        sys.exit(3)
    if not DRY:
        import torch
        if not torch.cuda.is_available():
            print("SELF-CHECK FAILED: no GPU", flush=True)
            sys.exit(3)
    say("files are there:", *trees, *([] if DRY else [torch.cuda.get_device_name(), torch.__version__]))


def enter(way):
    """Makes this process a worker of a tree; returns torch and flashdelta."""
    tree = HERE / way
    sys.path[:0] = [str(tree / "src"), str(tree)]
    import torch
    import flashdelta as fd
    assert Path(fd.__file__).is_relative_to(tree), fd.__file__
    torch.set_grad_enabled(False)
    if DRY:
        torch.set_num_threads(1)
        from tests.gluon.interpreter import hopper_on_cpu
        global _patched
        _patched = hopper_on_cpu()
        _patched.__enter__()
    return torch, fd


def device():
    return "cpu" if DRY else "cuda"


def span(torch, f, count):
    """Microseconds of a call, `count` back to back."""
    if DRY:
        f()
        return 1.0
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record()
    for _ in range(count):
        f()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) * 1e3 / count


def captured(torch, f):
    """A replay of `f`, and what it writes."""
    if DRY:
        return (lambda: None), f()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, out


_flush = None


def clock(torch, replay, ms=60.0, colds=15):
    """Sustained and cold (L2 flushed), in us."""
    global _flush
    if _flush is None:
        _flush = torch.empty(1 if DRY else 2**28, dtype=torch.int8, device=device())
    cold = []
    for _ in range(1 if DRY else colds):
        _flush.zero_()
        cold.append(span(torch, replay, 1))
    cold = statistics.median(cold)
    count = max(10, int(ms * 1e3 / max(cold, 5.0)))
    span(torch, replay, count // 2)
    return {"sustained": span(torch, replay, count), "cold": cold}


def kernels(torch, replay, count=20):
    """Median us of each kernel of a replay."""
    if DRY:
        return {}
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(count):
            replay()
        torch.cuda.synchronize()
    found = {}
    for e in p.events():
        if "kernel" in e.name and e.device_time > 0:
            found.setdefault(e.name.removesuffix("_kernel"), []).append(e.device_time)
    return {n: round(statistics.median(x), 1) for n, x in found.items()}


def norm_error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def serve(answers):
    """A worker's loop: `answers[kind](*what)` for each line."""
    print("@" + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kind, *what = json.loads(line)
        try:
            found = answers[kind](*what)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        print("@" + json.dumps(found), flush=True)


class Ways:
    """Worker processes `python SCRIPT --worker WAY`, by way."""

    def __init__(self, script, ways, needed=True):
        start = lambda way: subprocess.Popen([sys.executable, "-u", script, "--worker", way], stdin=-1, stdout=-1, text=True)
        self.workers = {way: start(way) for way in ways}
        for way in list(self.workers):
            found = self.read(way)
            if "failed" in found:
                print(f"WORKER {way} DID NOT START", flush=True)
                del self.workers[way]
        if needed and not self.workers:
            sys.exit(4)

    def read(self, way):
        for line in self.workers[way].stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
            print(f"({way})", line.rstrip()[:300], flush=True)
        return {"failed": "worker died"}

    def send(self, way, *what):
        try:
            self.workers[way].stdin.write(json.dumps(what) + "\n")
            self.workers[way].stdin.flush()
        except OSError:
            pass

    def all(self, *what):
        """All at once: compiles."""
        for way in self.workers:
            self.send(way, *what)
        return {way: self.read(way) for way in self.workers}

    def each(self, *what, backwards=False):
        """One after the other: times."""
        found = {}
        for way in list(self.workers)[:: -1 if backwards else 1]:
            self.send(way, *what)
            found[way] = self.read(way)
        return found

    def close(self):
        for p in self.workers.values():
            p.kill()


def best(kept, found):
    """Keeps the smallest of each number."""
    for way, row in found.items():
        mine = kept.setdefault(way, {})
        for name, x in row.items():
            mine[name] = min(mine[name], x) if isinstance(x, float) and name in mine else x
    return kept


def warm(script, ways, names, limit):
    """Compiles in a process of its own for each tree and name; their cache is everybody's."""
    if DRY:
        names = names[:1]
    start = lambda way, name: subprocess.Popen([sys.executable, script, "--warm", way, name], stdout=subprocess.DEVNULL,
                                               stderr=subprocess.PIPE, text=True)
    started = [start(way, name) for name in names for way in ways]
    for p in started:
        try:
            _, text = p.communicate(timeout=max(limit - (time.time() - BEGAN), 1))
            if p.returncode:
                print("WARMING FAILED", *p.args[3:], text[-800:], sep=" ", flush=True)
        except subprocess.TimeoutExpired:
            p.kill()
            print("warming took too long:", *p.args[3:], flush=True)
    say("compiled")


def main(script, answers_of, run):
    """`--worker WAY`, `--warm WAY NAME`, or the script itself."""
    if "--worker" in sys.argv:
        return serve(answers_of(sys.argv[-1]))
    if "--warm" in sys.argv:
        return answers_of(sys.argv[-2])["warm"](sys.argv[-1])
    return run()
