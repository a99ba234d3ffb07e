"""Checks of every backend's `recurrent_kda` and `commit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ..fuzz.truth import claims_of
from .cases import BF16, FP32
from .decoding import BY_NAME, STEPS, Step, amid, make_step, memory_of
from .held import hold_claims, of_states, run_held
from .inputs import Source
from .oracle import TOLERANCE, assert_close, one_rounding


def check_step(op, step: Step, dtype: torch.dtype, backend: str, device: str = "cpu", seed: int = 0) -> dict:
    """Runs one step into an `output` full of NaN, and holds all that it leaves. Returns the call."""
    if dtype == torch.float64 and step.state == FP32:
        step = replace(step, state=dtype)
    call = make_step(step, dtype, device, seed)
    _, states = run_held(op, call | {"output": output_of(step, dtype, device), "backend": backend}, TOLERANCE[dtype])
    if not step.final:
        assert states is None
    elif "initial_state" in call:
        assert states is call["initial_state"]
    return call


def output_of(step: Step, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.full((step.batch, step.tokens, step.HV, step.V), torch.nan, dtype=dtype, device=device)


def commit_call(state: torch.dtype = FP32, rows: tuple[int, ...] | None = None, gap: int = 16) -> dict:
    """Four sequences: accepted 2, none, all 3, and one whose slot is null."""
    source = Source(FP32, "cpu", 0)
    call = {
        "initial_state": amid(source, state, (6, 2, 8, 4), gap),
        "intermediate_states": amid(source, state, (6, 3, 2, 8, 4), gap),
        "ssm_state_indices": torch.tensor([4, 1, 0, -1], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 0, 3, 1], dtype=torch.int32),
    }
    return call if rows is None else call | {"intermediate_state_indices": torch.tensor(rows)}


def check_commit(call: dict, backend: str) -> None:
    """`commit` copies states to the bit."""
    run_held(fd.commit, call | {"backend": backend}, 0.0)


def replay_buffer(step: Step, device: str = "cpu", gap: int = 16) -> Tensor:
    """With as many rows as the step's buffer of states: NaN wherever nothing may be read. Rows say that they hold all tokens,
    which only a verification makes true."""
    plain = fd.replay_buffer(step.buffer_rows, step.spec, step.HV, step.K, step.V)
    x = amid(Source(FP32, device, 0), FP32, plain.shape, gap)
    memory_of(x).fill_(torch.nan)
    x[:, 0, :, counts_of(step.K, step.V)] = 1.0 + step.spec
    return x


def counts_of(K: int, V: int) -> slice:
    """Where a record has the numbers that say how many tokens are recorded."""
    return slice(2 * K + V, 2 * K + V + 4)


RECORDED, COMMITTED = 1e-4, 1e-5
"""Tolerances of records, of which some numbers are differences, and of what a commit makes of them in float32."""


def committed(dtype: torch.dtype) -> float:
    return 1e-11 if dtype == torch.float64 else COMMITTED + one_rounding(dtype)


def verify_and_commit(
    verify: dict, commits: list[dict], o: float, recorded: float = RECORDED
) -> tuple[Tensor, list[Tensor]]:
    """Returns `o` of a verification that records, and the pools of commits, before each of which it runs. A commit is held to
    the recurrence of the records that it finds; a second one finds none, and changes nothing."""
    found, _ = run_held(fd.recurrent_kda, verify, o, lambda dtype: recorded)
    pools = []
    for commit in commits:
        given = commit | {"initial_state": commit["initial_state"].clone()}
        given["intermediate_states"] = verify["intermediate_states"]
        for _ in range(2):
            run_held(fd.commit, given, o, committed)
        pools.append(given["initial_state"])
        fd.recurrent_kda(**verify)
    return found, pools


def check_replay(step: Step, dtype: torch.dtype, backend: str, device: str = "cpu", wide: bool = True) -> None:
    """Verifies into a replay buffer, and commits all tokens, a part, and in turn more than there are, one and none. With all of
    them the pool has the states of the recurrence. `wide`: records of a bfloat16 pool make a float32 one as exactly, too."""
    if dtype == torch.float64:
        step = replace(step, state=dtype)
    call = make_step(step, dtype, device) | {"backend": backend, "output": output_of(step, dtype, device)}
    states = claims_of("recurrent_kda", call)
    records = replay_buffer(step, device, 9 if step.gap == 9 else 16)
    call["intermediate_states"] = records.double() if dtype == torch.float64 else records
    source = "" if step.source is None else "_source"
    pool, slots = call[f"initial_state{source}"], call.get("initial_state_indices" if source else "ssm_state_indices")
    slots = torch.arange(step.B, device=device) if slots is None else slots
    lengths = torch.tensor(step.lengths or (step.T,) * step.B, device=device, dtype=torch.int32)
    lengths[lengths > step.most_tokens] = 0
    shared = {"ssm_state_indices": slots, "state_v_first": step.v_first, "null_index": step.null_index}
    shared |= {"backend": backend, "initial_state": pool}
    if "intermediate_state_indices" in call:
        shared["intermediate_state_indices"] = call["intermediate_state_indices"]
    nth = torch.arange(len(lengths), device=device, dtype=torch.int32)
    in_turn = torch.where(nth % 3 == 0, lengths + 1, torch.where(nth % 3 == 1, lengths.clamp(max=1), -1))
    accepted = (lengths, nth % (1 + lengths), in_turn)
    commits = [shared | {"num_accepted_tokens": x} for x in accepted]
    if pool.dtype == BF16 and wide:
        commits.append(commits[0] | {"initial_state": pool.float()})
    _, (found, *_) = verify_and_commit(call, commits, TOLERANCE[dtype])
    rows = call.get("intermediate_state_indices", slots).tolist()
    ends = {(row, length - 1): slot for row, length, slot in zip(rows, lengths.tolist(), slots.tolist())}
    ends = {place: slot for place, slot in ends.items() if 0 <= slot < len(pool)}
    wanted = [c for c in states if c.target == "intermediate_states" and c.index in ends]
    hold_claims([replace(c, target="pool", index=(ends[c.index],)) for c in wanted], {"pool": found}, 0.0, of_states)


_ROWS = BY_NAME["verify_rows"]
_VERIFIED = [step for step in STEPS if step.rows is not None]
REPLAYED = [
    *_VERIFIED,
    replace(
        _ROWS, name="rows", lengths=(3, 0, 2, 5, 1), indices=(1, 2, -1, 0, 7), rows=(0, 1, 2, 3, 4), buffer=5, slots=4
    ),
    replace(BY_NAME["verify_16"], name="drafts_16", state=FP32, HV=2),
    replace(BY_NAME["verify_16"], name="drafts_15", T=16, spec=15, state=FP32),
    replace(_ROWS, name="drafts_16_softplus", gate="softplus", spec=16, lengths=(17, 0, 16)),
    replace(_ROWS, name="drafts_7_softplus", gate="softplus", spec=7, lengths=(8, 0, 5), state=FP32),
    replace(BY_NAME["verify_long"], name="drafts_16_long", spec=16, lengths=(17, 18, 2)),
    replace(_ROWS, name="drafts_9_packed", spec=9, lengths=(10, 1, 9), v_first=True),
    replace(BY_NAME["verify"], name="softplus_bf16", gate="softplus", beta="double_logit", state=BF16, v_first=False),
    replace(BY_NAME["verify"], name="gate_none", gate="none", v_first=True, gap=9),
    replace(BY_NAME["verify"], name="logsigmoid", gate="logsigmoid", state=FP32),
    replace(BY_NAME["verify"], name="K256", K=256, V=256, H=1, HV=1, B=1, indices=(2,)),
    replace(BY_NAME["verify"], name="K1", K=1, V=2, H=1, HV=3),
    replace(_ROWS, name="mixed", layout="mixed_rows", state=FP32, v_first=True, H=2, HV=4),
]
"""Steps whose verification may go to a replay buffer."""

_WIDE = replace(BY_NAME["verify"], K=128, V=128, H=2, HV=2, gap=256, v_first=True, state=BF16)
_EIGHTEEN: dict[str, Any] = {"B": 18, "H": 1, "HV": 1, "indices": tuple(range(18)), "slots": 19}
HOPPER_REPLAYED = [
    replace(_WIDE, name="packed", lengths=(8, 0, 5), spec=7, HV=6, beta="double_logit", state=FP32),
    replace(_WIDE, name="too long", lengths=(8, 9, 5), spec=7),
    replace(_WIDE, name="too long for 17", lengths=(17, 18, 1), spec=16, state=FP32, gate="softplus"),
    replace(_WIDE, name="narrow", K=64, V=64, T=8, spec=7),
    *(
        replace(_WIDE, name=f"{tokens} tokens", T=tokens, spec=tokens - 1, state=state)
        for tokens, state in itertools.product((2, 4, 5, 8, 9, 16, 17), (FP32, BF16))
    ),
    replace(_WIDE, name="narrow keys", K=64, state=FP32),
    replace(_WIDE, name="narrow values", V=64),
    replace(_WIDE, name="odd pitch", gap=9, state=FP32),
    replace(_WIDE, name="softplus", gate="softplus", lengths=(8, 0, 5), spec=7, HV=6, state=FP32),
    *(
        replace(_WIDE, name=f"{tokens} tokens without a bound", gate=gate, T=tokens, spec=tokens - 1)
        for tokens, gate in ((3, "none"), (4, "softplus"), (8, "logsigmoid"), (16, "softplus"), (17, "softplus"))
    ),
    *(
        replace(_WIDE, name=name, K=64, V=64, gate=gate, spec=16, state=FP32, **_EIGHTEEN, **lengths)
        for name, gate, lengths in (
            ("0 to 17 tokens", "lower_bound", {"lengths": tuple(range(18))}),
            ("0 to 17 tokens without a bound", "logsigmoid", {"lengths": tuple(range(18))}),
            ("0 to 17 of 17 tokens", "none", {"T": 17}),
        )
    ),
    replace(_WIDE, name="narrow, logsigmoid", K=64, V=64, T=9, spec=8, gate="logsigmoid", state=FP32),
    replace(_WIDE, name="narrow keys, softplus", K=64, T=5, spec=4, gate="softplus"),
]
"""Those that Hopper has kernels for, or nearly."""

WHOLE_HEADS = [step for step in HOPPER_REPLAYED if step.state == BF16 and step.V == 128 and step.spec < 16]
"""Those that `commit` may replay with one CTA per head."""


OTHER_ROUNDS = ({}, {"K": 128}, {"group": 2}, {"gate": "softplus", "v_first": False, "group": 2})
"""Gates, layouts and heads for `check_rounds`."""


def check_rounds(
    rounds: int,
    backend: str,
    device: str = "cpu",
    state: torch.dtype = FP32,
    S: int = 5,
    K: int = 32,
    dtype: torch.dtype = FP32,
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
    shapes = {"q": (HV // group, K), "k": (HV // group, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}

    def packed(lengths: Tensor) -> dict:
        return {"cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)}

    for _ in range(rounds):
        lengths, accepted = (torch.randint(0, most + S, (N,), generator=draw) for most in (2, 3))
        slots = torch.randperm(N + 1, generator=draw)[:N].to(device, torch.int32)
        shape = (1, int(lengths.sum()))
        x = {name: torch.randn(*shape, *inner, generator=draw).to(device, dtype) for name, inner in shapes.items()}
        x["g"] -= 8.0  # memories of hundreds of tokens, so that a round long ago still counts
        verify = {"num_spec_tokens": S, "update_state": False, "ssm_state_indices": slots, "initial_state": pool}
        buffer = {"intermediate_states": records, "intermediate_state_indices": rows}
        fd.recurrent_kda(**x, **options | {"backend": backend}, **verify, **buffer, **packed(lengths))
        layout = {"intermediate_state_indices": rows, "state_v_first": v_first, "backend": backend}
        fd.commit(pool, records, slots, accepted.to(device, torch.int32), **layout)
        accepted[accepted > lengths] = 0
        begins = lengths.cumsum(0) - lengths
        part = torch.cat([torch.arange(int(n)) + begin for n, begin in zip(accepted, begins)]).to(device)
        taken = {name: y[:, part] for name, y in x.items()} | packed(accepted)
        fd.recurrent_kda(**taken, **options, initial_state=want, ssm_state_indices=slots)
        want = want.to(state).float()
    assert_close("pool", pool.float(), want, 1e-5 if state == FP32 else 2e-2)


def verification(
    N: int, tokens: int, K: int, gate: str, backend: str, device: str, dtype: torch.dtype
) -> tuple[dict, dict]:
    """A verification of `tokens` of each of `N` sequences into a replay buffer, and its commit."""
    kinds: dict[str, Any] = {"gate": gate, "lower_bound": -5.0, "beta": "value", "has_dt_bias": False}
    sizes = {"B": N, "T": tokens, "spec": tokens - 1, "H": 2, "HV": 2, "K": K, "V": K}
    slots = {"slots": N, "indices": tuple(range(N)), "update": False, "rows": "slots"}
    step = Step(f"{tokens} tokens", "", **sizes, **slots, **kinds)
    call = make_step(step, dtype, device) | {"intermediate_states": replay_buffer(step, device), "backend": backend}
    commit = {name: call[name] for name in ("initial_state", "ssm_state_indices", "state_v_first", "backend")}
    return call, commit | {"num_accepted_tokens": torch.full_like(call["ssm_state_indices"], tokens)}


def hold_each_token(call: dict, commit: dict, tolerance: float) -> None:
    """Outputs token by token, as the last ones are small, and states."""
    claims = claims_of("recurrent_kda", call)
    o, _ = verify_and_commit(call, [commit], torch.inf, torch.inf)
    for claim in (c for c in claims if c.target == "o"):
        for t, want in enumerate(claim.want):
            assert_close(f"o[{t}]", o[claim.index][t].cpu(), want, tolerance)


def check_floor(tokens: int, backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = FP32) -> None:
    """Tokens that write nothing, at the gate's floor of -5 each: outputs are the start's alone, down to `exp(-85)`, and
    of small queries."""
    call, commit = verification(1, tokens, K, "lower_bound", backend, device, dtype)
    call["q"] *= 1e-8
    call["g"], call["beta"] = torch.full_like(call["g"], 1e4, dtype=FP32), torch.zeros_like(call["beta"])
    call["initial_state"] *= 1e10
    hold_each_token(call, commit, 2e-5 + 2 * one_rounding(dtype))


def check_strong_decays(
    gate: str, tokens: int, backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = FP32
) -> None:
    """Decays without a bound, from `exp(-300)` to `exp(-1e-3)`, token by token and channel by channel. A token's decay leaves
    nothing of what was before it, and all of what comes after."""
    call, commit = verification(1, tokens, K, gate, backend, device, dtype)
    exponents, draw = torch.tensor([300.0, 1e-3, 20.0, 1e-3, 0.5, 90.0]), torch.Generator().manual_seed(tokens)
    by_token = exponents[torch.arange(tokens) % len(exponents)][:, None, None]
    by_channel = exponents[torch.randint(0, len(exponents), (tokens, 2, K), generator=draw)]
    # of one channel in two all tokens have one decay
    decays = torch.where(torch.arange(K) % 2 == 0, by_token, by_channel).double()
    g = {"none": -decays, "softplus": decays.expm1().log(), "logsigmoid": -decays.expm1().log()}[gate]
    g = torch.where(decays > 100, decays * (1 if gate == "softplus" else -1), g)
    call["g"] = g[None].float().to(device)
    if gate == "softplus":
        call["A_log"].zero_()
    hold_each_token(call, commit, 1e-5 + one_rounding(dtype))


def check_wild_counts(backend: str, device: str = "cpu", K: int = 64, dtype: torch.dtype = FP32) -> None:
    """Counts in a row that no verification writes: whatever it says, a commit takes no more tokens than the row has."""
    call, commit = verification(2, 4, K, "none", backend, device, dtype)
    records = torch.randn(call["intermediate_states"].shape, generator=torch.Generator().manual_seed(0)).to(device)
    for recorded, accepted in itertools.product((1e9, torch.inf, torch.nan, -1.0, 2.5), (5, 2**31 - 1, 4)):
        records[:, 0, :, counts_of(K, K)] = recorded
        given = commit | {name: x.clone() for name, x in commit.items() if isinstance(x, Tensor)}
        given["num_accepted_tokens"].copy_(torch.tensor([accepted, 0]))
        run_held(fd.commit, given | {"intermediate_states": records.clone()}, 0.0, committed)


def check_spoilt_token(
    name: str,
    token: int,
    gate: str,
    backend: str,
    device: str = "cpu",
    K: int = 32,
    dtype: torch.dtype = FP32,
    S: int = 4,
) -> None:
    """A token that is no number, as of a rejected draft, spoils no token before it: neither its output nor its commit. What it
    does spoil is no number either, as in the recurrence."""
    for bad in (torch.nan, torch.inf) if name != "g" else (torch.nan,):
        call, commit = verification(2, 1 + S, K, gate, backend, device, dtype)
        call[name].view(2, -1)[0, call[name].stride(1) * token + 1] = bad
        counts = [torch.full_like(commit["ssm_state_indices"], n) for n in sorted({1, max(1, token), token + 1, 1 + S})]
        commits = [commit | {"num_accepted_tokens": n} for n in counts]
        verify_and_commit(call, commits, 1e-5 + one_rounding(dtype))


RECORD_CHECKS: dict[str, Callable[..., None]] = {
    "wild counts": check_wild_counts,
    **{f"{n} tokens at the floor of the gate": functools.partial(check_floor, n) for n in (16, 17)},
    **{
        f"{n} tokens without a bound, {gate}": functools.partial(check_strong_decays, gate, n)
        for gate in ("none", "softplus", "logsigmoid")
        for n in (4, 7, 16, 17)
    },
    **{
        f"token {n} whose {name} is no number, {gate}": functools.partial(check_spoilt_token, name, n, gate)
        for name, n in (("q", 2), ("k", 1), ("v", 3), ("g", 2), ("beta", 1), ("initial_state", 0))
        for gate in ("lower_bound", "logsigmoid")
    },
    **{
        f"token 16 whose {name} is no number": functools.partial(check_spoilt_token, name, 16, gate, S=16)
        for name, gate in zip(("q", "k", "v", "g", "beta"), ("lower_bound", "logsigmoid") * 3)
    },
}
"""Per name: what holds of replay buffers with every backend."""
