"""The operator `chunk_bwd_wy_dqkg` on the GPU: against float64, beside FLA number by number, bit for bit again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from benchmarks.contenders import fla_wy

from ..support.cases import BF16, FP16, FP32
from ..support.wy import BY_NAME, NAMES, WyCase, check_wy, errors, exact, make_wy
from .calls import case_and_dtype, in_turn, peer

pytestmark = pytest.mark.gpu

MODEL = WyCase("model", "heads of 128", K=128, V=128, T=300, H=4, HV=4, log2=True)
LENGTHS = (1, 63, 64, 65, 0, 300)
PACKED = replace(MODEL, name="model_packed", lengths=LENGTHS)
CASES = [
    MODEL,
    replace(MODEL, name="model_rows", B=3, T=65, v_first=True),
    replace(MODEL, name="model_rounds", why="several items a program", B=2, H=16, HV=32),
    PACKED,
    replace(MODEL, name="model_packed_v_first", lengths=LENGTHS, v_first=True),
    replace(MODEL, name="model_grouped", H=2, HV=6),
    replace(MODEL, name="model_strided", B=2, layout="head_first"),
    replace(MODEL, name="model_small", K=64, V=64, log2=False),
    replace(MODEL, name="model_uneven", K=64, V=128),
    replace(MODEL, name="model_large", K=256, V=256),
    replace(MODEL, name="model_chunk32", chunk_size=32),
    replace(MODEL, name="model_none", why="no token, with heads for which there would be tensor descriptors", T=0),
    *(BY_NAME[name] for name in ("packed32", "strided", "one", "none", "no_sequence")),
]
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}
wy = fd.kernels.chunk_bwd_wy_dqkg


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES), ids=case_and_dtype)
def test_results_are_the_reference(case: WyCase, dtype: torch.dtype, backend: str):
    check_wy(case, dtype, backend, "cuda", TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [None, (1300, 547, 0, 201)], ids=["fixed", "packed"])
def test_results_are_flas(lengths: tuple[int, ...] | None, backend: str):
    """The same tensors, the same definitions: what differs is rounding, and our error is not above 1.1 times FLA's."""
    fla = peer("fla_wy")
    call = make_wy(replace(MODEL, T=2048, H=32, HV=32, lengths=lengths), BF16, "cuda")
    theirs = fla_wy(fla, call)()
    want, ours = exact(call), wy(**call, backend=backend)
    mine, his = errors(ours, want), errors(theirs, want)
    print(f"ours {mine}, FLA {his}")
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(ours, theirs))
    assert all(math.isfinite(mine[name]) and mine[name] <= 1.1 * his[name] for name in NAMES)
