"""Models of FLA and of Hugging Face at real widths: on flashdelta their errors are not above those of FLA's kernels."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..support.cases import BF16
from ..support.oracle import relative_error
from .calls import in_turn

pytestmark = pytest.mark.gpu

pytest.importorskip("fla")
pytest.importorskip("transformers")

from flashdelta.integrations import _fla  # noqa: E402

WIDTH, HEADS, VOCABULARY = 2304, 32, 512
ALLOWED, ALLOWED_OF_FEW, ALLOWED_ON_AVERAGE = 1.1, 1.5, 1.02
"""Shares of FLA's error: of a tensor, of one with so few elements that chance decides, and the geometric mean over all."""

FEW = 1000


@pytest.fixture(autouse=True)
def switched() -> Iterator[None]:
    _fla.enable()
    yield
    _fla.disable()


def fla_model(**options: Any) -> Any:
    from fla.models import KDAConfig, KDAForCausalLM

    sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "head_dim": 128, "num_hidden_layers": 2}
    return KDAForCausalLM(KDAConfig(**sizes, vocab_size=VOCABULARY, fuse_cross_entropy=False, **options))


def kimi_model() -> Any:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    layers = ["linear_attention", "full_attention", "linear_attention"]
    dense = {"mlp_layer_types": ["dense"] * 3, "layer_types": layers, "num_hidden_layers": 3}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = KimiLinearForCausalLM(KimiLinearConfig(**dense, **tokens))
    for layer in model.model.layers[::2]:
        gate = layer.self_attn.forget_gate
        torch.nn.init.uniform_(gate.A_log, 0, 2.7)
        torch.nn.init.normal_(gate.dt_bias, -4, 1)
    return model


MODELS = {
    "FLA": fla_model,
    "FLA, bounded": functools.partial(fla_model, safe_gate=True, lower_bound=-5.0),
    "Hugging Face": kimi_model,
}


def cast(model: Any) -> Any:
    """As it is trained and served: bfloat16, but for the gate's parameters."""
    gate = {name: p.data.float() for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    model.to(BF16)
    for name, p in model.named_parameters():
        if name in gate:
            p.data = gate[name]
    return model


def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """KDA by the reference, for models in float32."""
    for name in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(_fla, name, functools.partial(getattr(_fla, name), backend="reference"))


def trained(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Scores and all gradients."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits.detach().float()} | {
        name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None
    }


@torch.no_grad()
def generated(model: Any, ids: Tensor, prompt: int) -> dict[str, Tensor]:
    """Scores token by token after a prompt, of given tokens."""
    model.eval()
    out = model(input_ids=ids[:, :prompt], use_cache=True)
    found = [out.logits[:, -1:]]
    for t in range(prompt, ids.shape[1]):
        out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return {"logits": torch.cat(found, 1).float()}


def hold(run: Callable[[Any], dict[str, Tensor]], make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make().cuda()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    cast(model)
    ours = run(model)
    _fla.disable()
    theirs = run(model)
    _fla.enable()
    with monkeypatch.context() as patch:
        exactly(patch)
        model.float().load_state_dict(
            {name: x.to(BF16).float() if x.is_floating_point() else x for name, x in weights.items()}
        )
        for name, p in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                p.data = weights[name]
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            exact = run(model)
    assert ours.keys() == theirs.keys() == exact.keys()
    ratios = []
    for name, x in exact.items():
        error, fla_error = relative_error(ours[name], x), relative_error(theirs[name], x)
        print(f"{name}: ours {error:.3g}, FLA {fla_error:.3g}")
        assert error <= (ALLOWED if x.numel() > FEW else ALLOWED_OF_FEW) * fla_error, name
        ratios.append(error / fla_error)
    assert statistics.geometric_mean(ratios) <= ALLOWED_ON_AVERAGE


every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 1000), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every call of our operator."""
    found: list[str] = []
    chunk = _fla.chunk_kda
    monkeypatch.setattr(_fla, "chunk_kda", lambda **call: (found.append("chunk"), chunk(**call))[1])
    return found


@pytest.mark.long
@every_model
def test_training(make: Callable, ids: Tensor, reached: list[str], monkeypatch: pytest.MonkeyPatch):
    hold(functools.partial(trained, ids=ids), make, monkeypatch)
    assert len(reached) == 4


@pytest.mark.parametrize(("name", "prompt"), in_turn(MODELS, 40, 200))
def test_generation(name: str, prompt: int, ids: Tensor, monkeypatch: pytest.MonkeyPatch):
    """FLA's layer takes its recurrence for the prompt, too, if it is short."""
    hold(functools.partial(generated, ids=ids[:, : prompt + 12], prompt=prompt), MODELS[name], monkeypatch)


@torch.no_grad()
def test_what_transformers_generates_by_beams(reached: list[str], monkeypatch: pytest.MonkeyPatch):
    """Texts part where two tokens are about as good. So the scores that a text was chosen by are held against those of an exact
    model for the same text: their errors are not above those of FLA's kernels."""
    torch.manual_seed(0)
    model = kimi_model().cuda().eval()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    cast(model)
    prompt, new = torch.randint(3, VOCABULARY, (4, 70), device="cuda"), 48
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "num_beams": 4}
    model.generation_config.eos_token_id = None

    def generate() -> tuple[Tensor, Tensor]:
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), output_scores=True, **options)
        return out.sequences, model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)

    with pytest.raises(ValueError, match="stateful"):  # transformers takes no assistant for such models
        model.generate(prompt[:1], prompt_lookup_num_tokens=3, **options | {"num_beams": 1})
    texts = {"ours": generate()}
    assert reached
    _fla.disable()
    texts["FLA"] = generate()
    _fla.enable()
    exactly(monkeypatch)
    model.float().load_state_dict(weights)
    rms = {}
    for name, (text, scores) in texts.items():
        want = model(input_ids=text).logits[:, 69:-1].log_softmax(-1).gather(2, text[:, 70:, None])[..., 0]
        rms[name] = float((scores[:, :new].float() - want).square().mean().sqrt())
    print(rms)
    assert rms["ours"] <= ALLOWED_OF_FEW * rms["FLA"]


@pytest.mark.long
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("make", [*MODELS.values()][1:], ids=[*MODELS][1:])
def test_compiled_and_checkpointed(make: Callable, ids: Tensor, reached: list[str]):
    torch._dynamo.reset()  # a function that others had compiled often is not compiled again
    torch.manual_seed(0)
    plain = cast(make().cuda())
    compiled = trained(torch.compile(plain), ids)
    with sdpa_kernel(SDPBackend.MATH):  # the backward pass of PyTorch's others is not the same twice
        want = trained(plain, ids)
        assert len(reached) == 4
        plain.gradient_checkpointing_enable()
        checkpointed = trained(plain, ids)
    assert len(reached) == 8
    assert max(relative_error(checkpointed[name], x) for name, x in want.items()) < 1e-3
    found = {name.removeprefix("_orig_mod."): x for name, x in compiled.items()}
    assert max(relative_error(found[name], x) for name, x in want.items()) < 0.05
