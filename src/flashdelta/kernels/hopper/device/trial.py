"""Trials of whether a chunk forgets the state before it: then the state after it needs nothing else."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .layouts import ACC, BV, LEFT, C, as_left
from .wgmma import mma_first

FORGOTTEN = gl.constexpr(2.0**-40)
"""A chunk forgets if the norm of its M is no larger: that is the error, as a part of the state before it."""


@gluon.jit
def may_forget(decay, present, K):
    """Says whether a trial of the chunk with these decays is worth its time, for warps of any number: each warp asks for all K.
    A diagonal element of M is a channel's decay less what the delta rule takes. If the decay is larger than M may be, the rest
    must cancel it, which no model's does. A NaN may not forget, nor may a chunk that is not `present`."""
    key = gl.arange(0, K, layout=gl.BlockedLayout([K // 32], [32], [gl.num_warps()], [0]))
    decays = gl.load(decay + key, mask=key < gl.where(present, K, 0), other=1.0)
    return gl.min((decays <= FORGOTTEN).to(gl.int32), axis=0) > 0


@gluon.jit
def trial(ring, s, K, KG, INVERSE):
    """The chunk in stage `s` as an affine map `S' = M S + b`: b by halves of the key channels, and whether the chunk forgets S,
    as M is next to nothing. `KG`, `INVERSE`: where these tiles lie in a stage; -w is the first. The norm of M counts, not the
    decays: what the delta rule moves from one channel to another may decay less than either.

        M^T [K, K] = diag(decay) + (-w)^T kg        b^T [64, K] = v^T inverse^T kg
    """
    KH: gl.constexpr = K // 64
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))[:, None]
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))[None, :]
    squares = 0.0
    for i in gl.static_range(KH):
        for j in gl.static_range(KH):
            M = mma_first(ring.tile(s, i).permute((1, 0)), ring.tile(s, KG + j), zero)
            M = warpgroup_mma_wait(0, deps=[M])
            if i == j:
                M += gl.where(channel == key, ring.decays(s, j, ACC), 0.0)
            # a NaN forgets nothing
            squares += gl.sum(gl.sum(M * M, axis=1), axis=0)
    v_t = ring.rows.index(s).permute((1, 0)).load(LEFT)
    v_new_t = mma_first(v_t, ring.tile(s, INVERSE).permute((1, 0)), zero)
    v_new_t, v_t = warpgroup_mma_wait(0, deps=[v_new_t, v_t])
    v_new_left = as_left(v_new_t)
    state0 = mma_first(v_new_left, ring.tile(s, KG), zero)
    state1 = zero
    if KH == 2:
        state1 = mma_first(v_new_left, ring.tile(s, KG + 1), zero)
        state0, state1, v_new_left = warpgroup_mma_wait(0, deps=[state0, state1, v_new_left])
    else:
        state0, v_new_left = warpgroup_mma_wait(0, deps=[state0, v_new_left])
    return state0, state1, squares <= FORGOTTEN * FORGOTTEN
