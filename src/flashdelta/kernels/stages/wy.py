"""Operands and results of stage `wy`, whichever kernels run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem.problem import ChunkProblem, ChunkTensors, WyTensors
from ...program.plan import Outputs
from ...program.workspace import Slots


def wy_operands(
    t: ChunkTensors | WyTensors, Akk_inv: Tensor, h: Tensor, v_new: Tensor, dh: Tensor, dv: Tensor
) -> dict[str, Any]:
    """Operands of `wy` that the kernels take under other names than the call's."""
    return dict(Akk_inv=Akk_inv, h=h, v_new=v_new, grad_o=t.do, o=t.do, grad_h=dh, grad_v_new=dv)


def new_parts(problem: ChunkProblem, memory: Slots, squares: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Room for the results of `wy` for `intra`, under the kernels' names: `grad_q, grad_k [B, T, HV, K]`, and `grad_A` and
    `grad_Aqk`, as `Akk_inv`; in float32 `grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`. `dtype`: of matrices and `grad_q`.
    Where that is bfloat16, `grad_k` is float16, as its error is the larger one, and the halves of its rows are divided by their
    largest elements, `size_k [B, T, HV, 2]`."""
    tokens = (problem.B, problem.T, problem.HV)
    keys = (*tokens, problem.K)
    return dict(
        grad_q=memory.new(keys, dtype),
        grad_k=memory.new(keys, torch.float16 if dtype == torch.bfloat16 else dtype),
        grad_G=memory.new(keys, torch.float32),
        grad_beta=memory.new(tokens, torch.float32),
        grad_A=memory.new(squares, dtype),
        grad_Aqk=memory.new(squares, dtype),
        size_k=memory.new((*tokens, 2), torch.float32),
    )


def wy_results(outputs: Outputs) -> dict[str, Tensor | None]:
    """Results of `chunk_bwd_wy_dqkg` under the kernels' names."""
    names = dict(q="dq", k="dk", G="dg", v="dv", beta="dbeta", A="dA")
    return {f"grad_{name}": outputs[result] for name, result in names.items()} | {"grad_Aqk": None, "size_k": None}
