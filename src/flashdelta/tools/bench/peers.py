"""The libraries flashdelta is measured beside."""

from __future__ import annotations

import functools
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
        return Peer(None, _absence(error))
    return Peer(chunk_kda)


def _absence(error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"FLA can't be imported ({reason}); pip install 'flashdelta[bench]'"


@dataclass(frozen=True)
class DecodePeer:
    """`fused_recurrent_kda` of a peer, in place over a pool, or why there is none."""

    step: Callable[..., object] | None
    absence: str | None = None


def find_fla_decode() -> DecodePeer:
    """flash-linear-attention's launcher of `fused_recurrent_kda`: its public function takes no indices of states."""
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except Exception as error:  # as in find_fla
        return DecodePeer(None, _absence(error))
    return DecodePeer(fused_recurrent_kda_fwd)


@dataclass(frozen=True)
class WyPeer:
    """A peer's fused backward of the WY step, or why there is none. `bind(**inputs)` makes the call on the tensors of
    `kernels.chunk_bwd_wy_dqkg`, by its argument names and with sums of log decays in base 2; the call returns its results."""

    bind: Callable[..., Callable[[], tuple]] | None
    absence: str | None = None


def find_fla_wy() -> WyPeer:
    """flash-linear-attention's launcher of its kernel. What it looks chunks up in is made when binding: a training step makes
    it once for all its kernels."""
    try:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.utils import prepare_chunk_indices
    except Exception as error:  # as in find_fla
        return WyPeer(None, _absence(error))

    def bind(scale: float | None = None, chunk_size: int = 64, **inputs: object) -> Callable[[], tuple]:
        offsets = inputs.get("cu_seqlens")
        settings = {
            "scale": inputs["q"].shape[-1] ** -0.5 if scale is None else scale,  # its own default is no number
            "chunk_size": chunk_size,
            "chunk_indices": None if offsets is None else prepare_chunk_indices(offsets, chunk_size),
        }
        return functools.partial(chunk_kda_bwd_wy_dqkg_fused, **inputs, **settings)

    return WyPeer(bind)
