"""Calls whose sequences are to be split, for all tiers."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdelta.problem.split import SplitCosts

from .inputs import Source

COSTS = SplitCosts(step=97, transition=60, compose=150, fixed=800)
CHUNK = 32
LENGTHS = ([1, 31, 32, 33], [0, 200, 0, 65], [331], [7, 640, 1, 0])
"""Empty sequences among long ones, tails, sequences of one chunk."""


def offsets(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def split_inputs(T: int) -> dict[str, Tensor]:
    """q, k (normalised), v, g and beta of one row of `T` tokens."""
    source = Source(torch.float64, "cpu", 0)
    q, k = (torch.nn.functional.normalize(source.normal(1, T, 1, 32), dim=-1) for _ in "qk")
    tensors = {"q": q, "k": k, "v": source.normal(1, T, 2, 64), "g": -0.1 * source.normal(1, T, 2, 32).abs()}
    return {name: x.float() for name, x in (tensors | {"beta": 2.0 * source.uniform(1, T, 2)}).items()}


def split_call(lengths: list[int], v_first: bool = False, **options: object) -> dict:
    """A packed call with initial states; `options` are other arguments of `chunk_kda`."""
    call: dict = split_inputs(sum(lengths)) | {"cu_seqlens": offsets(lengths)}
    states = torch.randn(len(lengths), 2, 32, 64, generator=torch.Generator().manual_seed(1))
    call["initial_state"] = states.mT.contiguous() if v_first else states
    return call | {"state_v_first": v_first, "output_final_state": True, "chunk_size": CHUNK} | options


def split_pool_call() -> dict:
    """Three sequences over a pool: one stores nothing, one has no token; checkpoints on and off the chunk grid, and twice
    at one place."""
    lengths = [150, 64, 0]
    return split_inputs(sum(lengths)) | {
        "cu_seqlens": offsets(lengths),
        "state_v_first": False,
        "use_qk_l2norm_in_kernel": False,
        "state_pool": torch.randn(8, 2, 32, 64, generator=torch.Generator().manual_seed(2)),
        "state_indices": torch.tensor([2, -1, 0]),
        "checkpoint_offsets": torch.tensor([[16, 96], [64, 64], [0, 0]]),
        "checkpoint_indices": torch.tensor([[4, 5], [6, -1], [-1, -1]]),
        "chunk_size": CHUNK,
    }
