"""Stage `convolution`: the short convolution and its backward pass. One CTA per (tile of `BT` tokens of a sequence, block of
`BD` channels), whose threads hold a few channels each and go over the tokens in order, so that every input is read once. In the
backward pass `GROUPS` groups of threads have the same channels and a part of the tile's tokens each, and add up their parts of
the filters' gradients; where one tile has all tokens, no sums are left to another launch.

Contract (`reference.convolution` is the definition), with `p[t] = bias + sum_j weight[j] x[t - (W - 1) + j]`:

    o     = act(p)
    dp    = do act'(p);   dx[t] = sum_j weight[j] dp[t + (W - 1) - j];   dweight[j] = sum_t dp[t] x[t - (W - 1) + j]
    dbias = sum_t dp[t]

The four taps are `w0` to `w3`, of which the last is the token's own; of fewer the first are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import ConvolutionProblem, ConvolutionTensors
from ...program.launch import Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import quick_sigmoid
from ..shared.scalars import SCALARS
from ..shared.sequences import OFFSETS_AT_A_TIME, locate_sequence, rows_before, sequence_bounds
from ..shared.states import everywhere, sequence_slot
from ..stages.launch import launch
from .sums import sums


@triton.jit
def own_tile(cu_seqlens, token_tiles, T, N, D, BT, BD):
    """The CTA's channels, its sequence, which tile of it, and the sequence's batch row, first and past-the-last token. Tiles of
    packed sequences are chunk slots (`sequences.py: first_chunk_slot`): a tile may lie past its sequence's end."""
    blocks = tl.cdiv(D, BD)
    channel = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    slot = tl.program_id(0) // blocks
    if cu_seqlens is None:
        n = (slot // token_tiles).to(tl.int64)
        tile = (slot % token_tiles).to(tl.int64)
    else:
        slot = slot.to(tl.int64)
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
def load_filters(weight, channel, D, W):
    """Four taps of each channel; those before the first are zeros."""
    tap = tl.arange(0, 4) - (4 - W)
    at = channel[:, None] * W + tap[None, :]
    return tl.load(weight + at, mask=(channel < D)[:, None] & (tap >= 0)[None, :], other=0.0)


@triton.jit
def taps_of(filters):
    """A tensor in fp32 for each of the four taps. On the way are barriers, so all loads come first."""
    even, odd = tl.split(tl.reshape(filters.to(tl.float32), (filters.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def only_if(mask, flag):
    """The mask, nothing of it without the `flag`, a scalar (the interpreter takes none for a mask) or of each group."""
    return mask & everywhere(mask.to(tl.int32), flag)


@triton.jit
def load_input(rows, token_stride, position, inside, present):
    """A token's row, zeros if it is not `present`."""
    return tl.load(rows + position * token_stride, mask=only_if(inside, present), other=0.0)


@triton.jit
def load_first(rows, token_stride, count, inside, AHEAD):
    """The rows of the tokens that are loaded ahead of a tile's loop."""
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead += (load_input(rows, token_stride, i, inside, count > i),)  # type: ignore[assignment]
    return ahead


@triton.jit
def load_earlier(rows, token_stride, states, input_stride, past, stated, inside, W, L):
    """The inputs 1, 2 and 3 tokens before that of `rows` in fp32, as far as there are taps for them: the sequence's, of which
    `past` are before it, or the state's. `stated`: whether any is the state's."""
    x1 = load_input(rows, token_stride, -1, inside, past >= 1).to(tl.float32)
    x2 = x1
    x3 = x1
    if W >= 3:
        x2 = load_input(rows, token_stride, -2, inside, past >= 2).to(tl.float32)
    if W >= 4:
        x3 = load_input(rows, token_stride, -3, inside, past >= 3).to(tl.float32)
    if stated:
        last = states + (L - 1 + past) * input_stride
        x1 += load_input(last, input_stride, 0, inside, past < 1).to(tl.float32)
        if W >= 3:
            x2 += load_input(last, input_stride, -1, inside, past < 2).to(tl.float32)
        if W >= 4:
            x3 += load_input(last, input_stride, -2, inside, past < 3).to(tl.float32)
    return x1, x2, x3


@triton.jit
def filtered(bias, w0, w1, w2, w3, x3, x2, x1, x0, W):
    """`bias + w0 x3 + w1 x2 + w2 x1 + w3 x0`. A tap that is not there leaves its input out, which may be infinite."""
    p = bias
    if W >= 4:
        p = tl.fma(w0, x3, p)
    if W >= 3:
        p = tl.fma(w1, x2, p)
    return tl.fma(w3, x0, tl.fma(w2, x1, p))


@triton.jit(do_not_specialize=SCALARS)
def convolution_kernel(
    x, weight, bias, o, initial, final, state_indices, has_initial_state,
    cu_seqlens, lowest, slots, has_initial, has_final, T, N,
    D, token_tiles, BT, x_batch: tl.int64, x_token: tl.int64, o_batch: tl.int64, o_token: tl.int64,
    initial_slot: tl.int64, initial_channel: tl.int64, initial_input: tl.int64, final_slot: tl.int64,
    final_channel: tl.int64, final_input: tl.int64,
    W: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`AHEAD` tokens are loaded ahead, and are a turn of the loop: so their registers need no moves. As chosen, a tile has no
    more of them."""
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
        rows = x + batch * x_batch + channel
        own = rows + start * x_token
        count = tl.minimum(end - start, BT).to(tl.int32)
        filters = load_filters(weight, channel, D, W)
        ahead = load_first(own, x_token, count, inside, AHEAD)
        states = initial + slot * initial_slot + channel * initial_channel
        x1, x2, x3 = load_earlier(
            own, x_token, states, initial_input, tile * BT, (tile == 0) & (read != 0), inside, W, L
        )  # fmt: skip
        b = tl.zeros([BD], tl.float32)
        if bias is not None:
            b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        w0, w1, w2, w3 = taps_of(filters)
        if (tile == 0) & (stored != 0):
            store_last(
                rows, x_token, initial, final, slot, slot, read, begin, end, channel, inside,
                initial_slot, initial_channel, initial_input, final_slot, final_channel, final_input, L,
            )  # fmt: skip
        outputs = o + batch * o_batch + start * o_token + channel
        for first in range(0, count, AHEAD):
            # one product a turn
            from_first = own + first * x_token
            to_first = outputs + first * o_token
            for i in tl.static_range(AHEAD):
                t = first + i
                later = load_input(from_first, x_token, i + AHEAD, inside, count > t + AHEAD)
                x0 = ahead[0].to(tl.float32)
                p = filtered(b, w0, w1, w2, w3, x3, x2, x1, x0, W)
                if SILU:
                    p *= quick_sigmoid(p)
                tl.store(to_first + i * o_token, p.to(o.dtype.element_ty), mask=only_if(inside, count > t))
                x3 = x2
                x2 = x1
                x1 = x0
                ahead = ahead[1:] + (later,)


@triton.jit
def store_last(
    rows, token_stride, initial, final, slot, final_row, read, begin, end, channel, inside,
    initial_slot, initial_channel, initial_input, final_slot, final_channel, final_input, L,
):  # fmt: skip
    """The last `L` inputs of a sequence, and of the state before it in `slot` if it is shorter, to the state after it in
    `final_row`. Both may be one: only the CTA of the first tile reads it."""
    place = tl.arange(0, 4)[None, :]
    position = end - begin - L + place
    present = inside[:, None] & (place < L)
    own = tl.load(rows[:, None] + (begin + position) * token_stride, mask=present & (position >= 0), other=0.0)
    own = own.to(tl.float32)
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


@triton.jit(do_not_specialize=SCALARS)
def convolution_checkpoints_kernel(
    x, initial, checkpoint_states, checkpoint_offsets, checkpoint_indices, state_indices, has_initial_state,
    cu_seqlens, checkpoints, checkpoint_rows, lowest, slots, has_initial,
    T, N, D, token_tiles, x_batch: tl.int64, x_token: tl.int64,
    initial_slot: tl.int64, initial_channel: tl.int64, initial_input: tl.int64,
    states_row: tl.int64, states_channel: tl.int64, states_input: tl.int64,
    L: tl.constexpr, EVERY: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
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
            channel, channel < D, initial_slot, initial_channel, initial_input, states_row, states_channel,
            states_input, L,
        )  # fmt: skip


@triton.jit
def gradient_before(w0, w1, w2, w3, p3, p2, p1, p0, W):
    """The gradient of the input `W - 1` tokens back."""
    none = tl.zeros_like(p0)
    if W == 4:
        grad = filtered(none, w3, w2, w1, w0, p3, p2, p1, p0, 4)
    elif W == 3:
        grad = filtered(none, w3, w3, w2, w1, p3, p2, p1, p0, 3)
    else:
        grad = filtered(none, w3, w3, w3, w2, p3, p2, p1, p0, 2)
    return grad


@triton.jit
def backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, PLAIN):
    """A token of each group. `PLAIN`: `AHEAD` of them, all the groups' own, none of which meets a state: no branches, no
    selects. Returns what the next turn gets as `carried`, and the gradients of these tokens' `p`."""
    tile, length, group, steps, own, live, channels, inside = places
    rows, grads, target, x_token, do_token, D = memory
    has_initial, has_final, in_state, grad_initial, grad_final = states
    b, w0, w1, w2, w3 = taps
    ahead, ahead_grads, earlier, grads_of_p, parts = carried
    x1, x2, x3 = earlier
    p1, p2, p3 = grads_of_p
    s0, s1, s2, s3, s_bias = parts
    TOKENS: tl.constexpr = AHEAD if PLAIN else 1
    found = ()
    loaded = tl.minimum(live, steps)
    # one product a turn
    rows += first * x_token
    grads += first * do_token
    target += first * D
    for i in tl.static_range(TOKENS):
        t = first + i
        later = load_input(rows, x_token, i + AHEAD, inside, loaded > t + AHEAD)
        later_grad = load_input(grads, do_token, i + AHEAD, inside, loaded > t + AHEAD)
        x0 = ahead[0].to(tl.float32)
        p0 = ahead_grads[0].to(tl.float32)
        if SILU:
            p = filtered(b, w0, w1, w2, w3, x3, x2, x1, x0, W)
            s = quick_sigmoid(p)
            p0 *= s * tl.fma(p, 1.0 - s, 1.0)
        if PLAIN:
            if W >= 4:
                s0 = tl.fma(p0, x3, s0)
            if W >= 3:
                s1 = tl.fma(p0, x2, s1)
            s2 = tl.fma(p0, x1, s2)
            s3 = tl.fma(p0, x0, s3)
            s_bias += p0
        else:
            p0 = tl.where(only_if(inside, loaded > t), p0, 0.0)
            # a product that does not count may be NaN
            counts = only_if(inside, tl.minimum(own, live) > t)
            if W >= 4:
                s0 = tl.where(counts, tl.fma(p0, x3, s0), s0)
            if W >= 3:
                s1 = tl.where(counts, tl.fma(p0, x2, s1), s1)
            s2 = tl.where(counts, tl.fma(p0, x1, s2), s2)
            s3 = tl.where(counts, tl.fma(p0, x0, s3), s3)
            s_bias = tl.where(counts, s_bias + p0, s_bias)
        grad = gradient_before(w0, w1, w2, w3, p3, p2, p1, p0, W)
        back = t - (W - 1)
        found += (p0,)  # type: ignore[assignment]
        if not PLAIN:
            if (tile == 0) & (back < 0) & (has_initial != 0):
                # of the first group, in a layout that this branch alone takes
                of_first = tl.sum(tl.where(group == 0, grad, 0.0), axis=0)
                if has_final:
                    place = back - length + L
                    into = only_if(channels < D, (place >= 0) & (place < L))
                    of_first += tl.load(grad_final + in_state + place, mask=into, other=0.0).to(tl.float32)
                at = in_state + L + back
                tl.store(grad_initial + at, of_first.to(grad_initial.dtype.element_ty), mask=channels < D)
            if has_final:
                place = back - live + L  # in the state after the sequence
                into = only_if(inside, (place >= 0) & (place < L) & (steps > t))
                grad += tl.load(grad_final + in_state[None, :] + place, mask=into, other=0.0).to(tl.float32)
        stored = only_if(inside, back >= 0)
        if not PLAIN:
            stored = only_if(stored, steps > t)
        tl.store(target + (i - (W - 1)) * D, grad.to(target.dtype.element_ty), mask=stored)
        x3 = x2
        x2 = x1
        x1 = x0
        p3 = p2
        p2 = p1
        p1 = p0
        ahead = ahead[1:] + (later,)
        ahead_grads = ahead_grads[1:] + (later_grad,)
    return (ahead, ahead_grads, (x1, x2, x3), (p1, p2, p3), (s0, s1, s2, s3, s_bias)), found


@triton.jit
def store_sums(to, channel, channel_stride, tap_stride, D, s0, s1, s2, s3, W):
    """Stores all groups' sums, the filters' gradients, always added in the same order."""
    joined = tl.join(tl.join(s0, s2), tl.join(s1, s3))
    total = tl.sum(tl.reshape(joined, (s0.shape[0], s0.shape[1], 4)), axis=0)
    tap = tl.arange(0, 4) - (4 - W)
    at = channel[:, None] * channel_stride + tap[None, :] * tap_stride
    tl.store(to + at, total.to(to.dtype.element_ty), mask=(channel < D)[:, None] & (tap >= 0)[None, :])


@triton.jit(do_not_specialize=SCALARS)
def convolution_backward_kernel(
    x, weight, bias, initial, cu_seqlens, do, grad_final,
    dx, grad_initial, partials, grad_weight, grad_bias, has_initial, has_final,
    T, N, D, token_tiles, BT, x_batch: tl.int64, x_token: tl.int64, do_batch: tl.int64, do_token: tl.int64,
    W: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, GROUPS: tl.constexpr, EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr, SILU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """States and their gradients are dense. `partials [tiles, W (+ 1), D]` has each tile's part of the gradients of weight and
    bias; without it the one tile stores them. Each group has as many of the tile's tokens as another, or one more. The gradient
    of token `t` is there `W - 1` tokens later, which are the next group's: each group works them out again, or with `EXCHANGE`
    takes from the next one what that has found for them (one tile of a whole sequence, no states, `AHEAD` tokens per group at
    least). Tokens past the last sequence have the gradient 0."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    channels, n, tile, batch, begin, end = own_tile(cu_seqlens, token_tiles, T, N, D, BT, BD)
    channel = channels[None, :]
    group = tl.arange(0, GROUPS)[:, None]
    inside = (channel < D) & (group >= 0)
    start = begin + tile * BT
    live = end - start  # tokens from the tile's first to the sequence's last
    limit = live
    if cu_seqlens is not None:
        limit = tl.where(n == N - 1, T - start, live)
    # of what lies beyond the tile only that it does
    tokens = tl.maximum(tl.minimum(limit, BT), 0).to(tl.int32)
    live = tl.minimum(live, BT + 8).to(tl.int32)
    if tile < 0:
        tokens = 0
        live = 0
    shortest = tokens // GROUPS
    opens = tl.where(tile == 0, 1, 0)
    most = tl.where((tokens > 0) | (tile == 0), (tokens + GROUPS - 1) // GROUPS + (W - 1), 0)
    length = live
    live_of_last = live - tokens * (GROUPS - 1) // GROUPS
    # from here on of each group
    skipped = tokens * group // GROUPS
    own = tokens * (group + 1) // GROUPS - skipped
    live = live - skipped
    steps = own
    if not EXCHANGE:
        steps = tl.where((own > 0) | ((group == 0) & (opens != 0)), own + (W - 1), 0)
    past = tile * BT + skipped
    start = start + skipped
    rows = x + batch * x_batch + start * x_token + channel
    grads = do + batch * do_batch + start * do_token + channel
    # tokens past a sequence's end are not read
    loaded = tl.minimum(live, steps)
    filters = load_filters(weight, channels, D, W)
    ahead = load_first(rows, x_token, loaded, inside, AHEAD)
    ahead_grads = load_first(grads, do_token, loaded, inside, AHEAD)
    in_state = (n * D + channels) * L
    stated = (tile == 0) & (has_initial != 0) & (not EXCHANGE)
    before = only_if(inside, loaded > 0)
    x1, x2, x3 = load_earlier(rows, x_token, initial + in_state[None, :], 1, past, stated, before, W, L)
    b = tl.zeros([1, BD], tl.float32)
    if bias is not None:
        b = tl.load(bias + channel, mask=channel < D, other=0.0).to(tl.float32)
    w0, w1, w2, w3 = taps_of(filters)
    w0 = w0[None, :]
    w1 = w1[None, :]
    w2 = w2[None, :]
    w3 = w3[None, :]
    target = dx + (batch * T + start) * D + channel
    places = (tile, length, group, steps, own, live, channels, inside)
    memory = (rows, grads, target, x_token, do_token, D)
    taps = (b, w0, w1, w2, w3)
    none = tl.zeros([GROUPS, BD], tl.float32)
    # with the gradients of earlier tokens' `p`, and the sums
    carried = (ahead, ahead_grads, (x1, x2, x3), (none, none, none), (none, none, none, none, none))
    if EXCHANGE:
        states = (0, 0, in_state, grad_initial, grad_final)
        carried, found = backward_turn(tokens * 0, places, memory, states, taps, carried, W, L, AHEAD, SILU, True)
        plain = shortest // AHEAD * AHEAD
        for first in range(AHEAD, plain, AHEAD):
            carried, _ = backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, True)
        for first in range(plain, (tokens + GROUPS - 1) // GROUPS):
            last1, last2, last3 = carried[3]  # of groups that are done
            carried, _ = backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, False)
            p1, p2, p3 = carried[3]
            kept = (
                tl.where(own > first, p1, last1),
                tl.where(own > first, p2, last2),
                tl.where(own > first, p3, last3),
            )
            carried = (carried[0], carried[1], carried[2], kept, carried[4])
        # the first gradients of `p` of the next group; past the sequence there are none
        target += own.to(tl.int64) * D
        p1, p2, p3 = carried[3]
        following = tl.broadcast_to(tl.minimum(group + 1, GROUPS - 1), (GROUPS, BD))
        for i in tl.static_range(W - 1):
            p0 = tl.where(group < GROUPS - 1, tl.gather(found[i], following, axis=0), 0.0)
            grad = gradient_before(w0, w1, w2, w3, p3, p2, p1, p0, W)
            tl.store(target + (i - (W - 1)) * D, grad.to(dx.dtype.element_ty), mask=inside)
            p3 = p2
            p2 = p1
            p1 = p0
    else:
        states = (has_initial, has_final, in_state, grad_initial, grad_final)
        # loops of their own, so that what the plain one does not need takes no registers in it
        opening = tl.where((tile == 0) & (has_initial != 0), W - 1, 0)
        plain = opening + tl.maximum(tl.minimum(shortest, live_of_last - (L - W + 1)) - opening, 0) // AHEAD * AHEAD
        for first in range(0, tl.minimum(opening, most)):
            carried, _ = backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, False)
        for first in range(opening, plain, AHEAD):
            carried, _ = backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, True)
        for first in range(plain, most):
            carried, _ = backward_turn(first, places, memory, states, taps, carried, W, L, AHEAD, SILU, False)
    s0, s1, s2, s3, s_bias = carried[4]
    if L == W and not EXCHANGE:  # noqa: SIM102 (a constant, and what is known when it runs)
        # the oldest input of the state only ever becomes that of a sequence without tokens
        if (tile == 0) & (has_initial != 0):
            passed = only_if(channels < D, (begin >= end) & (has_final != 0))
            grad = tl.load(grad_final + in_state, mask=passed, other=0.0)
            tl.store(grad_initial + in_state, grad.to(grad_initial.dtype.element_ty), mask=channels < D)
    if partials is None:
        store_sums(grad_weight, channels, W, 1, D, s0, s1, s2, s3, W)
        if bias is not None:
            total = tl.sum(s_bias, axis=0)
            tl.store(grad_bias + channels, total.to(grad_bias.dtype.element_ty), mask=channels < D)
    else:
        COLUMNS: tl.constexpr = W if bias is None else W + 1
        sums_at = partials + (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64) * COLUMNS * D
        store_sums(sums_at, channels, 1, D, D, s0, s1, s2, s3, W)
        if bias is not None:
            tl.store(sums_at + W * D + channels, tl.sum(s_bias, axis=0), mask=channels < D)


@dataclass(frozen=True)
class ConvolutionConfig:
    """`BT`: tokens of a tile, `W - 1` at least, `BD`: its channels; `AHEAD`: tokens that a thread loads ahead; `GROUPS` of
    threads that share the tile's tokens (backward)."""

    BT: int
    BD: int
    num_warps: int
    AHEAD: int
    max_registers: int | None
    GROUPS: int = 1


THREAD_BYTES = 8
"""Bytes that a thread loads of a token."""

FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Fewest and most tokens of a group of a tile: each reads `W - 1` tokens of the one before."""

NARROWEST = 64
"""Bytes of a row that a CTA of the backward pass reads at least: two sectors."""

MOST_AT_ONCE = 256
"""Tokens of a group, if one tile has all tokens."""


def convolution_config(problem: ConvolutionProblem, device: torch.device, backward: bool = False) -> ConvolutionConfig:
    """Chooses sizes. Tiles of the backward pass are as long as whole waves of CTAs need them, and about `MOST_TOKENS` a group
    at most. An SM has three of its CTAs of four warps."""
    whole = triton.next_power_of_2(problem.D)
    of_warp = 32 * THREAD_BYTES // problem.dtype.itemsize  # channels, if all threads have their own
    if not backward:
        # a tile has the tokens that are loaded at once
        BD = max(32, min(2 * of_warp, whole))
        return ConvolutionConfig(16, BD, max(1, BD // of_warp), AHEAD=16, max_registers=128)
    wave, most, narrowest = 3 * sm_count(device), 4 * of_warp, NARROWEST // problem.dtype.itemsize
    # one tile with all tokens leaves no sums to add, if blocks of some channels fill one wave
    BD = max(narrowest, min(most, triton.next_power_of_2(-(-problem.D // wave))))
    fits = problem.B == 1 and not problem.packed and MOST_AT_ONCE * (most // BD) >= problem.T
    if fits and 0.85 * wave < -(-problem.D // BD) <= wave:
        # with states six tokens ahead spill more than four
        ahead = 4 if problem.has_initial_state or problem.output_final_state else 6
        return ConvolutionConfig(max(1, problem.T), BD, 4, ahead, max_registers=168, GROUPS=most // BD)
    BD = max(narrowest, min(4 * narrowest, whole))
    tokens, groups, blocks = problem.B * problem.T, most // BD, -(-problem.D // BD)
    waves = max(1, -(-tokens * blocks // (wave * MOST_TOKENS * groups)))
    BT, unit = -(-tokens // max(1, wave * waves // blocks)), 4 * groups
    BT = max(FEWEST_TOKENS * groups, -(-BT // unit) * unit)
    return ConvolutionConfig(BT, BD, 4, AHEAD=4, max_registers=168, GROUPS=groups)


def token_tiles(problem: ConvolutionProblem, c: ConvolutionConfig) -> tuple[int, int]:
    """Tiles of a batch row and of all. A sequence without tokens has one."""
    if problem.packed:
        one = problem.T // c.BT + problem.N
        return one, one if problem.N > 0 else 0
    one = max(1, -(-problem.T // c.BT))
    return one, problem.B * one


def arguments(problem: ConvolutionProblem, c: ConvolutionConfig, states: dict[str, Tensor | None]) -> dict[str, Any]:
    """Arguments that the kernels take under other names than the call's. `states`: an empty tensor stands for one that is not
    there."""
    absent = torch.empty((0, 0, 0), dtype=problem.state_dtype, device="meta")
    found = {name: absent if x is None else x for name, x in states.items()}
    axes = ("slot", "channel", "input")
    strides = {f"{name}_{axis}": s for name, x in found.items() for axis, s in zip(axes, x.stride())}
    one, tiles = token_tiles(problem, c)
    return dict(
        **dict(found | strides, slots=problem.pool_slots, SILU=problem.activation == "silu"),
        **dict(ctas=tiles * -(-problem.D // c.BD), token_tiles=one),
    )


def short_convolution(problem: ConvolutionProblem, t: ConvolutionTensors, arch: int, outputs: Outputs) -> list[Launch]:
    initial, final = t.initial_state, outputs.get("final_state")
    if t.state_pool is not None:
        initial = final = t.state_pool
    c = convolution_config(problem, t.device)
    own = arguments(problem, c, dict(initial=initial, final=final))
    own |= dict(o=outputs["o"], has_initial=problem.has_initial_state, has_final=final is not None)
    return [
        # first, as the next launch may store over the states that both read
        *checkpoint_launches(problem, t, own, c),
        launch(convolution_kernel, own["ctas"], problem, t, own, c, overlaps=arch >= 90),
    ]


def checkpoint_launches(problem: ConvolutionProblem, t: ConvolutionTensors, own: dict, c: Any) -> Iterator[Launch]:
    if t.checkpoint_states is None:
        return
    every, buffer = problem.checkpoint_every, t.checkpoint_states
    one, marks = 1, problem.N * problem.checkpoints
    if every > 0:
        one, marks = token_tiles(problem, replace(c, BT=every))
    strides = dict(zip(("states_row", "states_channel", "states_input"), buffer.stride()))
    own = dict(own, **strides, checkpoint_rows=buffer.shape[0], token_tiles=one, EVERY=every)
    c = replace(c, max_registers=None)
    yield launch(convolution_checkpoints_kernel, marks * -(-problem.D // c.BD), problem, t, own, c)


def backward(problem: ConvolutionProblem, t: ConvolutionTensors, arch: int, outputs: Outputs) -> Iterator[Launch]:
    """Gradients by input."""
    c = convolution_config(problem, t.device, backward=True)
    _, tiles = token_tiles(problem, c)
    dht = t.dht if problem.output_final_state else None
    outputs["x"] = dx = t.memory.new(problem.shape, problem.dtype, zeroed=problem.N == 0)
    dh0 = None
    if t.initial_state is not None:
        outputs["initial_state"] = dh0 = t.memory.new(t.initial_state.shape, problem.state_dtype)
    outputs["weight"] = dweight = t.memory.new(t.weight.shape, t.weight.dtype)
    dbias = None
    if t.bias is not None:
        outputs["bias"] = dbias = t.memory.new((problem.D,), t.bias.dtype)
    columns = problem.taps + (t.bias is not None)
    # a tile alone has the whole sums
    partials = None if tiles == 1 else t.memory.new((tiles, columns, problem.D), torch.float32)
    grad_weight, grad_bias = (dweight, dbias) if partials is None else (None, None)
    own = dict(
        **arguments(problem, c, dict(initial=t.initial_state, grad_final=dht, grad_initial=dh0)),
        **dict(dx=dx, partials=partials, grad_weight=grad_weight, grad_bias=grad_bias),
        **dict(has_initial=dh0 is not None, has_final=dht is not None),
        EXCHANGE=tiles == 1 and dh0 is None and dht is None and not problem.packed and c.AHEAD * c.GROUPS <= problem.T,
    )
    yield launch(convolution_backward_kernel, own["ctas"], problem, t, own, c, overlaps=arch >= 90)
    if partials is not None:
        yield sums(partials, dweight, dbias, arch >= 90)
