"""Every backend with kernels, over the whole list of semantics, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, BY_NAME, CASES, FP32, HARD_CASES, Case, case_id, named
from ..support.inputs import TOKEN_TENSORS
from ..support.oracle import same_bits
from ..support.readouts import OPERATORS, check_layer, check_readout
from .calls import KIMI, assert_same_bits, check, gpu_call, on_gpu

pytestmark = pytest.mark.gpu

FP16 = torch.float16
SOME = named(
    *("T1", "T65", "chunk32", "decay", "decay_promised", "softplus", "bounded", "wide_gate", "beta_double"),
    *("gva4", "state_v_first", "state_bf16", "packed", "packed_chunk32", "packed_unused", "fused", "h"),
)
# Heads, lengths and packing are run-time values: these compile nothing new.
RATIOS = [(1, 1), (2, 2), (4, 4), (2, 4), (3, 6), (2, 8), (1, 8), (12, 12)]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 131, 257, 1021)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_bf16(case: Case, op, backend: str):
    check(op, on_gpu(case), BF16, backend)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("case", SOME + HARD_CASES, ids=case_id)
def test_other_dtypes(case: Case, dtype: torch.dtype, op, backend: str):
    check(op, on_gpu(case), dtype, backend)


@pytest.mark.parametrize("V", [32, 64, 128, 256])
@pytest.mark.parametrize("K", [32, 64, 128, 256])
def test_head_dims(K: int, V: int, backend: str):
    case = replace(BY_NAME["state"], K=K, V=V, T=130)
    check(fd.chunk_kda, case, BF16, backend)
    check(fd.fused_recurrent_kda, replace(case, T=20), BF16, backend)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize(("K", "V"), [(256, 256), (64, 256), (256, 32)])
def test_head_dims_other_dtypes(K: int, V: int, dtype: torch.dtype, backend: str):
    check(fd.chunk_kda, replace(BY_NAME["decay"], K=K, V=V, T=130), dtype, backend)


@pytest.mark.parametrize(("H", "HV"), RATIOS)
def test_head_ratios(H: int, HV: int, model: Case, backend: str):
    check(fd.chunk_kda, replace(model, H=H, HV=HV), BF16, backend)
    check(fd.fused_recurrent_kda, replace(model, H=H, HV=HV, T=20), BF16, backend)


@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(T: int, model: Case, backend: str):
    check(fd.chunk_kda, replace(model, T=T, B=2), BF16, backend)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_packed_lengths(dtype: torch.dtype, model: Case, backend: str):
    lengths = (0, *LENGTHS, 0, 0, *reversed(LENGTHS), 0)
    check(fd.chunk_kda, replace(model, lengths=lengths, state=FP32, v_first=True), dtype, backend)


@pytest.mark.parametrize("lengths", [(300, 100, 0, 112), (0, 0, 512, 0), (1, 2, 3, 4), (128,) * 4], ids=str)
def test_tokens_left_over(lengths: tuple[int, ...], model: Case, op, backend: str):
    """As many tokens whatever the lengths, as in a CUDA graph."""
    case = replace(model, lengths=lengths, unused=512 - sum(lengths), state=FP32, v_first=True)
    check(op, case, BF16, backend)


@pytest.mark.parametrize(
    "lengths", [(200,), (1,) * 300, (100, 0, 300), (64,) * 20], ids=["one", "300 of 1", "empty between", "20 chunks"]
)
def test_packed_h(lengths: tuple[int, ...], backend: str):
    """Where the chunks of a sequence start in `h` depends on all sequences before it; 300 are more than one block."""
    check(fd.chunk_kda, replace(KIMI, lengths=lengths, state=FP32, h=True), BF16, backend)


# ---- NaN, and what else must not reach a neighbour ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOKEN_TENSORS, "initial_state"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(bad: float, name: str, op, backend: str):
    call = gpu_call(op, replace(KIMI, lengths=(17, 100, 35), state=FP32), BF16, backend)
    want_o, want_state = op(**call)
    spoiled = call | {name: call[name].clone()}
    if name == "initial_state":
        spoiled[name][1] = bad
    else:
        spoiled[name][:, 17:117] = bad
    o, state = op(**spoiled)
    for tokens, n in ((slice(0, 17), 0), (slice(117, 152), 2)):
        assert_same_bits((o, state[n]), (want_o, want_state[n]), tokens)
    assert not same_bits(o, want_o)


def test_inputs_are_never_written(op, backend: str):
    for case in (*named("fused", "packed", "last_dim_strided", "state_strided"), KIMI):
        call = gpu_call(op, on_gpu(replace(case, h=False)), BF16, backend)
        before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
        op(**call)
        for name, x in before.items():
            assert same_bits(call[name], x), (case.name, name)


# ---- gradients: the reference on the GPU, until a backend has kernels for them --------------------------------------


def test_auto_takes_the_hopper_kernels_on_hopper(model: Case):
    """What the backend declines is skipped in this tier, so that it takes these is a test. Which calls else it must take:
    `tests/unit/test_hopper_choice.py`."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    for lengths in (None, (64, 0, 17)):
        call = gpu_call(fd.chunk_kda, replace(model, lengths=lengths, state=FP32)) | {"backend": "auto"}
        assert fd.explain(fd.chunk_kda, **call).chosen == "hopper"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("readout", OPERATORS, ids=lambda op: op.__name__)
def test_a_readout_past_float16(readout, dtype: torch.dtype):
    check_readout(readout, dtype, "triton", "cuda")


def test_hopper_takes_an_output_in_float32():
    check_readout(fd.recurrent_kda, BF16, "auto", "cuda", state=BF16)


@pytest.mark.parametrize("tokens", [4, 70])
def test_a_layer_in_float16(tokens: int):
    check_layer(tokens, "auto", "cuda")
