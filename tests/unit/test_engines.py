"""vLLM's and SGLang's calls through the integrations, on a CPU: served against one request at a time; what stays theirs; how
the integrations are turned on, and off."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdelta import backends, chunk_kda, fused_kda_decode, warmup
from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations import engine as engine_module
from flashdelta.integrations.engine import Engine, first_rows
from flashdelta.integrations.seams import Patch, Patches, Replacement

from ..support.cases import BF16, FP32
from ..support.engines import LAYERS, Batch, K3Step, KimiLinear, Marks, Model, SGLang
from ..support.oracle import TOLERANCE
from ..support.serving import serve, serve_steps

ROUNDS = 20
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def small(**changes: Any) -> Model:
    return Model(**{"H": 2, "D": 32, "dtype": FP32, "device": "cpu"} | changes)


# ---- served ---------------------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("drafts", (0, 2))
def test_serving(make: type[KimiLinear], drafts: int):
    """Random arrivals, prompts in pieces, prefix-cache hits, evictions, padded batches, drafts: each request as if alone."""
    found = serve(make, small(), drafts, 10 * TOLERANCE[FP32], ROUNDS)
    assert found.finished >= 4 and found.calls >= ROUNDS and found.evicted
    assert found.hits or not found.layer.aligned


@every_layer
@pytest.mark.parametrize(
    "other", ({"dtype": BF16, "state": BF16}, {"lower_bound": None}), ids=("bfloat16", "unbounded")
)
def test_serving_other_models(make: type[KimiLinear], other: dict):
    if "lower_bound" in other and make.modules[0] in (_vllm.GLM, _vllm.LING):
        pytest.skip("its gate has a bound")
    assert serve(make, small(**other), 2, 0.05 if "dtype" in other else 10 * TOLERANCE[FP32], ROUNDS // 2).finished


@every_layer
@pytest.mark.parametrize("padded", (0, 4))
def test_batches_of_nothing(make: type[KimiLinear], padded: int):
    """Without sequences, or with those that a graph is padded by: outputs are zeros, and no slot is touched."""
    model = small()
    layer, pool, index = make(model), model.pool(8), model.index
    before, nothing, slots = pool.clone(), Batch(model, model.tokens(0), [0] * padded), index([make.null] * padded)
    outputs = [layer.decode(Batch(model, model.tokens(padded), [1] * padded), pool, slots)]
    if not padded:
        outputs.append(layer.prefill(nothing, pool, slots, torch.zeros(0, dtype=torch.bool)))
    drafts = Batch(model, model.tokens(3 * padded), nothing.lengths)
    if isinstance(layer, SGLang):
        buffer = pool.new_full((padded, 3, *pool.shape[1:]), 7)
        outputs.append(layer.verify_read_only(drafts, pool, slots, buffer, 3))
        assert buffer.eq(7).all()
    else:
        outputs.append(layer.verify(drafts, pool, slots[:, None].expand(-1, 3).contiguous(), index([1] * padded)))
    assert not any(o.any() for o in outputs) and torch.equal(pool, before)


@pytest.mark.parametrize("by_channel", (False, True))
@pytest.mark.parametrize("drafts", (0, 2))
def test_serving_whole_steps(drafts: int, by_channel: bool):
    assert serve_steps(K3Step(small(), drafts, by_channel), 10 * TOLERANCE[FP32], 3 * ROUNDS) >= 16


# ---- what an adapter does, and what stays the engine's -----------------------------------------------------------------------


class Logged(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


VIEWS = {"alias", "view", "transpose", "slice", "select", "unsqueeze", "split", "split_with_sizes", "_reshape_alias"}
TRACKING = {"clamp", "mul"}
"""Calls on the numbers of tracked chunks."""


NO_CALLS = (_vllm.built, _vllm.built_k3, _vllm.built_glm, _vllm.built_ling, _sglang.built, _vllm.forward)
NO_CALLS += (_vllm.k3_decode_backend, _vllm.k3_verify_backend, _vllm.k3_others, _vllm.ling_forward)
NO_CALLS += (_vllm.workspace_manager,)
"""Adapters of what is not called for a batch, or on other GPUs, or runs the layer's own code."""

ADAPTERS = {x.adapter for x in (*_vllm.PATCHES, *_sglang.PATCHES)} - {None, *NO_CALLS}


def test_adapters_only_take_views(monkeypatch: pytest.MonkeyPatch):
    """They copy nothing, and read nothing of a device, whatever they call."""
    model, reached = small(), set()

    def op(**call: Any) -> tuple:
        return (call["v"] if "v" in call else call["g"],)

    monkeypatch.setattr(_vllm, "supports", lambda op, **call: SimpleNamespace(ok=True))
    for module in (_vllm, _sglang):
        monkeypatch.setattr(module, "chunk_kda", op)
        monkeypatch.setattr(module, "recurrent_kda", op)
    monkeypatch.setattr(_vllm, "fused_kda_decode", lambda **call: call["raw_g"])
    first_rows(1, torch.device("cpu"))

    def watched(adapter: Any) -> Any:
        def run(theirs: Any, call: dict) -> Any:
            reached.add(adapter)
            with Logged() as logged:
                found = adapter(theirs, call)
            assert logged.names <= VIEWS | (TRACKING if adapter is _sglang.extend else set()), adapter
            return found

        return run

    layers, step = [make(model) for make in LAYERS.values()], K3Step(model, 2)
    assert step.backends() == ("flashdelta", "flashinfer")
    for call in (*(layer.call for layer in layers), step.call):
        for replacement in vars(call).values():
            if replacement.adapter in ADAPTERS:
                replacement.adapter = watched(replacement.adapter)
    for layer in layers:
        exercise(layer, model)
    pool, windows, table = model.pool(8), step.windows(8), model.index([1, 2, 3, 4, 5, 6]).view(2, 3)
    step.fused(Batch(model, model.tokens(2), [1, 1]), step.output_gate(2), pool, windows, table[:, 0])
    drafts, counts = Batch(model, model.tokens(5), [3, 2]), model.index([2, 1])
    step.fused(drafts, step.output_gate(5), pool, windows, table, counts)
    assert reached == ADAPTERS


def exercise(layer: Any, model: Model) -> None:
    """Each call of a layer."""
    pool, slots, flags = model.pool(8), model.index([3, 5]), torch.tensor([True, False])
    marks = Marks([64, 0], [6, layer.null]) if layer.aligned else None
    layer.prefill(Batch(model, model.tokens(140), [100, 40]), pool, slots, flags, marks)
    layer.decode(Batch(model, model.tokens(2), [1, 1]), pool, slots)
    drafts = Batch(model, model.tokens(5), [3, 2])
    if hasattr(layer, "verify_read_only"):
        layer.verify_read_only(drafts, pool, slots, pool.new_zeros(2, 3, *pool.shape[1:]), 3)
    else:
        layer.verify(drafts, pool, model.index([1, 2, 3, 4, 5, 6]).view(2, 3), model.index([2, 1]))


def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every call refused that an integration makes."""
    choose = backends.choose

    def refused(problem: Any, device: torch.device, name: object = "auto") -> Any:
        if name is backends.KERNEL:
            raise ValueError("no kernel runs this call")
        return choose(problem, device, name)

    monkeypatch.setattr(backends, "choose", refused)


@every_layer
def test_what_no_kernel_runs_stays_the_engines(make: type[KimiLinear], monkeypatch: pytest.MonkeyPatch):
    """With states where it wants them: its functions get gathered ones, and what they return is stored."""
    no_kernel(monkeypatch)
    model, reached = small(), []

    def answer(name: str) -> Any:
        def theirs(*arguments: Any, **call: Any) -> Any:
            reached.append(name)
            assert not any(isinstance(x, (_vllm.Slots, _vllm.Pool)) for x in (*arguments, *call.values()))
            if name == "gather_initial_states":
                return call["state"][call["indices"]] * call["has_initial_state"][:, None, None, None]
            if name == "scatter_states":
                call["state"][call["indices"]] = call["src"]
                return None
            states = call.get("initial_state")
            if "ssm_states" in call:
                return call["mixed_qkv" if name == "packed_decode" else "v"]
            if "mixed_qkv" in call:
                return call["mixed_qkv"], None
            if states is None or states.shape[0] != 2:
                return call["v"], states
            assert call["initial_state"].shape == (2, model.H, model.D, model.D)
            return call["v"], states + 1

        return theirs

    names = {seam.name.split(".")[-1] for seam in (*_vllm.PATCHES, *_sglang.PATCHES)} - {"current_workspace_manager"}
    layer = make(model, {name: answer(name) for name in names})
    pool = model.pool(8)
    before = pool.clone()
    batch = Batch(model, model.tokens(140), [100, 40])
    layer.prefill(batch, pool, model.index([3, 5]), torch.tensor([True, False]))
    if not isinstance(layer, LAYERS["SGLang"]):
        assert torch.equal(pool[3], before[3] + 1) and torch.equal(pool[5], torch.ones_like(pool[5]))
    before = len(reached)
    layer.decode(Batch(model, model.tokens(2), [1, 1]), pool, model.index([3, 5]))
    assert len(reached) > before


def test_what_flash_kda_writes_is_stored(monkeypatch: pytest.MonkeyPatch):
    """Where it runs: Kimi-K3 then takes the final states from a buffer of its own."""
    no_kernel(monkeypatch)

    def flash_kda(**call: Any) -> tuple:
        assert call["initial_state"].shape == (2, 2, 32, 32)
        call["checkpoint_state"].fill_(8)
        return call["out"].zero_(), call["final_state"].fill_(7)

    def gather(**call: Any) -> torch.Tensor:
        return call["state"][call["indices"]]

    model = small()
    layer = LAYERS["Kimi-K3"](model, {"_flashkda_prefill": flash_kda, "gather_initial_states": gather})
    pool, flags = model.pool(8), torch.tensor([True, False])
    layer.prefill(Batch(model, model.tokens(140), [100, 40]), pool, model.index([3, 5]), flags, Marks([64, 0], [6, 0]))
    assert all(pool[slot].eq(number).all() for slot, number in ((3, 7), (5, 7), (6, 8)))


LEFT = {
    "ring": ("packed_decode", {"replayssm_d": torch.zeros(1), "lower_bound": None}),
    "tree": ("target_verify", {"retrieve_parent_token": torch.zeros(1)}),
    "no buffer": ("target_verify", {"intermediate_states_buffer": None}),
    "records": ("target_verify", {"replayssm_rawv": torch.zeros(1)}),
    "one token": ("target_verify", {"cache_steps": 1}),
    "accepted": ("target_verify", {"fused_accept_state_indices": torch.zeros(1)}),
    "states of chunks": ("extend", {"return_intermediate_states": True, "track_state": None}),
    "widths": ("extend", {"q": torch.zeros(1, 140, 2, 48)}),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_sglang_keeps(kind: str):
    """It gets the call as it was."""
    name, changes = LEFT[kind]
    model, reached = small(), []

    def theirs(**call: Any) -> Any:
        reached.append({x: call[x] for x in changes})
        return (torch.zeros_like(call["mixed_qkv" if "mixed_qkv" in call else "v"]), None)

    layer = LAYERS["SGLang"](model, {name: theirs})
    replacement = vars(layer.call)[name]
    adapter = replacement.adapter
    replacement.adapter = lambda theirs, call: adapter(theirs, {**call, **changes})
    exercise(layer, model)
    (found,) = reached
    assert all(found[x] is value or found[x] == value for x, value in changes.items())


def told(a: Any, b: float = -5.0, *, c: Any = None, **others: Any) -> tuple:
    return "theirs", a, b, c, others


def test_a_replacement_has_the_arguments_of_the_engines_function():
    """Those that a call leaves out have its defaults; a call with others stays the engine's, with tensors for what stands for
    them."""
    call = Replacement(lambda theirs, call: call, told, "d")
    assert call(1, c=3) == {"a": 1, "b": -5.0, "c": 3} and call(1, 2, d=4) == {"a": 1, "b": 2, "c": None, "d": 4}
    states = torch.arange(4.0)
    slots = _vllm.Slots(states, torch.tensor([3, 1]), None, lambda: states[[3, 1]])
    name, a, b, _, others = call(slots, _vllm.Pool(states), strange=_vllm.Final(states))
    assert name == "theirs" and [x.tolist() for x in (a, b, others["strange"])] == [[3, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    for wrong in ((1, 2, 3), (1, 2)):
        with pytest.raises(TypeError):
            call(*wrong, a=1)


# ---- on and off -----------------------------------------------------------------------------------------------------------


KERNELS = '''
def decode(x, scale=1.0, *, out=None):
    """Decodes."""
    a, b = pair = f"{x!r:>{scale}}", lambda y: (y[..., 1:], -y[(0, 1)] ** 2)
    return x * scale
'''
LAYER = """
from .kernels import decode
class Layer:
    size: int = 4
    def forward(self, x):
        return decode(x, 2.0)
class Config:
    def width(self):
        return 3
"""


def seams() -> tuple:
    def ours(theirs: Any, call: dict) -> Any:
        return "ours", theirs(**call)

    return (
        Patch("tiny.kernels", "decode", "old e72a687e7e586f3b"),
        Patch("tiny.layer", "decode", "old e72a687e7e586f3b", ours),
        Patch("tiny.layer", "Layer.forward", "6f3a79c520bcb884", ours),
        Patch("tiny.layer", "Layer.fast", value=True),
        Patch("tiny.layer", "Config", "08578f3abe0f2627"),
    )


def write(root: Path, version: str = "1.1", old: str = "", new: str = "") -> None:
    """An installed engine, with a change."""
    texts = {"__init__": "", "kernels": KERNELS, "layer": LAYER}
    assert any(old in text for text in texts.values())
    (root / "tiny").mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / "tiny" / f"{name}.py").write_text(text.replace(old, new) if old else text)
    (root / f"tiny-{version}.dist-info").mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n"
    (root / f"tiny-{version}.dist-info" / "METADATA").write_text(metadata)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    """In a process where it is not imported; what is written to `tmp_path` can be."""
    found = Engine(name="tiny", environment="FLASHDELTA_TINY", read=("1.0", "1.1"), patches=seams(), replaces="all")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield found
    found.disable()
    for name in [x for x in sys.modules if x.split(".")[0] == "tiny"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def is_replaced() -> set[bool]:
    layer = importlib.import_module("tiny.layer")
    answers = layer.decode(1), layer.Layer().forward(1)
    return {*(isinstance(x, tuple) and x[0] == "ours" for x in answers), hasattr(layer.Layer, "fast")}


@pytest.mark.parametrize("early", (False, True))
def test_modules_are_replaced_as_they_are_imported(engine: Engine, tmp_path: Path, early: bool):
    """And those that were before."""
    before = [*sys.meta_path]
    write(tmp_path, "1.1+cu129")
    assert engine.status().state == "possible" and engine.environment in engine.status().reason
    if early:
        assert is_replaced() == {False}
    engine.enable()
    engine.enable()
    assert engine.status().state == "active" and ("tiny" in sys.modules) is early
    assert is_replaced() == {True}
    engine.disable()
    assert is_replaced() == {False} and engine.status().state == "possible" and sys.meta_path == before


def test_what_turns_it_off(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ImportError, match="not installed"):
        engine.enable()
    assert engine.status().state == "not installed" and "pip install" in engine.status().reason
    write(tmp_path)
    for word in ("off", "AMD"):
        monkeypatch.setattr(torch.version, "hip", "7.0" if word == "AMD" else None)
        monkeypatch.setenv(engine.environment, "1" if word == "AMD" else word)
        engine.enable()
        assert not engine.enabled and is_replaced() == {False} and engine.status().state == "off"
        assert engine.status().reason == (backends.other_vendor() or f"{engine.environment}={word}")


DECODE = "tiny.kernels.decode, tiny.layer.decode"
CHANGES = {
    "a comment": ("return 3", "return 3  # wide", None),
    "a statement": ("x * scale", "x + scale", DECODE),
    "a decorator": ("    def forward", "    @staticmethod\n    def forward", "tiny.layer.Layer.forward"),
    "what a caller passes": ("decode(x, 2.0)", "decode(x, out=x)", "tiny.layer.Layer.forward"),
    "what adapters read": ("return 3", "return 4", "tiny.layer.Config"),
    "an import": ("from .kernels import decode", "decode = print", "tiny.layer.decode"),
    "syntax": ("def width(self):", "def width(self:", "layer.py"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_engine_that_differs_is_left_alone(engine: Engine, tmp_path: Path, kind: str):
    """With a warning, once, which names the code; its files may be patched."""
    old, new, what = CHANGES[kind]
    write(tmp_path, "1.1", old, new)
    if what is None:
        engine.enable()
        assert engine.enabled
    else:
        is_refused(engine, f"1.1 as it is: .*{re.escape(what)}")


@pytest.mark.parametrize(("version", "change"), (("1.2", "x * scale"), ("9.0", "return 3")))
def test_another_version_is_left_alone(engine: Engine, tmp_path: Path, version: str, change: str):
    write(tmp_path, version, change, change + "0")
    is_refused(engine, f"leaves tiny {version} .*the versions read are 1.0, 1.1; other code than was read: tiny")
    write(tmp_path, version)
    is_refused(replace(engine, applied=Patches(), warned=False), "no code differs")


def is_refused(engine: Engine, what: str) -> None:
    with pytest.warns(UserWarning, match=what):
        engine.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.enable()
    assert not engine.enabled and engine.status().state == "unknown version"
    assert re.search(what.partition(".*")[2] or what, engine.status().reason)


# ---- kernels of a layer -----------------------------------------------------------------------------------------------------


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """Operators and options, which are called as they are but for sizes and dtypes."""
    calls: list[tuple[str, dict]] = []

    def warm(op: Any, **options: Any) -> None:
        calls.append((op.__name__, options))
        small = {"head_dims": [(32, 32)], "device": "cpu", "dtype": FP32, "beta_dtype": FP32, "g_dtype": FP32}
        warmup(op, **options | small)

    monkeypatch.setattr(engine_module, "warmup", warm)
    monkeypatch.setattr(_vllm, "_warmed", set())
    monkeypatch.setattr(_vllm, "_expected", [])
    _sglang.warm.cache_clear()
    return calls


LIMITS = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=200, max_num_seqs=3))


def test_layers_are_warmed_once_each_kind(
    warmed: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    base = {"head_dim": 128, "model_config": SimpleNamespace(dtype=BF16), "get_state_dtype": lambda: (BF16, FP32)}
    kimi = SimpleNamespace(**base, gate_lower_bound=None, num_spec=0)
    k3 = SimpleNamespace(**base, gate_lower_bound=-5.0, num_spec=3, _checkpoint_exporter=object())
    glm, triton = (
        SimpleNamespace(**base, kda_lower_bound=-5.0, num_spec=0, _checkpoint_exporter=x) for x in (object(), None)
    )
    ling = SimpleNamespace(**base, lower_bound=-5.0, safe_gate=True, num_speculative_tokens=0)
    built = {_vllm.built: (kimi, k3), _vllm.built_glm: (glm, triton), _vllm.built_ling: (ling,)}
    for each, layers in built.items():
        for layer in (*layers, *layers):
            with torch.device("meta"):  # as vLLM makes the engine's device the default one
                each(lambda **call: None, {"self": layer, "vllm_config": LIMITS})
    assert not caplog.records  # of what is not compiled ahead
    assert [name for name, _ in warmed] == ["chunk_kda", "recurrent_kda"] * 5
    assert_largest_prefills_run_once(monkeypatch)
    prefills, steps = ([options for _, options in warmed[i::2]] for i in (0, 1))
    gates = [(options["gate"], options["lower_bound"]) for options in prefills]
    assert gates == [("softplus", None), *[("lower_bound", -5.0)] * 3, ("none", None)]
    assert prefills[1]["checkpoint_states"] == prefills[2]["checkpoints"] == (False, True)
    assert prefills[3]["use_beta_sigmoid_in_kernel"] is False and "use_beta_sigmoid_in_kernel" not in steps[3]
    assert prefills[4]["safe_gate"] and [options["speculative"] for options in steps] == [False, True, *[False] * 3]


def assert_largest_prefills_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of layer, when vLLM measures its memory: in the run without metadata, and in no other."""
    ran: list[dict] = []

    def taken(op: Any, call: dict) -> Any:
        ran.append(call)
        found = engine_module.take(op, call)
        assert found is not None and found[0].shape == (1, 200, 2, 32) and not call["state_pool"].any()
        return found

    context = SimpleNamespace(attn_metadata=None)
    module = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    monkeypatch.setattr(_vllm, "take", taken)
    kinds, call = [*_vllm._expected], {"self": None, "core_attn_out": torch.zeros(1, 70, 2, 32, dtype=BF16)}
    for _ in range(2):
        _vllm.forward(lambda **call: None, call)
    assert len(kinds) == len(ran) == 5
    assert all(x["cu_seqlens"].tolist() == [0, 66, 133, 200] for x in ran)
    assert [len(x.get("checkpoint_offsets", ())) for x in ran] == [0, 3, 3, 0, 0]
    _vllm._expected[:], context.attn_metadata = kinds, {}
    for _ in range(2):
        _vllm.forward(lambda **call: None, call)
    assert len(ran) == 5 and not _vllm._expected


@pytest.mark.parametrize("by_channel", (False, True))
def test_fused_steps_are_warmed(by_channel: bool, monkeypatch: pytest.MonkeyPatch):
    """In the layer's layout of windows, once: few sequences, many, and drafts."""
    calls: list[dict] = []

    def op(**call: Any) -> None:
        calls.append(call)
        assert not fused_kda_decode(**call).any()

    for name, value in {"fused_kda_decode": op, "_warmed": set(), "_fused": set(), "built": lambda *x: None}.items():
        monkeypatch.setattr(_vllm, name, value)
    monkeypatch.setattr(_vllm, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(_vllm, "supports", lambda op, **call: SimpleNamespace(ok=True))
    step, sizes = K3Step(small(), 2, by_channel), ((192, 5) if by_channel else (5, 192), (2, 32, 32))
    layer = SimpleNamespace(
        **{"local_num_heads": 2, "head_dim": 32, "conv_size": 4, "num_spec": 2, "gate_lower_bound": -5.0},
        **dict(zip(("kda_decode_backend", "kda_spec_decode_backend"), step.backends())),
        model_config=SimpleNamespace(dtype=FP32),
        get_state_shape=lambda: sizes,
        get_state_dtype=lambda: (FP32, FP32),
    )
    torch.set_default_dtype(BF16)  # as vLLM does while it builds a model
    try:
        for _ in range(2):
            _vllm.built_k3(lambda **call: None, {"self": layer})
    finally:
        torch.set_default_dtype(FP32)
    assert [(len(call["x"]), call.get("num_spec_tokens")) for call in calls] == [(1, None), (_vllm.MANY, None), (3, 2)]
    assert all(x.dtype == FP32 for call in calls for x in call.values() if getattr(x, "is_floating_point", bool)())
    wanted = step.windows(1)
    assert all((x["conv_state"].shape, x["conv_state"].stride()) == (wanted.shape, wanted.stride()) for x in calls)


def test_sglangs_backend_warms_the_gates_of_its_model(warmed: list):
    layers = [SimpleNamespace(lower_bound=x, conv_weights=None) for x in (None, None, -5.0)]
    model = SimpleNamespace(modules=lambda: [*layers, object()])

    class Pool(SimpleNamespace):
        shape, dtype, is_cuda, device = torch.Size((2, 9, 4, 128, 128)), FP32, True, torch.device("cuda", 0)

    cache = SimpleNamespace(temporal=Pool(), intermediate_ssm=torch.zeros(1))
    pools = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache))
    runner = SimpleNamespace(model=model, dtype=BF16, req_to_token_pool=pools)
    for _ in range(2):
        _sglang.built(lambda **call: None, {"self": None, "model_runner": runner})
    wanted = itertools.product(("chunk_kda", "recurrent_kda"), ("lower_bound", "softplus"))
    assert sorted((name, options["gate"]) for name, options in warmed) == [*wanted]
    assert all(options["speculative"] for name, options in warmed if name == "recurrent_kda")


def test_what_ours_refuse_is_not_warmed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """And the engine starts."""
    engine_module.warm_up(chunk_kda, head_dims=[(48, 48)], device="cpu")
    assert "calls of chunk_kda are not all compiled ahead: " in caplog.text
    with pytest.raises(TypeError):
        engine_module.warm_up(chunk_kda, strange=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_vllm, "warm_up", None)
    _vllm.warm({"self": SimpleNamespace()}, {}, 0, {})
