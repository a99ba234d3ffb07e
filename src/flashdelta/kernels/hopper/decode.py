"""Stage `decode` for Hopper: one token per sequence, states in bfloat16 as `[V, K]`. One CTA of one warp per (sequence, value
head, slice of `BV` value channels).

Contract and order of operations: as `triton/decode.py`. A warp is kept from waiting in other ways:

* States and rows come through shared memory, by asynchronous copies. ptxas would move loads to registers behind the work on
  the rows, to save registers, and a warp would wait for memory three times.
* A thread works out `K / 32` channels of the rows, not those of all the elements that it updates.
* Both sums over K are MMAs, for which a bfloat16 state is exact and rows of float32 come in two parts.
* Addresses are worked out before the wait for the kernel before this one, from an index that it may yet overwrite; if it did,
  the state is copied again.
* Memory is idle from the last load of one launch to the first of the next. So some CTAs prefetch their state to the L2 cache
  before they wait (`ahead`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import StepProblem, StepTensors
from ...program.launch import Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import beta_of, decay_rate, head_bias, log2_decay
from ..shared.gluon.compat import copy_async
from ..shared.gluon.math import split_high_low
from ..shared.norms import L2_EPS
from ..shared.scalars import SCALARS
from ..shared.sequences import at_token, own_work_tile
from ..shared.states import everywhere, start_slot, target_slot
from ..stages.decode import DECODE_FEW, step_arguments
from ..stages.launch import Config, aligned, launch
from .launch import prefetching_ctas


@gluon.jit
def add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@gluon.jit
def prefetch(at):
    """Brings what lies at these addresses to the L2 cache."""
    asm: gl.constexpr = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(asm, "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_to_cache(at, SIZE):
    """Prefetches `SIZE` bytes from the address `at` on to the L2 cache, by lines of 128."""
    line_l: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    prefetch(at.to(gl.int64, bitcast=True) + gl.arange(0, SIZE // 128, layout=line_l) * 128)


@gluon.jit
def copy_tiles(state_s, start, in_slot, read, TILES, SIZE):
    """Starts the copies of tiles of `SIZE` elements from `start` on, zeros if nothing is `read`, each a group of copies."""
    for i in gl.static_range(TILES):
        copy_async(state_s.index(i), start + (i * SIZE + in_slot), mask=everywhere(in_slot, read))
        async_copy.commit_group()


@gluon.jit(do_not_specialize=SCALARS)
def decode_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o,
    initial_state, final_state, starts, targets, accepted, has_initial_state, lowest, start_slots, target_slots,
    has_initial, has_final, start_pitch: gl.int64, target_pitch: gl.int64, target_step: gl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, T, group, HV,
    q_batch: gl.int64, q_token: gl.int64, q_head: gl.int64, k_batch: gl.int64, k_token: gl.int64, k_head: gl.int64,
    v_batch: gl.int64, v_token: gl.int64, v_head: gl.int64, g_batch: gl.int64, g_token: gl.int64, g_head: gl.int64,
    beta_batch: gl.int64, beta_token: gl.int64, beta_head: gl.int64,
    o_batch: gl.int64, o_token: gl.int64, o_head: gl.int64, first_ahead, past_ahead,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
    IN_PLACE: gl.constexpr, TWO_POOLS: gl.constexpr, NULL_GIVES_ZERO: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp, 16 value channels of the state (a tile) at a time:

        q, k, g  --cp.async-->  q_s, k_s, g_s [K]        state tiles --cp.async--> state_s [BV / 16, 16, K]
                                    |                                                  |
                                    v  32 lanes, K / 32 channels each                  v
              decay, norms, <q, k>;  right_s [8, K] = decay k, decay q in two parts;  mma_v2: tile right^T = [16, S k and S q]
                                                                                       |
              o = norm_q (S q + <q, k> correction)   <--   correction = beta (v - norm_k S k)
              state = decay S + correction k         -->   to memory, from the tile's layout

    `q`, `k`, `g` and the states that are read lie on multiples of 16 bytes; their strides are multiples of 16 elements.
    CTAs from `first_ahead` to `past_ahead` prefetch.
    """
    TILE: gl.constexpr = 16  # value channels of an MMA
    TILES: gl.constexpr = BV // TILE
    # states as they lie in memory: a thread has 16 bytes of a row
    tile_l: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [1, 1], [1, 0])
    sums_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_l, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums_l, k_width=2)
    # a thread has some channels of a row, and the value channels whose sums it ends up with
    key_l: gl.constexpr = gl.BlockedLayout([K // 32], [32], [1], [0])
    value_l: gl.constexpr = gl.SliceLayout(1, sums_l)
    rows_s: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    line_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    there = begin < end
    qk_head = (head.to(gl.int32) // group).to(gl.int64)
    q, k = at_token((q, k), (q_batch, q_token, q_head, k_batch, k_token, k_head), batch, 0, qk_head)
    v, g = at_token((v, g), (v_batch, v_token, v_head, g_batch, g_token, g_head), batch, 0, head)
    beta, o = at_token((beta, o), (beta_batch, beta_token, beta_head, o_batch, o_token, o_head), batch, 0, head)
    initial_state += head * (K * V)
    final_state += head * (K * V)
    key = gl.arange(0, K, layout=key_l)
    value = slice_ * BV + gl.arange(0, TILE, layout=value_l)
    tile_value = slice_ * BV + gl.arange(0, TILE, layout=gl.SliceLayout(1, tile_l))
    in_slot = tile_value[:, None] * K + gl.arange(0, K, layout=gl.SliceLayout(0, tile_l))[None, :]
    named = (starts, targets, accepted, has_initial_state, n, there, has_initial, start_row, start_token, target_row)
    slot, live, read = start_slot(*named, most_tokens, lowest, start_slots, target_slots, TWO_POOLS)
    if OVERLAP:
        cta = gl.program_id(0)
        if (cta >= first_ahead) & (cta < past_ahead) & (read != 0):
            fetch_to_cache(initial_state + slot * start_pitch + slice_ * (BV * K), 2 * BV * K)
        # always true, as addresses have fewer than 62 bits; ptxas would work them out after the wait
        if q.to(gl.int64) + k.to(gl.int64) + initial_state.to(gl.int64) + g.to(gl.int64) != 0:
            gdc_wait()
        gdc_launch_dependents()

    q_s = gl.allocate_shared_memory(q.dtype.element_ty, [K], line_s)
    k_s = gl.allocate_shared_memory(k.dtype.element_ty, [K], line_s)
    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [K], line_s)
    copy_async(q_s, q + key)
    copy_async(k_s, k + key)
    copy_async(g_s, g + key)
    async_copy.commit_group()
    state_s = gl.allocate_shared_memory(gl.bfloat16, [TILES, TILE, K], rows_s)
    copy_tiles(state_s, initial_state + slot * start_pitch, in_slot, read, TILES, TILE * K)
    copied_slot = slot
    copied = read
    if OVERLAP:
        slot, live, read = start_slot(*named, most_tokens, lowest, start_slots, target_slots, TWO_POOLS)
    # volatile: else ptxas moves the load behind the sums
    next_v = gl.load(v + value, volatile=True)
    write_beta = gl.load(beta)
    rate = decay_rate(A_log, head)
    bias = head_bias(dt_bias, head, key, K)

    async_copy.wait_group(TILES)
    row_q, row_k, row_g = q_s.load(key_l).to(gl.float32), k_s.load(key_l).to(gl.float32), g_s.load(key_l).to(gl.float32)
    write_beta = beta_of(write_beta.to(gl.float32), BETA)
    decay = gl.exp2(log2_decay(row_g + bias, rate, lower_bound, GATE))
    norm_q = scale
    norm_k = 1.0
    square_q, square_k, overlap = gl.reduce((row_q * row_q, row_k * row_k, row_q * row_k), 0, add_three)
    if L2NORM:
        norm_q = scale * gl.rsqrt(square_q + L2_EPS)
        norm_k = gl.rsqrt(square_k + L2_EPS)
    decay_s = gl.allocate_shared_memory(gl.float32, [K], line_s)
    decay_s.store(decay)
    key_s = gl.allocate_shared_memory(gl.float32, [K], line_s)
    key_s.store(row_k)
    # `[K, 2 of k and q, 2 parts, 2]`; of 8 columns, the least an MMA has, half are empty
    both = gl.join(decay * row_k, decay * row_q)
    high, low = split_high_low(both)
    parts = gl.join(high, low)
    parts = gl.join(parts, gl.zeros_like(parts))
    right_s = gl.allocate_shared_memory(gl.bfloat16, [8, K], rows_s)
    right_s.store(parts.permute((3, 2, 1, 0)).reshape([8, K]))
    if OVERLAP and (slot != copied_slot) | (read != copied):
        async_copy.wait_group(0)
        copy_tiles(state_s, initial_state + slot * start_pitch, in_slot, read, TILES, TILE * K)
    decay = decay_s.load(gl.SliceLayout(0, tile_l))[None, :]
    row_k = key_s.load(gl.SliceLayout(0, tile_l))[None, :]
    stored = has_final
    if IN_PLACE:
        stored *= live.to(gl.int32)
    if TWO_POOLS:
        slot, _ = target_slot(targets, n * target_row, n, lowest, target_slots)
    final_state += slot * target_pitch
    for i in gl.static_range(TILES):
        row_v = next_v.to(gl.float32)
        if i + 1 < TILES:
            next_v = gl.load(v + (i + 1) * TILE + value, volatile=True)
        async_copy.wait_group(TILES - 1 - i)
        tile_s = state_s.index(i)
        # for each tile, as before the branch above it would take registers through it, 72 instead of 66
        right = right_s.permute((1, 0)).load(right_l)
        sums = mma_v2(tile_s.load(left_l), right, gl.zeros([TILE, 8], gl.float32, layout=sums_l))
        along_k, along_q = gl.split(gl.sum(sums.reshape([TILE, 4, 2]), axis=1))
        along_k = gl.convert_layout(along_k, value_l)
        along_q = gl.convert_layout(along_q, value_l)
        correction = write_beta * (row_v - norm_k * along_k)
        out = norm_q * (along_q + overlap * norm_k * correction)
        if NULL_GIVES_ZERO:
            out = gl.where(live, out, 0.0)
        gl.store(o + i * TILE + value, out.to(o.dtype.element_ty))
        correction = gl.convert_layout(norm_k * correction, gl.SliceLayout(1, tile_l))[:, None]
        state = tile_s.load(tile_l).to(gl.float32) * decay + correction * row_k
        at = final_state + (i * TILE * K + in_slot)
        gl.store(at, state.to(gl.bfloat16), mask=everywhere(in_slot, stored))


DECODE_AT_ONCE = 28
"""CTAs of `decode` that registers and shared memory let an SM run at once (K = 128; at 64 a few more)."""


def decode(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch] | None:
    """One token per sequence. None for few pairs of sequence and head, and where copies can't be asynchronous."""
    own = step_arguments(problem, t, outputs)
    many = problem.N * problem.HV > DECODE_FEW
    if not many or not all(aligned(x, 16) for x in (t.q, t.k, t.g, own["initial_state"])):
        return None
    BV = min(problem.V, 2048 // problem.K)
    ctas = problem.N * problem.HV * (problem.V // BV)
    first, past = prefetching_ctas(ctas, DECODE_AT_ONCE * sm_count(t.device))
    own |= dict(BV=BV, first_ahead=first, past_ahead=past)
    return [launch(decode_kernel, ctas, problem, t, own, Config(num_warps=1), overlaps=True)]
