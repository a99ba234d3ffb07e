"""The libraries flashdelta is measured beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """`chunk_kda` of a peer, or why there is none."""

    chunk_kda: Callable[..., tuple] | None
    absence: str | None = None


def find_fla() -> Peer:
    """flash-linear-attention's `chunk_kda`, which takes the same arguments under the same names."""
    try:
        from fla.ops.kda import chunk_kda
    except Exception as error:  # FLA probes GPUs and Triton while it is imported, and any of that may fail
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Peer(None, f"FLA can't be imported ({reason}); pip install 'flashdelta[bench]'")
    return Peer(chunk_kda)
