"""States what a call must do: a token recurrence in float64, written for this purpose alone.

Nothing here imports the library. A call is a dict of arguments; what it must return and write is a list of `Claim`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_TOKENS = 17
"""Tokens that a sequence of `recurrent_kda` has at most; nothing is stored of a longer one."""

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "x", "z", "weight", "bias")
"""Inputs that take gradients."""


@dataclass(frozen=True)
class Claim:
    """`target[index]`, of a result or an argument, must be `want` up to rounding; None: it may hold anything. `exact`: to the
    bit. `group`: claims of one sequence, which is undefined as a whole if its numbers are not finite. `read`: what is made of
    `target[index]` first."""

    target: str
    index: tuple
    want: Tensor | None
    exact: bool = False
    group: object = None
    read: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Sequence:
    """`row` of the batch, tokens `begin` to `end` of it, and its number."""

    number: int
    row: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def tokens(self) -> tuple[int, slice]:
        return self.row, slice(self.begin, self.end)


class Undefined(Exception):
    """The call has no defined result: all that it may write may hold anything."""


def wide(x: Tensor) -> Tensor:
    # the sign and the conjugate bit of a view count; a copy, as calls write pools
    x = x.detach().resolve_conj().resolve_neg()
    return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)


def arguments(call: dict) -> dict:
    return {name: wide(x) if isinstance(x, Tensor) else x for name, x in call.items()}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


# ---- the recurrence ------------------------------------------------------------------------------------------------------


def log_decay(c: dict) -> Tensor:
    gate, bound = c.get("gate"), c.get("lower_bound")
    if gate is None:
        gate = "none" if not c.get("use_gate_in_kernel") else "softplus" if bound is None else "lower_bound"
    x = c["g"]
    if gate == "none":
        return x
    if gate == "logsigmoid":
        return -F.softplus(-x)
    heads = x.shape[-2]
    rate = torch.ones((), dtype=x.dtype) if c.get("A_log") is None else c["A_log"].reshape(heads, 1).exp()
    x = x if c.get("dt_bias") is None else x + c["dt_bias"].reshape(heads, -1)
    return -rate * F.softplus(x) if gate == "softplus" else bound * torch.sigmoid(rate * x)


def front(c: dict, l2norm: bool, logits: str = "use_beta_sigmoid_in_kernel") -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta as the recurrence takes them, with a row for every value head."""
    q, k, v = c["q"], c["k"], c["v"]
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    scale = q.shape[-1] ** -0.5 if c.get("scale") is None else float(c["scale"])
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    beta = c["beta"]
    if c.get(logits):
        beta = torch.sigmoid(beta) * (2.0 if c.get("allow_neg_eigval") else 1.0)
    return q * scale, k, v, log_decay(c), beta


def recur(S: Tensor, tokens: tuple[Tensor, ...], s: tuple = (...,)) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`o [T, HV, V]` of the tokens at `s`; the updates `u [T, HV, V]` of `S += k u^T`; the states `[HV, K, V]` before the first
    one and after each."""
    tokens = tuple(x[s] for x in tokens)
    outputs, updates, states = [tokens[2][:0]], [tokens[2][:0]], [S]
    for q, k, v, g, beta in zip(*tokens):
        S = g.exp()[..., None] * S
        u = beta[:, None] * (v - (k[..., None] * S).sum(1))
        S = S + k[..., None] * u[:, None]
        outputs.append((q[..., None] * S).sum(1)[None])
        updates.append(u[None])
        states.append(S)
    return torch.cat(outputs), torch.cat(updates), states


def sequences(c: dict, most: int | None = None) -> list[Sequence]:
    """Sequences of the call; a step counts none of more than `most` tokens."""
    B, T = c["x" if c.get("q") is None else "q"].shape[:2]
    if c.get("cu_seqlens") is None:
        places = [(n, 0, T) for n in range(B)]
    else:
        offsets = c["cu_seqlens"].tolist()
        if offsets[0] != 0 or offsets[-1] > T or any(b < a for a, b in itertools.pairwise(offsets)):
            raise Undefined("offsets that fall, or that leave the tensors")
        places = [(0, *ends) for ends in itertools.pairwise(offsets)]
    few = ((row, a, a if most is not None and b - a > most else b) for row, a, b in places)
    return [Sequence(n, *place) for n, place in enumerate(few)]


# ---- states --------------------------------------------------------------------------------------------------------------


class Slots:
    """States that a call stores in its argument `target`. A slot that it stores twice may hold anything."""

    def __init__(self, c: dict, target: str, v_first: bool = False, null: bool = False):
        self.target, self.pool, self.v_first = target, c.get(target), v_first
        self.lowest = 1 if null and c.get("null_index") == "non_positive" else 0
        self.claims: dict[str, Claim] = {}

    def has(self, index: int) -> bool:
        return self.pool is not None and self.lowest <= index < self.pool.shape[0]

    def read(self, index: int) -> Tensor:
        return self.inner(self.pool[index])

    def inner(self, S: Tensor) -> Tensor:
        return S.mT if self.v_first else S

    def claim(self, index: tuple, want: Tensor, **how: Any) -> None:
        again = repr(index) in self.claims
        self.claims[repr(index)] = Claim(self.target, index, None if again else want, **how)

    def store(self, S: Tensor, group: object, index: int, *inside: int, exact: bool = False) -> None:
        """If the index names a slot."""
        if self.has(index):
            self.claim((index, *inside), self.inner(S), group=group, exact=exact)

    @property
    def is_replay_buffer(self) -> bool:
        return self.pool is not None and self.pool.dim() == 4

    def record(self, row: int, group: object, K: int, V: int, tokens: list[tuple[Tensor, Tensor]] | tuple = ()) -> None:
        """Claims a row of a replay buffer: how many tokens it holds, and of each the decay and `k u^T`, whose split is not
        said."""
        if not self.has(row):
            return
        count, factors = torch.tensor(float(len(tokens))).double(), slice(K, 2 * K + V)
        self.claim((row, 0, slice(None), counts_of(K, V)), count, group=group, exact=True)

        def product(x: Tensor) -> Tensor:
            return x[..., :K, None] * x[..., None, K:]

        for i, (decay, change) in enumerate(tokens):
            self.claim((row, i, slice(None), slice(0, K)), decay, group=group)
            self.claim((row, i, slice(None), factors), change, group=group, read=product)


def counts_of(K: int, V: int) -> slice:
    """Where a replay record has its counts."""
    return slice(2 * K + V, 2 * K + V + 4)


def row_of(c: dict, n: int, own: int) -> int:
    rows = c.get("intermediate_state_indices")
    return own if rows is None else int(rows[n])


def chunk(c: dict) -> list[Claim]:
    """`chunk_kda` and `fused_recurrent_kda`."""
    tokens = front(c, bool(c.get("use_qk_l2norm_in_kernel")))
    if c.get("safe_gate") and c.get("A_log") is None and bool((tokens[3] < -5.0).any()):
        raise Undefined("a decay beyond the promise")
    v_first, every = bool(c.get("state_v_first")), c.get("checkpoint_every")
    pool, buffer = Slots(c, "state_pool", v_first, null=True), Slots(c, "checkpoint_states", v_first)
    kept = pool if buffer.pool is None else buffer
    empty = zeros(tokens[0].shape[2], tokens[0].shape[3], tokens[2].shape[3])
    claims, grid, used, rows = [], [], [0] * len(c["q"]), itertools.count()
    for s in sequences(c):
        n, S = s.number, empty
        if c.get("initial_state") is not None:
            S = pool.inner(c["initial_state"][n])
        elif pool.pool is not None and pool.has(int(c["state_indices"][n])):
            flags = c.get("has_initial_state")
            S = pool.read(int(c["state_indices"][n])) if flags is None or bool(flags[n]) else empty
        o, _, states = recur(S, tokens, s.tokens)
        claims.append(Claim("o", s.tokens, o, group=n))
        if c.get("output_final_state") or c.get("final_state") is not None:
            claims.append(Claim("final_state", (n,), pool.inner(states[-1]), group=n))
        cuts = checkpoints(c, s)
        if pool.pool is not None and s.length > 0:
            pool.store(states[-1], n, int(c["state_indices"][n]))
        for index, cut, asked in cuts:
            if asked and s.length > 0:
                kept.store(states[cut], n, index)
        if buffer.pool is not None and every is not None:
            for i in range(0, s.length, every):
                buffer.store(states[i], n, next(rows))
        for begin, end in itertools.pairwise([0, *(cut for _, cut, _ in cuts), s.length]):
            for i in range(begin, end, c.get("chunk_size", 64)):
                grid.append(Claim("h", (s.row, used[s.row]), pool.inner(states[i]), group=n))
                used[s.row] += 1
    if c.get("return_intermediate_states"):
        claims += [*grid, *(Claim("h", (row, slice(n, None)), zeros(), exact=True) for row, n in enumerate(used))]
    return [*claims, *pool.claims.values(), *buffer.claims.values()]


def marks(c: dict, n: int) -> list[tuple[int, int]]:
    """The index of each checkpoint of sequence `n`, and its offset."""
    if c.get("checkpoint_offsets") is None:
        return []
    indices, offsets = (c[f"checkpoint_{name}"][n].reshape(-1).tolist() for name in ("indices", "offsets"))
    return [*zip(indices, offsets)]


def checkpoints(c: dict, s: Sequence) -> list[tuple[int, int, bool]]:
    """The index of each offset, where it cuts the sequence, and whether it asks for the state there."""
    found, cut = [], 0
    for index, offset in marks(c, s.number):
        cut = min(max(offset, cut), s.length)
        found.append((index, cut, 0 < offset == cut))
    return found


def decode(c: dict) -> list[Claim]:
    """`recurrent_kda`."""
    c = unmixed(c)
    tokens = front(c, c.get("use_qk_l2norm_in_kernel", True), "beta_is_logit")
    v_first, update, spec = c.get("state_v_first", True), c.get("update_state", True), c.get("num_spec_tokens")
    most, table = MOST_TOKENS if spec is None else 1 + spec, c.get("ssm_state_indices")
    pool = Slots(c, "initial_state", v_first, null=table is not None)
    source, scratch = Slots(c, "initial_state_source", v_first, null=True), Slots(c, "intermediate_states", v_first)
    K, V = tokens[0].shape[3], tokens[2].shape[3]
    claims = []
    for s in sequences(c, most):
        n = s.number
        slots = [n] if table is None else table[n].reshape(-1).tolist()
        S, own = start(c, n, slots, pool, source, most)
        if S is None:
            states = [zeros(tokens[0].shape[2], K, V)]
            claims.append(Claim("o", s.tokens, zeros(), exact=True))
        else:
            o, updates, states = recur(S, tokens, s.tokens)
            claims.append(Claim("o", s.tokens, o, group=n))
            if update:
                for index, after in zip(slots, states[1:] if spec is not None else states[1:][-1:]):
                    pool.store(after, n, index)
            row = row_of(c, n, own)
            if scratch.is_replay_buffer:
                changes = tokens[1][s.tokens][..., None] * updates[:, :, None]
                scratch.record(row, n, K, V, [*zip(tokens[3][s.tokens].exp(), changes)])
            else:
                for i, after in enumerate(states[1:]):
                    scratch.store(after, n, row, i)
        if c.get("output_final_state") and pool.pool is None:
            claims.append(Claim("final_state", (n,), pool.inner(states[-1]), group=n))
    return [*claims, *pool.claims.values(), *scratch.claims.values()]


def start(c: dict, n: int, slots: list[int], pool: Slots, source: Slots, most: int) -> tuple[Tensor | None, int]:
    """The state that sequence `n` starts from, None if it is null, and the index that named it."""
    if source.pool is not None:
        index = int(c["initial_state_indices"][n])
        stored = not c.get("update_state", True) or c.get("ssm_state_indices") is None or pool.has(slots[0])
        return source.read(index) if source.has(index) and stored else None, index
    if pool.pool is None:
        return zeros(c["v"].shape[2], c["q"].shape[3], c["v"].shape[3]), n
    counts = c.get("num_accepted_tokens") if len(slots) > 1 else None
    accepted = 1 if counts is None else int(counts[n])
    if not 1 <= accepted <= most:
        return None, -1
    index = slots[accepted - 1]
    return pool.read(index) if pool.has(index) else None, index


def unmixed(c: dict) -> dict:
    """With q, k and v out of `mixed_qkv`."""
    if c.get("mixed_qkv") is None:
        return c
    mixed = c["mixed_qkv"]
    pool = c["initial_state"] if c.get("initial_state") is not None else c["initial_state_source"]
    HV, V, K = pool.shape[1:] if c.get("state_v_first", True) else (pool.shape[1], pool.shape[3], pool.shape[2])
    rows, tokens = len(mixed), 1 + (c.get("num_spec_tokens") or 0)
    leading = (1, rows) if c.get("cu_seqlens") is not None else (rows // tokens, tokens)
    H = (mixed.shape[1] - HV * V) // (2 * K)
    q, k = mixed[:, : 2 * H * K].reshape(*leading, 2, H, K).unbind(2)
    v = mixed[:, mixed.shape[1] - HV * V :].reshape(*leading, HV, V)
    g, beta = c["g"].reshape(*leading, HV, K), c["beta"].reshape(*leading, HV)
    return c | {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def commit(c: dict) -> list[Claim]:
    """Copies of states, which know no layout, or replays of records, each of which is good for one commit."""
    rows = Slots(c, "intermediate_states")
    pool = Slots(c, "initial_state", rows.is_replay_buffer and c.get("state_v_first", True), null=True)
    V, K = c["initial_state"].shape[2:] if pool.v_first else c["initial_state"].shape[:1:-1]
    for n, index in enumerate(c["ssm_state_indices"].tolist()):
        row, accepted = row_of(c, n, index), int(c["num_accepted_tokens"][n])
        if not rows.has(row) or not pool.has(index):
            continue
        counted, given = 1 <= accepted <= rows.pool.shape[1], rows.pool[row, : max(accepted, 0)]
        if not rows.is_replay_buffer:
            if counted:
                pool.store(given[-1], n, index, exact=True)
            continue
        if counted and accepted <= rows.pool[row, 0, :, counts_of(K, V)].min():
            S = pool.read(index)
            for token in given:
                decay, k, u = token[:, : 2 * K + V].split((K, K, V), dim=1)
                S = decay[..., None] * S + k[..., None] * u[:, None]
            pool.store(S, n, index)
        rows.record(row, n, K, V)
    return [*pool.claims.values(), *rows.claims.values()]


# ---- stages --------------------------------------------------------------------------------------------------------------


def prefill(c: dict) -> list[Claim]:
    """`kda_prefill`: updates of a chunk are `u - w S`, so `u` are those from a state of zeros, and `-w` those of values of zero
    from the identity."""
    C = c.get("chunk_size", 64)
    by_token = {name: c[name].transpose(1, 2) for name in ("q", "k", "v", "g", "beta")}
    q, k, v, g, beta = front(c | by_token, l2norm=False)
    K, V = q.shape[3], v.shape[3]
    claims = []
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        own = slice(h, h + 1)
        o, *_ = recur(zeros(1, K, V), (q, k, v, g, beta), (b, slice(None), own))
        claims.append(Claim("o", (b, h), o[:, 0], group=(b, h)))
        for place, begin in enumerate(range(0, q.shape[1], C)):
            chunk = b, slice(begin, begin + C), own
            u = recur(zeros(1, K, V), (q, k, v, g, beta), chunk)[1]
            w = -recur(torch.eye(K, dtype=torch.float64)[None], (q, k, torch.zeros_like(k), g, beta), chunk)[1]
            for name, x in (("w", w), ("u", u)):
                padded = F.pad(x[:, 0], (0, 0, 0, C - len(x)))
                claims.append(Claim(name, (b, h, place), padded, group=(b, h)))
    return claims


WY_RESULTS = ("dq", "dk", "dv", "dbeta", "dg", "dA")


def wy(c: dict) -> list[Claim]:
    """`chunk_bwd_wy_dqkg`: by autograd from what a chunk computes."""
    C, claims, first = c.get("chunk_size", 64), [], 0
    for s in sequences(c):
        for place, begin in enumerate(range(s.begin, s.end, C)):
            span, row = slice(begin, min(begin + C, s.end)), first + place
            if row >= c["h"].shape[1]:
                raise Undefined("h lacks rows")
            for head in range(c["v"].shape[2]):
                found = zip(WY_RESULTS, wy_chunk(c, s.row, span, row, head))
                claims += [Claim(name, (s.row, span, head), x, group=(s.number, head)) for name, x in found]
        first += -(-s.length // C) if c.get("cu_seqlens") is not None else 0
    return claims


def wy_chunk(c: dict, b: int, span: slice, row: int, head: int) -> list[Tensor]:
    """Gradients of `<do, o> + <dh, S'> + <dv, v'>`, where `o = scale (q exp G) S`, `S' = exp(G_C) S + (k exp(G_C - G))^T v_new`
    and `v' = (I + A)^-1 (beta (v - (k exp G) S))`."""
    length = span.stop - span.start
    key_head = head // (c["v"].shape[2] // c["q"].shape[2])
    q, k = (c[name][b, span, key_head].clone().requires_grad_() for name in "qk")
    v, beta = (c[name][b, span, head].clone().requires_grad_() for name in ("v", "beta"))
    unit = math.log(2.0) if c.get("use_exp2") else 1.0
    g = (c["g"][b, span, head] * unit).requires_grad_()
    S, dS = (c[name][b, row, head] for name in ("h", "dh"))
    if c.get("state_v_first"):
        S, dS = S.mT, dS.mT
    scale = q.shape[-1] ** -0.5 if c.get("scale") is None else float(c["scale"])
    M = c["A"][b, span, head, :length].tril()
    added = torch.zeros_like(M).requires_grad_()
    v_prime = (M - M @ added @ M) @ (beta[:, None] * (v - (k * g.exp()) @ S))
    after = g[-1].exp()[:, None] * S + (k * (g[-1] - g).exp()).mT @ c["v_new"][b, span, head]
    o = scale * (q * g.exp()) @ S
    total = (o * c["do"][b, span, head]).sum() + (after * dS).sum() + (v_prime * c["dv"][b, span, head]).sum()
    dq, dk, dv, dbeta, dg, dA = torch.autograd.grad(total, (q, k, v, beta, g, added), materialize_grads=True)
    return [dq, dk, dv, dbeta, dg, F.pad(dA.tril(-1), (0, c["A"].shape[-1] - length))]


ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}


# ---- the layer -----------------------------------------------------------------------------------------------------------


def norm(c: dict) -> list[Claim]:
    """`gated_rms_norm`."""
    gate = ACTIVATIONS[c.get("activation", "sigmoid")](c["z"])
    return [Claim("o", (), gated_norm(c["x"], gate, c["weight"], c.get("eps", 1e-5)), group="all")]


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * gate


def convolved(inputs: Tensor, taps: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """`[tokens, D]` of the inputs `[W - 1 + tokens, D]`, `W - 1` of them before the first token."""
    W = taps.shape[1]
    tokens = len(inputs) - (W - 1)
    total = sum(inputs[j : j + tokens] * taps[:, j] for j in range(W))
    return ACTIVATIONS[activation](total if bias is None else total + bias)


def convolution(c: dict) -> list[Claim]:
    """`short_convolution`."""
    D = c["x"].shape[2]
    taps = c["weight"].reshape(D, -1)
    pool, flags = Slots(c, "state_pool", v_first=True, null=True), c.get("has_initial_state")
    buffer, every, rows = Slots(c, "checkpoint_states", v_first=True), c.get("checkpoint_every"), itertools.count()
    names = ("initial_state", "state_pool", "final_state", "checkpoint_states")
    given = next((c[name] for name in names if c.get(name) is not None), None)
    L = taps.shape[1] - 1 if given is None else given.shape[2]
    claims = []
    for s in sequences(c):
        n, before = s.number, zeros(L, D)
        index = -1 if c.get("state_indices") is None else int(c["state_indices"][n])
        if c.get("initial_state") is not None:
            before = pool.inner(c["initial_state"][n])
        elif pool.has(index) and (flags is None or bool(flags[n])):
            before = pool.read(index)
        inputs = torch.cat([before, c["x"][s.tokens]])
        o = convolved(inputs[L - taps.shape[1] + 1 :], taps, c.get("bias"), c.get("activation", "silu"))
        claims.append(Claim("o", s.tokens, o, group=n))
        if s.length > 0:
            pool.store(inputs[-L:], n, index)
        cuts = [(next(rows), i) for i in range(0, s.length, every)] if every is not None else marks(c, n)
        for row, cut in cuts:
            if cut <= s.length and (cut > 0 or every is not None):
                buffer.store(inputs[cut : cut + L], n, row)
        if pool.pool is None and (c.get("output_final_state") or c.get("final_state") is not None):
            claims.append(Claim("final_state", (n,), pool.inner(inputs[-L:]), group=n))
    return [*claims, *pool.claims.values(), *buffer.claims.values()]


OF_THE_STEP = (
    *("A_log", "dt_bias", "gate", "scale", "allow_neg_eigval", "state_v_first", "null_index", "cu_seqlens"),
    *("intermediate_states", "intermediate_state_indices", "use_qk_l2norm_in_kernel"),
)
"""Arguments of `fused_kda_decode` that go to its step as they are."""


def fused(c: dict) -> list[Claim]:
    """`fused_kda_decode`: windows are convolved here, the rest is a step of decoding and a norm."""
    x, windows, state = c["x"], c["conv_state"], c["state"]
    S1, packed = 1 + (c.get("num_spec_tokens") or 0), c.get("cu_seqlens") is not None
    leading = (1, len(x)) if packed else (len(x) // S1, S1)
    HV, V, K = state.shape[1:] if c.get("state_v_first", True) else (state.shape[1], state.shape[3], state.shape[2])
    taps = c["weight"].mT if c["weight"].dim() == 3 and c["weight"].shape[1] != 1 else c["weight"]
    taps = taps.reshape(x.shape[1], -1)
    W = taps.shape[1]
    stored = Slots(c, "conv_state", null=True)
    pools = stored, Slots(c, "state", null=True)
    indices = c["state_indices"].clone()
    indices = indices[:, None] if indices.dim() == 1 else indices
    mixed = torch.zeros_like(x)
    for s in sequences({"q": x.view(*leading, x.shape[1]), "cu_seqlens": c.get("cu_seqlens")}, S1):
        n, begin = s.number, s.row * leading[1] + s.begin
        accepted = 1 if c.get("num_accepted_tokens") is None else int(c["num_accepted_tokens"][n])
        row = indices[n]
        of_start = accepted - 1 if len(row) > 1 else 0
        if not 1 <= accepted <= S1 or not all(p.has(int(row[i])) for p in pools for i in (0, of_start)):
            indices[n] = -1
        elif s.length > 0:
            slot, own = int(row[0]), slice(begin, begin + s.length)
            inputs = torch.cat([windows[slot, :, accepted - 1 : accepted - 1 + W - 1].mT, x[own]])
            mixed[own] = convolved(inputs, taps, c.get("bias"), "silu")
            for place, value in enumerate(inputs[1:]):
                stored.claim((slot, slice(None), place), value, group=n)
    drafts = c.get("num_spec_tokens") is not None and c.get("intermediate_states") is None
    step = {name: c[name] for name in OF_THE_STEP if name in c} | {"use_gate_in_kernel": True, "mixed_qkv": mixed}
    step |= {"lower_bound": c.get("lower_bound", -5.0), "beta_is_logit": c.get("beta_is_logit", True)}
    step |= {"num_spec_tokens": S1 - 1}  # a sequence of more tokens has no output, and stores nothing
    step |= {"g": c["raw_g"].reshape(len(x), HV * K), "beta": c["raw_beta"].reshape(len(x), HV)}
    step |= {"initial_state": state, "update_state": c.get("intermediate_states") is None}
    step |= {"ssm_state_indices": indices if drafts else indices[:, 0]}
    step |= {"num_accepted_tokens": c.get("num_accepted_tokens")} if drafts else {}
    gate = c["output_gate"].reshape(*leading, HV, V).sigmoid()
    claims = [*stored.claims.values()]
    for claim in decode(step):
        if claim.target == "o" and not claim.exact:
            o = gated_norm(claim.want, gate[claim.index], c["norm_weight"], c.get("norm_eps", 1e-5))
            claim = replace(claim, want=o)
        claims.append(replace(claim, target="state") if claim.target == "initial_state" else claim)
    return claims


# ---- gradients -----------------------------------------------------------------------------------------------------------


SPOILT = {"q", "k", "v", "g", "beta", "x"}
"""Inputs `[B, T, ..]` that may have rows of no sequence."""


@torch.enable_grad()
def gradients_of(op: str, call: dict, do: Tensor, dht: Tensor | None) -> dict[str, Tensor]:
    """Gradients of `<do, o> + <dht, final_state>` by autograd through the truth; rows of no sequence are zero."""
    c = arguments(call)
    if c.get("cu_seqlens") is not None:
        # NaN may stand in rows of no sequence, and 0 times NaN is NaN
        for name in c.keys() & SPOILT:
            c[name][:, int(c["cu_seqlens"][-1]) :] = 0.0
    leaves = {name: c[name].clone().requires_grad_() for name in LEAVES if c.get(name) is not None}
    total = torch.zeros((), dtype=torch.float64)
    for claim in TRUTHS[op](c | leaves):
        if claim.target == "o":
            total = total + (claim.want * wide(do[claim.index])).sum()
        elif claim.target == "final_state" and dht is not None:
            total = total + (claim.want * wide(dht[claim.index])).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found))


TRUTHS: dict[str, Callable[[dict], list[Claim]]] = {
    "chunk_kda": chunk,
    "fused_recurrent_kda": chunk,
    "recurrent_kda": decode,
    "commit": commit,
    "kda_prefill": prefill,
    "chunk_bwd_wy_dqkg": wy,
    "fused_kda_decode": fused,
    "short_convolution": convolution,
    "gated_rms_norm": norm,
}


def claims_of(op: str, call: dict) -> list[Claim]:
    """Claims that `op(**call)` must meet: what it must return and write, from the call's tensors as they are now."""
    with torch.enable_grad() if op == "chunk_bwd_wy_dqkg" else torch.no_grad():
        return TRUTHS[op](arguments(call))
