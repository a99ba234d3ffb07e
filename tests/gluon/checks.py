"""What the tests of interpreted prefills share: calls, poisoned memory, and checks of any call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import flashdelta as fd

from ..gpu.calls import hold, slack_of
from ..support.cases import BF16, Case
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import poisoned_memory, relative_error, same_bits, truth


def hopper_call(case: Case, **options: object) -> dict:
    return make_call(case, BF16) | {"backend": "hopper"} | options


def steps_call(case: Case) -> dict:
    """In steps of 32 tokens, where these are wanted: split or not, as a split call keeps its chunks."""
    call = hopper_call(case, split=False)
    return call | {"g": call["g"].to(BF16)}


def poisoned(call: dict) -> tuple[Tensor, ...]:
    """The results of `chunk_kda`, with NaN in `out` and in every allocation at first."""
    with poisoned_memory():
        return fd.chunk_kda(**call, out=torch.full(call["v"].shape, torch.nan, dtype=BF16))


def check_steps(case: Case) -> None:
    call = steps_call(case)
    hold(call, poisoned(call), truth(call), slack_of(case, call))


def hold_errors(
    found: Iterable[Tensor], other: Iterable[Tensor], want: Iterable[Tensor], more: Iterable[float]
) -> None:
    """To `more` times those of `other`, for each result."""
    for got, old, true, times in zip(found, other, want, more):
        assert relative_error(got, true) < times * relative_error(old, true)


def hold_bits_alone(call: dict, sequences: Iterable[int]) -> None:
    """Each of the sequences finds the same bits without the others."""
    together, offsets = poisoned(call), call["cu_seqlens"].tolist()
    for n in sequences:
        tokens = slice(*offsets[n : n + 2])
        alone = call | {name: call[name][:, tokens] for name in TOKEN_TENSORS}
        alone |= {"cu_seqlens": torch.tensor([0, tokens.stop - tokens.start])}
        alone |= {"initial_state": call["initial_state"][n : n + 1]}
        o, state = poisoned(alone)
        assert same_bits(together[0][:, tokens], o) and same_bits(together[1][n : n + 1], state)


def hold_nan_inside(call: dict, names: Iterable[str]) -> None:
    """NaN in tokens of the second of three sequences reaches all of its tokens, and no other sequence."""
    first, second, third = (slice(*ends) for ends in zip(call["cu_seqlens"].tolist(), call["cu_seqlens"].tolist()[1:]))
    want = fd.chunk_kda(**call)
    spoiled = call | {name: call[name].clone() for name in names}
    for name in names:
        spoiled[name][:, second] = torch.nan
    found = fd.chunk_kda(**spoiled)
    for tokens in (first, third):
        assert same_bits(found[0][:, tokens], want[0][:, tokens])
    assert same_bits(found[1][[0, 2]], want[1][[0, 2]])
    assert found[0][:, second].isnan().all()
