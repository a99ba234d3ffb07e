"""`kda_prefill` in PyTorch: the chunk form (`chunk.py`), with `w` and `u = inverse v` kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.prefill import PrefillSpec
from ..problem.problem import Tensors
from .chunk import prepare, recur, to_chunks
from .gate import elementwise_inputs


def prefill(problem: PrefillSpec, t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """`(o [B, H, T, V], w [B, H, Nc, C, K], u [B, H, Nc, C, V])` in the inputs' dtype, by PyTorch's matmul."""
    call = problem.call
    chunked = [to_chunks(x, call.chunk_size, None) for x in elementwise_inputs(call, t)]
    state = chunked[0].new_zeros(call.B, 1, call.K, call.V)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for q, k, v, g, beta in zip(*chunked):
        p = prepare(q, k, g, beta)
        v_new, new = recur(p, v, state)
        results.append((p.qg @ state + p.Aqk @ v_new, p.w, p.inverse @ v))
        state = new
    if not results:
        return problem.allocate(t.q.device)
    # by chunk [B * H, 1, C, ..] -> [B, H, Nc, C, ..]
    o, w, u = (torch.cat(parts, dim=1).unflatten(0, (problem.B, problem.H)) for parts in zip(*results))
    return o.flatten(2, 3)[:, :, : call.T].contiguous(), w, u
