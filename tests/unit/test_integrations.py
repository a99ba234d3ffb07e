"""FLA's functions, and Hugging Face's Kimi-Linear on them, by flashdelta on a CPU: against plain recurrences."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..full import FULL, paired
from ..support import fla_modules
from ..support.inputs import on_meta
from ..support.oracle import relative_error

pytest.importorskip("fla")
transformers = pytest.importorskip("transformers")

# FLA says that it finds no GPU
warnings.filterwarnings("ignore", message="Triton is not supported")

import flashdelta as fd  # noqa: E402
from flashdelta import integrations  # noqa: E402
from flashdelta.integrations import _fla, packing  # noqa: E402
from flashdelta.integrations.seams import Patches  # noqa: E402

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
H, K, T = 2, 32, 20
TOLERANCE = 2e-5
"""For float32 results, relative to the largest."""


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fla_modules.put(monkeypatch)
    _fla.enable()
    yield
    _fla.disable()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our operators, as FLA's calls reach them."""
    found: list[str] = []

    def count(name: str, op: Callable) -> Callable:
        def run(*arguments: Any, **named: Any) -> Any:
            found.append(name)
            return op(*arguments, **named)

        return run

    for name in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(_fla, name, count(name, getattr(_fla, name)))
    return found


# ---- plain definitions --------------------------------------------------------------------------------------------------


def plain_kda(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """FLA's arguments, with its defaults, token by token in float64."""
    call = dict(zip(["q", "k", "v", "g", "beta"], tensors)) | options
    named = inspect.signature(fd.fused_recurrent_kda).parameters.keys()
    flags = {"use_qk_l2norm_in_kernel": False, "state_v_first": False}
    wanted = flags | {name: x for name, x in call.items() if name in named} | {"output_final_state": True}
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in wanted.items()}
    o, state = fd.fused_recurrent_kda(**exact, backend="reference")
    return o.to(call["q"].dtype), state.float()


def tokens(HV: int = H, B: int = 1, T: int = T) -> dict[str, Tensor]:
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, K), "g": (B, T, HV, K), "beta": (B, T, HV)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def near(found: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    assert relative_error(found, want) < tolerance


# ---- FLA's functions ----------------------------------------------------------------------------------------------------

GATES = {"softplus": {}, "bounded": {"lower_bound": -5.0}, "safe": {"lower_bound": -5.0, "safe_gate": True}}
LAYERS = [*itertools.product(("chunk", "fused_recurrent"), GATES, *[(False, True)] * 4)]


@pytest.mark.parametrize(("mode", "gate", "negative", "cached", "packed", "grouped"), LAYERS)
def test_what_the_layer_passes(
    mode: str, gate: str, negative: bool, cached: bool, packed: bool, grouped: bool, counted: list[str]
):
    """Every combination of FLA's `KimiDeltaAttention`, names and values."""
    from fla.ops import kda

    torch.manual_seed(0)
    HV = 2 * H if grouped else H
    call: dict[str, Any] = tokens(HV, 1 if packed else 2)
    call |= {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV * K), "allow_neg_eigval": negative}
    call |= {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    call |= {"cu_seqlens": torch.tensor([0, 7, 7, T]) if packed else None, "state_v_first": True}
    states = torch.randn(3 if packed else 2, HV, K, K) if cached else None
    call |= {"initial_state": states, "output_final_state": cached, "lower_bound": None, **GATES[gate]}
    if mode == "chunk":
        call.setdefault("safe_gate", False)
    else:
        call.pop("safe_gate", None)
    o, state = getattr(kda, f"{mode}_kda")(**call)
    want_o, want_state = plain_kda(**call)
    near(o, want_o)
    assert (state is None) is not cached
    if cached:
        near(state, want_state)
    assert counted == [f"{mode}_kda"]


def test_old_names_states_of_chunks_and_what_only_fla_needs(counted: list[str]):
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    torch.manual_seed(0)
    x = tokens(T=150)
    x["g"] = -x["g"].abs()
    start = torch.randn(1, H, K, K)
    want = plain_kda(**x, scale=0.3, initial_state=start, use_qk_l2norm_in_kernel=True, state_v_first=True)
    named = {"use_graph": True, "max_num_seqs": 1, "lower_bound": -7.0, "A_log": torch.rand(3), "cp_context": None}
    old = {"transpose_state_layout": True}
    found = [chunk_kda(*x.values(), 0.3, start, True, True, **named, **old)]
    with pytest.warns(DeprecationWarning):
        found.append(fused_recurrent_kda(*x.values(), None, None, 0.3, start, True, True, **old))
    for o, state in found:
        near(o, want[0])
        near(state, want[1])
    with torch.inference_mode():
        o, _, h = chunk_kda(**x, cu_seqlens=torch.tensor([0, 70, 70, 150]), return_intermediate_states=True)
    assert h.shape == (1, 4, H, K, K) and not h[0, [0, 2]].any()  # a row for each chunk that there is
    near(h[0, 1], plain_kda(**{name: y[:, :64] for name, y in x.items()})[1][0])
    assert counted == ["chunk_kda", "fused_recurrent_kda", "chunk_kda"]


LEFT_TO_FLA = {
    "unknown": ({"flag": True}, "flag"),
    "context": ({"cp_context": SimpleNamespace(cu_seqlens=torch.tensor([0, T]), cu_seqlens_cpu=None)}, "cp_context"),
    "safe": ({"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(H)}, "safe_gate"),
    "graph": ({"use_graph": True, "return_intermediate_states": True, "cu_seqlens": torch.tensor([0, T])}, "use_graph"),
    "training": ({"return_intermediate_states": True}, "return_intermediate_states"),
    "state": ({"initial_state": torch.zeros(1, H, K, K, dtype=torch.bfloat16)}, "initial_state"),
    "names": ({"state_v_first": True, "transpose_state_layout": True}, "transpose_state_layout"),
    "widths": ({"q": torch.randn(1, T, H, 48), "k": torch.randn(1, T, H, 48), "g": -torch.rand(1, T, H, 48)}, "q"),
}


@pytest.mark.parametrize("name", LEFT_TO_FLA)
def test_what_is_left_to_fla(name: str, monkeypatch: pytest.MonkeyPatch, counted: list[str]):
    from fla.ops.kda import chunk, chunk_kda

    changes, argument = LEFT_TO_FLA[name]
    reached: list[tuple] = []
    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", lambda *x: reached.append(x))
    call = on_meta(tokens() | changes)  # which stands for a GPU, where FLA keeps what we refuse
    with torch.inference_mode(name == "graph"):
        takes, reason = _fla.CHUNK.verify((), call)
    assert not takes and reason.startswith(argument)
    try:
        with torch.inference_mode(name == "graph"):
            chunk_kda(**call)
    except (ValueError, AssertionError) as error:  # FLA's own refusals
        assert "FLA" not in str(error)
    else:
        assert len(reached) == 1
    assert counted == []


def test_the_recurrence_is_left_to_fla_where_it_writes_into_states():
    x, states = tokens(), torch.zeros(1, H, K, K)
    kept = {
        "inplace_final_state": {"initial_state": states},
        "ssm_state_indices": {"inplace_final_state": False, "ssm_state_indices": states},
        "beta": {"inplace_final_state": False, "beta": torch.rand(1, T, H, K)},
    }
    for name, changes in kept.items():
        takes, why = _fla.RECURRENT.verify((), on_meta(x | changes))
        assert not takes and why.startswith((f"{name}:", f"{name} must"))
    assert _fla.RECURRENT.verify((), x | {"inplace_final_state": False, "initial_state": states})[0]


def test_states_of_any_dtype_are_returned_in_float32(counted: list[str]):
    """As by FLA's kernel of the recurrence."""
    from fla.ops.kda import fused_recurrent_kda

    torch.manual_seed(0)
    x = tokens()
    x["g"] = -x["g"].abs()
    start = torch.randn(1, H, K, K).bfloat16()
    o, state = fused_recurrent_kda(**x, initial_state=start, output_final_state=True)
    want_o, want_state = plain_kda(**x, initial_state=start.float())
    assert state.dtype == torch.float32 and counted == ["fused_recurrent_kda"]
    near(o, want_o)
    near(state, want_state)


def test_offsets_on_the_host_are_read_for_each_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_fla, "is_on_cpu", lambda *arguments: False)
    x = tokens() | {"cu_seqlens": torch.tensor([0, T])}
    for end, takes in ((T, True), (T + 1, False), (T, True)):
        assert _fla.CHUNK.verify((), x | {"cu_seqlens_cpu": torch.tensor([0, end])})[0] is takes


def test_a_stage_of_calls_that_fla_keeps():
    """FLA's hook for the backward of the WY step, whose gradients must be those of our operator."""
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused

    from ..support.wy import BY_NAME, make_wy

    call = make_wy(BY_NAME["plain"], torch.float32)
    want = fd.kernels.chunk_bwd_wy_dqkg(**call | {"use_exp2": True})
    call.pop("use_exp2", None)
    found = chunk_kda_bwd_wy_dqkg_fused(**call, chunk_indices=torch.zeros(3, 2))
    assert all(torch.equal(x, y) for x, y in zip(found, want))


# ---- on and off ---------------------------------------------------------------------------------------------------------


def test_on_and_off(counted: list[str], monkeypatch: pytest.MonkeyPatch):
    from fla.ops.kda import chunk, chunk_kda

    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", lambda *x: counted.append("FLA"))
    x = tokens()
    chunk_kda(**x)
    _fla.disable()
    assert integrations.status("fla").state == "possible"
    chunk_kda(**x)
    _fla.enable()
    chunk_kda(**x)
    monkeypatch.setenv(_fla.ENVIRONMENT, "0")
    assert integrations.status("fla").state == "off"
    chunk_kda(**x)
    monkeypatch.delenv(_fla.ENVIRONMENT)
    chunk_kda(**x)
    assert counted == ["chunk_kda", "FLA", "chunk_kda", "FLA", "chunk_kda"]
    assert integrations.status("fla").state == "active"


def test_a_graph_that_is_compiled_is_not_exported(monkeypatch: pytest.MonkeyPatch):
    """PyTorch 2.11 says that it is, for which transformers takes its own code."""
    from transformers.integrations import hub_kernels

    class Asking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if hub_kernels.is_torchdynamo_exporting() else x * 2

    _fla.disable()
    theirs = hub_kernels.is_torchdynamo_exporting
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
    _fla.enable()
    assert hub_kernels.is_torchdynamo_exporting is _fla.is_exporting
    model, x = Asking(), torch.tensor([5.0])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert model(x) == compiled(x) == 10
    for strict in (True, False):
        assert torch.export.export(model, (x,), strict=strict).module()(x) == 6
    _fla.disable()
    assert hub_kernels.is_torchdynamo_exporting is theirs


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the integration find FLA anew."""
    state = {"registered": False, "enabled": False, "warned": False, "applied": Patches(), "differs": None}
    for name, value in state.items():
        monkeypatch.setattr(_fla.FLA, name, value)


def test_without_dispatch_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch):
    import fla.backends

    _fla.disable()
    monkeypatch.setattr(fla.backends, "_DISPATCH_DISABLED", True)
    fresh(monkeypatch)
    with pytest.warns(UserWarning, match=_fla.DISPATCH_OFF):
        _fla.enable()
    assert integrations.status("fla").state == "off" and not _fla.is_on()


def more(q, k, v, g, beta, scale, cu_seqlens, causal=True): ...


def defaults(q, k, v, g, beta, scale, cu_seqlens, state_v_first=True): ...


OTHER_VERSIONS = {more: "has parameters causal", defaults: "state_v_first=True"}


@pytest.mark.parametrize("theirs", OTHER_VERSIONS)
def test_another_version_is_left_alone(theirs: Callable, monkeypatch: pytest.MonkeyPatch):
    """With a warning, once."""
    from fla.ops.kda import chunk

    fresh(monkeypatch)
    what = OTHER_VERSIONS[theirs]
    monkeypatch.setattr(chunk, "chunk_kda", theirs)
    with pytest.warns(UserWarning, match=what):
        _fla.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fla.enable()
    status = integrations.status("fla")
    assert status.state == "unknown version" and what in status.reason and not _fla.is_on()


def test_transformers_stands_where_fla_does(monkeypatch: pytest.MonkeyPatch):
    def found() -> str:
        status = integrations.status("transformers")
        assert (status.name, status.version) == ("transformers", transformers.__version__)
        return f"{status.state}: {status.reason}"

    assert found().startswith("active")
    _fla.disable()
    assert "import flashdelta.integrations.fla" in found().removeprefix("possible: ")
    monkeypatch.setattr(_fla, "is_installed", lambda: False)
    assert "not installed: pip install flash-linear-attention" in found().removeprefix("off: ")
    monkeypatch.setitem(packing.MODELS, packing.KIMI, (packing.MODELS[packing.KIMI][0], "another"))
    assert found().startswith("unknown version") and found().endswith("KimiLinearModel.forward")


# ---- models -------------------------------------------------------------------------------------------------------------


def kda(**options: Any) -> Any:
    """FLA's own model, tiny."""
    from fla.models import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_heads": H, "head_dim": K, "pad_token_id": 0, "eos_token_id": 60}
    return KDAForCausalLM(KDAConfig(**sizes, **heads, **fla_modules.UNFUSED, **options))


TINY = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "kv_lora_rank": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "v_head_dim": 16, "qk_nope_head_dim": 16},
    **{"num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 60},
}


def kimi() -> Any:
    """A tiny model: two KDA layers, one of latent attention; dense and with experts."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    heads = {"linear_head_dim": K, "linear_num_heads": H, "num_local_experts": 4, "qk_rope_head_dim": 8}
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    model = KimiLinearForCausalLM(KimiLinearConfig(**TINY, **heads, **layers))
    for layer in model.model.layers[::2]:
        torch.nn.init.uniform_(layer.self_attn.forget_gate.A_log, 0, 1.5)
        torch.nn.init.normal_(layer.self_attn.forget_gate.dt_bias)
    return model


def ling() -> Any:
    pytest.importorskip("transformers.models.bailing_hybrid")
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    experts = {"num_local_experts": 4, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0}
    return BailingHybridForCausalLM(BailingHybridConfig(**TINY, **layers, **experts, head_dim=K, qk_rope_head_dim=8))


class Headed(torch.nn.Module):
    """GLM's text model, whose head comes with the one that sees images, too."""

    def __init__(self) -> None:
        from transformers import Glm5NextTextConfig, Glm5NextTextModel

        super().__init__()
        torch.manual_seed(0)
        layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "q_lora_rank": 16}
        heads = {"linear_head_dim": K, "linear_num_heads": H}
        self.model = Glm5NextTextModel(Glm5NextTextConfig(**TINY, **layers, **heads, use_cache=False))
        self.head = torch.nn.Linear(TINY["hidden_size"], TINY["vocab_size"])

    def forward(self, input_ids: Tensor, labels: Tensor, **named: Any) -> SimpleNamespace:
        logits = self.head(self.model(input_ids=input_ids, **named).last_hidden_state)
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


TRAINED = {"Ling": ling, "GLM": Headed}
"""Others that take KDA from FLA."""

MODELS = {
    "Kimi-Linear": kimi,
    "FLA": kda,
    "FLA, bounded": partial(kda, safe_gate=True, lower_bound=-5.0, num_v_heads=2 * H, allow_neg_eigval=True),
    "FLA, plain": partial(kda, use_short_conv=False),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(1, 60, shape, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model: Any, ids: Tensor, **named: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss, and every gradient."""
    loss = model(input_ids=ids, labels=ids, **named).loss
    return loss.item(), gradients(model, loss)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives FLA's layer a plain recurrence for KDA, and transformers' its own PyTorch code."""
    from fla.layers import kda as layer

    files = [import_module(packing.path(x)) for x in packing.MODELS if find_spec(f"transformers.models.{x}")]

    def plain(**call: Any) -> tuple[Tensor, Tensor | None]:
        o, state = plain_kda(**call)
        return o, state if call["output_final_state"] else None

    def switch() -> None:
        for name in ("chunk_kda", "fused_recurrent_kda"):
            monkeypatch.setattr(layer, name, plain)
        for file in files:
            for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
                monkeypatch.setattr(file, name, inspect.unwrap(getattr(file, name)))

    return switch


def hold(found: tuple[float, dict], want: tuple[float, dict], tolerance: float = 1e-4) -> None:
    assert math.isclose(found[0], want[0], rel_tol=tolerance)
    assert found[1].keys() == want[1].keys()
    for name, x in want[1].items():
        assert relative_error(found[1][name], x) < tolerance, name


EVERY = MODELS | TRAINED
TRAINING = paired(EVERY, ("plain", "padded")) + [(x, "autocast") for x in (EVERY if FULL else ["FLA"])]


@pytest.mark.parametrize(("name", "way"), TRAINING)
def test_models_train_alike(name: str, way: str, plainly: Callable, counted: list[str]):
    """The loss, and the gradient of every parameter."""
    model, ids = EVERY[name](), ids_of(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask} if way == "padded" else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        found = step(model, ids, **options)
        assert counted == ["chunk_kda"] * 2
        plainly()
        hold(found, step(model, ids, **options), 0.2 if way == "autocast" else 1e-4)
    assert len(counted) == 2 and any("A_log" in name for name in found[1])


FLA_CACHES_ARE_LOST = transformers.__version__ >= "5.24"


@every_model
def test_models_generate_alike(make: Callable, plainly: Callable, counted: list[str]):
    """Token by token, every step's scores."""
    model, ids = make().eval(), ids_of(2, 11)

    def generated() -> Any:
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        return model.generate(ids, **options, attention_mask=torch.ones_like(ids), **asked)

    asked = {"return_dict_in_generate": True, "output_logits": True}
    if make is not kimi and FLA_CACHES_ARE_LOST:
        with pytest.raises(RuntimeError, match=r"FLA's own models can't generate with a cache.*use_cache=False"):
            generated()
        asked["use_cache"] = False
        assert torch.equal(generated().sequences, generated().sequences)
        return
    found = generated()
    # FLA's layer takes its recurrence for short prompts, too
    assert counted == (["chunk_kda"] if make is kimi else ["fused_recurrent_kda"]) * 2 + ["fused_recurrent_kda"] * 22
    plainly()
    want = generated()
    assert torch.equal(found.sequences, want.sequences)
    near(torch.stack(found.logits), torch.stack(want.logits), 1e-4)
    # and as one pass over the whole text
    with torch.no_grad():
        logits = model(input_ids=found.sequences).logits[:, 10:-1]
    near(torch.stack(found.logits, 1), logits, 1e-4)


DOCUMENTS = (13, 22, 5)


def offsets(*lengths: int) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


WAYS = {
    "positions": lambda cu: {},
    "collator": lambda cu: {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 22, "max_length_k": 22},
    "FLA's name": lambda cu: {"cu_seqlens": cu},
    "all": lambda cu: {"cu_seqlens": cu, "cu_seq_lens_q": cu, "seq_idx": positions(40)[None].int()},
}


PACKED = [(kimi, way) for way in WAYS] + [(kda, "FLA's name")]
PACKED += [(make, way) for make in (ling, Headed) for way in (WAYS if FULL else ("collator",))]


def test_no_packed_convolution_by_the_reference_off_the_cpu():
    run = packing.packed_convolution(lambda *_: None, lambda: True)
    offsets, x = (torch.zeros(size, dtype=torch.int32, device="meta") for size in (3, (1, 8, 16)))
    with pytest.raises(ValueError, match="backend must be one whose kernels run this call"):
        run(x.double(), x[0, :, :4].double(), cu_seqlens=offsets)


@pytest.mark.parametrize(("make", "way"), PACKED)
def test_packed_documents_are_documents_by_themselves(make: Callable, way: str, counted: list[str]):
    """ms-swift #9618, transformers #46093, slime #1686: logits, and every gradient, packed and padded on the left."""
    model, ids = make().train(), ids_of(1, sum(DOCUMENTS))

    def logits(**call: Any) -> Tensor:
        if isinstance(model, Headed):
            return model.head(model.model(**call).last_hidden_state)
        return model(**call).logits

    each = ids.split(DOCUMENTS, 1)
    want = torch.cat([logits(input_ids=x, use_cache=False) for x in each], 1)
    grads = gradients(model, want.square().sum())
    call = {"input_ids": ids, "position_ids": positions(*DOCUMENTS)[None]} | WAYS[way](offsets(*DOCUMENTS))
    mask = torch.stack([F.pad(torch.ones_like(x[0]), (max(DOCUMENTS) - x.shape[1], 0)) for x in each])
    padded = torch.zeros_like(mask).masked_scatter(mask.bool(), ids)
    behind = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
    for run in (lambda: logits(**call), lambda: logits(**behind)[mask.bool()][None]):
        found = run()
        near(found, want, 2e-6)
        own = gradients(model, found.square().sum())
        for name, x in grads.items():
            near(own[name], x, 2e-5)
    assert set(counted) == {"chunk_kda"} and len(counted) == (len(DOCUMENTS) + 2) * 2


@pytest.mark.slow
def test_packed_documents_checkpointed_and_compiled():
    model, ids = kimi().train(), ids_of(1, sum(DOCUMENTS))
    call = {"position_ids": positions(*DOCUMENTS)[None], "cu_seq_lens_q": offsets(*DOCUMENTS)}
    plain = step(model, ids, **call)
    model.gradient_checkpointing_enable()
    hold(step(model, ids, **call), plain, 1e-6)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    (model if FULL else model.model.layers[0].self_attn).compile(backend="eager")
    hold(step(model, ids, **call), plain)


def test_full_attention_must_know_where_documents_begin():
    """Offsets alone tell KDA; transformers makes the mask of full attention of positions."""
    model, ids, cu = kimi().eval(), ids_of(1, 40), offsets(*DOCUMENTS)
    ones, begin = torch.ones_like(ids), positions(*DOCUMENTS)[None]
    for given in ({"cu_seq_lens_q": cu}, {"cu_seqlens": cu}):
        with pytest.raises(ValueError, match=r"position_ids must be a tensor that begins anew .*; got None"):
            model(ids, **given)
        with pytest.raises(ValueError, match="attention_mask must be None with packed sequences"):
            model(ids, position_ids=begin, attention_mask=ones, **given)
    model(ids, cu_seq_lens_q=offsets(40))  # one document


def test_positions_of_one_row_are_those_of_every_row():
    model, ids = kimi().eval(), ids_of(2, 40)
    one = positions(*DOCUMENTS)[None]
    with torch.no_grad():
        found, want = (model(input_ids=ids, position_ids=x).logits for x in (one, one.expand(2, -1)))
        each = [model(x, use_cache=False).logits for x in ids.split(DOCUMENTS, 1)]
    assert torch.equal(found, want) and relative_error(found, torch.cat(each, 1)) < 2e-6


def test_packed_rows_and_tails():
    """Two rows of documents, with rows of no document behind them; and a cache, which can't be."""
    model, ids = kimi().eval(), ids_of(2, 40)
    flat, cu = ids.view(1, -1), offsets(*DOCUMENTS, 30)
    call = {"input_ids": ids, "position_ids": positions(*DOCUMENTS, 30, 10).view(2, -1)}
    with torch.no_grad():
        each = flat.split((*DOCUMENTS, 30, 10), 1)
        want = torch.cat([model(x, use_cache=False).logits for x in each], 1)
        found = model(**call | {"cu_seqlens": torch.cat([cu, torch.tensor([80])])}).logits.view(1, 80, -1)
    assert relative_error(found[:, :40], want[:, :40]) < 2e-6
    loss = model(**call, cu_seq_lens_q=cu).logits.view(80, -1)[:70].square().sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="without a cache"):
        model(flat, cu_seq_lens_q=offsets(*DOCUMENTS, 40), past_key_values=cache)
    # whatever an operator leaves there
    ours = packing.packed_attention(lambda q, k, v, **named: (torch.full_like(v, torch.nan), None), lambda: True)
    x = torch.zeros(1, 40, H, K)
    o, _ = ours(x, x, x, x, x[..., 0], cu_seq_lens_q=offsets(30))
    assert o[0, :30].isnan().all() and not o[0, 30:].any()


# ---- FLA 0.5 ------------------------------------------------------------------------------------------------------------


OLD = """
import torch
import flashdelta as fd
import flashdelta.integrations.fla
from flashdelta import integrations
from fla.ops.kda import chunk_kda, fused_recurrent_kda
torch.manual_seed(0)
given = [torch.randn(1, 90, 2, 32, requires_grad=True) for _ in "qkvg"] + [torch.rand(1, 90, 2, requires_grad=True)]
given += [torch.rand(2, requires_grad=True), torch.randn(64, requires_grad=True)]
found = []
for function, more in ((fd.chunk_kda, dict(backend="reference")), (chunk_kda, {}), (fused_recurrent_kda, None)):
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0, output_final_state=True)
    options |= dict(zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), given))
    if more is not None:
        options |= dict(more, safe_gate=True)
    with torch.set_grad_enabled(more is not None):
        o, state = function(**options)
    found.append([o, state] + ([] if more is None else [*torch.autograd.grad(o.square().sum(), given)]))
assert all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for other in found[1:] for x, y in zip(found[0], other))
status = integrations.status("fla")
print(status.version, status.state)
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ("0.5.0", *("0.5.1", "0.5.2") * FULL))
def test_fla_05(version: str):
    """In a process of its own: with the Triton that it runs with. The oldest stands for what lies between it and the newest."""
    triton = Path(os.environ.get("FLASHDELTA_TRITON_OLDEST", "missing"))
    old = triton.parent / f"fla-{version}"
    if not old.is_dir() or not triton.is_dir():
        pytest.skip("make test installs FLA 0.5 and the oldest Triton")
    path = os.pathsep.join(map(str, (ROOT / "src", old, triton)))
    environment = os.environ | {"PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout == f"{version} active\n"
