"""The libraries flashdelta is measured beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
    """A peer's fused backward of the WY step, with the results and the arguments (by name) of `kernels.chunk_bwd_wy_dqkg`, sums
    of log decays in base 2; or why there is none."""

    wy: Callable[..., tuple] | None
    absence: str | None = None


def find_fla_wy() -> WyPeer:
    """flash-linear-attention's launcher of its kernel."""
    try:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
    except Exception as error:  # as in find_fla
        return WyPeer(None, _absence(error))
    return WyPeer(chunk_kda_bwd_wy_dqkg_fused)


def fla_chunk_indices(cu_seqlens: Tensor | None, chunk_size: int) -> Tensor | None:
    """What FLA's launchers look chunks up in, made once for a training step; by default each of them makes its own."""
    if cu_seqlens is None:
        return None
    from fla.ops.utils import prepare_chunk_indices

    return prepare_chunk_indices(cu_seqlens, chunk_size)
