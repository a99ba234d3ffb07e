"""vLLM's own layer code, taken out of its wheel and run on a CPU with the integration's functions: prefill, decode, drafts and
both at once. Convolution and norm are left out, as they are not ours; all else of `_forward` is as vLLM has it."""

from __future__ import annotations

import ast
import functools
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from flashdelta.integrations import _vllm
from flashdelta.integrations.seams import Replacement, Source

from ..support.cases import BF16, FP32
from ..support.engine_kernels import wheel
from ..support.engines import EPS, LAYERS, Batch, K3Step, KimiLinear, Marks, Model, adapted
from ..support.oracle import TOLERANCE, relative_error, same_bits

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

CLASSES = {
    "Kimi-Linear": (_vllm.KIMI_LINEAR, "KimiGatedDeltaNetAttention"),
    "Kimi-K3": (_vllm.KIMI_K3, "KimiK3DeltaAttention"),
    "Kimi-K3, Triton": (_vllm.KIMI_K3, "KimiK3DeltaAttention"),
    "GLM-5.3-Flash": (_vllm.GLM, "Glm5NextLinearAttention"),
    "GLM-5.3-Flash, Triton": (_vllm.GLM, "Glm5NextLinearAttention"),
    "Ling-3": (_vllm.LING, "BailingMoeV3KimiDeltaAttention"),
}
CALLS = {"Kimi-K3, Triton": "Kimi-Linear"}
"""A layer that makes the same calls, where it is of another name."""

every_model = pytest.mark.parametrize("name", CLASSES)
H, D, DRAFTS = 2, 32, 2


def convolved(x: Tensor, *arguments: Any, out: Tensor | None = None, **named: Any) -> Tensor:
    """In place of the convolution: none."""
    return x if out is None else out.copy_(x)


class Served:
    """A layer of vLLM's, as far as its `_forward` looks."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch):
        self.name, (self.module, cls) = name, CLASSES[name]
        self.model = Model(H, D, dtype=FP32, device="cpu")
        self.pool = self.model.pool(16)
        source = Source(zipfile.Path(wheel(Path(str(FOLDER)), "vllm", _vllm.ENGINE.read[-1])))
        (node,) = source.definitions(self.module, f"{cls}._forward")
        node.decorator_list = []
        shapes = ((1, 200, H, D), *[(4, H, D, D)] * 3)
        manager = SimpleNamespace(get_simultaneous=lambda *specs: [torch.full(x, torch.nan) for x in shapes])
        theirs = {"current_workspace_manager": lambda: manager}
        self.functions = adapted(_vllm.PATCHES, (self.module, _vllm.KIMI_KERNELS), theirs)
        contents = self.globals() | {x: y for x, y in self.functions.items() if not x.startswith("__")}
        kernels = ModuleType(_vllm.KIMI_KERNELS)
        vars(kernels).update(adapted(_vllm.PATCHES, (_vllm.KIMI_KERNELS,)))
        monkeypatch.setitem(sys.modules, _vllm.KIMI_KERNELS, kernels)
        exec(compile(ast.Module([node], []), self.module, "exec"), contents)
        self.forward: Callable[..., None] = contents["_forward"]
        self.layer = self.attributes()
        self.replaced = Replacement(_vllm.ling_forward if name == "Ling-3" else _vllm.forward, self.forward)

    def fuse(self, step: K3Step, dim_first: bool) -> Tensor:
        """Gives a layer of Kimi-K3's the backends and weights of a fused step. Returns the pool of its windows."""
        windows = step.windows(16)
        self.forward.__globals__["is_conv_state_dim_first"] = lambda: dim_first
        self.layer.kda_decode_backend, self.layer.kda_spec_decode_backend = step.backends()
        self.layer.decode_conv1d_weight = step.parts
        self.layer.decode_norm_weight = step.wide_norm
        self.layer.kv_cache = (windows if dim_first else windows.mT, self.pool)
        self.layer.o_norm = SimpleNamespace(eps=EPS)
        return windows

    def globals(self) -> dict[str, Any]:
        """Of its module, stood in for."""
        metadata = dict.fromkeys(("GDNAttentionMetadata", "KimiK3KDAMetadata"), SimpleNamespace)
        return metadata | {
            "torch": torch,
            "TYPE_CHECKING": False,
            "rearrange": rearrange,
            "current_platform": SimpleNamespace(is_rocm=lambda: False),
            "is_conv_state_dim_first": lambda: True,
            "ops": SimpleNamespace(**adapted(_vllm.PATCHES, (_vllm.OPS,))),
            "causal_conv1d_fn": convolved,
            "causal_conv1d_update": convolved,
            "get_forward_context": lambda: SimpleNamespace(attn_metadata={"layer": self.metadata}),
            "_cast_sigmoid": lambda x: x.float().sigmoid(),
        }

    def attributes(self) -> SimpleNamespace:
        weight = SimpleNamespace(weight=torch.zeros(3 * H * D, 1, 4), bias=None)
        parts = {f"{x}_conv1d": SimpleNamespace(weight=torch.zeros(H * D, 1, 4), bias=None) for x in "qkv"}
        model, flash = self.model, "Triton" not in self.name
        A_log = model.A_log if self.name.startswith("Kimi") else model.A_log.view(1, 1, H, 1)
        sizes = {"head_dim": D, "local_num_heads": H, "local_projection_size": H * D}
        backends = {"kda_prefill_backend": "flashkda" if flash else "triton", "kda_decode_backend": "triton"}
        gates = dict.fromkeys(("gate_lower_bound", "kda_lower_bound", "lower_bound"), model.lower_bound)
        flags = {"kda_safe_gate": True, "safe_gate": True, "use_recoverssm": False, "_conv_state_dim_first": True}
        layer = SimpleNamespace(
            **(sizes | backends | gates | flags | parts),
            prefix="layer",
            kv_cache=(torch.zeros(16, 3 * H * D, 3), self.pool),
            conv1d=weight,
            kda_spec_decode_backend="native",
            decode_conv1d_weight=None,
            decode_norm_weight=None,
            _merged_conv_weight=torch.zeros(3 * H * D, 4),
            _flashkda_buffer_specs=(),
            _checkpoint_exporter=SimpleNamespace(export=self.export),
            A_log=A_log,
            dt_bias=model.dt_bias,
            o_norm=lambda x, gate: x,
        )
        if self.module == _vllm.GLM:
            method = self.functions["_flashkda_prefill"]
            layer._flashkda_prefill = lambda **call: method(layer, **call)
        return layer

    def export(self, checkpoint: Any, *, recurrent_checkpoint: Tensor | None = None, **others: Any) -> None:
        """Of the states, if they lie in a buffer; of convolutions nothing is stored here."""
        for row, (offset, slot) in enumerate(zip(checkpoint.checkpoint_offsets, checkpoint.state_indices)):
            if recurrent_checkpoint is not None and offset > 0:
                self.pool[slot] = recurrent_checkpoint[row]

    def run(self, batch: Batch, **metadata: Any) -> Tensor:
        absent = ("has_initial_state", "non_spec_query_start_loc", "non_spec_state_indices_tensor", "checkpoint")
        absent += ("spec_sequence_masks", "spec_token_indx", "non_spec_token_indx", "spec_state_indices_tensor")
        absent += ("spec_query_start_loc", "num_accepted_tokens", "spec_token_start", "non_spec_token_start")
        counts = ("num_prefills", "num_decodes", "num_spec_decodes")
        fields = dict.fromkeys(absent) | dict.fromkeys(counts, 0) | {"num_actual_tokens": len(batch.rows)} | metadata
        self.metadata = SimpleNamespace(**fields)
        out = torch.full_like(batch.v, torch.nan)
        tokens = {"g1": batch.g, "beta": batch.beta, "core_attn_out": out}
        if self.module in (_vllm.KIMI_LINEAR, _vllm.KIMI_K3):
            tokens |= {"mixed_qkv": batch.mixed, "g2": batch.g[0]}
        elif self.module == _vllm.GLM:
            tokens |= {"qkv_proj_states": batch.mixed}
        else:
            names = ("q_proj_states", "k_proj_states", "v_proj_states")
            tokens |= dict(zip(names, batch.mixed.split(H * D, dim=1))) | LAYERS[self.name](self.model).activated(batch)
            tokens["g1"] = tokens.pop("g")
        with torch.inference_mode():
            self.replaced(self.layer, **tokens)
        return out


@pytest.fixture
def served(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    yield Served(name, monkeypatch)


def both(served: Served) -> tuple[KimiLinear, Tensor]:
    """The same calls one by one, on another pool of the same numbers."""
    other = served.model.pool(16).copy_(served.pool)
    return LAYERS[CALLS.get(served.name, served.name)](served.model), other


def prefills(served: Served) -> tuple[Batch, dict]:
    index = served.model.index
    batch = Batch(served.model, served.model.tokens(100), [70, 30])
    flags, slots = torch.tensor([True, False]), index([3, 5])
    named = {"has_initial_state": flags, "non_spec_state_indices_tensor": slots}
    return batch, named | {"non_spec_query_start_loc": batch.offsets, "num_prefills": 2, "num_prefill_tokens": 100}


@every_model
@pytest.mark.parametrize("marked", (False, True))
def test_prefill(served: Served, marked: bool):
    layer, other = both(served)
    if marked and not layer.aligned:
        pytest.skip("no checkpoints")
    batch, metadata = prefills(served)
    marks = Marks([48, 0], [9, 0]) if marked else None
    if marks is not None:
        index = served.model.index
        metadata["checkpoint"] = SimpleNamespace(
            checkpoint_offsets=index(marks.offsets), state_indices=index(marks.slots)
        )
    o = served.run(batch, **metadata)
    slots, flags = metadata["non_spec_state_indices_tensor"], metadata["has_initial_state"]
    with torch.inference_mode():
        want = layer.prefill(batch, other, slots, flags, marks)
    assert same_bits(o, want) and same_bits(served.pool, other)


@every_model
def test_decode(served: Served):
    """Of a graph's batch, whose last row is padding."""
    layer, other = both(served)
    batch, slots = Batch(served.model, served.model.tokens(4), [1] * 4), served.model.index([3, 7, 1, 0])
    named = {"non_spec_query_start_loc": batch.offsets, "non_spec_state_indices_tensor": slots, "num_decodes": 4}
    o = served.run(batch, **named, num_decode_tokens=4)
    with torch.inference_mode():
        want = layer.decode(batch, other, slots)
    assert same_bits(o, want) and same_bits(served.pool, other) and not o[0, 3].any()


@every_model
def test_memory_is_measured_with_the_largest_prefill(served: Served, monkeypatch: pytest.MonkeyPatch):
    """By a run without metadata, in which vLLM's layers call no kernels."""
    ran: list[dict] = []
    context = SimpleNamespace(get_forward_context=lambda: SimpleNamespace(attn_metadata=None))
    served.forward.__globals__["get_forward_context"] = context.get_forward_context
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    gate = {"gate": "lower_bound", "lower_bound": -5.0, "checkpoints": (False, True)}
    monkeypatch.setattr(_vllm, "_expected", [functools.partial(_vllm.largest, 500, 3, FP32, gate)])
    monkeypatch.setattr(_vllm, "take", lambda op, call: ran.append(call))
    before = served.pool.clone()
    out = served.run(Batch(served.model, served.model.tokens(4), [4]))
    assert out.isnan().all() and same_bits(before, served.pool)
    assert [x["q"].shape for x in ran] == [(1, 500, H, D)] and len(ran[0]["cu_seqlens"]) == 4


def drafts(served: Served, lengths: list[int]) -> tuple[Batch, dict]:
    index = served.model.index
    batch = Batch(served.model, served.model.tokens(sum(lengths)), lengths)
    table = index([6, 7, 8, 10, 11, 12, 0, 0, 0]).view(3, 1 + DRAFTS)
    named = {"spec_state_indices_tensor": table, "num_accepted_tokens": index([2, 1, 1]), "num_spec_decodes": 2}
    return batch, named | {
        "spec_sequence_masks": torch.ones(2, dtype=torch.bool),
        "spec_query_start_loc": batch.offsets,
    }


@every_model
def test_drafts(served: Served):
    layer, other = both(served)
    batch, metadata = drafts(served, [3, 2])
    none = torch.empty(0, dtype=torch.int64)
    o = served.run(batch, **metadata, spec_token_indx=torch.arange(5), non_spec_token_indx=none)
    with torch.inference_mode():
        want = layer.verify(batch, other, metadata["spec_state_indices_tensor"], metadata["num_accepted_tokens"])
    assert same_bits(o, want) and same_bits(served.pool, other)


@every_model
def test_drafts_beside_prefills(served: Served):
    """Whose tokens lie between theirs."""
    layer, other = both(served)
    first, named = prefills(served)
    second, metadata = drafts(served, [3, 2])
    order = torch.randperm(105, generator=torch.Generator().manual_seed(0))
    mine, others = order[:100].sort().values, order[100:].sort().values
    rows = torch.empty(105, first.rows.shape[1])
    rows[mine], rows[others] = first.rows, second.rows
    counts = {"num_spec_decode_tokens": 5, "num_decode_tokens": 0}
    both_of = {"non_spec_token_indx": mine, "spec_token_indx": others} | counts
    o = served.run(Batch(served.model, rows, [105]), **named, **metadata, **both_of)
    with torch.inference_mode():
        slots, flags = named["non_spec_state_indices_tensor"], named["has_initial_state"]
        prompts = layer.prefill(first, other, slots, flags)
        verified = layer.verify(second, other, metadata["spec_state_indices_tensor"], metadata["num_accepted_tokens"])
    # vLLM makes rows dense that are not in ours, and products of matrices add up in another order
    for got, want in ((o[:, mine], prompts), (o[:, others], verified), (served.pool, other)):
        assert relative_error(got, want) < TOLERANCE[FP32]


# ---- Kimi-K3's fused steps ---------------------------------------------------------------------------------------------

by_channel = pytest.mark.parametrize("dim_first", (False, True))


@by_channel
def test_fused_decode(dim_first: bool, monkeypatch: pytest.MonkeyPatch):
    """With a padded sequence, and rows of a captured graph past the tokens."""
    served = Served("Kimi-K3", monkeypatch)
    step = K3Step(served.model, 0, dim_first)
    windows = served.fuse(step, dim_first)
    own, other = windows.clone(), served.pool.clone()
    batch, slots = Batch(served.model, served.model.tokens(5), [1] * 5), served.model.index([4, 9, 2, 0, 7])
    counts = {"num_decodes": 4, "num_actual_tokens": 4}
    o = served.run(batch, **counts, non_spec_state_indices_tensor=slots)
    first = Batch(served.model, batch.rows[:4], [1] * 4)
    with torch.inference_mode():
        want, states = step.exact(first, batch.g[0, :4], other, own, slots[:4])
    assert relative_error(o[:, :4], want) < TOLERANCE[FP32] and relative_error(served.pool, states) < TOLERANCE[FP32]
    assert not o[:, 3].any() and o[:, 4].isnan().all()
    moved = (windows != own).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == [2, 4, 9] and same_bits(windows[4, :, 2], batch.mixed[0])


@by_channel
def test_fused_verification(dim_first: bool, monkeypatch: pytest.MonkeyPatch):
    """Of three sequences, the last one padding, with counts for more."""
    served = Served("Kimi-K3", monkeypatch)
    step = K3Step(served.model, DRAFTS, dim_first)
    windows = served.fuse(step, dim_first)
    own, other = windows.clone(), served.pool.clone()
    batch, metadata = drafts(served, [3, 2, 0])
    accepted = metadata["num_accepted_tokens"]
    metadata["num_accepted_tokens"] = torch.cat((accepted, accepted))
    z = batch.g[0]
    o = served.run(batch, **metadata)
    with torch.inference_mode():
        want, states = step.exact(batch, z, other, own, metadata["spec_state_indices_tensor"], accepted)
    assert relative_error(o, want) < TOLERANCE[FP32] and relative_error(served.pool, states) < TOLERANCE[FP32]
    moved = (windows != own).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == [6, 10] and same_bits(windows[6, :, 2:5], batch.mixed[:3].T)


def choices(monkeypatch: pytest.MonkeyPatch, capability: int) -> dict[str, Callable[..., str]]:
    """vLLM's own functions that choose a layer's kernels, on a GPU of that capability, with ours around them."""
    source = Source(zipfile.Path(wheel(Path(str(FOLDER)), "vllm", _vllm.ENGINE.read[-1])))
    names = ("is_fused_kda_decode_supported", "is_flashinfer_fused_kda_decode_supported")
    names += ("is_flashinfer_fused_kda_spec_decode_supported",)
    chosen = ("resolve_kda_decode_backend", "resolve_kda_spec_decode_backend")
    platform = SimpleNamespace(
        is_device_capability=lambda x: x == capability,
        is_device_capability_family=lambda x: x // 10 == capability // 10,
        get_device_capability=lambda: divmod(capability, 10),
    )
    kernels = SimpleNamespace(_C=SimpleNamespace(fused_kda_decode=None))
    contents = {
        "torch": SimpleNamespace(bfloat16=BF16, float32=FP32, dtype=torch.dtype, ops=kernels),
        "current_platform": platform,
        "logger": SimpleNamespace(info_once=lambda *x: None),
        "is_conv_state_dim_first": lambda: False,
        "has_flashinfer_fused_kda_decode": lambda: True,
        "has_flashinfer_packed_fused_kda_decode": lambda: True,
    }
    nodes = [next(source.definitions(_vllm.KIMI_K3, name)) for name in (*names, *chosen)]
    exec(compile(ast.Module(nodes, []), _vllm.KIMI_K3, "exec"), contents)
    monkeypatch.setattr(_vllm, "accelerator", lambda: torch.device("cpu"))
    found = adapted(_vllm.PATCHES, (_vllm.KIMI_K3,), {name: contents[name] for name in chosen})
    return {name: found[name] for name in chosen}


LAYER = {"num_heads": 12, "head_dim": 128, "conv_width": 4, "num_spec": 0}
LAYER |= dict.fromkeys(("input_dtype", "conv_state_dtype"), BF16) | {"recurrent_state_dtype": FP32, "backend": "auto"}


@pytest.mark.parametrize(
    ("capability", "changes", "chosen"),
    [
        (90, {}, "native"),
        (90, {"num_heads": 32}, "flashdelta"),
        (90, {"num_heads": 6}, "flashdelta"),
        (90, {"recurrent_state_dtype": BF16}, "flashdelta"),
        (90, {"num_spec": 3}, "flashdelta"),
        (80, {}, "flashdelta"),
        (100, {}, "native"),
        (90, {"num_heads": 32, "backend": "triton"}, "triton"),
        (90, {"head_dim": 96}, "triton"),
        (100, {"num_heads": 32, "backend": "flashinfer"}, "flashinfer"),
    ],
)
def test_where_steps_are_fused(capability: int, changes: dict, chosen: str, monkeypatch: pytest.MonkeyPatch):
    """vLLM's own fused kernels stay where it has them, unless the environment says otherwise."""
    monkeypatch.delenv(_vllm.FUSED, raising=False)
    choose = choices(monkeypatch, capability)["resolve_kda_decode_backend"]
    assert choose(**LAYER | changes) == chosen
    monkeypatch.setenv(_vllm.FUSED, "1")
    assert choose(**LAYER | changes) == ("flashdelta" if chosen == "native" else chosen)
    if chosen == "native":
        assert choose(**LAYER | changes | {"backend": "native"}) == "native"
