"""What surrounds KDA in FLA's models, in plain PyTorch for tensors on a CPU: convolution, norms, gated MLP, losses.

Every function here has the parameters and the results of one of FLA's, whose Triton kernels need a GPU. It computes in
float32 (float64 for float64 inputs) and rounds once, to the dtype of FLA's result. The functions replaced are those that
FLA's modules call, a level above its autograd functions, so gradients are autograd's, under autocast, too. Nothing is
replaced here: `replacements` says what to replace, and `on_cpu` makes what to put there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..problem.errors import wrong

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def wide(x: Tensor) -> Tensor:
    """In the dtype to compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """`y[t] = activation(bias + sum_w weight[:, w] x[t - W + 1 + w])` for x `[N, T, D]`, and the state then; both wide.

    The state `[N, D, W]` is a sequence's last W inputs, the newest last. No output needs the oldest of them. Weight and
    bias come wide: what is widened here for every sequence would have its gradients rounded before they are summed.
    """
    (N, T, D), W, x = x.shape, weight.shape[1], wide(x)
    past = x.new_zeros(N, W, D) if state is None else wide(state).transpose(1, 2)
    inputs = torch.cat([past, x], 1)
    y = sum(inputs[:, 1 + w : 1 + w + T] * weight[:, w] for w in range(W))
    return ACTIVATIONS[activation](y if bias is None else y + bias), inputs[:, T:].transpose(1, 2)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """x `[B, T, D]`, weight `[D, W]`, states `[N, D, W]` -> y and the final state, in x's dtype, whatever the first's is.

    The residual is added after the activation.
    """
    if cp_context is not None:
        raise wrong("cp_context", "a context", "None (on a CPU a sequence is not split among ranks)")
    tokens, weight, bias = x.flatten(2), wide(weight), None if bias is None else wide(bias)
    if cu_seqlens is None:
        y, state = convolve(tokens, weight, bias, initial_state, activation)
    else:
        bounds = cu_seqlens.tolist()
        states = [None] * len(bounds) if initial_state is None else initial_state.split(1)
        pieces = [tokens[:, start:end] for start, end in pairwise(bounds)]
        results = [convolve(piece, weight, bias, past, activation) for piece, past in zip(pieces, states)]
        outputs, ends = zip(*results)
        y = F.pad(torch.cat(outputs, 1), (0, 0, bounds[0], tokens.shape[1] - bounds[-1]))
        state = torch.cat(ends)
    y = y if residual is None else y + residual.reshape(y.shape)
    # a copy: a view would keep all inputs alive in the cache
    state = state.to(x.dtype, copy=True, memory_format=torch.contiguous_format) if output_final_state else None
    return y.to(x.dtype).reshape(x.shape), state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor | None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A token of every sequence: x has N D elements, in any shape. The cache `[N, D, W]` is overwritten."""
    y, state = convolve(x.reshape(-1, 1, len(weight)), wide(weight), bias, cache, activation)
    if cache is not None:
        with torch.no_grad():
            cache.copy_(state)
    y = y if residual is None else y + residual.reshape(y.shape)
    return y.to(x.dtype).reshape(x.shape), cache


def normalize(x: Tensor, eps: float, is_rms_norm: bool) -> Tensor:
    x = x if is_rms_norm else x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def add(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """The sum as a norm takes it, wide, and as the next residual, in the dtype of the last: it is rounded for that only."""
    if residual is not None:
        total, dtype = wide(x) + residual, residual.dtype
    else:
        total, dtype = wide(x), torch.float32 if residual_in_fp32 else x.dtype
    # not x itself, whose gradient would be rounded before that of the norm is added
    return total, total.to(dtype)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Of `x + residual` `[..., D]`, by groups of channels; weight and bias `[D]`. In x's dtype; `prenorm`: with the sum."""
    total, carried = add(x, residual, residual_in_fp32)
    y = normalize(total.unflatten(-1, (num_groups, -1)), eps, is_rms_norm).flatten(-2)
    y = affine(y, weight, bias).to(x.dtype)
    return (y, carried) if prenorm else y


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of `x + residual` `[..., D]` times `activation(g)`, as above."""
    total, carried = add(x, residual, residual_in_fp32)
    y = affine(normalize(total, eps, is_rms_norm), weight, bias)
    y = (y * ACTIVATIONS[activation](wide(g).reshape(y.shape))).to(x.dtype)
    return (y, carried) if prenorm else y


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """`silu(x) y`, in x's dtype."""
    return (F.silu(wide(x)) * y).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x, y `[..., D]`, weight `[E, D]` -> `[..., E]`."""
    return F.linear(swiglu(x, y), weight, bias)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """`x^(power / (sqrt(x) + 1)) sigmoid(x) y` for positive x, else as `swiglu`."""
    gate = wide(x)
    base = torch.where(gate > 0, gate, 1)  # of the others the root and the logarithm would make the gradient NaN
    gate = torch.where(gate > 0, base ** (power / (base.sqrt() + 1)), gate) * torch.sigmoid(gate)
    return (gate * y).to(x.dtype)


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    """As `swiglu_linear`."""
    return F.linear(powglu(x, y, power), weight, bias)


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of the residuals `[..., D]` by the softmax of their norms' products with the query, and the norm of that."""
    values = torch.stack([wide(x) for x in residuals])
    keys = normalize(values, rms_eps, True) * rms_weight
    weights = torch.softmax((keys * query.flatten()).sum(-1) * scale, 0)
    mixed = (weights[..., None] * values).sum(0)
    if output_rms_weight is not None:
        mixed = normalize(mixed, rms_eps, True) * output_rms_weight
    mixed = mixed.to(residuals[0].dtype)
    return (mixed, weights.detach()) if return_weights else mixed


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: object = None,
) -> tuple[Tensor, Tensor]:
    """Logits `[N, V]`, target `[N]` -> loss `[N]` and its part `lse_square_scale logsumexp^2`, detached; both wide.

    The logits are never overwritten.
    """
    if process_group is not None:
        raise wrong("process_group", "a group", "None (on a CPU the vocabulary is not split among ranks)")
    x = wide(logits) * logit_scale
    if logit_softcapping is not None:
        x = logit_softcapping * torch.tanh(x / logit_softcapping)
    loss = F.cross_entropy(
        x, target.long(), ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    z_loss = torch.where(target != ignore_index, lse_square_scale * x.logsumexp(-1).square(), 0)
    return loss + z_loss, z_loss.detach()


def cross_entropy_module(self: nn.Module, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The `forward` of `FusedCrossEntropyLoss`, which refuses tensors on a CPU."""
    options = (self.label_smoothing, self.logit_scale, self.lse_square_scale, self.logit_softcapping, self.ignore_index)
    loss, z_loss = cross_entropy_loss(input, target, *options, process_group=self.process_group)
    if self.reduction != "none":
        count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
        loss, z_loss = loss.sum() / count, z_loss.sum() / count
    return (loss, z_loss) if self.return_z_loss else loss


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: object = None,
) -> Tensor:
    """x `[N, H]`, target `[N]`, weight `[V, H]` -> the loss of `x weight^T + bias`, a wide scalar. All logits exist at once.

    L2Warp adds the gradients of `l2_penalty_factor / 2` times the mean of the tokens' largest logit squared, and nothing
    to the loss. The mean is over all N tokens, as in FLA from 0.5.1; that of 0.5.0 was over those not ignored.
    """
    logits = F.linear(x, weight, bias)
    options = (label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index)
    loss = cross_entropy_loss(logits, target, *options, process_group=process_group)[0].sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp(min=1)
    if use_l2warp:
        penalty = 0.5 * l2_penalty_factor * wide(logits).max(-1).values.square().sum() / len(x)
        loss = loss + (penalty - penalty.detach())
    return loss


CONV = ("fla.modules.causal_conv1d.ops", "fla.modules.conv.causal_conv1d", "fla.modules.conv.triton.ops")
NORM = ("fla.modules.norm.layernorm", "fla.modules.layernorm")
GATED_NORM = ("fla.modules.norm.fused_norm_gate", "fla.modules.fused_norm_gate")
MLP = ("fla.modules.mlp",)
LOSS = ("fla.modules.fused_cross_entropy.ops", "fla.modules.fused_cross_entropy")
LINEAR_LOSS = ("fla.modules.fused_linear_cross_entropy.ops", "fla.modules.fused_linear_cross_entropy")
MODELS = ("fla.models.modeling_utils", "fla.models.kda.modeling_kda")

PLACES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "causal_conv1d": (causal_conv1d, CONV),
    "causal_conv1d_update": (causal_conv1d_update, CONV),
    "group_norm": (group_norm, NORM),
    "layer_norm": (group_norm, NORM),
    "rms_norm": (partial(group_norm, is_rms_norm=True), NORM),
    "layer_norm_gated": (layer_norm_gated, GATED_NORM),
    "rms_norm_gated": (partial(layer_norm_gated, is_rms_norm=True), GATED_NORM),
    "swiglu": (swiglu, MLP),
    "swiglu_linear": (swiglu_linear, MLP),
    "powglu": (powglu, MLP),
    "powglu_linear": (powglu_linear, MLP),
    "fused_attnres": (fused_attnres, MODELS),
    "cross_entropy_loss": (cross_entropy_loss, LOSS),
    "FusedCrossEntropyLoss.forward": (cross_entropy_module, LOSS),
    "fused_linear_cross_entropy_loss": (fused_linear_cross_entropy_loss, LINEAR_LOSS),
}
"""By FLA's name: ours, and the modules where FLA's code looks the name up, those of 0.6 before those of 0.5."""

NOT_IN_ALL = ("powglu", "powglu_linear", "fused_attnres")
"""FLA 0.5.0 has none of them, and without transformers there are no models."""


class Replacement(NamedTuple):
    """`ours` goes in place of `module.name`."""

    module: ModuleType | type
    name: str
    ours: Callable[..., Any]


def replacements() -> tuple[list[Replacement], list[str]]:
    """What to replace in the installed FLA, 0.5 or 0.6, and what is left as it is: its name and why."""
    found, left = [], []
    for path, (ours, modules) in PLACES.items():
        name, known = path.split(".")[-1], parameters(ours)
        owners = list(owners_of(path, modules))
        if not owners and path not in NOT_IN_ALL:
            left.append(f"{path}: in none of {', '.join(modules)}")
        for owner in owners:
            theirs = parameters(getattr(owner, name))
            if len(theirs) <= len(known) and all(map(is_alike, theirs, known)):
                found.append(Replacement(owner, name, ours))
            else:
                left.append(f"{owner.__name__}.{name}: parameters {shown(theirs)}, known are {shown(known)}")
    return found, left


def owners_of(path: str, modules: Sequence[str]) -> Iterator[Any]:
    """The modules that have the name, or the classes; each once, as FLA 0.6 keeps modules' old names for the new ones."""
    *classes, name = path.split(".")
    seen = []
    for module in modules:
        try:
            owner: Any = importlib.import_module(module)
        except ImportError:
            continue
        for cls in classes:
            owner = getattr(owner, cls, None)
        if owner not in seen and name in getattr(owner, "__dict__", ()):
            seen.append(owner)
            yield owner


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    found = [*inspect.signature(function if owner is None else owner.forward).parameters.values()]
    return found if owner is None else found[1:]  # an autograd function's `apply`: all but its context


def is_alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    """Whether they have the same name, and the same default where both have one."""
    defaults = theirs.default, ours.default
    return theirs.name == ours.name and (theirs.empty in defaults or defaults[0] == defaults[1])


def shown(found: Sequence[inspect.Parameter]) -> str:
    return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in found)


def on_cpu(
    ours: Callable[..., Any], theirs: Callable[..., Any], is_on: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """A function that is `ours` if its first tensor is on a CPU and `is_on()`, else `theirs`, with the arguments untouched."""

    @wraps(theirs)
    def choose(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):
                return (ours if x.device.type == "cpu" and is_on() else theirs)(*args, **kwargs)
        return theirs(*args, **kwargs)

    return choose
