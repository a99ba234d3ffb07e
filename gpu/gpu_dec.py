"""On a Hopper GPU, from the repository's root: prepare decides what is forgotten, beside the base.

base in .carry/base2/src, new in src; workers take turns. Prints a table last. Options: --limit SECONDS (default 105).
"""
import argparse, glob, importlib, json, math, os, subprocess, sys, time
from pathlib import Path

ROOT = Path.cwd()
CASES = [  # name, lengths, heads
    ("T1024 H4", (1024,), 4), ("T2048 H12", (2048,), 12), ("T2048 H16", (2048,), 16), ("T4096 H4", (4096,), 4),
    ("T8192 H4", (8192,), 4), ("T8192 H8", (8192,), 8), ("T8192 H12", (8192,), 12), ("T8192 H24", (8192,), 24),
    ("T8192 H32", (8192,), 32), ("2 x 2048 H12", (2048, 2048), 12), ("T8192 H64", (8192,), 64),
]
ERRORS = (0, 1, 4, 8, 9)
PRIORITY = [0, 1, 8, 4, 6, 7, 2, 3, 5, 9, 10]


def inputs(lengths, H, gates, seed=0):
    """As the benchmarks draw them: random: no parameters; slow: channels of 2 to 1,000 tokens."""
    import torch
    s = torch.Generator("cuda").manual_seed(seed)
    T, K = sum(lengths), 128
    n = lambda *x: torch.randn(*x, device="cuda", generator=s)
    q, k, v, g = (n(1, T, H, K).bfloat16() for _ in range(4))
    beta = n(1, T, H).bfloat16()
    A_log, dt_bias = torch.zeros(H, device="cuda"), torch.zeros(H, K, device="cuda")
    if gates == "slow":
        u = torch.rand(H, K, device="cuda", generator=s)
        memory = torch.exp(math.log(2.0) + u * (math.log(1000.0) - math.log(2.0)))
        share = (1 / memory / 5).clamp(max=0.99)
        dt_bias = torch.log(share / (1 - share))
        g = g * 0.1
    call = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias.flatten(), gate="lower_bound", lower_bound=-5.0,
                use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                output_final_state=True, scale=K**-0.5)
    if len(lengths) > 1:
        off = [0]
        for x in lengths:
            off.append(off[-1] + x)
        call["cu_seqlens"] = torch.tensor(off, dtype=torch.int32, device="cuda")
    return call


def truth(call, lengths):
    """Token by token in float64; the whole state of all heads."""
    import torch
    f = lambda x: x.double()
    q, k, v = (f(call[x][0]) for x in "qkv")
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * call["scale"]
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    H = q.shape[1]
    g = -5.0 * torch.sigmoid((f(call["g"][0]) + f(call["dt_bias"]).view(H, -1)) * f(call["A_log"]).exp()[:, None])
    b = torch.sigmoid(f(call["beta"][0]))
    o, t, states = torch.empty_like(v), 0, []
    a = g.exp()
    for length in lengths:
        S = torch.zeros(H, q.shape[-1], v.shape[-1], dtype=torch.float64, device=q.device)
        for i in range(t, t + length):
            S = S * a[i][..., None]
            u = b[i][:, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], S))
            S = S + k[i][..., None] * u[:, None, :]
            o[i] = torch.einsum("hk,hkv->hv", q[i], S)
        states.append(S)
        t += length
    return o, torch.stack(states)


def timed(fn, seconds=0.12):
    import torch
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); fn(); b.record(); torch.cuda.synchronize()
    n = max(8, min(400, int(seconds * 1e3 / max(a.elapsed_time(b), 0.01))))
    a.record()
    for _ in range(n):
        fn()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / n * 1e3


def cold(graph, flush, n=25):
    """Median of replays with the L2 cache flushed before each."""
    import torch
    found = []
    for _ in range(n):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); torch.cuda.synchronize()
        found.append(a.elapsed_time(b) * 1e3)
    return sorted(found)[n // 2]


def captured(fn):
    import torch
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        out = fn()
    g.replay(); torch.cuda.synchronize()
    return g, out


def warm(tree, i):
    """Compiles what a case launches, into the cache that all share."""
    sys.path.insert(0, tree)
    import torch
    import flashdelta as fd
    name, lengths, H = CASES[i]
    call = inputs(lengths, H, "random")
    fd.chunk_kda(**call)
    if i in ERRORS:
        fd.chunk_kda(**call, split=False)
    torch.cuda.synchronize()


def worker(tree):
    sys.path.insert(0, tree)
    import torch
    import flashdelta as fd
    assert fd.__file__.startswith(tree), fd.__file__
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rel = lambda x, y: ((x.double() - y).norm() / y.norm()).item()
    kept, truths = {}, {}
    print(json.dumps({"ready": torch.cuda.get_device_name(0)}), flush=True)
    for line in sys.stdin:
        i, gates, what = json.loads(line)
        name, lengths, H = CASES[i]
        row = {}
        try:
            if (i, gates) not in kept:
                call = inputs(lengths, H, gates)
                kept.clear()
                kept[i, gates] = call, *captured(lambda: fd.chunk_kda(**call))
            call, graph, out = kept[i, gates]
            if what == "time":
                row["sustained"] = timed(graph.replay)
                row["cold"] = cold(graph, flush)
            elif what == "error":
                path = Path(f"/tmp/gpu_dec_truth_{i}_{gates}.pt")
                if path.exists():
                    o, S = torch.load(path)
                else:
                    o, S = truth(call, lengths)
                    torch.save((o, S), path)
                graph.replay(); torch.cuda.synchronize()
                s = out[1].double()
                row["o"], row["s"] = rel(out[0][0], o), rel(s, S)
                whole = fd.chunk_kda(**call, split=False)
                row["from_whole_o"], row["from_whole_s"] = rel(out[0], whole[0].double()), rel(out[1], whole[1].double())
                first = [x.clone() for x in out]
                for _ in range(50):
                    graph.replay()
                row["same"] = all(bool((x == y).all()) for x, y in zip(first, out))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


def cudnn_worker():
    """cuDNN's frontend by the benchmarks' own contender, for the two small shapes with random gates."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    for wheel in glob.glob(str(ROOT / ".carry/whl/*.whl")):
        if "cudnn" in wheel.lower():
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "/tmp/gpu_dec_whl", wheel])
    sys.path.insert(0, "/tmp/gpu_dec_whl")
    import torch
    found = {}
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for i in (0, 1):
        name, lengths, H = CASES[i]
        try:
            fn = cudnn_call(inputs(lengths, H, "random"))
            g, _ = captured(fn)
            found[name] = {"sustained": timed(g.replay), "cold": cold(g, flush)}
        except BaseException as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(found), flush=True)


def cudnn_call(c):
    """The same call as ours: norm, gate and sigmoid by flags (benchmarks/contenders.py: as_given)."""
    import torch
    op = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    H, K = c["q"].shape[2:]
    given = {x: c[x].flatten(0, 1) for x in ("q", "k", "v", "g", "beta")}
    given |= dict(a_log=c["A_log"], dt_bias=c["dt_bias"].view(H, K), gate_lower_bound=-5.0)
    given |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate"), True)
    given |= dict(cu_seqlens=torch.tensor([0, c["q"].shape[1]], dtype=torch.int32, device="cuda"),
                  output_final_state=True, plan_name="kda_hopper_cuda")
    return lambda: op(**given)


def ask(p, *what):
    p.stdin.write(json.dumps(what) + "\n"); p.stdin.flush()
    line = p.stdout.readline()
    return json.loads(line) if line else {"failed": "worker died"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker"); parser.add_argument("--warm", type=int)
    parser.add_argument("--cudnn", action="store_true")
    parser.add_argument("--limit", type=float, default=105.0)
    a = parser.parse_args()
    if a.warm is not None:
        return warm(a.worker, a.warm)
    if a.worker:
        return worker(a.worker)
    if a.cudnn:
        return cudnn_worker()
    began = time.time()
    left = lambda: a.limit - (time.time() - began)
    trees = {"base": str(ROOT / ".carry/base2/src"), "new": str(ROOT / "src")}
    start = lambda *x: subprocess.Popen([sys.executable, __file__, *x], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    warming = [subprocess.Popen([sys.executable, __file__, "--worker", v, "--warm", str(i)], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True) for i in PRIORITY for v in trees.values()]
    for p in warming:
        try:
            p.wait(timeout=max(60 - (time.time() - began), 1))
        except subprocess.TimeoutExpired:
            p.kill()
        if p.returncode:
            print("warming failed:", p.args[3:], (p.stderr.read() or "")[-600:])
    print(f"{time.time() - began:.0f} s for compilation", flush=True)
    workers = {k: start("--worker", v) for k, v in trees.items()}
    for k, p in workers.items():
        print(k, p.stdout.readline().strip())
    rows = {}
    for i in PRIORITY:
        for gates in ("random", "slow"):
            if left() < 14:
                break
            for turn in range(2):
                for k, p in list(workers.items())[:: 1 if turn == 0 else -1]:
                    r = ask(p, i, gates, "time")
                    kept = rows.setdefault((i, gates), {}).setdefault(k, {})
                    for x, y in r.items():
                        kept[x] = min(kept.get(x, y), y) if x != "failed" else y
            if i in ERRORS and gates == "random" or i == 1:
                if left() > 25:
                    for k, p in workers.items():
                        rows[i, gates][k].update({f"err_{x}": y for x, y in ask(p, i, gates, "error").items()})
            print(f"{time.time() - began:5.1f} s", CASES[i][0], gates, json.dumps(rows[i, gates]), flush=True)
    for p in workers.values():
        p.stdin.close()
    cud = {}
    try:
        cud = json.loads(subprocess.run([sys.executable, __file__, "--cudnn"], capture_output=True, text=True,
                                        timeout=max(left(), 8)).stdout.strip().splitlines()[-1])
    except Exception as error:
        cud = {"failed": str(error)[:200]}
    print("cudnn", json.dumps(cud))
    print(f"\n{'us':14} {'gates':7} {'base':>8} {'new':>8} {'ratio':>6}   {'base':>8} {'new':>8} {'ratio':>6}  errors of o (s)")
    print(f"{'':14} {'':7} {'graph, sustained':>24}   {'graph, cold':>24}  base, new; new from whole; 50 replays same")
    for (i, gates), r in sorted(rows.items()):
        b, n = r.get("base", {}), r.get("new", {})
        if "failed" in b or "failed" in n:
            print(CASES[i][0], gates, b.get("failed"), n.get("failed")); continue
        text = f"{CASES[i][0]:14} {gates:7}"
        for x in ("sustained", "cold"):
            text += f" {b[x]:8.1f} {n[x]:8.1f} {n[x] / b[x]:6.3f}  "
        if "err_o" in n:
            text += (f"{b['err_o']:.2e} ({b['err_s']:.2e}), {n['err_o']:.2e} ({n['err_s']:.2e}); "
                     f"{n['err_from_whole_o']:.1e} ({n['err_from_whole_s']:.1e}); {n['err_same']}")
        print(text)
    for name, r in cud.items():
        print("cuDNN", name, r)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
