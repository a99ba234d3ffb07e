"""Where inputs and `out` lie: slices of wider rows, addresses off a 16-byte boundary, head dimensions that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP32, Case
from ..support.oracle import poisoned_memory, truth
from .calls import CALLS_TO_A_REPLAY, KIMI, check, gpu_call, hold

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "fused": {"layout": "fused", "H": 8, "HV": 8},  # rows a multiple of 16 bytes long, as a model's are
    "fused, grouped heads": {"layout": "fused", "H": 4, "HV": 8},
    "fused, odd rows": {"layout": "fused", "H": 3, "HV": 3},
    "one element off": {"layout": "odd_offset"},
    "padded rows": {"layout": "padded"},
    "padded rows, fp32 gate": {"layout": "padded", "wide_gate": True},
    "head first": {"layout": "head_first"},
    "head first, fp32 gate": {"layout": "head_first", "wide_gate": True},
    "one head for all": {"layout": "expanded"},
    "tokens innermost": {"layout": "tokens_innermost"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_fixed_length(layout: str, model: Case, backend: str):
    check(fd.chunk_kda, replace(model, B=2, T=130, **LAYOUTS[layout]), BF16, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_inputs(layout: str, backend: str):
    case = replace(KIMI, lengths=(65, 0, 3, 130), unused=2, state=FP32, v_first=True, **LAYOUTS[layout])
    check(fd.chunk_kda, case, BF16, backend)


@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 128), (64, 64)])
def test_other_head_dims(K: int, V: int, model: Case, backend: str):
    """`tests.gpu.test_semantics` has all head dimensions; here with both kinds of gate, grouped heads, and packed states."""
    case = replace(model, K=K, V=V, H=2, HV=4, lengths=(100, 0, 1, 64, 150), state=FP32)
    check(fd.chunk_kda, case, BF16, backend)
    check(fd.chunk_kda, replace(case, state=BF16, v_first=True), BF16, backend)


OUTS = {
    "wider rows": (64, 0),
    "wider rows, one element off": (64, 1),
    "odd rows": (3, 0),
    "one element off": (0, 1),
}
"""By how many elements rows are wider than they must be, and where the first one starts."""


def slice_like(v: torch.Tensor, pad: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for `out`, all NaN, and a view of it."""
    B, T, HV, V = v.shape
    pitch = HV * V + pad
    memory = torch.full((B * T * pitch + offset,), torch.nan, dtype=v.dtype, device=v.device)
    return memory, memory.as_strided(v.shape, (T * pitch, pitch, V, 1), offset)


@pytest.mark.parametrize("lengths", [None, (65, 0, 3, 130)], ids=["fixed", "packed"])
@pytest.mark.parametrize("layout", OUTS)
def test_out(layout: str, lengths: tuple[int, ...] | None, backend: str):
    batch = 2 if lengths is None else 1
    call = gpu_call(fd.chunk_kda, replace(KIMI, B=batch, T=130, lengths=lengths, state=FP32), BF16, backend)
    memory, out = slice_like(call["v"], *OUTS[layout])
    want = truth(call)
    for _ in range(CALLS_TO_A_REPLAY):
        with poisoned_memory():
            results = fd.chunk_kda(**call, out=out)
        assert results[0] is out
        hold(call, results, want)
        out.fill_(torch.nan)
        assert memory.isnan().all(), "written beside out"
