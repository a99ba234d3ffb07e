"""The portable backend's `prepare_mma` beside the base, on an H200, from the repository's root. base in .carry/base2/src, new in
src; two workers take turns. Prints errors, then a table (us): cold and sustained by graph, and each kernel. --limit SECONDS."""
import argparse, json, os, statistics, subprocess, sys, time
from pathlib import Path

ROOT = Path.cwd()
SHAPES = {"T8192 H64": ((8192,), 64), "T8192 H32": ((8192,), 32), "T8192 H8": ((8192,), 8), "8 x 1024 H64": ((1024,) * 8, 64)}
CHECKS = {  # lengths, H, HV, options
    "K128": ((300,), 2, 2, {}), "K64 V64": ((300,), 2, 2, {"K": 64, "V": 64}), "V64": ((130,), 2, 2, {"V": 64}),
    "packed GVA": ((70, 0, 33, 1, 64, 200), 2, 4, {}), "no norm": ((130,), 2, 2, {"norm": False}),
    "slow gates": ((1024,), 2, 2, {"shift": -6.0}), "at the bound": ((300,), 2, 2, {"shift": 30.0}),
    "same keys": ((300,), 2, 2, {"same": True}),
}


def make(lengths, H, HV, o, fixed=False):
    import torch
    s = torch.Generator("cuda").manual_seed(3)
    n = lambda *x: torch.randn(*x, device="cuda", generator=s)
    T, K, V = sum(lengths), o.get("K", 128), o.get("V", 128)
    call = dict(q=n(1, T, H, K), k=n(1, T, H, K), v=n(1, T, HV, V), g=n(1, T, HV, K), beta=n(1, T, HV))
    if o.get("same"):
        call["k"] = call["k"][:, :1].expand(1, T, H, K).contiguous()
    if o.get("norm") is False:
        call["k"] = call["k"] / call["k"].norm(dim=-1, keepdim=True)
    call = {name: x.bfloat16() for name, x in call.items()}
    call |= dict(A_log=n(HV) * 0.3, dt_bias=n(HV * K) + o.get("shift", -2.0), gate="lower_bound", lower_bound=-5.0, scale=K**-0.5,
                 use_gate_in_kernel=True, use_qk_l2norm_in_kernel=o.get("norm", True), use_beta_sigmoid_in_kernel=True,
                 output_final_state=True)
    if len(lengths) > 1:
        call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return call


def worker(way):
    import torch, flashdelta as fd
    calls, graphs = {}, {}
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    run = lambda call: fd.chunk_kda(**call, backend="triton")

    def span(f, count):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(count):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / count

    def check(name):
        lengths, H, HV, o = CHECKS[name]
        call = make(lengths, H, HV, o)
        found = run(call)
        again = run(call)
        wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
        want = fd.chunk_kda(**wide, backend="reference")
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, want)]
        return errors + [all(torch.equal(a, b) for a, b in zip(found, again))]

    def kernels(name):
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(30):
                graphs[name].replay()
            torch.cuda.synchronize()
        found = {}
        for e in p.events():
            if "kernel" in e.name and e.device_time > 0:
                found.setdefault(e.name, []).append(e.device_time)
        return {n: statistics.median(x[len(x) // 2:]) for n, x in found.items()}

    def times(name):
        if name not in graphs:
            call = calls[name] = make(*SHAPES[name], SHAPES[name][1], {})
            for _ in range(3):
                run(call)
            torch.cuda.synchronize()
            g = graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                run(call)
        g = graphs[name]
        cold = []
        for _ in range(12):
            flush.zero_()
            cold.append(span(g.replay, 1))
        count = max(10, int(6e4 / statistics.median(cold)))
        span(g.replay, count)
        return {"cold": statistics.median(cold), "sustained": span(g.replay, count)}

    for line in sys.stdin:
        kind, name = json.loads(line)
        try:
            answer = {"check": check, "times": times, "kernels": kernels}[kind](name)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print("@" + json.dumps(answer), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--limit", type=float, default=60.0)
    a = parser.parse_args()
    if a.worker:
        return worker(a.worker)
    start = time.time()
    trees = {"base": ROOT / ".carry/base2/src", "new": ROOT / "src"}
    procs = {
        way: subprocess.Popen([sys.executable, __file__, "--worker", way], stdin=-1, stdout=-1, text=True,
                              env=os.environ | {"PYTHONPATH": str(tree)})
        for way, tree in trees.items()
    }

    def send(way, *what):
        procs[way].stdin.write(json.dumps(what) + "\n")
        procs[way].stdin.flush()

    def answer(way):
        for line in procs[way].stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        return {"error": "died"}

    def ask(way, *what):
        send(way, *what)
        return answer(way)

    # both at once: first calls compile
    for name in SHAPES:
        for way in procs:
            send(way, "times", name)
        print(name, {way: answer(way) for way in procs}, f"{time.time() - start:.0f} s (warm-up)", flush=True)
    found = {name: {way: [] for way in procs} for name in SHAPES}
    for turn in range(3):
        for name in SHAPES:
            for way in procs if turn % 2 == 0 else reversed(procs):
                if turn == 0 or time.time() - start < a.limit - 12:
                    found[name][way].append(ask(way, "times", name))
    rows = []
    for name in SHAPES:
        for way in procs:
            good = [x for x in found[name][way] if "cold" in x]
            if not good:
                rows.append(f"| {name} | {way} | {found[name][way]} |")
                continue
            cold, sustained = (statistics.median(x[k] for x in good) for k in ("cold", "sustained"))
            parts = ask(way, "kernels", name)
            rows.append(f"| {name} | {way} | {cold:.1f} | {sustained:.1f} | " + ", ".join(
                f"{k.removesuffix('_kernel')} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in parts.items()) + " |")
    errors = []
    for name in CHECKS:
        for way in procs:
            if time.time() - start < a.limit + 20:
                errors.append(f"| {name} | {way} | {ask(way, 'check', name)} |")
    for p in procs.values():
        p.stdin.close()
        p.wait(10)
    print("| check | way | error of o, of the state, same bits twice |\n| --- | --- | --- |", *errors, sep="\n")
    print("| shape | way | cold us | sustained us | kernels us |\n| --- | --- | ---: | ---: | --- |", *rows, sep="\n")


if __name__ == "__main__":
    main()
