"""vLLM's KDA layers on flashdelta: Kimi-Linear, Kimi-K3, GLM-5.3-Flash and Ling-3.

A layer gathers the states of a prefill from its pool, runs, and scatters them back. Here it is handed `Slots` instead, which
say where the states lie: our kernel reads and writes them there, and nothing is gathered or scattered. A call that vLLM runs
itself, as no kernel of ours does, gets the states gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import chunk_kda, fused_kda_decode, recurrent_kda
from ..problem.switches import is_on
from ..runtime.explain import supports
from .engine import KERNEL, Arguments, Engine, first_rows, take, warm_up
from .seams import Adapter, Patch, TensorProxy, real

Original = Callable[..., Any]

# ---- states by their slots -------------------------------------------------------------------------------------------


class Slots(TensorProxy):
    """The states of a prefill's sequences, `[N, H, V, K]`, by their slots in a pool: those before it, or once it has run
    (`stored`) those after it. Storing them in their own slots does nothing then."""

    def __init__(self, pool: Tensor, indices: Tensor, has_initial_state: Tensor | None, gather: Callable[[], Tensor]):
        self.pool, self.indices, self.has_initial_state, self.gather = pool, indices, has_initial_state, gather

    def tensor(self) -> Tensor:
        return self.gather()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.indices.shape[0], *self.pool.shape[1:]))

    def contiguous(self) -> Slots:
        return self

    @classmethod
    def __torch_function__(cls, function: Original, types: object, arguments: tuple, named: dict | None = None) -> Any:
        """`pool[indices] = slots`."""
        if function is Tensor.__setitem__ and isinstance(arguments[2], Slots) and arguments[2].stored:
            return None
        return NotImplemented


class Final(TensorProxy):
    """Kimi-K3's buffer for the states after a prefill, which it stores in their slots itself where there are checkpoints. Once
    they are there (`stored`), that does nothing."""

    def __getitem__(self, key: Any) -> Final:
        return Final(self.states[key])

    @classmethod
    def __torch_function__(cls, function: Original, types: object, arguments: tuple, named: dict | None = None) -> Any:
        """`pool[indices] = final`."""
        if function is not Tensor.__setitem__ or not isinstance(arguments[2], Final):
            return NotImplemented
        pool, indices, final = arguments
        if not final.stored:
            pool[indices] = final.states
        return None


class Workspace:
    """vLLM's manager of workspaces, for Kimi-K3."""

    def __init__(self, manager: Any):
        self.manager = manager

    def get_simultaneous(self, *specs: Any) -> list[Any]:
        found = [*self.manager.get_simultaneous(*specs)]
        return found if len(found) != FLASH_KDA_BUFFERS else [found[0], Final(found[1]), *found[2:]]


FLASH_KDA_BUFFERS = 4
"""Outputs, final states, checkpoints, and FlashKDA's workspace."""


def workspace_manager(original: Original, call: Arguments) -> Workspace:
    return Workspace(original())


def gathered(call: Arguments) -> Arguments:
    """The call with tensors for what stands for them."""
    return {name: real(x) for name, x in call.items()}


def gather_initial_states(original: Original, call: Arguments) -> Slots:
    return Slots(call["state"], call["indices"], call["has_initial_state"], lambda: original(**call))


def scatter_states(original: Original, call: Arguments) -> None:
    if not (isinstance(call["src"], Slots) and call["src"].stored):
        original(**call)


class Pool(TensorProxy):
    """A layer's pool, of which Ling-3 takes the states of a prefill by indexing."""

    def __getitem__(self, key: Any) -> Pool | Slots:
        if isinstance(key, Tensor):
            return Slots(self.states, key, None, lambda: self.states[key])
        return Pool(self.states[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.states[key] = value


class Layer:
    """A layer of Ling-3 with a `Pool` for its states."""

    def __init__(self, layer: Any):
        self.layer = layer

    @property
    def kv_cache(self) -> tuple[Tensor, Pool]:
        conv_state, states = self.layer.kv_cache
        return conv_state, Pool(states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def ling_forward(original: Original, call: Arguments) -> None:
    forward(original, call | {"self": Layer(call["self"])})


# ---- calls -----------------------------------------------------------------------------------------------------------


def gate(call: Arguments, A_log: str, dt_bias: str) -> Arguments:
    """Options of a call whose g is what the projection gave."""
    given = {"A_log": call[A_log], "dt_bias": call[dt_bias], "lower_bound": call["lower_bound"]}
    return given | {"use_gate_in_kernel": True}


def norm(call: Arguments) -> Arguments:
    return {"use_qk_l2norm_in_kernel": call["use_qk_l2norm_in_kernel"]}


def prefill(call: Arguments, g: str, beta: str, logit: bool, options: Arguments) -> Tensor | None:
    """A prefill from the states before to those after, in the pool; None if no kernel of ours runs the call."""
    states = call.get("initial_state")
    if not isinstance(states, Slots):
        return None
    ours = {name: call[name] for name in "qkv"} | {"g": call[g], "beta": call[beta]}
    ours |= {name: call.get(name) for name in ("scale", "cu_seqlens", "out")}
    ours |= {"state_pool": states.pool, "state_indices": states.indices, "has_initial_state": states.has_initial_state}
    found = take(chunk_kda, ours | {"use_beta_sigmoid_in_kernel": logit, **LAYOUT, **options})
    states.stored = found is not None
    return None if found is None else found[0]


LAYOUT = {"null_index": "non_positive", "use_qk_l2norm_in_kernel": True, "state_v_first": True}
"""Slot 0 is reserved."""


def step(call: Arguments, g: str, beta: str, logit: bool, options: Arguments) -> Tensor | None:
    """A step of decoding, in place: one token per sequence, or several by slots of their own."""
    pool, offsets, slots = (call[name] for name in ("initial_state", "cu_seqlens", "ssm_state_indices"))
    accepted = call.get("num_accepted_tokens")
    if not call.get("inplace_final_state", True) or pool is None or offsets is None or slots is None:
        return None
    tokens = {name: call[name] for name in "qkv"} | {"g": call[g], "beta": call[beta]}
    # with graphs of other sizes there may be more rows of slots than sequences
    sequences = offsets.shape[0] - 1
    if slots.dim() == 2 and slots.shape[1] > 1:
        options = options | {"cu_seqlens": offsets, "num_spec_tokens": slots.shape[1] - 1}
        options["num_accepted_tokens"] = None if accepted is None else accepted[:sequences]
        out, back = call.get("out"), False
    else:
        if tokens["q"].shape[1] != sequences or accepted is not None:
            return None
        slots, back = slots.flatten(), True
        tokens = {name: x.transpose(0, 1) for name, x in tokens.items()}
        out = None if call.get("out") is None else call["out"].transpose(0, 1)
    ours = tokens | {"scale": call.get("scale"), "output": out, "beta_is_logit": logit, **LAYOUT, **options}
    found = take(recurrent_kda, ours | {"initial_state": real(pool), "ssm_state_indices": slots[:sequences]})
    return None if found is None else found[0].transpose(0, 1) if back else found[0]


def or_original(ours: Callable[[Arguments], Tensor | None]) -> Adapter:
    """An adapter that returns our outputs and the call's states, or if there are none what the engine's function returns."""

    @functools.wraps(ours)
    def adapter(original: Original, call: Arguments) -> Any:
        o = ours(call)
        return original(**gathered(call)) if o is None else (o, call["initial_state"])

    return adapter


# ---- Kimi-Linear and Kimi-K3 -----------------------------------------------------------------------------------------


@or_original
def kimi_prefill(call: Arguments) -> Tensor | None:
    return prefill(call, "raw_g", "raw_beta", True, gate(call, "A_log", "g_bias") | norm(call))


@or_original
def kimi_verify(call: Arguments) -> Tensor | None:
    return step(call, "raw_g", "raw_beta", True, gate(call, "A_log", "dt_bias"))


@or_original
def kimi_decode(call: Arguments) -> Tensor | None:
    ours = {name: call[name] for name in ("mixed_qkv", "initial_state")} | {"ssm_state_indices": call["state_indices"]}
    tokens = {"g": call["raw_g"], "beta": call["raw_beta"], "output": call.get("out")}
    ours |= {name: None if x is None else x.transpose(0, 1) for name, x in tokens.items()}
    ours |= {"scale": call.get("scale"), "beta_is_logit": True, **LAYOUT, **gate(call, "A_log", "dt_bias")}
    found = take(recurrent_kda, ours)
    return None if found is None else found[0].transpose(0, 1)


@or_original
def k3_prefill(call: Arguments) -> Tensor | None:
    """Stands in for FlashKDA, whose workspace it does not use."""
    final, offsets = call["final_state"], call.get("checkpoint_offsets")
    if offsets is not None and not isinstance(final, Final):
        return None
    marks: Arguments = {}
    if offsets is not None:
        # one state per sequence, in a buffer of its own, from which vLLM stores it
        marks = {"checkpoint_offsets": offsets, "checkpoint_indices": first_rows(offsets.shape[0], offsets.device)}
        marks["checkpoint_states"] = call.get("checkpoint_state")
    o = prefill(call, "g", "beta", True, gate(call, "A_log", "dt_bias") | marks)
    if offsets is not None:
        final.stored = o is not None
    return o


def k3_others(original: Original, call: Arguments) -> Any:
    """FlashInfer's prefill, which users ask for by name."""
    return original(**gathered(call))


# ---- Kimi-K3's fused decode ------------------------------------------------------------------------------------------

OURS, PACKED = "flashdelta", "flashinfer"
"""A layer's names of its fused kernels: any name but vLLM's own runs `fused_kda_decode`, and only FlashInfer's verifies."""

FUSED = "FLASHDELTA_VLLM_FUSED"
"""`FLASHDELTA_VLLM_FUSED=1` has ours take the steps of layers for which vLLM has a fused kernel, too."""

_fused: set[tuple] = set()
"""Layers whose steps are fused by ours."""


def k3_decode_backend(original: Original, call: Arguments) -> str:
    """Ours where vLLM chooses its chain of kernels by itself; in place of its fused kernel where that is asked for."""
    found: str = original(**call)
    open_to_ours = found == "triton" or (found == "native" and is_on(FUSED, False))
    return OURS if open_to_ours and call["backend"] == "auto" and takes(call, 0) else found


def k3_verify_backend(original: Original, call: Arguments) -> str:
    found: str = original(**call)
    open_to_ours = found == "native" and call["backend"] == "auto" and not call["use_recoverssm"]
    bounded = call["lower_bound"] is not None
    return PACKED if open_to_ours and bounded and call["num_spec"] > 0 and takes(call, call["num_spec"]) else found


def accelerator() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def takes(call: Arguments, spec: int) -> bool:
    """Tells whether a kernel of ours runs the steps of such a layer, which it then will."""
    device = accelerator()
    if device is None:
        return False
    H, K, W = (call[name] for name in ("num_heads", "head_dim", "conv_width"))
    dtypes = tuple(call[f"{name}_dtype"] for name in ("input", "conv_state", "recurrent_state"))
    with torch.inference_mode():
        ours = supports(fused_kda_decode, **null_step(H, K, W, dtypes, spec, -5.0, device), backend=KERNEL).ok
    if ours:
        _fused.add((H, K, W, *dtypes, spec))
    return ours


def null_step(
    H: int, K: int, W: int, dtypes: tuple, spec: int, bound: Any, device: Any, sequences: int = 1, window: Any = ()
) -> Arguments:
    """A step as Kimi-K3 calls for it, of null sequences: rows are those of its projection, `window` the shape of a slot's."""
    (x, _, state), C, rows = dtypes, 3 * H * K, sequences * (1 + spec)
    make = functools.partial(torch.zeros, dtype=torch.float32, device=device)  # whatever the default dtype is
    width = -(-(4 * H * K + K + H) // 16) * 16
    mixed, z, _, beta, _ = make(rows, width, dtype=x).split([C, H * K, K, H, width - 4 * H * K - K - H], dim=1)
    windows = make(1, *(window or (W - 1 + spec, C)), dtype=dtypes[1])
    windows = windows if windows.shape[1] == C else windows.mT
    step: Arguments = {"x": mixed, "weight": make(3, W, H * K), "A_log": make(H), "dt_bias": make(H * K)}
    step |= {"conv_state": windows, "state": make(1, H, K, K, dtype=state)}
    step |= {"raw_g": make(1, rows, H, K, dtype=x), "raw_beta": beta[None]}
    step |= {"output_gate": z.unflatten(1, (H, K)), "norm_weight": make(K), "output": make(rows, 1, H, K, dtype=x)}
    step |= {"state_indices": make(sequences, dtype=torch.int32), "lower_bound": bound, "null_index": "non_positive"}
    if spec > 0:
        ends = (1 + spec) * torch.arange(sequences + 1, dtype=torch.int32, device=device)
        slots = step["state_indices"].unsqueeze(1).expand(-1, 1 + spec).contiguous()
        step |= {"output": make(1, rows, H, K, dtype=x), "state_indices": slots}
        step |= {"cu_seqlens": ends, "num_spec_tokens": spec, "num_accepted_tokens": torch.ones_like(ends[1:])}
    return step


SAME = ("x", "weight", "bias", "conv_state", "raw_beta", "A_log", "dt_bias", "state")
GATED = ("output_gate", "norm_weight", "norm_eps", "lower_bound")


def fused(call: Arguments, g: str, spec: int, **options: Any) -> Tensor | None:
    """A step of a layer that was built for ours; None for another one's. vLLM has nothing to fall back to in such a layer, so
    that a call that no kernel runs ends in `NoKernel`."""
    dtypes = (call[name].dtype for name in ("x", "conv_state", "state"))
    gated = call.get("output_gate") is not None and call.get("norm_weight") is not None
    if not gated or (*call[g].shape[-2:], call["weight"].shape[1], *dtypes, spec) not in _fused:
        return None
    same = {name: call[name] for name in (*SAME, *GATED) if name in call}
    return fused_kda_decode(**same, raw_g=call[g], **options, null_index="non_positive", backend=KERNEL)


def k3_fused_decode(original: Original, call: Arguments) -> Any:
    out = None if call.get("out") is None else call["out"].transpose(0, 1)
    o = fused(call, "raw_g", 0, state_indices=call["state_indices"], output=out)
    return original(**call) if o is None else o.transpose(0, 1)


def k3_fused_verify(original: Original, call: Arguments) -> Any:
    """Steps with drafts; graphs may have more rows of slots than sequences."""
    offsets, slots = call["query_start_loc"], call["state_indices"]
    spec, sequences = slots.shape[-1] - 1, offsets.shape[0] - 1
    drafts = {"num_spec_tokens": spec, "num_accepted_tokens": call["num_accepted_tokens"][:sequences]}
    where = {"state_indices": slots[:sequences], "cu_seqlens": offsets, "output": call.get("output")}
    o = fused(call, "raw_gate", spec, **where, **drafts)
    return original(**call) if o is None else o


# ---- GLM-5.3-Flash ---------------------------------------------------------------------------------------------------


@or_original
def glm_prefill(call: Arguments) -> Tensor | None:
    bound = call["lower_bound"] if call["safe_gate"] else None
    return prefill(call, "raw_g", "beta", False, gate(call, "A_log", "g_bias") | norm(call) | {"lower_bound": bound})


@or_original
def glm_flash_prefill(call: Arguments) -> Tensor | None:
    """Stands in for FlashKDA. Checkpoints go straight to their slots: only their convolution's inputs are left to store."""
    layer, checkpoint = call["self"], call.get("checkpoint")
    options = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "lower_bound": layer.kda_lower_bound}
    if checkpoint is not None:
        options |= {"checkpoint_offsets": checkpoint.checkpoint_offsets, "checkpoint_indices": checkpoint.state_indices}
    o = prefill(call, "g", "beta", True, options | {"use_gate_in_kernel": True})
    if o is not None and checkpoint is not None:
        named = {name: call[name] for name in ("raw_qkv", "conv_state", "cu_seqlens")}
        layer._checkpoint_exporter.export(checkpoint, **named)
    return o


@or_original
def glm_step(call: Arguments) -> Tensor | None:
    options = gate(call, "a_log", "g_bias") if call["compute_gate"] else {}
    return step(call, "g", "beta", bool(call["sigmoid_beta"]), options | norm(call))


# ---- Ling-3, whose gate is applied before the call ---------------------------------------------------------------------


@or_original
def ling_prefill(call: Arguments) -> Tensor | None:
    safe = {"safe_gate": is_safe(call.get("safe_gate"), call.get("lower_bound"))}
    return prefill(call, "g", "beta", False, safe | norm(call))


def is_safe(safe_gate: bool | None, lower_bound: float | None) -> bool:
    """Tells whether no decay is below what `chunk_kda` takes a promise for."""
    return bool(safe_gate) and lower_bound is not None and lower_bound >= -5.0


@or_original
def ling_decode(call: Arguments) -> Tensor | None:
    return step(call, "g", "beta", False, norm(call))


@or_original
def ling_verify(call: Arguments) -> Tensor | None:
    return step(call, "g", "beta", False, norm(call))


# ---- kernels of a layer ----------------------------------------------------------------------------------------------

_warmed: set[tuple] = set()
POOLED = ("packed", "state_pool", "has_initial_state")


def warm(call: Arguments, gate: Arguments, spec: int, prefill: Arguments) -> None:
    """Compiles what a built layer's calls need, once per process: vLLM measures memory and captures graphs before the first
    prefill. Without a GPU there is nothing to compile. `prefill`: what its prefills pass otherwise than its steps."""
    layer = call["self"]
    if accelerator() is None:
        return
    dtypes = {"dtype": layer.model_config.dtype, "state_dtype": layer.get_state_dtype()[1]}
    where = {"head_dims": ((layer.head_dim, layer.head_dim),), "device": accelerator()}
    options: Arguments = {**where, **dtypes, "state_v_first": True, **gate}
    kind = (*options.items(), spec > 0, *prefill.items())
    if kind not in _warmed:
        _warmed.add(kind)
        warm_up(chunk_kda, **{**options, **dict.fromkeys(POOLED, (True,)), **prefill})
        warm_up(recurrent_kda, **options, packed=(False, True) if spec else (False,), speculative=spec > 0)
        expect(call, gate, prefill)


_expected: list[functools.partial[Arguments]] = []
"""Largest prefills of the layers that were built, by an output of original: not yet run in vLLM's memory profile."""


def expect(call: Arguments, gate: Arguments, prefill: Arguments) -> None:
    """Has the largest prefill of a layer run when vLLM measures memory, by the arguments that `warm` has."""
    config = call.get("vllm_config") or import_module("vllm.config").get_current_vllm_config()
    limits, state = config.scheduler_config, call["self"].get_state_dtype()[1]
    kind = functools.partial(largest, limits.max_num_batched_tokens, limits.max_num_seqs, state, gate | prefill)
    if not any(x.args == kind.args for x in _expected):
        _expected.append(kind)


def largest(T: int, N: int, state: torch.dtype, options: Arguments, out: Tensor) -> Arguments:
    """A prefill of T tokens in N null sequences, which stores nothing, for a layer with outputs like `out [1, .., H, D]`."""
    N, (H, D) = min(N, T), out.shape[-2:]
    make = functools.partial(torch.zeros, device=out.device)
    found: Arguments = {name: make(1, T, H, D, dtype=out.dtype) for name in "qkv"}
    none = make(N, dtype=torch.int32)
    found["g"] = make(1, T, H, D, dtype=options.get("g_dtype", out.dtype))
    found["beta"] = make(1, T, H, dtype=options.get("beta_dtype", out.dtype))
    found["cu_seqlens"] = (torch.arange(N + 1, device=out.device) * T // N).int()
    found |= {"state_pool": make(1, H, D, D, dtype=state), "state_indices": none}
    found |= {"use_beta_sigmoid_in_kernel": options.get("use_beta_sigmoid_in_kernel", True), **LAYOUT}
    if options["gate"] == "none":
        found["safe_gate"] = options["safe_gate"]
    else:
        rates = {"A_log": make(H, dtype=torch.float32), "dt_bias": make(H * D, dtype=torch.float32)}
        found |= rates | {"lower_bound": options["lower_bound"], "use_gate_in_kernel": True}
    if "checkpoints" in options or "checkpoint_states" in options:
        found |= {"checkpoint_offsets": none, "checkpoint_indices": none}
    if "checkpoint_states" in options:
        found["checkpoint_states"] = make(1, H, D, D, dtype=state)
    return found


def forward(original: Original, call: Arguments) -> None:
    """Runs the largest prefill in vLLM's measurement of memory, so that its workspace counts: there layers run without
    metadata and call no kernels."""
    if _expected and not (call["core_attn_out"].is_cuda and torch.cuda.is_current_stream_capturing()):
        profiled = import_module("vllm.forward_context").get_forward_context().attn_metadata is None
        kinds = [*_expected]
        _expected.clear()
        for kind in kinds if profiled else ():
            take(chunk_kda, kind(call["core_attn_out"]))
    original(**call)


def built(original: Original, call: Arguments) -> None:
    """Warms Kimi-Linear and Kimi-K3, with a buffer for checkpoints where FlashKDA would run."""
    original(**call)
    layer, bound = call["self"], call["self"].gate_lower_bound
    marks = {"checkpoint_states": (False, True)} if getattr(layer, "_checkpoint_exporter", None) is not None else {}
    warm(call, {"gate": "softplus" if bound is None else "lower_bound", "lower_bound": bound}, layer.num_spec, marks)


MANY = 257
"""Sequences of more states than stay in the L2 cache, whatever the heads are: steps of so many are another kernel."""


def built_k3(original: Original, call: Arguments) -> None:
    built(original, call)
    layer, device = call["self"], accelerator()
    if device is None:
        return
    (window, *_), (conv_state, state, *_) = layer.get_state_shape(), layer.get_state_dtype()
    dtypes = layer.model_config.dtype, conv_state, state
    sizes = layer.local_num_heads, layer.head_dim, layer.conv_size, dtypes
    wanted = [(0, 1), (0, MANY)] if layer.kda_decode_backend == OURS else []
    wanted += [(layer.num_spec, 1)] if layer.kda_spec_decode_backend == PACKED else []
    for spec, sequences in wanted:
        kind = (*sizes, spec, layer.gate_lower_bound, device, sequences, tuple(window))
        if (*sizes[:3], *dtypes, spec) in _fused and kind not in _warmed:
            _warmed.add(kind)
            with torch.inference_mode():
                fused_kda_decode(**null_step(*kind))


def built_glm(original: Original, call: Arguments) -> None:
    """Warms GLM: where FlashKDA would not run, prefills get beta ready-made."""
    original(**call)
    layer = call["self"]
    ready = {"beta_dtype": torch.float32, "use_beta_sigmoid_in_kernel": False}
    prefill = {"checkpoints": (False, True)} if layer._checkpoint_exporter is not None else ready
    warm(call, {"gate": "lower_bound", "lower_bound": layer.kda_lower_bound}, layer.num_spec, prefill)


def built_ling(original: Original, call: Arguments) -> None:
    """Warms Ling-3, whose gate and beta come ready-made."""
    original(**call)
    layer = call["self"]
    gate = {"gate": "none", "lower_bound": None, "use_beta_sigmoid_in_kernel": False}
    gate |= {"g_dtype": torch.float32, "beta_dtype": torch.float32}
    flags = {"has_initial_state": (False,), "safe_gate": is_safe(layer.safe_gate, layer.lower_bound)}
    warm(call, gate, layer.num_speculative_tokens, flags)


# ---- where -----------------------------------------------------------------------------------------------------------

MAMBA, OPS = "vllm.model_executor.layers.mamba", "vllm._custom_ops"
KIMI_LINEAR, KIMI_K3 = f"{MAMBA}.gdn.kimi_gdn_linear_attn", "vllm.models.kimi_k3.nvidia.kda"
KIMI_KERNELS, GLM = "vllm.models.kimi_k3.nvidia.ops.third_party.kda", "vllm.models.glm5next.common.kda"
LING = "vllm.model_executor.models.bailing_moe_v3"

FUSED_VERIFY = """x weight conv_state raw_gate raw_beta A_log dt_bias state_indices query_start_loc num_accepted_tokens
    state output_gate norm_weight lower_bound norm_eps output"""
"""Names that Kimi-K3 passes to a wrapper, which tells no parameters."""

LAYERS = {
    KIMI_LINEAR: "KimiGatedDeltaNetAttention",
    KIMI_K3: "KimiK3DeltaAttention",
    GLM: "Glm5NextLinearAttention",
    LING: "BailingMoeV3KimiDeltaAttention",
}

PATCHES: tuple[Patch, ...] = (
    Patch(KIMI_KERNELS, "fused_recurrent_kda_packed_decode", "6e95767918987362", kimi_decode),
    Patch(KIMI_KERNELS, "fused_recurrent_kda", "10ecb4c80d067f8f", kimi_verify),
    Patch(KIMI_KERNELS, "chunk_kda_with_fused_gate", "3fe4d6d07821a5b8", kimi_prefill),
    Patch(KIMI_LINEAR, "gather_initial_states", "1b460ee108cc9f68", gather_initial_states),
    Patch(KIMI_LINEAR, f"{LAYERS[KIMI_LINEAR]}.__init__", "199bf78df1943ec2", built),
    Patch(KIMI_LINEAR, f"{LAYERS[KIMI_LINEAR]}._forward", "5922f6cd4a2f1ffe", forward),
    Patch(KIMI_K3, f"{LAYERS[KIMI_K3]}._forward", "b242680bd05d1173", forward),
    Patch(KIMI_K3, "gather_initial_states", "1b460ee108cc9f68", gather_initial_states),
    Patch(KIMI_K3, "current_workspace_manager", "fca22d7c07a5ca21", workspace_manager),
    Patch(KIMI_K3, "_flashkda_prefill", "36968a8ddc1edd7d", k3_prefill),
    Patch(KIMI_K3, "_flashinfer_kda_prefill", "e2965351308c0283", k3_others),
    Patch(KIMI_K3, "resolve_kda_decode_backend", "52991d35f263b5df", k3_decode_backend),
    Patch(KIMI_K3, "resolve_kda_spec_decode_backend", "86181ca40ea9700f", k3_verify_backend),
    Patch(OPS, "fused_kda_decode", "36a50ca327ba019f", k3_fused_decode),
    Patch(KIMI_K3, "flashinfer_packed_fused_kda_decode", "66651a351884854d", k3_fused_verify, FUSED_VERIFY),
    Patch(KIMI_K3, f"{LAYERS[KIMI_K3]}.__init__", "9f4c87e698b7aa65", built_k3),
    Patch(GLM, f"{LAYERS[GLM]}._forward", "7257009b52a328c1", forward),
    Patch(GLM, "gather_initial_states", "1b460ee108cc9f68", gather_initial_states),
    Patch(GLM, "scatter_states", "54bc81abe12d15d7", scatter_states),
    Patch(GLM, "fused_recurrent_kda", "7ee071712c611d65", glm_step),
    Patch(GLM, "chunk_kda_with_fused_gate", "c80e180e0ffde4ae", glm_prefill),
    Patch(GLM, f"{LAYERS[GLM]}._flashkda_prefill", "538a0dbe1e375cba", glm_flash_prefill),
    Patch(GLM, f"{LAYERS[GLM]}.__init__", "34077e337a4144fe", built_glm),
    Patch(LING, "chunk_kda", "e52ee7aa2fc5dec7", ling_prefill, "safe_gate lower_bound"),
    Patch(LING, "fused_recurrent_kda", "3f0d5e5d300cc99a", ling_decode, "safe_gate lower_bound"),
    Patch(LING, "fused_recurrent_kda_fwd", "83902116cdd8ede9", ling_verify),
    Patch(LING, f"{LAYERS[LING]}._forward", "53ec43ed8b71280c", ling_forward),
    Patch(LING, f"{LAYERS[LING]}.__init__", "6bf1f60c1bc8d969", built_ling),
    # read, not replaced
    Patch(KIMI_LINEAR, f"{LAYERS[KIMI_LINEAR]}.get_state_dtype", "cd88b43e1982404c"),
    Patch(KIMI_K3, f"{LAYERS[KIMI_K3]}.get_state_dtype", "74d85100f9bd37be"),
    Patch(KIMI_K3, f"{LAYERS[KIMI_K3]}.get_state_shape", "f4427338bacc0129"),
    Patch(GLM, f"{LAYERS[GLM]}.get_state_dtype", "2b74ada2364287ce"),
    Patch(LING, f"{LAYERS[LING]}.get_state_dtype", "cd88b43e1982404c"),
    Patch(f"{MAMBA}.checkpoint", "MambaPrefillCheckpointMetadata", "52a6331ef9ba6b13"),
    Patch(f"{MAMBA}.checkpoint", "MambaPrefillCheckpointExporter.export", "32d8d45b85e81574"),
    Patch("vllm.v1.worker.workspace", "WorkspaceManager.get_simultaneous", "2dca9efcad09847e"),
    Patch("vllm.forward_context", "ForwardContext", "210d4bcb80e96768"),
    Patch("vllm.config.scheduler", "SchedulerConfig", "183403e34db6e024"),
)

ENGINE = Engine(
    name="vllm",
    environment="FLASHDELTA_VLLM",
    read=("0.33.0",),
    patches=PATCHES,
    replaces="prefill, decode and verification of Kimi-Linear, Kimi-K3, GLM-5.3-Flash, Ling-3; steps of Kimi-K3 fused",
)
enable, disable, status = ENGINE.enable, ENGINE.disable, ENGINE.status
