"""The circumstances of a measurement: date, versions, GPU, driver, commit."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

import flashdelta

PACKAGES = {"torch": "torch", "triton": "triton", "fla": "flash-linear-attention", "cudnn": "nvidia-cudnn-frontend"}
"""Name of the module, name of the distribution."""


def versions() -> dict[str, str | None]:
    """Versions by module; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "flashdelta": flashdelta.__version__}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            # a source tree on the path has no metadata, but says its version once imported
            found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """The command's standard output, stripped; None if it fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def driver_version() -> str | None:
    """The NVIDIA driver's version, from nvidia-smi."""
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def git_commit() -> str | None:
    """The commit of the source tree this package is imported from, `-dirty` where tracked files differ from it.

    A copy without its history can be told its commit through FLASHDELTA_COMMIT.
    """
    stated = os.environ.get("FLASHDELTA_COMMIT")
    if stated:
        return stated
    here = Path(__file__).resolve().parent
    if _output("git", "ls-files", "--error-unmatch", __file__, cwd=here) is None:
        return None  # installed into an environment that may itself lie in some repository
    return _output("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*", cwd=here)


def gpu(device: torch.device) -> dict[str, object] | None:
    """Name, compute capability, memory (GiB), SM count and L2 size (MiB) of a CUDA device."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    sizes = {"memory_gib": found.total_memory / 2**30, "l2_mib": found.L2_cache_size / 2**20}
    kind = {"name": found.name, "capability": f"sm_{found.major}{found.minor}", "sms": found.multi_processor_count}
    return kind | {name: round(x, 1) for name, x in sizes.items()}


def environment(device: torch.device) -> dict[str, object]:
    """All of the above, and the date, as JSON-ready values."""
    found: dict[str, object] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": str(device)}
    found |= {"gpu": gpu(device), "driver": driver_version(), "cuda": torch.version.cuda}
    return found | {"platform": platform.platform(), "versions": versions(), "commit": git_commit()}
