"""The KDA part of an engine's layer on made-up tokens: what vLLM's and SGLang's layers do with their kernels, call by call.

A layer here takes its functions by name, so that it runs the engine's own, or those of an integration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashdelta import chunk_kda, fused_kda_decode
from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations.seams import AnySeam, Replacement, Seam

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


def exact_outputs(model: Model, rows: Tensor) -> Tensor:
    """`[T, H, D]` of one new sequence, in float64."""
    return exact_sequence(model, rows)[0]


def exact_sequence(model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the final state `[H, V, K]`."""
    batch = Batch(model, rows, [len(rows)])
    tensors = float64({**batch.qkv, "g": batch.g, "beta": batch.beta, "A_log": model.A_log, "dt_bias": model.dt_bias})
    options: dict[str, Any] = {"lower_bound": model.lower_bound, "backend": "reference", "split": False}
    flags = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    found: Any = chunk_kda(**tensors, **options, **flags, output_final_state=True, state_v_first=True)
    return found[0][0], found[1][0]


@dataclass
class Marks:
    """A checkpoint for some sequences of a prefill: after how many tokens (0: none), and the slot that gets it."""

    offsets: Sequence[int]
    slots: Sequence[int]


def own(**named: Any) -> Any:
    raise AssertionError("the call stayed the engine's")


def adapted(seams: Sequence[AnySeam], modules: Sequence[str], theirs: Functions | None = None) -> Functions:
    """The functions of an integration in place of the engine's, by name."""
    found = {}
    for seam in seams:
        if isinstance(seam, Seam) and seam.module in modules and seam.adapter is not None:
            name = seam.name.split(".")[-1]
            found[name] = Replacement(seam.adapter, seam, (theirs or {}).get(name, own))
    return found


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


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
        """Of a tensor, memory for outputs like it."""

    def adapted(self, theirs: Functions | None) -> Functions:
        return adapted(_vllm.SEAMS, self.modules, theirs)

    @property
    def gate(self) -> dict[str, Any]:
        return {"A_log": self.model.A_log, "dt_bias": self.model.dt_bias, "lower_bound": self.model.lower_bound}

    @property
    def prefill_gate(self) -> dict[str, Any]:
        return {"A_log": self.model.A_log, "g_bias": self.model.dt_bias, "lower_bound": self.model.lower_bound}

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        o, last = self.call.chunk_kda_with_fused_gate(
            **batch.qkv,
            raw_g=batch.g,
            raw_beta=batch.beta,
            **self.prefill_gate,
            initial_state=self.call.gather_initial_states(pool, slots, flags),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=batch.offsets,
        )
        pool[slots] = last
        return o

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        return self.call.fused_recurrent_kda_packed_decode(
            mixed_qkv=batch.mixed,
            raw_g=batch.g,
            raw_beta=batch.beta,
            **self.gate,
            initial_state=pool,
            state_indices=slots,
        )[0]

    def verify(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        """`slots [N, 1 + S]`, from that of the last accepted token. The table and the counts may have more rows."""
        return self.call.fused_recurrent_kda(
            **batch.qkv,
            raw_g=batch.g,
            raw_beta=batch.beta,
            **self.gate,
            initial_state=pool,
            cu_seqlens=batch.offsets,
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            out=self.room(batch.v),
        )[0]


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
        given = dict(
            **batch.qkv,
            g=batch.g,
            beta=batch.beta,
            **self.gate,
            initial_state=states,
            cu_seqlens=batch.offsets,
            out=self.room(batch.v),
            final_state=final,
            workspace=workspace,
        )
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
        o, last = self.call._flashkda_prefill(
            SimpleNamespace(**layer, kda_lower_bound=self.model.lower_bound, _checkpoint_exporter=exporter),
            **dict(
                **batch.qkv,
                g=batch.g,
                beta=batch.beta,
                initial_state=self.call.gather_initial_states(pool, slots, flags),
                cu_seqlens=batch.offsets,
                out=self.room(batch.v),
                checkpoint=checkpoint,
                raw_qkv=batch.mixed,
                conv_state=pool,
                recurrent_state=pool,
            ),
        )
        assert exported is None or [*exported[0]] == ["raw_qkv", "conv_state", "cu_seqlens"]
        self.call.scatter_states(pool, last, slots)
        return o

    def step(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor | None) -> Tensor:
        return self.call.fused_recurrent_kda(
            **dict(
                **batch.qkv,
                g=batch.g,
                beta=batch.beta,
                initial_state=pool,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=batch.offsets,
                ssm_state_indices=slots,
                num_accepted_tokens=accepted,
                out=self.room(batch.v),
                sigmoid_beta=True,
                a_log=self.model.A_log.view(1, 1, -1, 1),
                g_bias=self.model.dt_bias,
                compute_gate=True,
                lower_bound=self.model.lower_bound,
            )
        )[0]

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        return self.step(batch, pool, slots, None)

    verify = step


class GlmTriton(Glm):
    """The same without FlashKDA; its prefill takes beta ready-made."""

    aligned = 0

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        o, last = self.call.chunk_kda_with_fused_gate(
            **dict(
                **batch.qkv,
                raw_g=batch.g,
                beta=batch.beta.float().sigmoid(),
                A_log=self.model.A_log.view(1, 1, -1, 1),
                g_bias=self.model.dt_bias,
                initial_state=self.call.gather_initial_states(pool, slots, flags),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=batch.offsets,
                safe_gate=True,
                lower_bound=self.model.lower_bound,
            )
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
        forward = next(x for x in _vllm.SEAMS if isinstance(x, Seam) and x.path.endswith(_vllm.FORWARD[_vllm.LING]))
        ours = "_forward" in vars(self.call)
        arguments = dict.fromkeys(forward.names) | {"self": layer}
        (Replacement(forward.adapter, forward, theirs) if ours and forward.adapter else theirs)(**arguments)
        return found[0]

    def prefill(self, batch: Batch, pool: Tensor, slots: Tensor, flags: Tensor, marks: Marks | None = None) -> Tensor:
        def run(states: Any) -> Tensor:
            states[slots[~flags]] = 0
            o, states[slots] = self.call.chunk_kda(
                **batch.qkv,
                **self.activated(batch),
                initial_state=states[slots].contiguous(),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                safe_gate=True,
                lower_bound=self.model.lower_bound,
                cu_seqlens=batch.offsets,
            )
            return o

        return self.forward(run, pool)

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        def run(states: Any) -> Tensor:
            return self.call.fused_recurrent_kda(
                **batch.qkv,
                **self.activated(batch),
                initial_state=states,
                use_qk_l2norm_in_kernel=True,
                safe_gate=True,
                lower_bound=self.model.lower_bound,
                cu_seqlens=batch.offsets,
                ssm_state_indices=slots,
            )[0]

        return self.forward(run, pool)

    def verify(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        def run(states: Any) -> Tensor:
            return self.call.fused_recurrent_kda_fwd(
                **{name: x.contiguous() for name, x in (batch.qkv | self.activated(batch)).items()},
                scale=self.model.D**-0.5,
                initial_state=states,
                inplace_final_state=True,
                cu_seqlens=batch.offsets,
                ssm_state_indices=slots,
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=True,
            )[0]

        return self.forward(run, pool)


# ---- a whole step of vLLM's Kimi-K3 --------------------------------------------------------------------------------------

EPS = 1e-5


class K3Step:
    """What lies between the projections of vLLM's Kimi-K3 in a round of decoding: convolution, attention and norm. Slot 0 is
    reserved. Windows have room for `drafts`; their channels lie innermost unless `by_channel`."""

    def __init__(self, model: Model, drafts: int = 0, by_channel: bool = False):
        self.model, self.drafts, self.by_channel = model, drafts, by_channel
        self.channels = 3 * model.H * model.D
        self.filters = model.source.normal(self.channels, 4) / 2
        self.norm = (1 + model.source.normal(model.D) / 10).to(model.dtype)
        # as vLLM keeps them for fused steps
        self.parts, self.wide_norm = self.filters.view(3, -1, 4).mT.contiguous(), self.norm.float()
        self.call = SimpleNamespace(**adapted(_vllm.SEAMS, (_vllm.KIMI_K3, _vllm.OPS), UNFUSED))

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
        given: dict[str, Any] = {
            "x": batch.mixed,
            "weight": self.parts,
            "conv_state": windows,
            "raw_beta": batch.beta,
            "A_log": model.A_log,
            "dt_bias": model.dt_bias,
            "state_indices": slots,
            "state": pool,
            "lower_bound": model.lower_bound,
            "output_gate": z,
            "norm_weight": self.wide_norm,
            "norm_eps": EPS,
        }
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
        gate = {"A_log": model.A_log, "dt_bias": model.dt_bias, "lower_bound": model.lower_bound}
        given: dict[str, Any] = {"raw_g": batch.g, "raw_beta": batch.beta, **gate, "initial_state": pool}
        convolve = functools.partial(theirs["causal_conv1d_update"], activation="silu", out=mixed)
        if accepted is None:
            convolve(batch.mixed, windows, self.filters, None, conv_state_indices=slots, validate_data=True)
            step = theirs["fused_recurrent_kda_packed_decode"]
            core.copy_(step(mixed_qkv=mixed, **given, state_indices=slots)[0])
        else:
            counts = {"num_accepted_tokens": accepted, "query_start_loc": batch.offsets}
            most = slots.shape[1]
            convolve(
                batch.mixed, windows, self.filters, None, conv_state_indices=slots[:, 0], max_query_len=most, **counts
            )
            q, k, v = (x.unflatten(1, (model.H, model.D))[None] for x in mixed.chunk(3, dim=1))
            at = {"ssm_state_indices": slots, "num_accepted_tokens": accepted, "cu_seqlens": batch.offsets}
            theirs["fused_recurrent_kda"](q=q, k=k, v=v, **given, **at, out=core)
        return theirs["rms_norm_gated"](core, z, self.norm, None, "sigmoid", eps=EPS)

    def exact(
        self, batch: Batch, z: Tensor, pool: Tensor, windows: Tensor, slots: Tensor, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and the pool after it, in float64."""
        tensors = {"x": batch.mixed, "raw_g": batch.g, "raw_beta": batch.beta, "conv_state": windows, "state": pool}
        tensors |= {"weight": self.filters, "norm_weight": self.norm, "output_gate": z}
        exact = float64(tensors | {"A_log": self.model.A_log, "dt_bias": self.model.dt_bias})
        drafts: dict[str, Any] = {}
        if accepted is not None:
            drafts = {
                "num_spec_tokens": slots.shape[1] - 1,
                "num_accepted_tokens": accepted,
                "cu_seqlens": batch.offsets,
            }
        options: dict[str, Any] = {"lower_bound": self.model.lower_bound, "norm_eps": EPS, "null_index": "non_positive"}
        o = fused_kda_decode(**exact, state_indices=slots, **drafts, **options, backend="reference")
        return o.view(1, *batch.v.shape[1:]), exact["state"]

    def exact_sequence(self, rows: Tensor, z: Tensor) -> Tensor:
        """Outputs `[T, H, D]` of one new sequence, in float64."""
        x = torch.nn.functional.pad(rows[:, : self.channels].double().mT, (3, 0))
        mixed = torch.nn.functional.silu(
            torch.nn.functional.conv1d(x, self.filters.double()[:, None], groups=self.channels)
        )
        o = exact_outputs(self.model, torch.cat((mixed.mT, rows[:, self.channels :].double()), dim=1))
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
        return adapted(_sglang.SEAMS, self.modules, theirs)

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
        found = self.call.extend(
            None,
            batch.q,
            batch.k,
            batch.v,
            batch.g,
            batch.beta,
            **dict(
                ssm_states=pool,
                cache_indices=slots,
                query_start_loc=offsets,
                **self.gate,
                beta_is_raw=True,
                is_spec_decode=False,
                return_intermediate_states=marks is not None and not self.in_graph,
                track_state=snapshot,
                track_chunk_idx=chunks,
            ),
        )
        o = found[0] if marks is not None and not self.in_graph else found
        for row, offset in enumerate(marks.offsets if marks is not None else ()):
            if offset > 0:
                pool[marks.slots[row]] = snapshot[row].to(pool.dtype)
        return o[:, :tokens]

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        return self.call.packed_decode(
            None,
            batch.mixed,
            batch.g.flatten(2),
            batch.beta,
            **dict(
                A_log=self.model.A_log,
                dt_bias=self.model.dt_bias,
                lower_bound=self.model.lower_bound,
                scale=self.model.D**-0.5,
                ssm_states=pool,
                cache_indices=slots,
                num_v_heads=self.model.H,
                head_v_dim=self.model.D,
                replayssm_d=None,
                replayssm_write_pos=None,
            ),
        )

    def verify_read_only(self, batch: Batch, pool: Tensor, slots: Tensor, buffer: Tensor, tokens: int) -> Tensor:
        """To rows of `buffer [rows, most, H, V, K]`, of which it is the engine to take the accepted states."""
        return self.call.target_verify(
            None,
            **dict(
                **self.gate,
                **batch.qkv,
                a=batch.g.flatten(2),
                b=batch.beta,
                ssm_states=pool,
                cache_indices=slots,
                query_start_loc=batch.offsets,
                intermediate_states_buffer=buffer,
                intermediate_state_indices=torch.arange(len(buffer), dtype=torch.int32, device=pool.device),
                cache_steps=tokens,
                retrieve_parent_token=None,
            ),
        )


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
