"""Host time of first calls (T new) and replays: base beside branch first, in processes of their own, in turns. 30 s on any GPU.

    python3 gpu_first.py [SECONDS]
"""
import cProfile, gc, pstats, statistics, sys, time
import harness as h

WAYS = [name for name in ("base", "first") if (h.HERE / name).is_dir()]
H, COUNT = (1, 2) if h.DRY else (4, 100)
at = [64 if h.DRY else 2048]


def answers(way):
    torch, fd = h.enter(way)
    sync = (lambda: None) if h.DRY else torch.cuda.synchronize

    def make(T):
        q, k, v, g = (torch.randn(1, T, H, 128, device=h.device(), dtype=torch.bfloat16) for _ in range(4))
        zeros = lambda n: torch.zeros(n, device=h.device())
        return dict(q=q, k=k, v=v, g=g, beta=torch.randn(1, T, H, device=h.device(), dtype=torch.bfloat16), A_log=zeros(H),
                    dt_bias=zeros(H * 128), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0,
                    use_beta_sigmoid_in_kernel=True, state_v_first=True, backend="hopper")

    def once(call):
        sync()
        t = time.perf_counter()
        fd.chunk_kda(**call)
        return (time.perf_counter() - t) * 1e6

    def fresh():
        """Calls of lengths that nobody had."""
        at[0] += 16 * COUNT
        return [make(at[0] + 16 * i) for i in range(COUNT)]

    def summary(x):
        return statistics.median(x)

    def warm(name=""):
        for T in (1024, 1040, 4096) if not h.DRY else (64,):
            fd.chunk_kda(**make(T))

    def time_calls():
        calls = fresh()
        found = {"first": summary([once(c) for c in calls]), "again": summary([once(c) for c in calls]),
                 "replay": summary([once(calls[0]) for _ in range(COUNT)])}
        calls = fresh()
        gc.collect()
        gc.disable()
        found["first, no gc"] = summary([once(c) for c in calls])
        gc.enable()
        return found

    def where():
        """Functions entered, and those that take longest, of a first call."""
        calls, profile = fresh(), cProfile.Profile()
        sync()
        profile.enable()
        for c in calls:
            fd.chunk_kda(**c)
        profile.disable()
        stats = pstats.Stats(profile)
        top = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:12]
        return {"functions entered": stats.total_calls / COUNT,
                "own us": {f"{file.rsplit('/', 1)[-1]}:{line} {name}": round(x[2] * 1e6 / COUNT, 1) for (file, line, name), x in top}}

    return {"warm": lambda: warm() or {}, "time": time_calls, "where": where}


def run():
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 40.0
    h.require(base=[("src/flashdelta/runtime/call.py", "class Dispatcher")])
    ways = h.Ways(__file__, WAYS)
    h.say("compiled", ways.all("warm"))
    rows = {}
    for turn in range(1 if h.DRY else 4):
        if turn == 0 or time.time() - h.BEGAN < limit - 8:
            for way, x in ways.each("time", backwards=turn % 2 == 1).items():
                rows.setdefault(way, []).append(x)
    where = ways.each("where")
    ways.close()
    print("\n== first: us of the host, median of 100 calls, then of turns (smallest); must: first at most 500 over again")
    for way, x in where.items():
        print(way, x)
    for way, found in rows.items():
        good = [x for x in found if "failed" not in x]
        print(f"{way:8}", *(f"{n} {statistics.median(x[n] for x in good):7.1f} ({min(x[n] for x in good):.1f})" for n in good[0])
              if good else found[:1])
    h.say("done")


if __name__ == "__main__":
    h.main(__file__, answers, run)
