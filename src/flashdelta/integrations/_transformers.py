"""Hugging Face's transformers, whose models take KDA from FLA, and so from its integration: nothing of it is replaced."""

from __future__ import annotations

from importlib import metadata

from . import Status, _fla
from .seams import Statement, obstacle

TAKEN = {"chunk_kimi_delta_attention": "chunk_kda", "recurrent_kimi_delta_attention": "fused_recurrent_kda"}
"""Functions of its models, and those of FLA that they become."""

SEAMS = tuple(
    Statement(
        f"transformers.models.{model}.modeling_{model}", name, f"use_kernel_func_from_hub_with_fallback('{fla}', 'fla')"
    )
    for model in ("kimi_linear", "glm5_next")
    for name, fla in TAKEN.items()
)


def status() -> Status:
    """Where it stands, by that of FLA's integration. Imports FLA, if it is there."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return Status("transformers", "not installed", None, "pip install transformers")
    if (found := obstacle("transformers", SEAMS)) is not None:
        return Status("transformers", "unknown version", version, found)
    fla = _fla.status()
    if fla.state in ("active", "possible"):
        return Status("transformers", fla.state, version, f"takes KDA from FLA: {fla.reason}")
    return Status("transformers", "off", version, f"takes KDA from FLA, which is {fla.state}: {fla.reason}")
