"""What a call must do: a token recurrence in float64, written for this purpose alone.

Nothing here imports the library. A call is a dict of arguments; what it must return and write is a list of `Claim`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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

    def few(self, most: int) -> int:
        """Its tokens as a step counts them: none of more than `most`."""
        return self.length if self.length <= most else 0


class Undefined(Exception):
    """The call has no defined result: all that it may write may hold anything."""


def wide(x: Tensor) -> Tensor:
    # the sign and the conjugate bit of a view count; a copy, as calls write pools
    x = x.detach().resolve_conj().resolve_neg()
    return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)


def arguments(call: dict) -> dict:
    return {name: wide(x) if isinstance(x, Tensor) else x for name, x in call.items()}


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


def states_after(S: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """`o [T, HV, V]`, and the states `[HV, K, V]` before the first token and after each."""
    outputs, states = [], [S]
    for q, k, v, g, beta in zip(*tokens):
        S = g.exp()[..., None] * S
        S = S + beta[:, None, None] * k[..., None] * (v - (k[..., None] * S).sum(1))[:, None]
        outputs.append((q[..., None] * S).sum(1))
        states.append(S)
    o = torch.stack(outputs) if outputs else tokens[2]
    return o, states


def sequences(c: dict) -> list[Sequence]:
    B, T = c["x" if c.get("q") is None else "q"].shape[:2]
    if c.get("cu_seqlens") is None:
        return [Sequence(n, n, 0, T) for n in range(B)]
    offsets = c["cu_seqlens"].tolist()
    if offsets[0] != 0 or offsets[-1] > T or any(b < a for a, b in itertools.pairwise(offsets)):
        raise Undefined("offsets that fall, or that leave the tensors")
    return [Sequence(n, 0, *ends) for n, ends in enumerate(itertools.pairwise(offsets))]


def of(sequence: Sequence, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x[sequence.row, sequence.begin : sequence.end] for x in tensors)


def counts_of(K: int, V: int) -> slice:
    """Where a replay record has its counts."""
    return slice(2 * K + V, 2 * K + V + 4)


def product_of(K: int) -> Callable[[Tensor], Tensor]:
    """`k u^T` of records that begin at `k`."""
    return lambda x: x[..., :K, None] * x[..., None, K:]


class Slots:
    """What a call stores in a pool. A slot that it stores twice may hold anything."""

    def __init__(self, target: str, pool: Tensor | None, null: str = "negative", v_first: bool = False):
        self.target, self.pool, self.v_first = target, pool, v_first
        self.lowest = 1 if null == "non_positive" else 0
        self.claims: dict[tuple, Claim] = {}

    def has(self, index: int) -> bool:
        return self.pool is not None and self.lowest <= index < self.pool.shape[0]

    def read(self, index: int) -> Tensor:
        return self.inner(self.pool[index])

    def inner(self, S: Tensor) -> Tensor:
        return S.mT if self.v_first else S

    @property
    def is_replay_buffer(self) -> bool:
        return self.pool is not None and self.pool.dim() == 4

    def record(self, row: int, decays: Tensor | list, changes: list[Tensor], K: int, V: int, group: object) -> None:
        """Of a row of a replay buffer: how many tokens it holds, their decays, and what they write, `k u^T`, whose split is not
        said."""
        counts, length = counts_of(K, V), len(decays)
        parts = [(0, counts, torch.tensor(float(length)).double(), None)]
        for i in range(length):
            parts += [(i, slice(0, K), decays[i], None), (i, slice(K, counts.start), changes[i], product_of(K))]
        for i, part, want, read in parts:
            key = (row, i, part.start)
            exact, want = part == counts, None if key in self.claims else want
            self.claims[key] = Claim(self.target, (row, i, slice(None), part), want, exact, group, read)

    def store(self, place: tuple[int, ...], S: Tensor, group: object, exact: bool = False) -> None:
        want = None if place in self.claims else self.inner(S)
        self.claims[place] = Claim(self.target, place, want, exact, group)


def chunk(c: dict) -> list[Claim]:
    """Of `chunk_kda` and `fused_recurrent_kda`."""
    tokens = front(c, bool(c.get("use_qk_l2norm_in_kernel")))
    if c.get("safe_gate") and c.get("A_log") is None and bool((tokens[3] < -5.0).any()):
        raise Undefined("a decay beyond the promise")
    v_first = bool(c.get("state_v_first"))
    pool = Slots("state_pool", c.get("state_pool"), c.get("null_index", "negative"), v_first)
    buffer = Slots("checkpoint_states", c.get("checkpoint_states"), "negative", v_first)
    heads, K, V = tokens[0].shape[2], tokens[0].shape[3], tokens[2].shape[3]
    claims, before, first_row = [], [], 0
    for s in sequences(c):
        S = torch.zeros(heads, K, V, dtype=torch.float64)
        if c.get("initial_state") is not None:
            S = pool.inner(c["initial_state"][s.number])
        elif pool.pool is not None:
            index = int(c["state_indices"][s.number])
            if pool.has(index) and (c.get("has_initial_state") is None or bool(c["has_initial_state"][s.number])):
                S = pool.read(index)
        o, states = states_after(S, of(s, tokens))
        claims.append(Claim("o", (s.row, slice(s.begin, s.end)), o, group=s.number))
        if c.get("output_final_state") or c.get("final_state") is not None:
            claims.append(Claim("final_state", (s.number,), pool.inner(states[-1]), group=s.number))
        cuts = checkpoints(c, s)
        if pool.pool is not None and s.length > 0:
            store(pool, s, states, [(int(c["state_indices"][s.number]), s.length)])
        if s.length > 0:
            target = pool if buffer.pool is None else buffer
            store(target, s, states, [(index, cut) for index, cut, asked in cuts if asked])
        every = c.get("checkpoint_every")
        if buffer.pool is not None and every is not None:
            rows = [*enumerate(range(0, s.length, every), first_row)]
            store(buffer, s, states, rows)
            first_row += len(rows)
        own = [0, *(cut for _, cut, _ in cuts), s.length]
        grid = [i for a, b in itertools.pairwise(own) for i in range(a, b, c.get("chunk_size", 64))]
        before += [(s.row, place, states[i], s.number) for place, i in enumerate(grid)]
    if c.get("return_intermediate_states"):
        packed, zero = c.get("cu_seqlens") is not None, torch.zeros((), dtype=torch.float64)
        for place, (row, own, S, number) in enumerate(before):
            claims.append(Claim("h", (row, place if packed else own), pool.inner(S), group=number))
        for row in range(c["q"].shape[0]):
            used = sum(own == row for own, *_ in before)
            claims.append(Claim("h", (row, slice(used, None)), zero, exact=True))
    return [*claims, *pool.claims.values(), *buffer.claims.values()]


def checkpoints(c: dict, s: Sequence) -> list[tuple[int, int, bool]]:
    """Of each offset: its index, where it cuts the sequence, and whether it asks for the state there."""
    if c.get("checkpoint_offsets") is None:
        return []
    found, cut = [], 0
    offsets, indices = (c[f"checkpoint_{name}"][s.number].reshape(-1).tolist() for name in ("offsets", "indices"))
    for offset, index in zip(offsets, indices):
        cut = min(max(offset, cut), s.length)
        found.append((index, cut, 0 < offset == cut))
    return found


def store(slots: Slots, s: Sequence, states: list[Tensor], places: list[tuple[int, int]]) -> None:
    """States after so many tokens, where their indices name slots."""
    for index, length in places:
        if slots.has(index):
            slots.store((index,), states[length], s.number)


def decode(c: dict) -> list[Claim]:
    """Of `recurrent_kda`."""
    c = unmixed(c)
    tokens = front(c, c.get("use_qk_l2norm_in_kernel", True), "beta_is_logit")
    v_first, null = c.get("state_v_first", True), c.get("null_index", "negative")
    update, spec = c.get("update_state", True), c.get("num_spec_tokens")
    most = MOST_TOKENS if spec is None else 1 + spec
    pool = Slots("initial_state", c.get("initial_state"), null, v_first)
    source = Slots("initial_state_source", c.get("initial_state_source"), null, v_first)
    scratch = Slots("intermediate_states", c.get("intermediate_states"), "negative", v_first)
    heads, K, V = tokens[0].shape[2], tokens[0].shape[3], tokens[2].shape[3]
    zeros = torch.zeros(heads, K, V, dtype=torch.float64)
    claims = []
    for s in sequences(c):
        n, length = s.number, s.few(most)
        begin, own = start(c, n, pool, source, most)
        if begin is None:
            claims.append(Claim("o", (s.row, slice(s.begin, s.begin + length)), tokens[2].new_zeros(()), exact=True))
            S = zeros
        else:
            S = begin
            alone = Sequence(n, s.row, s.begin, s.begin + length)
            o, states = states_after(S, of(alone, tokens))
            claims.append(Claim("o", (s.row, slice(s.begin, s.begin + length)), o, group=n))
            S = states[-1]
            if spec is not None and update and pool.pool is not None:
                for i, after in enumerate(states[1:]):
                    index = int(c["ssm_state_indices"][n, i])
                    if pool.has(index):
                        pool.store((index,), after, n)
            elif update and pool.pool is not None and length > 0:
                index = n if c.get("ssm_state_indices") is None else int(c["ssm_state_indices"][n])
                if c.get("ssm_state_indices") is None or pool.has(index):
                    pool.store((index,), S, n)
            if scratch.pool is not None and not scratch.is_replay_buffer:
                # the index that the sequence starts from has the pool's null rule already
                row = row_of(c, n, own)
                if scratch.has(row):
                    for i, after in enumerate(states[1:]):
                        scratch.store((row, i), after, n)
        if scratch.is_replay_buffer and begin is not None and scratch.has(row_of(c, n, own)):
            decays = tokens[3][s.row, s.begin : s.begin + length].exp()
            changes = [after - decay[..., None] * S for decay, (S, after) in zip(decays, itertools.pairwise(states))]
            scratch.record(row_of(c, n, own), decays, changes, K, V, n)
        if c.get("output_final_state") and pool.pool is None:
            claims.append(Claim("final_state", (n,), pool.inner(S), group=n))
    return [*claims, *pool.claims.values(), *scratch.claims.values()]


def row_of(c: dict, n: int, own: int) -> int:
    rows = c.get("intermediate_state_indices")
    return own if rows is None else int(rows[n])


def start(c: dict, n: int, pool: Slots, source: Slots, most: int) -> tuple[Tensor | None, int]:
    """The state that sequence `n` starts from, None if it is null, and the index that named it."""
    indices = c.get("ssm_state_indices")
    if source.pool is not None:
        index = int(c["initial_state_indices"][n])
        live = source.has(index)
        if c.get("update_state", True) and indices is not None:
            live = live and pool.has(int(indices[n].reshape(-1)[0]))
        return source.read(index) if live else None, index
    if pool.pool is None:
        return torch.zeros(c["v"].shape[2], c["q"].shape[3], c["v"].shape[3], dtype=torch.float64), n
    if indices is None:
        return pool.read(n), n
    row = indices[n].reshape(-1)
    accepted = 1
    if row.numel() > 1 and c.get("num_accepted_tokens") is not None:
        accepted = int(c["num_accepted_tokens"][n])
        if not 1 <= accepted <= most:
            return None, -1
    index = int(row[accepted - 1])
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
    pool = Slots("initial_state", c["initial_state"], c.get("null_index", "negative"), c.get("state_v_first", True))
    rows = Slots("intermediate_states", c["intermediate_states"])
    if rows.is_replay_buffer:
        return replayed(c, pool, rows)
    pool.v_first = False  # copies know no layout
    for n, index in enumerate(c["ssm_state_indices"].tolist()):
        given = c.get("intermediate_state_indices")
        row, accepted = index if given is None else int(given[n]), int(c["num_accepted_tokens"][n])
        if pool.has(index) and rows.has(row) and 1 <= accepted <= rows.pool.shape[1]:
            pool.store((index,), rows.pool[row, accepted - 1], n, exact=True)
    return [*pool.claims.values()]


def replayed(c: dict, pool: Slots, rows: Slots) -> list[Claim]:
    """Each record is good for one commit."""
    V, K = c["initial_state"].shape[2:] if pool.v_first else c["initial_state"].shape[:1:-1]
    for n, index in enumerate(c["ssm_state_indices"].tolist()):
        row, accepted = row_of(c, n, index), int(c["num_accepted_tokens"][n])
        if not rows.has(row) or not pool.has(index):
            continue
        recorded = rows.pool[row, 0, :, counts_of(K, V)].min()
        if 1 <= accepted <= min(recorded, rows.pool.shape[1]):
            S = pool.read(index)
            for token in rows.pool[row, :accepted]:
                decay, k, u = token[:, : 2 * K + V].split((K, K, V), dim=1)
                S = decay[..., None] * S + k[..., None] * u[:, None]
            pool.store((index,), S, n)
        rows.record(row, [], [], K, V, n)
    return [*pool.claims.values(), *rows.claims.values()]


def prefill(c: dict) -> list[Claim]:
    """Of `kda_prefill`, with `w` and `u` from the chunk's triangular system, solved row by row."""
    C = c.get("chunk_size", 64)
    by_token = {name: c[name].transpose(1, 2) for name in ("q", "k", "v", "g", "beta")}
    q, k, v, g, beta = front(c | by_token, l2norm=False)
    claims = []
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        tokens = tuple(x[b, :, h : h + 1] for x in (q, k, v, g, beta))
        S = torch.zeros(1, q.shape[3], v.shape[3], dtype=torch.float64)
        claims.append(Claim("o", (b, h), states_after(S, tokens)[0][:, 0], group=(b, h)))
        for place, begin in enumerate(range(0, q.shape[1], C)):
            own = (b, slice(begin, begin + C), h)
            w, u = (torch.zeros(C, x.shape[3], dtype=torch.float64) for x in (k, v))
            solved = solve_chunk(k[own], v[own], g[own], beta[own])
            for x, rows in zip((w, u), solved):
                x[: len(rows)] = rows
            claims += [Claim(name, (b, h, place), x, group=(b, h)) for name, x in (("w", w), ("u", u))]
    return claims


def solve_chunk(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """`w` and `u` of a chunk: row `i` is `beta_i (x_i - sum_{j < i} <k_i, exp(G_i - G_j) k_j> row_j)`."""
    w, u = [], []
    for i in range(len(k)):
        w_i, u_i = k[i] * g[: i + 1].sum(0).exp(), v[i]
        for j in range(i):
            dot = (k[i] * g[j + 1 : i + 1].sum(0).exp() * k[j]).sum()
            w_i, u_i = w_i - dot * w[j], u_i - dot * u[j]
        w.append(beta[i] * w_i)
        u.append(beta[i] * u_i)
    return torch.stack(w), torch.stack(u)


WY_RESULTS = ("dq", "dk", "dv", "dbeta", "dg", "dA")


def wy(c: dict) -> list[Claim]:
    """Of `chunk_bwd_wy_dqkg`: by autograd from what a chunk computes."""
    C, claims = c.get("chunk_size", 64), []
    first = 0
    for s in sequences(c):
        rows = range(-(-s.length // C))
        for place in rows:
            begin = s.begin + place * C
            span = slice(begin, min(begin + C, s.end))
            row = first + place if c.get("cu_seqlens") is not None else place
            if row >= c["h"].shape[1]:
                raise Undefined("h lacks rows")
            for head in range(c["v"].shape[2]):
                found = wy_chunk(c, s.row, span, row, head)
                claims += [
                    Claim(name, (s.row, span, head), x, group=(s.number, head)) for name, x in zip(WY_RESULTS, found)
                ]
        first += len(rows)
    return claims


ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}


def norm(c: dict) -> list[Claim]:
    """Of `gated_rms_norm`."""
    x, gate = c["x"], ACTIVATIONS[c.get("activation", "sigmoid")](c["z"])
    return [Claim("o", (), gated_norm(x, gate, c["weight"], c.get("eps", 1e-5)), group="all")]


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * gate


def convolved(inputs: Tensor, taps: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """`[tokens, D]` of the inputs `[W - 1 + tokens, D]`, `W - 1` of them before the first token."""
    W = taps.shape[1]
    tokens = len(inputs) - (W - 1)
    total = sum(inputs[j : j + tokens] * taps[:, j] for j in range(W))
    return ACTIVATIONS[activation](total if bias is None else total + bias)


def convolution(c: dict) -> list[Claim]:
    """Of `short_convolution`."""
    D = c["x"].shape[2]
    taps = c["weight"].reshape(D, -1)
    W = taps.shape[1]
    pool = Slots("state_pool", c.get("state_pool"), c.get("null_index", "negative"))
    given = next((c[name] for name in ("initial_state", "state_pool", "final_state") if c.get(name) is not None), None)
    L = W - 1 if given is None else given.shape[2]
    claims = []
    for s in sequences(c):
        before = torch.zeros(D, L, dtype=torch.float64)
        index = -1 if c.get("state_indices") is None else int(c["state_indices"][s.number])
        flags = c.get("has_initial_state")
        if c.get("initial_state") is not None:
            before = c["initial_state"][s.number]
        elif pool.has(index) and (flags is None or bool(flags[s.number])):
            before = pool.read(index)
        inputs = torch.cat([before.mT, c["x"][s.row, s.begin : s.end]])
        o = convolved(inputs[L - (W - 1) :], taps, c.get("bias"), c.get("activation", "silu"))
        claims.append(Claim("o", (s.row, slice(s.begin, s.end)), o, group=s.number))
        if pool.pool is not None and s.length > 0 and pool.has(index):
            pool.store((index,), inputs[-L:].mT, s.number)
        elif pool.pool is None and (c.get("output_final_state") or c.get("final_state") is not None):
            claims.append(Claim("final_state", (s.number,), inputs[-L:].mT, group=s.number))
    return [*claims, *pool.claims.values()]


def fused(c: dict) -> list[Claim]:
    """Of `fused_kda_decode`: windows are convolved here, the rest is a step of decoding and a norm."""
    x, windows, state = c["x"], c["conv_state"], c["state"]
    spec, records = c.get("num_spec_tokens"), c.get("intermediate_states")
    S1, packed = 1 + (spec or 0), c.get("cu_seqlens") is not None
    leading = (1, len(x)) if packed else (len(x) // S1, S1)
    HV, V, K = state.shape[1:] if c.get("state_v_first", True) else (state.shape[1], state.shape[3], state.shape[2])
    taps = c["weight"].mT if c["weight"].dim() == 3 and c["weight"].shape[1] != 1 else c["weight"]
    taps = taps.reshape(x.shape[1], -1)
    W = taps.shape[1]
    pools = [Slots(name, c[name], c.get("null_index", "negative")) for name in ("conv_state", "state")]
    indices = c["state_indices"].clone()
    indices = indices[:, None] if indices.dim() == 1 else indices
    mixed, moved = torch.zeros_like(x), {}
    batch = {"q": x.view(*leading, x.shape[1]), "cu_seqlens": c.get("cu_seqlens")}
    for s in sequences(batch):
        begin, length = s.row * leading[1] + s.begin, s.few(S1)
        accepted = 1 if c.get("num_accepted_tokens") is None else int(c["num_accepted_tokens"][s.number])
        row = indices[s.number]
        of_start = accepted - 1 if len(row) > 1 else 0
        if not 1 <= accepted <= S1 or not all(p.has(int(row[i])) for p in pools for i in (0, of_start)):
            indices[s.number] = -1
            continue
        slot = int(row[0])
        before = windows[slot, :, accepted - 1 : accepted - 1 + W - 1].mT
        inputs = torch.cat([before, x[begin : begin + length]])
        if length > 0:
            mixed[begin : begin + length] = convolved(inputs, taps, c.get("bias"), "silu")
        for place, value in enumerate(inputs[1:] if length > 0 else ()):
            at = (slot, slice(None), place)
            moved[slot, place] = Claim("conv_state", at, None if (slot, place) in moved else value, group=s.number)
    own = {
        "x",
        "weight",
        "bias",
        "conv_state",
        "output_gate",
        "norm_weight",
        "norm_eps",
        "output",
        "num_accepted_tokens",
    }
    step = {name: x for name, x in c.items() if name not in own | {"raw_g", "raw_beta", "state", "state_indices"}}
    step |= {"lower_bound": c.get("lower_bound", -5.0), "use_gate_in_kernel": True, "initial_state": state}
    step |= {"beta_is_logit": c.get("beta_is_logit", True), "update_state": records is None, "mixed_qkv": mixed}
    step |= {"g": c["raw_g"].reshape(len(x), HV * K), "beta": c["raw_beta"].reshape(len(x), HV)}
    step["ssm_state_indices"] = indices if spec is not None and records is None else indices[:, 0]
    if spec is not None and records is None:
        step["num_accepted_tokens"] = c.get("num_accepted_tokens")
    gate = c["output_gate"].reshape(*leading, HV, V).sigmoid()
    claims = list(moved.values())
    for claim in decode(step):
        if claim.target == "o" and not claim.exact:
            o = gated_norm(claim.want, gate[claim.index], c["norm_weight"], c.get("norm_eps", 1e-5))
            claim = replace(claim, want=o)
        elif claim.target == "initial_state":
            claim = replace(claim, target="state")
        claims.append(claim)
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
    padded = F.pad(dA.tril(-1), (0, C_pad) if (C_pad := c["A"].shape[-1] - length) else (0, 0))
    return [dq, dk, dv, dbeta, dg, padded]


SPOILT = ("q", "k", "v", "g", "beta", "x")
"""Inputs `[B, T, ..]` that may have rows of no sequence."""


def padding(x: Tensor, used: int) -> list[int]:
    """For `F.pad`: tokens behind the first `used` ones."""
    return [0, 0] * (x.dim() - 2) + [0, x.shape[1] - used]


def gradients(op: str, c: dict, do: Tensor, dht: Tensor | None) -> dict[str, Tensor]:
    """Of `<do, o> + <dht, final_state>` by autograd through the truth; rows of no sequence are zero."""
    if c.get("cu_seqlens") is not None:
        # NaN may stand in rows of no sequence, and 0 times NaN is NaN
        used = int(c["cu_seqlens"][-1])
        c |= {name: F.pad(c[name][:, :used], padding(c[name], used)) for name in SPOILT if name in c}
    leaves = {name: c[name].clone().requires_grad_() for name in LEAVES if c.get(name) is not None}
    total = torch.zeros((), dtype=torch.float64)
    for claim in TRUTHS[op](c | leaves):
        if claim.target == "o":
            total = total + (claim.want * do[claim.index]).sum()
        elif claim.target == "final_state" and dht is not None:
            total = total + (claim.want * dht[claim.index]).sum()
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
    """What `op(**call)` must return and write, from the call's tensors as they are now."""
    with torch.enable_grad() if op == "chunk_bwd_wy_dqkg" else torch.no_grad():
        return TRUTHS[op](arguments(call))


def gradients_of(op: str, call: dict, do: Tensor, dht: Tensor | None) -> dict[str, Tensor]:
    with torch.enable_grad():
        return gradients(op, arguments(call), wide(do), None if dht is None else wide(dht))
