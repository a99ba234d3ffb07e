"""Stage `convolution`: the short convolution and its backward pass. One CTA per (tile of `BT` tokens of a sequence, block of
`BD` channels), whose threads hold a few channels each and go over the tokens in order, so that every input is read once.

Contract (`reference.convolution` is the definition), with `p[t] = bias + sum_j weight[j] x[t - (W - 1) + j]`:

    o     = act(p)
    dp    = do act'(p);   dx[t] = sum_j weight[j] dp[t + (W - 1) - j];   dweight[j] = sum_t dp[t] x[t - (W - 1) + j]
    dbias = sum_t dp[t]

The four taps are `w0` to `w3`, of which the last is the token's own; of fewer the first are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..problem.problem import Problem, Result, Tensors
from ..program.launch import Launch, sm_count
from ..program.program import Outputs, Program, new
from .device.gates import quick_sigmoid
from .device.sequences import OFFSETS_AT_A_TIME, locate_sequence, rows_before, sequence_bounds
from .device.states import everywhere, sequence_slot
from .launch import densed, strided
from .sums import sums


@triton.jit
def own_tile(cu_seqlens, token_tiles, T, N, D, BT, BD: tl.constexpr):
    """The CTA's channels, its sequence, which tile of it, and the sequence's batch row, first and past-the-last token. Tiles of
    packed sequences are chunk slots (`sequences.py: first_chunk_slot`): a tile may lie past its sequence's end."""
    blocks = tl.cdiv(D, BD)
    channel = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    slot = (tl.program_id(0) // blocks).to(tl.int64)
    if cu_seqlens is None:
        n = slot // token_tiles
        tile = slot % token_tiles
    else:
        n = slot * 0
        high = n + N - 1
        while n < high:
            middle = (n + high + 1) // 2
            begin, _ = sequence_bounds(cu_seqlens, middle, T)
            if begin // BT + middle <= slot:
                n = middle
            else:
                high = middle - 1
        begin, _ = sequence_bounds(cu_seqlens, n, T)
        tile = slot - (begin // BT + n)
    batch, begin, end = locate_sequence(n, cu_seqlens, T)
    return channel, n, tile, batch, begin, end


@triton.jit
def load_taps(weight, channel, D, W: tl.constexpr):
    """The filters in fp32, a tensor for each of four taps; those before the first are zeros."""
    tap = tl.arange(0, 4) - (4 - W)
    at = channel[:, None] * W + tap[None, :]
    w = tl.load(weight + at, mask=(channel < D)[:, None] & (tap >= 0)[None, :], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(w, (w.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def only_if(mask, flag):
    """The mask, nothing of it without the scalar `flag` (the interpreter takes no scalar for a mask)."""
    return mask & everywhere(mask.to(tl.int32), flag)


@triton.jit
def load_input(rows, token_stride, position, inside, present):
    """A token's row, zeros if it is not `present`."""
    return tl.load(rows + position * token_stride, mask=only_if(inside, present), other=0.0)


@triton.jit
def load_first(rows, token_stride, start, count, inside, AHEAD: tl.constexpr):
    """The rows of the tokens that are loaded ahead of a tile's loop."""
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead += (load_input(rows, token_stride, start + i, inside, count > i),)  # type: ignore[assignment]
    return ahead


@triton.jit
def load_before(
    rows, token_stride, start, states, input_stride, tile, read, inside, BACK: tl.constexpr, L: tl.constexpr
):
    """The input `BACK` tokens before a tile in fp32: the sequence's, or at its start the state's."""
    own = load_input(rows, token_stride, start - BACK, inside, tile > 0).to(tl.float32)
    present = only_if(inside, (tile == 0) & (read != 0))
    kept = tl.load(states + (L - BACK) * input_stride, mask=present, other=0.0).to(tl.float32)
    return tl.where(only_if(inside, tile > 0), own, kept)


@triton.jit
def filtered(bias, w0, w1, w2, w3, x3, x2, x1, x0, W: tl.constexpr):
    """`bias + w0 x3 + w1 x2 + w2 x1 + w3 x0`. A tap that is not there leaves its input out, which may be infinite."""
    p = bias
    if W >= 4:
        p = tl.fma(w0, x3, p)
    if W >= 3:
        p = tl.fma(w1, x2, p)
    return tl.fma(w3, x0, tl.fma(w2, x1, p))


@triton.jit(do_not_specialize=["T", "N", "token_tiles", "BT", "lowest", "slots", "has_initial", "has_final"])
def convolution_kernel(
    x,
    weight,
    bias,
    o,
    initial,
    final,
    state_indices,
    has_initial_state,
    cu_seqlens,
    lowest,
    slots,
    has_initial,
    has_final,
    T,
    N,
    D,
    token_tiles,
    BT,
    x_batch: tl.int64,
    x_token: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    initial_slot: tl.int64,
    initial_channel: tl.int64,
    initial_input: tl.int64,
    final_slot: tl.int64,
    final_channel: tl.int64,
    final_input: tl.int64,
    W: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`AHEAD` tokens are loaded ahead, and are a turn of the loop: so their registers need no moves."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    channel, n, tile, batch, begin, end = own_tile(cu_seqlens, token_tiles, T, N, D, BT, BD)
    inside = channel < D
    start = begin + tile * BT
    if (tile >= 0) & ((tile == 0) | (start < end)):
        slot, read, stored = sequence_slot(
            state_indices, has_initial_state, n, end - begin, lowest, slots, has_initial, has_final
        )
        w0, w1, w2, w3 = load_taps(weight, channel, D, W)
        b = tl.zeros([BD], tl.float32)
        if bias is not None:
            b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        rows = x + batch * x_batch + channel
        states = initial + slot * initial_slot + channel * initial_channel
        x1 = load_before(rows, x_token, start, states, initial_input, tile, read, inside, 1, L)
        x2 = x1
        x3 = x1
        if W >= 3:
            x2 = load_before(rows, x_token, start, states, initial_input, tile, read, inside, 2, L)
        if W >= 4:
            x3 = load_before(rows, x_token, start, states, initial_input, tile, read, inside, 3, L)
        if (tile == 0) & (stored != 0):
            store_last(
                rows, x_token, initial, final, slot, slot, read, begin, end, channel, inside,
                initial_slot, initial_channel, initial_input, final_slot, final_channel, final_input, L,
            )  # fmt: skip
        count = tl.minimum(end - start, BT).to(tl.int32)
        ahead = load_first(rows, x_token, start, count, inside, AHEAD)
        outputs = o + batch * o_batch + start * o_token + channel
        for first in range(0, count, AHEAD):
            for i in tl.static_range(AHEAD):
                t = first + i
                later = load_input(rows, x_token, start + t + AHEAD, inside, count > t + AHEAD)
                x0 = ahead[0].to(tl.float32)
                p = filtered(b, w0, w1, w2, w3, x3, x2, x1, x0, W)
                if SILU:
                    p *= quick_sigmoid(p)
                tl.store(outputs + t * o_token, p.to(o.dtype.element_ty), mask=only_if(inside, count > t))
                x3 = x2
                x2 = x1
                x1 = x0
                ahead = ahead[1:] + (later,)


@triton.jit
def store_last(
    rows, token_stride, initial, final, slot, final_row, read, begin, end, channel, inside,
    initial_slot, initial_channel, initial_input, final_slot, final_channel, final_input, L: tl.constexpr,
):  # fmt: skip
    """The last `L` inputs of a sequence, and of the state before it in `slot` if it is shorter, to the state after it in
    `final_row`. Both may be one: only the CTA of the first tile reads it."""
    place = tl.arange(0, 4)[None, :]
    position = end - begin - L + place
    present = inside[:, None] & (place < L)
    own = tl.load(rows[:, None] + (begin + position) * token_stride, mask=present & (position >= 0), other=0.0).to(
        tl.float32
    )
    kept = tl.load(
        initial + slot * initial_slot + channel[:, None] * initial_channel + (L + position) * initial_input,
        mask=only_if(present & (position < 0), read != 0),
        other=0.0,
    ).to(tl.float32)
    tl.debug_barrier()  # all threads have read the state
    tl.store(
        final + final_row * final_slot + channel[:, None] * final_channel + place * final_input,
        tl.where(position >= 0, own, kept).to(final.dtype.element_ty),
        mask=present,
    )


@triton.jit(
    do_not_specialize=["T", "N", "token_tiles", "checkpoints", "checkpoint_rows", "lowest", "slots", "has_initial"]
)
def convolution_checkpoints_kernel(
    x,
    initial,
    checkpoint_states,
    checkpoint_offsets,
    checkpoint_indices,
    state_indices,
    has_initial_state,
    cu_seqlens,
    checkpoints,
    checkpoint_rows,
    lowest,
    slots,
    has_initial,
    T,
    N,
    D,
    token_tiles,
    x_batch: tl.int64,
    x_token: tl.int64,
    initial_slot: tl.int64,
    initial_channel: tl.int64,
    initial_input: tl.int64,
    states_row: tl.int64,
    states_channel: tl.int64,
    states_input: tl.int64,
    L: tl.constexpr,
    EVERY: tl.constexpr,
    BD: tl.constexpr,
):
    """The states after some tokens of each sequence, to rows of a buffer: a CTA for each (checkpoint, block of channels). With
    `EVERY` a checkpoint lies before each tile of so many tokens, else after `checkpoint_offsets [N, checkpoints]`."""
    if EVERY:
        channel, n, tile, batch, begin, end = own_tile(cu_seqlens, token_tiles, T, N, D, EVERY, BD)
        offset = tile * EVERY
        due = (tile >= 0) & (begin + offset < end)
        row = rows_before(cu_seqlens, n, T, EVERY, OFFSETS_AT_A_TIME) + tile
    else:
        blocks = tl.cdiv(D, BD)
        channel = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
        mark = (tl.program_id(0) // blocks).to(tl.int64)
        n = mark // checkpoints
        batch, begin, end = locate_sequence(n, cu_seqlens, T)
        offset = tl.load(checkpoint_offsets + mark).to(tl.int64)
        due = (offset > 0) & (offset <= end - begin)
        row = tl.load(checkpoint_indices + mark).to(tl.int64)
    if due & (row >= 0) & (row < checkpoint_rows):
        slot, read, _stored = sequence_slot(
            state_indices, has_initial_state, n, end - begin, lowest, slots, has_initial, 0
        )
        store_last(
            x + batch * x_batch + channel, x_token, initial, checkpoint_states, slot, row, read, begin, begin + offset,
            channel, channel < D, initial_slot, initial_channel, initial_input, states_row, states_channel, states_input, L,
        )  # fmt: skip


@triton.jit
def backward_turn(
    first, tile, steps, own, live, rows, grads, grad_final, grad_initial, target, in_state, x_token, do_token, start, D,
    inside, b, w0, w1, w2, w3, ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias, has_initial, has_final,
    W: tl.constexpr, L: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A token of a tile. `PLAIN`: `AHEAD` of them, all the tile's own, none of which meets a state: no branches, no selects."""
    TOKENS: tl.constexpr = AHEAD if PLAIN else 1
    for i in tl.static_range(TOKENS):
        t = first + i
        coming = (live > t + AHEAD) & (steps > t + AHEAD)
        later = load_input(rows, x_token, start + t + AHEAD, inside, coming)
        later_grad = load_input(grads, do_token, start + t + AHEAD, inside, coming)
        x0 = ahead[0].to(tl.float32)
        p0 = ahead_grads[0].to(tl.float32)
        if SILU:
            p = filtered(b, w0, w1, w2, w3, x3, x2, x1, x0, W)
            s = quick_sigmoid(p)
            p0 *= s * tl.fma(p, 1.0 - s, 1.0)
        if not PLAIN:
            p0 = tl.where(only_if(inside, (live > t) & (steps > t)), p0, 0.0)
        if PLAIN or (tl.minimum(own, live) > t):
            if W >= 4:
                s0 = tl.fma(p0, x3, s0)
            if W >= 3:
                s1 = tl.fma(p0, x2, s1)
            s2 = tl.fma(p0, x1, s2)
            s3 = tl.fma(p0, x0, s3)
            s_bias += p0
        # of the input W - 1 tokens back
        none = tl.zeros_like(p0)
        if W == 4:
            grad = filtered(none, w3, w2, w1, w0, p3, p2, p1, p0, 4)
        elif W == 3:
            grad = filtered(none, w3, w3, w2, w1, p3, p2, p1, p0, 3)
        else:
            grad = filtered(none, w3, w3, w3, w2, p3, p2, p1, p0, 2)
        back = t - (W - 1)
        if not PLAIN:
            place = back - live + L  # in the state after the sequence
            if has_final:
                into = only_if(inside, (place >= 0) & (place < L) & (steps > t))
                grad += tl.load(grad_final + in_state + place, mask=into, other=0.0).to(tl.float32)
            if (tile == 0) & (back < 0) & (has_initial != 0):
                present = only_if(inside, steps > t)
                tl.store(grad_initial + in_state + L + back, grad.to(grad_initial.dtype.element_ty), mask=present)
        stored = only_if(inside, (back >= 0) & (PLAIN or steps > t))
        tl.store(target + back * D, grad.to(target.dtype.element_ty), mask=stored)
        x3 = x2
        x2 = x1
        x1 = x0
        p3 = p2
        p2 = p1
        p1 = p0
        ahead = ahead[1:] + (later,)
        ahead_grads = ahead_grads[1:] + (later_grad,)
    return ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias


@triton.jit(do_not_specialize=["T", "N", "token_tiles", "BT", "has_initial", "has_final"])
def convolution_backward_kernel(
    x,
    weight,
    bias,
    initial,
    cu_seqlens,
    do,
    grad_final,
    dx,
    grad_initial,
    partials,
    has_initial,
    has_final,
    T,
    N,
    D,
    token_tiles,
    BT,
    x_batch: tl.int64,
    x_token: tl.int64,
    do_batch: tl.int64,
    do_token: tl.int64,
    W: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """States and their gradients are dense. `partials [tiles, W (+ 1), D]` has each tile's part of the gradients of weight and
    bias. The gradient of token `t` is there `W - 1` tokens later; those are worked out again by the next tile. Tokens past the
    last sequence have the gradient 0."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    channel, n, tile, batch, begin, end = own_tile(cu_seqlens, token_tiles, T, N, D, BT, BD)
    inside = channel < D
    start = begin + tile * BT
    live = end - start  # tokens from the tile's first to the sequence's last
    limit = live
    if cu_seqlens is not None:
        limit = tl.where(n == N - 1, T - start, live)
    own = tl.minimum(limit, BT)
    steps = own + (W - 1)
    steps = tl.where((tile < 0) | ((tile > 0) & (own <= 0)), 0, steps)
    live = tl.where(tile < 0, 0, live)
    # of what lies beyond the tile only that it does
    own = own.to(tl.int32)
    steps = steps.to(tl.int32)
    live = tl.minimum(live, BT + 8).to(tl.int32)
    w0, w1, w2, w3 = load_taps(weight, channel, D, W)
    b = tl.zeros([BD], tl.float32)
    if bias is not None:
        b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    rows = x + batch * x_batch + channel
    grads = do + batch * do_batch + channel
    in_state = (n * D + channel) * L
    states = initial + in_state
    before = only_if(inside, live > 0)
    x1 = load_before(rows, x_token, start, states, 1, tile, has_initial, before, 1, L)
    x2 = x1
    x3 = x1
    if W >= 3:
        x2 = load_before(rows, x_token, start, states, 1, tile, has_initial, before, 2, L)
    if W >= 4:
        x3 = load_before(rows, x_token, start, states, 1, tile, has_initial, before, 3, L)
    # gradients of earlier tokens' `p`, and the sums
    p1 = tl.zeros([BD], tl.float32)
    p2 = p1
    p3 = p1
    s0 = p1
    s1 = p1
    s2 = p1
    s3 = p1
    s_bias = p1
    # tokens past a sequence's end are not read
    ahead = load_first(rows, x_token, start, live, inside, AHEAD)
    ahead_grads = load_first(grads, do_token, start, live, inside, AHEAD)
    target = dx + (batch * T + start) * D + channel
    # loops of their own, so that what the plain one does not need takes no registers in it
    opening = tl.where((tile == 0) & (has_initial != 0), W - 1, 0)
    plain = opening + tl.maximum(tl.minimum(own, live - 1) - opening, 0) // AHEAD * AHEAD
    for first in range(0, tl.minimum(opening, steps)):
        ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias = backward_turn(
            first, tile, steps, own, live, rows, grads, grad_final, grad_initial, target, in_state, x_token, do_token, start,
            D, inside, b, w0, w1, w2, w3, ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias,
            has_initial, has_final, W, L, AHEAD, SILU, False,
        )  # fmt: skip
    for first in range(opening, plain, AHEAD):
        ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias = backward_turn(
            first, tile, steps, own, live, rows, grads, grad_final, grad_initial, target, in_state, x_token, do_token, start,
            D, inside, b, w0, w1, w2, w3, ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias,
            has_initial, has_final, W, L, AHEAD, SILU, True,
        )  # fmt: skip
    for first in range(plain, steps):
        ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias = backward_turn(
            first, tile, steps, own, live, rows, grads, grad_final, grad_initial, target, in_state, x_token, do_token, start,
            D, inside, b, w0, w1, w2, w3, ahead, ahead_grads, x1, x2, x3, p1, p2, p3, s0, s1, s2, s3, s_bias,
            has_initial, has_final, W, L, AHEAD, SILU, False,
        )  # fmt: skip
    if L == W:  # noqa: SIM102 (a constant, and what is known when it runs)
        # the oldest input of the state only ever becomes that of a sequence without tokens
        if (tile == 0) & (has_initial != 0):
            passed = only_if(inside, (live <= 0) & (has_final != 0))
            grad = tl.load(grad_final + in_state, mask=passed, other=0.0)
            tl.store(grad_initial + in_state, grad.to(grad_initial.dtype.element_ty), mask=inside)
    COLUMNS: tl.constexpr = W if bias is None else W + 1
    sums_at = partials + (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64) * COLUMNS * D + channel
    if W >= 4:
        tl.store(sums_at, s0, mask=inside)
    if W >= 3:
        tl.store(sums_at + (W - 3) * D, s1, mask=inside)
    tl.store(sums_at + (W - 2) * D, s2, mask=inside)
    tl.store(sums_at + (W - 1) * D, s3, mask=inside)
    if bias is not None:
        tl.store(sums_at + W * D, s_bias, mask=inside)


@dataclass(frozen=True)
class ConvolutionConfig:
    """`BT`: tokens of a tile, `BD`: its channels; `ahead`: tokens that a thread loads ahead."""

    BT: int
    BD: int
    num_warps: int
    ahead: int
    max_registers: int


@dataclass(frozen=True)
class Form:
    """Bytes that a thread loads of a token, warps of a CTA, tokens ahead, most registers, and how many CTAs an SM then has."""

    bytes: int
    warps: int
    ahead: int
    max_registers: int
    ctas: int


FORWARD, BACKWARD = Form(8, 2, 4, 96, 10), Form(16, 1, 4, 255, 8)

FEWEST_TOKENS, MOST_TOKENS = 16, 128
"""Of a tile: each reads `W - 1` tokens of the one before, and backward leaves sums to add."""


def convolution_config(
    problem: Problem, device: torch.device, backward: bool = False, form: Form | None = None
) -> ConvolutionConfig:
    """Tiles as long as whole waves of CTAs need them, and not longer than `MOST_TOKENS`."""
    form = form or (BACKWARD if backward else FORWARD)
    wide = 32 * form.bytes // problem.dtype.itemsize
    BD = max(32, min(form.warps * wide, triton.next_power_of_2(problem.D)))
    wave, blocks, tokens = sm_count(device) * form.ctas, -(-problem.D // BD), problem.B * problem.T
    waves = max(1, -(-tokens * blocks // (wave * MOST_TOKENS)))
    BT = -(-tokens // max(1, wave * waves // blocks))
    BT = max(FEWEST_TOKENS, -(-BT // form.ahead) * form.ahead)
    return ConvolutionConfig(BT, BD, max(1, BD // wide), form.ahead, form.max_registers)


def token_tiles(problem: Problem, c: ConvolutionConfig) -> tuple[int, int]:
    """Tiles of a batch row and of all. A sequence without tokens has one."""
    if problem.packed:
        one = problem.T // c.BT + problem.N
        return one, one if problem.N > 0 else 0
    one = max(1, -(-problem.T // c.BT))
    return one, problem.B * one


DENSE = ("weight", "bias", "cu_seqlens", "state_indices", "has_initial_state")
MARKS = ("checkpoint_offsets", "checkpoint_indices")


def constants(problem: Problem, c: ConvolutionConfig, overlaps: bool) -> dict[str, object]:
    sizes = dict(W=problem.taps, L=problem.state_length, BD=c.BD, AHEAD=c.ahead)
    return {**sizes, "SILU": problem.activation == "silu", "OVERLAP": overlaps}


def short_convolution(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    from_, dense = strided(t, ("x",))["x"], densed(t, DENSE)
    o, final = outputs["o"], outputs.get("final_state")
    absent = t.x.new_empty((0, 0, 0), dtype=problem.state_dtype)
    initial = t.initial_state if t.state_pool is None else t.state_pool
    final = final if t.state_pool is None else t.state_pool
    initial, given = absent if initial is None else initial, absent if final is None else final
    c, overlaps = convolution_config(problem, t.device), arch >= 90
    one, tiles = token_tiles(problem, c)
    return [
        # first, as the next launch may store over the states that both read
        *checkpoint_launches(problem, t, from_, initial, c),
        Launch(
            convolution_kernel,
            tiles * -(-problem.D // c.BD),
            (
                *(from_, dense["weight"], dense["bias"], o, initial, given),
                *(dense["state_indices"], dense["has_initial_state"], dense["cu_seqlens"]),
                *(problem.lowest_index, problem.pool_slots, int(problem.has_initial_state), int(final is not None)),
                *(problem.T, problem.N, problem.D, one, c.BT),
                *(*from_.stride()[:2], *o.stride()[:2], *initial.stride(), *given.stride()),
            ),
            constants(problem, c, overlaps),
            c.num_warps,
            c.max_registers,
            overlaps,
        ),
    ]


def checkpoint_launches(
    problem: Problem, t: Tensors, x: Tensor, initial: Tensor, c: ConvolutionConfig
) -> Iterator[Launch]:
    if t.checkpoint_states is None:
        return
    every, dense, buffer = problem.checkpoint_every, densed(t, (*DENSE, *MARKS)), t.checkpoint_states
    one, marks = 1, problem.N * problem.checkpoints
    if every > 0:
        one, marks = token_tiles(problem, replace(c, BT=every))
    yield Launch(
        convolution_checkpoints_kernel,
        marks * -(-problem.D // c.BD),
        (
            *(x, initial, buffer, dense["checkpoint_offsets"], dense["checkpoint_indices"], dense["state_indices"]),
            *(dense["has_initial_state"], dense["cu_seqlens"], problem.checkpoints, buffer.shape[0]),
            *(
                problem.lowest_index,
                problem.pool_slots,
                int(problem.has_initial_state),
                problem.T,
                problem.N,
                problem.D,
            ),
            *(one, *x.stride()[:2], *initial.stride(), *buffer.stride()),
        ),
        dict(L=problem.state_length, EVERY=every, BD=c.BD),
        c.num_warps,
    )


def backward(problem: Problem, t: Tensors, arch: int) -> Program:
    """Gradients by input."""
    outputs = Outputs(t.device)
    return Program(outputs, backward_launches(problem, t, outputs, arch >= 90))


def backward_launches(problem: Problem, t: Tensors, outputs: Outputs, overlaps: bool) -> Iterator[Launch]:
    read, dense = strided(t, ("x", "do")), densed(t, (*DENSE, "initial_state"))
    c = convolution_config(problem, t.device, backward=True)
    one, tiles = token_tiles(problem, c)
    absent = t.x.new_empty(0, dtype=problem.state_dtype)
    dht = t.dht.contiguous() if t.dht is not None and problem.output_final_state else None
    dx = outputs.allocate("x", Result(problem.shape, problem.dtype, zeroed=problem.N == 0))
    dh0 = None
    if t.initial_state is not None:
        dh0 = outputs.allocate("initial_state", Result(tuple(t.initial_state.shape), problem.state_dtype))
    columns = problem.taps + (t.bias is not None)
    partials = new((tiles, columns, problem.D), torch.float32, t.device)
    yield Launch(
        convolution_backward_kernel,
        tiles * -(-problem.D // c.BD),
        (
            *(read["x"], dense["weight"], dense["bias"], or_absent(dense["initial_state"], absent)),
            *(dense["cu_seqlens"], read["do"], or_absent(dht, absent), dx, or_absent(dh0, absent), partials),
            *(int(dh0 is not None), int(dht is not None), problem.T, problem.N, problem.D, one, c.BT),
            *(*read["x"].stride()[:2], *read["do"].stride()[:2]),
        ),
        constants(problem, c, overlaps),
        c.num_warps,
        c.max_registers,
        overlaps,
        scratch=(partials,),
    )
    dweight = outputs.allocate("weight", Result(tuple(t.weight.shape), t.weight.dtype))
    dbias = None if t.bias is None else outputs.allocate("bias", Result((problem.D,), t.bias.dtype))
    yield sums(partials, dweight, dbias, overlaps)


def or_absent(x: Tensor | None, absent: Tensor) -> Tensor:
    return absent if x is None else x
