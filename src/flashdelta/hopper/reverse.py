"""Stage `reverse` of the backward pass for Hopper: walks a sequence's chunks from the last to the first and leaves the gradient
of the state after each. A work item is a (sequence, value head, slice of 64 value channels).

Contract: as `triton/reverse.py`, from the tiles that `prepare` leaves; `grad_h [R, HV, V, K]` has the chunks of all sequences
one after the other.

As in `recurrence`, everything is transposed: the gradients of the state `[64, K]` and of the pseudo-values `[64, 64]` are
accumulators of one product and, rounded to bf16, register operands of the next. One warp fetches, four compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .device.compat import copy_async, copy_tile
from .device.layouts import LINES, position, to_lines
from .device.math import wide
from .device.pipeline import load_halves, stage_barriers, state_offsets, store_halves
from .device.tile_scheduler import BV, C, chunks_before, even_parts, locate_part
from .recurrence import store_output


@gluon.jit
def locate(k, cu_seqlens, sizes, SLICES: gl.constexpr):
    """The program's item number `k`: value head, sequence, batch row, first token, chunks, tokens, first chunk slot."""
    head, n, batch, begin, end, slot, _, _, _, _ = locate_part(k, 0, None, None, cu_seqlens, None, sizes, SLICES)
    return head, n, batch, begin, (end - begin + C - 1) // C, end - begin, slot


@gluon.jit
def load(
    tiles_d,
    decay,
    grad_o,
    stages,
    cu_seqlens,
    sizes,
    strides,
    K: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loader: one warp that keeps the stages full. `inverse` stays where it is."""
    tiles_s, decay_s, o_s, ready, free = stages
    _, N, HV, _, _ = sizes
    SLICES: gl.constexpr = V // BV
    slice_ = gl.program_id(0) % SLICES
    o_batch, o_token, o_head = strides
    KH: gl.constexpr = K // 64
    USED: gl.constexpr = 3 * KH + 1
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line_l: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, copy_l)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, copy_l))
    key = gl.arange(0, K, layout=line_l)
    in_o = row[:, None] * (o_token * 8) + column[None, :]
    turn = 0
    for k in range(even_parts(N * HV, SLICES)):
        head, _n, batch, begin, chunks, tokens, slot = locate(k, cu_seqlens, sizes, SLICES)
        in_head = (wide(batch, o_batch) + wide(head, o_head)) * 8 + slice_ * BV
        for step in range(chunks):
            i = chunks - 1 - step
            s = turn % STAGES
            mbarrier.wait(free.index(s), (turn // STAGES) & 1 ^ 1)
            bar = ready.index(s)
            chunk = (slot + i) * HV + head
            at = (chunk * ((USED + 1) * 64)).to(gl.int32)
            mbarrier.expect(bar, USED * 8192)
            for t in gl.static_range(3 * KH):
                copy_tile(tiles_d, [at + t * 64, 0], bar, tiles_s.index(s * USED + t))
            copy_tile(tiles_d, [at + (3 * KH + 1) * 64, 0], bar, tiles_s.index(s * USED + 3 * KH))
            here = grad_o + (in_head + wide(begin + i * C, o_token) * 8)
            inside = (row < (tokens - i * C).to(gl.int32))[:, None]
            copy_async(o_s.index(s), here + in_o, mask=inside)
            copy_async(decay_s.index(s), decay + chunk * K + key)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            turn += 1


@gluon.jit
def compute(
    stages,
    turned_s,
    grad_pseudo,
    grad_h,
    grad_final,
    grad_initial,
    cu_seqlens,
    has_initial,
    has_final,
    sizes,
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The consumer: four warps that carry an item's gradient from chunk to chunk. The product of `do` and `Aqk` of the next
    chunk runs beside the end of one; what a chunk leaves goes to memory during the next one's first products."""
    tiles_s, decay_s, o_s, ready, free = stages
    T, N, HV, _, _ = sizes
    SLICES: gl.constexpr = V // BV
    slice_ = gl.program_id(0) % SLICES
    KH: gl.constexpr = K // 64
    USED: gl.constexpr = 3 * KH + 1
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    out_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    value = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LINES))
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, out_l)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, out_l))
    in_state = value[:, None] * K + key[None, :]
    token_stride = HV * (V // 8)
    in_pseudo = row[:, None] * (HV * V) + column[None, :]
    zero = gl.zeros((BV, C), gl.float32, layout=acc_l)
    turn = 0
    for k in range(even_parts(N * HV, SLICES)):
        head, n, batch, begin, chunks, tokens, _slot = locate(k, cu_seqlens, sizes, SLICES)
        first = n * ((T + C - 1) // C)
        if cu_seqlens is not None:
            first = chunks_before(cu_seqlens, n, T)
        at = state_offsets((n.to(gl.int64) * HV + head) * (K * V), value, key, K, V, V_FIRST)
        state0, state1 = load_halves(grad_final, at, NEXT, has_final, K, acc_l)
        pseudo_item = grad_pseudo + (wide(batch, T) * HV + head) * V + slice_ * BV
        if chunks > 0:
            done = zero.to(gl.bfloat16)
            done_token = begin
            done_count = 0
            mbarrier.wait(ready.index(turn % STAGES), (turn // STAGES) & 1)
            o_t = o_s.index(turn % STAGES).permute((1, 0)).load(dot_l)
            pseudo = warpgroup_mma(
                o_t, tiles_s.index((turn % STAGES) * USED + 3 * KH), zero, use_acc=False, is_async=True
            )
            for step in range(chunks):
                i = chunks - 1 - step
                s = turn % STAGES
                base = s * USED
                left0 = gl.convert_layout(state0.to(gl.bfloat16), dot_l, assert_trivial=True)
                pseudo = warpgroup_mma(left0, tiles_s.index(base + 2 * KH).permute((1, 0)), pseudo, is_async=True)
                if KH == 2:
                    left1 = gl.convert_layout(state1.to(gl.bfloat16), dot_l, assert_trivial=True)
                    pseudo = warpgroup_mma(
                        left1, tiles_s.index(base + 2 * KH + 1).permute((1, 0)), pseudo, is_async=True
                    )
                state0 = state0 * decay_s.index(s).slice(0, 64).load(gl.SliceLayout(0, acc_l))[None, :]
                state0 = warpgroup_mma(o_t, tiles_s.index(base + KH), state0, is_async=True)
                if KH == 2:
                    state1 = state1 * decay_s.index(s).slice(64, 64).load(gl.SliceLayout(0, acc_l))[None, :]
                    state1 = warpgroup_mma(o_t, tiles_s.index(base + KH + 1), state1, is_async=True)
                here = grad_h + (wide(first + i, HV) + head) * (K * V)
                gl.store(here + in_state, to_lines(gl.convert_layout(left0, acc_l, assert_trivial=True)))
                if KH == 2:
                    gl.store(here + 64 + in_state, to_lines(gl.convert_layout(left1, acc_l, assert_trivial=True)))
                store_output(pseudo_item, turned_s, done, done_token, done_count, row, in_pseudo, token_stride, out_l)
                if KH == 2:
                    pseudo, left0, left1 = warpgroup_mma_wait(KH, deps=[pseudo, left0, left1])
                else:
                    pseudo, left0 = warpgroup_mma_wait(KH, deps=[pseudo, left0])
                done = pseudo.to(gl.bfloat16)
                p = gl.convert_layout(done, dot_l, assert_trivial=True)
                # w is stored negated
                state0 = warpgroup_mma(p, tiles_s.index(base), state0, is_async=True)
                if KH == 2:
                    state1 = warpgroup_mma(p, tiles_s.index(base + 1), state1, is_async=True)
                done_token = begin + i * C
                done_count = (tokens - i * C).to(gl.int32)
                o_t = warpgroup_mma_wait(KH, deps=[o_t])
                # the last chunk does its own product again, which nobody uses
                turn += 1
                after = gl.where(step + 1 < chunks, turn, turn - 1)
                mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
                o_t = o_s.index(after % STAGES).permute((1, 0)).load(dot_l)
                pseudo = warpgroup_mma(
                    o_t, tiles_s.index((after % STAGES) * USED + 3 * KH), zero, use_acc=False, is_async=True
                )
                if KH == 2:
                    state0, state1, p = warpgroup_mma_wait(1, deps=[state0, state1, p])
                else:
                    state0, p = warpgroup_mma_wait(1, deps=[state0, p])
                mbarrier.arrive(free.index(s), count=1)
            pseudo, o_t = warpgroup_mma_wait(0, deps=[pseudo, o_t])
            store_output(pseudo_item, turned_s, done, done_token, done_count, row, in_pseudo, token_stride, out_l)
        store_halves(grad_initial, at, NEXT, state0, state1, has_initial, K)


_STRIDES = [f"o_{dim}" for dim in ("batch", "token", "head")]
SCALARS = ("has_initial", "has_final", "T", "N", "HV", "slots", *_STRIDES)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit(do_not_specialize=SCALARS)
def reverse_kernel(
    tiles_d,
    decay,
    grad_o,
    grad_final,
    grad_pseudo,
    grad_h,
    grad_initial,
    cu_seqlens,
    has_initial: gl.int32,
    has_final: gl.int32,
    T: gl.int32,
    N: gl.int32,
    HV: gl.int32,
    slots: gl.int32,
    o_batch: gl.int32,
    o_token: gl.int32,
    o_head: gl.int32,
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    USED: gl.constexpr = 3 * (K // 64) + 1
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * USED, 64, 64], tiles_d.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], tiles_d.layout)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    turned_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], tiles_d.layout)
    ready, free = stage_barriers(STAGES)
    stages = (tiles_s, decay_s, o_s, ready, free)
    sizes = (T, N, HV, slots, 0)
    strides = (o_batch, o_token, o_head)
    gl.warp_specialize(
        [
            (
                compute,
                (
                    stages,
                    turned_s,
                    grad_pseudo,
                    grad_h,
                    grad_final,
                    grad_initial,
                    cu_seqlens,
                    has_initial,
                    has_final,
                    sizes,
                    K,
                    V,
                    V_FIRST,
                    STAGES,
                ),
            ),
            (load, (tiles_d, decay, grad_o, stages, cu_seqlens, sizes, strides, K, V, STAGES)),
        ],
        [1],
        [96],
    )
