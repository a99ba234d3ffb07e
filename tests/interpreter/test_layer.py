"""`fd.gated_rms_norm` and `fd.short_convolution` by their Triton kernels, run on the CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import convolution as triton_convolution

from ..support.layer import (
    CONVOLUTION_BY_NAME,
    CONVOLUTION_CASES,
    NORM_BY_NAME,
    NORM_CASES,
    ConvolutionCase,
    NormCase,
    checkpoints_by_tokens,
    convolved_by_tokens,
    gradients,
    make_convolution,
    make_norm,
    normed_by_rows,
)
from ..support.oracle import poisoned_memory, same_bits

close = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)
norm = partial(fd.gated_rms_norm, backend="triton")
convolution = partial(fd.short_convolution, backend="triton")


def check_gradients(operator: partial, call: dict) -> None:
    """Against those of the reference in float64."""
    want = gradients(operator.func, call, torch.float64)
    with poisoned_memory():
        found = gradients(operator, call)
    for name, x in found.items():
        close(x, want[name].float(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norm(case: NormCase):
    call = make_norm(case)
    with poisoned_memory():
        o = norm(**call)
    close(o, normed_by_rows(call).float())


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_gradients_of_the_norm(case: NormCase):
    check_gradients(norm, make_norm(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype):
    call = make_norm(NORM_BY_NAME["fused"], dtype)
    torch.testing.assert_close(norm(**call), normed_by_rows(call).to(dtype))
    call = make_convolution(CONVOLUTION_BY_NAME["packed_fla"], dtype)
    (o, final), (want, states) = convolution(**call), convolved_by_tokens(call)
    torch.testing.assert_close(o, want.to(dtype))
    assert same_bits(final, states.to(dtype))


def check_convolution(case: ConvolutionCase) -> None:
    call = make_convolution(case)
    want, states = convolved_by_tokens(call)
    buffer = checkpoints_by_tokens(call) if "checkpoint_states" in call else None
    with poisoned_memory():
        o, final = convolution(**call)
    if buffer is not None:
        assert same_bits(call["checkpoint_states"].contiguous(), buffer.float().contiguous())
    there = ~want.isnan()
    close(o[there], want[there].float())
    assert same_bits(call["state_pool"] if final is None else final, states.float())


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=str)
def test_convolution(case: ConvolutionCase):
    check_convolution(case)


IN_GRADIENTS = [case for case in CONVOLUTION_CASES if case.indices is None and not case.buffer]


@pytest.mark.parametrize("case", IN_GRADIENTS, ids=str)
def test_gradients_of_the_convolution(case: ConvolutionCase):
    check_gradients(convolution, make_convolution(case))


@pytest.mark.parametrize(
    "case",
    [
        ConvolutionCase("exchanged", "as many tokens for each group", T=64, final=False),
        ConvolutionCase("exchanged_ragged", "a token more for some, a bias", T=55, bias=True, final=False),
        ConvolutionCase("exchanged_few", "fewest tokens", T=19, W=3, activation=None, final=False),
        ConvolutionCase("exchanged_two", "two taps, a slice", T=38, W=2, sliced=True, final=False),
        ConvolutionCase("alone", "states, and a sum that is complete", T=50, state=0, bias=True),
        ConvolutionCase("alone_fla", "states of W inputs, groups without tokens", T=3, state=1),
        ConvolutionCase("alone_packed", "a packed sequence", lengths=(45,), state=1, W=3, bias=True),
    ],
    ids=str,
)
def test_gradients_by_groups_of_one_tile(case: ConvolutionCase, monkeypatch: pytest.MonkeyPatch):
    """Whose last gradients need the first ones of the next group, and which leaves no sums to add."""
    config = triton_convolution.ConvolutionConfig(max(case.tokens, 16), 32, 1, 4, 255, groups=4)
    monkeypatch.setattr(triton_convolution, "convolution_config", lambda *given, **options: config)
    monkeypatch.setattr(triton_convolution, "token_tiles", lambda problem, c: (1, 1))
    launched, constants = [], triton_convolution.constants

    def noted(*given: object, **options: object) -> dict[str, object]:
        launched.append(options)
        return constants(*given, **options)

    monkeypatch.setattr(triton_convolution, "constants", noted)
    call = make_convolution(case)
    check_gradients(convolution, call)
    assert {x["EXCHANGE"] for x in launched if "EXCHANGE" in x} == {case.name.startswith("exchanged")}
    first, second = (gradients(convolution.func, call | {"backend": "triton"}) for _ in range(2))
    assert all(same_bits(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("name", ["packed", "packed_new", "short"])
def test_final_states_go_where_they_are_asked_for(name: str):
    call = make_convolution(CONVOLUTION_BY_NAME[name])
    want = convolution(**call)[1]
    memory = torch.full((len(want), want.shape[1], 8), torch.nan)
    final = memory[..., 2 : 2 + want.shape[2]]
    assert same_bits(convolution(**call, final_state=final)[1], want) and same_bits(final.contiguous(), want)
    assert memory[..., :2].isnan().all() and memory[..., 2 + want.shape[2] :].isnan().all()


@pytest.mark.parametrize("W", [2, 3, 4])
def test_nan_goes_no_further_than_the_taps(W: int):
    """Into no other sequence, and no later token than the filter reaches."""
    case = replace(CONVOLUTION_BY_NAME["packed"], W=W)
    call = make_convolution(case)
    clean = convolution(**call)[0]
    call["x"] = call["x"].clone()
    call["x"][0, [10, 41]] = torch.nan  # token 2 of a sequence, and the last but one of it
    found = convolution(**call)[0][0, :61].isnan().all(1)
    hit = torch.zeros(61, dtype=torch.bool)
    hit[10 : 10 + W] = True
    hit[41:43] = True
    assert torch.equal(found, hit)
    kept = convolution(**call)[0][0, :61][~hit]
    assert same_bits(kept, clean[0, :61][~hit])


def test_slots_of_others_are_left_alone():
    """A pool whose slots lie apart: what is between them is not touched."""
    call = make_convolution(CONVOLUTION_BY_NAME["pool"])
    memory = torch.full((6, 24, 8), torch.nan)
    memory[..., 2:5] = call["state_pool"]
    want = convolved_by_tokens(call)[1].float()
    convolution(**call | {"state_pool": memory[..., 2:5]})
    assert same_bits(memory[..., 2:5].contiguous(), want)
    assert memory[..., :2].isnan().all() and memory[..., 5:].isnan().all()


def test_bad_offsets_lead_nowhere():
    """Outside the tensors nothing is read or written; a sequence with good offsets has its own results."""
    call = make_convolution(CONVOLUTION_BY_NAME["packed_new"])
    want = convolution(**call)[0]
    call["cu_seqlens"] = torch.tensor([0, 7, 7, 8, 43, 900, -5], dtype=torch.int32)
    found = convolution(**call)[0]
    assert same_bits(found[:, :43], want[:, :43])
