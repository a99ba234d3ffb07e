"""`fd.gated_rms_norm` and `fd.short_convolution` without a GPU: the reference, the operators, the launch cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.kernels.triton import convolution
from flashdelta.kernels.triton.build import build
from flashdelta.problem import device_checks
from flashdelta.program.launch import REGISTERS
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import CONVOLUTION, CONVOLUTION_OUT, NORM, operator_of
from flashdelta.tools.compile import only_launches

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


def test_buffers_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    marks, every, plain, pool = (
        make_convolution(CONVOLUTION_BY_NAME[name]) for name in ("marks", "every", "state", "pool")
    )
    offsets, indices, buffer = (marks[f"checkpoint_{name}"] for name in ("offsets", "indices", "states"))
    state, row = plain["initial_state"], {"checkpoint_offsets": torch.tensor([3, 0, 40, 17])}
    monkeypatch.setattr(device_checks, "ENABLED", True)
    wrong_rows = None, indices[:, None], torch.tensor([0, 1, 0, 2]), torch.tensor([0, 1, 6, 2])
    wrong_buffers = buffer[:, :5], buffer[..., :2], marks["x"].mT[..., :3], buffer.half(), buffer[:1].expand(6, -1, -1)
    for call, name, values in (
        (marks, "checkpoint_offsets", (None, offsets.short(), torch.tensor([3, 0, 41, 40]))),
        (marks | row, "checkpoint_indices", wrong_rows),
        (marks, "checkpoint_every", (64,)),
        (marks, "checkpoint_states", wrong_buffers),
        (every, "checkpoint_every", (65,)),
        (every, "checkpoint_states", (every["checkpoint_states"][:5], every["initial_state"])),
        (marks | {"x": marks["x"].clone().requires_grad_()}, "checkpoint_states", (buffer,)),
        (plain, "final_state", (state[:1], state[..., 1:], state, state.clone().requires_grad_())),
        (pool, "final_state", (pool["state_pool"].clone(),)),
    ):
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"^{name} must .*; got "):
                fd.short_convolution(**call | {name: value})
    fd.short_convolution(**marks | row)


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
