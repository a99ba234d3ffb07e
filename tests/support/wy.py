"""Calls of `fd.kernels.chunk_bwd_wy_dqkg`, and the gradients that they must find."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import flashdelta as fd

from .cases import Case
from .inputs import LAYOUTS, Source, packed_offsets
from .oracle import poisoned_memory

NAMES = ("dq", "dk", "dv", "dbeta", "dg", "dA")
TENSORS = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "dh", "do", "dv")


@dataclass(frozen=True, kw_only=True)
class WyCase(Case):
    """Sizes, layouts and scale of a call. `log2`: sums of decays in base 2. `decay`: the largest of a token."""

    log2: bool = False
    decay: float = 0.2


CASES = [
    WyCase("plain", "a chunk and a tail"),
    WyCase("rows", "sequences side by side", B=2, T=65),
    WyCase("grouped", "query and key heads that serve several value heads", H=1, HV=3),
    WyCase("v_first", "states with V first", v_first=True),
    WyCase("log2", "sums in base 2, as FLA has them", log2=True, scale=0.3),
    WyCase("chunk32", "the other chunk size, K > V", chunk_size=32, K=64, V=32),
    WyCase("packed", "gapless rows of states, empty sequences", lengths=(17, 0, 64, 1, 66), v_first=True),
    WyCase("packed32", "the same with K first and grouped heads", lengths=(33, 31, 0), chunk_size=32, HV=4),
    WyCase("strong", "decays that are gone within a chunk", decay=30.0),
    WyCase("strided", "views that are not dense", layout="head_first", B=2, T=33),
    WyCase("one", "one token", T=1),
    WyCase("none", "no token", T=0),
    WyCase("no_sequence", "offsets of no sequence", lengths=()),
]
BY_NAME = {case.name: case for case in CASES}


def chunks(call: dict) -> Iterator[tuple[int, int, int, int]]:
    """Batch row, first and past-the-last token, and row of states of every chunk."""
    B, T = call["q"].shape[:2]
    offsets = [0, T] if call.get("cu_seqlens") is None else call["cu_seqlens"].tolist()
    for b in range(B):
        row = 0
        for begin, end in itertools.pairwise(offsets):
            for start in range(begin, end, call["chunk_size"]):
                yield b, start, min(start + call["chunk_size"], end), row
                row += 1


def make_wy(case: WyCase, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    """The arguments, drawn in float64 and rounded: a case holds the same numbers in every dtype up to rounding."""
    source = Source(torch.float64, "cpu", zlib.crc32(case.name.encode()))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    B, T, HV, C = case.batch, case.tokens, case.HV, case.chunk_size
    keys, values = (B, T, case.H, case.K), (B, T, HV, case.V)
    call: dict = {name: torch.nn.functional.normalize(source.normal(*keys), dim=-1) for name in ("q", "k")}
    call |= {name: source.normal(*values) for name in ("v", "v_new", "do", "dv")}
    call["beta"] = source.uniform(B, T, HV)
    call |= {"chunk_size": C, "state_v_first": case.v_first, "use_exp2": case.log2, "scale": case.scale}
    call |= packed_offsets(case, "cpu")
    decays = -case.decay * source.uniform(B, T, HV, case.K)
    call["g"], call["A"] = torch.zeros_like(decays), torch.zeros(B, T, HV, C, dtype=torch.float64)
    last = -1
    for b, start, end, row in chunks(call):
        last = max(last, row)
        call["g"][b, start:end] = decays[b, start:end].cumsum(0) / (math.log(2.0) if case.log2 else 1.0)
        lower = (0.2 * source.normal(HV, end - start, end - start)).tril(-1)
        inverse = torch.linalg.inv(torch.eye(end - start, dtype=torch.float64) + lower)
        call["A"][b, start:end, :, : end - start] = inverse.transpose(0, 1)
    call |= {name: source.normal(B, last + 1, *case.state_shape) for name in ("h", "dh")}
    tensors = {name: call[name].to(wide if name in ("g", "beta") else dtype).to(device) for name in TENSORS}
    return call | LAYOUTS[case.layout](tensors) | packed_offsets(case, device)


def exact(call: dict) -> dict[str, Tensor]:
    """The results of the float64 reference."""
    wide = {name: call[name].double() for name in TENSORS}
    return dict(zip(NAMES, fd.kernels.chunk_bwd_wy_dqkg(**call | wide | {"backend": "reference"})))


def check_wy(case: WyCase, dtype: torch.dtype, backend: str, device: str, tolerance: float) -> None:
    call = make_wy(case, dtype, device)
    with poisoned_memory():
        found = errors(fd.kernels.chunk_bwd_wy_dqkg(**call, backend=backend), exact(call))
    assert all(error <= tolerance for error in found.values()), found


def errors(found: tuple[Tensor, ...], want: dict[str, Tensor]) -> dict[str, float]:
    """`||x - want|| / ||want||` by name; 0 where both are zero."""
    return {
        name: float((x.double() - want[name]).norm() / want[name].norm().clamp(min=1e-300))
        for name, x in zip(NAMES, found)
    }
