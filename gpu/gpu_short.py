"""Short sequences: one launch (`short`) beside two, and beside the base tree. Run in the repo root: python gpu_short.py [seconds]

Ways: base (.carry/base/src), two (this tree, `short` never), one (`short` always), one2 (`short` without a cap of registers: two
CTAs an SM). Each way is a process of its own; they take turns shape by shape. Errors are against float64; `bits` compares one and
two, both in steps. Times in us by CUDA graph: cold (L2 flushed) / sustained."""
import dataclasses, functools, hashlib, json, os, random, statistics, subprocess, sys, time

WAYS = ("base", "two", "one", "one2")
R = random.Random(1)
SHAPES = {  # name: lengths, heads, value heads, options
    "200 x 40 H16": ((40,) * 200, 16, 16, {}),
    "64 x 100 H32": ((100,) * 64, 32, 32, {}),
    "512 x 8 H16": ((8,) * 512, 16, 16, {}),
    "128 x 64 H64": ((64,) * 128, 64, 64, {}),
    "16 x 200 H4": ((200,) * 16, 4, 4, {}),
    "32 x 200 H32": ((200,) * 32, 32, 32, {}),
    "64 x 40 H8": ((40,) * 64, 8, 8, {}),
    "16 x 40 H16": ((40,) * 16, 16, 16, {}),
    "64 x 100 H8": ((100,) * 64, 8, 8, {}),
    "16 x 128 H16": ((128,) * 16, 16, 16, {}),
    "128 of 8..200 H16": (tuple(R.randint(8, 200) for _ in range(128)), 16, 16, {}),
    "64 of 8..120 H32": (tuple(R.randint(8, 120) for _ in range(64)), 32, 32, {}),
    "1000 + 60 x 50 H16": ((1000, *(50,) * 60), 16, 16, {}),
    "4000 + 80 x 50 H16": ((4000, *(50,) * 80), 16, 16, {}),
    "200 x 40 H16 init V first": ((40,) * 200, 16, 16, {"init": True, "v_first": True}),
    "64 x 100 H32 init K first": ((100,) * 64, 32, 32, {"init": True}),
}
CHECKS = {
    "ragged H2 HV4": ((1, 40, 64, 65, 0, 128, 130, 31, 33, 200), 2, 4, {"init": True}),
    "V first": ((40, 100, 64, 0, 7), 4, 4, {"init": True, "v_first": True}),
    "bf16 states": ((40, 100, 64, 0, 7), 4, 4, {"init": True, "v_first": True, "bf16": True}),
    "K64 V128": ((40, 100, 64, 0, 7), 4, 4, {"K": 64, "init": True}),
    "K64 V64": ((64, 100, 33), 4, 4, {"K": 64, "V": 64}),
    "K128 V64": ((64, 100, 33), 4, 4, {"V": 64}),
    "dense 64": (None, 4, 4, {"B": 300, "T": 64}),
    "dense 100": (None, 4, 4, {"B": 300, "T": 100, "init": True}),
    "pool": ((40, 100, 0, 64, 7), 4, 4, {"pool": True, "v_first": True}),
    "200 x 40 H16": ((40,) * 200, 16, 16, {}),
    "4000 + 80 x 50 H16": ((4000, *(50,) * 80), 16, 16, {"init": True}),
}


def make(lengths, H, HV, o):
    import torch
    gen = torch.Generator("cuda").manual_seed(7)
    B, T, N = (o["B"], o["T"], o["B"]) if lengths is None else (1, sum(lengths), len(lengths))
    K, V = o.get("K", 128), o.get("V", 128)
    new = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    call = dict(q=new(B, T, H, K).bfloat16(), k=new(B, T, H, K).bfloat16(), v=new(B, T, HV, V).bfloat16())
    call |= dict(g=new(B, T, HV, K).bfloat16(), beta=new(B, T, HV).bfloat16(), A_log=new(HV) * 0.5, dt_bias=new(HV * K) * 2 - 4)
    call |= dict(gate="lower_bound", lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    call |= dict(state_v_first=bool(o.get("v_first")))
    if lengths is not None:
        call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    state = new(N + 3 if o.get("pool") else N, HV, *((V, K) if o.get("v_first") else (K, V)))
    state = state.bfloat16() if o.get("bf16") else state
    if o.get("pool"):
        index = torch.tensor([4, -1, 2, 0, 7, *range(8, N)][:N], device="cuda")
        return call | dict(state_pool=state, state_indices=index, null_index="negative")
    return call | dict(output_final_state=True, initial_state=state if o.get("init") else None)


def worker(way):
    import torch, flashdelta as fd
    from flashdelta.kernels.hopper import build
    from flashdelta.runtime.call import CACHE
    steps = dict.fromkeys(build.STEPS_FROM, 1)
    usual = build.STEPS_FROM
    if way != "base":
        build.SHORT, build.SHORT_PER_SM = (1 << 20, 0) if way.startswith("one") else (0, 1 << 30)
        if way == "one2":
            plain = build.short
            build.short = lambda *a: [dataclasses.replace(x, max_registers=None) for x in plain(*a)]
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def run(call):
        o, s = fd.chunk_kda(**call, backend="hopper")
        return o, call["state_pool"] if "state_pool" in call else s

    def check(name):
        lengths, H, HV, o = CHECKS[name]
        call = make(lengths, H, HV, o)
        call["split"] = False  # in steps with few heads, too
        build.STEPS_FROM = steps
        CACHE.clear()
        before = call["state_pool"].clone() if "state_pool" in call else None
        found = run(call)
        torch.cuda.synchronize()
        digest = [hashlib.sha1(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:12] for x in found]
        error = None
        if way == "one":
            wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
            if before is not None:
                wide["state_pool"] = before.double()
            o2, s2 = fd.chunk_kda(**wide, backend="reference")
            s2 = wide["state_pool"] if before is not None else s2
            error = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, (o2, s2))]
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

    graphs = {}

    def times(name):
        if name not in graphs:
            lengths, H, HV, o = SHAPES[name]
            call = make(lengths, H, HV, o)
            CACHE.clear()
            run(call), run(call)
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                kept = run(call)
            graphs.clear()
            graphs[name] = g, kept, call
        replay = graphs[name][0].replay
        cold = []
        for _ in range(15):
            flush.zero_()
            cold.append(clock(replay, 1))
        n = max(int(25e3 / statistics.median(cold)), 10)
        clock(replay, n)
        return {"cold": statistics.median(cold), "sustained": clock(replay, n)}

    print(json.dumps({"ready": way, "triton": __import__("triton").__version__, "gpu": torch.cuda.get_device_name()}), flush=True)
    for line in sys.stdin:
        kind, name = json.loads(line)
        try:
            found = (check if kind == "check" else times)(name)
        except Exception as error:  # noqa: BLE001
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found), flush=True)


def main():
    limit, began = float(sys.argv[1]) if len(sys.argv) > 1 else 95.0, time.time()
    root = os.getcwd()
    started = {}
    for way in WAYS:
        src = os.path.join(root, ".carry/base/src" if way == "base" else "src")
        if os.path.isdir(src):
            env = {**os.environ, "PYTHONPATH": src}
            started[way] = subprocess.Popen([sys.executable, os.path.abspath(__file__), "worker", way], env=env, text=True,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(way, *what):
        started[way].stdin.write(json.dumps(what) + "\n")
        started[way].stdin.flush()

    def read(way):
        line = started[way].stdout.readline()
        return json.loads(line) if line else {"failed": "died"}

    for way in started:
        hello = read(way)
    lines = [f"{hello.get('gpu')}, Triton {hello.get('triton')}", "", f"{'check (steps, all ways)':28} bits one=two one=base  error o, state"]
    for name in CHECKS:
        for way in started:  # compile at the same time
            send(way, "check", name)
        found = {way: read(way) for way in started}
        failed = {way: x["failed"] for way, x in found.items() if "failed" in x}
        if failed:
            lines.append(f"{name:28} FAILED {failed}")
            continue
        one, two, base = (found.get(x, {}).get("digest") for x in ("one", "two", "base"))
        lines.append(f"{name:28} {one == two!s:>12} {one == base!s:>8}  {' '.join(f'{x:.2e}' for x in found['one']['error'])}"
                     + ("" if found["one2"]["digest"] == one else "   one2 DIFFERS"))
    print(*lines, sep="\n", flush=True)
    rows = [f"{'us by graph: cold/sustained':28} {'floor':>6} " + " ".join(f"{way:>15}" for way in started)]
    for name, (lengths, H, HV, o) in SHAPES.items():
        if time.time() - began > limit:
            rows.append("(out of time)")
            break
        samples = {way: [] for way in started}
        for turn in range(2):
            for way in started if turn == 0 else reversed(started):
                send(way, "time", name)
                samples[way].append(read(way))
        T, N = sum(lengths), len(lengths)
        moved = T * (2 * H * 128 * 2 + HV * 128 * 6) + N * HV * 65536 * (2 if o.get("init") else 1)
        cells = []
        for way in started:
            bad = [x["failed"] for x in samples[way] if "failed" in x]
            cells.append(bad[0][:40] if bad else "{:6.1f} /{:6.1f}".format(*(min(x[k] for x in samples[way]) for k in ("cold", "sustained"))))
        rows.append(f"{name:28} {moved / 4.27e6:6.1f} " + " ".join(f"{x:>15}" for x in cells))
        print(rows[-1], flush=True)
    for x in started.values():
        x.stdin.close()
    print("", *lines, "", *rows, f"{time.time() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    worker(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[1] == "worker" else main()
