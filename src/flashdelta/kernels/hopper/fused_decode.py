"""Stage `fused_decode` for Hopper: one token per sequence, states in place as `[V, K]`. One CTA per (sequence, query/key head).

Contract and order of operations: as `triton/fused_decode.py`. A CTA waits fewer times:

* What lies in a slot is asked for by a guess: the index is read before the wait for the kernel before this one, which may yet
  overwrite it, and again after it. If it has changed, windows and state are asked for again.
* All loads are under way before anything is worked out: rows and windows to registers, then the state to shared memory by
  asynchronous copies, behind which rows would queue.
* A thread works out one channel of the rows, and rolls its windows: no other one reads them. Then eight threads share a row of
  the state. Its sums over keys stay within a warp, as do those of the norms of q and k, which all groups of eight work out.
* Memory is idle from the last load of one launch to the first of the next. So some CTAs prefetch to the L2 cache before they
  wait (`HopperConfig.ahead`).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import FusedProblem, FusedTensors
from ...program.launch import REGISTERS, Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import LOG2E, beta_of, log2_decay, sigmoid
from ..shared.gluon.compat import barrier, copy_async
from ..shared.norms import L2_EPS
from ..shared.scalars import SCALARS
from ..shared.sequences import at_token, own_work_tile
from ..shared.states import everywhere, placed
from ..stages.decode import fused_arguments
from ..stages.launch import Config, aligned, launch
from .decode import fetch_to_cache, prefetch
from .launch import prefetching_ctas

ROWS = gl.constexpr(32)
"""Value channels of a state that are copied and updated at a time."""

SHARED_BYTES = 228 * 1024
"""Shared memory of an SM. A CTA takes a kilobyte of it beyond its own."""


@gluon.jit
def window_of(window, channel, place_stride, live, W):
    """The `W - 1` inputs of a channel that its window keeps."""
    kept = ()
    for tap in gl.static_range(W - 1):
        kept = kept + (gl.load(window + tap * place_stride, mask=everywhere(channel, live), other=0.0),)
    return kept


@gluon.jit
def filter_of(filters, bias, in_bias, tap_stride, W):
    """The `W` taps of a channel, and its bias if there is one."""
    taps = ()
    for tap in gl.static_range(W):
        taps = taps + (gl.load(filters + tap * tap_stride),)
    if bias is not None:
        taps = taps + (gl.load(bias + in_bias),)
    return taps


@gluon.jit
def convolved(kept, x, taps):
    """`silu(conv(x))` of a thread's channel."""
    p = gl.zeros_like(x).to(gl.float32)
    if len(taps) > len(kept) + 1:
        p += taps[len(kept) + 1].to(gl.float32)
    for tap in gl.static_range(len(kept)):
        p = gl.fma(taps[tap].to(gl.float32), kept[tap].to(gl.float32), p)
    p = gl.fma(taps[len(kept)].to(gl.float32), x.to(gl.float32), p)
    return p * sigmoid(p)


@gluon.jit
def roll(window, kept, x, channel, place_stride, live):
    """Moves a window on by one token. A thread writes what it alone has read."""
    mask = everywhere(channel, live)
    for tap in gl.static_range(1, len(kept)):
        gl.store(window + (tap - 1) * place_stride, kept[tap], mask=mask)
    gl.store(window + (len(kept) - 1) * place_stride, x.to(gl.float32).to(window.dtype.element_ty), mask=mask)


@gluon.jit
def rows_of(v, weight, weight_channel, weight_tap, bias, value_channels, g, beta, z, A_log, dt_bias, head, K, W):
    """Loads what lies in no slot, of a value head: input and filter of `v`, the gate's input, bias and rate, write strength,
    output gate. As it lies in memory: what is worked out here would wait for memory ahead of the loads that follow."""
    channel = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    of_v = head.to(gl.int32) * K + channel
    row_bias = 0.0
    rate = 0.0
    if dt_bias is not None:
        row_bias = gl.load(dt_bias + of_v)
    if A_log is not None:
        rate = gl.load(A_log + head)
    taps_v = filter_of(weight + of_v * weight_channel, bias, value_channels + of_v, weight_tap, W)
    return gl.load(v + channel), taps_v, gl.load(g + channel), row_bias, rate, gl.load(beta), gl.load(z + channel)


@gluon.jit
def decay_of(row_g, row_bias, rate, lower_bound, GATE):
    """`exp` of the log decay, from what the gate is made of."""
    rate = gl.exp2(rate.to(gl.float32) * LOG2E)
    return gl.exp2(log2_decay(row_g.to(gl.float32) + row_bias.to(gl.float32), rate, lower_bound, GATE))


@gluon.jit
def slot_of(index, lowest, slots):
    """The slot that an index names, 0 if none, as the number of no slot may lead beyond every address; and whether it names
    one."""
    live = (index >= lowest) & (index < slots)
    return gl.where(live, index.to(gl.int64), 0), live


@gluon.jit
def copy_tiles(state_s, states, in_tile, read, TILES, SIZE):
    """Starts the copies of a state's tiles, zeros if nothing is `read`, each a group of copies."""
    for i in gl.static_range(TILES):
        copy_async(state_s[i], states + in_tile + i * SIZE, mask=everywhere(in_tile, read))
        async_copy.commit_group()


@gluon.jit(do_not_specialize=SCALARS)
def fused_decode_kernel(
    q, k, v, weight, bias, conv_state, g, beta, A_log, dt_bias, z, norm_weight, cu_seqlens, o,
    initial_state, final_state, starts, targets, accepted, lowest, slots, target_slots,
    start_pitch: gl.int64, target_pitch: gl.int64, target_step: gl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, eps, T, H,
    key_channels, value_channels, key_taps, value_taps, weight_channel, weight_tap,
    conv_slot: gl.int64, conv_channel: gl.int64, conv_place: gl.int64,
    q_batch: gl.int64, q_token: gl.int64, q_head: gl.int64, k_batch: gl.int64, k_token: gl.int64, k_head: gl.int64,
    v_batch: gl.int64, v_token: gl.int64, v_head: gl.int64, g_batch: gl.int64, g_token: gl.int64, g_head: gl.int64,
    beta_batch: gl.int64, beta_token: gl.int64, beta_head: gl.int64,
    z_batch: gl.int64, z_token: gl.int64, z_head: gl.int64, o_batch: gl.int64, o_token: gl.int64, o_head: gl.int64,
    first_ahead, past_ahead,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr, CHANNELS: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """`K = V` channels, as many threads. For each of `GROUP` value heads, 32 rows of the state at a time:

    x, windows, g --> thread per channel: convolution, decay --> q_s, k_s, decay_s, v_s
                                                                   |
                                                                   v
    state --cp.async--> state_s V / 32 x [32, K] --> D = decay S --> D k, D q --> correction --> out_s
                                                     D + correction k --> memory

    out_s --> each warp: norm; thread per channel: output gate --> o

    Barriers: two for the order of loads, one for the rows, one per tile, one for the norm. CTAs from `first_ahead` to
    `past_ahead` prefetch.
    """
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = V // ROWS
    SIZE: gl.constexpr = ROWS * K
    # 16 bytes of a row of the state a thread, 8 threads side by side
    VEC: gl.constexpr = 128 // initial_state.dtype.element_ty.primitive_bitwidth
    tile_l: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [WARPS, 1], [1, 0])
    key_l: gl.constexpr = gl.SliceLayout(0, tile_l)
    value_l: gl.constexpr = gl.SliceLayout(1, tile_l)
    channel_l: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # every warp has all channels
    each_l: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, V // 32], [1, 32], [WARPS, 1], [1, 0]))
    line_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])

    _slice, qk_head, n, batch, _begin, _end = own_work_tile(cu_seqlens, T, H, 1)
    head = qk_head * GROUP
    q, k = at_token((q, k), (q_batch, q_token, q_head, k_batch, k_token, k_head), batch, 0, qk_head)
    v, g = at_token((v, g), (v_batch, v_token, v_head, g_batch, g_token, g_head), batch, 0, head)
    z, o = at_token((z, o), (z_batch, z_token, z_head, o_batch, o_token, o_head), batch, 0, head)
    (beta,) = at_token((beta,), (beta_batch, beta_token, beta_head), batch, 0, head)
    initial_state += head * (K * V)
    final_state += head * (K * V)
    channel = gl.arange(0, K, layout=channel_l)
    of_q = qk_head.to(gl.int32) * K + channel
    of_v = head.to(gl.int32) * V + channel
    in_q = placed(of_q, conv_channel, CHANNELS)
    in_k = placed(of_q + key_channels, conv_channel, CHANNELS)
    in_v = placed(of_v + value_channels, conv_channel, CHANNELS)
    row = gl.arange(0, ROWS, layout=value_l)
    in_tile = row[:, None] * K + gl.arange(0, K, layout=key_l)[None, :]
    starts += n * start_row
    guess, guessed = slot_of(gl.load(starts), lowest, slots)
    windows = conv_state + guess * conv_slot
    states = initial_state + guess * start_pitch
    cta = gl.program_id(0)
    if (cta >= first_ahead) & (cta < past_ahead) & guessed:
        for tap in gl.static_range(W - 1):
            prefetch(windows + in_q + tap * conv_place)
            prefetch(windows + in_k + tap * conv_place)
            prefetch(windows + in_v + tap * conv_place)
        fetch_to_cache(states, K * V * initial_state.dtype.element_ty.primitive_bitwidth // 8)
    # as addresses have fewer than 61 bits; ptxas would work them out after the wait
    always = (
        q.to(gl.int64) + k.to(gl.int64) + v.to(gl.int64) + g.to(gl.int64) + z.to(gl.int64) + states.to(gl.int64) != 0
    )
    if always:
        gdc_wait()
    gdc_launch_dependents()
    index = gl.load(starts)

    own_q = gl.load(q + channel)
    own_k = gl.load(k + channel)
    kept_q = window_of(windows + in_q, channel, conv_place, guessed, W)
    kept_k = window_of(windows + in_k, channel, conv_place, guessed, W)
    filters_q = weight + of_q * weight_channel
    filters_v = (weight + value_taps, weight_channel, weight_tap, bias, value_channels)
    kept_v = window_of(windows + in_v, channel, conv_place, guessed, W)
    own = rows_of(v, *filters_v, g, beta, z, A_log, dt_bias, head, K, W)
    norm_of = gl.load(norm_weight + channel)
    taps_q = filter_of(filters_q, bias, of_q, weight_tap, W)
    taps_k = filter_of(filters_q + key_taps, bias, of_q + key_channels, weight_tap, W)
    state_s = ()
    for _ in gl.static_range(TILES):
        # of one memory, copies of tiles would wait for each other
        state_s = state_s + (gl.allocate_shared_memory(initial_state.dtype.element_ty, [ROWS, K], plain_s),)
    # no load passes a barrier: rows first, then the state, then whether the index is what it was
    barrier()
    copy_tiles(state_s, states, in_tile, guessed, TILES, SIZE)
    barrier()
    if not always:  # never; else ptxas looks at the index, and waits for it, ahead of the copies
        index = gl.load(starts)
    slot, live = slot_of(index, lowest, slots)
    if (slot != guess) | (live != guessed):
        async_copy.wait_group(0)
        windows = conv_state + slot * conv_slot
        copy_tiles(state_s, initial_state + slot * start_pitch, in_tile, live, TILES, SIZE)
        kept_q = window_of(windows + in_q, channel, conv_place, live, W)
        kept_k = window_of(windows + in_k, channel, conv_place, live, W)
        kept_v = window_of(windows + in_v, channel, conv_place, live, W)
        # as it is; else ptxas works on it, and waits for it, ahead of the copies
        own = rows_of(v, *filters_v, g, beta, z, A_log, dt_bias, head, K, W)
    initial_state += slot * start_pitch
    final_state += slot * target_pitch

    q_s = gl.allocate_shared_memory(gl.float32, [K], line_s)
    k_s = gl.allocate_shared_memory(gl.float32, [K], line_s)
    decay_s = gl.allocate_shared_memory(gl.float32, [K], line_s)
    v_s = gl.allocate_shared_memory(gl.float32, [V], line_s)
    out_s = gl.allocate_shared_memory(gl.float32, [V], line_s)
    q_s.store(convolved(kept_q, own_q, taps_q))
    k_s.store(convolved(kept_k, own_k, taps_k))
    roll(windows + in_q, kept_q, own_q, channel, conv_place, live)
    roll(windows + in_k, kept_k, own_k, channel, conv_place, live)
    for member in range(GROUP):
        to_v = windows + placed(of_v + value_channels + member * V, conv_channel, CHANNELS)
        own_v, taps_v, row_g, row_bias, rate, write_beta, gate = own
        v_s.store(convolved(kept_v, own_v, taps_v))
        decay_s.store(decay_of(row_g, row_bias, rate, lower_bound, GATE))
        row_q, row_k, decay = q_s.load(key_l), k_s.load(key_l), decay_s.load(key_l)[None, :]
        roll(to_v, kept_v, own_v, channel, conv_place, live)
        scaling = norm_of.to(gl.float32) * sigmoid(gate.to(gl.float32))
        write_beta = beta_of(write_beta.to(gl.float32), BETA)
        if GROUP > 1:
            # of the next head, whose rows come while this one's state is worked on; after the last one in vain
            after = gl.minimum(member + 1, GROUP - 1)
            to_next = windows + placed(of_v + value_channels + after * V, conv_channel, CHANNELS)
            kept_v = window_of(to_next, channel, conv_place, live, W)
            rows = (g + after * g_head, beta + after * beta_head, z + after * z_head)
            own = rows_of(v + after * v_head, *filters_v, *rows, A_log, dt_bias, head + after, K, W)
        norm_q = scale
        norm_k = 1.0
        overlap = gl.sum(row_q * row_k, axis=0)
        if L2NORM:
            norm_q = scale * gl.rsqrt(gl.sum(row_q * row_q, axis=0) + L2_EPS)
            norm_k = gl.rsqrt(gl.sum(row_k * row_k, axis=0) + L2_EPS)
        for i in gl.static_range(TILES):
            value = v_s.slice(i * ROWS, ROWS).load(value_l)
            # of a group as many tiles are under way all the time: those of the next head follow
            async_copy.wait_group(TILES - 1 - i if GROUP == 1 else TILES - 1)
            state = state_s[i].load(tile_l).to(gl.float32) * decay
            along_k = gl.sum(state * row_k[None, :], axis=1)
            along_q = gl.sum(state * row_q[None, :], axis=1)
            correction = norm_k * write_beta * (value - norm_k * along_k)
            out_s.slice(i * ROWS, ROWS).store(norm_q * (along_q + overlap * correction))
            state += correction[:, None] * row_k[None, :]
            tile = member * (K * V) + i * SIZE
            gl.store(
                final_state + in_tile + tile, state.to(final_state.dtype.element_ty), mask=everywhere(in_tile, live)
            )
            if GROUP > 1:
                if member + 1 < GROUP:
                    copy_async(state_s[i], initial_state + in_tile + (K * V + tile), mask=everywhere(in_tile, live))
                async_copy.commit_group()

        out = out_s.load(each_l)
        norm = 1.0 / gl.sqrt(gl.sum(out * out, axis=0) / V + eps)
        y = out_s.load(channel_l) * norm * scaling
        y = gl.where(everywhere(channel, live), y, 0.0)
        gl.store(o + member * o_head + channel, y.to(o.dtype.element_ty))


def hopper_config(problem: FusedProblem, sms: int) -> tuple[int, tuple[int, int]]:
    """Registers of a thread, and the CTAs, from the first to before the second, that prefetch what lies in their slots.

    With 128 channels three CTAs of a float32 state fit on an SM, as many as shared memory holds, and four of a bfloat16 one.
    With an SM for each, all CTAs prefetch: memory has nothing else to do. In more than four waves, too: most CTAs start while
    others load, and wait for nobody. Between, those that `prefetching_ctas` names, as in `decode`."""
    most = 168 if problem.state_dtype == torch.float32 else 128
    state = problem.K * problem.V * problem.state_dtype.itemsize
    rows = 4 * (3 * problem.K + 2 * problem.V)
    an_sm = min(REGISTERS // (problem.V * most), SHARED_BYTES // (state + rows + 1024))
    ctas = problem.N * problem.H
    wave = sms * an_sm
    all_ahead = ctas <= sms or ctas > 4 * wave
    return most, (0, ctas) if all_ahead else prefetching_ctas(ctas, wave)


def fused_kda_decode(problem: FusedProblem, t: FusedTensors, arch: int, outputs: Outputs) -> list[Launch] | None:
    """A step of the layer. None where states lie on no 16 bytes."""
    if not aligned(t.state_pool, 16):
        return None
    registers, (first, past) = hopper_config(problem, sm_count(t.device))
    own = dict(fused_arguments(problem, t, outputs["o"]), first_ahead=first, past_ahead=past)
    c = Config(problem.V // 32, max_registers=registers)
    return [launch(fused_decode_kernel, problem.N * problem.H, problem, t, own, c, overlaps=True)]
