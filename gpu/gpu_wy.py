"""`wy` of several trees in turns on one GPU: bits, errors, `wy` alone (profiled inside steps and as operator), training steps.

    python gpu_wy.py [SECONDS] BASE_SRC NAME=SRC ...      e.g. gpu_wy.py 60 .carry/base/src A=src B=.carry/t4-b/src C=.carry/t4-c/src

Each tree is a process of its own (one Triton cache for all: what did not change is compiled once). The table is printed last."""
import dataclasses, json, os, statistics, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor

# name: B, T or lengths, H, HV, gate
CHECKS = {
    "B2 T300 H8 HV16": (2, 300, 8, 16, "lower_bound"),
    "B1 T8192 H8": (1, 8192, 8, 8, "lower_bound"),
    "B3 T1000 H16": (3, 1000, 16, 16, "lower_bound"),
    "packed H2 HV4": (1, (1, 63, 64, 65, 0, 130, 500), 2, 4, "lower_bound"),
    "softplus B2 T200 H24": (2, 200, 24, 24, "softplus"),
}
STEPS = {
    "T8192 H32": (1, 8192, 32, 32, "lower_bound"),
    "T8192 H64": (1, 8192, 64, 64, "lower_bound"),
    "B4 T2048 H32": (4, 2048, 32, 32, "lower_bound"),
    "T8192 H32 softplus": (1, 8192, 32, 32, "softplus"),
    "packed 8 x 1024 H32": (1, (1024,) * 8, 32, 32, "lower_bound"),
    "T512 H32": (1, 512, 32, 32, "lower_bound"),
}
OPERATORS = {"operator T8192 H32": (8192, 32), "operator T512 H32": (512, 32)}
FIRST = ("T8192 H32", "T8192 H64", "operator T8192 H32")
HOSTS = {"host, T64 H4": (1, 64, 4, 4, "lower_bound"), "host, T512 H32": (1, 512, 32, 32, "lower_bound")}
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def make(shape, state=False):
    import torch
    B, T, H, HV, gate = shape
    lengths = T if isinstance(T, tuple) else None
    T, N = (sum(T), len(T)) if lengths else (T, B)
    gen = torch.Generator("cuda").manual_seed(7)
    new = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    call = dict(q=new(B, T, H, 128).bfloat16(), k=new(B, T, H, 128).bfloat16(), v=new(B, T, HV, 128).bfloat16())
    bias = new(HV * 128) * 2 - (4 if gate == "lower_bound" else 3)
    call |= dict(g=new(B, T, HV, 128).bfloat16(), beta=new(B, T, HV).bfloat16(), A_log=new(HV) * 0.5, dt_bias=bias)
    call |= dict(gate=gate, lower_bound=-5.0 if gate == "lower_bound" else None, use_qk_l2norm_in_kernel=True)
    call |= dict(use_beta_sigmoid_in_kernel=True, safe_gate=gate == "lower_bound")
    if lengths:
        call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    if state:
        call |= dict(initial_state=new(N, HV, 128, 128), output_final_state=True)
    for name in LEAVES:
        if name in call:
            call[name].requires_grad_()
    return call, new(B, T, HV, 128).bfloat16()


def make_operator(T, H):
    import torch
    gen = torch.Generator("cuda").manual_seed(7)
    new = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1).bfloat16()
    chunks = -(-T // 64)
    A = (0.05 * new(chunks, H, 64, 64)).tril(-1) + torch.eye(64, device="cuda")
    A = A.transpose(1, 2).reshape(1, chunks * 64, H, 64)[:, :T].contiguous().bfloat16()
    g = -0.1 * torch.rand(1, T, H, 128, generator=gen, device="cuda").view(1, chunks, -1, H, 128).cumsum(2).view(1, T, H, 128)
    call = dict(q=unit(new(1, T, H, 128)), k=unit(new(1, T, H, 128)), g=g, beta=torch.rand(1, T, H, generator=gen, device="cuda"))
    call |= {x: new(1, T, H, 128).bfloat16() for x in ("v", "v_new", "do", "dv")} | {"A": A}
    return call | {x: new(1, chunks, H, 128, 128).bfloat16() for x in ("h", "dh")} | {"chunk_size": 64, "use_exp2": True}


def worker(way):
    import torch, flashdelta as fd
    from torch.profiler import ProfilerActivity, profile

    if not hasattr(fd, "kernels"):
        import flashdelta.kernels  # noqa: F401

    def step(call, grad_o):
        leaves = [call[x] for x in LEAVES if x in call]
        found = fd.chunk_kda(**call, backend="hopper")
        outs = [x for x in found if x is not None]
        grads = [grad_o, *(torch.ones_like(x) for x in outs[1:])]
        return torch.autograd.grad(outs, leaves, grads)

    def launches(shape, state):
        from flashdelta.kernels.hopper.build import build
        from flashdelta.problem.problem import BACKWARD
        from flashdelta.program.launch import compiling_for
        from flashdelta.runtime.call import check
        call, _ = make(shape, state)
        problem, t = check(fd.chunk_kda, **call)
        given = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in problem.results().items()}
        back = replaced(problem, operation=problem.operation + BACKWARD)
        t = dataclasses.replace(t, **{f.name: x.detach().to("meta") for f in dataclasses.fields(t)
                                      if isinstance(x := getattr(t, f.name), torch.Tensor) and x.is_cuda})
        tb = dataclasses.replace(t, do=given["o"], dht=given.get("final_state", given["o"].new_zeros(0)))
        with compiling_for(torch.device("cuda", 0)):
            return [x for x in (*build(problem, t).launches, *build(back, tb).launches) if hasattr(x, "compile")]

    def of_operator(T, H):
        from flashdelta.kernels.hopper.build import build
        from flashdelta.program.launch import compiling_for
        from flashdelta.runtime.call import check
        problem, t = check(fd.kernels.chunk_bwd_wy_dqkg, **make_operator(T, H))
        with compiling_for(torch.device("cuda", 0)):
            return [x for x in build(problem, t).launches if hasattr(x, "compile")]

    replaced = dataclasses.replace

    def compile_all():
        """In threads. What only the base compiles the others find in the cache."""
        found = {}
        try:
            for shape, state in [(x, True) for x in CHECKS.values()] + [(x, False) for x in STEPS.values()]:
                for x in launches(shape, state):
                    if way == "base" or x.kernel.__name__ == "wy_kernel":
                        found.setdefault(x._key(0).__repr__(), x)
            for x in of_operator(8192, 32):
                found.setdefault(x._key(0).__repr__(), x)
            def one(x):
                torch.cuda.set_device(0)
                x.compile()
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(one, found.values()))
        except Exception as error:  # noqa: BLE001  they compile at the first call
            return f"{type(error).__name__}: {error}"[:200]
        kernels(lambda: torch.zeros(8, device="cuda"), 1)  # the profiler's first use takes seconds
        return len(found)

    def check(name):
        call, grad_o = make(CHECKS[name], True)
        found = step(call, grad_o)
        torch.cuda.synchronize()
        names = [x for x in LEAVES if x in call]
        path = os.path.join(os.environ["T4_TMP"], name.replace(" ", "_"))
        if way == "base":
            torch.save(found, path)
            want = None
            if call["q"].shape[1] <= 300:
                wide = {n: x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                        for n, x in call.items()}
                o, s = fd.chunk_kda(**wide, backend="reference")
                want = torch.autograd.grad([o, s], [wide[x] for x in names], [grad_o.double(), torch.ones_like(s)])
            torch.save(want, path + ".want")
            return {}
        base, want = torch.load(path), torch.load(path + ".want")
        differ = {n: float((a.double() - b.double()).norm() / b.double().norm()) for n, a, b in zip(names, found, base)
                  if not torch.equal(a, b)}
        error = None
        if want is not None:
            error = [max(float((a.double() - w).norm() / w.norm()) for a, w in zip(x, want)) for x in (base, found)]
        return {"differ": differ, "error": error}

    def clock(f, n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / n

    def kernels(f, n):
        """Median us of a call's kernels by name, summed over launches of one call."""
        f(), f()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(n):
                f()
            torch.cuda.synchronize()
        path, us = os.path.join(os.environ["T4_TMP"], f"{way}.json"), {}
        found.export_chrome_trace(path)
        with open(path) as trace:
            for e in json.load(trace)["traceEvents"]:
                if e.get("cat") == "kernel":
                    us.setdefault(e["name"].split("(")[0].split("<")[0][-40:], []).append(e["dur"])
        return {k: statistics.median(x) * len(x) / n for k, x in us.items()}

    state = {}

    def get(name):
        if name not in state:
            state.clear()
            torch.cuda.empty_cache()
            if name in OPERATORS:
                call = make_operator(*OPERATORS[name])
                state[name] = lambda: fd.kernels.chunk_bwd_wy_dqkg(**call, backend="hopper")
            else:
                call, grad_o = make((STEPS | HOSTS)[name])
                state[name] = lambda: step(call, grad_o)
        return state[name]

    def times(name):
        f = get(name)
        if name in HOSTS:
            f(), f()
            best = 1e9
            for _ in range(6):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(30):
                    f()
                best = min(best, (time.perf_counter() - began) / 30 * 1e6)
            return {"us": best}
        us = clock(f, 3)
        n = max(int(50e3 / us), 5)
        clock(f, n // 2)
        return {"us": clock(f, n)}

    def profiled(name):
        f = get(name)
        return {"kernels": kernels(f, max(min(int(15e3 / clock(f, 3)), 30), 5))}

    import triton
    print(json.dumps({"ready": way, "triton": triton.__version__, "gpu": torch.cuda.get_device_name(), "compiled": compile_all()}), flush=True)
    for line in sys.stdin:
        kind, name = json.loads(line)
        try:
            found = {"check": check, "time": times, "profile": profiled}[kind](name)
        except Exception as error:  # noqa: BLE001
            import traceback
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found), flush=True)


def main():
    arguments = sys.argv[1:]
    limit = float(arguments.pop(0)) if arguments and arguments[0].replace(".", "").isdigit() else 60.0
    ways = dict(x.split("=") if "=" in x else ("base", x) for x in arguments)
    assert next(iter(ways)) == "base" and len(ways) > 1, __doc__
    began, started = time.time(), {}
    folder = tempfile.mkdtemp()
    for way, src in ways.items():
        assert os.path.isdir(src), src
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.abspath(src), os.environ.get("PYTHONPATH", "")]), "T4_TMP": folder}
        started[way] = subprocess.Popen([sys.executable, os.path.abspath(__file__), "worker", way], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(way, *what):
        started[way].stdin.write(json.dumps(what) + "\n")
        started[way].stdin.flush()
        line = started[way].stdout.readline()
        return json.loads(line) if line else {"failed": "died"}

    compiled = []
    for way in started:
        hello = json.loads(started[way].stdout.readline())
        compiled.append(f"{way}: {hello['compiled']}")
    lines = [f"{hello['gpu']}, Triton {hello['triton']}; kernels compiled first: {', '.join(compiled)}; ready after {time.time() - began:.0f} s"]
    print(lines[0], flush=True)
    others = [x for x in started if x != "base"]
    for name in CHECKS:
        failed = ask("base", "check", name).get("failed")
        cells = []
        for way in others if failed is None else []:
            x = ask(way, "check", name)
            bits = x.get("failed") or ("bits of base" if not x["differ"] else " ".join(f"{n} {e:.0e}" for n, e in x["differ"].items()))
            error = x.get("error")
            cells.append(f"{way}: {bits}" + (f" (worst error {error[0]:.2e} base, {error[1]:.2e})" if error else ""))
        lines.append(f"{name:22} " + (f"base FAILED {failed}" if failed else "; ".join(cells)))
        print(lines[-1], flush=True)
    rows = [f"{'us':34} " + " ".join(f"{way:>9}" for way in started)]
    for name in [*FIRST, *HOSTS, *[x for x in (*STEPS, *OPERATORS) if x not in FIRST]]:
        if time.time() - began > limit:
            rows.append("(out of time)")
            break
        samples = {way: [] for way in started}
        for turn in range(3 if name in FIRST else 2):
            for way in list(started) if turn % 2 == 0 else reversed(list(started)):
                samples[way].append(ask(way, "time", name))
                if name not in HOSTS and turn < (2 if name in FIRST else 1):
                    samples[way][-1] |= ask(way, "profile", name)
        bad = {way: x["failed"] for way, some in samples.items() for x in some if "failed" in x}
        if bad:
            rows.append(f"{name:34} FAILED {bad}")
            continue
        best = lambda way, key: min(x["kernels"].get(key, 0.0) for x in samples[way] if "kernels" in x)
        cell = lambda label, of: rows.append(f"{label:34} " + " ".join(f"{of(way):9.1f}" for way in started))
        at = len(rows)
        cell(name if name in OPERATORS else f"step {name}",
             lambda way: statistics.median(x["us"] for x in samples[way]))
        if name not in HOSTS:
            cell("    wy_kernel", lambda way: best(way, "wy_kernel"))
        if name == "T8192 H32":
            for kernel in sorted({k for x in samples["base"] for k in x.get("kernels", {})} - {"wy_kernel"}):
                if best("base", kernel) > 20:
                    cell(f"    {kernel[:28]}", lambda way, kernel=kernel: best(way, kernel))
        print(*rows[at:], sep="\n", flush=True)
    for x in started.values():
        x.stdin.close()
    print("", *lines, "", *rows, f"{time.time() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    worker(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[1] == "worker" else main()
