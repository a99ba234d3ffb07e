"""`fd.gated_rms_norm` and `fd.short_convolution` without a GPU: the reference, the operators, the launch cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta import backends
from flashdelta.problem import device_checks
from flashdelta.program.launch import REGISTERS
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import CONVOLUTION, CONVOLUTION_OUT, NORM, operator_of
from flashdelta.tools.compile import only_launches
from flashdelta.triton import convolution
from flashdelta.triton.build import build

from ..compile.variants import backward_of
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
    leaves_of,
    make_convolution,
    make_norm,
    normed_by_rows,
)
from ..support.oracle import same_bits
from .conftest import Started

pytestmark = pytest.mark.usefixtures("as_on_gpu")

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def states_after(call: dict, final: Tensor | None) -> Tensor:
    return call["state_pool"] if final is None else final


# ---- the reference ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norm_is_that_of_each_row(case: NormCase):
    call = make_norm(case, torch.float64)
    o = fd.gated_rms_norm(**call)
    assert o.is_contiguous() and o.dtype == torch.float64
    close(o, normed_by_rows(call))


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=str)
def test_convolution_is_that_of_each_token(case: ConvolutionCase):
    call = make_convolution(case, torch.float64)
    want, states = convolved_by_tokens(call)
    buffer = checkpoints_by_tokens(call) if "checkpoint_states" in call else None
    o, final = fd.short_convolution(**call)
    close(o[~want.isnan()], want[~want.isnan()])
    close(states_after(call, final), states)
    if buffer is not None:
        assert torch.equal(call["checkpoint_states"], buffer)


def test_convolution_is_pytorchs():
    call = make_convolution(CONVOLUTION_BY_NAME["bias"], torch.float64)
    x, weight, bias = call["x"].mT, call["weight"], call["bias"]
    want = torch.nn.functional.conv1d(x, weight, bias, padding=3, groups=x.shape[1])[..., : x.shape[2]]
    close(fd.short_convolution(**call)[0], torch.nn.functional.silu(want).mT)


def test_a_checkpoint_is_the_state_that_a_shorter_sequence_leaves():
    call = make_convolution(CONVOLUTION_BY_NAME["state"], torch.float64)
    buffer = call["x"].new_zeros(2, *call["initial_state"].shape[1:])
    marks = {"checkpoint_offsets": torch.tensor([13, 2]), "checkpoint_indices": torch.tensor([1, 0])}
    fd.short_convolution(**call, **marks, checkpoint_states=buffer)
    for n, (offset, row) in enumerate(((13, 1), (2, 0))):
        close(buffer[row], fd.short_convolution(**call | {"x": call["x"][:, :offset]})[1][n])


def test_checkpoints_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    call = make_convolution(CONVOLUTION_BY_NAME["marks"])
    every = make_convolution(CONVOLUTION_BY_NAME["every"])
    offsets, indices, buffer = (call[f"checkpoint_{name}"] for name in ("offsets", "indices", "states"))
    for given, reason in (
        (call | {"checkpoint_states": None}, "checkpoint_offsets: got a tensor without checkpoint_states"),
        (call | {"checkpoint_indices": None}, "checkpoint_indices: got None with checkpoint_offsets"),
        (call | {"checkpoint_offsets": None}, "checkpoint_offsets: got None with checkpoint_indices"),
        (call | {"checkpoint_indices": indices[:, None]}, r"checkpoint_indices: got shape \[4, 1\]"),
        (call | {"checkpoint_offsets": offsets.short()}, "checkpoint_offsets: got dtype torch.int16"),
        (call | {"checkpoint_every": 64}, "checkpoint_every: got a number with checkpoint_offsets"),
        (call | {"checkpoint_states": buffer[:, :5]}, "checkpoint_states: got shape"),
        (
            call | {"checkpoint_states": buffer[..., :2]},
            r"checkpoint_states: got shape \[6, 24, 2\], wanted the last W - 1",
        ),
        (call | {"checkpoint_states": call["x"].mT[..., :3]}, "checkpoint_states: got memory shared with x"),
        (call | {"checkpoint_states": buffer.half()}, "checkpoint_states: got dtype torch.float16"),
        (call | {"checkpoint_states": buffer[:1].expand(6, -1, -1)}, "checkpoint_states: got strides"),
        (every | {"checkpoint_every": 65}, "checkpoint_every: got 65"),
        (every | {"checkpoint_states": None}, "checkpoint_every: got a number without checkpoint_states"),
        (
            every | {"checkpoint_states": every["checkpoint_states"][:5]},
            "checkpoint_states: got 5 rows, wanted at least",
        ),
        (
            every | {"checkpoint_states": every["initial_state"]},
            "checkpoint_states: got 2 rows, wanted at least",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^(?:{reason})"):
            fd.short_convolution(**given)
    with pytest.raises(ValueError, match=r"^checkpoint_states: got a tensor with inputs that require grad"):
        fd.short_convolution(**call | {"x": call["x"].clone().requires_grad_()})
    monkeypatch.setattr(device_checks, "ENABLED", True)
    good = {"checkpoint_offsets": torch.tensor([3, 0, 40, 17])}
    for change, reason in (
        ({"checkpoint_offsets": torch.tensor([3, 0, 41, 40])}, "checkpoint_offsets: got offset 41 of sequence 2"),
        ({"checkpoint_indices": torch.tensor([0, 1, 0, 2])}, "checkpoint_indices: got row 0 again"),
        ({"checkpoint_indices": torch.tensor([0, 1, 6, 2])}, "checkpoint_indices: got index 6"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}"):
            fd.short_convolution(**call | good | change)
    fd.short_convolution(**call | good)


def test_a_cut_changes_nothing():
    """Two calls, the second from the first one's state."""
    call = make_convolution(CONVOLUTION_BY_NAME["state"], torch.float64)
    whole, last = fd.short_convolution(**call)
    first, state = fd.short_convolution(**call | {"x": call["x"][:, :13]})
    second, end = fd.short_convolution(**call | {"x": call["x"][:, 13:], "initial_state": state})
    close(torch.cat([first, second], dim=1), whole)
    close(end, last)


@pytest.mark.parametrize("case", [NORM_BY_NAME[name] for name in ("silu", "fused", "one", "none")], ids=str)
def test_gradients_of_the_norm(case: NormCase):
    call = make_norm(case, torch.float64)
    leaves = leaves_of(call)

    def result(*x: Tensor) -> Tensor:
        return fd.gated_rms_norm(**call | dict(zip(leaves, x)))

    # fast: along random directions, as thousands of elements are not worth a call each
    assert torch.autograd.gradcheck(result, list(leaves.values()), fast_mode=True)


SHORT = {"D": 3, "T": 6}
CHECKED = [
    ConvolutionCase("checked", "all inputs", B=2, state=0, bias=True, **SHORT),
    ConvolutionCase("checked_packed", "packed", lengths=(2, 0, 5, 1), state=1, W=3, D=3, padding=1),
    ConvolutionCase("checked_linear", "no activation", activation=None, W=2, **SHORT),
]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_gradients_of_the_convolution(case: ConvolutionCase):
    call = make_convolution(case, torch.float64)
    leaves = leaves_of(call)

    def results(*x: Tensor) -> tuple[Tensor, Tensor | None]:
        return fd.short_convolution(**call | dict(zip(leaves, x)))

    assert torch.autograd.gradcheck(results, list(leaves.values()))


def test_states_are_in_the_dtype_of_the_first():
    call = make_convolution(CONVOLUTION_BY_NAME["state"], torch.bfloat16)
    assert fd.short_convolution(**call)[1].dtype == torch.bfloat16
    assert fd.short_convolution(**call | {"initial_state": call["initial_state"].float()})[1].dtype == torch.float32
    o, final = fd.short_convolution(**call | {"output_final_state": False})
    assert final is None and o.dtype == torch.bfloat16


def test_output_is_written_where_it_is_asked_for():
    call = make_convolution(CONVOLUTION_BY_NAME["plain"])
    want = fd.short_convolution(**call)[0]
    rows = torch.full((2, 40, 72), torch.nan)
    out = rows[..., 24:48]
    found = fd.short_convolution(**call, out=out)[0]
    assert found is out and same_bits(out, want)
    assert rows[..., :24].isnan().all() and rows[..., 48:].isnan().all()


@pytest.mark.parametrize("name", ["packed", "packed_new", "fla"])
def test_final_states_go_where_they_are_asked_for(name: str):
    """In a dtype of their own, amid other memory; compiled too."""
    call = make_convolution(CONVOLUTION_BY_NAME[name], torch.bfloat16)
    call.pop("output_final_state")
    o, want = fd.short_convolution(**call, output_final_state=True)
    for function in (fd.short_convolution, compiled(lambda **given: fd.short_convolution(**given))):
        memory = torch.full((len(want), want.shape[1], 8), torch.nan)
        final = memory[..., 2 : 2 + want.shape[2]]
        found, state = function(**call, final_state=final)
        assert same_bits(found, o) and same_bits(state, want.float()) and same_bits(final, state)
        assert memory[..., :2].isnan().all() and memory[..., 2 + want.shape[2] :].isnan().all()


def test_a_final_state_that_does_not_fit_is_named():
    call = make_convolution(CONVOLUTION_BY_NAME["state"])
    state = call["initial_state"]
    for final, reason in (
        (state[:1], "got shape"),
        (state[..., 1:], "got shape"),
        (state, "got memory shared with initial_state"),
        (state.clone().requires_grad_(), "got a tensor that requires grad"),
    ):
        with pytest.raises(ValueError, match=f"^final_state: {reason}"):
            fd.short_convolution(**call, final_state=final)
    pool = make_convolution(CONVOLUTION_BY_NAME["pool"])
    with pytest.raises(ValueError, match=r"^final_state: got a tensor with state_pool"):
        fd.short_convolution(**pool, final_state=pool["state_pool"].clone())


# ---- operators --------------------------------------------------------------------------------------------------------------

TRACED = [
    *((fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME[name])) for name in ("heads", "fused")),
    *(
        (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME[name]))
        for name in ("bias", "packed", "pool", "pool_flags", "step", "marks_pool", "every_packed")
    ),
]


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tensors_of(results: object) -> list[Tensor]:
    return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]


@pytest.mark.parametrize(("op", "make"), TRACED)
def test_compiles_in_one_graph(op: Callable, make: Callable[[], dict]):
    eager, traced = make(), make()
    want = tensors_of(op(**eager))
    found = tensors_of(compiled(lambda call: op(**call))(traced))
    assert len(want) == len(found) and all(same_bits(x, y) for x, y in zip(found, want))
    for name in {"state_pool", "checkpoint_states"} & eager.keys():
        assert same_bits(traced[name].contiguous(), eager[name].contiguous())


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME["heads"])),
        (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME["packed_fla"])),
        (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME["plain"])),
    ],
)
def test_compiles_with_gradients(op: Callable, make: Callable[[], dict]):
    want = gradients(op, make())
    function = compiled(lambda call: op(**call))
    for name, x in gradients(lambda **call: function(call), make()).items():
        torch.testing.assert_close(x, want[name])


@pytest.mark.filterwarnings("ignore:.*batching rule")
@pytest.mark.parametrize("tensor", ["x", "weight"])
def test_transforms_take_both(tensor: str):
    for op, call in (
        (fd.gated_rms_norm, make_norm(NORM_BY_NAME["heads"])),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["packed"])),
    ):

        def loss(x: Tensor, op=op, call=call) -> Tensor:
            return tensors_of(op(**call | {tensor: x}))[0].square().sum()

        x = call[tensor].clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(call[tensor]), torch.autograd.grad(loss(x), x)[0])


def test_operators_pass_opcheck():
    square = {"x": torch.rand(2, 8, 8), "z": torch.rand(2, 8, 8), "weight": torch.rand(8)}
    calls = [
        (fd.gated_rms_norm, make_norm(NORM_BY_NAME["rows"]), NORM),
        (fd.gated_rms_norm, {name: x.mT if x.dim() > 1 else x for name, x in square.items()}, NORM),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["packed_fla"]), CONVOLUTION),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["pool"]), CONVOLUTION_OUT),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["every"]), CONVOLUTION_OUT),
    ]
    for op, call, operator in calls:
        problem, t = check(op, **call)
        assert operator_of(problem, t) is operator
        torch.library.opcheck(operator.call, operator.arguments(problem, t, "reference"))


# ---- tiles ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [768, 2048, 4096, 8192])
def test_tiles_of_a_convolution_s_gradients_fill_waves(T: int):
    x = torch.empty(1, T, 12288, dtype=torch.bfloat16, device="meta")
    problem, t = check(fd.short_convolution, x, x.new_empty(12288, 4))
    c = convolution.convolution_config(problem, t.device, backward=True)
    assert c.BT == T if T < 8192 else c.BT % (c.ahead * c.groups) == 0
    assert c.groups * (convolution.MOST_AT_ONCE if T < 8192 else convolution.MOST_TOKENS) >= c.BT
    waves = convolution.token_tiles(problem, c)[1] * problem.D / c.BD / (132 * convolution.BACKWARD.ctas)
    assert 0.85 * math.ceil(waves) < waves
    assert convolution.BACKWARD.ctas == REGISTERS // (32 * c.num_warps * c.max_registers)


@pytest.mark.parametrize(
    ("B", "T", "D"), [(1, 768, 12288), (2, 768, 12288), (1, 8192, 12288), (1, 768, 1536), (1, 60, 12288)]
)
def test_gradients_of_a_filled_wave_leave_no_sums(B: int, T: int, D: int):
    """One tile with all tokens, where its blocks of channels fill the SMs."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    problem, t = backward_of(*check(fd.short_convolution, x, x.new_empty(D, 4)))
    launches = only_launches(build(problem, t, 90))
    alone = B == 1 and T <= 4096 and D == 12288
    assert [x.kernel.fn.__name__ for x in launches] == ["convolution_backward_kernel"] + ["sums_kernel"] * (not alone)
    assert launches[0].constants["EXCHANGE"] == (alone and T > 60)


# ---- the road ---------------------------------------------------------------------------------------------------------------

WITH_GRADIENTS = [
    (fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME["heads"])),
    (fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME["fused"])),
    (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME["packed_fla"])),
]
CALLS = [*WITH_GRADIENTS, (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME["pool_by_token"]))]


@pytest.mark.parametrize(("op", "make"), CALLS)
def test_calls_are_replayed(op: Callable, make: Callable[[], dict], pretended: Started):
    for i in range(3):
        pretended.clear()
        op(**make(), backend="triton")
        assert pretended.anew() == [i == 0]


@pytest.mark.parametrize(("op", "make"), WITH_GRADIENTS)
def test_gradients_are_replayed(op: Callable, make: Callable[[], dict], pretended: Started):
    for i in range(3):
        pretended.clear()
        call = make()
        tensors = tensors_of(op(**call | leaves_of(call), backend="triton"))
        torch.autograd.backward(tensors, [torch.zeros_like(x) for x in tensors])
        assert pretended.anew() == [i == 0] * 3


def test_explain_and_supports_know_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "nvidia_capability", lambda index: (9, 0))
    monkeypatch.setattr(backends, "has_gluon", lambda: True)
    for op, make in CALLS:
        explanation = fd.explain(op, **make(), device="cuda")
        assert explanation.chosen == "triton" and "layer around attention" in str(explanation)
        assert fd.supports(op, **make()).backend == "reference"
    refused = fd.supports(fd.gated_rms_norm, *[torch.zeros(3, 4)] * 3)
    assert not refused and refused.reason == "weight: got shape [3, 4], wanted [V] = [4] (rank 1)"
