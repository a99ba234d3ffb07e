"""The kernels of `kda_prefill` run by Triton's interpreter, in which both precisions are float32."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd
from flashdelta.prefill import INPUTS, PRECISIONS

from ..cases import Case, case_id
from ..oracle import poisoned_memory, relative_error, same_bits
from ..prefills import CASES, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth


def check(case: Case, **options: object) -> None:
    call = prefill_call(case)
    with poisoned_memory():
        results = fd.kda_prefill(**call, **options, backend="triton")
    hold(case, results, truth(call))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_cases(case: Case):
    check(case)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("case", [PLAIN, LOGITS], ids=case_id)
def test_sizes(case: Case, size: tuple[int, int, int], precision: str):
    check(sized(case, size), precision=precision)


def test_a_batch_gives_each_heads_own_bits():
    call = prefill_call(PLAIN)
    whole = fd.kda_prefill(**call, backend="triton")
    for h in range(PLAIN.H):
        one = {name: x[:, h : h + 1].contiguous() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        for got, want in zip(fd.kda_prefill(**one, backend="triton"), whole):
            assert same_bits(got, want[:, h : h + 1])


@pytest.mark.parametrize("g", [-3e-8, -2e-6, -1e-3])
def test_small_decays_are_not_rounded_away(g: float):
    """Over 100,000 tokens the least of these takes 0.3 % of a state: its log must be right to far less than its size."""
    call = prefill_call(PLAIN) | {"g": torch.full((1, 2, 64, 64), g)}
    tensors = {name: call[name][:, :, :64].transpose(1, 2) for name in ("q", "k", "v", "g", "beta")}
    tensors["beta"] = torch.zeros(1, 64, 2)
    ones = torch.ones(1, 2, 64, 64)
    _, state = fd.chunk_kda(**tensors, initial_state=ones, output_final_state=True, backend="triton")
    lost = torch.special.expm1(torch.tensor(64 * g, dtype=torch.float64)).expand_as(state)
    resolution = torch.finfo(torch.float32).eps / -64 / g
    assert relative_error(state.double() - 1, lost) < 2e-6 + resolution


@pytest.mark.parametrize("name", INPUTS)
def test_a_nan_of_a_gpus_arithmetic_is_one_as_any_other(name: str):
    """Of all ones but for the sign: rounded by adding to its bits, it would turn into a zero."""
    found = []
    for bits in (0x7FC0_0000, 0x7FFF_FFFF):
        call = prefill_call(PLAIN)
        call[name].view(torch.int32)[0, 1, 5] = bits
        found.append(fd.kda_prefill(**call, backend="triton"))
    assert found[0][0][0, 1, 5].isnan().any()
    for plain, ones in zip(*found, strict=True):
        assert torch.equal(plain.isnan(), ones.isnan())


def test_traced_calls_run_the_kernels_they_are_asked_for():
    call = prefill_call(LOGITS) | {"backend": "triton", "precision": "ieee"}
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: fd.kda_prefill(**arguments), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**call), fd.kda_prefill(**call)):
        assert same_bits(got, want)
