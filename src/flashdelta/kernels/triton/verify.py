"""Stage `verify`: up to 17 speculative tokens that leave the pool alone and record what each changes, all at once. One CTA per
(sequence, value head, slice of `BV` value channels).

Contract: outputs and records of `reference.decode`. With `G_t` the sum of log decays up to and with token `t`, and `w_t` what a
token writes, `S_t = diag(exp(g_t)) S_(t-1) + k_t w_t^T`:

    a_t = (exp(G_t) k_t)^T S_0,   A_ts = sum_k k_t k_s exp(G_t - G_s),   s < t
    b_t = (exp(G_t) q_t)^T S_0,   B_ts = sum_k q_t k_s exp(G_t - G_s),   s <= t
    w_t = c_t (v_t - d_t (a_t + sum_s A_ts w_s)),   d_t = 1 / |k_t|,   c_t = beta_t d_t
    o_t = scale / |q_t| (b_t + sum_s B_ts w_s)

As one system over the rows of k and then those of q, with one inverse and one product with it:

    [ I + diag(c d) A   0 ] [ w ]   [ c (v - d a) ]
    [      -B           I ] [ y ] = [      b      ],   o = scale / |q| y

The state is read once, for one matrix product with the decayed rows, and stays as it came. A, B and the inverse are worked out
while it is in flight. Bounded decays: `exp(G_t)` and its inverse are within float32, so A and B are one product. Others: a loop
over the tokens decays a tile of keys, whose row `s` is `k_s exp(G_t - G_s)` at token `t`; its sums with `k_t` and `q_t` are
rows of A and B. No exponent is a difference.

Products are MMAs of 22 bits or more, so that results differ from those of `decode` by rounding alone. An MMA multiplies what
is not finite by the zeros of earlier rows too. So rows with such an entry are zeros in it and NaN afterwards: the token's and,
if it changes the state, those of all later ones.

A 17th token is no part of the system, which a tile of 16 tokens holds: it is a sum over those before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import StepProblem, StepTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ..shared.gates import AHEAD, beta_of, decay_rate, log2_decay
from ..shared.mma import stacked, two_parts
from ..shared.norms import L2_EPS
from ..shared.products import rounded_product
from ..shared.records import COUNTS, open_record, record_values, store_decay_and_key
from ..shared.scalars import SCALARS
from ..shared.sequences import at_token, end_of_few, own_work_tile
from ..shared.states import everywhere, start_slot, state_offsets
from ..stages.decode import step_arguments
from ..stages.launch import Config, launch
from .sub_chunks import pair_mask


@triton.jit
def dots(a, b):
    """`sum_k a_k b_k` of rows."""
    return tl.sum(rounded_product(a, b), axis=1)


@triton.jit
def norm_factors(rows, L2NORM):
    """`1 / |x|` of rows of q or k; 1 without `L2NORM`."""
    total = dots(rows, rows)
    norms = total * 0.0 + 1.0
    if L2NORM:
        norms = tl.rsqrt(total + L2_EPS)
    return norms


@triton.jit
def products(a, b):
    """`a b` of operands that come as `two_parts`."""
    total = tl.dot(a[1], b[0], input_precision="tf32")
    total = tl.dot(a[0], b[1], acc=total, input_precision="tf32")
    return tl.dot(a[0], b[0], acc=total, input_precision="tf32")


@triton.jit
def channels(first, TILE):
    """The value channels of a tile, and which of them there are: an MMA has 16 at least."""
    inside = tl.arange(0, max(TILE, 16))
    return first + inside, inside < TILE


@triton.jit
def load_tile(state, first, read, K, V, TILE, V_FIRST):
    """`TILE` value channels of a state, `[TILE, K]`; zeros where it is not `read`, and in what an MMA has more."""
    value, of_value = channels(first, TILE)
    key = tl.arange(0, max(K, 16))
    at = state_offsets(0, value, key, K, V, V_FIRST)
    there = everywhere(at, read)
    if K < 16 or TILE < 16:
        there &= of_value[:, None] & (key < K)[None, :]
    return tl.load(state + at, mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def by_warp(rows, SPLIT):
    """Rows `[tokens, channels]` as `[SPLIT, tokens, channels / SPLIT]`."""
    parts = tl.reshape(rows, [rows.shape[0], SPLIT, rows.shape[1] // SPLIT])
    return tl.permute(parts, (1, 0, 2))


@triton.jit
def along_rows(state, rows, MMA16):
    """`state rows^T`, `[BV, rows]`. A bfloat16 state is one number of TF32 or bfloat16 (`MMA16`), others are two of TF32; rows
    are two of TF32, or three of bfloat16, which are all of their bits."""
    rows = tl.trans(rows)
    if MMA16:
        high = rows.to(tl.bfloat16)
        rest = rows - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(state, low)
        sums = tl.dot(state, middle, acc=sums)
        sums = tl.dot(state, high, acc=sums)
    elif state.dtype == tl.bfloat16:
        high, low = two_parts(rows)
        exact = state.to(tl.float32)
        sums = tl.dot(exact, low, input_precision="tf32")
        sums = tl.dot(exact, high, acc=sums, input_precision="tf32")
    else:
        sums = products(two_parts(state), two_parts(rows))
    return sums


@triton.jit
def inverse(A, tokens, COUNT):
    """`(I + A)^-1` of a strictly lower `A [COUNT, COUNT]`, by blocks twice as large each time. Halves of it have no more than
    `tokens` rows that are not zeros, so that larger blocks of those have no corners."""
    row = tl.arange(0, COUNT)[:, None]
    column = tl.arange(0, COUNT)[None, :]
    X = tl.where(row == column, 1.0, tl.where(pair_mask(0, COUNT), -A, 0.0))
    for level in tl.static_range(1, 5):
        if 2 << level < COUNT:
            if tokens > 1 << level:
                X = with_corners(X, A, level, COUNT)
        elif 2 << level == COUNT:
            X = with_corners(X, A, level, COUNT)
    return X


@triton.jit
def not_finite(x):
    """Marks those of `x` that are infinite or NaN."""
    return x - x != 0.0


@triton.jit
def with_corners(X, A, level: tl.constexpr, COUNT):
    """The inverse of blocks of `2 << level` rows from those of their halves: `[[x, 0], [c, y]]^-1 = [[X, 0], [-Y c X, Y]]`."""
    parts = two_parts(X)
    corner = products(parts, two_parts(tl.where(pair_mask(level, COUNT), A, 0.0)))
    return X - products(two_parts(corner), parts)


@triton.jit(do_not_specialize=SCALARS)
def verify_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o,
    initial_state, records, starts, targets, accepted, has_initial_state, lowest, start_slots, target_slots,
    has_initial, has_final, start_pitch: tl.int64, target_pitch: tl.int64, target_step: tl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, T, group, HV,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, MMA16: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr, NULL_GIVES_ZERO: tl.constexpr, OVERLAP: tl.constexpr, ONE_MORE: tl.constexpr,
):  # fmt: skip
    """Verifies at most `TOKENS` tokens per sequence, and `ONE_MORE`. Tiles of an MMA have at least 16 channels, those that do
    not exist are zeros.
    `SPLIT`: parts of the key channels, one per warp. `MMA16`: the interpreter has no MMAs of bfloat16."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BK: tl.constexpr = max(K, 16)
    ROWS: tl.constexpr = 2 * TOKENS
    slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    count = (end_of_few(begin, end, most_tokens) - begin).to(tl.int32)
    there = count > 0
    qk_head = (head.to(tl.int32) // group).to(tl.int64)
    q, k = at_token((q, k), (q_batch, q_token, q_head, k_batch, k_token, k_head), batch, begin, qk_head)
    v, g = at_token((v, g), (v_batch, v_token, v_head, g_batch, g_token, g_head), batch, begin, head)
    beta, o = at_token((beta, o), (beta_batch, beta_token, beta_head, o_batch, o_token, o_head), batch, begin, head)
    key = tl.max_contiguous(tl.arange(0, BK), 4)
    of_key = (key < K) if K < BK else key >= 0

    slot, live, read = start_slot(
        *(starts, targets, accepted, has_initial_state, n, there, has_initial, start_row, start_token, target_row),
        *(most_tokens, lowest, start_slots, target_slots, False),
    )
    initial_state += slot * start_pitch + head * (K * V)
    state = load_tile(initial_state, slice_ * BV, read, K, V, TILE, V_FIRST)
    records, has_row = open_record(
        *(records, starts, targets, n, head, slot, count, slice_),
        *(start_row, target_row, target_pitch, lowest, start_slots, target_slots, tl.arange(0, COUNTS), K, V),
    )

    rate = decay_rate(A_log, head)
    bias = tl.zeros([BK], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * K + key, mask=of_key, other=0.0).to(tl.float32)
    recorded = has_row & (slice_ == 0)

    token = tl.arange(0, TOKENS)
    tile = (token < count)[:, None] & of_key[None, :]
    tile_k = tl.load(k + token[:, None] * k_token + key[None, :], mask=tile, other=0.0).to(tl.float32)
    tile_q = tl.load(q + token[:, None] * q_token + key[None, :], mask=tile, other=0.0).to(tl.float32)
    norms = stacked(norm_factors(tile_k, L2NORM), norm_factors(tile_q, L2NORM))
    row = tl.arange(0, ROWS)
    own = row % TOKENS
    known = own < count
    of_k = row < TOKENS
    strength = beta_of(tl.load(beta + own * beta_token, mask=known, other=0.0).to(tl.float32), BETA) * norms
    if ONE_MORE:
        at_key = everywhere(key, count > TOKENS) & of_key
        more_k = tl.load(k + TOKENS * k_token + key, mask=at_key, other=0.0).to(tl.float32)
        more_q = tl.load(q + TOKENS * q_token + key, mask=at_key, other=0.0).to(tl.float32)
        more_g = tl.load(g + TOKENS * g_token + key, mask=at_key, other=0.0).to(tl.float32)
        more_beta = tl.load(beta + TOKENS * beta_token, mask=count > TOKENS, other=0.0).to(tl.float32)
        more_exp_g = tl.exp2(log2_decay(more_g + bias, rate, lower_bound, GATE))
        in_record = TOKENS * target_step + key
        store_decay_and_key(records, in_record, everywhere(key, recorded) & at_key, more_exp_g, more_k, K)

    if GATE == "lower_bound":
        x = tl.load(g + token[:, None] * g_token + key[None, :], mask=tile, other=0.0).to(tl.float32)
        exp_g = tl.exp2(log2_decay(x + bias[None, :], rate, lower_bound, GATE))
        in_records = token.to(tl.int64)[:, None] * target_step + key[None, :]
        store_decay_and_key(records, in_records, everywhere(in_records, recorded) & tile, exp_g, tile_k, K)
        since = tl.cumprod(tl.where(tile, exp_g, 1.0), 0) * AHEAD
        rows = stacked(tile_k * since, tile_q * since)
        until = two_parts(tl.permute(by_warp(tile_k / since, SPLIT), (0, 2, 1)))
        pairs = tl.sum(products(two_parts(by_warp(rows, SPLIT)), until), axis=0)
        if ONE_MORE:
            decayed = tile_k / since
            since = tl.sum(tl.where((token == TOKENS - 1)[:, None], since, 0.0), axis=0)
            decayed *= since[None, :]
    else:
        decayed = tl.zeros([TOKENS, BK], tl.float32)
        rows = tl.zeros([ROWS, BK], tl.float32)
        pairs = tl.zeros([ROWS, TOKENS], tl.float32)
        since = tl.full([BK], AHEAD, tl.float32)
        next_k = tl.load(k + key, mask=everywhere(key, there) & of_key, other=0.0)
        next_q = tl.load(q + key, mask=everywhere(key, there) & of_key, other=0.0)
        next_g = tl.load(g + key, mask=everywhere(key, there) & of_key, other=0.0)
        for t in range(0, tl.minimum(count, TOKENS) if ONE_MORE else count):
            row_k, row_q, row_g = next_k.to(tl.float32), next_q.to(tl.float32), next_g.to(tl.float32)
            k += k_token
            q += q_token
            g += g_token
            more = everywhere(key, t + 1 < count) & of_key
            next_k = tl.load(k + key, mask=more, other=0.0)
            next_q = tl.load(q + key, mask=more, other=0.0)
            next_g = tl.load(g + key, mask=more, other=0.0)
            exp_g = tl.exp2(log2_decay(row_g + bias, rate, lower_bound, GATE))
            store_decay_and_key(records + t * target_step, key, everywhere(key, recorded) & of_key, exp_g, row_k, K)
            since *= exp_g
            here_k, here_q = (row == t)[:, None], (row == TOKENS + t)[:, None]
            decayed = tl.where((token == t)[:, None], row_k[None, :], decayed * exp_g[None, :])
            rows = tl.where(here_k, (row_k * since)[None, :], tl.where(here_q, (row_q * since)[None, :], rows))
            by_k = rounded_product(decayed, row_k[None, :])
            pairs = tl.where(here_k, tl.sum(by_k, axis=1)[None, :], pairs)
            by_q = rounded_product(decayed, row_q[None, :])
            pairs = tl.where(here_q, tl.sum(by_q, axis=1)[None, :], pairs)

    if ONE_MORE:
        decayed *= more_exp_g[None, :]
        since *= more_exp_g
        none = tl.zeros([TOKENS], tl.float32)
        more_A = stacked(dots(decayed, more_k[None, :]), none)
        more_B = stacked(dots(decayed, more_q[None, :]), none)
        more_norm_k = norm_factors(more_k[None, :], L2NORM)
        more_norm_q = norm_factors(more_q[None, :], L2NORM)
        more_strength = beta_of(more_beta, BETA) * more_norm_k
        # 2 of 32: of 16 columns along N in bfloat16 Triton 3.6 multiplies others, on Hopper
        column = tl.arange(0, 32)
        more_rows = tl.where((column == 0)[:, None], (more_k * since)[None, :], 0.0)
        more_rows = tl.where((column == 1)[:, None], (more_q * since)[None, :], more_rows)
        more_diagonal = dots(more_k[None, :], more_q[None, :])

    pairs = tl.trans(stacked(tl.trans(pairs), tl.zeros([TOKENS, ROWS], tl.float32)))
    earlier = row[None, :] < tl.where(of_k, row, own + 1)[:, None]  # B has a diagonal
    weight = tl.where(of_k, strength * norms, -1.0)
    system = tl.where(earlier, pairs * weight[:, None], 0.0)
    spoiled = not_finite(strength + tl.sum(rows * 0.0, axis=1) + tl.sum(system * 0.0, axis=1))
    spoiled |= own >= tl.min(tl.where(spoiled & of_k, own, TOKENS), axis=0)
    solution = inverse(tl.where(spoiled[:, None], 0.0, system), most_tokens, ROWS)

    solution = two_parts(tl.trans(solution))
    of_w = known & of_k
    of_o = known & (row >= TOKENS)
    for tile_ in tl.static_range(0, BV, TILE):
        value, of_value = channels(slice_ * BV + tile_, TILE)
        tile_v = tl.load(v + own[None, :] * v_token + value[:, None], mask=of_w[None, :] & of_value[:, None], other=0.0)
        sums = along_rows(state, rows, MMA16)
        if ONE_MORE:
            more_sums = along_rows(state, more_rows, MMA16) * (1 / AHEAD)
            more_a = tl.sum(tl.where((column == 0)[None, :], more_sums, 0.0), axis=1)
            more_b = tl.sum(tl.where((column == 1)[None, :], more_sums, 0.0), axis=1)
        if tile_ + TILE < BV:
            state = load_tile(initial_state, slice_ * BV + tile_ + TILE, read, K, V, TILE, V_FIRST)
        right = strength[None, :] * tile_v.to(tl.float32) - weight[None, :] * (sums * (1 / AHEAD))
        without = spoiled[None, :] | not_finite(right)
        since_then = tl.min(tl.where(without & of_k[None, :], own[None, :], TOKENS), axis=1)
        result = products(two_parts(tl.where(without, 0.0, right)), solution)
        result = tl.where(without | (own[None, :] >= since_then[:, None]), float("nan"), result)
        out = result * (norms * scale)[None, :]
        if NULL_GIVES_ZERO:
            out = tl.where(live, out, 0.0)
        at = own[None, :] * o_token + value[:, None]
        tl.store(o + at, out.to(o.dtype.element_ty), mask=of_o[None, :] & of_value[:, None])
        at = own.to(tl.int64)[None, :] * target_step + value[:, None]
        recorded = everywhere(at, has_row) & of_w[None, :] & of_value[:, None]
        tl.store(record_values(records, K) + at, result, mask=recorded)
        if ONE_MORE:
            at_value = everywhere(value, count > TOKENS) & of_value
            more_v = tl.load(v + TOKENS * v_token + value, mask=at_value, other=0.0).to(tl.float32)
            # by selection, as the other columns are no values
            more_a += tl.sum(tl.where(of_k[None, :], result * more_A[None, :], 0.0), axis=1)
            more_b += tl.sum(tl.where(of_k[None, :], result * more_B[None, :], 0.0), axis=1)
            of_last = more_strength * (more_v - more_norm_k * more_a)
            out = (more_b + more_diagonal * of_last) * (more_norm_q * scale)
            if NULL_GIVES_ZERO:
                out = tl.where(live, out, 0.0)
            tl.store(o + TOKENS * o_token + value, out.to(o.dtype.element_ty), mask=at_value)
            in_record = TOKENS * target_step + value
            recorded = everywhere(value, has_row) & at_value
            tl.store(record_values(records, K) + in_record, of_last, mask=recorded)


def verify_config(problem: StepProblem) -> Config:
    """A head's whole state, 32 KB at a time, as A, B and the inverse are the same for all of it. With at most 8 tokens, three
    or four of these CTAs fit on an SM of Hopper."""
    wide = problem.state_dtype == torch.float32
    tile = min(problem.V, max(1, (8192 if wide else 16384) // problem.K))
    fits = problem.most_tokens <= 8 and problem.K <= 128
    cap = (168 if wide else 128) if fits else None
    return Config(4 if problem.K <= 128 else 8, BV=min(problem.V, 2 * tile), TILE=tile, max_registers=cap)


def verify(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Speculative tokens into a replay buffer."""
    c = verify_config(problem)
    tokens = 8 if problem.most_tokens <= 8 else 16
    own = dict(
        **step_arguments(problem, t, outputs),
        **dict(TOKENS=tokens, ONE_MORE=problem.most_tokens > tokens),
        SPLIT=max(1, min(c.num_warps, problem.K // 16)),
        MMA16=problem.state_dtype == torch.bfloat16 and not knobs.runtime.interpret,
    )
    ctas = problem.N * problem.HV * (problem.V // c.BV)
    return [launch(verify_kernel, ctas, problem, t, own, c, overlaps=arch >= 90)]
