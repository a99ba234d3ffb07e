"""`nn.KimiDeltaAttention` on the GPU: beside FLA's layer, over pools, in graphs, compiled, in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdelta.nn import KimiDeltaAttention, import_weights

from ..support.layers import check_packed, check_pool, make_layer, rows
from ..support.oracle import relative_error
from .calls import hold_replay, in_turn

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CLOSE = {torch.float32: 1e-3, BF16: 3e-2}
"""Projections in float32 may run in TF32."""

SIZES = {"head_dim": 128, "num_heads": 2, "num_v_heads": 4, "chunk_size": 64}
GATES = {"lower_bound": {"lower_bound": -5.0}, "softplus": {"gate": "softplus", "lower_bound": None}}


@pytest.mark.parametrize(("gate", "dtype"), in_turn(GATES, BF16, torch.float32), ids=str)
def test_packed_sequences_are_sequences(gate: str, dtype: torch.dtype):
    check_packed(make_layer(dtype, "cuda", **SIZES, **GATES[gate]), dtype, CLOSE[dtype], "cuda")


@pytest.mark.parametrize(("gate", "dtype"), in_turn(GATES, torch.float32, BF16), ids=str)
def test_a_pool_is_a_cache(gate: str, dtype: torch.dtype):
    check_pool(make_layer(dtype, "cuda", **SIZES, **GATES[gate]), dtype, CLOSE[dtype], "cuda")


@pytest.mark.parametrize(("gate", "tokens"), in_turn(GATES, 200, 1))
def test_flas_layer_computes_the_same(gate: str, tokens: int):
    """Outputs in bfloat16, and gradients of the input and of all weights."""
    fla = pytest.importorskip("fla.layers.kda")
    torch.manual_seed(0)
    bound = GATES[gate]["lower_bound"]
    theirs = fla.KimiDeltaAttention(256, head_dim=64, num_heads=4, lower_bound=bound, safe_gate=bound is not None)
    ours = KimiDeltaAttention(256, 4, head_dim=64, output_gate_bias=True, **GATES[gate])
    ours.load_state_dict(import_weights(theirs.state_dict()))
    theirs.cuda(), ours.cuda()
    x = torch.randn(2, tokens, 256, device="cuda")
    grad = torch.randn(2, tokens, 256, device="cuda")

    def run(layer: torch.nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", BF16):
            y = layer(leaf)[0]
        y.float().backward(grad)
        return y, leaf.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}

    (y, dx, grads), (want, wanted_dx, others) = run(ours), run(theirs)
    assert relative_error(y, want) < 2e-2 and relative_error(dx, wanted_dx) < 3e-2
    for name, wanted in import_weights(others).items():
        # of one token the decays have no gradient: theirs is rounding, of 1e-6
        assert (grads[name] - wanted).norm() < 5e-2 * wanted.norm() + 1e-5, name


@torch.no_grad()
def test_a_graph_of_a_step_serves_other_slots():
    layer = make_layer(BF16, "cuda", **SIZES)
    pool, x = layer.make_pool(8), rows(4, 1, dtype=BF16, device="cuda")
    slots = torch.tensor([1, 4, 2, -1], device="cuda")

    def change() -> None:
        for tensor in (pool.conv, pool.state, x):
            tensor.normal_()
        slots.copy_(torch.tensor([7, -1, 0, 3]))

    hold_replay(lambda: layer(x, pool=pool, slots=slots)[0], [pool.conv, pool.state], change)
