"""slow beside dec and base: only borders that may be planned are asked whether a chunk forgets. 70 s on a Hopper GPU.

    python3 slow_gpu.py [SECONDS]
"""
import math, sys, time
import harness as h

WAYS = ("base", "dec", "slow")
CASES = {  # lengths, heads, gates
    "T8192 H8": ((8192,), 8, ("random", "slow", "unbounded")), "T4096 H4": ((4096,), 4, ("random", "slow")),
    "2 x 2048 H12": ((2048, 2048), 12, ("random", "slow")), "T2048 H16": ((2048,), 16, ("random", "slow")),
    "T8192 H4": ((8192,), 4, ("random", "slow")), "T1024 H4": ((1024,), 4, ("random", "slow")),
    "T2048 H12": ((2048,), 12, ("random", "slow", "unbounded")), "T8192 H32": ((8192,), 32, ("random", "slow")),
    "T8192 H64": ((8192,), 64, ("random", "slow")),
}
ALIKE = ("T4096 H4", "T2048 H16", "T8192 H4", "T1024 H4")  # the kernels of T8192 H8 and T2048 H12
ERRORS = (("T1024 H4", "random"), ("T8192 H8", "slow"), ("T8192 H8", "unbounded"), ("T2048 H12", "unbounded"))
PARTS = (("T8192 H8", "slow"), ("T8192 H8", "unbounded"), ("T4096 H4", "slow"), ("2 x 2048 H12", "random"))
if h.DRY:
    CASES = {"T2048 H12": ((200,), 1, ("random", "unbounded")), "2 x 2048 H12": ((130, 70), 1, ("slow",))}


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
    torch, fd = h.enter(way)
    kept = {}

    def at(name, gates):
        if (name, gates) not in kept:
            kept.clear()
            call = inputs(torch, *CASES[name][:2], gates) | {"backend": "hopper"}
            kept[name, gates] = call, *h.captured(torch, lambda: fd.chunk_kda(**call))
        return kept[name, gates]

    def warm(name):
        for gates in CASES[name][2]:
            call = inputs(torch, *CASES[name][:2], gates) | {"backend": "hopper"}
            fd.chunk_kda(**call)
            if name in ("T8192 H8", "T2048 H12"):
                fd.chunk_kda(**call, split=False)

    def error(name, gates):
        call, replay, out = at(name, gates)
        whole = fd.chunk_kda(**call, split=False)
        found = {}
        if call["q"].shape[1] < 8192:
            wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
            want = fd.chunk_kda(**wide | {"backend": "reference"})
            found = {"err": [h.norm_error(a, b) for a, b in zip(out, want)]}
        first = [x.clone() for x in out]
        for _ in range(50):
            replay()
        return found | {"from whole": [h.norm_error(a, b) for a, b in zip(first, whole)],
                        "repeats": all(torch.equal(a, b) for a, b in zip(first, out))}

    return {"time": lambda name, gates: h.clock(torch, at(name, gates)[1], ms=30.0), "error": error, "warm": warm,
            "kernels": lambda name, gates: h.kernels(torch, at(name, gates)[1])}


def run():
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 68.0
    left = lambda: limit - (time.time() - h.BEGAN)
    h.require(base=[("src/flashdelta/kernels/hopper/device/trial.py", "FORGOTTEN")],
              dec=[("src/flashdelta/kernels/hopper/prepare.py", "def does_forget")],
              slow=[("src/flashdelta/kernels/hopper/device/tile_scheduler.py", "def may_end_segment")])
    h.warm(__file__, WAYS, [name for name in CASES if name not in ALIKE], 55.0)
    ways = h.Ways(__file__, WAYS)
    rows, errors, parts = {}, {}, {}
    for name, (_, _, kinds) in CASES.items():
        for gates in kinds:
            if left() < 4:
                break
            for turn in range(2 if gates == "random" else 4):
                h.best(rows.setdefault((name, gates), {}), ways.each("time", name, gates, backwards=turn % 2 == 1))
            if (name, gates) in ERRORS:
                errors[name, gates] = ways.each("error", name, gates)
            if (name, gates) in PARTS:
                parts[name, gates] = ways.each("kernels", name, gates)
            h.say(name, gates, rows[name, gates])
    ways.close()
    print("\n== slow: us by graph, sustained and cold; must: slow and unbounded rows at most 1 us over base; random rows as dec")
    for (name, gates), r in parts.items():
        print(f"{name:13} {gates:9} kernels", *(f"{way} {x}" for way, x in r.items()), sep="\n      ")
    for (name, gates), r in errors.items():
        for way, x in r.items():
            numbers = [f"{kind} " + " ".join(f"{y:.2e}" for y in x[kind]) for kind in ("err", "from whole") if kind in x]
            print(f"{name:13} {gates:9} {way:5}", x.get("failed") or "; ".join(numbers),
                  "" if x.get("repeats") else "BITS DIFFER between replays")
    print(f"{'':13} {'gates':9}" + " |".join("".join(f" {way:>8}" for way in WAYS) + " slow-base slow-dec" for _ in range(2)))
    for (name, gates), r in rows.items():
        found = [r.get(way, {"failed": "no worker"}) for way in WAYS]
        if any("failed" in x for x in found):
            print(f"{name:13} {gates:9} FAILED", *(x.get("failed") for x in found))
            continue
        cells = []
        for x in ("sustained", "cold"):
            b, d, n = (y[x] for y in found)
            cells.append(f" {b:8.1f} {d:8.1f} {n:8.1f} {n - b:+9.1f} {n - d:+8.1f}")
        b, d, n = (y["sustained"] for y in found)
        print(f"{name:13} {gates:9}" + " |".join(cells), "  > 1 us" if n > b + 1 or (gates == "random" and n > d + 1) else "")
    h.say("done")


if __name__ == "__main__":
    h.main(__file__, answers, run)
