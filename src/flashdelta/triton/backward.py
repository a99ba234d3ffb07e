"""The backward pass (docs/backward.md derives every formula). Stages after `prepare` and `recurrence` have run again:

reverse   walks a sequence's chunks from the last to the first and leaves the gradient of the state after each
wy        from states and their gradients to those of values, of what `prepare` left, and of its matrices
intra     from the gradients of the matrices `A` and `Aqk` to those of queries, keys, decays, and of what a gate, a norm or
          a sigmoid was fed: by value head, and of the gate's parameters by chunk
finish    sums of those
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.blocks import SUB, boundary_matrix, inverse_norm, pair_mask, split_decay, sums
from .device.common import LOG2E, chunks_before, decay_rate, locate, own_chunk, sigmoid, softplus_log2, write_strength
from .device.states import load_state, state_offsets, store_state


@triton.jit(do_not_specialize=["T", "N", "HV", "slots", "has_initial", "has_final"])
def reverse_kernel(
    w,
    qg,
    kg,
    Aqk,
    decay,
    grad_o,
    grad_final,
    grad_pseudo,
    grad_h,
    grad_initial,
    cu_seqlens,
    has_initial,
    has_final,
    T,
    N,
    HV,
    slots,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (sequence, value head, `BV` value channels). `grad_h [S, HV, V, K]`: of the state after the chunk in each
    slot; `grad_pseudo [B, T, HV, V]`: of the pseudo-values."""
    slice_, head, n, batch, begin, end = locate(cu_seqlens, T, HV, V // BV)
    chunks = ((end - begin + C - 1) // C).to(tl.int32)
    slot = n * slots
    if cu_seqlens is not None:
        slot = begin // C + n
    dtype = w.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    in_slot = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    grad = load_state(grad_final, n * HV * K * V + in_slot, has_final)
    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    grad_o += batch * o_batch + head * o_head
    for step in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - step
        chunk = (slot + i) * HV + head
        token = begin + i * C + row
        valid = (token < end)[:, None]
        tl.store(grad_h + chunk * K * V + value[:, None] * K + key[None, :], grad.to(dtype))
        tile_o = tl.load(grad_o + token[:, None] * o_token + value[None, :], mask=valid, other=0.0)
        tile_Aqk = tl.load(Aqk + chunk * C * C + square)
        tile_kg = tl.load(kg + chunk * C * K + tile)
        tile_qg = tl.load(qg + chunk * C * K + tile)
        tile_w = tl.load(w + chunk * C * K + tile)
        total = tl.load(decay + chunk * K + key)
        left = tl.trans(tile_o)
        pseudo = tl.dot(left, tile_Aqk, input_precision=PRECISION)
        pseudo = tl.dot(grad.to(dtype), tl.trans(tile_kg), acc=pseudo, input_precision=PRECISION)
        here = ((batch * T + token) * HV + head)[:, None] * V + value[None, :]
        tl.store(grad_pseudo + here, tl.trans(pseudo).to(dtype), mask=valid)
        grad = tl.dot(left, tile_qg, acc=grad * total[None, :], input_precision=PRECISION)
        grad -= tl.dot(pseudo.to(dtype), tile_w, input_precision=PRECISION)
    store_state(grad_initial, n * HV * K * V + in_slot, grad, has_initial)


@triton.jit
def chunk_decays(g, dt_bias, tokens, column, valid, head, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr):
    """The gate's input (with its bias) of a chunk's rows, and their log2 decays as `high + low`."""
    x = tl.load(g + tokens + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + head * K + column).to(tl.float32)[None, :]
    high, low = split_decay(x, rate, lower_bound, valid[:, None], GATE)
    return x, high, low


@triton.jit
def row_norms(x, tokens, valid, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr):
    norm = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        norm = inverse_norm(x, tokens, valid[:, None], K, BK, C)
    return norm


@triton.jit
def chunk_sums(
    g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr
):
    """From which `grown` and `shrunk` take their sums of log2 decays: the rows' decays as `high, low`. With the gate
    `cumulative` (`cumulative_log2`: in base 2) g holds the sums `G`: these and the last one, `G_C`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        first = tl.load(g + row[:, None] * g_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        second = tl.load(g + (tl.minimum(count, row.shape[0]) - 1) * g_token + column).to(tl.float32)
    else:
        _, first, second = chunk_decays(
            g, dt_bias, row[:, None] * g_token, column, valid, head, rate, lower_bound, K, GATE
        )
    return first, second


@triton.jit
def exp_of(G, GATE: tl.constexpr):
    """Of a sum of log decays as the gate `cumulative` or `cumulative_log2` has it."""
    return tl.exp2(G * LOG2E if GATE == "cumulative" else G)


@triton.jit
def grown_by(first, second, row, GATE: tl.constexpr):
    """`exp(G)` of all rows, and `exp(G_C)`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        grown = exp_of(first, GATE)
        total = exp_of(second, GATE)
    else:
        grown = tl.exp2(sums(row[None, :] <= row[:, None], first, second))
        # rows past the end do not decay
        total = tl.sum(tl.where(row[:, None] == row.shape[0] - 1, grown, 0.0), axis=0)
    return grown, total


@triton.jit
def shrunk_by(first, second, row, GATE: tl.constexpr):
    """`exp(G_C - G)` of all rows."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        # of sums close to each other the difference is exact: before any product rounds them
        shrunk = exp_of(second[None, :] - first, GATE)
    else:
        shrunk = tl.exp2(sums(row[None, :] > row[:, None], first, second))
    return shrunk


@triton.jit
def value_tile(x, rows, value, valid):
    return tl.load(x + rows + value[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def through_states(
    x,
    rows,
    valid,
    states,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x S^T` by slices of value channels."""
    found = tl.zeros([valid.shape[0], column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        value = t + tl.arange(0, BV)
        tile = value_tile(x, rows, value, valid)
        state = tl.load(states + state_offsets(0, value, column, K, V, V_FIRST)).to(tile.dtype)
        found = tl.dot(tile, state, acc=found, input_precision=PRECISION)
    return found


@triton.jit
def state_overlap(h, grad_h, column, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """`sum_v S dS'` by slices of value channels."""
    whole = tl.zeros([column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        in_state = state_offsets(0, t + tl.arange(0, BV), column, K, V, V_FIRST)
        whole += tl.sum(tl.load(h + in_state).to(tl.float32) * tl.load(grad_h + in_state).to(tl.float32), axis=0)
    return whole


@triton.jit
def value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V: tl.constexpr):
    """The chosen channels of `v, do, v', dv'`."""
    tile_v = value_tile(v, row[:, None] * v_token, value, valid)
    tile_o = value_tile(grad_o, row[:, None] * o_token, value, valid)
    return (
        tile_v,
        tile_o,
        value_tile(pseudo, in_own * V, value, valid),
        value_tile(grad_pseudo, in_own * V, value, valid),
    )


@triton.jit
def value_products(
    grad_M, Aqk, of_beta, tiles, tile_M, strength, grad_v, grad_Aqk, in_values, valid, PRECISION: tl.constexpr
):
    """Adds the channels of `value_tiles` to `dM` (without beta), `dAqk` and `dbeta`; stores `dv`."""
    tile_v, tile_o, tile_p, tile_dp = tiles
    grad_M = tl.dot(tile_dp, tl.trans(tile_v), acc=grad_M, input_precision=PRECISION)
    if grad_Aqk is not None:
        Aqk = tl.dot(tile_o, tl.trans(tile_p), acc=Aqk, input_precision=PRECISION)
    written = tl.dot(tl.trans(tile_M), tile_dp, input_precision=PRECISION)
    of_beta += tl.sum(written * tile_v.to(tl.float32), axis=1)
    written *= strength[:, None]
    tl.store(grad_v + in_values, written.to(grad_v.dtype.element_ty), mask=valid[:, None])
    return grad_M, Aqk, of_beta


@triton.jit(
    do_not_specialize=[
        *("T", "N", "H", "HV", "slots", "rows", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound"),
    ]
)
def wy_kernel(
    q,
    k,
    g,
    v,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    solved,
    h,
    pseudo,
    grad_o,
    grad_pseudo,
    grad_h,
    grad_q,
    grad_k,
    grad_G,
    grad_v,
    grad_beta,
    grad_A,
    grad_Aqk,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    rows,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (chunk, value head). In float32, by token and value head: `grad_q, grad_k` (of normalised rows) and
    `grad_G [B, T, HV, K]` without what comes through the chunk's matrices, `grad_beta [B, T, HV]`; `grad_A, grad_Aqk`, lower.
    `grad_v [B, T, HV, V]` is done.

    Matrices `solved, grad_A` lie by chunk slot, `[S, HV, C, C]`, and so do states, `[S, HV, V, K]`. `BY_TOKEN` (the operator of
    its own): matrices by token, `[B, T, HV, C]`, and states of `rows` chunks a batch row, packed without gaps between
    sequences.
    """
    head, slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, slots, N, T, HV, C)
    state = slot
    if BY_TOKEN and cu_seqlens is not None:
        # a chunk's first token tells how many chunks begin before it
        state = chunks_before(cu_seqlens, slot * 0 + N, start, C, 128)
        count = tl.where(state < rows, count, 0)
    if count <= 0:
        return
    HELD: tl.constexpr = BV == V
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    v += batch * v_batch + start * v_token + head * v_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    grad_o += batch * o_batch + start * o_token + head * o_head
    own = (batch * T + start) * HV + head
    pseudo += own * V
    grad_pseudo += own * V
    grad_v += own * V
    grad_q += own * K
    grad_k += own * K
    grad_G += own * K
    grad_beta += own
    h += (state * HV + head) * K * V
    grad_h += (state * HV + head) * K * V
    matrix = own * C if BY_TOKEN else (slot * HV + head) * C * C
    solved += matrix
    grad_A += matrix
    dtype: tl.constexpr = pseudo.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < count
    lower = row[:, None] >= row[None, :]
    in_own = row[:, None] * HV
    in_matrix = (in_own if BY_TOKEN else row[:, None]) * C + row[None, :]
    tile_M = tl.load(solved + in_matrix, mask=lower & valid[:, None], other=0.0).to(dtype)
    strength = write_strength(tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)

    grad_M = tl.zeros([C, C], tl.float32)
    Aqk = tl.zeros([C, C], tl.float32)
    of_beta = tl.zeros([C], tl.float32)
    if HELD:
        value = tl.arange(0, V)
        held = value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V)
        grad_M, Aqk, of_beta = value_products(
            *(grad_M, Aqk, of_beta, held, tile_M, strength, grad_v, grad_Aqk),
            *(in_own * V + value[None, :], valid, PRECISION),
        )
    else:
        for t in tl.range(0, V, BV, num_stages=1):
            value = t + tl.arange(0, BV)
            tiles = value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V)
            grad_M, Aqk, of_beta = value_products(
                *(grad_M, Aqk, of_beta, tiles, tile_M, strength, grad_v, grad_Aqk),
                *(in_own * V + value[None, :], valid, PRECISION),
            )
    if grad_Aqk is not None:
        tl.store(grad_Aqk + matrix + in_matrix, tl.where(lower, Aqk, 0.0))

    rate = decay_rate(A_log, head)
    norm_q = row_norms(q, row[:, None] * q_token, valid, C, K, 32, L2NORM)
    norm_k = row_norms(k, row[:, None] * k_token, valid, C, K, 32, L2NORM)
    last = row[:, None] == tl.minimum(count, C) - 1
    for s in tl.range(0, K, BK, num_stages=STAGES):
        # in an order in which little is alive at a time
        column = s + tl.arange(0, BK)
        tile_q = value_tile(q, row[:, None] * q_token, column, valid)
        tile_k = value_tile(k, row[:, None] * k_token, column, valid)
        first, second = chunk_sums(g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K, GATE)
        if HELD:
            in_state = state_offsets(0, value, column, K, V, V_FIRST)
            before = tl.load(h + in_state).to(dtype)
            after = tl.load(grad_h + in_state).to(dtype)
            whole = tl.sum(before.to(tl.float32) * after.to(tl.float32), axis=0)
            w = tl.dot(held[3], before, input_precision=PRECISION)
        else:
            whole = state_overlap(h, grad_h, column, K, V, BV, V_FIRST)
            w = through_states(grad_pseudo, in_own * V, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        # w came from `v' = u - w S`
        w = (-w).to(dtype)
        grown, total = grown_by(first, second, row, GATE)
        tile_k = tile_k.to(tl.float32) * norm_k[:, None]
        written = tile_k * grown
        grad_M = tl.dot(w, tl.trans(written.to(dtype)), acc=grad_M, input_precision=PRECISION)
        kG = tl.dot(tl.trans(tile_M), w, input_precision=PRECISION)
        of_beta += tl.sum(kG * written, axis=1)
        kG *= grown * strength[:, None]
        if HELD:
            qg = tl.dot(held[1], before, input_precision=PRECISION)
        else:
            qg = through_states(grad_o, row[:, None] * o_token, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        qg *= grown * scale
        in_keys = in_own * K + column[None, :]
        tl.store(grad_q + in_keys, qg, mask=valid[:, None])
        G = tile_q.to(tl.float32) * norm_q[:, None] * qg + tile_k * kG
        if HELD:
            kg = tl.dot(held[2], after, input_precision=PRECISION)
        else:
            kg = through_states(pseudo, in_own * V, valid, grad_h, column, K, V, BV, V_FIRST, PRECISION)
        kg *= shrunk_by(first, second, row, GATE)
        tl.store(grad_k + in_keys, kG + kg, mask=valid[:, None])
        # `G_C` is the last row's own G: there what goes through kg = k exp(G_C - G) cancels, exactly only if left out
        left = tl.where(last, 0.0, tile_k * kg)
        G -= left
        G += tl.where(last, (tl.sum(left, axis=0) + whole * total)[None, :], 0.0)
        tl.store(grad_G + in_keys, G, mask=valid[:, None])

    tl.store(grad_beta + row * HV, of_beta, mask=valid)
    # of the matrix of which M = (I + A)^-1 is: -M^T dM M^T
    X = tl.dot(tl.trans(tile_M), (grad_M * strength[None, :]).to(dtype), input_precision=PRECISION)
    A = -tl.dot(X.to(dtype), tl.trans(tile_M), input_precision=PRECISION)
    below = row[:, None] > row[None, :]
    tl.store(grad_A + in_matrix, tl.where(below, A, 0.0), mask=valid[:, None] | (not BY_TOKEN))


@triton.jit
def pair_gradients(
    sum_q,
    sum_left,
    sum_right,
    G,
    pairs,
    Aqk,
    A,
    q,
    k,
    written,
    left,
    right,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds, for the chosen pairs (i, j), what reaches `q_i` and `k_i` (for beta 1) on the left, `k_j` on the right, and `G`,
    where `exp(G_i - G_j) = left_i right_j`. `written`: `beta_i k_i`."""
    Aqk = tl.where(pairs, Aqk, 0.0).to(dtype)
    A = tl.where(pairs, A, 0.0).to(dtype)
    k_right = (k * right).to(dtype)
    q_left = (q * left).to(dtype)
    w_left = (written * left).to(dtype)
    # with operands as they were rounded: then a pair takes from `G_j` what it adds to `G_i`, and the sum of `G` over later
    # rows is exact where it cancels
    found = tl.dot(Aqk, k_right, input_precision=PRECISION)
    sum_q += found * left
    G += found * q_left.to(tl.float32)
    found = tl.dot(A, k_right, input_precision=PRECISION)
    sum_left += found * left
    G += found * w_left.to(tl.float32)
    found = tl.dot(tl.trans(Aqk), q_left, input_precision=PRECISION)
    found = tl.dot(tl.trans(A), w_left, acc=found, input_precision=PRECISION)
    sum_right += found * right
    G -= found * k_right.to(tl.float32)
    return sum_q, sum_left, sum_right, G


@triton.jit
def no_parts(part_A_log, part_dt_bias, chunk, K: tl.constexpr):
    """Of a slot without a chunk."""
    zeros = tl.zeros([K], tl.float32)
    if part_A_log is not None:
        tl.store(part_A_log + chunk * K + tl.arange(0, K), zeros)
    if part_dt_bias is not None:
        tl.store(part_dt_bias + chunk * K + tl.arange(0, K), zeros)


@triton.jit
def gate_gradient(x, grad, rate, lower_bound, GATE: tl.constexpr):
    """From the gradient of a log decay to that of the gate's input `x`, and of `A_log`."""
    if GATE == "softplus":
        found = -rate * sigmoid(x) * grad
        of_A = -rate * (softplus_log2(x) / LOG2E) * grad
    elif GATE == "lower_bound":
        s = sigmoid(x * rate)
        found = lower_bound * s * (1.0 - s) * rate * grad
        of_A = found * x
    elif GATE == "logsigmoid":
        found = sigmoid(-x) * grad
        of_A = found * 0.0
    else:
        found = grad
        of_A = grad * 0.0
    return found, of_A


@triton.jit
def strength_gradient(x, grad, BETA: tl.constexpr):
    if BETA == "logit":
        s = sigmoid(x)
        grad *= s * (1.0 - s)
    elif BETA == "double_logit":
        s = sigmoid(x)
        grad *= 2.0 * s * (1.0 - s)
    return grad


@triton.jit(
    do_not_specialize=[
        *("T", "N", "H", "HV", "slots", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound"),
    ]
)
def intra_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    grad_A,
    grad_Aqk,
    grad_q,
    grad_k,
    grad_G,
    grad_beta,
    out_q,
    out_k,
    out_g,
    out_beta,
    part_A_log,
    part_dt_bias,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SAFE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (chunk, value head). Adds what comes through `A` and `Aqk` to the gradients that `wy` left (in place),
    then leaves those of the call's inputs, dense by value head: `out_q, out_k, out_g [B, T, HV, K]`, `out_beta [B, T, HV]`; of
    the gate's parameters the chunk's part, `part_A_log [S, HV, K]` and `part_dt_bias [S, HV, K]`."""
    head, slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, slots, N, T, HV, C)
    if count <= 0:
        no_parts(part_A_log, part_dt_bias, slot * HV + head, K)
        return
    LEVELS: tl.constexpr = 6 if C == 64 else 5
    FIRST: tl.constexpr = 5 if SAFE else 0
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = slot * HV + head
    dtype: tl.constexpr = q.dtype.element_ty
    row = tl.arange(0, C)
    i = row[:, None]
    j = row[None, :]
    valid = row < count
    own = ((batch * T + start + row) * HV + head)[:, None]
    square = chunk * C * C + i * C + j
    same = tl.load(grad_Aqk + chunk * C * C + row * (C + 1))[:, None] * scale
    raw = tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, write_strength(raw, BETA), 0.0)
    rate = decay_rate(A_log, head)
    norm_q = row_norms(q, i * q_token, valid, C, K, BK, L2NORM)
    norm_k = row_norms(k, i * k_token, valid, C, K, BK, L2NORM)
    dots_q = tl.zeros([C], tl.float32)
    dots_k = tl.zeros([C], tl.float32)
    of_beta = tl.load(grad_beta + (batch * T + start + row) * HV + head, mask=valid, other=0.0)
    for s in tl.range(0, K, BK, num_stages=1):
        column = s + tl.arange(0, BK)
        x, high, low = chunk_decays(g, dt_bias, i * g_token, column, valid, head, rate, lower_bound, K, GATE)
        tile_q = tl.load(q + i * q_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_k = tl.load(k + i * k_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_q *= norm_q[:, None]
        tile_k *= norm_k[:, None]
        written = tile_k * strength[:, None]
        # anew for every slice: else the compiler keeps what the pairs of each level select of them in shared memory
        A = tl.load(grad_A + square)
        Aqk = tl.load(grad_Aqk + square) * scale
        sum_q = tl.zeros([C, BK], tl.float32)
        sum_left = tl.zeros([C, BK], tl.float32)
        sum_right = tl.zeros([C, BK], tl.float32)
        in_own = own * K + column[None, :]
        G = tl.load(grad_G + in_own, mask=valid[:, None], other=0.0)
        if SAFE:
            # the middle of 32 rows as the reference of all their pairs, as in `prepare_bounded.near`
            distance = sums(boundary_matrix(4, C), high, low)
            signed = tl.where(i % 32 < SUB, -distance, distance)
            near = (i // 32 == j // 32) & (i > j)
            left = tl.exp2(signed)
            right = tl.exp2(-signed)
            sum_q, sum_left, sum_right, G = pair_gradients(
                sum_q, sum_left, sum_right, G, near, Aqk, A, tile_q, tile_k, written, left, right, dtype, PRECISION
            )
        for level in tl.range(FIRST, LEVELS, num_stages=1):
            # every pair i > j lies in the two halves of exactly one block, as in `prepare`
            factor = tl.exp2(sums(boundary_matrix(level, C), high, low))
            pairs = pair_mask(level, C)
            sum_q, sum_left, sum_right, G = pair_gradients(
                sum_q, sum_left, sum_right, G, pairs, Aqk, A, tile_q, tile_k, written, factor, factor, dtype, PRECISION
            )
        of_beta += tl.sum(tile_k * sum_left, axis=1)
        sum_left *= strength[:, None]
        # of a log decay: all sums that it is a term of
        decay = tl.cumsum(G, axis=0, reverse=True)
        found, of_A = gate_gradient(x, decay, rate, lower_bound, GATE)
        found = tl.where(valid[:, None], found, 0.0)
        tl.store(out_g + in_own, found.to(out_g.dtype.element_ty), mask=valid[:, None])
        if part_A_log is not None:
            tl.store(part_A_log + chunk * K + column, tl.sum(tl.where(valid[:, None], of_A, 0.0), axis=0))
        if part_dt_bias is not None:
            tl.store(part_dt_bias + chunk * K + column, tl.sum(found, axis=0))
        sum_q += tl.load(grad_q + in_own, mask=valid[:, None], other=0.0) + same * tile_k
        sum_k = sum_left + sum_right + same * tile_q
        sum_k += tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
        if L2NORM:
            dots_q += tl.sum(sum_q * tile_q, axis=1)
            dots_k += tl.sum(sum_k * tile_k, axis=1)
            tl.store(grad_q + in_own, sum_q, mask=valid[:, None])
            tl.store(grad_k + in_own, sum_k, mask=valid[:, None])
        else:
            tl.store(out_q + in_own, sum_q.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, sum_k.to(out_k.dtype.element_ty), mask=valid[:, None])
    of_beta = strength_gradient(raw, of_beta, BETA)
    tl.store(out_beta + (batch * T + start + row) * HV + head, of_beta.to(out_beta.dtype.element_ty), mask=valid)
    if L2NORM:
        # other threads of this program wrote part of what a thread now reads
        tl.debug_barrier()
        for s in tl.range(0, K, BK, num_stages=1):
            column = s + tl.arange(0, BK)[None, :]
            in_own = own * K + column
            tile_q = tl.load(q + i * q_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + i * k_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            sum_q = tl.load(grad_q + in_own, mask=valid[:, None], other=0.0)
            sum_k = tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
            sum_q = (sum_q - tile_q * (norm_q * dots_q)[:, None]) * norm_q[:, None]
            sum_k = (sum_k - tile_k * (norm_k * dots_k)[:, None]) * norm_k[:, None]
            tl.store(out_q + in_own, sum_q.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, sum_k.to(out_k.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["tokens", "N", "HV", "slots"])
def finish_kernel(
    heads_q,
    heads_k,
    part_A_log,
    part_dt_bias,
    cu_seqlens,
    grad_q,
    grad_k,
    grad_g,
    grad_v,
    grad_beta,
    grad_A_log,
    grad_dt_bias,
    tokens,
    N,
    HV,
    slots,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """First, if there are parts of the gate's parameters, one program per value head, which sums them over the `slots`. Then,
    if value heads share queries and keys or sequences are packed, one per (`ROWS` tokens, query head): sums of the `GROUP`
    value heads, and zeros for tokens of no sequence."""
    PARTS: tl.constexpr = part_A_log is not None or part_dt_bias is not None
    program = tl.program_id(0)
    if PARTS:
        if program < HV:
            if part_A_log is not None:
                tl.store(grad_A_log + program, tl.sum(sum_of_slots(part_A_log, program, slots, HV, K)))
            if part_dt_bias is not None:
                total = sum_of_slots(part_dt_bias, program, slots, HV, K)
                tl.store(grad_dt_bias + program * K + tl.arange(0, K), total)
            return
        program -= HV
    H = HV // GROUP
    head = (program % H).to(tl.int64)
    token = (program // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    inside = valid
    if cu_seqlens is not None:
        inside = valid & (token >= tl.load(cu_seqlens)) & (token < tl.load(cu_seqlens + N))
    outside = (valid & (inside == 0))[:, None]
    key = tl.arange(0, K)[None, :]
    in_keys = (token * H + head)[:, None] * K + key
    if GROUP > 1:
        total_q = tl.zeros([ROWS, K], tl.float32)
        total_k = tl.zeros([ROWS, K], tl.float32)
        for i in range(GROUP):
            in_heads = (token * HV + head * GROUP + i)[:, None] * K + key
            total_q += tl.load(heads_q + in_heads, mask=inside[:, None], other=0.0)
            total_k += tl.load(heads_k + in_heads, mask=inside[:, None], other=0.0)
        tl.store(grad_q + in_keys, total_q.to(grad_q.dtype.element_ty), mask=valid[:, None])
        tl.store(grad_k + in_keys, total_k.to(grad_k.dtype.element_ty), mask=valid[:, None])
    if cu_seqlens is not None:  # noqa: SIM102 (a constant, and what is known when it runs)
        if tl.max(outside.to(tl.int32)) > 0:
            if GROUP == 1:
                tl.store(grad_q + in_keys, tl.zeros([ROWS, K], grad_q.dtype.element_ty), mask=outside)
                tl.store(grad_k + in_keys, tl.zeros([ROWS, K], grad_k.dtype.element_ty), mask=outside)
            for i in range(GROUP):
                own = (token * HV + head * GROUP + i)[:, None]
                value = tl.arange(0, V)[None, :]
                tl.store(grad_g + own * K + key, tl.zeros([ROWS, K], grad_g.dtype.element_ty), mask=outside)
                tl.store(grad_v + own * V + value, tl.zeros([ROWS, V], grad_v.dtype.element_ty), mask=outside)
                tl.store(grad_beta + own, tl.zeros([ROWS, 1], grad_beta.dtype.element_ty), mask=outside)


@triton.jit
def sum_of_slots(parts, head, slots, HV, K: tl.constexpr):
    """`[K]`, in the order of the slots."""
    ROWS: tl.constexpr = 4096 // K
    total = tl.zeros([K], tl.float32)
    row = tl.arange(0, ROWS)
    for slot in range(0, slots, ROWS):
        at = ((slot + row).to(tl.int64) * HV + head)[:, None] * K + tl.arange(0, K)[None, :]
        total += tl.sum(tl.load(parts + at, mask=(slot + row < slots)[:, None], other=0.0), axis=0)
    return total
