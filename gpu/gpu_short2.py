"""Variants of `short` in turns: python gpu_short2.py [seconds=48] NAME=SRC ...    (beside base/src of this file's folder)

`two` and `one` are base (`short` never, `short` always). One process per way; all compile at once, then shapes in turns (forth and
back). Bits: of all ways with `two` in steps. Times: us by CUDA graph, cold (L2 flushed) / sustained. The table comes last."""
import functools, hashlib, json, os, random, statistics, subprocess, sys, time

R = random.Random(1)
MIXED = tuple(R.randint(8, 128) for _ in range(64))
SHAPES = {  # name: lengths, heads, options; what matters first
    "64 x 100 H32": ((100,) * 64, 32, {}),
    "200 x 40 H16": ((40,) * 200, 16, {}),
    "64 x 100 H32 init": ((100,) * 64, 32, {"init": True}),
    "64 of 8..128 H32": (MIXED, 32, {}),
    "512 x 8 H16": ((8,) * 512, 16, {}),
    "128 x 64 H64": ((64,) * 128, 64, {}),
    "200 x 40 H16 init V first": ((40,) * 200, 16, {"init": True, "v_first": True}),
    "64 of 8..128 H32 init V first": (MIXED, 32, {"init": True, "v_first": True}),
    "512 x 8 H16 init": ((8,) * 512, 16, {"init": True}),
    "128 x 64 H64 init": ((64,) * 128, 64, {"init": True}),
}
CHECKS = {
    "64 x 100 H32": ((100,) * 64, 32, {}),
    "ragged, init": ((1, 40, 64, 65, 0, 128, 130, 31, 33, 200), 4, {"init": True}),
    "ragged, V first, bf16 states": ((40, 100, 64, 0, 7, 192), 4, {"init": True, "v_first": True, "bf16": True}),
    "64 of 8..128 H32 init V first": (MIXED, 32, {"init": True, "v_first": True}),
}


def make(lengths, H, o):
    import torch
    gen = torch.Generator("cuda").manual_seed(7)
    T, N, K = sum(lengths), len(lengths), 128
    new = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    call = {n: new(1, T, H, K).bfloat16() for n in "qkvg"} | dict(beta=new(1, T, H).bfloat16(), A_log=new(H) * 0.5)
    call |= dict(dt_bias=new(H * K) * 2 - 4, gate="lower_bound", lower_bound=-5.0, use_qk_l2norm_in_kernel=True)
    call |= dict(use_beta_sigmoid_in_kernel=True, state_v_first=bool(o.get("v_first")), output_final_state=True)
    call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    state = new(N, H, K, K)
    state = state.bfloat16() if o.get("bf16") else state
    return call | dict(initial_state=state if o.get("init") else None)


def worker(way):
    import torch, flashdelta as fd
    from flashdelta.kernels.hopper import build
    from flashdelta.runtime.call import CACHE
    usual = build.STEPS_FROM
    build.in_one_launch = lambda problem, device: way != "two"
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    run = lambda call: fd.chunk_kda(**call, backend="hopper")

    def check(name):
        lengths, H, o = CHECKS[name]
        call = make(lengths, H, o) | {"split": False}
        build.STEPS_FROM = dict.fromkeys(usual, 1)
        CACHE.clear()
        found = run(call)
        torch.cuda.synchronize()
        digest = [hashlib.sha1(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:10] for x in found]
        error = None
        if name.startswith("ragged") and way != "two":
            wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
            exact = fd.chunk_kda(**wide, backend="reference")
            error = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact)]
        build.STEPS_FROM = usual
        CACHE.clear()
        return {"digest": digest, "error": error}

    def clock(f, n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / n

    kept = {}

    def times(name):
        if name not in kept:
            lengths, H, o = SHAPES[name]
            call = make(lengths, H, o)
            CACHE.clear()
            run(call), run(call)
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                results = run(call)
            kept.clear()
            kept[name] = g, results, call
        replay = kept[name][0].replay
        cold = []
        for _ in range(11):
            flush.zero_()
            cold.append(clock(replay, 1))
        n = max(int(12e3 / statistics.median(cold)), 10)
        clock(replay, n)
        return {"cold": statistics.median(cold), "sustained": clock(replay, n)}

    print(json.dumps({"gpu": torch.cuda.get_device_name(), "triton": __import__("triton").__version__}), flush=True)
    for line in sys.stdin:
        kind, name = json.loads(line)
        try:
            found = (check if kind == "check" else times)(name)
        except Exception as error:  # noqa: BLE001
            found = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(found), flush=True)


def main():
    limit, began = float(sys.argv[1]) if len(sys.argv) > 1 else 48.0, time.time()
    base = os.path.join(os.path.dirname(os.path.abspath(__file__)), "base/src")
    ways, started = {"two": base, "one": base} | dict(x.split("=") for x in sys.argv[2:]), {}
    for way, src in ways.items():
        src = os.path.abspath(src)
        assert os.path.isdir(src), src
        started[way] = subprocess.Popen([sys.executable, os.path.abspath(__file__), "worker", way], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": src})

    def ask(way, *what):
        started[way].stdin.write(json.dumps(what) + "\n")
        started[way].stdin.flush()

    def read(way):
        line = started[way].stdout.readline()
        return json.loads(line) if line else {"failed": "died"}

    hello = [read(way) for way in started][0]
    lines = [f"{hello.get('gpu')}, Triton {hello.get('triton')}, ready after {time.time() - began:.0f} s"]
    for name in CHECKS:
        for way in started:  # compile at the same time
            ask(way, "check", name)
        found = {way: read(way) for way in started}
        want = found["two"].get("digest")
        cells = [f"{way} {x['failed'][:80] if 'failed' in x else 'same' if x['digest'] == want else 'DIFFERS ' + str([a == b for a, b in zip(x['digest'], want or [])])}"
                 + (" " + "/".join(f"{e:.2e}" for e in x["error"]) if x.get("error") else "") for way, x in found.items() if way != "two"]
        lines.append(f"bits {name:30} " + "; ".join(cells))
        print(lines[-1], flush=True)
    rows = [f"{'us by graph, cold/sustained':30} {'floor':>6} " + " ".join(f"{way:>13}" for way in started)]
    for name, (lengths, H, o) in SHAPES.items():
        if time.time() - began > limit - 3:
            rows.append(f"(out of time at {time.time() - began:.0f} s)")
            break
        samples = {way: [] for way in started}
        for way in started:  # capture at the same time
            ask(way, "time", name)
        for way in started:
            read(way)
        for turn in range(2):
            for way in started if turn == 0 else reversed(started):
                ask(way, "time", name)
                samples[way].append(read(way))
        moved = sum(lengths) * H * 128 * 10 + len(lengths) * H * 65536 * (2 if o.get("init") else 1)
        cells = []
        for way in started:
            bad = [x["failed"] for x in samples[way] if "failed" in x]
            cells.append(bad[0][:30] if bad else "{:6.1f}/{:6.1f}".format(*(min(x[k] for x in samples[way]) for k in ("cold", "sustained"))))
        rows.append(f"{name:30} {moved / 4.27e6:6.1f} " + " ".join(f"{x:>13}" for x in cells))
        print(rows[-1], flush=True)
    for x in started.values():
        x.stdin.close()
    print("", *lines, "", *rows, f"{time.time() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main()
