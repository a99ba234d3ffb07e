"""vLLM's own layer code, taken out of its wheel and run on a CPU with the integration's functions: prefill, decode, drafts and
both at once. Convolution and norm are left out, as they are not ours; all else of `_forward` is as vLLM has it."""

from __future__ import annotations

import ast
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
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
        """Globals of its module, stood in for."""
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
        """Exports the states, if they lie in a buffer; of convolutions nothing is stored here."""
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


Forward = tuple[Batch, dict, Callable[[KimiLinear, Tensor], Tensor]]
"""A batch, its metadata, and the same calls one by one over a pool."""


def prefills(served: Served, marks: Marks | None = None) -> Forward:
    index = served.model.index
    batch = Batch(served.model, served.model.tokens(100), [70, 30])
    flags, slots = torch.tensor([True, False]), index([3, 5])
    named = {"has_initial_state": flags, "non_spec_state_indices_tensor": slots}
    named |= {"non_spec_query_start_loc": batch.offsets, "num_prefills": 2, "num_prefill_tokens": 100}
    if marks is not None:
        places = {"checkpoint_offsets": index(marks.offsets), "state_indices": index(marks.slots)}
        named["checkpoint"] = SimpleNamespace(**places)
    return batch, named, lambda layer, pool: layer.prefill(batch, pool, slots, flags, marks)


def decoding(served: Served) -> Forward:
    """Decodes a graph's batch, whose last row is padding."""
    batch, slots = Batch(served.model, served.model.tokens(4), [1] * 4), served.model.index([3, 7, 1, 0])
    named = {"non_spec_query_start_loc": batch.offsets, "non_spec_state_indices_tensor": slots, "num_decodes": 4}
    return batch, named | {"num_decode_tokens": 4}, lambda layer, pool: layer.decode(batch, pool, slots)


def drafts(served: Served, lengths: Sequence[int] = (3, 2)) -> Forward:
    index = served.model.index
    batch = Batch(served.model, served.model.tokens(sum(lengths)), [*lengths])
    table, accepted = index([6, 7, 8, 10, 11, 12, 0, 0, 0]).view(3, 1 + DRAFTS), index([2, 1, 1])
    named = {"spec_state_indices_tensor": table, "num_accepted_tokens": accepted, "num_spec_decodes": 2}
    named |= {"spec_sequence_masks": torch.ones(2, dtype=torch.bool), "spec_query_start_loc": batch.offsets}
    named |= {"spec_token_indx": torch.arange(5), "non_spec_token_indx": torch.empty(0, dtype=torch.int64)}
    return batch, named, lambda layer, pool: layer.verify(batch, pool, table, accepted)


def drafts_beside_prefills(served: Served) -> Forward:
    """Whose tokens lie between theirs."""
    (first, named, prompts), (second, more, verified) = prefills(served), drafts(served)
    order = torch.randperm(105, generator=torch.Generator().manual_seed(0))
    mine, others = order[:100].sort().values, order[100:].sort().values
    rows = torch.empty(105, first.rows.shape[1])
    rows[mine], rows[others] = first.rows, second.rows
    own = {"non_spec_token_indx": mine, "spec_token_indx": others, "num_spec_decode_tokens": 5, "num_decode_tokens": 0}

    def calls(layer: KimiLinear, pool: Tensor) -> Tensor:
        o = torch.empty(1, 105, H, D)
        o[:, mine], o[:, others] = prompts(layer, pool), verified(layer, pool)
        return o

    return Batch(served.model, rows, [105]), named | more | own, calls


FORWARDS: dict[str, Callable[[Served], Forward]] = {
    "prefill": prefills,
    "checkpoints": lambda served: prefills(served, Marks([48, 0], [9, 0])),
    "decode": decoding,
    "drafts": drafts,
    "both": drafts_beside_prefills,
}


@every_model
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_is_its_calls_one_by_one(served: Served, kind: str):
    layer, other = LAYERS[CALLS.get(served.name, served.name)](served.model), served.pool.clone()
    if kind == "checkpoints" and not layer.aligned:
        pytest.skip("no checkpoints")
    batch, metadata, calls = FORWARDS[kind](served)
    o = served.run(batch, **metadata)
    with torch.inference_mode():
        want = calls(layer, other)
    # vLLM makes rows dense that are not in ours, and products of matrices add up in another order
    for got, wanted in ((o, want), (served.pool, other)):
        assert relative_error(got, wanted) < TOLERANCE[FP32] if kind == "both" else same_bits(got, wanted)
    assert kind != "decode" or not o[0, 3].any()


# ---- Kimi-K3's fused steps ---------------------------------------------------------------------------------------------

by_channel = pytest.mark.parametrize("dim_first", (False, True))


def fused(monkeypatch: pytest.MonkeyPatch, drafts: int, dim_first: bool) -> tuple[Served, K3Step, Tensor, Tensor]:
    """A layer of Kimi-K3's with a fused step, its windows, and a copy of these."""
    served = Served("Kimi-K3", monkeypatch)
    step = K3Step(served.model, drafts, dim_first)
    windows = served.fuse(step, dim_first)
    return served, step, windows, windows.clone()


def moved(windows: Tensor, own: Tensor) -> list[int]:
    return (windows != own).flatten(1).any(1).nonzero().flatten().tolist()


@by_channel
def test_fused_decode(dim_first: bool, monkeypatch: pytest.MonkeyPatch):
    """With a padded sequence, and rows of a captured graph past the tokens."""
    served, step, windows, own = fused(monkeypatch, 0, dim_first)
    other = served.pool.clone()
    batch, slots = Batch(served.model, served.model.tokens(5), [1] * 5), served.model.index([4, 9, 2, 0, 7])
    counts = {"num_decodes": 4, "num_actual_tokens": 4}
    o = served.run(batch, **counts, non_spec_state_indices_tensor=slots)
    first = Batch(served.model, batch.rows[:4], [1] * 4)
    with torch.inference_mode():
        want, states = step.exact(first, batch.g[0, :4], other, own, slots[:4])
    assert relative_error(o[:, :4], want) < TOLERANCE[FP32] and relative_error(served.pool, states) < TOLERANCE[FP32]
    assert not o[:, 3].any() and o[:, 4].isnan().all()
    assert moved(windows, own) == [2, 4, 9] and same_bits(windows[4, :, 2], batch.mixed[0])


@by_channel
def test_fused_verification(dim_first: bool, monkeypatch: pytest.MonkeyPatch):
    """Three sequences, the last one padding, with counts for more."""
    served, step, windows, own = fused(monkeypatch, DRAFTS, dim_first)
    other, (batch, metadata, _) = served.pool.clone(), drafts(served, (3, 2, 0))
    accepted = metadata["num_accepted_tokens"]
    o = served.run(batch, **metadata | {"num_accepted_tokens": torch.cat((accepted, accepted))})
    with torch.inference_mode():
        want, states = step.exact(batch, batch.g[0], other, own, metadata["spec_state_indices_tensor"], accepted)
    assert relative_error(o, want) < TOLERANCE[FP32] and relative_error(served.pool, states) < TOLERANCE[FP32]
    assert moved(windows, own) == [6, 10] and same_bits(windows[6, :, 2:5], batch.mixed[:3].T)


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
        (90, {"recurrent_state_dtype": BF16}, "flashdelta"),
        (90, {"num_spec": 3}, "flashdelta"),
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
