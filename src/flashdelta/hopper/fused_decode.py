"""Stage `fused_decode` for Hopper: one token a sequence, states in place as `[V, K]`. One CTA per (sequence, query/key head).

Contract and order of operations: as `triton/fused_decode.py`. What differs is where a state waits. There it takes 64 or 128
registers of a thread, so that two or three CTAs fit on an SM. Here it comes to shared memory by asynchronous copies, a few rows
at a time to registers, and six CTAs of a bfloat16 state fit. Rows of a group's next state are asked for where those of the one
before have been used.

A thread works out one channel of the rows, and rolls its windows at once: no other one reads them. A warp has rows of the
state, whose sums over keys stay within it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch
from ..program.program import Outputs
from ..triton import fused_decode as portable
from ..triton.fused_decode import SCALARS
from .decode import add_three
from .device.compat import copy_async
from .device.portable import (
    L2_EPS,
    decay_rate,
    everywhere,
    exact_beta,
    exact_log2_decay,
    locate,
    placed,
    sigmoid,
    source_slot,
)
from .launch import aligned

ROWS = gl.constexpr(16)
"""Value channels of a state that are in registers at a time."""


@gluon.jit
def inputs_of(x, window, channel, place_stride, live, W: gl.constexpr):
    """What a convolution is made of in fp32: `W - 1` inputs from the window, then the token's own."""
    rows = ()
    for tap in gl.static_range(W - 1):
        row = gl.load(window + tap * place_stride, mask=everywhere(channel, live), other=0.0)
        rows = rows + (row.to(gl.float32),)  # type: ignore[assignment]
    return rows + (gl.load(x).to(gl.float32),)


@gluon.jit
def convolved(rows, filters, bias, tap_stride):
    """`silu(conv(x))` of a thread's channel."""
    p = gl.zeros_like(rows[0])
    if bias is not None:
        p += gl.load(bias).to(gl.float32)
    for tap in gl.static_range(len(rows)):
        p = gl.fma(gl.load(filters + tap * tap_stride).to(gl.float32), rows[tap], p)
    return p * sigmoid(p)


@gluon.jit
def rows_of(
    head,
    v,
    v_head,
    windows,
    value_channels,
    conv_channel,
    conv_place,
    weight,
    value_taps,
    weight_channel,
    weight_tap,
    bias,
    g,
    g_head,
    beta,
    beta_head,
    z,
    z_head,
    A_log,
    dt_bias,
    channel,
    live,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    CHANNELS: gl.constexpr,
):
    """A value head's window of `v`, the inputs, `v` itself, the gate's input and rate, write strength and output gate."""
    of_v = head.to(gl.int32) * V + channel
    to_v = windows + placed(of_v + value_channels, conv_channel, CHANNELS)
    window_v = inputs_of(v + head * v_head + channel, to_v, channel, conv_place, live, W)
    row_g = gl.load(g + head * g_head + channel).to(gl.float32)
    if dt_bias is not None:
        row_g += gl.load(dt_bias + head * K + channel).to(gl.float32)
    bias_v = None
    if bias is not None:
        bias_v = bias + value_channels + of_v
    row_v = convolved(window_v, weight + value_taps + of_v * weight_channel, bias_v, weight_tap)
    write_beta = gl.load(beta + head * beta_head)
    gate = gl.load(z + head * z_head + channel)
    return to_v, window_v, row_v, row_g, decay_rate(A_log, head), write_beta, gate


@gluon.jit
def roll(window, rows, channel, place_stride, live):
    """Moves a window on by one token. A thread writes what it alone has read."""
    for tap in gl.static_range(1, len(rows)):
        row = rows[tap].to(window.dtype.element_ty)
        gl.store(window + (tap - 1) * place_stride, row, mask=everywhere(channel, live))


@gluon.jit(do_not_specialize=SCALARS)
def fused_decode_kernel(
    q,
    k,
    v,
    weight,
    bias,
    conv_state,
    g,
    beta,
    A_log,
    dt_bias,
    z,
    norm_weight,
    cu_seqlens,
    o,
    initial_state,
    final_state,
    starts,
    targets,
    accepted,
    lowest,
    slots,
    target_slots,
    start_pitch: gl.int64,
    target_pitch: gl.int64,
    target_step: gl.int64,
    start_row,
    start_token,
    target_row,
    target_token,
    most_tokens,
    scale,
    lower_bound,
    eps,
    T,
    H,
    key_channels,
    value_channels,
    key_taps,
    value_taps,
    weight_channel,
    weight_tap,
    conv_slot: gl.int64,
    conv_channel: gl.int64,
    conv_place: gl.int64,
    q_batch: gl.int64,
    q_token: gl.int64,
    q_head: gl.int64,
    k_batch: gl.int64,
    k_token: gl.int64,
    k_head: gl.int64,
    v_batch: gl.int64,
    v_token: gl.int64,
    v_head: gl.int64,
    g_batch: gl.int64,
    g_token: gl.int64,
    g_head: gl.int64,
    beta_batch: gl.int64,
    beta_token: gl.int64,
    beta_head: gl.int64,
    z_batch: gl.int64,
    z_token: gl.int64,
    z_head: gl.int64,
    o_batch: gl.int64,
    o_token: gl.int64,
    o_head: gl.int64,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    GROUP: gl.constexpr,
    CHANNELS: gl.constexpr,
    GATE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """`K = V` channels, as many threads. For each of `GROUP` value heads, 16 rows of the state at a time:

    x, windows, g --> a thread a channel: convolution, decay, norms
                          |  rows_s: decay, decay k, decay q, k;  v_s
                          v
    state --cp.async--> state_s [V / 16, 16, K] --> S k, S q --> correction --> out_s
                                                --> decay S + correction k --> memory
    out_s --> a thread a channel: norm, output gate --> o
    """
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = V // ROWS
    # 16 bytes of a row of the state a thread
    VEC: gl.constexpr = 128 // initial_state.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = K // VEC
    tile_l: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    key_l: gl.constexpr = gl.SliceLayout(0, tile_l)
    value_l: gl.constexpr = gl.SliceLayout(1, tile_l)
    channel_l: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])

    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    _slice, qk_head, n, batch, begin, end = locate(cu_seqlens, T, H, 1)
    named = (starts, starts, accepted, None, n, begin < end, 1, start_row, start_token, start_row)
    slot, live, read = source_slot(*named, most_tokens, lowest, slots, slots, False)
    # the number of no slot may lead beyond every address
    slot = gl.where(live, slot, 0)
    initial_state += slot * start_pitch + qk_head * (GROUP * K * V)
    final_state += slot * target_pitch + qk_head * (GROUP * K * V)
    row = gl.arange(0, ROWS, layout=value_l)
    in_tile = row[:, None] * K + gl.arange(0, K, layout=key_l)[None, :]
    state_s = gl.allocate_shared_memory(initial_state.dtype.element_ty, [TILES, ROWS, K], plain_s)
    for i in gl.static_range(TILES):
        copy_async(state_s.index(i), initial_state + (i * (ROWS * K) + in_tile), mask=everywhere(in_tile, read))
        async_copy.commit_group()

    channel = gl.arange(0, K, layout=channel_l)
    of_q = qk_head.to(gl.int32) * K + channel
    windows = conv_state + slot * conv_slot
    to_q = windows + placed(of_q, conv_channel, CHANNELS)
    to_k = windows + placed(of_q + key_channels, conv_channel, CHANNELS)
    window_q = inputs_of(q + batch * q_batch + qk_head * q_head + channel, to_q, channel, conv_place, live, W)
    window_k = inputs_of(k + batch * k_batch + qk_head * k_head + channel, to_k, channel, conv_place, live, W)
    norm_of = gl.load(norm_weight + channel)
    v += batch * v_batch
    g += batch * g_batch
    beta += batch * beta_batch
    z += batch * z_batch
    inputs = (v, v_head, windows, value_channels, conv_channel, conv_place)
    filters_v = (weight, value_taps, weight_channel, weight_tap, bias)
    gates = (g, g_head, beta, beta_head, z, z_head, A_log, dt_bias)
    if GROUP == 1:
        # ahead of the first store and the first barrier, which no load passes
        own = rows_of(qk_head, *inputs, *filters_v, *gates, channel, live, K, V, W, CHANNELS)
    bias_q = None
    bias_k = None
    if bias is not None:
        bias_q = bias + of_q
        bias_k = bias_q + key_channels
    filters = weight + of_q * weight_channel
    row_q = convolved(window_q, filters, bias_q, weight_tap)
    row_k = convolved(window_k, filters + key_taps, bias_k, weight_tap)
    roll(to_q, window_q, channel, conv_place, live)
    roll(to_k, window_k, channel, conv_place, live)
    norm_q = scale
    norm_k = 1.0
    square_q, square_k, overlap = gl.reduce((row_q * row_q, row_k * row_k, row_q * row_k), 0, add_three)
    if L2NORM:
        norm_q = scale * gl.rsqrt(square_q + L2_EPS)
        norm_k = gl.rsqrt(square_k + L2_EPS)
    rows_s = gl.allocate_shared_memory(gl.float32, [4, K], line_s)
    rows_s.index(3).store(row_k)
    v_s = gl.allocate_shared_memory(gl.float32, [V], line_s)
    out_s = gl.allocate_shared_memory(gl.float32, [V], line_s)

    for member in range(GROUP):
        head = qk_head * GROUP + member
        if GROUP > 1:
            own = rows_of(head, *inputs, *filters_v, *gates, channel, live, K, V, W, CHANNELS)
        to_v, window_v, row_v, row_g, rate, write_beta, gate = own
        roll(to_v, window_v, channel, conv_place, live)
        write_beta = exact_beta(write_beta.to(gl.float32), BETA)
        decay = gl.exp2(exact_log2_decay(row_g, rate, lower_bound, GATE))
        rows_s.index(0).store(decay)
        rows_s.index(1).store(decay * row_k)
        rows_s.index(2).store(decay * row_q)
        v_s.store(row_v)
        decays, along = rows_s.index(0).load(key_l)[None, :], rows_s.index(3).load(key_l)[None, :]
        decayed_k, decayed_q = rows_s.index(1).load(key_l)[None, :], rows_s.index(2).load(key_l)[None, :]
        for i in gl.static_range(TILES):
            value = v_s.slice(i * ROWS, ROWS).load(value_l)
            # of a group as many tiles are under way all the time: those of the next head follow
            async_copy.wait_group(TILES - 1 - i if GROUP == 1 else TILES - 1)
            state = state_s.index(i).load(tile_l).to(gl.float32)
            along_k, along_q = gl.sum(state * decayed_k, axis=1), gl.sum(state * decayed_q, axis=1)
            correction = norm_k * write_beta * (value - norm_k * along_k)
            out_s.slice(i * ROWS, ROWS).store(norm_q * (along_q + overlap * correction))
            state = state * decays + correction[:, None] * along
            tile = member * (K * V) + i * (ROWS * K) + in_tile
            gl.store(final_state + tile, state.to(final_state.dtype.element_ty), mask=everywhere(in_tile, read))
            if GROUP > 1:
                if member + 1 < GROUP:
                    copy_async(state_s.index(i), initial_state + (K * V + tile), mask=everywhere(in_tile, read))
                async_copy.commit_group()

        out = out_s.load(channel_l)
        norm = 1.0 / gl.sqrt(gl.sum(out * out, axis=0) / V + eps)
        y = out * norm * norm_of.to(gl.float32) * sigmoid(gate.to(gl.float32))
        y = gl.where(everywhere(channel, live), y, 0.0)
        gl.store(o + batch * o_batch + head * o_head + channel, y.to(o.dtype.element_ty))


def max_registers(problem: Problem) -> int:
    """Of a thread. Of 128 channels three CTAs of a float32 state fit on an SM, as many as shared memory holds, and six of a
    bfloat16 one; five with several value heads, which would spill."""
    if problem.state_dtype == torch.float32:
        return 168
    return 80 if problem.group == 1 else 96


def fused_kda_decode(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Where states lie on no 16 bytes, the portable kernel."""
    (launch,) = portable.fused_kda_decode(problem, t, arch, outputs)
    given = dict(zip(fused_decode_kernel.arg_names, launch.arguments))
    if not aligned(given["initial_state"], 16):
        return [launch]
    names = ("K", "V", "W", "GROUP", "CHANNELS", "GATE", "BETA", "L2NORM", "OVERLAP")  # in the kernel's order
    return [
        replace(
            launch,
            kernel=fused_decode_kernel,
            constants={name: launch.constants[name] for name in names},
            num_warps=problem.V // 32,
            max_registers=max_registers(problem),
        )
    ]
