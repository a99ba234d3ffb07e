"""Where the host time of a first call (T new) goes on a GPU: 20 s. From the root of a checkout, with `.carry/base/src` there for a
comparison: `python3 first.py` (copy it into `.carry` to run it on the device machine)."""
import cProfile, gc, importlib, pstats, statistics, sys, tempfile, time
from pathlib import Path

sys.path[:0] = [".", "src"]
import torch

BF = torch.bfloat16
H, COUNT = 4, 200


def make(T, pool=False):
    x = [torch.randn(1, T, H, 128, device="cuda", dtype=BF) for _ in range(4)]
    return dict(q=x[0], k=x[1], v=x[2], g=x[3], beta=torch.randn(1, T, H, device="cuda", dtype=BF), A_log=torch.zeros(H, device="cuda"),
                dt_bias=torch.zeros(H * 128, device="cuda"), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0,
                use_beta_sigmoid_in_kernel=True, state_v_first=True)


def once(op, call):
    torch.cuda.synchronize()
    t = time.perf_counter()
    op(**call)
    return (time.perf_counter() - t) * 1e6


def show(name, x):
    x = sorted(x)
    print(f"{name:58} median {statistics.median(x):7.1f}  p10 {x[len(x) // 10]:7.1f}  p90 {x[-len(x) // 10]:7.1f} us")


packages = {"ours": importlib.import_module("flashdelta")}
base = Path(".carry/base")
if (base / "src").exists():
    from benchmarks.compare_revisions import OTHER, other_package
    folder = tempfile.mkdtemp()
    other_package(base, Path(folder))
    sys.path.insert(0, folder)
    packages["base"] = importlib.import_module(OTHER)

at = 2048
for name, fd in packages.items():
    op = fd.chunk_kda
    for T in (1024, 1040, 1056, 4096, 4112):  # compiles
        op(**make(T))
    torch.cuda.synchronize()
    hot = [make(at + 16 * i) for i in range(COUNT)]
    at += 16 * COUNT  # the same lengths for nobody else
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    show(f"{name}: first, inputs made before", [once(op, c) for c in hot])
    print("   cudaMalloc in these:", torch.cuda.memory_stats()["segment.all.allocated"] - segments)
    show(f"{name}: the same calls again (replays, each once)", [once(op, c) for c in hot])
    show(f"{name}: one call, replayed in a row", [once(op, hot[0]) for _ in range(COUNT)])
    gc.collect(); gc.disable()
    hot = [make(at + 16 * i) for i in range(COUNT)]
    at += 16 * COUNT
    show(f"{name}: first, no garbage collection", [once(op, c) for c in hot])
    gc.enable()
    cold, again = [], []
    for i in range(40):  # as compare_revisions does: 2 MB of numbers on the CPU between calls
        c = make(at + 16 * i)
        torch.randn(4 * 1024 * 1024).sum()
        cold.append(once(op, c))
        torch.randn(4 * 1024 * 1024).sum()
        again.append(once(op, c))
    at += 16 * 40
    show(f"{name}: first, caches cold", cold)
    show(f"{name}: replay, caches cold", again)
    del hot
    torch.cuda.empty_cache()

fd = packages["ours"]
op = fd.chunk_kda
hot = [make(at + 16 * i) for i in range(COUNT)]
at += 16 * COUNT

from flashdelta import backends
from flashdelta.kernels.hopper import build as hopper_build
from flashdelta.kernels.stages import backward_pass, launch as stage_launch
from flashdelta.problem import operations
from flashdelta.program import cache, launch, plan
from flashdelta.runtime import call as way

spent, stack = {}, []


def timed(owner, name, label):
    f = getattr(owner, name)

    def g(*a, **k):
        t = time.perf_counter()
        stack.append(0.0)
        try:
            return f(*a, **k)
        finally:
            whole = (time.perf_counter() - t) * 1e6
            inner = stack.pop()
            if stack:
                stack[-1] += whole
            spent.setdefault(label, []).append(whole - inner)

    setattr(owner, name, g)


for owner, name, label in [
    (cache.LaunchCache, "find", "cache: find"), (cache.LaunchCache, "keep", "cache: keep"),
    (way.Dispatcher, "first", "dispatch: first (rest)"), (way.Dispatcher, "check_on_all_ranks", "check: rest"),
    (operations.Operation, "check", "check: validator"), (backends, "choose", "check: choose backend"),
    (backends.BACKENDS[0], "build", "build: rest"), (hopper_build, "in_slots", "build: in_slots"),
    (hopper_build, "stages_of", "build: layouts, inputs"), (backward_pass.Workspace, "allocate", "build: workspace"),
    (stage_launch, "bind", "build: bind"), (plan.Plan, "locate", "plan: locate"), (plan.Plan, "_prepare", "plan: _prepare (rest)"),
    (launch.Launch, "prepare", "plan: Launch.prepare"), (launch.Launch, "compiled", "plan: key of the compiled kernel"),
    (plan.Plan, "execute", "execute: allocate, launch"),
]:
    if hasattr(owner, name):
        timed(owner, name, label)
whole = [once(op, c) for c in hot]
show("with timers: first", whole)
for label, x in sorted(spent.items(), key=lambda item: -sum(item[1])):
    print(f"   {label:40} {sum(x) / COUNT:7.1f} us a call, {len(x) / COUNT:4.1f} times")

hot = [make(at + 16 * i) for i in range(COUNT)]
torch.cuda.synchronize()
profile = cProfile.Profile()
for c in hot:
    torch.cuda.synchronize()
    profile.enable()
    op(**c)
    profile.disable()
for order in ("cumulative", "tottime"):
    pstats.Stats(profile).sort_stats(order).print_stats(25)
