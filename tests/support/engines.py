"""The KDA part of an engine's layer on made-up tokens: what vLLM's and SGLang's layers do with their kernels, call by call.

A layer here takes its functions by name, so that it runs the engine's own, or those of an integration.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashdelta import chunk_kda, fused_kda_decode
from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations.seams import Patch, Replacement

from .cases import BF16, FP32
from .inputs import Source
from .oracle import float64

Functions = Mapping[str, Callable[..., Any]]


@dataclass
class Model:
    """Sizes and gate parameters of a layer, and the memory of its states, whose slots lie `gap` elements apart."""

    H: int
    D: int
    lower_bound: float | None = -5.0
    dtype: torch.dtype = BF16
    state: torch.dtype = FP32
    device: str = "cuda"
    gap: int = 64
    source: Source = field(init=False)
    A_log: Tensor = field(init=False)
    dt_bias: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.source = Source(FP32, self.device, self.H * self.D)
        self.A_log = self.source.uniform(self.H) * 2
        self.dt_bias = self.source.normal(self.H * self.D) - 3

    @property
    def gate(self) -> dict[str, Any]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}

    def pool(self, slots: int) -> Tensor:
        """`[slots, H, V, K]`, full of numbers."""
        size = self.H * self.D * self.D
        memory = self.source.normal(slots * (size + self.gap)).to(self.state)
        return memory.as_strided((slots, self.H, self.D, self.D), (size + self.gap, self.D * self.D, self.D, 1))

    def tokens(self, count: int) -> Tensor:
        """`[count, 4 H D + H]`: q, k, v, the gate's input, and beta's logits."""
        return self.source.normal(count, (4 * self.D + 1) * self.H).to(self.dtype)

    def index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.int32, device=self.device)


@dataclass
class Batch:
    """Tokens of packed sequences: views of a fused projection, so that rows are strided; those of q, k and v are `dense` where
    each has a convolution of its own."""

    model: Model
    rows: Tensor
    lengths: Sequence[int]
    dense: bool = False

    def __post_init__(self) -> None:
        H, D = self.model.H, self.model.D
        self.mixed, g, beta = self.rows.split([3 * H * D, H * D, H], dim=1)
        parts = self.mixed.split(H * D, dim=1)
        self.q, self.k, self.v = ((x.contiguous() if self.dense else x).unflatten(1, (H, D))[None] for x in parts)
        self.g, self.beta = g.unflatten(1, (H, D))[None], beta[None]
        self.offsets = self.model.index([0, *self.lengths]).cumsum(0, dtype=torch.int32)

    @property
    def qkv(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def tokens(self) -> dict[str, Tensor]:
        return {**self.qkv, "g": self.g, "beta": self.beta}

    @property
    def raw(self) -> dict[str, Tensor]:
        return {"raw_g": self.g, "raw_beta": self.beta}


def exact_sequence(model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`o [T, H, D]` of one new sequence, and the final state `[H, V, K]`, in float64."""
    call = float64(Batch(model, rows, [len(rows)]).tokens | model.gate) | {"backend": "reference", "split": False}
    flags = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    found: Any = chunk_kda(**call, **flags, output_final_state=True, state_v_first=True)
    return found[0][0], found[1][0]


@dataclass
class Marks:
    """A checkpoint for some sequences of a prefill: after how many tokens (0: none), and the slot that gets it."""

    offsets: Sequence[int]
    slots: Sequence[int]


STATES = "scale=None initial_state=None output_final_state=False"
GLM_STEP = """q k v g beta=None scale=None initial_state=None inplace_final_state=True use_qk_l2norm_in_kernel=True
    cu_seqlens=None ssm_state_indices=None"""
K3_SIZES = "backend num_heads head_dim conv_width num_spec input_dtype conv_state_dtype recurrent_state_dtype"

SIGNATURES = {
    _vllm.gather_initial_states: "state indices has_initial_state",
    _vllm.scatter_states: "state src indices",
    _vllm.workspace_manager: "",
    _vllm.kimi_decode: """mixed_qkv raw_g raw_beta A_log dt_bias lower_bound initial_state state_indices scale=None
        out=None""",
    _vllm.kimi_verify: """q k v raw_g raw_beta A_log dt_bias lower_bound initial_state cu_seqlens ssm_state_indices
        num_accepted_tokens=None out=None fuse_gate=None""",
    _vllm.kimi_prefill: f"""q k v raw_g raw_beta A_log g_bias {STATES} lower_bound=None use_qk_l2norm_in_kernel=False
        cu_seqlens=None out=None""",
    _vllm.k3_prefill: """q k v g beta A_log dt_bias lower_bound initial_state cu_seqlens out final_state workspace
        checkpoint_state=None checkpoint_offsets=None""",
    _vllm.k3_others: """q k v raw_g raw_beta A_log dt_bias lower_bound initial_state cu_seqlens out seq_order=None
        prefill_workspace=None""",
    _vllm.k3_decode_backend: K3_SIZES,
    _vllm.k3_verify_backend: f"{K3_SIZES} lower_bound use_recoverssm",
    _vllm.k3_fused_decode: """x weight bias conv_state raw_g raw_beta A_log dt_bias state_indices state out=None
        lower_bound=None output_gate=None norm_weight=None norm_eps=1e-05""",
    _vllm.glm_step: f"""{GLM_STEP} num_accepted_tokens=None out=None sigmoid_beta=False a_log=None g_bias=None
        compute_gate=False lower_bound=-5.0""",
    _vllm.glm_prefill: f"""q k v raw_g beta A_log g_bias {STATES} use_qk_l2norm_in_kernel=False cu_seqlens=None
        safe_gate=False lower_bound=-5.0""",
    _vllm.glm_flash_prefill: """self q k v g beta initial_state cu_seqlens out checkpoint=None raw_qkv=None
        conv_state=None recurrent_state=None""",
    _vllm.ling_prefill: f"q k v g beta {STATES} use_qk_l2norm_in_kernel=False cu_seqlens=None",
    _vllm.ling_decode: GLM_STEP,
    _vllm.ling_verify: """q k v g beta scale initial_state inplace_final_state=True cu_seqlens=None
        ssm_state_indices=None num_accepted_tokens=None use_qk_l2norm_in_kernel=False""",
    _vllm.ling_forward: "self q_proj_states k_proj_states v_proj_states g1 beta core_attn_out",
    _sglang.packed_decode: """self mixed_qkv a b A_log dt_bias scale ssm_states cache_indices num_v_heads head_v_dim
        lower_bound=None""",
    _sglang.target_verify: """self A_log dt_bias q k v a b ssm_states cache_indices query_start_loc
        intermediate_states_buffer intermediate_state_indices cache_steps retrieve_parent_token lower_bound=None
        cache_ring=False replayssm_rawv=None replayssm_rawk=None replayssm_g=None replayssm_beta=None""",
    _sglang.extend: """self q k v g beta ssm_states cache_indices query_start_loc A_log=None dt_bias=None
        lower_bound=None beta_is_raw=False return_intermediate_states=False""",
}
"""Parameters of the engines' functions by our adapters, as `tests/contract` sees them in the wheels."""


def signed(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """The function, which says that it has these parameters."""

    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    kind, parts = inspect.Parameter.POSITIONAL_OR_KEYWORD, [x.partition("=") for x in text.split()]
    defaults = [ast.literal_eval(value) if given else inspect.Parameter.empty for _, given, value in parts]
    parameters = [inspect.Parameter(x[0], kind, default=y) for x, y in zip(parts, defaults)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def own(**named: Any) -> Any:
    raise AssertionError("the call stayed the engine's")


def replacement(seam: Patch, theirs: Callable[..., Any]) -> Replacement:
    return Replacement(seam.adapter, signed(theirs, SIGNATURES.get(seam.adapter, "")), seam.keywords)


def adapted(seams: Sequence[Patch], modules: Sequence[str], theirs: Functions | None = None) -> Functions:
    """The functions of an integration in place of the engine's, by name."""
    ours = [x for x in seams if x.module in modules and x.adapter is not None]
    names = {x.name.split(".")[-1]: x for x in ours}
    return {name: replacement(seam, (theirs or {}).get(name, own)) for name, seam in names.items()}


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


PREFILL = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


class KimiLinear:
    """vLLM's Kimi-Linear; slot 0 is reserved, and a sequence has a slot for each of its speculative tokens."""

    modules: tuple[str, ...] = (_vllm.KIMI_KERNELS, _vllm.KIMI_LINEAR)
    null, aligned, flagged = 0, 0, True
    """`aligned`: tokens that offsets of checkpoints are multiples of, 0 for none. `flagged`: new sequences are told by flags,
    else their slots are zeros."""

    def __init__(self, model: Model, theirs: Functions | None = None, ours: bool = True):
        self.model = model
        self.call = SimpleNamespace(**(self.adapted(theirs) if ours else theirs or {}))
        self.room: Callable[[Tensor], Tensor] = functools.partial(torch.full_like, fill_value=torch.nan)
        """For a tensor, memory for outputs like it."""

    def adapted(self, theirs: Functions | None) -> Functions:
        return adapted(_vllm.PATCHES, self.modules, theirs)

    def start(self, pool: Tensor, slot: int) -> None:
        """Makes the slot that of a new sequence, where flags do not tell."""
        pool[slot] = 0

    def exact(self, rows: Tensor) -> Tensor:
        return exact_sequence(self.model, rows)[0]

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        o, last = self.call.chunk_kda_with_fused_gate(
            *(*batch.tokens.values(), self.model.A_log, self.model.dt_bias),
            initial_state=self.call.gather_initial_states(pool, slots, flags),
            **{**PREFILL, "lower_bound": self.model.lower_bound, "cu_seqlens": batch.offsets},
        )
        pool[slots] = last
        return o

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        given = {"mixed_qkv": batch.mixed, **batch.raw, **self.model.gate}
        return self.call.fused_recurrent_kda_packed_decode(**given, initial_state=pool, state_indices=slots)[0]

    def verify(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        """`slots [N, 1 + S]`, from that of the last accepted token. The table and the counts may have more rows."""
        given = {**batch.qkv, **batch.raw, **self.model.gate, "initial_state": pool}
        at = {"cu_seqlens": batch.offsets, "ssm_state_indices": slots, "num_accepted_tokens": accepted}
        return self.call.fused_recurrent_kda(**given, **at, out=self.room(batch.v))[0]


class KimiK3(KimiLinear):
    """vLLM's Kimi-K3, whose prefill is FlashKDA's, into buffers of vLLM's. Those are full of NaN here."""

    modules = (_vllm.KIMI_KERNELS, _vllm.KIMI_K3)
    aligned = 16

    def adapted(self, theirs: Functions | None) -> Functions:
        return super().adapted({"current_workspace_manager": lambda: self, **(theirs or {})})

    def get_simultaneous(self, *shapes: Sequence[int]) -> list[Tensor]:
        """As vLLM's manager of workspaces."""
        return [torch.full(shape, torch.nan, dtype=self.model.state, device=self.model.device) for shape in shapes]

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        states = self.call.gather_initial_states(pool, slots, flags)
        shapes = (batch.v.shape, *[(len(slots) + 2, *pool.shape[1:])] * 2, (1,))
        _, final, saved, workspace = self.call.current_workspace_manager().get_simultaneous(*shapes)
        final, saved = final[: states.shape[0]], saved[: states.shape[0]]
        given = batch.tokens | self.model.gate | {"initial_state": states}
        given |= {"cu_seqlens": batch.offsets, "out": self.room(batch.v), "final_state": final, "workspace": workspace}
        if marks is None:
            o, last = self.call._flashkda_prefill(**given)
        else:
            offsets = self.model.index(marks.offsets)
            o, _ = self.call._flashkda_prefill(**given, checkpoint_state=saved, checkpoint_offsets=offsets)
            last = final
            for row, offset in enumerate(marks.offsets):
                if offset > 0:
                    pool[marks.slots[row]] = saved[row]
        pool[slots] = last.to(pool.dtype)
        return o


class Glm(KimiLinear):
    """vLLM's GLM-5.3-Flash, which stores its checkpoints itself."""

    modules = (_vllm.GLM,)
    aligned = 16

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        checkpoint = exported = None
        if marks is not None:
            index = self.model.index
            checkpoint = SimpleNamespace(checkpoint_offsets=index(marks.offsets), state_indices=index(marks.slots))
            exported = []
        exporter = SimpleNamespace(export=lambda *x, **named: exported.append(named))
        layer = {"A_log": self.model.A_log.view(1, 1, -1, 1), "dt_bias": self.model.dt_bias}
        initial = self.call.gather_initial_states(pool, slots, flags)
        o, last = self.call._flashkda_prefill(
            SimpleNamespace(**layer, kda_lower_bound=self.model.lower_bound, _checkpoint_exporter=exporter),
            *(*batch.tokens.values(), initial, batch.offsets, self.room(batch.v)),
            **{"checkpoint": checkpoint, "raw_qkv": batch.mixed, "conv_state": pool, "recurrent_state": pool},
        )
        assert exported is None or [*exported[0]] == ["raw_qkv", "conv_state", "cu_seqlens"]
        self.call.scatter_states(pool, last, slots)
        return o

    def step(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor | None) -> Tensor:
        gate = {"a_log": self.model.A_log.view(1, 1, -1, 1), "g_bias": self.model.dt_bias, "compute_gate": True}
        at = {"cu_seqlens": batch.offsets, "ssm_state_indices": slots, "num_accepted_tokens": accepted}
        given = batch.tokens | at | gate | {"initial_state": pool, "lower_bound": self.model.lower_bound}
        options = {"sigmoid_beta": True, "use_qk_l2norm_in_kernel": True}
        return self.call.fused_recurrent_kda(**given, **options, out=self.room(batch.v))[0]

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        return self.step(batch, pool, slots, None)

    verify = step


class GlmTriton(Glm):
    """The same without FlashKDA; its prefill takes beta ready-made."""

    aligned = 0

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        beta, A_log = batch.beta.float().sigmoid(), self.model.A_log.view(1, 1, -1, 1)
        o, last = self.call.chunk_kda_with_fused_gate(
            *(*batch.qkv.values(), batch.g, beta, A_log, self.model.dt_bias),
            initial_state=self.call.gather_initial_states(pool, slots, flags),
            **{**PREFILL, "safe_gate": True, "lower_bound": self.model.lower_bound, "cu_seqlens": batch.offsets},
        )
        self.call.scatter_states(pool, last, slots)
        return o


class Ling(KimiLinear):
    """vLLM's Ling-3, whose gate and beta are worked out before, and which indexes its pool."""

    modules = (_vllm.LING,)

    def activated(self, batch: Batch) -> dict[str, Tensor]:
        x, rate = batch.g.float() + self.model.dt_bias.view(self.model.H, -1), self.model.A_log.exp()[:, None]
        return {"g": self.model.lower_bound * torch.sigmoid(rate * x), "beta": batch.beta.float().sigmoid()}

    def forward(self, run: Callable[[Any], Tensor], pool: Tensor) -> Tensor:
        """The layer's own code, on the pool that it finds."""
        found: list[Tensor] = []

        def theirs(**call: Any) -> None:
            _, states = call["self"].kv_cache
            found.append(run(states[..., : self.model.D]))

        layer = SimpleNamespace(kv_cache=(pool, pool))
        ours = vars(self.call).get("_forward")
        if ours is None:
            theirs(self=layer)
        else:
            Replacement(ours.adapter, signed(theirs, SIGNATURES[_vllm.ling_forward]))(layer, *[None] * 6)
        return found[0]

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        def run(states: Any) -> Tensor:
            states[slots[~flags]] = 0
            given = batch.qkv | self.activated(batch) | {"initial_state": states[slots].contiguous()} | self.safe(batch)
            o, states[slots] = self.call.chunk_kda(**given, output_final_state=True)
            return o

        return self.forward(run, pool)

    def safe(self, batch: Batch) -> dict[str, Any]:
        promise = {"safe_gate": True, "lower_bound": self.model.lower_bound}
        return promise | {"cu_seqlens": batch.offsets, "use_qk_l2norm_in_kernel": True}

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        given = batch.qkv | self.activated(batch) | self.safe(batch) | {"ssm_state_indices": slots}
        return self.forward(lambda states: self.call.fused_recurrent_kda(**given, initial_state=states)[0], pool)

    def verify(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        given = {name: x.contiguous() for name, x in (batch.qkv | self.activated(batch)).items()}
        given |= {"cu_seqlens": batch.offsets, "ssm_state_indices": slots, "num_accepted_tokens": accepted}
        options = {"scale": self.model.D**-0.5, "inplace_final_state": True, "use_qk_l2norm_in_kernel": True}
        step = functools.partial(self.call.fused_recurrent_kda_fwd, **given, **options)
        return self.forward(lambda states: step(initial_state=states)[0], pool)


# ---- a whole step of vLLM's Kimi-K3 --------------------------------------------------------------------------------------

EPS = 1e-5


class K3Step:
    """Work between the projections of vLLM's Kimi-K3 in a round of decoding: convolution, attention and norm. Slot 0 is
    reserved. Windows have room for `drafts`; their channels lie innermost unless `by_channel`."""

    def __init__(self, model: Model, drafts: int = 0, by_channel: bool = False):
        self.model, self.drafts, self.by_channel = model, drafts, by_channel
        self.channels = 3 * model.H * model.D
        self.filters = model.source.normal(self.channels, 4) / 2
        self.norm = (1 + model.source.normal(model.D) / 10).to(model.dtype)
        # as vLLM keeps them for fused steps
        self.parts, self.wide_norm = self.filters.view(3, -1, 4).mT.contiguous(), self.norm.float()
        self.call = SimpleNamespace(**adapted(_vllm.PATCHES, (_vllm.KIMI_K3, _vllm.OPS), UNFUSED))

    def windows(self, slots: int) -> Tensor:
        """`[slots, channels, places]`, full of numbers."""
        found = self.model.source.normal(slots, 3 + self.drafts, self.channels).to(self.model.dtype).mT
        return found.contiguous() if self.by_channel else found

    def output_gate(self, tokens: int) -> Tensor:
        """A view of a projection."""
        H, D = self.model.H, self.model.D
        return self.model.source.normal(tokens, 2 * H * D).to(self.model.dtype)[:, : H * D].unflatten(1, (H, D))

    def backends(self) -> tuple[str, str]:
        """As vLLM chooses them for a layer that it has no fused kernel for: of steps, and of verification."""
        model = self.model
        sizes = ("auto", model.H, model.D, 4, self.drafts, model.dtype, model.dtype, model.state)
        with mock.patch.object(_vllm, "accelerator", lambda: torch.device(model.device)):
            verify = self.call.resolve_kda_spec_decode_backend(*sizes, model.lower_bound, False)
            return self.call.resolve_kda_decode_backend(*sizes), verify

    def fused(
        self, batch: Batch, z: Tensor, pool: Tensor, windows: Tensor, slots: Tensor, accepted: Tensor | None = None
    ) -> Tensor:
        """`[1, T, H, D]`. With counts of `accepted` tokens it is a round with drafts, whose `slots` are `[N, 1 + drafts]`."""
        model, out = self.model, torch.empty_like(batch.v)
        given: dict[str, Any] = {"x": batch.mixed, "weight": self.parts, "conv_state": windows, "raw_beta": batch.beta}
        given |= model.gate | {"state_indices": slots, "state": pool}
        given |= {"output_gate": z, "norm_weight": self.wide_norm, "norm_eps": EPS}
        if accepted is None:
            return self.call.fused_kda_decode(**given, raw_g=batch.g, bias=None, out=out)
        counts = {"query_start_loc": batch.offsets, "num_accepted_tokens": accepted}
        return self.call.flashinfer_packed_fused_kda_decode(**given, raw_gate=batch.g, output=out, **counts)

    def chain(
        self,
        theirs: Functions,
        batch: Batch,
        z: Tensor,
        pool: Tensor,
        windows: Tensor,
        slots: Tensor,
        accepted: Tensor | None = None,
    ) -> Tensor:
        """The same as vLLM's layer has it: kernel by kernel."""
        model, mixed, core = self.model, torch.empty_like(batch.mixed), torch.empty_like(batch.v)
        given: dict[str, Any] = batch.raw | model.gate | {"initial_state": pool}
        taken = (batch.mixed, windows, self.filters, None)
        convolve = functools.partial(theirs["causal_conv1d_update"], *taken, activation="silu", out=mixed)
        if accepted is None:
            convolve(conv_state_indices=slots, validate_data=True)
            step = theirs["fused_recurrent_kda_packed_decode"]
            core.copy_(step(mixed_qkv=mixed, **given, state_indices=slots)[0])
        else:
            counts = {"num_accepted_tokens": accepted, "query_start_loc": batch.offsets}
            convolve(conv_state_indices=slots[:, 0], max_query_len=slots.shape[1], **counts)
            q, k, v = (x.unflatten(1, (model.H, model.D))[None] for x in mixed.chunk(3, dim=1))
            at = {"ssm_state_indices": slots, "num_accepted_tokens": accepted, "cu_seqlens": batch.offsets}
            theirs["fused_recurrent_kda"](q=q, k=k, v=v, **given, **at, out=core)
        return theirs["rms_norm_gated"](core, z, self.norm, None, "sigmoid", eps=EPS)

    def exact(
        self, batch: Batch, z: Tensor, pool: Tensor, windows: Tensor, slots: Tensor, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and the pool after it, in float64."""
        tensors = {"x": batch.mixed, **batch.raw, "conv_state": windows, "state": pool}
        tensors |= {"weight": self.filters, "norm_weight": self.norm, "output_gate": z}
        exact = float64(tensors | self.model.gate)
        options: dict[str, Any] = {"norm_eps": EPS, "null_index": "non_positive", "backend": "reference"}
        if accepted is not None:
            options |= {"num_spec_tokens": slots.shape[1] - 1, "num_accepted_tokens": accepted}
            options["cu_seqlens"] = batch.offsets
        o = fused_kda_decode(**exact, state_indices=slots, **options)
        return o.view(1, *batch.v.shape[1:]), exact["state"]

    def exact_sequence(self, rows: Tensor, z: Tensor) -> Tensor:
        """Outputs `[T, H, D]` of one new sequence, in float64."""
        x = torch.nn.functional.pad(rows[:, : self.channels].double().mT, (3, 0))
        mixed = torch.nn.functional.silu(
            torch.nn.functional.conv1d(x, self.filters.double()[:, None], groups=self.channels)
        )
        o, _ = exact_sequence(self.model, torch.cat((mixed.mT, rows[:, self.channels :].double()), dim=1))
        scale = (o.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return o * scale * self.norm.double() * z.double().sigmoid()


UNFUSED = {
    "resolve_kda_decode_backend": lambda **call: "triton",
    "resolve_kda_spec_decode_backend": lambda **call: "native",
}
"""vLLM's choice where it has no fused kernel."""

# ---- SGLang ---------------------------------------------------------------------------------------------------------------


class SGLang(KimiLinear):
    """SGLang's layer; index -1 is null, tracked states lie at ends of chunks, and verification leaves the pool alone."""

    modules = (_sglang.KERNEL,)
    null, aligned, flagged = -1, 64, False
    in_graph = False
    """Whether a prefill is one of a captured graph, with more tokens and sequences than there are."""

    def adapted(self, theirs: Functions | None) -> Functions:
        return adapted(_sglang.PATCHES, self.modules, theirs)

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        index, offsets, tokens = self.model.index, batch.offsets, batch.rows.shape[0]
        if self.in_graph:
            batch = Batch(self.model, torch.nn.functional.pad(batch.rows, (0, 0, 0, 100)), batch.lengths)
            offsets, slots = torch.cat((offsets, offsets[-1:].repeat(3))), torch.cat((slots, index([-1] * 3)))
        snapshot, chunks = None, None
        if marks is not None:
            rows = offsets.shape[0] - 1
            snapshot = pool.new_full((rows, *pool.shape[1:]), torch.nan, dtype=FP32)
            every = [x // 64 if x else -1 for x in marks.offsets]
            chunks = index(every + [-1] * (rows - len(every)))
        returns = marks is not None and not self.in_graph
        found = self.call.extend(
            *(None, *batch.tokens.values()),
            **{"ssm_states": pool, "cache_indices": slots, "query_start_loc": offsets},
            **{**self.model.gate, "beta_is_raw": True, "is_spec_decode": False, "return_intermediate_states": returns},
            **{"track_state": snapshot, "track_chunk_idx": chunks},
        )
        o = found[0] if returns else found
        for row, offset in enumerate(marks.offsets if marks is not None else ()):
            if offset > 0:
                pool[marks.slots[row]] = snapshot[row].to(pool.dtype)
        return o[:, :tokens]

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        sizes = {"num_v_heads": self.model.H, "head_v_dim": self.model.D, "scale": self.model.D**-0.5}
        given = {**self.model.gate, **sizes, "ssm_states": pool, "cache_indices": slots}
        tokens = batch.mixed, batch.g.flatten(2), batch.beta
        return self.call.packed_decode(None, *tokens, **given, replayssm_d=None, replayssm_write_pos=None)

    def verify_read_only(self, batch: Batch, pool: Tensor, slots: Tensor, buffer: Tensor, tokens: int) -> Tensor:
        """To rows of `buffer [rows, most, H, V, K]`, of which it is the engine to take the accepted states."""
        rows = torch.arange(len(buffer), dtype=torch.int32, device=pool.device)
        given = {**self.model.gate, **batch.qkv, "a": batch.g.flatten(2), "b": batch.beta, "ssm_states": pool}
        given |= {"cache_indices": slots, "query_start_loc": batch.offsets, "intermediate_states_buffer": buffer}
        given |= {"intermediate_state_indices": rows, "cache_steps": tokens, "retrieve_parent_token": None}
        return self.call.target_verify(None, **given)


class SGLangGraph(SGLang):
    in_graph = True


LAYERS: dict[str, type[KimiLinear]] = {
    "Kimi-Linear": KimiLinear,
    "Kimi-K3": KimiK3,
    "GLM-5.3-Flash": Glm,
    "GLM-5.3-Flash, Triton": GlmTriton,
    "Ling-3": Ling,
    "SGLang": SGLang,
    "SGLang, graph": SGLangGraph,
}
