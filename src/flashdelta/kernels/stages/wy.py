"""Operands and results of stage `wy`, whichever kernels run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...problem.problem import ChunkProblem, WyTensors
from ...program.plan import Outputs
from ...program.workspace import Slots


@dataclass(frozen=True)
class WyOperands:
    """Operands of `wy`, under the kernels' names."""

    q: Tensor
    k: Tensor
    g: Tensor
    v: Tensor
    beta: Tensor
    Akk_inv: Tensor
    h: Tensor
    v_new: Tensor
    do: Tensor
    dv: Tensor
    dh: Tensor
    cu_seqlens: Tensor | None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    @staticmethod
    def of(t: WyTensors) -> WyOperands:
        """The operands of `chunk_bwd_wy_dqkg`, the stage on its own."""
        return WyOperands(t.q, t.k, t.g, t.v, t.beta, t.A, t.h, t.v_new, t.do, t.dv, t.dh, t.cu_seqlens)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments under the kernels' names."""
        return dict(vars(self), grad_o=self.do, o=self.do, grad_v_new=self.dv, grad_h=self.dh)


@dataclass(frozen=True)
class Parts:
    """Results of `wy` for `intra`: `grad_q, grad_k [B, T, HV, K]`, and `grad_A` and `grad_Aqk`, as `Akk_inv`; in float32
    `grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`. Where `grad_k` is float16, the halves of its rows are divided by their
    largest elements, `size_k [B, T, HV, 2]`."""

    grad_q: Tensor
    grad_k: Tensor
    grad_G: Tensor
    grad_beta: Tensor
    grad_A: Tensor
    grad_Aqk: Tensor
    size_k: Tensor

    @classmethod
    def allocate(cls, problem: ChunkProblem, memory: Slots, squares: tuple[int, ...], dtype: torch.dtype) -> Parts:
        """`dtype`: of matrices and `grad_q`. Where that is bfloat16, `grad_k` is float16, as its error is the larger one."""
        tokens = (problem.B, problem.T, problem.HV)
        keys = (*tokens, problem.K)
        of_k = torch.float16 if dtype == torch.bfloat16 else dtype
        wide = [(shape, torch.float32) for shape in (keys, tokens, (*tokens, 2))]
        kinds = (keys, dtype), (keys, of_k), *wide[:2], *[(squares, dtype)] * 2, wide[2]
        return cls(*(memory.new(*kind) for kind in kinds))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments under the kernels' names."""
        return vars(self)


def wy_results(outputs: Outputs) -> dict[str, Tensor | None]:
    """Results of `chunk_bwd_wy_dqkg` under the kernels' names."""
    names = dict(q="dq", k="dk", G="dg", v="dv", beta="dbeta", A="dA")
    return {f"grad_{name}": outputs[result] for name, result in names.items()} | {"grad_Aqk": None, "size_k": None}
