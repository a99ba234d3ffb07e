"""Stage `decode`: KDA token by token, for few tokens a sequence. One program per (sequence, value head, slice of `TILES * BV`
value channels).

Contract (docs/decode.md; `reference.decode` is the definition), in fp32 throughout:

    S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - k_t^T S);   o_t = scale * q_t^T S

A tile `S^T [BV, K]` of the state is read once and stays in registers. Both sums over K are taken of the state as it was read,

    a = (exp(g_t) k_t)^T S,   b = (exp(g_t) q_t)^T S,   d = beta_t (v_t - a),   o_t = scale * (b + (q_t^T k_t) d),

so that they do not wait for each other and one pass over the registers is left: `S <- diag(exp(g_t)) S + k_t d`.

Time goes to the memory system, so loads are issued in the order in which others wait for them: the slot's index, the first
token's rows, the first tile; norms and gate are worked out while it is on its way, and each tile while the next one is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import L2_EPS, decay_rate, locate, log2_decay, write_strength
from .states import everywhere, named_slot, state_offsets, store_state


@triton.jit
def load_row(x, at, there):
    return tl.load(x + at, mask=everywhere(at, there), other=0.0)


@triton.jit
def load_token(q, k, g, beta, t, there, q_token, k_token, g_token, beta_token, key):
    """What token `t` brings along K, as it lies in memory: rows of q, k, g `[K]`, and beta; zeros if it is not `there`."""
    return (
        load_row(q + t * q_token, key, there),
        load_row(k + t * k_token, key, there),
        load_row(g + t * g_token, key, there),
        tl.load(beta + t * beta_token, mask=there, other=0.0),
    )


@triton.jit
def unit(row, L2NORM: tl.constexpr):
    row = row.to(tl.float32)
    if L2NORM:
        row = row / tl.sqrt(tl.sum(row * row) + L2_EPS)
    return row


@triton.jit
def factors(rows, there, bias, rate, lower_bound, scale, GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr):
    """Of one token: `k`, `exp(g)`, `exp(g) k`, `scale exp(g) q` `[K]`, `scale q^T k` and `beta`; a token that is not `there`
    changes no state."""
    row_q, row_k, row_g, beta = rows
    row_q = unit(row_q, L2NORM) * scale
    row_k = unit(row_k, L2NORM)
    decay = tl.exp2(log2_decay(row_g.to(tl.float32) + bias, rate, lower_bound, GATE))
    decay = tl.where(there, decay, 1.0)
    strength = write_strength(beta.to(tl.float32), BETA)
    return row_k, decay, row_k * decay, row_q * decay, tl.sum(row_q * row_k), strength


@triton.jit
def step(state, row_v, token):
    """The state `S^T [BV, K]` after a token with these factors, and its output `[BV]`."""
    row_k, decay, decayed_k, decayed_q, overlap, strength = token
    along_k = tl.sum(state * decayed_k[None, :], axis=1)
    along_q = tl.sum(state * decayed_q[None, :], axis=1)
    correction = strength * (row_v.to(tl.float32) - along_k)
    state = state * decay[None, :] + correction[:, None] * row_k[None, :]
    return state, along_q + overlap * correction


@triton.jit
def start_index(starts, accepted, n, start_row, start_token, most_tokens):
    """Element of `starts` that says where sequence `n` starts, and whether there is one: with `accepted` counts, that of the
    last accepted token, and none for a count outside `[1, most_tokens]`."""
    at = n * start_row
    known = at == at
    if accepted is not None:
        count = tl.load(accepted + n)
        known = (count >= 1) & (count <= most_tokens)
        at += tl.where(known, count - 1, 0) * start_token
    return at, known


@triton.jit
def target_slot(targets, i, own, lowest, slots):
    """The slot that a state goes to, and whether there is one: what index `i` of `targets` names, or without them `own`."""
    if targets is None:
        slot = own
        named = own < slots
    else:
        slot, named = named_slot(targets, i, lowest, slots)
    return slot, named


@triton.jit(
    do_not_specialize=[
        "T",
        "H",
        "HV",
        "beta_batch",
        "beta_token",
        "beta_head",
        "scale",
        "lower_bound",
        "lowest",
        "start_slots",
        "target_slots",
        "has_initial",
        "has_final",
        "most_tokens",
        "start_row",
        "start_token",
        "target_row",
        "target_token",
    ],
)
def decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    o,
    initial_state,
    final_state,
    starts,
    targets,
    accepted,
    has_initial_state,
    lowest,
    start_slots,
    target_slots,
    has_initial,
    has_final,
    start_pitch: tl.int64,
    target_pitch: tl.int64,
    target_step: tl.int64,
    start_row,
    start_token,
    target_row,
    target_token,
    most_tokens,
    scale,
    lower_bound,
    T,
    H,
    HV,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr,
    EACH: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TWO_POOLS: tl.constexpr,
    NULL_GIVES_ZERO: tl.constexpr,
):
    slice_, head, n, batch, begin, end = locate(cu_seqlens, T, HV, V // (TILES * BV))
    end = tl.minimum(end, begin + most_tokens)
    there = begin < end
    qk_head = (head.to(tl.int32) // (HV // H)).to(tl.int64)
    q += batch * q_batch + qk_head * q_head
    k += batch * k_batch + qk_head * k_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head
    beta += batch * beta_batch + head * beta_head
    o += batch * o_batch + head * o_head
    key = tl.arange(0, K)
    value = slice_ * (TILES * BV) + tl.arange(0, BV)

    slot = n
    live = there
    read = has_initial
    if starts is not None:
        at, known = start_index(starts, accepted, n, start_row, start_token, most_tokens)
        slot, named = named_slot(starts, at, lowest, start_slots)
        live &= known & named
        if TWO_POOLS and targets is not None:
            _, named = named_slot(targets, n * target_row, lowest, target_slots)
            live &= named
        read = live.to(tl.int32)
        if has_initial_state is not None:
            read *= tl.load(has_initial_state + n).to(tl.int32)
    rows = load_token(q, k, g, beta, begin, there, q_token, k_token, g_token, beta_token, key)
    rate = decay_rate(A_log, head)
    bias = tl.zeros([K], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * K + key).to(tl.float32)
    in_slot = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    tile_size = BV * K if V_FIRST else BV
    initial_state += slot * start_pitch
    if STAGES == 0:
        next_v = load_row(v + begin * v_token, value, there)
        next_state = load_row(initial_state, in_slot, read)
    first = factors(rows, there, bias, rate, lower_bound, scale, GATE, BETA, L2NORM)

    stored = has_final
    if IN_PLACE:
        stored *= live.to(tl.int32)
    if TWO_POOLS and not EACH:
        slot, _ = target_slot(targets, n * target_row, n, lowest, target_slots)

    if SINGLE and STAGES > 0:
        next_v = load_row(v + begin * v_token, value, there)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            tile_at = in_slot + tile * tile_size
            mine = value + tile * BV
            row_v = next_v
            next_v = load_row(v + begin * v_token, mine + BV, there & (tile + 1 < TILES))
            state = tl.load(initial_state + tile_at, mask=everywhere(tile_at, read), other=0.0).to(tl.float32)
            state, out = step(state, row_v, first)
            if NULL_GIVES_ZERO:
                out = tl.where(live, out, 0.0)
            tl.store(o + begin * o_token + mine, out.to(o.dtype.element_ty))
            store_state(final_state, slot * target_pitch + tile_at, state, stored)
    else:
        for tile in range(0, TILES):
            state = next_state.to(tl.float32)
            row_v = next_v
            if TILES > 1:
                further = tile + 1 < TILES
                next_v = load_row(v + begin * v_token, value + BV, there & further)
                next_state = load_row(initial_state, in_slot + tile_size, read * further.to(tl.int32))
            state, out = step(state, row_v, first)
            for t in range(begin, end):
                if NULL_GIVES_ZERO:
                    out = tl.where(live, out, 0.0)
                tl.store(o + t * o_token + value, out.to(o.dtype.element_ty))
                if EACH:
                    i = t - begin
                    target, named = target_slot(targets, n * target_row + i * target_token, slot, lowest, target_slots)
                    state_at = target * target_pitch + i * target_step + in_slot
                    store_state(final_state, state_at, state, (live & named).to(tl.int32))
                more = t + 1 < end
                if SINGLE:
                    pass
                elif more:
                    rows = load_token(q, k, g, beta, t + 1, more, q_token, k_token, g_token, beta_token, key)
                    row_v = load_row(v + (t + 1) * v_token, value, more)
                    token = factors(rows, more, bias, rate, lower_bound, scale, GATE, BETA, L2NORM)
                    state, out = step(state, row_v, token)
            if not EACH:
                store_state(final_state, slot * target_pitch + in_slot, state, stored)
            value += BV
            in_slot += tile_size
