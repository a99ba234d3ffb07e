"""Errors of rounding alone: the least error of any kernel that multiplies in the working dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashdelta.problem.problem import ChunkProblem, ChunkTensors
from flashdelta.reference.chunk import chunk_kda, from_chunks, prepare, to_chunks
from flashdelta.reference.gate import elementwise_inputs
from flashdelta.reference.states import states_in, states_out

TF32X3_BITS = 22
"""Significant bits of a float32 operand that a 3xTF32 MMA keeps."""


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` (float64) rounded to what a matrix operand of the working dtype holds, as float64."""
    if dtype != torch.float32:
        return x.to(dtype).double()
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**TF32X3_BITS).round(), exponent - TF32X3_BITS)


def substitute(system: Tensor, right: Tensor) -> Tensor:
    """`reference.chunk.solve` in float32, row by row: the error of a library solver varies eightfold among devices."""
    narrow, x = system.float(), right.float()
    for i in range(1, system.shape[-1]):
        x[..., i, :] -= (narrow[..., i, :i, None] * x[..., :i, :]).sum(-2)
    return x.to(system.dtype)


def rounding_error(problem: ChunkProblem, t: ChunkTensors) -> tuple[float, float]:
    """Relative errors of `o` and the final state of the chunk form (docs/algorithm.md) in float64, but for rounding each
    matrix operand to q's dtype once and solving for `inverse` in float32, as every kernel does.

    Usually about half of what a good kernel errs. Far more where the problem itself amplifies rounding: identical keys
    without decay, say. There a float32 solve alone leaves up to 1e-5. For calls that are not packed and pass states directly.
    """
    assert not problem.packed and not problem.has_pool
    wide = torch.float64
    dtypes = dict.fromkeys(("dtype", "output_dtype", "g_dtype", "beta_dtype", "state_dtype"), wide)
    exact = replace(problem, **dtypes, output_final_state=True)
    doubles = ChunkTensors(**{role: x.double() for role, x in t.present().items()})
    o, state, _ = chunk_kda(exact, doubles)
    assert state is not None

    def once(x: Tensor) -> Tensor:
        return round_once(x, problem.dtype)

    chunks = (to_chunks(x, problem.chunk_size, None) for x in elementwise_inputs(exact, doubles))
    S, outputs = states_in(exact, doubles), []
    for q, k, v, g, beta in zip(*chunks):
        p = prepare(q, k, g, beta, substitute)
        v_new = once(once(p.inverse) @ v - once(p.w) @ once(S))
        outputs.append(once(p.qg) @ once(S) + once(p.Aqk) @ v_new)
        S = p.decay[..., None] * S + once(p.kg).transpose(-1, -2) @ v_new
    rounded = from_chunks(torch.stack(outputs), exact, None)
    S = states_out(exact, S, wide)
    return ((rounded - o).norm() / o.norm()).item(), ((S - state).norm() / state.norm()).item()
