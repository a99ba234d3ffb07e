"""Stage `fused_decode` for Hopper: one token a sequence, states in place as `[V, K]`, as many value as query/key heads. One CTA
per (sequence, head).

Contract and order of operations: as `triton/fused_decode.py`. What differs is where a state waits. There it takes 64 or 128
registers of a thread, so that two or three CTAs fit on an SM. Here it comes to shared memory by asynchronous copies, a few rows
at a time to registers, and five CTAs of a bfloat16 state fit.

A thread works out one channel of the rows; a warp has rows of the state, whose sums over keys stay within it.
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
    CHANNELS: gl.constexpr,
    GATE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """`K = V` channels, as many threads. 16 rows of the state at a time:

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
    _slice, head, n, batch, begin, end = locate(cu_seqlens, T, H, 1)
    named = (starts, starts, accepted, None, n, begin < end, 1, start_row, start_token, start_row)
    slot, live, read = source_slot(*named, most_tokens, lowest, slots, slots, False)
    # the number of no slot may lead beyond every address
    slot = gl.where(live, slot, 0)
    initial_state += slot * start_pitch + head * (K * V)
    final_state += slot * target_pitch + head * (K * V)
    row = gl.arange(0, ROWS, layout=value_l)
    in_tile = row[:, None] * K + gl.arange(0, K, layout=key_l)[None, :]
    state_s = gl.allocate_shared_memory(initial_state.dtype.element_ty, [TILES, ROWS, K], plain_s)
    for i in gl.static_range(TILES):
        copy_async(state_s.index(i), initial_state + (i * (ROWS * K) + in_tile), mask=everywhere(in_tile, read))
        async_copy.commit_group()

    channel = gl.arange(0, K, layout=channel_l)
    of_q = head.to(gl.int32) * K + channel
    windows = conv_state + slot * conv_slot
    to_q = windows + placed(of_q, conv_channel, CHANNELS)
    to_k = windows + placed(of_q + key_channels, conv_channel, CHANNELS)
    to_v = windows + placed(of_q + value_channels, conv_channel, CHANNELS)
    window_q = inputs_of(q + batch * q_batch + head * q_head + channel, to_q, channel, conv_place, live, W)
    window_k = inputs_of(k + batch * k_batch + head * k_head + channel, to_k, channel, conv_place, live, W)
    window_v = inputs_of(v + batch * v_batch + head * v_head + channel, to_v, channel, conv_place, live, W)
    row_g = gl.load(g + batch * g_batch + head * g_head + channel).to(gl.float32)
    write_beta = gl.load(beta + batch * beta_batch + head * beta_head)
    gate = gl.load(z + batch * z_batch + head * z_head + channel)
    norm_of = gl.load(norm_weight + channel)
    rate = decay_rate(A_log, head)
    if dt_bias is not None:
        row_g += gl.load(dt_bias + head * K + channel).to(gl.float32)
    bias_q = None
    bias_k = None
    bias_v = None
    if bias is not None:
        bias_q = bias + of_q
        bias_k = bias_q + key_channels
        bias_v = bias_q + value_channels
    filters = weight + of_q * weight_channel
    row_q = convolved(window_q, filters, bias_q, weight_tap)
    row_k = convolved(window_k, filters + key_taps, bias_k, weight_tap)
    row_v = convolved(window_v, filters + value_taps, bias_v, weight_tap)

    write_beta = exact_beta(write_beta.to(gl.float32), BETA)
    decay = gl.exp2(exact_log2_decay(row_g, rate, lower_bound, GATE))
    norm_q = scale
    norm_k = 1.0
    square_q, square_k, overlap = gl.reduce((row_q * row_q, row_k * row_k, row_q * row_k), 0, add_three)
    if L2NORM:
        norm_q = scale * gl.rsqrt(square_q + L2_EPS)
        norm_k = gl.rsqrt(square_k + L2_EPS)
    rows_s = gl.allocate_shared_memory(gl.float32, [4, K], line_s)
    rows_s.index(0).store(decay)
    rows_s.index(1).store(decay * row_k)
    rows_s.index(2).store(decay * row_q)
    rows_s.index(3).store(row_k)
    v_s = gl.allocate_shared_memory(gl.float32, [V], line_s)
    v_s.store(row_v)
    out_s = gl.allocate_shared_memory(gl.float32, [V], line_s)
    decay, along = rows_s.index(0).load(key_l)[None, :], rows_s.index(3).load(key_l)[None, :]
    decayed_k, decayed_q = rows_s.index(1).load(key_l)[None, :], rows_s.index(2).load(key_l)[None, :]
    for i in gl.static_range(TILES):
        value = v_s.slice(i * ROWS, ROWS).load(value_l)
        async_copy.wait_group(TILES - 1 - i)
        state = state_s.index(i).load(tile_l).to(gl.float32)
        along_k, along_q = gl.sum(state * decayed_k, axis=1), gl.sum(state * decayed_q, axis=1)
        correction = norm_k * write_beta * (value - norm_k * along_k)
        out_s.slice(i * ROWS, ROWS).store(norm_q * (along_q + overlap * correction))
        state = state * decay + correction[:, None] * along
        at = final_state + (i * (ROWS * K) + in_tile)
        gl.store(at, state.to(final_state.dtype.element_ty), mask=everywhere(in_tile, read))

    out = out_s.load(channel_l)
    norm = 1.0 / gl.sqrt(gl.sum(out * out, axis=0) / V + eps)
    y = out * norm * norm_of.to(gl.float32) * sigmoid(gate.to(gl.float32))
    y = gl.where(everywhere(channel, live), y, 0.0)
    gl.store(o + batch * o_batch + head * o_head + channel, y.to(o.dtype.element_ty))
    roll(to_q, window_q, channel, conv_place, live)
    roll(to_k, window_k, channel, conv_place, live)
    roll(to_v, window_v, channel, conv_place, live)


MAX_REGISTERS = {torch.bfloat16: 96, torch.float32: 168}
"""Of a thread, by dtype of the states: five CTAs of 128 channels fit on an SM, or three, as many as shared memory holds."""


def fused_kda_decode(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Where states lie on no 16 bytes, the portable kernel."""
    (launch,) = portable.fused_kda_decode(problem, t, arch, outputs)
    given = dict(zip(fused_decode_kernel.arg_names, launch.arguments))
    if not aligned(given["initial_state"], 16):
        return [launch]
    names = ("K", "V", "W", "CHANNELS", "GATE", "BETA", "L2NORM", "OVERLAP")  # in the kernel's order
    return [
        replace(
            launch,
            kernel=fused_decode_kernel,
            constants={name: launch.constants[name] for name in names},
            num_warps=problem.V // 32,
            max_registers=MAX_REGISTERS[given["initial_state"].dtype],
        )
    ]
