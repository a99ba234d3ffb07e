"""What every backend's `recurrent_kda` is held to."""

from __future__ import annotations

from dataclasses import replace

import torch

import flashdelta as fd
from flashdelta.testing.decoding import WRITTEN, Step, amid, expected, make_step, memory_of, untouched
from flashdelta.testing.inputs import Source
from flashdelta.testing.oracle import TOLERANCE, assert_close, one_rounding, poisoned_memory, same_bits

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


def hold_output(step: Step, o: torch.Tensor, want: torch.Tensor) -> None:
    """Rows of some sequence; zeros must be zeros."""
    covered = len(want) - step.unused
    got, want = o.flatten(0, 1)[:covered].cpu(), want[:covered]
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


def accepted_steps(call: dict, accepted: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The accepted tokens of a read-only verification as steps one by one: each step's outputs, and the pool they leave."""
    plain = {name: x for name, x in call.items() if not name.startswith("intermediate")}
    plain |= {"num_spec_tokens": None, "update_state": True, "initial_state": call["initial_state"].clone()}
    outputs = []
    for i in range(call["q"].shape[1]):
        one = plain | {name: call[name][:, i : i + 1] for name in ("q", "k", "v", "g", "beta")}
        one["ssm_state_indices"] = torch.where(accepted > i, call["ssm_state_indices"], -1)
        outputs.append(fd.recurrent_kda(**one)[0])
    return outputs, plain["initial_state"]
