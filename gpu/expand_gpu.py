"""What the copy of an expanded g costs on a Hopper GPU, about 30 s: PYTHONPATH=src:. python /work/tmp/expand_gpu.py

Per shape: chunk_kda with g copied beforehand (the page's figures), and with g as an expanded view (copied in the call); then a
decoding step of 128 sequences, both ways."""
import sys

sys.path[:0] = ["src", "."]
import torch

import flashdelta as fd
from benchmarks.timing import Timer, many_in_a_graph, sustained

DEV, K = torch.device("cuda"), 128
timer = Timer(DEV)


def inputs(B, T, H, HV):
    torch.manual_seed(0)
    new = lambda *s: torch.randn(*s, device=DEV)
    q, k, v, a, b = (new(B, T, *s).bfloat16() for s in ((H, K), (H, K), (HV, K), (HV,), (HV,)))
    gate = dict(A_log=torch.rand(HV, device=DEV).mul(16).log(), use_gate_in_kernel=True)
    gate["dt_bias"] = (torch.rand(HV, device=DEV) - 3)[:, None].repeat(1, K)
    g = a[..., None].expand(-1, -1, -1, K)
    return (q, k, v), {"view": g, "copied": g.contiguous()}, b, gate


def clock(name, runs):
    graphs = {n: many_in_a_graph(f, 0.4) for n, f in runs.items()}
    loops = sustained({n: g for n, (g, _) in graphs.items()}, timer)
    print(name, {n: f"{loops[n] / graphs[n][1] * 1e3:.1f} us" for n in runs}, flush=True)


print(torch.__version__, torch.cuda.get_device_name())
for name, shape in {"16/64 1x8192": (1, 8192, 16, 64), "16/64 8x1024": (8, 1024, 16, 64), "16/32 1x8192": (1, 8192, 16, 32),
                    "2/8 1x8192": (1, 8192, 2, 8)}.items():
    qkv, gs, b, gate = inputs(*shape)
    o = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True, backend="hopper")
    clock(name, {n: lambda g=g: fd.chunk_kda(*qkv, g, b, **gate, **o) for n, g in gs.items()})
for HV in (32, 64):
    qkv, gs, b, gate = inputs(128, 1, 16, HV)
    pool = torch.zeros(128, HV, K, K, device=DEV)
    clock(f"step N128 16/{HV} fp32", {n: lambda g=g: fd.recurrent_kda(*qkv, g, b, **gate, beta_is_logit=True, initial_state=pool)
                                      for n, g in gs.items()})
