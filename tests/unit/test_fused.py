"""`fd.fused_kda_decode` without a GPU: the reference, the operator, the launch cache, what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import FUSED_DECODE, FUSED_VERIFY, operator_of

from ..support.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import WRITTEN, by_operators, check_fused, check_rounds_of_fused
from ..support.oracle import assert_close, same_bits

pytestmark = pytest.mark.usefixtures("as_on_gpu")

by_name = pytest.mark.parametrize("name", ["bias", "two_taps", "gva8", "spec_packed", "replay"])


@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_reference_is_the_loop(step: FusedStep):
    check_fused(step, torch.float64, "reference")


@pytest.mark.parametrize("name", ["one", "bias", "softplus", "null", "gva3"])
def test_fused_is_the_chain(name: str):
    """Of the single operators, in float64."""
    fused, single = (doubled(make_fused(FUSED_BY_NAME[name], torch.float64)) for _ in range(2))
    o, want = fd.fused_kda_decode(**fused), by_operators(single, "reference")
    live = fused["state_indices"] >= 0
    assert_close("o", o[live], want[live], 1e-12)
    for pool in ("state", "conv_state"):
        torch.testing.assert_close(fused[pool], single[pool], rtol=1e-12, atol=1e-12)


def test_rounds_of_speculation_are_steps_one_by_one():
    check_rounds_of_fused(6, torch.float64, "reference")


def doubled(call: dict) -> dict:
    return call | {"state": call["state"].double()}


# ---- how a call runs ------------------------------------------------------------------------------------------------------


def run(op: Callable, call: dict) -> list[Tensor]:
    """The outputs, and what was written."""
    o = op(**call)
    return [o, *(call[name] for name in WRITTEN if name in call)]


@by_name
def test_compiles_in_one_graph(name: str):
    want = run(fd.fused_kda_decode, make_fused(FUSED_BY_NAME[name]))
    torch._dynamo.reset()
    function = torch.compile(lambda call: fd.fused_kda_decode(**call), fullgraph=True, backend="aot_eager")
    found = run(lambda **call: function(call), make_fused(FUSED_BY_NAME[name]))
    assert all(same_bits(x, y) for x, y in zip(found, want))


@by_name
def test_operator_passes_opcheck(name: str):
    problem, t = check(fd.fused_kda_decode, **make_fused(FUSED_BY_NAME[name]))
    operator = operator_of(problem, t)
    assert operator is (FUSED_DECODE if t.intermediate_states is None else FUSED_VERIFY)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.call, operator.arguments(problem, t, "reference"), test_utils=tests)


REFUSED: dict[str, Callable[[dict], object]] = {
    "conv_state": lambda call: call["conv_state"][:, :, 1:],
    "A_log": lambda call: None,
    "norm_eps": lambda call: 0.0,
    "num_accepted_tokens": lambda call: call["state_indices"],
    "num_spec_tokens": lambda call: 17,
    "intermediate_state_indices": lambda call: call["state_indices"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_does_not_fit(name: str):
    """By the argument's name, and nothing is written."""
    call = make_fused(FUSED_BY_NAME["softplus"])
    before = [call[pool].clone() for pool in ("state", "conv_state")]
    with pytest.raises((ValueError, TypeError), match=f"^{name} must .*; got "):
        fd.fused_kda_decode(**call | {name: REFUSED[name](call)})
    assert all(same_bits(call[pool], x) for pool, x in zip(("state", "conv_state"), before))


def test_takes_the_shapes_of_engines():
    """A dimension of one before the rows, flat gates, `A_log [1, 1, HV, 1]`."""
    step = FUSED_BY_NAME["bias"]
    call, other = make_fused(step), make_fused(step)
    want = fd.fused_kda_decode(**call)
    other["raw_g"] = other["raw_g"].reshape(1, 3, 2, 32)
    other["raw_beta"] = other["raw_beta"].reshape(1, 3, 2)
    other["output_gate"] = other["output_gate"].reshape(1, 3, 2, 32)
    other["A_log"] = other["A_log"].view(1, 1, 2, 1)
    assert same_bits(fd.fused_kda_decode(**other), want)
    assert same_bits(other["state"], call["state"])
