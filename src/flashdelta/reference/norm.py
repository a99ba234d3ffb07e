"""The definition of the gated RMS norm, `rmsnorm(x) * weight * act(z)` over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.problem import NormProblem, NormTensors, wider

ACTIVATIONS = {"none": lambda x: x, "sigmoid": torch.sigmoid, "silu": F.silu}


def gated_rms_norm(problem: NormProblem, t: NormTensors) -> tuple[Tensor, None, None]:
    """`(o, None, None)`."""
    x, z, weight = (x.to(wider(problem.dtype)) for x in (t.x, t.z, t.weight))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + problem.eps)
    return (normed * weight * ACTIVATIONS[problem.activation](z)).to(problem.output_dtype).contiguous(), None, None
