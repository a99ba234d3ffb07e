"""Packed sequences in Hugging Face's models: transformers' convolution has no offsets, and its models hand none to KDA."""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.convolution import short_convolution
from .patches import Patches
from .seams import folder_of

MODELS = {"kimi_linear": "KimiLinearModel", "glm5_next": "Glm5NextTextModel", "bailing_hybrid": "BailingHybridModel"}
"""Modules of its models, each with the model's class. 5.17 to 5.19 have no `bailing_hybrid`."""

TAKEN = ("chunk_kda", "fused_recurrent_kda")
"""Functions of FLA's that those of its models become."""

CONVOLUTION = """mixed_qkv = causal_conv1d_fn(mixed_qkv, weight=self.conv1d.weight.squeeze(1), bias=self.conv1d.bias, \
activation=self.activation, **kwargs)"""


def path(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


def obstacle(*models: str) -> str | None:
    """Names text that the code of these models lacks, where transformers has them."""
    root, lacks = folder_of("transformers"), []
    wanted = [f"use_kernel_func_from_hub_with_fallback({fla!r}, 'fla')" for fla in TAKEN] + [CONVOLUTION]
    for file in () if root is None else (root / f"{path(x).replace('.', '/')}.py" for x in models):
        if file.is_file():
            code = ast.unparse(ast.parse(file.read_text(encoding="utf-8")))
            lacks += [f"{file.stem} lacks {text}" for text in wanted if text not in code]
    return "; ".join(lacks) or None


def patch(patches: Patches, is_on: Callable[[], bool]) -> None:
    """Lets packed sequences through its models, those that are imported later, too."""
    for model in MODELS:
        patches.when_imported(path(model), functools.partial(_patch, patches, is_on, model))


def _patch(patches: Patches, is_on: Callable[[], bool], model: str, module: ModuleType) -> None:
    found = obstacle(model)
    if found is not None:
        version = metadata.version("transformers")
        warnings.warn(f"flashdelta leaves packed sequences to transformers {version}: {found}", stacklevel=2)
        return
    for owner, name, wrap in (
        (module, "causal_conv1d_fn", packed_convolution),
        (module, "chunk_kimi_delta_attention", packed_attention),
        (getattr(module, MODELS[model]), "forward", packed_model),
    ):
        patches.wrap(owner, name, functools.partial(wrap, is_on=is_on))


def offsets_of(named: dict[str, Any]) -> Tensor | None:
    """Returns a call's offsets, under FLA's name or under that of transformers' collators."""
    found = named.get("cu_seqlens")
    return named.get("cu_seq_lens_q") if found is None else found


def packed_model(theirs: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """The forward of a model, which hands offsets to its layers: those it is given, or those of positions that begin anew."""
    names = tuple(inspect.signature(theirs).parameters)

    @functools.wraps(theirs)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(names[1:], arguments)) | named
        offsets = offsets_of(call)
        cache = next((call[x] for x in ("cache", "past_key_values") if call.get(x) is not None), None)
        if offsets is None and cache is None and call.get("attention_mask") is None:
            tokens = next((call[x] for x in ("input_ids", "inputs_embeds") if call.get(x) is not None), None)
            offsets = offsets_of_positions(call.get("position_ids"), None if tokens is None else tokens.shape[0])
        if offsets is None or not is_on():
            return theirs(self, *arguments, **named)
        if cache is not None:
            raise ValueError("packed sequences must come without a cache, which has one state per row; got both")
        call["use_cache"] = False
        return theirs(self, **call | {"cu_seqlens": offsets})

    return forward


def offsets_of_positions(positions: Tensor | None, rows: int | None) -> Tensor | None:
    """Offsets of sequences in all rows, if there are more than rows: one begins wherever positions do not go on. Positions of
    one row are those of every row, as transformers reads them. The host waits for the device, as it does where transformers
    makes the mask of these sequences; a compiled model doesn't."""
    if positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return None
    positions = positions if rows is None or len(positions) != 1 else positions.expand(rows, -1)
    starts = F.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=positions.numel()).int() if len(starts) > len(positions) else None


def packed_convolution(theirs: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """The model's convolution of `[B, D, T]`, which leaves packed sequences apart."""

    @functools.wraps(theirs)
    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **named: Any
    ) -> Tensor:
        offsets = offsets_of(named)
        if offsets is None or not is_on():
            return theirs(x, weight, bias=bias, activation=activation, **named)
        B, D, T = x.shape
        rows = x.mT.reshape(1, B * T, D)
        weight, bias = (None if w is None else w if w.dtype == torch.float32 else w.to(x.dtype) for w in (weight, bias))
        y, _ = short_convolution(rows, weight, bias, activation=activation, cu_seqlens=offsets)
        return y.view(B, T, D).mT

    return causal_conv1d_fn


def packed_attention(theirs: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """FLA's `chunk_kda` on the model's `[B, T, H, K]`, with the offsets that the model has under another name."""

    @functools.wraps(theirs)
    def chunk_kimi_delta_attention(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any):
        offsets = offsets_of(named)
        if offsets is None or not is_on():
            return theirs(query, key, value, g=g, beta=beta, **named)
        B, T = query.shape[:2]
        q, k, v, g, beta = (x.reshape(1, B * T, *x.shape[2:]) for x in (query, key, value, g, beta))
        o, state = theirs(q, k, v, g=g, beta=beta, **named | {"cu_seqlens": offsets.long()})
        # rows of no sequence may hold anything, which no gradient of zero takes away
        covered = torch.arange(B * T, device=o.device) < offsets[-1]
        return torch.where(covered[:, None, None], o, 0.0).view(B, T, *o.shape[2:]), state

    return chunk_kimi_delta_attention
