"""What every backend's `gated_rms_norm` and `short_convolution` are held to."""

from __future__ import annotations

import torch

import flashdelta as fd

from ..fuzz.truth import Claim, arguments, sequences
from .held import run_held
from .layer import MARKS, ConvolutionCase, NormCase, gradients, make_convolution, make_norm
from .oracle import poisoned_memory, relative_error, same_bits

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 3e-6, torch.float64: 1e-12}


def checkpoint_claims(call: dict) -> list[Claim]:
    """The checkpoints of `short_convolution`, which `tests.fuzz.truth` leaves out."""
    if "checkpoint_states" not in call:
        return []
    c, claims, next_row = arguments(call), [], 0
    buffer, given = c["checkpoint_states"], c.get("initial_state", c.get("state_pool"))
    lowest, L = c.get("null_index") == "non_positive", c["checkpoint_states"].shape[2]
    for s in sequences(c):
        slot = int(c["state_indices"][s.number]) if "state_indices" in c else s.number
        live = given is not None and lowest <= slot < len(given) and c.get("has_initial_state", [True] * 9)[s.number]
        before = given[slot] if live else buffer.new_zeros(c["x"].shape[2], L)
        inputs = torch.cat([before.mT, c["x"][s.row, s.begin : s.end]])
        if "checkpoint_every" in c:
            places = [*enumerate(range(0, s.length, c["checkpoint_every"]), next_row)]
            next_row += len(places)
        else:
            rows, offsets = (c[name][s.number].reshape(-1).tolist() for name in MARKS)
            places = [(row, offset) for row, offset in zip(rows, offsets) if 0 < offset <= s.length]
        stored = [(row, inputs[offset : offset + L].mT) for row, offset in places if 0 <= row < len(buffer)]
        claims += [Claim("checkpoint_states", (row,), x) for row, x in stored]
    return claims


def check_norm(case: NormCase, dtype: torch.dtype, backend: str = "auto", device: str = "cpu") -> None:
    run_held(fd.gated_rms_norm, make_norm(case, dtype, device) | {"backend": backend}, TOLERANCE[dtype])


def check_convolution(case: ConvolutionCase, dtype: torch.dtype, backend: str = "auto", device: str = "cpu") -> None:
    """States are inputs, to the bit."""
    call = make_convolution(case, dtype, device) | {"backend": backend}
    run_held(fd.short_convolution, call, TOLERANCE[dtype], lambda dtype: 0.0, checkpoint_claims(call))


def check_gradients(op, call: dict, backend: str = "auto", repeats: int = 0) -> None:
    """Against those of the reference in float64; `repeats` have the same bits."""
    want = gradients(op, call, torch.float64)
    with poisoned_memory():
        found, *again = (gradients(op, call | {"backend": backend}) for _ in range(1 + repeats))
    for name, x in found.items():
        assert x.shape == want[name].shape and relative_error(x, want[name]) <= TOLERANCE[call["x"].dtype], name
        assert all(same_bits(other[name], x) for other in again), name
