"""`kda_prefill` on the GPU against float64: all sizes and precisions, 100,000 tokens, hard inputs; and
calls that repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton.build import build
from flashdelta.problem.operations import PRECISIONS
from flashdelta.runtime import call as runtime

from ..support.cases import Case
from ..support.oracle import poisoned_memory, relative_error
from ..support.prefills import CASES, INPUTS, LOGITS, PLAIN, SIZES, hold, prefill_call, sized, truth
from .calls import assert_same_bits, case_and_dtype, in_turn

pytestmark = pytest.mark.gpu


LONG = [
    replace(PLAIN, name="any decay", T=100_000),
    *(replace(PLAIN, name=hard, hard=hard, T=100_000) for hard in ("g-50", "g_mixed", "g_alternating", "forget")),
    replace(LOGITS, name="logits", T=100_000),
]


def check(case: Case, precision: str) -> None:
    call = prefill_call(case, "cuda")
    with poisoned_memory():
        results = fd.kda_prefill(**call, precision=precision)
    want = truth(call)
    errors = (f"{relative_error(x, y):.1e}" for x, y in zip(results, want))
    print(f"{case.name} K{case.K} C{case.chunk_size} {precision}: o, w, u {' '.join(errors)}")
    hold(case, results, want)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("case", "size"), in_turn(CASES, *SIZES), ids=case_and_dtype)
def test_cases(case: Case, size: tuple[int, int, int], precision: str):
    check(sized(case, size), precision)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("case", "size", "precision"),
    [*((*x, "tf32x3") for x in in_turn(LONG, SIZES[0], SIZES[-1])), (LONG[0], SIZES[-1], "ieee")],
    ids=case_and_dtype,
)
def test_100_000_tokens(case: Case, size: tuple[int, int, int], precision: str):
    check(sized(case, size), precision)


def tokens_of(call: dict, tokens: slice) -> dict:
    return call | {name: call[name][:, :, tokens].contiguous() for name in INPUTS}


@pytest.mark.parametrize(
    ("size", "precision", "arch"),
    [(SIZES[0], "tf32x3", 80), (SIZES[-1], "tf32x3", 89), (SIZES[-1], "tf32x3", 120), (SIZES[-1], "ieee", 80)],
    ids=str,
)
def test_launch_parameters_of_other_gpus(size: tuple[int, int, int], precision: str, arch: int):
    """Launches of an Ada or Ampere GPU, compiled for the one at hand."""
    case = sized(PLAIN, size)
    call = prefill_call(case, "cuda")
    problem, t = runtime.check(fd.kda_prefill, **call, precision=precision)
    with poisoned_memory():
        found = build(problem, t, arch).execute([*t.present().values()])
    hold(case, tuple(found[name] for name in "owu"), truth(call))


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements():
    """The last head lies past element 2^31 of every tensor; it gives the bits that it gives alone, and is held to the truth."""
    B, H, T, K = 2, 66, 131_072, 128
    assert (B * H - 1) * T * K > 2**31
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 74:
        pytest.skip(f"it takes 74 GiB of a GPU, of which {free} are free")
    # one tensor for all: with three results and the workspace there is no room for more
    x = -0.1 * torch.rand(B, H, T, K, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    beta = torch.rand(B, H, T, device="cuda")
    results = fd.kda_prefill(x, x, x, x, beta)
    alone = {name: x[-1:, -1:].clone() for name in INPUTS[:-1]} | {"beta": beta[-1:, -1:].clone()}
    alone |= {"chunk_size": 64, "gate": "none"}
    assert_same_bits([x[-1:, -1:] for x in results], fd.kda_prefill(**alone))
    del x, results
    torch.cuda.empty_cache()
    hold(replace(PLAIN, T=T, K=K, V=K), fd.kda_prefill(**alone), truth(alone))


# ---- repeated calls -------------------------------------------------------------------------------------------------

REPEATED = [
    replace(PLAIN, name="plain", T=200),
    replace(LOGITS, name="batch", B=2, H=3, HV=3, T=130, scale=0.5),
    replace(sized(PLAIN, SIZES[-1]), name="long", H=8, HV=8, T=1000),
]
