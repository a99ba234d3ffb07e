"""`fused_recurrent_kda`: whole sequences, token by token."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ..problem import operations
from ..problem.errors import by_keyword, named_options
from ..problem.problem import GateName, NullIndex
from ..runtime.call import Dispatcher


@named_options
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *positional: NoReturn,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool | None = None,
    cu_seqlens: Tensor | None = None,
    gate: GateName | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token: the same function as `chunk_kda`, faster for a few tokens per sequence.

    Examples:
        >>> q, k, v, g = (torch.randn(1, 3, 2, 64) for _ in "qkvg")
        >>> o, _ = fd.fused_recurrent_kda(q, k, v, g, torch.rand(1, 3, 2), gate="logsigmoid")
        >>> o.shape
        torch.Size([1, 3, 2, 64])

    Arguments, results, errors and source as in `chunk_kda`; the matrix products are exact float32 here. Only the
    chunked kernels have gradients: a call whose inputs require grad runs as `chunk_kda`.

    Returns:
        `(o [B, T, HV, V], final_state or None)`.
    """
    if positional:
        raise by_keyword(fused_recurrent_kda, positional)
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, out, final_state, state_pool,
        state_indices, has_initial_state,
    )  # fmt: skip
    options = (
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, state_v_first, gate, backend, null_index,
    )  # fmt: skip
    found = _dispatch(tensors, options)
    return found["o"], found.get("final_state")


_dispatch = Dispatcher(operations.RECURRENT, fused_recurrent_kda)
