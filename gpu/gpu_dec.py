"""dec beside base: segments begin where `prepare` decides that a chunk forgets. 55 s on a Hopper GPU.

    python3 gpu_dec.py [SECONDS]
"""
import glob, importlib, math, subprocess, sys, time
import harness as h

WAYS = ("base", "dec")
CASES = {  # lengths, heads
    "T1024 H4": ((1024,), 4), "T2048 H12": ((2048,), 12), "T8192 H32": ((8192,), 32), "T8192 H24": ((8192,), 24),
    "T8192 H4": ((8192,), 4), "T8192 H8": ((8192,), 8), "T2048 H16": ((2048,), 16), "T4096 H4": ((4096,), 4),
    "2 x 2048 H12": ((2048, 2048), 12), "T8192 H64": ((8192,), 64),
}
ERRORS = ("T1024 H4", "T2048 H12", "T8192 H32", "T8192 H4")
if h.DRY:
    CASES = {"T1024 H4": ((200,), 1), "2 x 2048 H12": ((130, 70), 1)}


def inputs(torch, lengths, H, gates):
    """As the benchmarks draw them: random: no parameters; slow: channels of 2 to 1,000 tokens."""
    s = torch.Generator(h.device()).manual_seed(0)
    T, K = sum(lengths), 128
    n = lambda *x: torch.randn(*x, device=h.device(), generator=s)
    q, k, v, g = (n(1, T, H, K).bfloat16() for _ in range(4))
    beta = n(1, T, H).bfloat16()
    A_log, dt_bias = (torch.zeros(*x, device=h.device()) for x in ((H,), (H, K)))
    if gates == "slow":
        u = torch.rand(H, K, device=h.device(), generator=s)
        memory = torch.exp(math.log(2.0) + u * (math.log(1000.0) - math.log(2.0)))
        share = (1 / memory / 5).clamp(max=0.99)
        dt_bias = torch.log(share / (1 - share))
        g = g * 0.1
    call = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias.flatten(), gate="lower_bound", lower_bound=-5.0,
                use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                output_final_state=True, scale=K**-0.5)
    if gates == "unbounded":
        call |= dict(gate="softplus", lower_bound=None)
    if len(lengths) > 1:
        call["cu_seqlens"] = torch.tensor([0, *lengths], device=h.device()).cumsum(0).int()
    return call


def answers(way):
    if way == "cudnn":
        return cudnn()
    torch, fd = h.enter(way)
    kept = {}

    def at(name, gates):
        if (name, gates) not in kept:
            kept.clear()
            call = inputs(torch, *CASES[name], gates) | {"backend": "hopper"}
            kept[name, gates] = call, *h.captured(torch, lambda: fd.chunk_kda(**call))
        return kept[name, gates]

    def warm(name):
        for gates in ("random", "slow", "unbounded")[: 3 if name == "T8192 H8" else 2]:
            call = inputs(torch, *CASES[name], gates) | {"backend": "hopper"}
            fd.chunk_kda(**call)
            if name in ERRORS:
                fd.chunk_kda(**call, split=False)

    def error(name, gates):
        call, replay, out = at(name, gates)
        wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
        want = fd.chunk_kda(**wide | {"backend": "reference"})
        whole = fd.chunk_kda(**call, split=False)
        first = [x.clone() for x in out]
        for _ in range(50):
            replay()
        return {"err": [h.norm_error(a, b) for a, b in zip(first, want)],
                "from whole": [h.norm_error(a, b) for a, b in zip(first, whole)],
                "repeats": all(torch.equal(a, b) for a, b in zip(first, out))}

    times = lambda name, gates: h.clock(torch, at(name, gates)[1], ms=30.0)
    return {"time": times, "error": error, "warm": warm,
            "kernels": lambda name, gates: h.kernels(torch, at(name, gates)[1])}


def cudnn():
    """cuDNN's frontend, if a wheel of it lies in .carry/whl: norm, gate and sigmoid by flags (benchmarks/contenders.py)."""
    wheels = [x for x in glob.glob(str(h.HERE.parent / "whl/*.whl")) if "cudnn" in x.lower()]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target",
                    "/tmp/cudnn_whl", *wheels], check=True)
    sys.path.insert(0, "/tmp/cudnn_whl")
    import torch
    op = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    replays = {}

    def times(name):
        if name not in replays:
            c = inputs(torch, *CASES[name], "random")
            H, K = c["q"].shape[2:]
            given = {x: c[x].flatten(0, 1) for x in ("q", "k", "v", "g", "beta")}
            given |= dict(a_log=c["A_log"], dt_bias=c["dt_bias"].view(H, K), gate_lower_bound=-5.0)
            given |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate"), True)
            given |= dict(cu_seqlens=torch.tensor([0, c["q"].shape[1]], dtype=torch.int32, device="cuda"),
                          output_final_state=True, plan_name="kda_hopper_cuda")
            replays[name] = h.captured(torch, lambda: op(**given))[0]
        return h.clock(torch, replays[name], ms=30.0)

    return {"time": times}


def run():
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 55.0
    left = lambda: limit - (time.time() - h.BEGAN)
    h.require(base=[("src/flashdelta/kernels/hopper/device/trial.py", "FORGOTTEN")],
              dec=[("src/flashdelta/kernels/hopper/prepare.py", "def does_forget"), ("tests/gpu/test_afresh.py", "def ")])
    rival = None
    if not h.DRY and glob.glob(str(h.HERE.parent / "whl/*cudnn*.whl")):
        rival = h.Ways(__file__, ["cudnn"], needed=False)
        rival = rival if rival.workers else None
    if rival:
        rival.send("cudnn", "time", "T1024 H4")  # compiles beside the others
    alike = ("T2048 H12", "T2048 H16", "T4096 H4")  # as T1024 H4
    h.warm(__file__, WAYS, [name for name in CASES if name not in alike], 60.0)
    ways = h.Ways(__file__, WAYS)
    rows, errors, parts = {}, {}, {}
    for name in CASES:
        for gates in ("random", "slow", "unbounded")[: 3 if name == "T8192 H8" else 2]:
            if left() < 9:
                break
            for turn in range(4 if gates == "slow" else 2):
                h.best(rows.setdefault((name, gates), {}), ways.each("time", name, gates, backwards=turn % 2 == 1))
            if name in ERRORS and (gates == "random" or name == "T2048 H12"):
                errors[name, gates] = ways.each("error", name, gates)
            if name in ("T1024 H4", "T8192 H32"):
                parts[name, gates] = ways.each("kernels", name, gates)
            h.say(name, gates, rows[name, gates])
    ways.close()
    print("\n== dec: us by graph, sustained and cold; must: T1024 H4, T2048 H12 random <= cuDNN's, T8192 H32 random <= 250 cold;"
          "\n   slow rows at most 1 us over base")
    for (name, gates), r in parts.items():
        print(f"{name:13} {gates:7} kernels", *(f"{way} {x}" for way, x in r.items()), sep="\n      ")
    for (name, gates), r in errors.items():
        for way, x in r.items():
            print(f"{name:13} {gates:7} {way:5}", x.get("failed") or "err o {:.2e} state {:.2e}; from whole {:.1e} {:.1e}".format(
                *x["err"], *x["from whole"]), "" if x.get("repeats") else "BITS DIFFER between replays")
    print(f"{'':13} {'gates':7} {'base':>8} {'dec':>8} {'diff':>6} | {'base':>8} {'dec':>8} {'diff':>6}")
    for (name, gates), r in rows.items():
        b, n = (r.get(way, {"failed": "no worker"}) for way in WAYS)
        if "failed" in b or "failed" in n:
            print(f"{name:13} {gates:7} FAILED", b.get("failed"), n.get("failed"))
            continue
        print(f"{name:13} {gates:7}", " | ".join(f"{b[x]:8.1f} {n[x]:8.1f} {n[x] - b[x]:+6.1f}" for x in ("sustained", "cold")),
              "  > 1 us" if gates == "slow" and n["sustained"] > b["sustained"] + 1 else "")
    sys.stdout.flush()
    if rival:  # last: it may take longer than the limit
        rival.read("cudnn")
        for name in ("T1024 H4", "T2048 H12"):
            print(f"{name:13} cuDNN  ", rival.each("time", name).get("cudnn"), flush=True)
        rival.close()
    h.say("done")


if __name__ == "__main__":
    h.main(__file__, answers, run)
