"""The Kimi Delta Attention layer and its cache.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))      causal, depthwise, W taps
    g, beta = x Wf,  x Wb                                                gate input, beta's logit
    o       = KDA(q, k, v, g, beta)                                      L2 norm, gate and sigmoid in the kernel
    y       = (rmsnorm(o) * sigmoid(x Wg)) Wo

Convolution, attention and gated norm are the operators of this package; a step of decoding over a pool is one of them
(`fused_kda_decode`). The next token needs of the past the last `W - 1` inputs of the convolutions and the state, whose
size does not depend on how many tokens came before: a `KdaCache` holds those of a batch, a `KdaPool` those of many sequences in
slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import NAMES
from ..ops.chunk import chunk_kda
from ..ops.convolution import short_convolution
from ..ops.fused_decode import fused_kda_decode
from ..ops.norm import gated_rms_norm
from ..ops.recurrent import fused_recurrent_kda
from ..parallel.checks import broadcast_errors
from ..parallel.context import ContextParallel, check_offsets, context_of
from ..parallel.halo import halo
from ..problem.arguments import check_int, check_int_in, check_name, flag, positive
from ..problem.device_checks import LOWEST_DECAY
from ..problem.errors import called, mistyped, rule, wrong
from ..problem.operations import CHUNK_SIZES, FUSED_HEAD_DIMS, HEAD_DIMS, MAX_TAPS, MIN_TAPS, epsilon
from ..problem.operations import bound as check_bound
from ..problem.problem import PARAMETRIC_GATES, PLAIN_GATES, NullIndex
from ..runtime.explain import Explanation, explain
from .heads import Share, share_of, share_of_weights

GATES = ("lower_bound", "softplus", *PLAIN_GATES)
SLOTS = {"state_indices": "slots"}
"""The layer's names of operators' arguments, where they differ."""

Projected = dict[str, Tensor]
Options = dict[str, Any]

MAX_STEP_TOKENS = 8
"""Up to this many tokens per sequence go through the token recurrence, more through the chunk form."""

SLOWEST_DECAY, FASTEST_DECAY = 1e-3, 0.5
"""Decay per token (nats) of a fresh layer's key channels: memories of 2 to 1,000 tokens, spread over the logarithm."""


@dataclass(frozen=True)
class KdaCache:
    """Memory of a `KimiDeltaAttention` layer: of the tokens that it has seen. Never written in place.

    `conv [B, 2 H K + HV V, W - 1]`: the last inputs of the convolutions, q, k and v side by side, in the layer's dtype;
    `state [B, HV, K, V]`: the recurrent state, float32. With packed sequences `B` is their number.
    """

    conv: Tensor
    state: Tensor


@dataclass(frozen=True)
class KdaPool:
    """States and convolution windows of many sequences, in slots that calls name by index and write in place; made by
    `KimiDeltaAttention.make_pool`.

    `conv [slots, 2 H K + HV V, W - 1]`, channels innermost, and `state [slots, HV, V, K]`, float32 or bfloat16.
    """

    conv: Tensor
    state: Tensor


# for `torch.load` with `weights_only=True`, its default
torch.serialization.add_safe_globals([KdaCache, KdaPool])


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) as a layer: `[B, T, hidden_size] -> [B, T, hidden_size]`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query/key heads, `H`.
        num_v_heads: value heads, `HV`, a multiple of `num_heads` (grouped value attention); `num_heads` by default.
        head_dim: `K`, channels of a query/key head: 32, 64, 128 or 256.
        head_v_dim: `V`, channels of a value head, from the same list; `head_dim` by default.
        conv_size: `W` in 2 to 4, taps of the short convolutions.
        conv_bias: whether they have a bias.
        gate: of the decay, as in `flashdelta.chunk_kda`: `"lower_bound"`, `"softplus"` (Kimi-Linear) or one without parameters,
            such as `"logsigmoid"`.
        lower_bound: in `[-5, 0)`, of the gate of that name: -5 by default. Others refuse it.
        allow_neg_eigval: write strengths in `[0, 2)`.
        gate_rank: inner width of the two low-rank projections, of the decay and of the output gate; `head_v_dim` by
            default.
        output_gate_bias: whether the output gate's projection has a bias, as FLA's layer has.
        norm_eps: epsilon of the output RMSNorm.
        chunk_size: tokens per chunk, 32 or 64.
        backend: what `flashdelta.chunk_kda` takes: `"auto"` or a backend's name.

    `A_log [HV]` and `dt_bias [HV * K]` stay float32 when the layer is cast: a rounded rate would compound over every
    token. They carry `_no_weight_decay = True` for optimizers that look for it. Under autocast the projections run in 16 bits
    and all other parameters are read as they are; `shard_attention` does the same under FSDP2. Weights of FLA's layer and of
    Hugging Face's Kimi-Linear: `nn.weights`. Over tensor-parallel ranks the layer is split by heads (docs/layer.md).

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate: str = "lower_bound",
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        gate_rank: int | None = None,
        output_gate_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        gate_rank = head_v_dim if gate_rank is None else gate_rank
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads}
        for name, size in (sizes | {"gate_rank": gate_rank}).items():
            positive(name, size)
        check_int_in("conv_size", conv_size, (*range(MIN_TAPS, MAX_TAPS + 1),))
        check_name("gate", gate, *GATES)
        check_int_in("head_dim", head_dim, HEAD_DIMS)
        check_int_in("head_v_dim", head_v_dim, HEAD_DIMS)
        check_int_in("chunk_size", chunk_size, CHUNK_SIZES)
        check_name("backend", backend, *NAMES)
        check_bound("lower_bound", lower_bound)
        read = gate == "lower_bound"
        rule("lower_bound", read or lower_bound is None, f"None (the gate {gate!r} does not read it)", lower_bound)
        rule("num_v_heads", num_v_heads % num_heads == 0, f"a multiple of num_heads = {num_heads}", num_v_heads)
        epsilon("norm_eps", norm_eps)
        flags = {"conv_bias": conv_bias, "allow_neg_eigval": allow_neg_eigval, "output_gate_bias": output_gate_bias}
        for name, value in flags.items():
            flag(name, value)
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_dim, self.head_v_dim, self.conv_size = head_dim, head_v_dim, conv_size
        self.lower_bound = LOWEST_DECAY if read and lower_bound is None else lower_bound
        self.gate, self.allow_neg_eigval, self.norm_eps = gate, allow_neg_eigval, norm_eps
        self.chunk_size, self.backend = chunk_size, backend

        key_dim, value_dim = num_heads * head_dim, num_v_heads * head_v_dim
        self.conv_channels = (key_dim, key_dim, value_dim)
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(sum(self.conv_channels), conv_size))
        self.conv_bias = nn.Parameter(torch.empty(sum(self.conv_channels))) if conv_bias else None
        self.f_proj = _low_rank(hidden_size, gate_rank, num_v_heads * head_dim)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log, self.dt_bias = None, None
        if gate in PARAMETRIC_GATES:
            self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim, dtype=torch.float32))
            self.mark_parameters()
        self.g_proj = _low_rank(hidden_size, gate_rank, value_dim, output_gate_bias)
        self.o_norm = nn.Parameter(torch.empty(head_v_dim))
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the parameters that belong to no submodule to their initial values."""
        nn.init.uniform_(self.conv_weight, -(self.conv_size**-0.5), self.conv_size**-0.5)
        if self.conv_bias is not None:
            nn.init.zeros_(self.conv_bias)
        nn.init.ones_(self.o_norm)
        if self.A_log is None or self.dt_bias is None:
            return
        nn.init.zeros_(self.A_log)
        fastest = FASTEST_DECAY if self.lower_bound is None else min(FASTEST_DECAY, -0.9 * self.lower_bound)
        low, high = math.log(min(SLOWEST_DECAY, 0.5 * fastest)), math.log(fastest)
        decay = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        self.dt_bias.copy_(decay.expm1().log() if self.lower_bound is None else torch.logit(decay / -self.lower_bound))

    def mark_parameters(self) -> None:
        """Sets `_no_weight_decay` on `A_log` and `dt_bias`: what makes new parameters of them drops it."""
        for parameter in (self.A_log, self.dt_bias):
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(
        self,
        x: Tensor,
        cache: KdaCache | None = None,
        *,
        return_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pool: KdaPool | None = None,
        slots: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        null_index: NullIndex = "negative",
        cp_context: Any = None,
    ) -> tuple[Tensor, KdaCache | None]:
        """Mixes the tokens of every sequence; no token sees a later one.

        Args:
            x: `[B, T, hidden_size]` in the layer's dtype.
            cache: of the tokens before `x`, from an earlier call; None at the start of the sequences.
            return_cache: also return the cache after the last token of `x`.
            cu_seqlens: `[N + 1]` int32 or int64: token offsets of packed sequences (then `B == 1`), as in `chunk_kda`. No
                sequence sees another one, in the convolutions neither. Outputs in rows of no sequence are undefined, but no
                gradient that is zero there brings them to a parameter; inputs there must be finite for that.
            attention_mask: `[B, >= T]` bool or integer, of which the last `T` columns count, as in FLA's layer: zero where `x`
                has padding, on either side or between. Such rows are left out, as if the sequences were packed, and their
                outputs are zero. The host waits for the device to count them.
            pool: instead of a cache: sequences go on from their slots and leave what comes next there. No gradients. With one
                token per sequence, not packed, and heads of 32 to 128 channels it is one launch between the projections
                (`fused_kda_decode`), in a CUDA graph too.
            slots: `[N]` int32 or int64, with `pool`: each sequence's slot. No two sequences may have one.
            has_initial_state: `[N]` bool, with `pool`: where False the sequence starts anew in its slot.
            null_index: with `pool`: which indices name no slot, as in `chunk_kda`; outputs of such sequences mean nothing.
            cp_context: instead of all these: how packed sequences lie over the ranks of a process group
                (`parallel.context_parallel`; FLA's context does, too). `x` has this rank's tokens. The convolutions' inputs
                and the states before them come from the ranks before, gradients from those after. Gradients of parameters
                are of this rank's tokens; the caller adds them up.

        Returns:
            `(y [B, T, hidden_size], cache or None)`.

        Raises:
            ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
        """
        if attention_mask is not None:
            others = {"cu_seqlens": cu_seqlens, "cp_context": cp_context}
            own = {"pool": pool, "slots": slots, "has_initial_state": has_initial_state, "null_index": null_index}
            return self._masked(x, attention_mask, others, cache=cache, return_cache=return_cache, **own)
        with broadcast_errors(cp_context):
            self._check_inputs(x, cache, cu_seqlens)
            context = None
            if cp_context is not None:
                others = {"cache": cache, "cu_seqlens": cu_seqlens, "pool": pool, "return_cache": return_cache or None}
                context = self._context(cp_context, others, x)
                cu_seqlens = context.cu_seqlens
            share, p = self._projected(x)
            sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            if pool is not None or slots is not None or has_initial_state is not None:
                others = {"cache": cache, "return_cache": return_cache or None}
                self._check_pool(x, others, pool, slots, sequences, share)
            else:
                rule("null_index", null_index == "negative", "'negative' without pool", repr(null_index))
            mixed = torch.cat([p["q_proj"], p["k_proj"], p["v_proj"]], dim=-1)
            gate = _by_heads(p["g_proj.1"], self.head_v_dim)
        conv, past, states = None, {}, {}
        if pool is not None:
            where: Options = {"state_indices": slots, "null_index": null_index}
            fits = max(self.head_dim, self.head_v_dim) <= max(FUSED_HEAD_DIMS)
            if x.shape[1] == 1 and cu_seqlens is None and has_initial_state is None and fits:
                return self.o_proj(self._step(p, mixed, gate, pool, where, share).flatten(2)), None
            where["has_initial_state"] = has_initial_state
            past = {"state_pool": pool.conv, **where}
            states = {"state_pool": pool.state, "state_v_first": True, **where}
        elif context is None:
            past = {"initial_state": None if cache is None else cache.conv, "output_final_state": return_cache}
            states = past | {"initial_state": None if cache is None else cache.state}
        else:
            past, states = {"initial_state": self._inputs_before(mixed, context)}, {"cp_context": context}
        with broadcast_errors(cp_context):
            weight, bias = self._filters(mixed.dtype, share)
            names = {"state_pool": "pool.conv", "initial_state": "cache.conv", "weight": "conv_weight"}
            with called(**SLOTS, **names):
                past |= {"cu_seqlens": cu_seqlens, "backend": self._around()}
                mixed, conv = short_convolution(mixed, weight, bias, **past)
            states |= {"cu_seqlens": cu_seqlens} if context is None else {}
            op, arguments, options = self._kda_call(p, mixed, states, share)
        with called(**SLOTS, state_pool="pool.state", initial_state="cache.state"):
            o, state = op(*arguments, **options)
        if cu_seqlens is not None and o.requires_grad:
            o = zero_strays(o, cu_seqlens)
        norm = _narrowed(share.whole(self.o_norm), o.dtype)
        o = gated_rms_norm(o, gate, norm, eps=self.norm_eps, backend=self._around())
        return self.o_proj(o.flatten(2)), KdaCache(conv, state) if return_cache else None

    def _windows(self, sequences: int, share: Share) -> tuple[int, int, int]:
        """Shape of so many windows of the convolutions."""
        return sequences, share.heads(sum(self.conv_channels)), self.conv_size - 1

    def _states(self, slots: int, share: Share) -> tuple[int, int, int, int]:
        """Shape of so many states of a pool."""
        return slots, share.heads(self.num_v_heads), self.head_v_dim, self.head_dim

    def make_pool(
        self, slots: int, *, state_dtype: torch.dtype = torch.float32, dtype: torch.dtype | None = None
    ) -> KdaPool:
        """A pool of so many slots, zeros, where the layer is; its windows in `dtype`, that of the layer's filters by default.

        Raises:
            ValueError, TypeError: a number of slots, or a dtype, that is none.
        """
        positive("slots", slots)
        states = torch.float32, torch.bfloat16, torch.float64
        rule("state_dtype", state_dtype in states, f"one of {states}", repr(state_dtype))
        rule("dtype", dtype in (None, torch.float16, *states), f"one of {(None, torch.float16, *states)}", repr(dtype))
        share, own = share_of_weights(self), self.conv_weight
        slots, channels, taps = self._windows(slots, share)
        conv = torch.zeros(slots, taps, channels, dtype=dtype or own.dtype, device=own.device).mT
        return KdaPool(conv, torch.zeros(self._states(slots, share), dtype=state_dtype, device=own.device))

    @torch.no_grad()
    def explain(self, batch: int, tokens: int) -> Explanation:
        """Says which backend a forward of `[batch, tokens, hidden_size]` without gradients takes, and why."""
        for name, size in (("batch", batch), ("tokens", tokens)):
            check_int(name, size)
            rule(name, size >= 0, "at least 0", size)
        x = torch.zeros(batch, tokens, self.hidden_size, dtype=self._input_dtype(), device=self.conv_weight.device)
        share, p = self._projected(x)
        mixed = x.new_zeros(batch, tokens, share.heads(sum(self.conv_channels)))
        op, arguments, options = self._kda_call(p, mixed, {"output_final_state": True}, share)
        return explain(op, *arguments, **options)

    def _input_dtype(self) -> torch.dtype:
        """The dtype of the projections, as far as they have one; filters may stay in float32."""
        return next((x.dtype for x in self.b_proj.parameters() if x.is_floating_point()), self.conv_weight.dtype)

    def _projected(self, x: Tensor) -> tuple[Share, Projected]:
        """A rank's share of the heads, and the outputs of all projections, of its heads, by name."""
        names = {"f_proj": "f_proj.1", "g_proj": "g_proj.1"}
        modules = ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj")
        try:
            p = {names.get(name, name): getattr(self, name)(x) for name in modules}
        except RuntimeError as error:
            if x.dtype == (dtype := self._input_dtype()):
                raise
            raise TypeError(f"x must be in the projections' dtype {dtype}; got {x.dtype}") from error
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim
        heads = {"q_proj": (H, K), "k_proj": (H, K), "v_proj": (HV, V)}
        heads |= {"f_proj.1": (HV, K), "b_proj": (HV, 1), "g_proj.1": (HV, V)}
        return share_of(self, {name: y.shape[-1] for name, y in p.items()}, heads), p

    def _masked(self, x: Tensor, mask: Any, others: dict, **options: Any) -> tuple[Tensor, KdaCache | None]:
        """A forward of the tokens that the mask leaves, packed."""
        self._check_inputs(x, options["cache"], None)
        if not isinstance(mask, Tensor):
            raise TypeError(f"attention_mask must be a torch.Tensor; got {type(mask).__name__}")
        if mask.is_floating_point() or mask.is_complex():
            raise TypeError(f"attention_mask must be bool or an integer, zero for padding; got {mask.dtype}")
        B, T, _ = x.shape
        if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] < T:
            raise ValueError(f"attention_mask must be [B, >= T] = [{B}, >= {T}]; got shape {list(mask.shape)}")
        if (given := _first_given(others)) is not None:
            raise ValueError(f"attention_mask must come alone: sequences that are packed have no padding; got {given}")
        mask = mask[:, mask.shape[1] - T :] != 0
        (rows,) = mask.flatten().nonzero(as_tuple=True)
        offsets = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        y, cache = self.forward(x.flatten(0, 1)[rows][None], cu_seqlens=offsets, **options)
        return y.new_zeros(B * T, y.shape[-1]).index_copy(0, rows, y[0]).view(B, T, y.shape[-1]), cache

    def _around(self) -> str:
        """The backend of convolution and norm, of which Hopper has no kernels of its own."""
        return "auto" if self.backend == "hopper" else self.backend

    def _filters(self, dtype: torch.dtype, share: Share) -> tuple[Tensor, Tensor | None]:
        weight, bias = (share.part(x, self.conv_channels) for x in (self.conv_weight, self.conv_bias))
        return _narrowed(weight, dtype), None if bias is None else _narrowed(bias, dtype)

    def _gate_options(self, share: Share) -> Options:
        gate = dict(gate=self.gate, lower_bound=self.lower_bound, allow_neg_eigval=self.allow_neg_eigval)
        tensors = dict(A_log=share.part(self.A_log), dt_bias=share.part(self.dt_bias))
        return dict(use_qk_l2norm_in_kernel=True, **gate, **tensors)

    def _step(self, p: Projected, mixed: Tensor, gate: Tensor, pool: KdaPool, where: Options, share: Share) -> Tensor:
        """A token of each sequence, `[N, 1, HV, V]`, before the last projection."""
        weight, bias = self._filters(mixed.dtype, share)
        norm = _narrowed(share.whole(self.o_norm), mixed.dtype)
        tensors = dict(raw_g=p["f_proj.1"][:, 0], raw_beta=p["b_proj"][:, 0], output_gate=gate[:, 0], norm_weight=norm)
        states = dict(weight=weight, bias=bias, conv_state=pool.conv, state=pool.state)
        options: Options = dict(norm_eps=self.norm_eps, backend=self._around(), **self._gate_options(share))
        with called(**SLOTS, conv_state="pool.conv", state="pool.state"):
            return fused_kda_decode(mixed[:, 0], **tensors, **states, **options, **where)

    def _kda_call(self, p: Projected, mixed: Tensor, states: Options, share: Share) -> tuple[Callable, tuple, Options]:
        """The operator for this many tokens, with its arguments."""
        g, beta = p["f_proj.1"], p["b_proj"]
        if mixed.dtype == torch.float16:  # states, and what is read of them, may pass 65504; the norm brings that back
            mixed, g, beta = mixed.float(), g.float(), beta.float()
        q, k, v = mixed.split([share.heads(channels) for channels in self.conv_channels], dim=-1)
        widths = (self.head_dim, self.head_dim, self.head_v_dim, self.head_dim)
        by_heads = (_by_heads(x, width) for x, width in zip((q, k, v, g), widths))
        options = {**self._gate_options(share), "use_beta_sigmoid_in_kernel": True, "backend": self.backend, **states}
        arguments = (*by_heads, beta)
        if mixed.shape[1] <= MAX_STEP_TOKENS and "cp_context" not in states:
            return fused_recurrent_kda, arguments, options
        return chunk_kda, arguments, {**options, "chunk_size": self.chunk_size}

    def _context(self, cp_context: Any, others: dict[str, object], x: Tensor) -> ContextParallel:
        if (given := _first_given(others)) is not None:
            raise ValueError(f"{given} must be left out with cp_context; got one")
        context = context_of(cp_context, None, x.device)
        context.check_tokens(x)
        fits, wanted = context.conv_size in (None, self.conv_size), f"for the layer's conv_size = {self.conv_size}"
        rule("cp_context", fits, wanted, f"one for {context.conv_size} taps")
        return context

    def _inputs_before(self, mixed: Tensor, context: ContextParallel) -> Tensor:
        """The states of the convolutions `[N, D, W - 1]`: only a rank's first sequence goes on from another one."""
        before = halo(mixed, context, self.conv_size - 1).mT
        assert context.cu_seqlens is not None, "contexts of whole batch rows come from `group=`"
        N = context.cu_seqlens.shape[0] - 1
        return torch.cat([before[:N], before.new_zeros(max(N - before.shape[0], 0), *before.shape[1:])])

    def _check_inputs(self, x: Tensor, cache: KdaCache | None, cu_seqlens: Tensor | None) -> None:
        if not isinstance(x, Tensor):
            raise mistyped("x", x, "a torch.Tensor")
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise wrong("x", f"shape {list(x.shape)}", f"[B, T, {self.hidden_size}]")
        if cu_seqlens is not None:
            check_offsets(cu_seqlens)
        if cache is not None and not (isinstance(cache, KdaCache) and isinstance(cache.conv, Tensor)):
            raise mistyped("cache", cache, "a KdaCache of tensors")

    def _check_pool(self, x: Tensor, others: dict, pool: Any, slots: Any, sequences: int, share: Share) -> None:
        if not isinstance(pool, KdaPool):
            raise TypeError(f"pool must be a KdaPool, with which slots and flags come; got {type(pool).__name__}")
        if not isinstance(slots, Tensor):
            raise mistyped("slots", slots, "a torch.Tensor of slots of the pool")
        if (given := _first_given(others)) is not None:
            raise ValueError(f"pool must come without a cache; got {given}, too")
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise ValueError("pool must come under torch.no_grad(), as it is updated in place; got gradients")
        if tuple(slots.shape) != (sequences,):
            raise wrong("slots", f"shape {list(slots.shape)}", f"one per sequence = [{sequences}]")
        count = pool.state.shape[0]
        for part, wanted in (("conv", self._windows(count, share)), ("state", self._states(count, share))):
            shape = tuple(getattr(pool, part).shape)
            rule(f"pool.{part}", shape == wanted, f"of shape {list(wanted)}", f"shape {list(shape)}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiDeltaAttention:
        """Moves and casts as any module does, but leaves `A_log` and `dt_bias` in float32, unrounded."""
        gate = tuple(x for x in (self.A_log, self.dt_bias) if x is not None)

        def keep_gate_exact(x: Tensor) -> Tensor:
            applied = fn(x)
            is_gate = any(x is parameter or x is parameter.grad for parameter in gate)
            return x.to(applied.device) if is_gate and applied.dtype != x.dtype else applied

        super()._apply(keep_gate_exact, recurse)
        self.mark_parameters()
        return self

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        super()._load_from_state_dict(*arguments, **named)
        for parameter in (self.A_log, self.dt_bias):
            if parameter is not None:
                parameter.data = parameter.data.float()
        self.mark_parameters()  # `assign=True` puts other parameters in place, of any dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_parameters()  # copies of parameters have no marks


def zero_strays(o: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Zeros in the rows of `o [1, T, HV, V]` that belong to no sequence: times a gradient of zero, a NaN there would reach the
    weights behind."""
    covered = torch.arange(o.shape[1], device=o.device) < cu_seqlens[-1]
    return torch.where(covered[:, None, None], o, 0.0)


def _by_heads(x: Tensor, width: int) -> Tensor:
    """A view `[.., heads, width]`. (`torch.compile` can't trace `unflatten` where a default device is set.)"""
    return x.view(*x.shape[:-1], x.shape[-1] // width, width)


def _low_rank(inputs: int, rank: int, outputs: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def _narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Operators take a parameter in float32 or in the dtype of what it is for; under autocast it may be in a third one."""
    return weight if weight.dtype in (torch.float32, dtype) and dtype != torch.float64 else weight.to(dtype)


def _first_given(others: dict[str, object]) -> str | None:
    return next((name for name, value in others.items() if value is not None), None)
