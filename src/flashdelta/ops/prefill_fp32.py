"""`kda_prefill`: whole sequences in float32, head first, with the chunk form's `w` and `u`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import operations
from ..problem.problem import DEFAULT_PRECISION, Precision, PrefillGate
from ..runtime.call import Dispatcher


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    *,
    scale: float | None = None,
    gate: PrefillGate = "none",
    precision: Precision = DEFAULT_PRECISION,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Kimi Delta Attention over whole sequences in float32, head first, with the chunk form's `w` and `u` as results.

    Examples:
        >>> q, k, v, g = (torch.randn(1, 2, 100, 64) for _ in "qkvg")
        >>> k = torch.nn.functional.normalize(k, dim=-1)  # else the state may grow without limit
        >>> o, w, u = fd.kda_prefill(q, k, v, g, torch.rand(1, 2, 100), gate="logsigmoid")
        >>> o.shape, w.shape
        (torch.Size([1, 2, 100, 64]), torch.Size([1, 2, 2, 64, 64]))

    The function of `chunk_kda`, from zero states. With `G` the sums of log decays inside a chunk of `C` tokens and `T` the
    inverse of docs/algorithm.md, `w = T (k exp(G))` and `u = T v`: what a caller needs to run the recurrence itself. Any decay
    is exact: none is formed as a quotient. Also `torch.ops.kda_prefill.forward`. No gradients.

    Args:
        q: `[B, H, T, K]`, float32, contiguous, as all inputs; no norm is taken.
        k: as q.
        v: `[B, H, T, V]`.
        g: `[B, H, T, K]`: log decay per step (natural log, at most 0), or its logit (see `gate`).
        beta: `[B, H, T]`: write strength in `[0, 2)`.
        chunk_size: `C`. `(K, V, C)` is one of (64, 64, 32), (64, 64, 64), (128, 128, 32) and (128, 128, 64).
        scale: factor on the output; `K ** -0.5` by default.
        gate: `"none"`: g is the log decay. `"logsigmoid"`: the log decay is `log sigmoid(g)`.
        precision: of the matrix products. `"tf32x3"`: three TF32 products for each, 21 mantissa bits or more, on tensor
            cores. `"ieee"`: float32 throughout, without tensor cores.
        backend: as in `chunk_kda`; `"reference"` computes in PyTorch.

    Returns:
        `(o [B, H, T, V], w [B, H, Nc, C, K], u [B, H, Nc, C, V])` with `Nc = ceil(T / C)`, float32. Rows of `w` and `u` past
        the last token are zero.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    found = _dispatch((q, k, v, g, beta), (chunk_size, scale, gate, precision, backend))
    return found["o"], found["w"], found["u"]


_dispatch = Dispatcher(operations.PREFILL, kda_prefill)

torch.library.define(
    "kda_prefill::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk_size, *, float? scale=None, str gate='none', "
    f"str precision='{DEFAULT_PRECISION}', str backend='auto') -> (Tensor o, Tensor w, Tensor u)",
)
torch.library.impl("kda_prefill::forward", "default")(kda_prefill)


@torch.library.register_fake("kda_prefill::forward")
def _pretend(*tensors: Tensor | int, **options: object) -> tuple[Tensor, ...]:
    names = (*_dispatch.tensors, *_dispatch.options)
    problem, t = operations.PREFILL.check(_dispatch.defaults | dict(zip(names, tensors)) | options)
    return tuple(t.primary.new_empty(x.shape) for x in problem.results().values())
