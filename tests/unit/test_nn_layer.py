"""`nn.KimiDeltaAttention`: packed sequences, pools, other layers' weights, autocast, activation checkpointing."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashdelta.nn import KimiDeltaAttention, export_weights, import_weights
from flashdelta.nn.weights import FORMS

from ..support.layers import HIDDEN, check_joining, check_packed, check_pool, make_layer, rows

LAYERS = {
    "lower_bound": {},
    "softplus": {"gate": "softplus", "conv_size": 3, "output_gate_bias": True},
    "logsigmoid": {"gate": "logsigmoid", "allow_neg_eigval": True, "conv_size": 2},
    "wide values": {"head_v_dim": 64, "num_v_heads": 2, "lower_bound": -0.7},
}
by_layer = pytest.mark.parametrize("arguments", LAYERS.values(), ids=LAYERS)
F64 = torch.float64
CLOSE = 1e-6
"""The gate's parameters are float32, and some operators compute exp of them there."""


@by_layer
def test_packed_sequences_are_sequences(arguments: dict):
    check_packed(make_layer(F64, **arguments), F64, CLOSE)


@by_layer
def test_a_pool_is_a_cache(arguments: dict):
    check_pool(make_layer(F64, **arguments), F64, CLOSE)


def test_requests_join_and_leave():
    check_joining(make_layer(F64), F64, CLOSE)


@pytest.mark.parametrize("form", FORMS)
@by_layer
def test_weights_go_and_come_back(arguments: dict, form: str):
    layer, other = make_layer(F64, **arguments), make_layer(F64, seed=1, **arguments)
    x = rows(1, 40, dtype=F64, device="cpu")
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(import_weights(export_weights(layer, form)))
    assert torch.equal(other(x)[0], layer(x)[0])


def test_weights_that_are_no_layers_are_named():
    weights = export_weights(make_layer(F64), "fla")
    with pytest.raises(ValueError, match=r"^weights must .*; got 'q_norm.weight'"):
        import_weights(weights | {"q_norm.weight": torch.ones(1)})
    for name in ("q_proj.weight", "f_proj.1.weight", "o_norm.weight"):
        with pytest.raises(ValueError, match=r"^weights must .*; got none for "):
            import_weights({key: x for key, x in weights.items() if key != name})
    with pytest.raises(ValueError, match=r"^weights must .*; got convolutions"):
        import_weights({key: x for key, x in weights.items() if key != "k_conv1d.weight"})
    with pytest.raises(ValueError, match=r"^form must .*; got 'jax'"):
        export_weights(make_layer(F64), "jax")


def test_flas_layer_has_these_weights():
    """Names, shapes and dtypes of its state dict, with a bias at the output gate."""
    fla = pytest.importorskip("fla.layers.kda")
    theirs = fla.KimiDeltaAttention(HIDDEN, head_dim=32, num_heads=2, num_v_heads=4, conv_bias=True)
    ours = KimiDeltaAttention(HIDDEN, 2, 4, 32, gate="softplus", conv_bias=True, output_gate_bias=True)
    ours.load_state_dict(import_weights(theirs.state_dict()))
    back = export_weights(ours, "fla")
    assert {name: (x.shape, x.dtype) for name, x in back.items()} == {
        name: (x.shape, x.dtype) for name, x in theirs.state_dict().items()
    }
    assert all(torch.equal(x, back[name]) for name, x in theirs.state_dict().items())


@torch.no_grad()
def test_hugging_faces_layer_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    """In its own PyTorch functions."""
    models = pytest.importorskip("transformers.models.kimi_linear")
    file = models.modeling_kimi_linear
    for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):
        monkeypatch.setattr(file, name, inspect.unwrap(getattr(file, name)))
    config = models.KimiLinearConfig(
        hidden_size=HIDDEN, linear_num_heads=2, linear_head_dim=32, linear_conv_kernel_dim=4, num_hidden_layers=1
    )
    torch.manual_seed(0)
    theirs = file.KimiLinearDeltaAttention(config, 0)
    for name, parameter in theirs.named_parameters():
        if "dt_bias" in name or "A_log" in name:
            parameter.uniform_(-2.0, 0.0)
    ours = KimiDeltaAttention(HIDDEN, 2, head_dim=32, gate="softplus", norm_eps=config.rms_norm_eps)
    ours.load_state_dict(import_weights(theirs.state_dict()))
    x = rows(2, 70, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)
    theirs.load_state_dict(export_weights(ours, "transformers"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_runs_projections_in_16_bits(dtype: torch.dtype):
    """Of a float32 layer, and of one in bfloat16; gradients reach all parameters in their own dtypes."""
    layer = make_layer(dtype)
    x = rows(2, 40, dtype=dtype, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = layer(x, return_cache=True)
        y.square().sum().backward()
    assert y.dtype == cache.conv.dtype == torch.bfloat16 and cache.state.dtype == torch.float32
    exact = make_layer(torch.float32)(x.float())[0]
    assert (y.float() - exact).norm() < 0.03 * exact.norm()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all()


WAYS = ("plain", "packed", "autocast", "checkpointed")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_compiles_into_one_graph(way: str):
    """Forward and backward, whatever is around them; gradients are those of the eager layer."""
    layer = make_layer(torch.float32)
    x = rows(1, 40, dtype=torch.float32, device="cpu")
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32) if way == "packed" else None

    def forward(x: torch.Tensor) -> torch.Tensor:
        if way == "checkpointed":
            return checkpoint(lambda y: layer(y, cu_seqlens=offsets)[0], x, use_reentrant=False)
        return layer(x, cu_seqlens=offsets)[0]

    def gradients(function) -> list:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            y = function(x)
        y.float().square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    want = gradients(forward)
    torch._dynamo.reset()
    found = gradients(torch.compile(forward, backend="aot_eager", fullgraph=True))
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_steps_and_prefills_over_a_pool_compile_for_all_batches():
    torch._dynamo.reset()
    layer = make_layer(torch.float32)
    function = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    pools = layer.make_pool(5), layer.make_pool(5)
    for N, tokens in ((1, 12), (1, 1), (2, 1), (3, 1), (2, 13)):
        x, slots = rows(N, tokens, dtype=torch.float32, device="cpu"), torch.arange(N)
        found, want = (run(x, pool=pool, slots=slots)[0] for run, pool in zip((function, layer), pools))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pools[0].state, pools[1].state, rtol=1e-5, atol=1e-6)


def test_bad_pools_are_named():
    layer = make_layer(torch.float32)
    x, pool, slots = rows(2, 1, dtype=torch.float32, device="cpu"), layer.make_pool(3), torch.tensor([0, 1])
    good = {"pool": pool, "slots": slots}
    with torch.no_grad():
        for name, change in (
            ("pool", {"pool": None}),
            ("slots", {"slots": None}),
            ("pool", {"return_cache": True}),
            ("pool", {"pool": make_layer(torch.float32, conv_size=3).make_pool(3)}),
            ("pool", {"pool": replace(pool, state=pool.state.view(3, 2, 64, 32))}),
            ("pool", {"pool": replace(pool, conv=pool.conv[:2])}),
            ("slots", {"slots": [0, 1]}),
            ("slots", {"slots": slots[:1]}),
        ):
            with pytest.raises((ValueError, TypeError), match=f"^{name} must .*; got "):
                layer(x, **good | change)
        with pytest.raises(ValueError, match=r"^slots must be one per sequence = \[2\].*; got shape \[1\]"):
            layer(x.view(1, 2, -1), cu_seqlens=torch.tensor([0, 1, 2]), pool=pool, slots=slots[:1])
        with pytest.raises(ValueError, match=r"^dtype must .*; got torch.int32"):
            layer.make_pool(3, dtype=torch.int32)
    for tokens in (x, rows(2, 20, dtype=torch.float32, device="cpu")):
        with pytest.raises(ValueError, match=r"^pool must be under torch\.no_grad.*; got one with gradients"):
            layer(tokens, **good)
    layer.requires_grad_(False)(x, **good)
    with pytest.raises(ValueError, match=r"^pool must .*; got one with gradients"):
        layer(x.requires_grad_(), **good)
