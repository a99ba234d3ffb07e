"""`kda_prefill` in PyTorch: the chunk form (`chunk.py`), with `w` and `u = inverse v` kept."""

import torch
from torch import Tensor

from ..problem.problem import ChunkProblem, ChunkTensors
from .chunk import prepare, recur, to_chunks
from .gate import elementwise_inputs


def prefill(problem: ChunkProblem, t: ChunkTensors) -> dict[str, Tensor]:
    """`o [B, H, T, V], w [B, H, Nc, C, K], u [B, H, Nc, C, V]` in the inputs' dtype; by PyTorch's matmul."""
    chunked = [to_chunks(x, problem.chunk_size, None) for x in elementwise_inputs(problem, t)]
    state = chunked[0].new_zeros(problem.B, 1, problem.K, problem.V)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for q, k, v, g, beta in zip(*chunked):
        p = prepare(q, k, g, beta)
        v_new, new = recur(p, v, state)
        results.append((p.qg @ state + p.Aqk @ v_new, p.w, p.inverse @ v))
        state = new
    if not results:
        return {name: t.q.new_empty(x.shape) for name, x in problem.results().items()}
    # by chunk [B * H, 1, C, ..] -> [B, H, Nc, C, ..]
    rows = problem.B // problem.heads, problem.heads
    o, w, u = (torch.cat(parts, dim=1).unflatten(0, rows) for parts in zip(*results))
    return {"o": o.flatten(2, 3)[:, :, : problem.T].contiguous(), "w": w, "u": u}
