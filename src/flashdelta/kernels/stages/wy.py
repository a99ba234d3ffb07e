"""Operands and results of stage `wy`, whichever kernels run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem.problem import ChunkProblem
from ...program.workspace import new


@dataclass(frozen=True)
class WyOperands:
    """What `wy` reads, under the kernels' names."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    Akk_inv: torch.Tensor
    h: torch.Tensor
    v_new: torch.Tensor
    do: torch.Tensor
    dv: torch.Tensor
    dh: torch.Tensor
    cu_seqlens: torch.Tensor | None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """As the kernels take them."""
        return (
            *(self.q, self.k, self.g, self.v, self.beta, self.A_log, self.dt_bias, self.cu_seqlens),
            *(self.Akk_inv, self.h, self.v_new, self.do, self.dv, self.dh),
        )

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What stages before it left."""
        return self.Akk_inv, self.h, self.v_new, self.dv, self.dh


@dataclass(frozen=True)
class Parts:
    """What `wy` leaves for `intra`: in float32 `grad_q, grad_k, grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`; `grad_A` and
    `grad_Aqk`, as `Akk_inv`."""

    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_G: torch.Tensor
    grad_beta: torch.Tensor
    grad_A: torch.Tensor
    grad_Aqk: torch.Tensor

    @classmethod
    def allocate(
        cls, problem: ChunkProblem, device: torch.device, squares: tuple[int, ...], squares_dtype: torch.dtype
    ) -> Parts:
        tokens = (problem.B, problem.T, problem.HV)
        wide = [*[(*tokens, problem.K)] * 3, tokens]
        return cls(
            *(new(shape, torch.float32, device) for shape in wide),
            *(new(squares, squares_dtype, device) for _ in range(2)),
        )

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.grad_q, self.grad_k, self.grad_G, self.grad_beta, self.grad_A, self.grad_Aqk
