"""The launches of a call: the spike's and the original ones, on the same workspace."""

import sys

sys.path[:0] = ["src"] if "src" not in sys.path else []

import torch

import flashdelta as fd
from flashdelta.kernels.hopper import launch as L
from flashdelta.kernels.hopper.prepare_steps import prepare_steps
from flashdelta.kernels.hopper.recurrence import recurrence
from flashdelta.kernels.stages.launch import StageCall
from flashdelta.program.launch import Launch
from flashdelta.runtime.call import check
from prepare_spike import prepare_spike
from recurrence_spike import recurrence_spike

K = V = 128
SMS = 132


def call(T, H, lengths=None, device="cuda"):
    """As a model's layer calls, with random numbers."""
    new = lambda *s, dtype=torch.bfloat16: torch.randn(*s, device=device, dtype=dtype)
    x = dict(q=new(1, T, H, K), k=new(1, T, H, K), v=new(1, T, H, V), g=new(1, T, H, K), beta=new(1, T, H),
             A_log=torch.zeros(H, device=device), dt_bias=torch.zeros(H * K, device=device), output_final_state=True,
             use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0,
             use_beta_sigmoid_in_kernel=True)
    x["initial_state"] = torch.zeros(len(lengths or [T]), H, K, V, device=device)
    if lengths:
        x["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return x


class Launches:
    def __init__(self, x):
        problem, t = check(fd.chunk_kda, **x)
        new = lambda *s, dtype=torch.bfloat16: torch.zeros(s, dtype=dtype, device=t.v.device)
        workspace = {name: new(*shape, dtype=dtype) for name, (shape, dtype) in L.steps_layout(problem).items()}
        self.problem, self.t, self.workspace = problem, t, workspace
        self.tiles = problem.B * problem.slots * problem.HV
        self.o, self.state = new(*t.v.shape), new(problem.N, problem.HV, K, V, dtype=torch.float32)
        self.flags = new(self.tiles, dtype=torch.int32)
        self.prepared, self.scanned = new(1024, 4, dtype=torch.int64), new(SMS, 4, dtype=torch.int64)
        self.stage = StageCall(problem, t, 90, workspace)

    def original(self):
        return prepare_steps(self.stage), recurrence(self.stage, self.o, self.state, None, steps=True)

    def prepare(self, ctas=2 * SMS, flags=False, prefetch=False, registers=128):
        own = dict(tiles_d=L.tiles(self.workspace["tiles"]), decay=self.workspace["decay"], records=self.prepared,
                   flags=self.flags if flags else None, tile_count=self.tiles,
                   PREFETCH=prefetch)
        bound = L.bind_div8(prepare_spike, self.problem, self.t, own)
        return Launch(prepare_spike, min(ctas, self.tiles), *bound, num_warps=4, max_registers=registers)

    def recurrence(self, flags=False, stages=3, loader=40, registers=128, early=True):
        # positional types of the other state arguments come from the original
        of = dict(zip([p.name for p in recurrence_of.params], self.original()[1].arguments))
        own = dict(tiles_d=L.describe(self.workspace["tiles"], (32, 64)), decay=self.workspace["decay"], records=self.scanned,
                   flags=self.flags if flags else None, o=self.o, STAGES=stages, LOADER=loader, EARLY=early,
                   **{n: of[n] for n in ("initial_state", "final_state", "has_initial", "has_final", "state_pitch")})
        bound = L.bind_div8(recurrence_spike, self.problem, self.t, own)
        ctas = min(L.work_tiles(self.problem), SMS)
        return Launch(recurrence_spike, ctas, *bound, num_warps=4, max_registers=registers)


from flashdelta.kernels.hopper.recurrence import recurrence_kernel as recurrence_of  # noqa: E402
