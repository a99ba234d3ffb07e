"""Checks of `nn.KimiDeltaAttention`, on any device: sequences side by side, packed, and in slots of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdelta.nn import KimiDeltaAttention

from .oracle import assert_close

HIDDEN = 48
LENGTHS = (7, 1, 40, 2)


def make_layer(dtype: torch.dtype, device: str = "cpu", seed: int = 0, **arguments) -> KimiDeltaAttention:
    torch.manual_seed(seed)
    arguments = {"num_heads": 2, "num_v_heads": 4, "head_dim": 32, "chunk_size": 32, "conv_bias": True, **arguments}
    layer = KimiDeltaAttention(HIDDEN, **arguments).to(device, dtype)
    with torch.no_grad():
        if layer.conv_bias is not None:
            layer.conv_bias.uniform_(-0.5, 0.5)
        layer.o_norm.uniform_(0.5, 1.5)
    return layer


def rows(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, HIDDEN, generator=source, dtype=torch.float64).to(device, dtype)


@torch.no_grad()
def check_packed(layer: KimiDeltaAttention, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """Packed sequences are the sequences by themselves, with their caches too."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    x, later = (rows(1, n, dtype=dtype, device=device) for n in (sum(LENGTHS), len(LENGTHS)))
    y, cache = layer(x, return_cache=True, cu_seqlens=offsets)
    each = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device)
    again, _ = layer(later, cache, cu_seqlens=each)
    for n, part in enumerate(x.split(LENGTHS, dim=1)):
        alone, own = layer(part, return_cache=True)
        assert_close("y", y[:, offsets[n] : offsets[n + 1]], alone.double(), tolerance)
        assert_close("conv", cache.conv[n : n + 1], own.conv.double(), tolerance)
        assert_close("again", again[:, n : n + 1], layer(later[:, n : n + 1], own)[0].double(), tolerance)


@torch.no_grad()
def check_pool(layer: KimiDeltaAttention, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """Prefill, tokens one by one (`fused_kda_decode`), a chunk more: as with caches. Slots of others stay."""
    slots = torch.tensor([5, 2, 7, 0], dtype=torch.int32, device=device)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    pool = layer.make_pool(9, state_dtype=state)
    for x in (pool.conv, pool.state):
        x.fill_(3.0)  # what sequences that start anew do not see
    others = [1, 3, 4, 6, 8]
    x = rows(4, 60, dtype=dtype, device=device)
    fresh = torch.ones(4, dtype=torch.bool, device=device)
    cache, begin = None, 0
    for tokens in (37, 1, 1, 1, 20):
        part = x[:, begin : begin + tokens]
        want, cache = layer(part, cache, return_cache=True)
        starts = {"has_initial_state": ~fresh} if begin == 0 else {}
        y, none = layer(part, pool=pool, slots=slots, **starts)
        assert none is None
        assert_close(f"tokens from {begin}", y, want.double(), tolerance)
        begin += tokens
    assert_close("conv", pool.conv[slots.long()], cache.conv.double(), tolerance)
    assert_close("state", pool.state[slots.long()].mT, cache.state.double(), tolerance)
    assert pool.conv[others].eq(3.0).all() and pool.state[others].eq(3.0).all()
    anew, _ = layer(x[:, :1], pool=pool, slots=slots, has_initial_state=~fresh)
    assert_close("a first token alone", anew, layer(x[:, :1])[0].double(), tolerance)


@torch.no_grad()
def check_joining(layer: KimiDeltaAttention, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """Sequences join and leave a batch of slots between steps, in rows with padding: each has its own outputs."""
    pool = layer.make_pool(4, state_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    prompts = [rows(1, n, dtype=dtype, device=device) for n in (9, 14, 11)]
    steps = {0: [0], 1: [0, 1], 2: [1], 3: [1, 2], 4: [2]}
    caches: dict[int, object] = {}
    for step, running in steps.items():
        x = rows(3, 1 + step, dtype=dtype, device=device)[:, -1:]
        for n in running:
            if n not in caches:
                slots, new = torch.tensor([n], device=device), torch.tensor([False], device=device)
                layer(prompts[n], pool=pool, slots=slots, has_initial_state=new)
                caches[n] = layer(prompts[n], return_cache=True)[1]
        slots = torch.tensor([*running, *[-1] * (3 - len(running))], device=device)
        y, _ = layer(x, pool=pool, slots=slots)
        for row, n in enumerate(running):
            want, caches[n] = layer(x[row : row + 1], caches[n], return_cache=True)
            assert_close(f"sequence {n}", y[row : row + 1], want.double(), tolerance)
