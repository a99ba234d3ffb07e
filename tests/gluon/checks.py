"""Shared by tests of interpreted prefills: calls, poisoned memory, and checks of any call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import flashdelta as fd

from ..gpu.calls import hold, slack_of
from ..support.cases import BF16, Case
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import poisoned_memory, same_bits, truth


def hopper_call(case: Case, **options: object) -> dict:
    return make_call(case, BF16) | {"backend": "hopper"} | options


def steps_call(case: Case) -> dict:
    """In steps of 32 tokens, where these are wanted: split or not, as a split call keeps its chunks."""
    call = hopper_call(case, split=False)
    return call | {"g": call["g"].to(BF16)}


def poisoned(call: dict, op: Callable = fd.chunk_kda) -> tuple[Tensor, ...]:
    """The results, with NaN in `out` and in every allocation at first."""
    with poisoned_memory():
        return op(**call, out=torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype))


def check_steps(case: Case) -> None:
    call = steps_call(case)
    hold(call, poisoned(call), truth(call), slack_of(case, call))


def hold_bits_alone(call: dict, sequences: Iterable[int], op: Callable = fd.chunk_kda) -> None:
    """Each of the sequences finds the same bits without the others."""
    together, offsets = poisoned(call, op), call["cu_seqlens"].tolist()
    for n in sequences:
        tokens = slice(*offsets[n : n + 2])
        alone = call | {name: call[name][:, tokens] for name in TOKEN_TENSORS}
        alone |= {"cu_seqlens": torch.tensor([0, tokens.stop - tokens.start])}
        alone |= {"initial_state": call["initial_state"][n : n + 1]}
        o, state = poisoned(alone, op)
        assert same_bits(together[0][:, tokens], o) and same_bits(together[1][n : n + 1], state)


def hold_nan_inside(call: dict, names: Iterable[str], op: Callable = fd.chunk_kda) -> None:
    """NaN in tokens, or the state, of the second of three sequences reaches all of its tokens, and no other sequence."""
    first, second, third = (slice(*ends) for ends in itertools.pairwise(call["cu_seqlens"].tolist()))
    spoiled = call | {name: call[name].clone() for name in names}
    for name in names:
        spoiled[name][(1,) if name == "initial_state" else (slice(None), second)] = torch.nan
    found, want = op(**spoiled), op(**call)
    for tokens in (first, third):
        assert same_bits(found[0][:, tokens], want[0][:, tokens])
    assert same_bits(found[1][[0, 2]], want[1][[0, 2]])
    assert found[0][:, second].isnan().all()
