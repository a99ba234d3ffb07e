"""The truth that results are held against, and the measures of error.

Truth is the token recurrence in float64. Packed sequences are computed one at a time from slices of the inputs, so the
oracle shares no packing logic with what it judges.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import flashdelta

from .inputs import Inputs

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative error allowed, by dtype of q: a few roundings of the output."""

RECURRENCE_TOKENS = 16384
"""Longest total length for which benchmarks run the recurrence, about 0.1 ms a token on a GPU. Beyond it they take the
chunked reference, also in float64, which agrees with the recurrence to 1e-15."""

Method = Literal["recurrence", "chunked"]
_RECURRENT_ARGUMENTS = frozenset(inspect.signature(flashdelta.fused_recurrent_kda).parameters)
_PER_TOKEN = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Truth:
    """`o [B, T, HV, V]` and `state` (the layout asked for), float64, and how they were computed."""

    o: Tensor
    state: Tensor
    method: Method


def truth(inputs: Inputs, options: Mapping[str, object], method: Method = "recurrence") -> Truth:
    """The float64 result of `chunk_kda(**inputs, **options)`, final state included."""
    wide = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}
    options = {**options, "output_final_state": True, "backend": "reference"}
    op = flashdelta.chunk_kda
    if method == "recurrence":
        op, options = flashdelta.fused_recurrent_kda, recurrent_options(options)
    results = [op(**sequence, **options) for sequence in _sequences(wide)]
    return Truth(torch.cat([o for o, _ in results], dim=1), torch.cat([state for _, state in results]), method)


def recurrent_options(options: Mapping[str, object]) -> dict[str, object]:
    """Those options of `chunk_kda` that `fused_recurrent_kda` has too; the rest only say how to compute in chunks."""
    return {name: value for name, value in options.items() if name in _RECURRENT_ARGUMENTS}


def _sequences(inputs: Inputs) -> list[Inputs]:
    """Each packed sequence as a call of its own."""
    cu_seqlens = inputs.get("cu_seqlens")
    if cu_seqlens is None:
        return [inputs]
    state = inputs.get("initial_state")
    found = []
    for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        sequence = {**inputs, **{name: inputs[name][:, a:b] for name in _PER_TOKEN}}
        found.append({**sequence, "cu_seqlens": None, "initial_state": None if state is None else state[n : n + 1]})
    return found


def relative_error(x: Tensor, reference: Tensor) -> float:
    """`||x - reference|| / ||reference||` (Frobenius, float64); NaN if either holds one, 0 where both are zero."""
    distance = torch.linalg.vector_norm(x.double() - reference).item()
    size = torch.linalg.vector_norm(reference.double()).item()
    if size == 0:
        return 0.0 if distance == 0 else float("inf") if distance == distance else distance
    return distance / size


def absolute_errors(x: Tensor, reference: Tensor) -> tuple[float, float]:
    """Root mean square and maximum of `|x - reference|`, in float64; NaN if either holds one."""
    error = (x.double() - reference).abs()
    return error.square().mean().sqrt().item(), error.max().item()


def fault(error_o: float, error_state: float, tolerance: float | None) -> str | None:
    """What is wrong with results that err so much, if anything; without a tolerance nothing is."""
    if tolerance is None or (error_o <= tolerance and error_state <= tolerance):  # a NaN compares false
        return None
    return f"wrong: error o {error_o:.1e}, state {error_state:.1e}, tolerance {tolerance:.0e}"
