"""The attention layer and the language model: pieces equal a whole forward, nothing is left out of training, and weights of
other layers come and go."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from flashdelta import nn
from flashdelta.nn.attention import MAX_STEP_TOKENS
from flashdelta.nn.lm import VOCABULARY, encode
from flashdelta.nn.weights import FORMS

from ..full import FULL
from ..support.layers import HIDDEN, check_joining, check_packed, check_pool, make_layer, rows

pytestmark = pytest.mark.long

HEADS = {
    "grouped values (GVA)": {},
    "one query head a value head": {"num_v_heads": 2, "lower_bound": -0.5},
    "values wider than keys": {"num_heads": 1, "num_v_heads": 2, "head_v_dim": 64},
    "keys wider than values": {"head_dim": 64, "head_v_dim": 32},
    "two convolution taps": {"conv_size": 2, "conv_bias": False},
    "softplus": {"gate": "softplus", "conv_size": 3, "output_gate_bias": True},
    "logsigmoid": {"gate": "logsigmoid", "allow_neg_eigval": True, "conv_size": 2},
}
by_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())

F64 = torch.float64

# What is tried ends in a step of one token, has a step of many, and pieces shorter than the convolution.
PIECES = {
    "prefill, then tokens": [37, 1, 1, 1, 1],
    "tokens only": [1] * 12,
    "prefill, a few at once, prefill": [20, MAX_STEP_TOKENS, 40, 1],
    "pieces shorter than the convolution": [2, 1, 2, 30, 1],
}


def tiny_model(**changes) -> nn.KdaLanguageModel:
    torch.manual_seed(0)
    config = nn.LanguageModelConfig(**{"hidden_size": 32, "num_layers": 2, "num_heads": 1, "num_v_heads": 2, **changes})
    return nn.KdaLanguageModel(config, chunk_size=32, backend="reference")


@pytest.mark.parametrize(
    ("heads", "pieces"),
    [*((x, PIECES["prefill, then tokens"]) for x in HEADS.values()), *(({}, x) for x in PIECES.values())],
    ids=str,
)
@torch.no_grad()
def test_any_pieces_are_the_whole_forward(heads: dict, pieces: list[int]) -> None:
    layer, x = make_layer(F64, **heads), torch.randn(2, sum(pieces), HIDDEN, dtype=F64)
    whole, end = layer(x, return_cache=True)
    cache, parts = None, []
    for part in x.split(pieces, dim=1):
        y, cache = layer(part, cache, return_cache=True)
        parts.append(y)
    # the gate's parameters are float32, the rest is float64
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(cache.state, end.state, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(cache.conv, end.conv)


@by_heads
def test_gradient_reaches_every_parameter(heads: dict) -> None:
    layer = make_layer(torch.float32, **heads)
    x = torch.randn(2, 40, 48, requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_cast_leaves_the_gate_parameters_exact() -> None:
    layer = make_layer(torch.float32)
    before = layer.dt_bias.detach().clone()
    layer(torch.randn(1, 40, 48))[0].sum().backward()
    layer.to(torch.bfloat16)
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert layer.A_log.dtype == layer.dt_bias.dtype == layer.dt_bias.grad.dtype == torch.float32
    assert torch.equal(layer.dt_bias, before)
    y, cache = layer(torch.randn(1, 40, 48, dtype=torch.bfloat16), return_cache=True)
    assert y.dtype == cache.conv.dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32


def test_new_parameters_keep_their_mark() -> None:
    """Not to be decayed: of a layer that was made without memory, or that took another one's tensors for its own."""
    with torch.device("meta"):
        empty = make_layer(torch.float32, "meta")
    copied = make_layer(torch.float32)
    empty.load_state_dict(copied.state_dict(), assign=True)
    with torch.device("meta"):
        layers = [empty, make_layer(torch.float32, "meta").to_empty(device="cpu"), copied.to(torch.bfloat16)]
    layers.append(copy.deepcopy(copied))
    for layer in layers:
        marked = {name for name, x in layer.named_parameters() if getattr(x, "_no_weight_decay", False)}
        assert marked == {"A_log", "dt_bias"}


def test_loaded_parameters_of_the_gate_are_float32() -> None:
    layer = make_layer(torch.float32)
    narrow = {name: x.bfloat16() for name, x in layer.state_dict().items()}
    for assign in (False, True):
        layer.load_state_dict(narrow, assign=assign)
        assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
        assert torch.equal(layer.A_log, narrow["A_log"].float())
    assert layer.q_proj.weight.dtype == torch.bfloat16


BAD = {
    **{"head_dim": (48,), "head_v_dim": (16,), "num_v_heads": (3,), "num_heads": (0, 2.0), "conv_size": (0, 5)},
    **{"gate": ("none",), "lower_bound": (-6.0, "low"), "chunk_size": (16,)},
    **{"backend": ("fast",), "conv_bias": ("no",)},
    **{"norm_eps": (0.0, float("nan"), "1e-5"), "allow_neg_eigval": (2,), "output_gate_bias": (None,)},
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in BAD.items() for x in values])
def test_bad_layer_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name}\b.*got "):
        nn.KimiDeltaAttention(48, **{"num_heads": 2, "head_dim": 32, name: value})


def test_bad_inputs_are_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    layer, x = make_layer(torch.float32), torch.randn(2, 1, 48)
    _, good = layer(torch.randn(2, 10, 48), return_cache=True)
    model, tokens = tiny_model(), torch.zeros(1, 3, dtype=torch.int64)
    _, caches = model(tokens, return_caches=True)
    for name, run in (
        ("x", lambda: layer(torch.randn(2, 10, 47))),
        ("x", lambda: layer([1.0])),
        ("cache", lambda: layer(x, (good.conv, good.state))),
        ("cache", lambda: layer(x, nn.KdaCache(None, None))),
        ("cu_seqlens", lambda: layer(x.view(1, 2, 48), cu_seqlens=[0, 1, 2])),
        ("cache", lambda: layer(torch.randn(3, 1, 48), good)),
        ("cache.state", lambda: layer(x, nn.KdaCache(good.conv, good.state[:1]))),
        ("slots", lambda: layer.make_pool(slots=0)),
        ("state_dtype", lambda: layer.make_pool(slots=1, state_dtype=torch.float16)),
        ("tokens", lambda: model(tokens[0])),
        ("caches", lambda: model(tokens[:, :1], caches[:1])),
        ("temperature", lambda: model.generate(tokens, 2, temperature=-1.0)),
        ("path", lambda: nn.load_model(tmp_path / "other.safetensors")),
        ("path", lambda: nn.load_model(Path("absent.safetensors"))),
    ):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=rf"^{name}\b.*got "):
            run()


def test_generate_is_reproducible_and_greedy_at_zero_temperature() -> None:
    model = tiny_model()
    prompt = encode("some text")[None].expand(2, -1)

    def sampled(seed: int) -> torch.Tensor:
        return model.generate(prompt, 12, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sampled(1), sampled(1))
    assert not torch.equal(sampled(1), sampled(2))
    greedy = model.generate(prompt, 12)
    assert greedy.shape == (2, 12)
    with torch.no_grad():
        whole, _ = model(torch.cat([prompt, greedy], dim=1))
    assert torch.equal(whole[:, len("some text") - 1 : -1].argmax(-1), greedy)
    assert model.generate(prompt, 0).shape == (2, 0)


@torch.no_grad()
def test_saved_model_loads_the_same(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "model.safetensors"
    nn.save_model(model, path, torch.float32)
    loaded = nn.load_model(path, backend="reference", chunk_size=32)
    tokens = torch.randint(len(VOCABULARY), (1, 20))
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


# ---- packed sequences, pools, other layers' weights, autocast, compilation -------------------------------------------------


CLOSE = 1e-6
"""The gate's parameters are float32, and some operators compute exp of them there."""


@by_heads
def test_packed_sequences_are_sequences(heads: dict):
    check_packed(make_layer(F64, **heads), F64, CLOSE)


@by_heads
def test_a_pool_is_a_cache(heads: dict):
    check_pool(make_layer(F64, **heads), F64, CLOSE)


def test_requests_join_and_leave():
    check_joining(make_layer(F64), F64, CLOSE)


@pytest.mark.parametrize("form", FORMS)
@by_heads
def test_weights_go_and_come_back(heads: dict, form: str):
    layer, other = make_layer(F64, **heads), make_layer(F64, seed=1, **heads)
    x = rows(1, 40, dtype=F64, device="cpu")
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(nn.import_weights(nn.export_weights(layer, form)))
    assert torch.equal(other(x)[0], layer(x)[0])


def test_weights_that_are_no_layers_are_named():
    weights = nn.export_weights(make_layer(F64), "fla")
    lacking = [{key: x for key, x in weights.items() if key != name} for name in ("q_proj.weight", "k_conv1d.weight")]
    for bad in (weights | {"q_norm.weight": torch.ones(1)}, *lacking):
        with pytest.raises(ValueError, match=r"^weights\b.*got "):
            nn.import_weights(bad)
    with pytest.raises(ValueError, match=r"^form\b.*got 'jax'"):
        nn.export_weights(make_layer(F64), "jax")


def test_flas_layer_has_these_weights():
    """Names, shapes and dtypes of its state dict, with a bias at the output gate."""
    fla = pytest.importorskip("fla.layers.kda")
    theirs = fla.KimiDeltaAttention(HIDDEN, head_dim=32, num_heads=2, num_v_heads=4, conv_bias=True)
    ours = nn.KimiDeltaAttention(HIDDEN, 2, 4, 32, gate="softplus", conv_bias=True, output_gate_bias=True)
    ours.load_state_dict(nn.import_weights(theirs.state_dict()))
    back = nn.export_weights(ours, "fla")
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
    ours = nn.KimiDeltaAttention(HIDDEN, 2, head_dim=32, gate="softplus", norm_eps=config.rms_norm_eps)
    ours.load_state_dict(nn.import_weights(theirs.state_dict()))
    x = rows(2, 70, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)
    theirs.load_state_dict(nn.export_weights(ours, "transformers"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_runs_projections_in_16_bits(dtype: torch.dtype):
    """A float32 layer, and one in bfloat16; gradients reach all parameters in their own dtypes."""
    layer = make_layer(dtype)
    x = rows(2, 40, dtype=dtype, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = layer(x, return_cache=True)
        y.square().sum().backward()
    assert y.dtype == cache.conv.dtype == torch.bfloat16 and cache.state.dtype == torch.float32
    same = make_layer(torch.float32)
    same.load_state_dict(layer.state_dict())  # PyTorch before 2.13 draws other numbers for another dtype
    exact = same(x.float())[0]
    assert (y.float() - exact).norm() < 0.03 * exact.norm()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all()


@torch.no_grad()
def test_steps_and_prefills_over_a_pool_compile_for_all_batches():
    torch._dynamo.reset()
    layer = make_layer(torch.float32)
    function = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    pools = layer.make_pool(5), layer.make_pool(5)
    for N, tokens in ((2, 1), (3, 13), *((1, 1), (3, 1)) * FULL):
        x, slots = rows(N, tokens, dtype=torch.float32, device="cpu"), torch.arange(N)
        found, want = (run(x, pool=pool, slots=slots)[0] for run, pool in zip((function, layer), pools))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pools[0].state, pools[1].state, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_training_compiles_into_one_graph():
    """Forward and backward of packed sequences, under autocast and checkpointed; gradients are those of the eager layer."""
    layer, x = make_layer(torch.float32), rows(1, 40, dtype=torch.float32, device="cpu")
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: layer(y, cu_seqlens=offsets)[0], x, use_reentrant=False)

    torch._dynamo.reset()
    found = []
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x)
        found.append(torch.autograd.grad(y.float().square().sum(), [*layer.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_bad_pools_are_named():
    layer = make_layer(torch.float32)
    x, pool, slots = rows(2, 1, dtype=torch.float32, device="cpu"), layer.make_pool(3), torch.tensor([0, 1])
    good = {"pool": pool, "slots": slots}
    other = make_layer(torch.float32, conv_size=3).make_pool(3)
    pools = (None, other, replace(pool, state=pool.state.view(3, 2, 64, 32)), replace(pool, conv=pool.conv[:2]))
    bad = [("pool", {"pool": x}) for x in pools] + [("slots", {"slots": x}) for x in (None, [0, 1], slots[:1])]
    with torch.no_grad():
        for name, change in (*bad, ("pool", {"return_cache": True})):
            with pytest.raises((ValueError, TypeError), match=rf"^{name}\b.*got "):
                layer(x, **good | change)
    with pytest.raises(ValueError, match=r"^pool must come under torch\.no_grad"):
        layer(x, **good)
    layer.requires_grad_(False)(x, **good)
