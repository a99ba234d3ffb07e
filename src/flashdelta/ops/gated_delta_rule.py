"""Gated DeltaNet by FLA's names and signatures: `chunk_kda` and `fused_recurrent_kda` with one decay per value head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem.arguments import check_tensor, shape_of
from ..problem.errors import rule
from .chunk import chunk_kda
from .recurrent import fused_recurrent_kda


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet (arXiv 2412.06464) over whole sequences, in chunks, with the signature of FLA's function of this name.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 2, 64) for _ in "qkv")
        >>> g, beta = -torch.rand(1, 128, 2), torch.rand(1, 128, 2)
        >>> o, state = fd.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 128, 2, 64]), torch.Size([1, 2, 64, 64]))

    Arguments, results, errors and source as in `chunk_kda`, but for these.

    Args:
        g: `[B, T, HV]`: one decay per token and value head.
        chunk_indices: not read: chunks follow from `cu_seqlens`.
        options: further ones of `chunk_kda`: `use_gate_in_kernel`, `A_log` and `dt_bias [HV]` as FLA has them, `gate`,
            `backend`, `split` and so on.
    """
    check_scalar(g)
    return chunk_kda(  # type: ignore[return-value]
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        **options,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token: the same function as `chunk_gated_delta_rule`, faster for a few tokens per sequence.

    Example:
        >>> q, k, v = (torch.randn(1, 3, 2, 64) for _ in "qkv")
        >>> g, beta = -torch.rand(1, 3, 2), torch.rand(1, 3, 2)
        >>> fd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0].shape
        torch.Size([1, 3, 2, 64])

    Arguments, results, errors and source as in `fused_recurrent_kda`, but for these.

    Args:
        g: `[B, T, HV]`: one decay per token and value head. Required, as is beta.
        gk: refused: decays per key channel are the g of `fused_recurrent_kda`.
        gv: refused: no kernel has decays per value channel.
        options: further ones of `fused_recurrent_kda`.
    """
    rule("gk", gk is None, "None (decays per key channel are the g of fused_recurrent_kda)", "a tensor")
    rule("gv", gv is None, "None (no kernel has decays per value channel)", "a tensor")
    check_scalar(g)
    return fused_recurrent_kda(
        *(q, k, v, g, beta),  # type: ignore[arg-type]
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **options,
    )


def check_scalar(g: Any) -> None:
    check_tensor("g", g)
    rule("g", g.dim() == 3, "of shape [B, T, HV] (chunk_kda takes decays per key channel)", shape_of(g))
