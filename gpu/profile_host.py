"""SCENARIO MODE: where the host's time of a KDA layer's eager prefill goes."""
import cProfile, functools, io, pstats, statistics, sys, time, os
sys.path.insert(0, "benchmarks/serve")
import models, times
from agree import LAYERS
name, mode = sys.argv[1:3]
models.register()
llm = models.engine(models.SCENARIOS[name], mode, models.Sizes(cache_gib=6.0), f"/tmp/prof/{name}-{mode}")
times.warm(llm, name)
times.rows(llm, name)
layers = llm.apply_model(lambda m: [x for x in m.modules() if type(x).__name__ in LAYERS.values()])[0]
spans, profile, on = [], cProfile.Profile(), [False]
def clocked(theirs, **call):
    if on[0]: profile.enable()
    begin = time.perf_counter(); theirs(**call); spans.append(1e3 * (time.perf_counter() - begin))
    if on[0]: profile.disable()
for x in layers: x._forward = functools.partial(clocked, x._forward)
for i in range(20): models.run(llm, [models.tokens(500 + i, 1024)], 1)
per = sorted(spans); print(name, mode, "host ms of a layer: min %.3f quartile %.3f median %.3f" % (per[0], per[len(per)//4], statistics.median(per)), flush=True)
spans.clear()
for i in range(1, 13): models.run(llm, [models.tokens(700 + i, 1024 - i)], 1)
n = len(layers); firsts = [spans[i] for i in range(0, len(spans), n)]; rest = [x for i, x in enumerate(spans) if i % n]
print("length new: first layer %.3f, the others %.3f" % (statistics.median(firsts), statistics.median(rest)))
on[0] = True
for i in range(10): models.run(llm, [models.tokens(900 + i, 1024)], 1)
calls = 10 * n
for key in ("tottime", "cumulative"):
    s = io.StringIO(); pstats.Stats(profile, stream=s).sort_stats(key).print_stats(42)
    rows = [l for l in s.getvalue().splitlines() if l.strip()]
    print(key, "calls of layers", calls)
    for l in rows[4:]: print(l.replace(os.environ.get("SERVE_DIR", "?"), "").replace(os.getcwd(), "")[:150])
os._exit(0)
