"""Training steps of several trees on one H200, in turns. python gpu_train.py base=SRC NAME=SRC [...]

Each tree is a process; they take turns row by row. Errors are those of gradients
against float64 autograd of the chunked reference, 4 heads of each row; `same` says whose gradients have base's bits.
Times in us: a step (forward and backward, sustained), kernels by the profiler. Memory: peak over what is held before a step."""
import hashlib, json, os, statistics, subprocess, sys, tempfile, time

ROWS = {"T8192 H32": (1, 8192, 32), "T8192 H64": (1, 8192, 64), "B4 T2048 H32": (4, 2048, 32)}
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
SHOWN = ("prepare", "recurrence", "reverse", "wy", "intra")
HEADS = 4
COMPILERS = 8


def make(row, grad=True):
    import torch
    B, T, H = ROWS[row]
    gen = torch.Generator("cuda").manual_seed(7)
    new = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    uniform = lambda *s: torch.rand(*s, generator=gen, device="cuda")
    call = {n: new(B, T, H, 128).bfloat16() for n in ("q", "k", "v", "g")} | {"beta": new(B, T, H).bfloat16()}
    # some channels forget within a token, others remember hundreds: as the benchmark's rows
    call |= {"A_log": 0.5 * new(H), "dt_bias": (uniform(H, 128) * 9 - 8).flatten()}
    grad_o = new(B, T, H, 128).bfloat16()
    if grad:
        for n in LEAVES:
            call[n].requires_grad_()
    call |= dict(use_gate_in_kernel=True, lower_bound=-5.0, safe_gate=True)
    call |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    return call, grad_o


def part(x, name, head):
    if name == "A_log":
        return x[head : head + 1]
    return x.view(-1, 128)[head] if name == "dt_bias" else x[:, :, head : head + 1]


def launches(call):
    from dataclasses import replace
    import torch
    from flashdelta.backends import build_hopper
    from flashdelta.ops.chunk import chunk_kda
    from flashdelta.problem.problem import BACKWARD
    from flashdelta.runtime.call import check
    from flashdelta.tools.compile import only_launches
    problem, t = check(chunk_kda, **call)
    do = torch.empty_like(call["v"])
    back = replace(problem, operation=problem.operation + BACKWARD), replace(t, do=do, dht=do.new_zeros(0))
    return [x for plan in (build_hopper(problem, t, 90), build_hopper(*back, 90)) for x in only_launches(plan)]


def compiler(i):
    import torch
    with torch.enable_grad():
        for x in launches(make("T8192 H32")[0])[i::COMPILERS]:
            x.compile()


def worker(way):
    import torch, flashdelta as fd
    calls = {}

    def given(row):
        if row not in calls:
            calls.clear()
            torch.cuda.empty_cache()
            calls[row] = make(row)
        return calls[row]

    def step(call, grad_o):
        return torch.autograd.grad(fd.chunk_kda(**call, backend="hopper")[0], [call[n] for n in LEAVES], grad_o)

    def heads_of(row):
        H = ROWS[row][2]
        return [i * (H - 1) // (HEADS - 1) for i in range(HEADS)]

    def truth(row, path):
        call, grad_o = given(row)
        found = {n: [] for n in LEAVES}
        for head in heads_of(row):
            leaves = {n: part(call[n].detach(), n, head).double().contiguous().requires_grad_() for n in LEAVES}
            o = fd.chunk_kda(**{**call, **leaves, "backend": "reference"})[0]
            for n, x in zip(LEAVES, torch.autograd.grad(o, list(leaves.values()), part(grad_o, "v", head).double())):
                found[n].append(x.flatten())
        torch.save({n: torch.cat(x) for n, x in found.items()}, path)
        return {}

    def errors(row, path):
        want, found = torch.load(path), step(*given(row))
        bits = {n: hashlib.sha1(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for n, x in zip(LEAVES, found)}
        ours = {n: torch.cat([part(x, n, head).flatten().double() for head in heads_of(row)]) for n, x in zip(LEAVES, found)}
        again = step(*given(row))
        return {
            "errors": {n: float((ours[n] - want[n]).norm() / want[n].norm()) for n in LEAVES},
            "bits": bits,
            "repeats": all(torch.equal(x, y) for x, y in zip(found, again)),
        }

    def memory(row):
        call = given(row)
        step(*call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(*call)
        torch.cuda.synchronize()
        return {"peak": torch.cuda.max_memory_allocated() - before}

    def times(row, us):
        call = given(row)
        for _ in range(5):
            step(*call)
        n = int(us // (1600 * ROWS[row][2] / 32))
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n):
            step(*call)
        b.record()
        b.synchronize()
        return {"step": a.elapsed_time(b) * 1e3 / n}

    def kernels(row):
        call = given(row)
        step(*call)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(20):
                step(*call)
            torch.cuda.synchronize()
        found = {}
        for event in profile.key_averages():
            us = getattr(event, "device_time_total", None) or getattr(event, "cuda_time_total", 0)
            found[event.key.removesuffix("_kernel")] = us / 20
        return {x: found.get(x, 0.0) for x in SHOWN}

    does = dict(truth=truth, errors=errors, memory=memory, times=times, kernels=kernels)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "triton": __import__("triton").__version__}), flush=True)
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        try:
            with torch.enable_grad():
                found = does[kind](*arguments)
        except Exception as error:  # noqa: BLE001
            found = {"failed": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(found), flush=True)


def main():
    began = time.time()
    ways = {name: os.path.abspath(src) for name, src in (x.split("=") for x in sys.argv[1:])}
    assert next(iter(ways)) == "base" and all(map(os.path.isdir, ways.values())), __doc__
    me = os.path.abspath(__file__)

    def start(way, *what, **pipes):
        env = {**os.environ, "PYTHONPATH": ways[way], "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, me, *map(str, what)], env=env, text=True, **pipes)

    helpers = [start(way, "compile", i) for way in ways for i in range(COMPILERS)]
    workers = {way: start(way, "worker", way, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for way in ways}

    def ask(way, *what):
        send(way, *what)
        return read(way)

    def send(way, *what):
        workers[way].stdin.write(json.dumps(what) + "\n")
        workers[way].stdin.flush()

    def read(way):
        line = workers[way].stdout.readline()
        return json.loads(line) if line else {"failed": "died"}

    hello = [read(way) for way in ways][0]
    lines = [f"{hello.get('gpu')}, Triton {hello.get('triton')}; " + ", ".join(f"{n} = {p}" for n, p in ways.items())]
    folder = tempfile.mkdtemp(prefix="train-")
    paths = {row: os.path.join(folder, f"{i}.pt") for i, row in enumerate(ROWS)}
    for row in ROWS:  # while kernels compile
        failed = ask("base", "truth", row, paths[row])
        if failed:
            lines.append(f"truth of {row}: {failed}")
    for x in helpers:
        x.wait()
    print(f"compiled after {time.time() - began:.0f} s", flush=True)
    lines += ["", f"{'errors, 1e-3':22} " + " ".join(f"{n:>8}" for n in LEAVES) + "  repeats, bits as base"]
    for row in ROWS:
        found = {way: ask(way, "errors", row, paths[row]) for way in ways}
        for way, x in found.items():
            if "failed" in x:
                lines.append(f"{row} {way}: {x['failed']}")
                continue
            same = [n for n in LEAVES if x["bits"][n] == found["base"].get("bits", {}).get(n)]
            cells = " ".join(f"{1e3 * x['errors'][n]:8.3f}" for n in LEAVES)
            lines.append(f"{row + ' ' + way:22} {cells}  {x['repeats']}, {' '.join(same)}")
    print(*lines, sep="\n", flush=True)
    table = ["", f"{'us (median of turns)':22} {'step':>8} " + " ".join(f"{x:>10}" for x in SHOWN) + f" {'peak MB':>8}"]
    for row in ROWS:
        steps, parts, peak = ({way: [] for way in ways} for _ in range(3))
        for turn in range(3):
            for way in ways if turn % 2 == 0 else reversed(ways):
                steps[way].append(ask(way, "times", row, 250e3))
                parts[way].append(ask(way, "kernels", row) if turn < 2 else {})
                if turn == 0:
                    peak[way] = ask(way, "memory", row)
        for way in ways:
            bad = [x["failed"] for x in (*steps[way], *parts[way], peak[way]) if "failed" in x]
            if bad:
                table.append(f"{row + ' ' + way:22} FAILED {bad[0]}")
                continue
            us = statistics.median(x["step"] for x in steps[way])
            cells = " ".join(f"{min(x[n] for x in parts[way] if x):10.1f}" for n in SHOWN)
            table.append(f"{row + ' ' + way:22} {us:8.1f} {cells} {peak[way]['peak'] / 1e6:8.1f}")
    for x in workers.values():
        x.stdin.close()
    print(*table, f"{time.time() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compiler(int(sys.argv[2]))
    elif sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    else:
        main()
