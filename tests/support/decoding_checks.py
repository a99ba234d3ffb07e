"""What every backend's `recurrent_kda` is held to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import flashdelta as fd

from .decoding import BY_NAME, STEPS, WRITTEN, Expected, Step, amid, expected, make_step, memory_of, untouched
from .inputs import Source
from .oracle import TOLERANCE, assert_close, one_rounding, poisoned_memory, same_bits

BF16 = torch.bfloat16


def check_step(op, step: Step, dtype: torch.dtype, backend: str, device: str = "cpu", seed: int = 0) -> dict:
    """Runs one step into an `output` full of NaN; holds outputs, pools and everything around them. Returns the call."""
    if dtype == torch.float64 and step.state == torch.float32:
        step = replace(step, state=dtype)
    call = make_step(step, dtype, device, seed)
    want = expected(step, call)
    before = {name: memory_of(x).clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    heads = (step.HV, step.V)
    output = torch.full(output_shape(step) + heads, torch.nan, dtype=dtype, device=device)
    with poisoned_memory():
        o, states = op(**call, output=output, backend=backend)
    assert o is output
    hold_output(step, output, want.o)
    for name, stored in zip(WRITTEN, (want.stored, want.stored_rows)):
        if name in call:
            exact = want.pool if name == "initial_state" else want.intermediate
            hold_states(name, call[name], exact, before[name], stored)
    for name, x in before.items():
        assert name in WRITTEN or same_bits(memory_of(call[name]), x), f"{name} was written"
    if not step.final:
        assert states is None
    elif "initial_state" in call:
        assert states is call["initial_state"]
    else:
        assert states.shape[0] == step.sequences
    return call


def output_shape(step: Step) -> tuple[int, int]:
    return step.batch, step.tokens


def compared_rows(step: Step, most_tokens: int) -> torch.Tensor:
    """Which rows of `o` must be as in the truth: all but those of no sequence, and of one with more than `most_tokens`."""
    lengths = (step.T,) * step.B if step.lengths is None else step.lengths
    rows = torch.zeros(step.batch * step.tokens, dtype=torch.bool)
    for begin, length in zip(itertools.accumulate((0, *lengths)), lengths):
        rows[begin : begin + length] = length <= most_tokens
    return rows


def hold_output(step: Step, o: torch.Tensor, want: torch.Tensor) -> None:
    """Rows of some sequence; zeros must be zeros."""
    covered = compared_rows(step, step.most_tokens)
    got, want = o.flatten(0, 1).cpu()[covered], want[covered]
    assert_close("o", got, want, TOLERANCE[o.dtype])
    assert torch.equal(got == 0, got == 0) and got[want == 0].eq(0).all()


def hold_states(name: str, got: torch.Tensor, want: torch.Tensor, before: torch.Tensor, stored: set) -> None:
    mask = untouched(got, stored)
    assert same_bits(memory_of(got)[mask], before[mask]), f"{name}: written where nothing is to be stored"
    for i in sorted(stored):
        tolerance = 1e-5 if got.dtype != torch.float64 else 1e-11
        assert_close(f"{name}[{i}]", got[i].cpu(), want[i], tolerance + one_rounding(got.dtype))


def commit_call(state: torch.dtype = torch.float32, rows: tuple[int, ...] | None = None, gap: int = 16) -> dict:
    """Four sequences: accepted 2, none, all 3, and one whose slot is null."""
    source = Source(torch.float32, "cpu", 0)
    call = {
        "initial_state": amid(source, state, (6, 2, 8, 4), gap),
        "intermediate_states": amid(source, state, (6, 3, 2, 8, 4), gap),
        "ssm_state_indices": torch.tensor([4, 1, 0, -1], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 0, 3, 1], dtype=torch.int32),
    }
    return call if rows is None else call | {"intermediate_state_indices": torch.tensor(rows)}


def check_commit(call: dict, backend: str) -> None:
    """`commit` on the pool's memory, against a plain loop, to the bit."""
    pool, states = call["initial_state"], call["intermediate_states"]
    want = memory_of(pool).clone()
    slots = want.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    indices = call["ssm_state_indices"].tolist()
    rows = call["intermediate_state_indices"].tolist() if "intermediate_state_indices" in call else indices
    lowest = 1 if call.get("null_index") == "non_positive" else 0
    for slot, row, count in zip(indices, rows, call["num_accepted_tokens"].tolist()):
        if lowest <= slot < len(pool) and 0 <= row < len(states) and 1 <= count <= states.shape[1]:
            slots[slot] = states[row, count - 1]
    fd.commit(**call, backend=backend)
    assert same_bits(memory_of(pool), want)


def replay_buffer(step: Step, device: str = "cpu", gap: int = 16) -> torch.Tensor:
    """Of as many rows as the step's buffer of states has: NaN wherever nothing may be read, and no token recorded."""
    plain = fd.replay_buffer(step.buffer_rows, step.spec, step.HV, step.K, step.V)
    x = amid(Source(torch.float32, device, 0), torch.float32, plain.shape, gap)
    memory_of(x).fill_(torch.nan)
    x[:, 0, :, counts_of(step.K, step.V)] = 0
    return x


def counts_of(K: int, V: int) -> slice:
    """Where a record has the numbers that say how many tokens are recorded."""
    return slice(2 * K + V, 2 * K + V + 4)


def check_replay(step: Step, dtype: torch.dtype, backend: str, device: str = "cpu", wide: bool = True) -> None:
    """A read-only verification into a replay buffer, and its commit, against the same into states, and against the truth. The
    reference is held to the states' bits, kernels to 1e-6 and one rounding; states are the portable kernels' where Hopper's
    keep records. A sequence whose count is past its tokens keeps its state, and so do all at a second commit. `wide`: a
    bfloat16 pool is checked in float32, too."""
    if dtype == torch.float64:
        step = replace(step, state=dtype)
    of_states = "triton" if backend == "hopper" else backend
    call = make_step(step, dtype, device) | {"backend": backend}
    records = replay_buffer(step, device, 9 if step.gap == 9 else 16).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    before = memory_of(records).clone()
    shape = *output_shape(step), step.HV, step.V
    outputs = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
    fd.recurrent_kda(**call | {"output": outputs[0], "backend": of_states})
    fd.recurrent_kda(**call | {"output": outputs[1], "intermediate_states": records})
    want = expected(step, call)
    hold_output(step, outputs[1], want.o)
    assert backend != "reference" or same_bits(*outputs)
    from_source = step.source is not None
    pool = call["initial_state_source" if from_source else "initial_state"]
    slots = call.get("initial_state_indices" if from_source else "ssm_state_indices")
    slots = torch.arange(step.N, device=device) if slots is None else slots
    lengths = torch.tensor(step.lengths or (step.T,) * step.B, device=device, dtype=torch.int32)
    lengths[lengths > step.most_tokens] = 0
    rows = call.get("intermediate_state_indices", slots).tolist()
    written = [(row, i) for row, length in zip(rows, lengths.tolist()) for i in range(length)]
    counts = [(row, 0, slice(None), counts_of(step.K, step.V)) for row in rows]
    outside = untouched(records, [i for i in [*written, *counts] if 0 <= i[0] < len(records)])
    assert same_bits(memory_of(records)[outside], before[outside])
    shared = {"ssm_state_indices": slots, "state_v_first": step.v_first, "null_index": step.null_index}
    if "intermediate_state_indices" in call:
        shared["intermediate_state_indices"] = call["intermediate_state_indices"]
    others = torch.arange(len(lengths), device=device, dtype=torch.int32) % (1 + lengths)
    for accepted in (lengths, others, lengths.clamp(max=1), lengths + 1, torch.zeros_like(lengths) - 1):
        fd.recurrent_kda(**call | {"intermediate_states": records})
        states = torch.where(accepted > lengths, -1, accepted)
        pools = pool.clone(), pool.clone()
        fd.commit(pools[0], call["intermediate_states"], num_accepted_tokens=states, backend=of_states, **shared)
        for _ in range(2):
            fd.commit(pools[1], records, num_accepted_tokens=accepted, backend=backend, **shared)
            assert backend != "reference" or same_bits(*pools)
            assert_close("pool", pools[1], pools[0].double(), 1e-6 + one_rounding(pool.dtype))
            kept = slots[(accepted < 1) | (accepted > lengths)].long()
            kept = kept[(kept >= 0) & (kept < len(pool))]
            assert same_bits(pools[1][kept], pool[kept])
        if pool.dtype == BF16 and accepted is lengths:
            assert (pools[0] != pools[1]).double().mean() < 0.01, "more than a few close calls of rounding"
            if wide:
                _hold_wide(call, records, pool, of_states, backend, accepted, shared)
        if accepted is lengths:
            _hold_committed(step, pools[1], slots.tolist(), lengths.tolist(), want)


def _hold_wide(
    call: dict,
    records: torch.Tensor,
    pool: torch.Tensor,
    of_states: str,
    backend: str,
    accepted: torch.Tensor,
    shared: dict,
) -> None:
    """The records of a bfloat16 pool, replayed into the same pool in float32, are as exact as any."""
    role = "initial_state" if call.get("initial_state_source") is None else "initial_state_source"
    wide = {role: pool.float(), "intermediate_states": call["intermediate_states"].float(), "backend": of_states}
    fd.recurrent_kda(**call | wide)
    fd.recurrent_kda(**call | {"intermediate_states": records})
    found, want = pool.float(), pool.float()
    fd.commit(found, records, num_accepted_tokens=accepted, backend=backend, **shared)
    fd.commit(want, wide["intermediate_states"], num_accepted_tokens=accepted, backend=of_states, **shared)
    assert_close("pool in float32", found, want.double(), 1e-6)


def _hold_committed(step: Step, pool: torch.Tensor, slots: list[int], lengths: list[int], want: Expected) -> None:
    """The states after each sequence's last token, in its slot, against the truth."""
    own = range(len(slots)) if step.indices is None else step.indices
    for row, slot, length in zip(own if step.rows == "slots" else step.rows, slots, lengths):
        if (row, length - 1) in want.stored_rows and 0 <= slot < len(pool):
            tolerance = 1e-11 if pool.dtype == torch.float64 else 1e-5 + one_rounding(pool.dtype)
            assert_close(f"pool[{slot}]", pool[slot].cpu(), want.intermediate[row, length - 1], tolerance)


_VERIFIED = [step for step in STEPS if step.rows is not None]
REPLAYED = [
    *_VERIFIED,
    replace(BY_NAME["verify_16"], name="drafts_16", state=torch.float32, HV=2),
    replace(BY_NAME["verify_16"], name="drafts_15", T=16, spec=15, state=torch.float32),
    replace(BY_NAME["verify_rows"], name="drafts_16_softplus", gate="softplus", spec=16, lengths=(17, 0, 16)),
    replace(BY_NAME["verify_rows"], name="drafts_7_softplus", gate="softplus", spec=7, lengths=(8, 0, 5),
        state=torch.float32),
    replace(BY_NAME["verify_long"], name="drafts_16_long", spec=16, lengths=(17, 18, 2)),
    replace(BY_NAME["verify_rows"], name="drafts_9_packed", spec=9, lengths=(10, 1, 9), v_first=True),
    replace(BY_NAME["verify"], name="softplus_bf16", gate="softplus", beta="double_logit", state=BF16, v_first=False),
    replace(BY_NAME["verify"], name="gate_none", gate="none", v_first=True, gap=9),
    replace(BY_NAME["verify"], name="logsigmoid", gate="logsigmoid", state=torch.float32),
    replace(BY_NAME["verify"], name="K256", K=256, V=256, H=1, HV=1, B=1, indices=(2,)),
    replace(BY_NAME["verify"], name="K1", K=1, V=2, H=1, HV=3),
    replace(BY_NAME["verify_rows"], name="mixed", layout="mixed_rows", state=torch.float32, v_first=True, H=2, HV=4),
]  # fmt: skip
"""Steps whose verification may go to a replay buffer."""

_WIDE = replace(BY_NAME["verify"], K=128, V=128, H=2, HV=2, gap=256, v_first=True, state=BF16)
_EIGHTEEN: dict[str, Any] = {"B": 18, "H": 1, "HV": 1, "indices": tuple(range(18)), "slots": 19}
HOPPER_REPLAYED = [
    replace(_WIDE, name="packed", lengths=(8, 0, 5), spec=7, HV=6, beta="double_logit", state=torch.float32),
    replace(_WIDE, name="too long", lengths=(8, 9, 5), spec=7),
    replace(_WIDE, name="too long for 17", lengths=(17, 18, 1), spec=16, state=torch.float32, gate="softplus"),
    replace(_WIDE, name="narrow", K=64, V=64, T=8, spec=7),
    *(replace(_WIDE, name=f"{tokens} tokens", T=tokens, spec=tokens - 1, state=state) for tokens,
        state in itertools.product((2, 4, 5, 8, 9, 16, 17), (torch.float32, BF16))),
    replace(_WIDE, name="narrow keys", K=64, state=torch.float32),
    replace(_WIDE, name="narrow values", V=64),
    replace(_WIDE, name="odd pitch", gap=9, state=torch.float32),
    replace(_WIDE, name="softplus", gate="softplus", lengths=(8, 0, 5), spec=7, HV=6, state=torch.float32),
    *(replace(_WIDE, name=f"{tokens} tokens without a bound", gate=gate, T=tokens, spec=tokens - 1) for tokens,
        gate in ((3, "none"), (4, "softplus"), (8, "logsigmoid"), (16, "softplus"), (17, "softplus"))),
    *(replace(_WIDE, name=name, K=64, V=64, gate=gate, spec=16, state=torch.float32, **_EIGHTEEN, **lengths) for name,
        gate, lengths in (("0 to 17 tokens", "lower_bound", {"lengths": tuple(range(18))}),
        ("0 to 17 tokens without a bound", "logsigmoid", {"lengths": tuple(range(18))}), ("0 to 17 of 17 tokens",
        "none", {"T": 17}))),
    replace(_WIDE, name="narrow, logsigmoid", K=64, V=64, T=9, spec=8, gate="logsigmoid", state=torch.float32),
    replace(_WIDE, name="narrow keys, softplus", K=64, T=5, spec=4, gate="softplus"),
]  # fmt: skip
"""Those that Hopper has kernels for, or nearly."""

WHOLE_HEADS = [step for step in HOPPER_REPLAYED if step.state == BF16 and step.V == 128 and step.spec < 16]
"""Of those, what `commit` may replay with a CTA a head."""


OTHER_ROUNDS = ({}, {"K": 128}, {"group": 2}, {"gate": "softplus", "v_first": False, "group": 2})
"""Gates, layouts and heads for `check_rounds`."""


def check_rounds(
    rounds: int,
    backend: str,
    device: str = "cpu",
    state: torch.dtype = torch.float32,
    S: int = 5,
    K: int = 32,
    dtype: torch.dtype = torch.float32,
    gate: str = "lower_bound",
    v_first: bool = True,
    group: int = 1,
) -> None:
    """Verification, random acceptance and replay, over and over: the pool is that of the accepted tokens one by one. Not every
    sequence is verified in each round; one that is not keeps its state, whatever is accepted of it."""
    N, HV, V = 4, 2, K
    draw = torch.Generator().manual_seed(rounds)
    pool = torch.randn(N + 1, HV, V, K, generator=draw).to(device, state)
    want = pool.clone().float()
    records = fd.replay_buffer(N + 2, S, HV, K, V, device=device)
    rows = torch.tensor([4, 1, 0, 5], device=device, dtype=torch.int32)
    options = {"gate": gate, "A_log": torch.zeros(HV, device=device), "beta_is_logit": True, "state_v_first": v_first}
    options |= {"lower_bound": -5.0} if gate == "lower_bound" else {}
    options["backend"] = "triton" if backend == "hopper" else backend
    for _ in range(rounds):
        lengths = torch.randint(0, 2 + S, (N,), generator=draw)
        offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
        slots = torch.randperm(N + 1, generator=draw)[:N].to(device, torch.int32)
        accepted = torch.randint(0, 3 + S, (N,), generator=draw)
        total = int(lengths.sum())
        shapes = {"q": (HV // group, K), "k": (HV // group, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
        x = {name: torch.randn(1, total, *shape, generator=draw).to(device, dtype) for name, shape in shapes.items()}
        x["g"] -= 8.0  # memories of hundreds of tokens, so that a round long ago still counts
        verify = {"num_spec_tokens": S, "update_state": False, "cu_seqlens": offsets, "ssm_state_indices": slots}
        buffer = {"intermediate_states": records, "intermediate_state_indices": rows}
        fd.recurrent_kda(**x, **options | {"backend": backend}, initial_state=pool, **verify, **buffer)
        counts = accepted.to(device, torch.int32)
        layout = {"state_v_first": v_first, "backend": backend}
        fd.commit(pool, records, slots, counts, intermediate_state_indices=rows, **layout)
        for n in range(N):
            if 1 <= accepted[n] <= lengths[n]:
                begin = int(offsets[n])
                part = {name: y[:, begin : begin + int(accepted[n])] for name, y in x.items()}
                slot = int(slots[n])
                start = {"initial_state": want[slot : slot + 1], "output_final_state": True}
                renamed = options | {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
                del renamed["beta_is_logit"]
                want[slot] = fd.fused_recurrent_kda(**part, **renamed, **start)[1][0].to(state).float()
    assert_close("pool", pool.float(), want, 1e-5 if state == torch.float32 else 2e-2)


def check_rows_of_records(backend: str, device: str = "cpu", K: int = 32, dtype: torch.dtype = torch.float32) -> None:
    """Whose row a verification writes and a commit empties: a null sequence's neither, one's without tokens, or with too many,
    both."""
    S, HV, V = 2, 2, K
    draw = torch.Generator().manual_seed(0)
    lengths, slots = (3, 0, 2, 5, 1), (1, 2, -1, 0, 7)  # the fourth is too long, and slot 7 past the end
    index = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    shapes = {"q": (HV, K), "k": (HV, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    x = {name: torch.randn(1, 11, *shape, generator=draw).to(device, dtype) for name, shape in shapes.items()}
    options = {"gate": "logsigmoid", "beta_is_logit": True}
    of_states = "triton" if backend == "hopper" else backend
    pool = torch.randn(4, HV, V, K, generator=draw).to(device)
    records = fd.replay_buffer(5, S, HV, K, V, device=device)
    counts = records[:, 0, :, counts_of(K, V)]
    counts.copy_(torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0])[:, None, None].expand_as(counts))
    before, start, rows = records.clone(), pool.clone(), index(0, 1, 2, 3, 4)
    offsets = index(0, *torch.tensor(lengths).cumsum(0).tolist())
    verify = {"num_spec_tokens": S, "update_state": False, "cu_seqlens": offsets, "ssm_state_indices": index(*slots)}
    buffer = {"intermediate_states": records, "intermediate_state_indices": rows}
    fd.recurrent_kda(**x, **options, initial_state=pool, **verify, **buffer, backend=backend)
    assert same_bits(pool, start) and same_bits(records[[2, 4]], before[[2, 4]])
    assert [row.unique().tolist() for row in counts[[0, 1, 3]]] == [[3.0], [0.0], [0.0]]
    verified = records.clone()
    fd.commit(pool, records, index(*slots), index(2, 1, 2, 3, 1), intermediate_state_indices=rows, backend=backend)
    assert same_bits(records[[2, 4]], verified[[2, 4]]) and counts[[0, 1, 3]].eq(0).all()
    assert same_bits(pool[[0, 2, 3]], start[[0, 2, 3]])
    part, want = {name: y[:, :2] for name, y in x.items()}, start[1:2].clone()
    fd.recurrent_kda(**part, **options, initial_state=want, cu_seqlens=index(0, 2), backend=of_states)
    assert_close("pool", pool[1], want[0].double(), 1e-5)


def check_floor(
    tokens: int, backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = torch.float32
) -> None:
    """Tokens that write nothing, at the gate's floor of -5 each: outputs are the start's alone, down to `exp(-85)`, and
    of small queries."""
    S, HV = tokens - 1, 2
    draw = torch.Generator().manual_seed(0)
    x = {name: torch.randn(1, 1 + S, HV, K, generator=draw).to(device, dtype) for name in "qkv"}
    x["q"] *= 1e-8
    x |= {"g": torch.full((1, 1 + S, HV, K), 1e4, device=device), "beta": torch.zeros(1, 1 + S, HV, device=device)}
    pool = torch.randn(1, HV, K, K, generator=draw).to(device) * 1e10
    options = {
        "gate": "lower_bound",
        "lower_bound": -5.0,
        "num_spec_tokens": S,
        "update_state": False,
        "backend": backend,
    }
    records = fd.replay_buffer(1, S, HV, K, K, device=device)
    o, _ = fd.recurrent_kda(**x, **options, initial_state=pool, intermediate_states=records)
    q = x["q"][0].double() / (x["q"][0].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5
    decays = torch.exp(-5.0 * torch.arange(1, 2 + S, device=device, dtype=torch.float64))
    want = torch.einsum("thk,hvk->thv", q, pool[0].double())
    assert_close("o", o[0] / decays[:, None, None].to(dtype), want, 2e-5 + 2 * one_rounding(dtype))


def check_strong_decays(
    gate: str, tokens: int, backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = torch.float32
) -> None:
    """Decays without a bound, from `exp(-300)` to `exp(-1e-3)`, token by token and channel by channel: outputs and states
    against float64. A decay of a token leaves nothing of what was before it, and all of what comes after."""
    HV, S = 2, tokens - 1
    draw = torch.Generator().manual_seed(tokens)
    x = {name: torch.randn(1, tokens, HV, K, generator=draw).to(device, dtype) for name in "qkv"}
    exponents = torch.tensor([300.0, 1e-3, 20.0, 1e-3, 0.5, 90.0])
    by_token = exponents[torch.arange(tokens) % len(exponents)][:, None, None].expand(tokens, HV, K)
    by_channel = exponents[torch.randint(0, len(exponents), (tokens, HV, K), generator=draw)]
    # of one channel in two all tokens have one decay
    decays = torch.where(torch.arange(K) % 2 == 0, by_token, by_channel).double()
    g = {"none": -decays, "softplus": decays.expm1().log(), "logsigmoid": -decays.expm1().log()}[gate]
    g = torch.where(decays > 100, decays * (1 if gate == "softplus" else -1), g)
    x |= {"g": g[None].float().to(device), "beta": torch.rand(1, tokens, HV, generator=draw).to(device)}
    pool = torch.randn(1, HV, K, K, generator=draw).to(device)
    slots, count = torch.zeros(1, dtype=torch.int32, device=device), torch.full((1,), tokens, device=device)
    options = {"gate": gate, "num_spec_tokens": S, "update_state": False, "ssm_state_indices": slots}
    if gate == "softplus":
        options["A_log"] = torch.zeros(HV, device=device)
    wide = {name: y.double() for name, y in x.items()}
    states = torch.zeros(1, tokens, HV, K, K, device=device, dtype=torch.float64)
    exact = options | {"initial_state": pool.double(), "intermediate_states": states, "backend": "reference"}
    want, _ = fd.recurrent_kda(**wide, **exact)
    records = fd.replay_buffer(1, S, HV, K, K, device=device)
    o, _ = fd.recurrent_kda(**x, **options, initial_state=pool, intermediate_states=records, backend=backend)
    for t in range(tokens):
        assert_close(f"o[{t}]", o[:, t], want[:, t], 1e-5 + one_rounding(dtype))
    fd.commit(pool, records, slots, count.int(), backend=backend)
    assert_close("pool", pool[0], states[0, -1], 1e-5)


def check_wild_counts(backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = torch.float32) -> None:
    """Counts in a row that no verification writes: whatever it says, a commit takes no more tokens than the row has."""
    S, HV = 3, 2
    draw = torch.Generator().manual_seed(0)
    records = torch.randn(fd.replay_buffer(2, S, HV, K, K).shape, generator=draw).to(device)
    pool = torch.randn(2, HV, K, K, generator=draw).to(device)
    slots = torch.arange(2, device=device)
    for recorded in (1e9, torch.inf, torch.nan, -1.0, 2.5):
        for accepted in (2 + S, 2**31 - 1, 1 + S):
            left, given = pool.clone(), records.clone()
            given[:, 0, :, counts_of(K, K)] = recorded
            fd.commit(left, given, slots, torch.tensor([accepted, 0], device=device), backend=backend)
            assert same_bits(left[1:], pool[1:]) and given[:, 0, :, counts_of(K, K)].eq(0).all()
            assert same_bits(left[0], pool[0]) == (accepted > 1 + S or not recorded >= accepted)


def check_spoilt_token(
    name: str,
    token: int,
    gate: str,
    backend: str,
    device: str = "cpu",
    K: int = 32,
    dtype: torch.dtype = torch.float32,
    S: int = 4,
) -> None:
    """A token that is no number, as of a rejected draft, spoils no token before it: neither its output nor its commit. What it
    does spoil is no number either, as in the recurrence."""
    N, HV, V = 2, 2, K
    draw = torch.Generator().manual_seed(token)
    shapes = {"q": (HV, K), "k": (HV, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    x = {key: torch.randn(N, 1 + S, *shape, generator=draw).to(device, dtype) for key, shape in shapes.items()}
    pool = torch.randn(N, HV, V, K, generator=draw).to(device)
    for bad in (torch.nan, torch.inf) if name != "g" else (torch.nan,):
        call = {key: y.clone() for key, y in (x | {"initial_state": pool}).items()}
        call[name].view(N, -1)[0, call[name].stride(1) * token + 1] = bad
        options = {"gate": gate, "lower_bound": -5.0 if gate == "lower_bound" else None, "num_spec_tokens": S}
        options |= {"update_state": False, "ssm_state_indices": torch.arange(N, device=device)}
        records = fd.replay_buffer(N, S, HV, K, V, device=device)
        got, _ = fd.recurrent_kda(**call, **options, intermediate_states=records, backend=backend)
        kept = call["initial_state"].clone()
        states = torch.empty(N, 1 + S, HV, V, K, device=device)
        want, _ = fd.recurrent_kda(**call, **options, intermediate_states=states, backend="reference")
        assert torch.equal(got.isfinite(), want.isfinite())
        known = want.isfinite()
        assert known[0].any() and not known[0].all() and known[1].all()
        assert_close("o", got[known], want[known].double(), 1e-5 + one_rounding(dtype))
        for accepted in sorted({1, max(1, token), token + 1, 1 + S}):
            pools = kept.clone(), kept.clone()
            count = torch.full((N,), accepted, device=device, dtype=torch.int32)
            fd.recurrent_kda(**call, **options, intermediate_states=records, backend=backend)
            fd.commit(pools[0], records, options["ssm_state_indices"], count, backend=backend)
            fd.commit(pools[1], states, options["ssm_state_indices"], count, backend="reference")
            known = pools[1].isfinite()
            assert torch.equal(pools[0].isfinite(), known)
            assert_close("pool", pools[0][known], pools[1][known].double(), 1e-5)


RECORD_CHECKS: dict[str, Callable[..., None]] = {
    "rows that are written and emptied": check_rows_of_records,
    "wild counts": check_wild_counts,
    **{f"{n} tokens at the floor of the gate": functools.partial(check_floor, n) for n in (16, 17)},
    **{f"{n} tokens without a bound, {gate}": functools.partial(check_strong_decays, gate, n) for gate in ("none",
        "softplus", "logsigmoid") for n in (4, 7, 16, 17)},
    **{f"token {n} whose {name} is no number, {gate}": functools.partial(check_spoilt_token, name, n, gate) for name,
        n in (("q", 2), ("k", 1), ("v", 3), ("g", 2), ("beta", 1), ("initial_state", 0)) for gate in ("lower_bound",
        "logsigmoid")},
    **{f"token 16 whose {name} is no number": functools.partial(check_spoilt_token, name, 16, gate, S=16) for name,
        gate in zip(("q", "k", "v", "g", "beta"), ("lower_bound", "logsigmoid") * 3)},
}  # fmt: skip
"""By name: what holds of replay buffers with every backend."""
