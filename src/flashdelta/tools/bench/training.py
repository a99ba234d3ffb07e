"""Inputs and truths of the benchmarks of the backward pass: of a training step, and of its WY step by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import flashdelta as fd

from ...reference.chunk import from_chunks, prepare, recur, to_chunks
from ...reference.gate import elementwise_inputs
from ...reference.sequences import chunk_slots
from ...runtime.call import check
from ...testing.cases import BF16, Case
from ...testing.inputs import make_call
from .checks import checked_heads, heads_of
from .profiling import chunk_counts

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
"""Whose gradients are taken."""


# ---- a training step -------------------------------------------------------------------------------------------------


def random_like(x: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator(device=x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def training_inputs(case: Case, device: torch.device) -> tuple[dict, Tensor]:
    """The arguments of a call, leaves among them, and the gradient of `o`."""
    call = make_call(case, BF16, device)
    for name in LEAVES:
        call[name].requires_grad_()
    return call, random_like(call["v"])


def input_bytes(call: dict, grad_o: Tensor) -> int:
    return sum(x.nbytes for x in (*call.values(), grad_o) if isinstance(x, Tensor))


def true_gradients(call: dict, grad_o: Tensor, case: Case) -> dict[int, dict[str, Tensor]]:
    """By checked head and leaf that the call has, from float64 autograd of the reference."""
    found = {}
    names = [name for name in LEAVES if name in call]
    for head in checked_heads(case):
        parts = {name: heads_of(call[name].detach(), name, case, head).double() for name in names}
        leaves = {name: x.contiguous().requires_grad_() for name, x in parts.items()}
        o, *_ = fd.chunk_kda(**call | leaves | {"backend": "reference"})
        grads = torch.autograd.grad(o, list(leaves.values()), heads_of(grad_o, "v", case, head).double())
        found[head] = dict(zip(names, grads))
    return found


# ---- its WY step -----------------------------------------------------------------------------------------------------


def wy_bytes(case: Case) -> int:
    """What the kernel can't avoid moving, each byte once: bf16 inputs with g and beta in fp32, results in fp32 but dv."""
    K, V, H, HV, C = case.K, case.V, case.H, case.HV, case.chunk_size
    read = 2 * 2 * H * K + HV * (4 * 2 * V + 4 * K + 4 + 2 * C)
    written = HV * (3 * 4 * K + 2 * V + 4 + 4 * C)
    return case.B * case.tokens * (read + written) + 2 * 2 * sum(chunk_counts(case)) * HV * K * V


def wy_inputs(case: Case, device: torch.device, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """The tensors of a call, by argument: what a training step has at that point, with a random gradient of `o`. Dense, which
    FLA's kernel takes for granted; computed in float32, rounded once; sums of log decays are in base 2."""
    problem, t = check(fd.chunk_kda, **make_call(case, dtype, device))
    slots = chunk_slots(problem, t)
    elements = elementwise_inputs(problem, t)
    grad_o = random_like(t.v)
    q, k, v, g, beta, do = (to_chunks(x, problem.chunk_size, slots) for x in (*elements, grad_o.to(elements[0].dtype)))
    prepared, before, after, v_new = [], [], [], []
    with torch.enable_grad():
        S, total = v.new_zeros(1, problem.HV, problem.K, problem.V, requires_grad=True), v.new_zeros(())
        for i in range(len(v)):
            S = torch.where(slots.first[i], 0.0, S)
            before.append(S.detach())
            prepared.append(prepare(q[i], k[i], g[i], beta[i]))
            values, new = recur(prepared[i], v[i], S)
            o = prepared[i].qg @ S + prepared[i].Aqk @ values
            total = total + (do[i] * o).sum()
            v_new.append(values)
            after.append(new)
            S = new
        # zeros for the states after a sequence's last chunk, which no output reads
        grads = torch.autograd.grad(total, [*after, *v_new], materialize_grads=True)
    # T = M diag(beta); a token that is not there has a beta of 0, and its column is not looked at
    written = beta.where(beta != 0.0, 1.0)[..., None, :]
    M = torch.stack([p.inverse for p in prepared]) / written
    used = slots.valid.any(-1)

    def rows(states: Sequence[Tensor]) -> Tensor:
        return torch.cat(states)[used].unflatten(0, (problem.B, -1)).to(dtype)

    def tokens(x: Tensor) -> Tensor:
        return from_chunks(x, problem, slots)

    group = problem.group
    return {
        "q": (elements[0][:, :, ::group] / problem.scale).to(dtype).contiguous(),
        "k": elements[1][:, :, ::group].to(dtype).contiguous(),
        "v": t.v,
        "v_new": tokens(torch.stack(v_new).detach()).to(dtype),
        "g": tokens(g.cumsum(-2)) / math.log(2.0),
        "beta": elements[4],
        "A": tokens(M).to(dtype),
        "h": rows(before),
        "dh": rows(grads[: len(v)]),
        "do": grad_o,
        "dv": tokens(torch.stack(grads[len(v) :])).to(dtype),
        "cu_seqlens": t.cu_seqlens,
    }


TRUTH_HEADS = 8
"""Value heads whose truth is computed at a time: float64 takes gigabytes for each."""


def wy_truth(inputs: Mapping[str, Tensor], heads: int = TRUTH_HEADS) -> list[Tensor]:
    """The float64 results, by value heads one after another."""
    HV = inputs["v"].shape[2]
    group = HV // inputs["q"].shape[2]
    step = max(heads // group, 1) * group
    parts = []
    for start in range(0, HV, step):
        own, shared = slice(start, start + step), slice(start // group, (start + step) // group)
        part = {}
        for name, x in inputs.items():
            if name == "cu_seqlens":
                part[name] = x
            else:
                part[name] = x[:, :, shared if name in ("q", "k") else own].double()
        parts.append(fd.kernels.chunk_bwd_wy_dqkg(**part, use_exp2=True, backend="reference"))
    return [torch.cat(found, dim=2) for found in zip(*parts)]
