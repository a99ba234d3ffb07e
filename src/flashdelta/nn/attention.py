"""The Kimi Delta Attention layer and its cache.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))      causal, depthwise, W taps
    g, beta = x Wf,  x Wb                                                gate input, beta's logit
    o       = KDA(q, k, v, g, beta)                                      L2 norm, gate and sigmoid in the kernel
    y       = (rmsnorm(o) * sigmoid(x Wg)) Wo

The cache is what the next token needs of the past: the last `W - 1` inputs of the convolutions and the state. Its size
does not depend on how many tokens came before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import NAMES
from ..ops.chunk import chunk_kda
from ..ops.recurrent import fused_recurrent_kda
from ..problem.operations import CHUNK_SIZES, HEAD_DIMS
from ..runtime.explain import Explanation, explain

LOWER_BOUND = -5.0
MAX_STEP_TOKENS = 8
"""Up to this many tokens a sequence go through the token recurrence, more through the chunk form."""

SLOWEST_DECAY, FASTEST_DECAY = 1e-3, 0.5
"""Decay per token (nats) of a fresh layer's key channels: memories of 2 to 1,000 tokens, spread over the logarithm."""


@dataclass(frozen=True)
class KdaCache:
    """What a `KimiDeltaAttention` layer remembers of the tokens it has seen. Never written in place.

    `conv [B, W - 1, 2 H K + HV V]`: the last inputs of the convolutions, q, k and v side by side, in the layer's dtype;
    `state [B, HV, K, V]`: the recurrent state, float32.
    """

    conv: Tensor
    state: Tensor


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) as a layer: `[B, T, hidden_size] -> [B, T, hidden_size]`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query/key heads, `H`.
        num_v_heads: value heads, `HV`, a multiple of `num_heads` (grouped value attention); `num_heads` by default.
        head_dim: `K`, channels of a query/key head: 32, 64, 128 or 256.
        head_v_dim: `V`, channels of a value head, from the same list; `head_dim` by default.
        conv_size: `W >= 1`, taps of the short convolutions.
        gate_rank: inner width of the two low-rank projections, of the decay and of the output gate; `head_v_dim` by
            default.
        norm_eps: epsilon of the output RMSNorm.
        chunk_size: tokens a chunk, 32 or 64.
        backend: what `flashdelta.chunk_kda` takes: `"auto"` or a backend's name.

    `A_log [HV]` and `dt_bias [HV * K]` stay float32 when the layer is cast: a rounded rate would compound over every
    token. They carry `_no_weight_decay = True` for optimizers that look for it.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
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
        gate_rank: int | None = None,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        gate_rank = head_v_dim if gate_rank is None else gate_rank
        _check_positive(hidden_size=hidden_size, num_heads=num_heads, num_v_heads=num_v_heads)
        _check_positive(conv_size=conv_size, gate_rank=gate_rank)
        if num_v_heads % num_heads != 0:
            raise ValueError(f"num_v_heads: got {num_v_heads}, wanted a multiple of num_heads = {num_heads}")
        _check_one_of("head_dim", head_dim, HEAD_DIMS)
        _check_one_of("head_v_dim", head_v_dim, HEAD_DIMS)
        _check_one_of("chunk_size", chunk_size, CHUNK_SIZES)
        _check_one_of("backend", backend, NAMES)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.head_dim = head_dim
        self.head_v_dim = head_v_dim
        self.conv_size = conv_size
        self.norm_eps = norm_eps
        self.chunk_size = chunk_size
        self.backend = backend

        key_dim, value_dim = num_heads * head_dim, num_v_heads * head_v_dim
        self.conv_channels = (key_dim, key_dim, value_dim)
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(conv_size, sum(self.conv_channels)))
        self.f_proj = _low_rank(hidden_size, gate_rank, num_v_heads * head_dim)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim, dtype=torch.float32))
        self.g_proj = _low_rank(hidden_size, gate_rank, value_dim)
        self.o_norm = nn.Parameter(torch.empty(head_v_dim))
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)
        self.A_log._no_weight_decay = True
        self.dt_bias._no_weight_decay = True
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the parameters that belong to no submodule to their initial values."""
        nn.init.uniform_(self.conv_weight, -(self.conv_size**-0.5), self.conv_size**-0.5)
        nn.init.ones_(self.o_norm)
        nn.init.zeros_(self.A_log)
        low, high = math.log(SLOWEST_DECAY), math.log(FASTEST_DECAY)
        decay = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        self.dt_bias.copy_(torch.logit(decay / -LOWER_BOUND))

    def forward(
        self, x: Tensor, cache: KdaCache | None = None, *, return_cache: bool = False
    ) -> tuple[Tensor, KdaCache | None]:
        """Mixes the tokens of every sequence; no token sees a later one.

        Args:
            x: `[B, T, hidden_size]` in the layer's dtype.
            cache: of the tokens before `x`, from an earlier call; None at the start of the sequences.
            return_cache: also return the cache after the last token of `x`.

        Returns:
            `(y [B, T, hidden_size], cache or None)`.

        Raises:
            ValueError, TypeError: `x` or `cache` of another shape or dtype.
        """
        self._check_inputs(x, cache)
        B, T, _ = x.shape
        mixed, conv = self._short_convolution(x, None if cache is None else cache.conv)
        op, arguments, options = self._kda_call(x, mixed, cache, return_cache)
        o, state = op(*arguments, **options)
        gate = self.g_proj(x).view(B, T, self.num_v_heads, self.head_v_dim)
        o = F.rms_norm(o, (self.head_v_dim,), self.o_norm, self.norm_eps) * torch.sigmoid(gate)
        return self.o_proj(o.flatten(2)), KdaCache(conv, state) if return_cache else None

    @torch.no_grad()
    def explain(self, batch: int, tokens: int) -> Explanation:
        """Which backend a forward of `[batch, tokens, hidden_size]` without gradients takes, and why."""
        x = self.o_proj.weight.new_zeros(batch, tokens, self.hidden_size)
        mixed = x.new_zeros(batch, tokens, sum(self.conv_channels))
        op, arguments, options = self._kda_call(x, mixed, None, return_cache=True)
        return explain(op, *arguments, **options)

    def _short_convolution(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """`silu(conv(...)) [B, T, 2 H K + HV V]` of the q, k and v projections, and the inputs the next call needs."""
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        B, T, channels = projected.shape
        if past is None:
            past = projected.new_zeros(B, self.conv_size - 1, channels)
        window = torch.cat([past, projected], dim=1)
        taps = (window[:, i : i + T] * weight for i, weight in enumerate(self.conv_weight))
        # under autocast the taps are float32 and what they multiply is not: the call's tensors have one dtype.
        # the clone lets the window go: a cache must not hold the memory of a whole prompt
        return F.silu(sum(taps)).to(projected.dtype), window[:, T:].clone()

    def _kda_call(
        self, x: Tensor, mixed: Tensor, cache: KdaCache | None, return_cache: bool
    ) -> tuple[Callable, tuple[Tensor, ...], dict[str, object]]:
        """The operator for this many tokens, with its arguments."""
        B, T, _ = x.shape
        q, k, v = mixed.split(self.conv_channels, dim=-1)
        arguments = (
            q.view(B, T, self.num_heads, self.head_dim),
            k.view(B, T, self.num_heads, self.head_dim),
            v.view(B, T, self.num_v_heads, self.head_v_dim),
            self.f_proj(x).view(B, T, self.num_v_heads, self.head_dim),
            self.b_proj(x),
        )
        options = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "gate": "lower_bound",
            "lower_bound": LOWER_BOUND,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "initial_state": None if cache is None else cache.state,
            "output_final_state": return_cache,
            "backend": self.backend,
        }
        if T <= MAX_STEP_TOKENS:
            return fused_recurrent_kda, arguments, options
        return chunk_kda, arguments, {**options, "chunk_size": self.chunk_size}

    def _check_inputs(self, x: Tensor, cache: KdaCache | None) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: got {type(x).__name__}, wanted a torch.Tensor")
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: got shape {list(x.shape)}, wanted [B, T, {self.hidden_size}]")
        if cache is None:
            return
        if not isinstance(cache, KdaCache):
            raise TypeError(f"cache: got {type(cache).__name__}, wanted a KdaCache")
        wanted = (x.shape[0], self.conv_size - 1, sum(self.conv_channels))
        if tuple(cache.conv.shape) != wanted:
            raise ValueError(f"cache: got conv of shape {list(cache.conv.shape)}, wanted {list(wanted)}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiDeltaAttention:
        """Moves and casts as any module does, but leaves `A_log` and `dt_bias` in float32, unrounded."""
        gate = (self.A_log, self.dt_bias)

        def keep_gate_exact(x: Tensor) -> Tensor:
            applied = fn(x)
            is_gate = any(x is parameter or x is parameter.grad for parameter in gate)
            return x.to(applied.device) if is_gate and applied.dtype != x.dtype else applied

        return super()._apply(keep_gate_exact, recurse)


def _low_rank(inputs: int, rank: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), wanted an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")


def _check_one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, wanted one of {allowed}")
