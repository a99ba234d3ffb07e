"""Hugging Face's transformers, whose models take KDA from FLA, and so from its integration. Only what keeps packed sequences
apart is replaced in them (`packing.py`)."""

from importlib import metadata

from . import Status, _fla, packing

READ = tuple(f"5.{minor}" for minor in range(17, 25))
"""Versions that this was run with, FLA 0.6 beside them."""

PATCHES = tuple(patch for model in packing.MODELS for patch in packing.read(model))


def status() -> Status:
    """Returns where it stands, by that of FLA's integration. Imports FLA, if it is there."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return Status("transformers", "not installed", None, "pip install transformers")
    found = packing.obstacle(*packing.MODELS)
    if found is not None:
        return Status("transformers", "unknown version", version, found)
    fla = _fla.status()
    if fla.state in ("active", "possible"):
        return Status("transformers", fla.state, version, f"takes KDA from FLA: {fla.reason.partition(';')[0]}")
    return Status("transformers", "off", version, f"takes KDA from FLA, which is {fla.state}: {fla.reason}")
