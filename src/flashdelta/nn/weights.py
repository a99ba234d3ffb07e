"""Weights of other Kimi Delta Attention layers: FLA's `KimiDeltaAttention`, Hugging Face's Kimi-Linear attention, and the names
that Kimi-Linear's own checkpoints have.

    layer.load_state_dict(import_weights(theirs.state_dict()))
    theirs.load_state_dict(export_weights(layer, "fla"))
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..problem.errors import mistyped, rule, wrong
from .attention import KimiDeltaAttention

Form = Literal["fla", "transformers", "checkpoint"]
FORMS: tuple[Form, ...] = ("fla", "transformers", "checkpoint")

SAME = (*(f"{x}_proj.weight" for x in "qkvbo"),)
"""Names that are the same everywhere."""

LOW_RANK = {f"{x}_proj.{i}": f"{x}_{letter}_proj" for x in "fg" for i, letter in enumerate("ab")}
"""FLA's and this package's names of the low-rank projections, and those of the others."""

GATE = "forget_gate."
"""Prefix of Hugging Face's names of the decay's parameters and projection."""

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")

RATES = ("A_log", "dt_bias")
OURS = (*SAME, *RATES, "o_norm", *(f"{x}.{kind}" for x in LOW_RANK for kind in ("weight", "bias")))


def name_in(form: Form, ours: str) -> str:
    """Another layer's name of a weight that is none of the convolutions'."""
    module, _, kind = ours.rpartition(".")
    if ours == "o_norm":
        return "o_norm.weight"
    theirs = f"{LOW_RANK[module]}.{kind}" if module in LOW_RANK and form != "fla" else ours
    decay = ours in RATES or module.startswith("f_proj")
    return GATE + theirs if decay and form == "transformers" else theirs


KNOWN = {name_in(form, ours): ours for form in FORMS for ours in OURS}


def import_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a `KimiDeltaAttention` from that of another one's, whose form is known by its names.

    Args:
        weights: all of the layer's, by the names that they have inside the layer. Not changed.

    Returns:
        New names; tensors are the same where their shape is.

    Raises:
        ValueError: a name that no form has, or one that is missing.
    """
    if not isinstance(weights, Mapping):
        raise mistyped("weights", weights, "a state dict")
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    for name, x in weights.items():
        module, _, kind = name.rpartition(".")
        if module in (*CONVOLUTIONS, "conv1d") and kind in parts:
            parts[kind][module] = x
        elif name in KNOWN:
            found[KNOWN[name]] = x.reshape(-1) if KNOWN[name] in RATES else x
        else:
            raise wrong("weights", repr(name), "by the names of a Kimi Delta Attention layer")
    for kind, by_module in parts.items():
        if by_module:
            found[f"conv_{kind}"] = _convolution(by_module)
    missing = {*SAME, "conv_weight", "o_norm", *(f"{x}.weight" for x in LOW_RANK)} - found.keys()
    rule("weights", not missing, "all of a layer's", f"none for {', '.join(sorted(missing))}")
    return found


def _convolution(by_module: Mapping[str, Tensor]) -> Tensor:
    """Filters of q, k and v side by side, `[D, W]`, or their bias `[D]`."""
    modules = ("conv1d",) if "conv1d" in by_module else CONVOLUTIONS
    missing = [module for module in modules if module not in by_module]
    fits = not missing and len(modules) == len(by_module)
    rule("weights", fits, f"of conv1d or {', '.join(CONVOLUTIONS)}", f"convolutions {sorted(by_module)}")
    x = torch.cat([by_module[module] for module in modules])
    return x.squeeze(1) if x.dim() == 3 else x


def export_weights(layer: KimiDeltaAttention, form: Form) -> dict[str, Tensor]:
    """`layer`'s weights under the names, and in the shapes, of FLA's layer (`"fla"`), of Hugging Face's
    (`"transformers"`), or of Kimi-Linear's checkpoints (`"checkpoint"`). Tensors share memory with the layer's where their
    shape is the same.

    Raises:
        ValueError: another form.
    """
    if not isinstance(layer, KimiDeltaAttention):
        raise mistyped("layer", layer, "a KimiDeltaAttention")
    rule("form", form in FORMS, f"one of {FORMS}", repr(form))
    found: dict[str, Tensor] = {}
    for name, x in layer.state_dict().items():
        if name in ("conv_weight", "conv_bias"):
            kind, x = name.removeprefix("conv_"), x[:, None] if x.dim() == 2 else x
            split = {"conv1d": x}
            if form != "transformers":
                split = dict(zip(CONVOLUTIONS, x.split(layer.conv_channels)))
            found |= {f"{module}.{kind}": part for module, part in split.items()}
        else:
            found[name_in(form, name)] = x.view(1, 1, -1, 1) if name == "A_log" and form != "fla" else x
    return found
