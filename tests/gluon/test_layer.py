"""`fd.gated_rms_norm`, `fd.short_convolution` and `nn.KimiDeltaAttention` by the Triton kernels, interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import convolution as triton_convolution

from ..support import layer as cases
from ..support.held import run_held
from ..support.layer_checks import TOLERANCE, check_convolution, check_gradients, check_norm
from ..support.layers import make_layer, rows
from ..support.oracle import poisoned_memory, same_bits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_products")]

convolution = partial(fd.short_convolution, backend="triton")


@pytest.mark.parametrize("case", cases.NORM_CASES, ids=str)
def test_norm_and_its_gradients(case: cases.NormCase):
    check_norm(case, torch.float32, "triton")
    check_gradients(fd.gated_rms_norm, cases.make_norm(case), "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype):
    check_norm(cases.NORM_BY_NAME["fused"], dtype, "triton")
    check_convolution(cases.CONVOLUTION_BY_NAME["packed_fla"], dtype, "triton")


@pytest.mark.parametrize("case", cases.CONVOLUTION_CASES, ids=str)
def test_convolution(case: cases.ConvolutionCase):
    check_convolution(case, torch.float32, "triton")


@pytest.mark.parametrize(
    "case", [case for case in cases.CONVOLUTION_CASES if case.indices is None and not case.buffer], ids=str
)
def test_gradients_of_the_convolution(case: cases.ConvolutionCase):
    check_gradients(fd.short_convolution, cases.make_convolution(case), "triton")


@pytest.mark.parametrize(
    "case",
    [
        cases.ConvolutionCase("exchanged", "as many tokens for each group", T=64, final=False),
        cases.ConvolutionCase("exchanged_ragged", "a token more for some, a bias", T=55, bias=True, final=False),
        cases.ConvolutionCase("exchanged_few", "fewest tokens", T=19, W=3, activation=None, final=False),
        cases.ConvolutionCase("exchanged_two", "two taps, a slice", T=38, W=2, sliced=True, final=False),
        cases.ConvolutionCase("alone", "states, and a sum that is complete", T=50, state=0, bias=True),
        cases.ConvolutionCase("alone_fla", "states of W inputs, groups without tokens", T=3, state=1),
        cases.ConvolutionCase("alone_packed", "a packed sequence", lengths=(45,), state=1, W=3, bias=True),
    ],
    ids=str,
)
def test_gradients_by_groups_of_one_tile(case: cases.ConvolutionCase, monkeypatch: pytest.MonkeyPatch):
    """Whose last gradients need the first ones of the next group, and which leaves no sums to add."""
    config = triton_convolution.ConvolutionConfig(max(case.tokens, 16), 32, 1, 4, 255, GROUPS=4)
    monkeypatch.setattr(triton_convolution, "convolution_config", lambda *given, **options: config)
    monkeypatch.setattr(triton_convolution, "token_tiles", lambda problem, c: (1, 1))
    call = cases.make_convolution(case)
    with mock.patch.object(triton_convolution, "launch", wraps=triton_convolution.launch) as noted:
        check_gradients(fd.short_convolution, call, "triton", repeats=2)
    exchanges = {own["EXCHANGE"] for x in noted.call_args_list if "EXCHANGE" in (own := x.args[4])}
    assert exchanges == {case.name.startswith("exchanged")}


@pytest.mark.parametrize(
    ("name", "target"),
    [("packed", "final_state"), ("packed_new", "final_state"), ("short", "final_state"), ("pool", "state_pool")],
)
def test_nothing_beside_states_is_touched(name: str, target: str):
    """Pools, and final states where they are asked for."""
    case = cases.CONVOLUTION_BY_NAME[name]
    call = cases.make_convolution(case) | {"backend": "triton"}
    states = torch.full((case.N, case.D, 8), torch.nan)[..., 2 : 1 + case.W]
    states.copy_(call.get(target, states))
    run_held(fd.short_convolution, call | {target: states}, TOLERANCE[torch.float32], lambda dtype: 0.0)


@pytest.mark.parametrize("W", [2, 3, 4])
def test_nan_goes_no_further_than_the_taps(W: int):
    """Into no other sequence, and no later token than the filter reaches."""
    case = replace(cases.CONVOLUTION_BY_NAME["packed"], W=W)
    call = cases.make_convolution(case)
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


def test_bad_offsets_lead_nowhere():
    """Outside the tensors nothing is read or written; a sequence with good offsets has its own results."""
    call = cases.make_convolution(cases.CONVOLUTION_BY_NAME["packed_new"])
    want = convolution(**call)[0]
    call["cu_seqlens"] = torch.tensor([0, 7, 7, 8, 43, 900, -5], dtype=torch.int32)
    found = convolution(**call)[0]
    assert same_bits(found[:, :43], want[:, :43])


def test_rows_of_no_sequence_leave_gradients_alone():
    """Whatever memory held there: a step is padded to its tokens, and the loss is of the sequences."""
    layer, offsets = make_layer(torch.float32, backend="triton"), torch.tensor([0, 9, 14])

    def gradients(tokens: int) -> list[torch.Tensor]:
        layer.zero_grad()
        x = rows(1, 20, dtype=torch.float32, device="cpu")[:, :tokens].requires_grad_()
        with poisoned_memory():
            layer(x, cu_seqlens=offsets)[0][:, :14].square().sum().backward()
        return [x.grad[:, :14], *(parameter.grad.clone() for parameter in layer.parameters())]

    for found, want in zip(gradients(20), gradients(14)):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
