"""`gated_rms_norm`: the norm and the gate of the layer's output."""

from __future__ import annotations

from torch import Tensor

from ..problem import operations
from ..problem.problem import NormGate
from ..runtime.call import Dispatcher


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-5, activation: NormGate = "sigmoid", backend: str = "auto"
) -> Tensor:
    r"""RMS norm of rows, times a gate: what follows attention in the layer (Kimi Linear, arXiv 2510.26692,
    section 4).

        o = x / sqrt(mean(x^2) + eps) * weight * act(z)

    In float32, rounded once. Inputs may be strided views, such as slices of a fused projection: if the last dimension is
    dense they are read in place. Differentiable in x, z and weight; the weight's gradient is summed in a fixed order.

    Examples:
        >>> fd.gated_rms_norm(torch.randn(10, 64), torch.randn(10, 64), torch.ones(64)).shape
        torch.Size([10, 64])

    Args:
        x: `[.., V]`, bfloat16, float16 or float32 (float64: reference backend); `V` up to 8192.
        z: x's shape and dtype, or bfloat16 or float16 with x in float32: the gate's input.
        weight: `[V]`, float32 or dtype of x, or bfloat16 or float16 with x in float32.
        eps: added to the mean of squares; above 0, and within float32.
        activation: of the gate, `"sigmoid"` or `"silu"`.
        backend: `"auto"`, `"triton"` or `"reference"`; see `explain`.

    Returns:
        `o`, x's shape and z's dtype, contiguous.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    return _dispatch((x, z, weight), (eps, activation, backend))["o"]


_dispatch = Dispatcher(operations.GATED_RMS_NORM, gated_rms_norm)
