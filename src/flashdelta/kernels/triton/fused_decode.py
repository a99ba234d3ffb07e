"""Stage `fused_decode`: a step of the layer between its projections. One CTA per (sequence, query/key head), which has all
value heads of that head and all of their channels.

Contract (`reference.fused_decode` is the definition):

    q, k, v = silu(bias + sum_j weight[j] x[t - (W - 1) + j])
    S_t, o_t = decode(S_(t-1), q, k, v, g, beta)
    y_t      = o_t / sqrt(mean(o_t^2) + eps) * norm_weight * sigmoid(z_t)

So no CTA reads what another one writes. The windows of q and k, which value heads of a group share, are read and written by one
CTA, which writes them when it has read them for the last time; so are those of v, as the norm needs all channels of a head
anyway. Inputs are read again from token to token: they lie in the L1 cache.

Memory bounds the kernel, as it does `decode`. A state is one tile, all of which is in flight while convolution, norms and
gate are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import FusedProblem, FusedTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ..shared.gates import decay_rate, head_bias, sigmoid
from ..shared.mma import stacked
from ..shared.products import summand
from ..shared.records import COUNTS, open_record
from ..shared.scalars import SCALARS
from ..shared.sequences import end_of_few, own_work_tile
from ..shared.states import everywhere, last_accepted, named_slot, placed, start_slot, state_offsets, target_slot
from ..stages.decode import DECODE_FEW, fused_arguments
from ..stages.launch import Config, launch
from .decode import factors, load_tile, record, step, store_tile


@triton.jit
def part(x, first, C):
    """`C` elements of a vector from `first` on, in a layout of their own: that of the vector would become the state's."""
    return tl.gather(x, first + tl.arange(0, C), 0)


@triton.jit
def convolved(inputs, window, filters, bias, t, token_stride, place_stride, tap_stride, live, C, W, SINGLE):
    """`silu(conv(x)) [C]` of token `t`, and the inputs that it is made of, its own last. `inputs [C]` point to the sequence's
    first token; what lies before that is in its `window`. `SINGLE`: `t` is 0."""
    each = tl.arange(0, C)
    p = tl.zeros([C], tl.float32)
    if bias is not None:
        p += tl.load(bias).to(tl.float32)
    rows = ()
    for tap in tl.static_range(W):
        position = t + (tap - (W - 1))
        if SINGLE and tap == W - 1:
            row = tl.load(inputs).to(tl.float32)
        elif SINGLE:
            row = tl.load(window + tap * place_stride, mask=everywhere(each, live), other=0.0).to(tl.float32)
        else:
            own = tl.load(inputs + position * token_stride, mask=everywhere(each, position >= 0), other=0.0)
            before = everywhere(each, live & (position < 0))
            kept = tl.load(window + (t + tap) * place_stride, mask=before, other=0.0)
            row = tl.where(everywhere(each, position >= 0), own.to(tl.float32), kept.to(tl.float32))
        rows = rows + (row,)
        p = tl.fma(tl.load(filters + tap * tap_stride).to(tl.float32), row, p)
    return p * sigmoid(p), rows


@triton.jit
def roll_one(window, rows, place_stride, live, C, W):
    """Moves the window of one token on, by one place."""
    for tap in tl.static_range(1, W):
        row = rows[tap].to(window.dtype.element_ty)
        tl.store(window + (tap - 1) * place_stride, row, mask=everywhere(tl.arange(0, C), live))


@triton.jit
def roll(inputs, window, start, count, token_stride, place_stride, live, C, W):
    """Moves the window on by `count` tokens: it gets the last `W - 2` inputs before them, then the tokens. It began at `start`,
    and the next window's places begin at `window`."""
    mask = everywhere(tl.arange(0, C), live & (count > 0))
    kept = ()
    for place in tl.static_range(W - 2):
        kept = kept + (tl.load(start + (place + 1) * place_stride, mask=mask, other=0.0),)
    tl.debug_barrier()  # all threads have read the window
    for place in tl.static_range(W - 2):
        tl.store(window + place * place_stride, kept[place], mask=mask)
    for t in range(0, count):
        row = tl.load(inputs + t * token_stride).to(window.dtype.element_ty)
        tl.store(window + (W - 2 + t) * place_stride, row, mask=mask)


@triton.jit
def load_tiles(states, key, read, K, V, TILES, V_FIRST, STREAM):
    """A head's state `S^T` as tiles `[V / TILES, K]`, all under way at once."""
    BV: tl.constexpr = V // TILES
    at = state_offsets(0, tl.arange(0, BV), key, K, V, V_FIRST)
    tiles = ()
    for i in tl.static_range(TILES):
        tiles = tiles + (load_tile(states + i * (BV * K if V_FIRST else BV), at, read, STREAM),)
    return tiles


@triton.jit
def store_tiles(states, tiles, key, stored, K, V, V_FIRST, STREAM):
    BV: tl.constexpr = V // len(tiles)
    at = state_offsets(0, tl.arange(0, BV), key, K, V, V_FIRST)
    for i in tl.static_range(len(tiles)):
        store_tile(states + i * (BV * K if V_FIRST else BV), at, tiles[i], stored, STREAM)


@triton.jit
def step_tiles(tiles, row_v, token, V, A_THREAD):
    """Tiles after a token in fp32, its output `[V]`, and what it wrote, by tiles."""
    BV: tl.constexpr = V // len(tiles)
    after = ()
    outs = ()
    written = ()
    for i in tl.static_range(len(tiles)):
        tile, out, wrote = step(tiles[i].to(tl.float32), part(row_v, i * BV, BV), token, A_THREAD)
        after = after + (tile,)
        outs = outs + (out,)
        written = written + (wrote,)
    return after, joined(outs), written


@triton.jit
def joined(rows):
    """The vectors one after another; of their number a power of two."""
    if len(rows) == 1:
        row = rows[0]
    else:
        pairs = ()
        for i in tl.static_range(len(rows) // 2):
            pairs = pairs + (stacked(rows[2 * i], rows[2 * i + 1]),)
        row = joined(pairs)
    return row


@triton.jit
def store_normed(o, out, norm_weight, z, live, eps, V):
    """Stores the gated norm of a row `out [V]`, zeros for a null sequence."""
    value = tl.arange(0, V)
    out = part(out, 0, V)
    row_z = tl.load(z + value).to(tl.float32)
    weight = tl.load(norm_weight + value).to(tl.float32)
    norm = 1.0 / tl.sqrt(tl.sum(summand(out, out)) / V + eps)
    y = tl.where(everywhere(value, live), out * norm * weight * sigmoid(row_z), 0.0)
    tl.store(o + value, y.to(o.dtype.element_ty))


@triton.jit(do_not_specialize=SCALARS)
def fused_decode_kernel(
    q, k, v, weight, bias, conv_state, g, beta, A_log, dt_bias, z, norm_weight, cu_seqlens, o,
    initial_state, final_state, starts, targets, accepted, lowest, slots, target_slots,
    start_pitch: tl.int64, target_pitch: tl.int64, target_step: tl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, eps, T, H,
    key_channels, value_channels, key_taps, value_taps, weight_channel, weight_tap,
    conv_slot: tl.int64, conv_channel: tl.int64, conv_place: tl.int64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    z_batch: tl.int64, z_token: tl.int64, z_head: tl.int64, o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    CHANNELS: tl.constexpr, SINGLE: tl.constexpr, STREAM: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    L2NORM: tl.constexpr, V_FIRST: tl.constexpr, EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`SINGLE`: one token per sequence. `EACH`: 0 for the state after the last token in place, 1 for those after each in slots
    of a pool, 3 for what each changes in rows of a buffer. Channels of k and v come `key_channels` and `value_channels`
    after those of q, and their filters `key_taps` and `value_taps` elements. `CHANNELS`: those of a window are dense."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    _slice, qk_head, n, batch, begin, end = own_work_tile(cu_seqlens, T, H, 1)
    end = end_of_few(begin, end, most_tokens)
    there = begin < end
    length = (end - begin).to(tl.int32)
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    BV: tl.constexpr = V // TILES
    PITCH: tl.constexpr = BV * K if V_FIRST else BV
    A_THREAD: tl.constexpr = 4 if V_FIRST else 128 // initial_state.dtype.element_ty.primitive_bitwidth
    in_tile = state_offsets(0, tl.arange(0, BV), key, K, V, V_FIRST)
    of_q = qk_head.to(tl.int32) * K + key

    slot, live, _read = start_slot(
        *(starts, starts, accepted, None, n, there, 1, start_row, start_token, start_row),
        *(most_tokens, lowest, slots, slots, EACH == 1),
    )
    first, known = last_accepted(accepted, n, most_tokens)
    first = first.to(tl.int64)
    window_slot = slot
    if EACH == 1:
        window_slot, _named = named_slot(starts, n * start_row, lowest, slots)
    own_row = slot
    # the number of no slot may lead beyond every address
    slot = tl.where(live, slot, 0)
    windows = conv_state + tl.where(live, window_slot, 0) * conv_slot
    to_q = windows + placed(of_q, conv_channel, CHANNELS)
    to_k = windows + placed(of_q + key_channels, conv_channel, CHANNELS)
    from_q = to_q + first * conv_place
    from_k = to_k + first * conv_place
    x_q = q + batch * q_batch + qk_head * q_head + begin * q_token + key
    x_k = k + batch * k_batch + qk_head * k_head + begin * k_token + key
    w_q = weight + of_q * weight_channel
    w_k = w_q + key_taps
    b_q = None
    b_k = None
    if bias is not None:
        b_q = bias + of_q
        b_k = b_q + key_channels

    for member in range(GROUP):
        head = qk_head * GROUP + member
        of_v = head.to(tl.int32) * V + value
        to_v = windows + placed(of_v + value_channels, conv_channel, CHANNELS)
        from_v = to_v + first * conv_place
        x_v = v + batch * v_batch + head * v_head + begin * v_token + value
        w_v = weight + value_taps + of_v * weight_channel
        b_v = None
        if bias is not None:
            b_v = bias + value_channels + of_v
        gates = g + batch * g_batch + head * g_head + begin * g_token + key
        betas = beta + batch * beta_batch + head * beta_head + begin * beta_token
        output_gates = z + batch * z_batch + head * z_head + begin * z_token
        outputs = o + batch * o_batch + head * o_head + begin * o_token
        rate = decay_rate(A_log, head)
        shift = head_bias(dt_bias, head, key, K)
        if EACH == 3:
            states, has_row = open_record(
                *(final_state, starts, targets, n, head, own_row, tl.where(there, length, 0), 0),
                *(start_row, target_row, target_pitch, lowest, slots, tl.where(known, target_slots, 0)),
                *(tl.arange(0, COUNTS), K, V),
            )
        else:
            states = final_state + head * (K * V)

        if SINGLE:
            row_q, window_q = convolved(x_q, from_q, w_q, b_q, 0, q_token, conv_place, weight_tap, live, K, W, SINGLE)
            row_k, window_k = convolved(x_k, from_k, w_k, b_k, 0, k_token, conv_place, weight_tap, live, K, W, SINGLE)
            row_v, window_v = convolved(x_v, from_v, w_v, b_v, 0, v_token, conv_place, weight_tap, live, V, W, SINGLE)
            row_g = tl.load(gates)
            row_beta = tl.load(betas)
            initial = initial_state + slot * start_pitch + head * (K * V)
            tiles = load_tiles(initial, key, live.to(tl.int32), K, V, TILES, V_FIRST, STREAM)
            rows = (part(row_q, 0, K), part(row_k, 0, K), row_g, row_beta)
            token = factors(rows, there, shift, rate, lower_bound, scale, GATE, BETA, L2NORM)
            outs = ()
            for i in tl.static_range(TILES):
                tile, out, written = step(tiles[i].to(tl.float32), part(row_v, i * BV, BV), token, A_THREAD)
                outs = outs + (out,)
                store_tile(states + slot * target_pitch + i * PITCH, in_tile, tile, live.to(tl.int32), STREAM)
            out = joined(outs)
            store_normed(outputs, out, norm_weight, output_gates, live, eps, V)
            tl.debug_barrier()  # all threads have read the windows
            roll_one(to_v, window_v, conv_place, live, V, W)
            if member == GROUP - 1:
                roll_one(to_q, window_q, conv_place, live, K, W)
                roll_one(to_k, window_k, conv_place, live, K, W)
        else:
            initial = initial_state + slot * start_pitch + head * (K * V)
            tiles = load_tiles(initial, key, live.to(tl.int32), K, V, TILES, V_FIRST, STREAM)
            state = ()
            for i in tl.static_range(TILES):
                state = state + (tiles[i].to(tl.float32),)
            for t in range(0, length):
                row_q, _ = convolved(x_q, from_q, w_q, b_q, t, q_token, conv_place, weight_tap, live, K, W, SINGLE)
                row_k, _ = convolved(x_k, from_k, w_k, b_k, t, k_token, conv_place, weight_tap, live, K, W, SINGLE)
                row_v, _ = convolved(x_v, from_v, w_v, b_v, t, v_token, conv_place, weight_tap, live, V, W, SINGLE)
                rows = (part(row_q, 0, K), part(row_k, 0, K))
                rows += (tl.load(gates + t * g_token), tl.load(betas + t * beta_token))
                token = factors(rows, there, shift, rate, lower_bound, scale, GATE, BETA, L2NORM)
                state, out, written = step_tiles(state, row_v, token, V, A_THREAD)
                if EACH == 1:
                    index = n * target_row + t * target_token
                    target, named = target_slot(targets, index, slot, lowest, target_slots)
                    stored = live & named
                    after = states + tl.where(stored, target, 0) * target_pitch
                    store_tiles(after, state, key, stored.to(tl.int32), K, V, V_FIRST, STREAM)
                elif EACH == 3:
                    for i in tl.static_range(TILES):
                        of_tile = i * (V // TILES) + tl.arange(0, V // TILES)
                        record(states + t * target_step, has_row & live, i, key, of_tile, token, written[i], K)
                store_normed(outputs + t * o_token, out, norm_weight, output_gates + t * z_token, live, eps, V)
            if not EACH:
                store_tiles(states + slot * target_pitch, state, key, live.to(tl.int32), K, V, V_FIRST, STREAM)
            roll(x_v, to_v, from_v, length, v_token, conv_place, live, V, W)
            if member == GROUP - 1:
                roll(x_q, to_q, from_q, length, q_token, conv_place, live, K, W)
                roll(x_k, to_k, from_k, length, k_token, conv_place, live, K, W)


ONE_WAVE = 396
"""CTAs of four warps with 168 registers per thread that an H100 or H200 holds at the same time, three per SM."""


def fused_config(problem: FusedProblem, arch: int) -> Config:
    """Gives each channel a thread: rows of q, k, v and their windows are read once, and it has up to 128 elements of a
    state. Two threads share a channel for one token, in chains half as long; but where states in bfloat16 come in more than
    one wave, three CTAs of four warps per SM have more of them in flight."""
    many = problem.T > 1 or problem.packed or problem.N * problem.HV > DECODE_FEW
    single = problem.T == 1 and not problem.packed
    warps = max(1, min(problem.K, problem.V) // 32)
    if single and problem.state_dtype == torch.bfloat16 and problem.N * problem.H > ONE_WAVE:
        return Config(warps, TILES=4, STREAM=many, max_registers=168)
    if single and problem.group == 1 and warps == 4:
        return Config(2 * warps, TILES=8, STREAM=many, max_registers=128)
    return Config(warps, TILES=4, STREAM=many, max_registers=255)


def fused_kda_decode(problem: FusedProblem, t: FusedTensors, arch: int, outputs: Outputs) -> list[Launch]:
    own = dict(
        **fused_arguments(problem, t, outputs["o"]),
        SINGLE=problem.T == 1 and not problem.packed,
        EACH=3 if problem.has_records else int(problem.stores_each_state),
    )
    c = fused_config(problem, arch)
    return [launch(fused_decode_kernel, problem.N * problem.H, problem, t, own, c, overlaps=arch >= 90)]
