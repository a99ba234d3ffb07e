"""Stage `verify` for Hopper: up to 17 speculative tokens, states as `[V, K]`. One CTA per (sequence, value head), a thread for
each value channel.

Contract, system of equations and products as in `triton/verify.py`. Data gets to where it is used in other ways:

* The state goes from memory to the registers that its MMAs read it from. An MMA sums over keys in any order, so a thread has 16
  adjacent bytes of a row.
* Gates, and rows for the MMAs, are worked out by key channel: a thread has all tokens of one.
* Pairs of tokens are products of rows, too. Bounded decays: of `exp(G_t)` and `exp(-G_s)`, which are within float32. Others: by
  levels. Every pair `s < t` lies in the two halves of one aligned block of tokens, and of those halves' rows one decays from
  token `s` to the end of the first half, the other from there to token `t`. All factors are products of `exp(g)`, none is a
  quotient. Levels of up to 8 tokens fit into one product, of as many MMAs per warp as that of bounded decays.
* The system is solved by value channel: a thread has all tokens of one, and what couples them is broadcast from shared memory.
  Substitution takes `TOKENS^2` multiplications, and no inverse.
* A 17th token sees the 16 before it, and none sees it. So it is two more columns of each product, in tiles of their own, and a
  sum over 16 tokens behind the substitution.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import StepProblem, StepTensors
from ...program.launch import REGISTERS, Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import AHEAD, beta_of, decay_rate, log2_decay
from ..shared.gluon.math import dot3, multiply, pick, store_parts
from ..shared.mma import two_parts
from ..shared.norms import L2_EPS
from ..shared.records import COUNTS, open_record, record_values, store_decay_and_key
from ..shared.scalars import SCALARS
from ..shared.sequences import at_token, end_of_few, own_work_tile
from ..shared.states import everywhere, start_slot
from ..stages.decode import step_arguments
from ..stages.launch import Config, aligned, launch

STEP = gl.constexpr(32)
"""Key channels of the state that are loaded at a time: 8 MMAs deep, of which a thread has 4 adjacent ones, twice."""


@gluon.jit
def rows_of(a, b):
    """`[2 T, K]`: token by token the row of `a`, then that of `b`, `[T, K]`."""
    return gl.join(a, b).permute((0, 2, 1)).reshape([2 * a.shape[0], a.shape[1]])


@gluon.jit
def load_parts(rows_s, i: gl.constexpr, transposed: gl.constexpr, layout: gl.constexpr):
    """Loads, of rows whose parts are `rows_s`, both parts of the `i`-th `STEP` key channels: `[rows, STEP]`, or `[STEP,
    rows]`."""
    high, low = rows_s[0].slice(i * STEP, STEP, dim=1), rows_s[1].slice(i * STEP, STEP, dim=1)
    if transposed:
        high, low = high.permute((1, 0)), low.permute((1, 0))
    return high.load(layout), low.load(layout)


@gluon.jit
def halves(x, layout: gl.constexpr):
    """Halves of `[rows, 2 T]`: what belongs to rows of k and of q, `[rows, T]`, in `layout`; no data moves between threads."""
    a, b = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)


@gluon.constexpr_function
def levels_of(T):
    return T.bit_length() - 1


@gluon.jit
def halves_of_blocks(x, level: gl.constexpr):
    """Halves of blocks of `2 << level` rows: the first and the second halves, `[T / 2, K]` each."""
    T: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    a, b = gl.split(x.reshape([T >> (level + 1), 2, 1 << level, K]).permute((0, 2, 3, 1)))
    return a.reshape([T // 2, K]), b.reshape([T // 2, K])


@gluon.jit
def blocks_of(a, b, level: gl.constexpr, layout: gl.constexpr):
    """`[T, K]`: what `halves_of_blocks` makes `a` and `b` of."""
    T: gl.constexpr = 2 * a.shape[0]
    K: gl.constexpr = a.shape[1]
    x = gl.join(a, b).reshape([T >> (level + 1), 1 << level, K, 2]).permute((0, 3, 1, 2)).reshape([T, K])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def pairs_by_levels(
    since_s, until_s, pairs_s, rows_s, k, q, exp_g,
    row_l: gl.constexpr, left_l: gl.constexpr, right_l: gl.constexpr, pairs_l: gl.constexpr, AT_ONCE,
):  # fmt: skip
    """A and B transposed, without B's diagonal, to `pairs_s`, 16 rows for every `AT_ONCE` levels; and rows for the state to
    `rows_s`. Returns `until` of the whole. `since_s` and `until_s` are for the rows of such levels.

    For level `l`, and aligned blocks of `2^l` tokens: `until` has the products of `exp(g)` from behind a token to its block's
    end, `since` those from the block's begin up to and with it, and `whole` those of blocks. A token is a source where its
    block is the first half of one of `2^(l + 1)`.
    """
    T: gl.constexpr = k.shape[0]
    K: gl.constexpr = k.shape[1]
    since = exp_g
    whole = exp_g
    until = gl.full([T, K], 1.0, gl.float32, layout=row_l)
    LEVELS: gl.constexpr = levels_of(T)
    COLUMNS: gl.constexpr = since_s[0].shape[0]
    for level in gl.static_range(LEVELS):
        since_1, since_2 = halves_of_blocks(since, level)
        until_1, until_2 = halves_of_blocks(until, level)
        whole_1, whole_2 = halves_of_blocks(whole, level)
        k_1, k_2 = halves_of_blocks(k, level)
        _, q_2 = halves_of_blocks(q, level)
        store_rows(since_s, level % AT_ONCE, rows_of(k_2 * since_2, q_2 * since_2))
        store_rows(until_s, level % AT_ONCE, k_1 * until_1)
        since = blocks_of(since_1, since_2 * whole_1, level, row_l)
        until = blocks_of(until_1 * whole_2, until_2, level, row_l)
        whole = blocks_of(whole_1 * whole_2, whole_1 * whole_2, level, row_l)
        if level == LEVELS - 1:  # ahead of the product, so that no registers are held for them
            since *= AHEAD
            store_rows(rows_s, 0, rows_of(k * since, q * since))
        if level % AT_ONCE == AT_ONCE - 1 or level == LEVELS - 1:
            pairs = gl.zeros([16, COLUMNS], gl.float32, layout=pairs_l)
            for i in gl.static_range(K // STEP):
                pairs = dot3(load_parts(until_s, i, False, left_l), load_parts(since_s, i, True, right_l), pairs)
            pairs_s.slice(level // AT_ONCE * 16, 16, dim=0).store(pairs)
    return until


@gluon.jit
def store_rows(rows_s, nth: gl.constexpr, rows):
    """Stores `rows`, in `two_parts`, as the `nth` group of so many rows in both parts of `rows_s`."""
    N: gl.constexpr = rows.shape[0]
    high, low = two_parts(rows)
    rows_s[0].slice(nth * N, N, dim=0).store(high)
    rows_s[1].slice(nth * N, N, dim=0).store(low)


@gluon.jit
def allocate_parts(ROWS, K, layout: gl.constexpr):
    """Both parts of `[ROWS, K]`. In one memory a barrier would separate what is stored to them."""
    high = gl.allocate_shared_memory(gl.float32, [ROWS, K], layout)
    low = gl.allocate_shared_memory(gl.float32, [ROWS, K], layout)
    return high, low


@gluon.jit
def pairs_of_level(pairs_s, s: gl.constexpr, level: gl.constexpr, T, AT_ONCE):
    """Pairs that a level has of source `s`, A and B in turn, `[1, T]`."""
    layout: gl.constexpr = gl.BlockedLayout([1, T], [32, 1], [gl.num_warps(), 1], [1, 0])
    place: gl.constexpr = level % AT_ONCE
    row: gl.constexpr = level // AT_ONCE * 16 + place * (T // 2) + ((s >> (level + 1)) << level) + s % (1 << level)
    return pairs_s.slice(row, 1, dim=0).slice(place * T, T, dim=1).load(layout)


@gluon.jit
def pairs_of(pairs_s, s: gl.constexpr, T, AT_ONCE, layout: gl.constexpr):
    """Pairs that `pairs_by_levels` has found of source `s` and later tokens, A and B, `[1, T]` each in `layout`."""
    nth = gl.arange(0, T, layout=gl.SliceLayout(0, layout))
    A = gl.zeros([1, T], gl.float32, layout=layout)
    B = A
    for level in gl.static_range(levels_of(T)):
        if (s >> level) % 2 == 0:
            a, b = gl.split(pairs_of_level(pairs_s, s, level, T, AT_ONCE).reshape([1, T // 2, 2]))
            # of the block in whose first half the token is, the second one
            there = ((nth >> level) == (s >> level) + 1)[None, :]
            A = gl.where(there, twice(a, level, layout), A)
            B = gl.where(there, twice(b, level, layout), B)
    return A, B


@gluon.jit
def twice(x, level: gl.constexpr, layout: gl.constexpr):
    """`x [1, T / 2]` in both halves of blocks of `2 << level` columns, `[1, T]`."""
    T: gl.constexpr = 2 * x.shape[1]
    both = gl.join(x, x).reshape([1, T >> (level + 1), 1 << level, 2]).permute((0, 1, 3, 2)).reshape([1, T])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def add_product(state, rows, sums):
    """`sums + state rows`, of rows whose parts are given. A bfloat16 state is exact in TF32."""
    if state.dtype == gl.float32:
        sums = dot3(two_parts(state), rows, sums)
    else:
        exact = state.to(gl.float32)
        sums = mma_v2(exact, rows[1], sums, input_precision="tf32")
        sums = mma_v2(exact, rows[0], sums, input_precision="tf32")
    return sums


@gluon.jit
def load_row(row, channel, there):
    """Channels of one row, zeros if it is not `there`."""
    return gl.load(row + channel, mask=everywhere(channel, there), other=0.0).to(gl.float32)


@gluon.jit
def load_keys(state, i: gl.constexpr, read, V, K, layout: gl.constexpr):
    """The `i`-th `STEP` key channels of a state, `[V, STEP]`."""
    value = gl.arange(0, V, layout=gl.SliceLayout(1, layout))
    key = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)) + i * STEP
    at = value[:, None] * K + key[None, :]
    return gl.load(state + at, mask=everywhere(at, read), other=0.0, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=SCALARS)
def verify_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o,
    initial_state, records, starts, targets, accepted, has_initial_state, lowest, start_slots, target_slots,
    has_initial, has_final, start_pitch: gl.int64, target_pitch: gl.int64, target_step: gl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, T, group, HV,
    q_batch: gl.int64, q_token: gl.int64, q_head: gl.int64, k_batch: gl.int64, k_token: gl.int64, k_head: gl.int64,
    v_batch: gl.int64, v_token: gl.int64, v_head: gl.int64, g_batch: gl.int64, g_token: gl.int64, g_head: gl.int64,
    beta_batch: gl.int64, beta_token: gl.int64, beta_head: gl.int64,
    o_batch: gl.int64, o_token: gl.int64, o_head: gl.int64,
    K: gl.constexpr, V: gl.constexpr, TOKENS: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
    L2NORM: gl.constexpr, NULL_GIVES_ZERO: gl.constexpr, ONE_MORE: gl.constexpr,
):  # fmt: skip
    """Verifies at most `TOKENS` tokens per sequence, in `V / 32` warps. `T = TOKENS`; k is above q, in rows `2 t`, `2 t + 1`:

    k, q, g  --by key channel-->  rows_s [2, 2 T, K]  exp(G) k and exp(G) q       until_s [2, 16, K]  exp(-G) k
                                    |      |                                         |
    state  --4 x [V, 32]--> mma_v2  <------'      '------------> mma_v2 <------------'
                              |                                    |
                              v  by value channel                  v
               a, b [V, T]: substitution            <--   pairs_s [16, 2 T]: A and B transposed

    That is with bounded decays. With others `pairs_by_levels` makes A and B of rows of their own. `ONE_MORE` token has k and q
    in rows 0 and 1 of `more_s`, which decay from the start on, and without bounds in rows 2 and 3, which decay by its own gate
    alone: a level of pairs, whose sources are all tokens before it.
    """
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 2 * TOKENS
    BOUNDED: gl.constexpr = GATE == "lower_bound"
    # without bounds: levels of pairs whose rows are in one product, and its columns, T a level
    AT_ONCE: gl.constexpr = 3 if TOKENS == 8 else 2
    COLUMNS: gl.constexpr = 8 if TOKENS == 4 else 32
    # by key channel, and by token for the norms
    row_l: gl.constexpr = gl.BlockedLayout([TOKENS, 1], [1, 32], [1, W], [1, 0])
    norm_l: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [W, 1], [1, 0])
    # the state's product, and that of all pairs of tokens
    sums_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    state_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_l, k_width=4)
    rows_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums_l, k_width=4)
    pairs_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, W], instr_shape=[16, 8])
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=pairs_l, k_width=4)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=pairs_l, k_width=4)
    # by value channel
    both_l: gl.constexpr = gl.BlockedLayout([1, ROWS], [32, 1], [W, 1], [1, 0])
    each_l: gl.constexpr = gl.BlockedLayout([1, TOKENS], [32, 1], [W, 1], [1, 0])
    pair_l: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [W, 1], [1, 0])
    # 8 lanes read 64 adjacent bytes of two rows
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, order=[1, 0])
    # 8 lanes read 16 bytes of a row each
    exchanged: gl.constexpr = gl.SwizzledSharedLayout(4, max(1, 32 // ROWS), min(8, ROWS // 4), order=[1, 0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])

    gdc_wait()
    gdc_launch_dependents()
    slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, 1)
    count = (end_of_few(begin, end, most_tokens) - begin).to(gl.int32)
    there = count > 0
    qk_head = (head.to(gl.int32) // group).to(gl.int64)
    q, k = at_token((q, k), (q_batch, q_token, q_head, k_batch, k_token, k_head), batch, begin, qk_head)
    v, g = at_token((v, g), (v_batch, v_token, v_head, g_batch, g_token, g_head), batch, begin, head)
    beta, o = at_token((beta, o), (beta_batch, beta_token, beta_head, o_batch, o_token, o_head), batch, begin, head)

    slot, live, read = start_slot(
        *(starts, targets, accepted, has_initial_state, n, there, has_initial, start_row, start_token, target_row),
        *(most_tokens, lowest, start_slots, target_slots, False),
    )
    initial_state += slot * start_pitch + head * (K * V)
    # as many registers as there are for it: all of a bfloat16 state, half of another
    AHEAD_STEPS: gl.constexpr = 64 // initial_state.dtype.element_ty.primitive_bitwidth
    tiles = (load_keys(initial_state, 0, read, V, K, state_l), load_keys(initial_state, 1, read, V, K, state_l))
    for i in gl.static_range(2, min(AHEAD_STEPS, K // STEP)):
        tiles += (load_keys(initial_state, i, read, V, K, state_l),)  # type: ignore[assignment]

    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, row_l))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, row_l))
    tile = (token < count)[:, None] & (key >= 0)[None, :]
    tile_g = gl.load(g + token[:, None] * g_token + key[None, :], mask=tile, other=0.0)
    tile_k = gl.load(k + token[:, None] * k_token + key[None, :], mask=tile, other=0.0)
    tile_q = gl.load(q + token[:, None] * q_token + key[None, :], mask=tile, other=0.0)
    own = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, norm_l))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, norm_l))
    known = (own < count)[:, None] & (channel >= 0)[None, :]
    own_k = gl.load(k + own[:, None] * k_token + channel[None, :], mask=known, other=0.0)
    own_q = gl.load(q + own[:, None] * q_token + channel[None, :], mask=known, other=0.0)
    own_beta = gl.load(beta + own * beta_token, mask=own < count, other=0.0)
    value = gl.arange(0, V, layout=gl.SliceLayout(1, each_l))
    nth = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, each_l))
    stored = (nth < count)[None, :] & (value >= 0)[:, None]
    tile_v = gl.load(v + nth[None, :] * v_token + value[:, None], mask=stored, other=0.0)
    if ONE_MORE:
        more = count > TOKENS
        more_g = load_row(g + TOKENS * g_token, key, more)
        more_k = load_row(k + TOKENS * k_token, key, more)
        more_q = load_row(q + TOKENS * q_token, key, more)
        more_own_k = load_row(k + TOKENS * k_token, channel, more)
        more_own_q = load_row(q + TOKENS * q_token, channel, more)
        more_v = load_row(v + TOKENS * v_token, value, more)
        more_beta = gl.load(beta + TOKENS * beta_token, mask=more, other=0.0)
    rate = decay_rate(A_log, head)
    bias = gl.zeros([K], gl.float32, layout=gl.SliceLayout(0, row_l))
    if dt_bias is not None:
        bias = gl.load(dt_bias + head * K + key).to(gl.float32)
    records, recorded = open_record(
        *(records, starts, targets, n, head, slot, count, slice_),
        *(start_row, target_row, target_pitch, lowest, start_slots, target_slots),
        *(gl.arange(0, COUNTS, layout=gl.SliceLayout(1, norm_l)), K, V),
    )

    tile_k = tile_k.to(gl.float32)
    exp_g = gl.exp2(log2_decay(tile_g.to(gl.float32) + bias[None, :], rate, lower_bound, GATE))
    in_records = token.to(gl.int64)[:, None] * target_step + key[None, :]
    store_decay_and_key(records, in_records, everywhere(in_records, recorded) & tile, exp_g, tile_k, K)
    if ONE_MORE:
        more_exp_g = gl.exp2(log2_decay(more_g + bias, rate, lower_bound, GATE))
        in_record = TOKENS * target_step + key
        store_decay_and_key(records, in_record, everywhere(key, recorded & more), more_exp_g, more_k, K)
        decay = gl.reduce(gl.where(tile, exp_g, 1.0), 0, multiply) * more_exp_g * AHEAD
        more_s = allocate_parts(8, K, swizzled)
        store_rows(more_s, 0, rows_of((more_k * decay)[None, :], (more_q * decay)[None, :]))
        if not BOUNDED:
            store_rows(more_s, 1, rows_of((more_k * more_exp_g)[None, :], (more_q * more_exp_g)[None, :]))
    if BOUNDED:
        since = gl.associative_scan(gl.where(tile, exp_g, 1.0), 0, multiply) * AHEAD
        both_s = gl.allocate_shared_memory(gl.float32, [2, ROWS, K], swizzled)
        store_parts(both_s, rows_of(tile_k * since, tile_q.to(gl.float32) * since))
        # an MMA has 16 rows; those of no token stay as they are, and so do the rows of pairs that come of them: nobody reads
        # either
        both_until_s = gl.allocate_shared_memory(gl.float32, [2, 16, K], swizzled)
        store_parts(both_until_s, tile_k / since)
        rows_s = both_s.index(0), both_s.index(1)
        until_s = both_until_s.index(0), both_until_s.index(1)
    else:
        rows_s = allocate_parts(ROWS, K, swizzled)

    own_k, own_q = own_k.to(gl.float32), own_q.to(gl.float32)
    norm_k = gl.full([TOKENS], 1.0, gl.float32, layout=gl.SliceLayout(1, norm_l))
    norm_q = norm_k
    if L2NORM:
        norm_k = gl.rsqrt(gl.sum(own_k * own_k, axis=1) + L2_EPS)
        norm_q = gl.rsqrt(gl.sum(own_q * own_q, axis=1) + L2_EPS)
    strength = beta_of(own_beta.to(gl.float32), BETA) * norm_k
    if BOUNDED:
        factors_s = gl.allocate_shared_memory(gl.float32, [3, TOKENS], lines)
        strength_s, decayed_s, norm_s = factors_s.index(0), factors_s.index(1), factors_s.index(2)
    else:
        strength_s = gl.allocate_shared_memory(gl.float32, [TOKENS], lines)
        decayed_s = gl.allocate_shared_memory(gl.float32, [TOKENS], lines)
        norm_s = gl.allocate_shared_memory(gl.float32, [TOKENS], lines)
    strength_s.store(strength)
    decayed_s.store(strength * norm_k)
    norm_s.store(norm_q * scale)

    if ONE_MORE:
        more_norm_k, more_norm_q = 1.0, 1.0
        if L2NORM:
            more_norm_k = gl.rsqrt(gl.sum(more_own_k * more_own_k) + L2_EPS)
            more_norm_q = gl.rsqrt(gl.sum(more_own_q * more_own_q) + L2_EPS)
        more_strength = beta_of(more_beta.to(gl.float32), BETA) * more_norm_k
        more_diagonal = gl.sum(more_own_q * more_own_k)

    if BOUNDED:
        pairs = gl.zeros([16, ROWS], gl.float32, layout=pairs_l)
        for i in gl.static_range(K // STEP):
            pairs = dot3(load_parts(until_s, i, False, left_l), load_parts(rows_s, i, True, right_l), pairs)
        pairs_s = gl.allocate_shared_memory(gl.float32, [16, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
        pairs_s.store(pairs)
    else:
        diagonal_s = gl.allocate_shared_memory(gl.float32, [TOKENS], lines)
        diagonal_s.store(gl.sum(own_q * own_k, axis=1))
        since_s = allocate_parts(COLUMNS, K, swizzled)
        until_s = allocate_parts(16, K, swizzled)
        pairs_s = gl.allocate_shared_memory(
            gl.float32, [32 if TOKENS == 16 else 16, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        )
        until = pairs_by_levels(
            *(since_s, until_s, pairs_s, rows_s, tile_k, tile_q.to(gl.float32), gl.where(tile, exp_g, 1.0)),
            *(row_l, left_l, right_l, pairs_l, AT_ONCE),
        )
        if ONE_MORE:
            store_rows(until_s, 0, tile_k * until)

    sums = gl.zeros([V, ROWS], gl.float32, layout=sums_l)
    if ONE_MORE:
        more_sums = gl.zeros([V, 8], gl.float32, layout=sums_l)
        more_pairs = gl.zeros([16, 8], gl.float32, layout=pairs_l)
    for i in gl.static_range(K // STEP):
        parts = load_parts(rows_s, i, True, rows_l)
        if i + AHEAD_STEPS < K // STEP:
            tiles += (load_keys(initial_state, i + AHEAD_STEPS, read, V, K, state_l),)  # type: ignore[assignment]
        sums = add_product(tiles[i], parts, sums)
        if ONE_MORE:
            more_sums = add_product(tiles[i], load_parts(more_s, i, True, rows_l), more_sums)
            more_pairs = dot3(load_parts(until_s, i, False, left_l), load_parts(more_s, i, True, right_l), more_pairs)

    sums_s = gl.allocate_shared_memory(gl.float32, [V, ROWS], exchanged)
    sums_s.store(sums)
    if ONE_MORE:
        more_sums_s = gl.allocate_shared_memory(gl.float32, [V, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
        more_sums_s.store(more_sums)  # here, or the compiler has the product wait, and holds the state for it
        more_pairs_s = gl.allocate_shared_memory(gl.float32, [8, 16], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
        more_pairs_s.permute((1, 0)).store(more_pairs)
    along_k, along_q = halves(sums_s.load(both_l), each_l)
    factor_l: gl.constexpr = gl.SliceLayout(0, each_l)
    strength, decayed = strength_s.load(factor_l), decayed_s.load(factor_l)
    written = strength[None, :] * tile_v.to(gl.float32) - (decayed * (1 / AHEAD))[None, :] * along_k
    out = along_q * (1 / AHEAD)
    diagonal = strength
    if not BOUNDED:
        diagonal = diagonal_s.load(factor_l)
    for s in gl.static_range(TOKENS):
        if BOUNDED:
            A, B = halves(pairs_s.slice(s, 1, dim=0).load(both_l), each_l)
        else:
            A, B = pairs_of(pairs_s, s, TOKENS, AT_ONCE, each_l)
            B = gl.where((nth == s)[None, :], diagonal[None, :], B)
        of_s = pick(written, s)[:, None]
        # by selection, so that a NaN reaches no earlier token
        written = gl.where((nth > s)[None, :], written - of_s * (A * decayed[None, :]), written)
        out = gl.where((nth >= s)[None, :], out + of_s * B, out)
    out *= norm_s.load(factor_l)[None, :]
    if NULL_GIVES_ZERO:
        out = gl.where(live, out, 0.0)
    # plus a 0 that the compiler can't see: else offsets and the mask that v was loaded with are kept until here, and spilled
    nothing = gl.minimum(count, 0)
    stored = (nth < count + nothing)[None, :] & (value >= 0)[:, None]
    value += nothing
    nth += nothing
    gl.store(o + nth[None, :] * o_token + value[:, None], out.to(o.dtype.element_ty), mask=stored)
    in_records = nth.to(gl.int64)[None, :] * target_step + value[:, None]
    gl.store(record_values(records, K) + in_records, written, mask=everywhere(in_records, recorded) & stored)
    if ONE_MORE:
        along_k, along_q = halves(more_sums_s.slice(0, 2, dim=1).load(pair_l), each_l)
        FIRST: gl.constexpr = 0 if BOUNDED else 2
        A = more_pairs_s.slice(FIRST, 1, dim=0).load(each_l)
        B = more_pairs_s.slice(FIRST + 1, 1, dim=0).load(each_l)
        along_k = along_k * (1 / AHEAD) + gl.sum(written * A, axis=1)[:, None]
        along_q = along_q * (1 / AHEAD) + gl.sum(written * B, axis=1)[:, None]
        of_last = more_strength * more_v[:, None] - more_strength * more_norm_k * along_k
        out = (along_q + more_diagonal * of_last) * (more_norm_q * scale)
        if NULL_GIVES_ZERO:
            out = gl.where(live, out, 0.0)
        gl.store(
            o + TOKENS * o_token + value[:, None], out.to(o.dtype.element_ty), mask=everywhere(value, more)[:, None]
        )
        in_record = TOKENS * target_step + value[:, None]
        gl.store(record_values(records, K) + in_record, of_last, mask=everywhere(in_record, recorded & more))


def max_registers(problem: StepProblem, tokens: int, sms: int) -> int | None:
    """Registers of a thread. 168 up to 8 tokens: three CTAs of four warps fit on an SM. With 4 tokens and a bfloat16 state 128,
    and four CTAs, where an SM gets two or four.

    The next launch's CTAs come to an SM as soon as there is room, wherever that is. An SM has its share of them and no more
    where what fits is a multiple of the share; and of two CTAs' successors both are there before the wait, if four fit.
    """
    if tokens > 8:
        return None
    share = -(-problem.N * problem.HV // sms)
    three, four = (REGISTERS // (problem.V * most) for most in (168, 128))
    few = tokens == 4 and problem.state_dtype == torch.bfloat16
    return 128 if few and three % share and four % share == 0 else 168


def verify(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch] | None:
    """Speculative tokens into a replay buffer. None where states lie on no 16 bytes."""
    own = step_arguments(problem, t, outputs)
    if not aligned(own["initial_state"], 16):
        return None
    tokens = next((x for x in (4, 8) if problem.most_tokens <= x), 16)
    own |= dict(TOKENS=tokens, ONE_MORE=problem.most_tokens > tokens)
    c = Config(problem.V // 32, max_registers=max_registers(problem, tokens, sm_count(t.device)))
    return [launch(verify_kernel, problem.N * problem.HV, problem, t, own, c, overlaps=True)]
