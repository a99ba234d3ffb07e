"""Calls of `kda_prefill`: the cases of every tier, their inputs head first, and the truth."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from flashdelta import reference
from flashdelta.problem.operations import PREFILL_SIZES, prefill_problem

from .cases import FP32, HARD_CASES, LENGTHS, Case
from .inputs import make_call
from .oracle import TOLERANCE, assert_close, conditioning

INPUTS = ("q", "k", "v", "g", "beta")

Results = tuple[Tensor, Tensor, Tensor]

PLAIN = Case("plain", "log decays of any size, normalised keys", l2norm=False, K=64, V=64, H=2, HV=2)
LOGITS = replace(PLAIN, name="logits", why="g is a logit", gate="logsigmoid", T=66)

LENGTH_CASES = [replace(PLAIN, name=f"T{T}", T=T) for T in (0, *LENGTHS)]
BATCH_CASES = [
    replace(PLAIN, name="B3", B=3, H=1, HV=1, why="the batch stride"),
    replace(PLAIN, name="H3", B=2, H=3, HV=3, T=40, why="the head stride"),
    replace(PLAIN, name="many heads", B=2, H=9, HV=9, T=70, why="wide slices of the states"),
    replace(PLAIN, name="scale", scale=0.7, why="a scale that is not K ** -0.5"),
    LOGITS,
]
HARD = [
    replace(case, K=64, V=64, H=1, HV=1, l2norm=False, safe=False, beta="value", T=min(case.T, 130), state=None)
    for case in HARD_CASES
    if case.gate in ("none", "logsigmoid") and case.beta == "value"
]
CASES = [*LENGTH_CASES, *BATCH_CASES, *HARD]


def sized(case: Case, size: tuple[int, int, int]) -> Case:
    """The case at `(K, V, C)`."""
    K, V, C = size
    return replace(case, K=K, V=V, chunk_size=C)


def size_id(size: tuple[int, int, int]) -> str:
    return "K{}-V{}-C{}".format(*size)


SIZES = PREFILL_SIZES


def prefill_call(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> dict:
    """Arguments of `kda_prefill`."""
    call = make_call(case, FP32, device, seed)
    tensors = {name: call[name].transpose(1, 2).contiguous() for name in INPUTS}
    options = {"chunk_size": case.chunk_size, "gate": case.gate}
    return tensors | options | ({} if case.scale is None else {"scale": case.scale})


def truth(call: dict) -> Results:
    """The reference in float64."""
    exact = {name: call[name].double() for name in INPUTS}
    options = SimpleNamespace(**{"scale": None, "precision": "ieee"} | call)
    return tuple(reference.prefill(*prefill_problem(options, exact)).values())


def hold(case: Case, results: Results, want: Results) -> None:
    """Every result within the tolerance of float32, and nothing in the rows past the end."""
    tolerance = TOLERANCE[FP32] * conditioning(case, FP32)
    for name, got, exact in zip("owu", results, want):
        assert got.dtype == FP32 and got.is_contiguous()
        assert_close(name, got, exact, tolerance)
    for x in results[1:]:
        assert x.flatten(2, 3)[:, :, case.T :].eq(0).all()
