"""Packed sequences in Hugging Face's models: transformers' convolution has no offsets, and its models hand none to KDA."""

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

from ..backends import KERNEL
from ..nn.attention import zero_strays
from ..ops.convolution import short_convolution
from .seams import Patch, Patches, differences, folder_of

KIMI, GLM, LING = "kimi_linear", "glm5_next", "bailing_hybrid"
MODELS = {
    KIMI: ("KimiLinearModel", "7adb60450b741b98 cf42c8ddb19ee39d 9c9af705099ff8cf"),
    GLM: ("Glm5NextTextModel", "6c3cec6077e061e1 1aba710c42019808 f8a94f3c1374f73a 7b9296759ccff361"),
    LING: ("BailingHybridModel", "485c9f843443e450 621e8bcb07bc7313 dbe73be1a4d1deef"),
}
"""Modules of its models, each with the model's class and digests of its forward. 5.17 to 5.19 have no `bailing_hybrid`."""

LAYERS = {
    KIMI: ("KimiLinearDeltaAttention", "2a06df465a51e319 1fa7da962277f05e 1ed6ef2f3c223d9b"),
    GLM: ("Glm5NextTextLinearAttention", "2a06df465a51e319 1fa7da962277f05e 1ed6ef2f3c223d9b"),
    LING: ("BailingHybridDeltaAttention", "448305e16f72e68e 23e14169b6a83137 6938f4dfea1416fc"),
}

COLLATED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments by which transformers' flash attention keeps packed sequences apart."""


def path(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


def read(model: str) -> tuple[Patch, ...]:
    """The code of a model that was read, in transformers 5.17 to 5.24."""
    functions = (("causal_conv1d_fn", "716f25cec236331d"), ("chunk_kimi_delta_attention", "63442b3bb4adb8f9"))
    forwards = [(f"{name}.forward", digests) for name, digests in (MODELS[model], LAYERS[model])]
    return tuple(Patch(path(model), *x) for x in (*functions, *forwards))


def obstacle(*models: str) -> str | None:
    """Names the code of these models, where transformers has them, that differs from what was read."""
    root = folder_of("transformers")
    if root is None:
        return None
    there = [x for x in models if (root / "transformers" / "models" / x).is_dir()]
    found = differences([patch for model in there for patch in read(model)], root)
    return f"5.17 to 5.24 as read have other code for {', '.join(found)}" if found else None


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
        (getattr(module, MODELS[model][0]), "forward", packed_model),
    ):
        patches.wrap(owner, name, functools.partial(wrap, is_on=is_on))


def offsets_of(named: dict[str, Any]) -> Tensor | None:
    """Returns a call's offsets, under FLA's name or under that of transformers' collators."""
    found = named.get("cu_seqlens")
    return named.get("cu_seq_lens_q") if found is None else found


def packed_model(original: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """The forward of a model, which hands offsets to its layers: those it is given, or those of positions that begin anew."""
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(names[1:], arguments)) | named
        offsets = offsets_of(call)
        cache = next((call[x] for x in ("cache", "past_key_values") if call.get(x) is not None), None)
        if offsets is None and cache is None and call.get("attention_mask") is None:
            tokens = next((call[x] for x in ("input_ids", "inputs_embeds") if call.get(x) is not None), None)
            offsets = offsets_of_positions(call.get("position_ids"), None if tokens is None else tokens.shape[0])
        if offsets is None or not is_on():
            return original(self, *arguments, **named)
        if cache is not None:
            raise ValueError("packed sequences must come without a cache, which has one state per row; got both")
        _check_full_attention(self.config, call, offsets)
        return original(self, **call | {"use_cache": False, "cu_seqlens": offsets})

    return forward


def _check_full_attention(config: Any, call: dict[str, Any], offsets: Tensor) -> None:
    """Refuses what full attention layers would take for one document: transformers makes their mask of positions, if there is
    no mask, and its flash attention alone reads offsets."""
    if offsets.numel() <= 2 or {*(getattr(config, "layer_types", None) or [""])} == {"linear_attention"}:
        return
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        why = "with packed sequences (full attention mixes them)"
        raise ValueError(f"attention_mask must be None {why}; got {mask.shape}")
    collated = all(call.get(x) is not None for x in COLLATED)
    flash = collated and "flash" in str(getattr(config, "_attn_implementation", ""))
    if not flash and mask is None and call.get("position_ids") is None:
        wanted = "a tensor that begins anew at each packed sequence (without it full attention mixes them)"
        raise ValueError(f"position_ids must be {wanted}; got None")


def offsets_of_positions(positions: Tensor | None, rows: int | None) -> Tensor | None:
    """Offsets of sequences in all rows, if there are more than rows: one begins wherever positions do not go on. Positions of
    one row are those of every row, as transformers reads them. The host waits for the device, as it does where transformers
    makes the mask of these sequences; a compiled model doesn't."""
    if positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return None
    positions = positions if rows is None or len(positions) != 1 else positions.expand(rows, -1)
    starts = F.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=positions.numel()).int() if len(starts) > len(positions) else None


def packed_convolution(original: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """The model's convolution of `[B, D, T]`, which leaves packed sequences apart."""

    @functools.wraps(original)
    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **named: Any) -> Tensor:
        offsets = offsets_of(named)
        if offsets is None or not is_on():
            return original(x, weight, bias=bias, activation=activation, **named)
        rows = x.mT.flatten(0, 1)[None]
        weight, bias = (None if w is None else w if w.dtype == torch.float32 else w.to(x.dtype) for w in (weight, bias))
        y, _ = short_convolution(rows, weight, bias, activation=activation, cu_seqlens=offsets, backend=KERNEL)
        return y.view_as(x.mT).mT

    return causal_conv1d_fn


def packed_attention(original: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """FLA's `chunk_kda` on the model's `[B, T, H, K]`, with the offsets that the model has under another name."""

    @functools.wraps(original)
    def chunk_kimi_delta_attention(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any):
        offsets = offsets_of(named)
        if offsets is None or not is_on():
            return original(query, key, value, g=g, beta=beta, **named)
        q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (query, key, value, g, beta))
        o, state = original(q, k, v, g=g, beta=beta, **named | {"cu_seqlens": offsets.long()})
        return zero_strays(o, offsets).view(value.shape), state

    return chunk_kimi_delta_attention
