"""Hugging Face's transformers, whose models take KDA from FLA, and so from its integration. What it replaces in them is what
keeps packed sequences apart."""

from __future__ import annotations

from importlib import metadata

from . import Status, _fla
from .packing import MODELS, obstacle

READ = tuple(f"5.{minor}" for minor in range(17, 25))
"""Versions that this was run with, FLA 0.6 beside them. Others run if what `obstacle` looks for is in theirs."""


def status() -> Status:
    """Where it stands, by that of FLA's integration. Imports FLA, if it is there."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return Status("transformers", "not installed", None, "pip install transformers")
    found = obstacle(*MODELS)
    if found is not None:
        return Status("transformers", "unknown version", version, found)
    fla = _fla.status()
    if fla.state in ("active", "possible"):
        return Status("transformers", fla.state, version, f"takes KDA from FLA: {fla.reason.partition(';')[0]}")
    return Status("transformers", "off", version, f"takes KDA from FLA, which is {fla.state}: {fla.reason}")
