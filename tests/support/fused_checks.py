"""What every backend's `fused_kda_decode` is held to."""

from __future__ import annotations

from dataclasses import replace

import torch

import flashdelta as fd

from .decoding import memory_of, untouched
from .decoding_checks import compared_rows
from .fused import EPS, FUSED_BY_NAME, FusedExpected, FusedStep, expected_fused, make_fused
from .oracle import TOLERANCE, assert_close, one_rounding, poisoned_memory, same_bits

_PLAIN = (
    "one",
    "bias",
    "two_taps",
    "three_taps",
    "parts",
    "softplus",
    "none",
    "no_norm",
    "null",
    "reserved",
    "no_slots",
    "page",
    "scattered",
    "zero_rows",
)
HOPPER_FUSED = [
    replace(FUSED_BY_NAME[name], name=f"{name} K{K} {state} {group}", H=2, HV=2 * group, K=K, V=K, state=state)
    for name, K, state, group in (
        *((name, 64, torch.float32, 1) for name in (*_PLAIN, "no_sequences")),
        *((name, 128, torch.bfloat16, 1) for name in ("model", "two_taps", "null", "softplus", "page", "scattered")),
        ("one", 64, torch.bfloat16, 1),
        ("model", 128, torch.float32, 1),
        ("odd_pitch", 64, torch.float32, 1),
        ("gva3", 64, torch.float32, 3),
        ("null", 64, torch.bfloat16, 2),
        ("scattered", 64, torch.float32, 2),
        ("gva8", 128, torch.bfloat16, 8),
        ("no_slots", 64, torch.float32, 2),
    )
]
"""Steps that Hopper's own kernel takes, or leaves to the portable one because states lie on no 16 bytes."""

WRITTEN = ("state", "conv_state", "intermediate_states")


def heads_of(step: FusedStep) -> tuple[int, ...]:
    return (step.batch, step.tokens, step.HV, step.V)


def check_fused(step: FusedStep, dtype: torch.dtype, backend: str, device: str = "cpu", seed: int = 0) -> dict:
    """Runs one step into an `output` full of NaN; holds outputs, pools and everything around them. Returns the call."""
    if dtype == torch.float64 and step.state == torch.float32:
        step = replace(step, state=dtype)
    call = make_fused(step, dtype, device, seed)
    want = expected_fused(step, call)
    before = {name: memory_of(x).clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    output = torch.full(heads_of(step), torch.nan, dtype=dtype, device=device)
    with poisoned_memory():
        assert fd.fused_kda_decode(**call, output=output, backend=backend) is output
    hold_fused(step, call, output, want)
    for name, x in before.items():
        stored = stored_in(step, call, want, name)
        mask = (
            untouched(call[name], stored)
            if step.order != "page" or name not in WRITTEN
            else around(step, call[name], want)
        )
        assert same_bits(memory_of(call[name])[mask], x[mask]), f"{name}: written where nothing is to be stored"
    return call


def stored_in(step: FusedStep, call: dict, want: FusedExpected, name: str) -> list:
    if name == "conv_state":
        return [(slot, slice(None), slice(places)) for slot, places in want.moved.items()]
    if name == "state":
        return [*want.stored]
    if name != "intermediate_states":
        return []
    counts = slice(2 * step.K + step.V, 2 * step.K + step.V + 4)
    live = {n for n, index in enumerate(step.indices) if index in {*range(step.slots)} and counted(step, n)}
    given = call.get("intermediate_state_indices", call["state_indices"]).tolist()
    return [*want.each, *((given[n], 0, slice(None), counts) for n in live if 0 <= given[n] < len(call[name]))]


def counted(step: FusedStep, n: int) -> bool:
    return step.accepted is None or 1 <= step.accepted[n] <= 1 + (step.spec or 0)


def around(step: FusedStep, x: torch.Tensor, want: FusedExpected) -> torch.Tensor:
    """Mask over the memory of pages that `x` lies in: what belongs to slots that are not written."""
    memory = memory_of(x)
    mask = torch.ones(len(memory), dtype=torch.bool)
    for slot in want.stored:
        mask[slot * len(memory) // step.slots : (slot + 1) * len(memory) // step.slots] = False
    return mask


def hold_fused(step: FusedStep, call: dict, output: torch.Tensor, want: FusedExpected) -> None:
    covered = compared_rows(step, 1 + (step.spec or 0))
    got, exact = output.flatten(0, 1).cpu()[covered], want.o[covered]
    assert_close("o", got, exact, TOLERANCE[output.dtype])
    assert got[exact == 0].eq(0).all()
    wide = call["state"].dtype == torch.float64
    tolerance = 1e-11 if wide else 1e-5 + one_rounding(call["state"].dtype)
    for slot in sorted(want.stored):
        assert_close(f"state[{slot}]", call["state"][slot].cpu(), want.states[slot], tolerance)
    for slot, places in want.moved.items():
        found, exact = call["conv_state"][slot, :, :places], want.windows[slot, :, :places]
        assert same_bits(found.cpu().contiguous(), exact.to(found.dtype).contiguous()), f"conv_state[{slot}]"
    if step.rows is not None:
        hold_committed(step, call, want, tolerance)


def hold_committed(step: FusedStep, call: dict, want: FusedExpected, tolerance: float) -> None:
    """The states that `commit` makes of the records of all tokens."""
    lengths = step.lengths or (step.T,) * step.B
    rows = call.get("intermediate_state_indices", call["state_indices"]).tolist()
    pool, device = call["state"].clone(), call["state"].device
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    names = ("intermediate_state_indices", "state_v_first", "null_index")
    options = {name: call[name] for name in names if name in call} | {"backend": "reference"}
    fd.commit(pool, call["intermediate_states"].clone(), call["state_indices"], counts, **options)
    for n, (row, length) in enumerate(zip(rows, lengths)):
        if (row, length - 1) in want.each and counted(step, n):
            assert_close("committed", pool[step.indices[n]].cpu(), want.each[row, length - 1], tolerance)


def chain(call: dict, backend: str) -> torch.Tensor:
    """A call of one token a sequence as single operators: what it returns. Both pools are written."""
    rows, HV, K = call["x"].shape[0], call["state"].shape[1], call["state"].shape[3]
    pool = {"state_pool": call["conv_state"], "state_indices": call["state_indices"], "backend": backend}
    mixed, _ = fd.short_convolution(call["x"][:, None], call["weight"], call["bias"], **pool)
    names = ("A_log", "dt_bias", "lower_bound", "gate", "use_qk_l2norm_in_kernel", "beta_is_logit", "allow_neg_eigval")
    o, _ = fd.recurrent_kda(
        mixed_qkv=mixed[:, 0],
        g=call["raw_g"].reshape(rows, HV * K),
        beta=call["raw_beta"].reshape(rows, HV),
        initial_state=call["state"],
        ssm_state_indices=call["state_indices"],
        scale=call["scale"],
        **{name: call[name] for name in names},
        backend=backend,
    )
    z = call["output_gate"].reshape(o.shape)
    return fd.gated_rms_norm(o, z, call["norm_weight"], eps=EPS, backend=backend)


ROWS = ("x", "raw_g", "raw_beta", "output_gate")


def check_rounds_of_fused(rounds: int, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Verification and random acceptance, over and over, with a state after each token and by replay: outputs are those of the
    accepted tokens as single steps."""
    draw = torch.Generator().manual_seed(0)
    S, N, heads = 3, 4, {"H": 1, "HV": 2, "W": 4, "state": torch.float64 if dtype == torch.float64 else torch.float32}
    drafts = tuple(tuple(range(4 * n, 4 * n + 4)) for n in range(N))
    spec = {"T": 1 + S, "spec": S, "B": N, "accepted": (1,) * N}
    each = make_fused(FusedStep("each", "", indices=drafts, slots=16, **spec, **heads), dtype, device)
    one = make_fused(FusedStep("single", "", indices=(*range(N),), slots=N, B=N, **heads), dtype, device)
    own = FusedStep("replayed", "", indices=(*range(N),), slots=N, rows="slots", **spec, **heads)
    replayed = make_fused(own, dtype, device)
    for call in (each, replayed):
        call |= {name: one[name] for name in ("weight", "A_log", "dt_bias", "norm_weight")}
        slots = call["state_indices"].reshape(N, -1)[:, 0].long()
        call["state"][slots] = one["state"]
        call["conv_state"][slots, :, : own.W - 1] = one["conv_state"]
    for _ in range(rounds):
        for name in ROWS:
            each[name].copy_(torch.randn(each[name].shape, generator=draw))
            replayed[name].copy_(each[name])
        found = [fd.fused_kda_decode(**call, backend=backend) for call in (each, replayed)]
        accepted = torch.randint(1, 2 + S, (N,), generator=draw)
        for i in range(1 + S):
            live = accepted > i
            index = torch.where(live, torch.arange(N), -1).to(device, torch.int32)
            now = {name: each[name][i :: 1 + S] for name in ROWS} | {"state_indices": index}
            want = fd.fused_kda_decode(**one | now, backend=backend)
            for o in found:
                assert_close("o", o[live, i], want[live, 0].double(), TOLERANCE[dtype])
        counts = accepted.to(device, torch.int32)
        fd.commit(replayed["state"], replayed["intermediate_states"], index_of(N, device), counts, backend=backend)
        for call in (each, replayed):
            call["num_accepted_tokens"].copy_(counts)


def index_of(N: int, device: str) -> torch.Tensor:
    return torch.arange(N, dtype=torch.int32, device=device)
