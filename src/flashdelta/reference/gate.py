"""The elementwise front of KDA in PyTorch: the gate, beta's sigmoid and the L2 norm."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.errors import wrong
from ..problem.problem import GATES, L2_EPS, AttentionProblem, AttentionTensors, wider
from .sequences import in_sequences


def log_decay(problem: AttentionProblem, t: AttentionTensors) -> Tensor:
    """The gate: the natural-log decay per token and key channel, `[B, T, HV, K]`, in the compute dtype.

    none: `g`.  softplus: `-exp(A_log) softplus(g + dt_bias)`.
    lower_bound: `lower_bound * sigmoid(exp(A_log) (g + dt_bias))`.  logsigmoid: `log sigmoid(g)`.
    """
    x = t.g.to(wider(problem.dtype))
    if problem.gate == "none":
        return x
    if problem.gate == "logsigmoid":
        return F.logsigmoid(x)
    rate = 1.0 if t.A_log is None else t.A_log.to(x.dtype).exp()[:, None]
    if t.dt_bias is not None:
        x = x + t.dt_bias.to(x.dtype)
    if problem.gate == "softplus":
        return -rate * F.softplus(x)
    if problem.gate == "lower_bound":
        return problem.lower_bound * torch.sigmoid(rate * x)
    raise wrong("gate", repr(problem.gate), f"one of {GATES}")


def beta_of(problem: AttentionProblem, t: AttentionTensors) -> Tensor:
    """`beta` in the compute dtype, `[B, T, HV]`."""
    beta = t.beta.to(wider(problem.dtype))
    if problem.beta_kind == "value":
        return beta
    # As rows of 32: for a tensor's last few elements PyTorch's CPU loops use another exp than for the others, so a
    # token's bits would depend on how many there are.
    value = torch.sigmoid(beta[..., None].expand(*beta.shape, 32))[..., 0]
    return value * (2.0 if problem.beta_kind == "double_logit" else 1.0)


def l2_normalize(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + L2_EPS)` over the last dimension; a zero row stays zero."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def without_strays(problem: AttentionProblem, t: AttentionTensors) -> AttentionTensors:
    """Puts zeros for tokens of no sequence. They may hold anything, and a NaN there would reach the gradients of the gate's
    parameters: zero times NaN is NaN."""
    if not problem.packed:
        return t
    valid = in_sequences(problem, t)[None, :, None]
    wide = {role: torch.where(valid[..., None], getattr(t, role), 0) for role in ("q", "k", "v", "g")}
    return replace(t, **wide, beta=torch.where(valid, t.beta, 0))


def elementwise_inputs(problem: AttentionProblem, t: AttentionTensors) -> tuple[Tensor, ...]:
    """`q` (normalised, scaled), `k` (normalised), `v`, log decay and beta, in the compute dtype, all with HV heads."""
    t = without_strays(problem, t)
    dtype = wider(problem.dtype)
    q, k, v = t.q.to(dtype), t.k.to(dtype), t.v.to(dtype)
    if problem.l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * problem.scale
    q, k = (x.repeat_interleave(problem.group, dim=2) for x in (q, k))
    return q, k, v, log_decay(problem, t), beta_of(problem, t)
