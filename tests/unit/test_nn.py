"""The attention layer and the language model: a step equals a whole forward, and nothing is left out of training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from flashdelta.nn import KdaCache, KdaLanguageModel, KimiDeltaAttention, LanguageModelConfig, load_model, save_model
from flashdelta.nn.attention import MAX_STEP_TOKENS
from flashdelta.nn.lm import VOCABULARY, encode

HEADS = {
    "one query head a value head": dict(num_heads=2),
    "grouped values (GVA)": dict(num_heads=2, num_v_heads=4),
    "values wider than keys": dict(num_heads=1, num_v_heads=2, head_v_dim=64),
    "keys wider than values": dict(num_heads=2, head_dim=64, head_v_dim=32),
    "two convolution taps": dict(num_heads=2, conv_size=2, conv_bias=True),
    "softplus": dict(num_heads=2, conv_size=3, gate="softplus", output_gate_bias=True),
    "logsigmoid": dict(num_heads=2, gate="logsigmoid", allow_neg_eigval=True),
    "a bound of its own": dict(num_heads=2, lower_bound=-0.5),
}
by_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())

# What is tried ends in a step of one token, has a step of many, and pieces shorter than the convolution.
PIECES = {
    "prefill, then tokens": [37, 1, 1, 1, 1],
    "tokens only": [1] * 12,
    "prefill, a few at once, prefill": [20, MAX_STEP_TOKENS, 40, 1],
    "pieces shorter than the convolution": [2, 1, 2, 30, 1],
}


def attention(dtype: torch.dtype = torch.float64, **arguments) -> KimiDeltaAttention:
    torch.manual_seed(0)
    arguments = {"head_dim": 32, "chunk_size": 32, **arguments}
    return KimiDeltaAttention(48, **arguments, backend="reference").to(dtype)


def tiny_model(**changes) -> KdaLanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(**{"hidden_size": 32, "num_layers": 2, "num_heads": 1, "num_v_heads": 2, **changes})
    return KdaLanguageModel(config, chunk_size=32, backend="reference")


@pytest.mark.parametrize(
    ("heads", "pieces"),
    [
        *((x, PIECES["prefill, then tokens"]) for x in HEADS.values()),
        *((dict(num_heads=2), x) for x in PIECES.values()),
    ],
    ids=str,
)
@torch.no_grad()
def test_any_pieces_are_the_whole_forward(heads: dict, pieces: list[int]) -> None:
    layer, x = attention(**heads), torch.randn(2, sum(pieces), 48, dtype=torch.float64)
    whole, end = layer(x, return_cache=True)
    cache, parts = None, []
    for part in x.split(pieces, dim=1):
        y, cache = layer(part, cache, return_cache=True)
        parts.append(y)
    # the gate's parameters are float32, the rest is float64
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(cache.state, end.state, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(cache.conv, end.conv)


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    layer = attention(num_heads=2)
    x = torch.randn(1, 70, 48, dtype=torch.float64)
    changed = x.clone()
    changed[:, 50:] += 1
    before, after = layer(x)[0], layer(changed)[0]
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.allclose(before[:, 50], after[:, 50])


@by_heads
@torch.no_grad()
def test_cache_shapes(heads: dict) -> None:
    layer = attention(torch.float32, **heads)
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim
    for tokens in (1, 40):
        y, cache = layer(torch.randn(3, tokens, 48), return_cache=True)
        assert y.shape == (3, tokens, 48)
        assert cache.conv.shape == (3, 2 * H * K + HV * V, layer.conv_size - 1)
        assert cache.state.shape == (3, HV, K, V)
        assert cache.state.dtype == torch.float32
    assert layer(torch.randn(3, 40, 48))[1] is None


@by_heads
def test_gradient_reaches_every_parameter(heads: dict) -> None:
    layer = attention(torch.float32, **heads)
    x = torch.randn(2, 40, 48, requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_cast_leaves_the_gate_parameters_exact() -> None:
    layer = attention(torch.float32, num_heads=2)
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
        empty = attention(torch.float32, num_heads=2)
    copied = attention(torch.float32, num_heads=2)
    empty.load_state_dict(copied.state_dict(), assign=True)
    with torch.device("meta"):
        layers = [empty, attention(torch.float32, num_heads=2).to_empty(device="cpu"), copied.to(torch.bfloat16)]
    layers.append(copy.deepcopy(copied))
    for layer in layers:
        marked = {name for name, x in layer.named_parameters() if getattr(x, "_no_weight_decay", False)}
        assert marked == {"A_log", "dt_bias"}


def test_loaded_parameters_of_the_gate_are_float32() -> None:
    layer = attention(torch.float32, num_heads=2)
    narrow = {name: x.bfloat16() for name, x in layer.state_dict().items()}
    for assign in (False, True):
        layer.load_state_dict(narrow, assign=assign)
        assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
        assert torch.equal(layer.A_log, narrow["A_log"].float())
    assert layer.q_proj.weight.dtype == torch.bfloat16


BAD = {
    **{"head_dim": (48,), "head_v_dim": (16,), "num_v_heads": (3,), "num_heads": (0, 2.0), "conv_size": (0, 5)},
    **{"gate": ("none",), "lower_bound": (-6.0, None), "chunk_size": (16,), "backend": ("fast",), "conv_bias": ("no",)},
    **{"norm_eps": (0.0, float("nan"), "1e-5"), "allow_neg_eigval": (2,), "output_gate_bias": (None,)},
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in BAD.items() for x in values])
def test_bad_layer_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name} must .*; got "):
        KimiDeltaAttention(48, **{"num_heads": 2, "head_dim": 32, name: value})


def test_bad_inputs_are_named() -> None:
    layer = attention(torch.float32, num_heads=2)
    x = torch.randn(2, 1, 48)
    good = layer(torch.randn(2, 10, 48), return_cache=True)[1]
    for name, given in (
        ("x", {"x": torch.randn(2, 10, 47)}),
        ("x", {"x": [1.0]}),
        ("cache", {"cache": (good.conv, good.state)}),
        ("cache", {"cache": KdaCache(None, None)}),
        ("cu_seqlens", {"x": x.view(1, 2, 48), "cu_seqlens": [0, 1, 2]}),
        ("cache", {"x": torch.randn(3, 1, 48)}),
        ("initial_state", {"cache": KdaCache(good.conv, good.state[:1])}),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"^{name} must .*; got "):
            layer(**{"x": x, "cache": good} | given)
    for name, given in (("slots", {"slots": 0}), ("state_dtype", {"slots": 1, "state_dtype": torch.float16})):
        with pytest.raises(ValueError, match=rf"^{name} must .*; got "):
            layer.make_pool(**given)


@torch.no_grad()
def test_model_prefill_then_steps_is_the_whole_forward() -> None:
    model = tiny_model()
    tokens = torch.randint(len(VOCABULARY), (2, 50))
    whole, _ = model(tokens)
    logits, caches = model(tokens[:, :40], return_caches=True)
    parts = [logits]
    for i in range(40, 50):
        logits, caches = model(tokens[:, i : i + 1], caches, return_caches=True)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


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
    save_model(model, path, torch.float32)
    loaded = load_model(path, backend="reference", chunk_size=32)
    tokens = torch.randint(len(VOCABULARY), (1, 20))
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, str(other))
    with pytest.raises(ValueError, match=r"^path must .*; got"):
        load_model(other)
    with pytest.raises(FileNotFoundError, match=r"^path must .*; got"):
        load_model(tmp_path / "absent.safetensors")


def test_bad_model_inputs_are_named() -> None:
    model = tiny_model()
    _, caches = model(torch.zeros(1, 3, dtype=torch.int64), return_caches=True)
    with pytest.raises(ValueError, match=r"^tokens must .*; got shape"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^caches must .*; got 1"):
        model(torch.zeros(1, 1, dtype=torch.int64), caches[:1])
    with pytest.raises(ValueError, match=r"^temperature must .*; got -1"):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), 2, temperature=-1.0)
