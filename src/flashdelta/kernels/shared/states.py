"""Locates states: a sequence's initial and final state are row `n` of dense tensors, or one slot of a pool.

The state of value head `h` in row or slot `s` starts at element `s * pitch + h * K * V`. With a pool both tensors are the
pool and `state_indices` names the slots; an index below `lowest`, or not below `slots`, names none. Whether there is a state
is a run-time value: one compiled kernel, with one order of operations, serves calls with and without it, so that no state
gives the bits that zeros give.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def state_offsets(start, value, key, K, V, V_FIRST):
    """Element offsets of the value channels `value` and key channels `key` of a state that starts at element `start`."""
    inner = value[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + value[:, None]
    return start + inner


@triton.jit
def everywhere(offsets, flag):
    """A run-time flag as a mask over all `offsets`."""
    return (offsets * 0 + flag) != 0


@triton.jit
def load_state(states, state_at, present):
    """The state in fp32, or zeros if it is not `present`."""
    return tl.load(states + state_at, mask=everywhere(state_at, present), other=0.0).to(tl.float32)


@triton.jit
def store_state(states, state_at, state, wanted):
    tl.store(states + state_at, state.to(states.dtype.element_ty), mask=everywhere(state_at, wanted))


@triton.jit
def named_slot(indices, i, lowest, slots):
    """The pool slot that index `i` names, and whether it names one."""
    slot = tl.load(indices + i).to(tl.int64)
    return slot, (slot >= lowest) & (slot < slots)


@triton.jit
def checkpoint_slot(offsets, indices, n, span, spans, end, lowest, pool_slots):
    """The slot for the state at the end of a checkpoint span, and whether to store it: only if the offset is the end."""
    i = n * (spans - 1) + tl.minimum(span, spans - 2)
    offset = tl.load(offsets + i)
    slot, named = named_slot(indices, i, lowest, pool_slots)
    stored = named & (span < spans - 1) & (offset > 0) & (offset == end)
    return slot, stored.to(tl.int32)


@triton.jit
def checkpoint_target(final_state, state_pitch, lowest, slots, checkpoint_states, checkpoint_pitch, checkpoint_rows):
    """Returns the tensor that takes checkpoints, its pitch, the least index and how many there are: slots of the pool, or rows
    of a buffer, none of which is reserved."""
    if checkpoint_states is None:
        states = final_state
        pitch = state_pitch
        least = lowest
        count = slots
    else:
        states = checkpoint_states
        pitch = checkpoint_pitch.to(tl.int64)
        least = 0
        count = checkpoint_rows
    return states, pitch, least, count


@triton.jit
def sequence_slot(state_indices, has_initial_state, n, tokens, lowest, slots, has_initial, has_final):
    """The row or pool slot of sequence `n`, whether to read the initial state, and whether to store the final one. A sequence
    without tokens leaves its slot alone."""
    if state_indices is None:
        slot = n
        read = has_initial
        stored = has_final
    else:
        slot, named = named_slot(state_indices, n, lowest, slots)
        stored = (named & (tokens > 0)).to(tl.int32)
        read = stored
        if has_initial_state is not None:
            read *= tl.load(has_initial_state + n).to(tl.int32)
    return slot, read, stored


@triton.jit
def last_accepted(accepted, n, most_tokens):
    """Returns the token of the previous step after which sequence `n` goes on, and whether there is one. With `accepted` counts
    it is the last accepted one, and a count outside `[1, most_tokens]` gives none."""
    token = n * 0
    known = n == n
    if accepted is not None:
        count = tl.load(accepted + n)
        known = (count >= 1) & (count <= most_tokens)
        token = tl.where(known, count - 1, 0)
    return token, known


@triton.jit
def start_slot(
    starts, targets, accepted, has_initial_state, n, there, has_initial, start_row, start_token, target_row,
    most_tokens, lowest, start_slots, target_slots, TWO_POOLS,
):  # fmt: skip
    """The slot that sequence `n` starts from, whether the sequence stores anything, and 1 if the slot is read."""
    slot = n
    live = there
    read = has_initial
    if starts is not None:
        row = n * start_row
        token, known = last_accepted(accepted, n, most_tokens)
        slot, named = named_slot(starts, row + token * start_token, lowest, start_slots)
        live &= known & named
        if TWO_POOLS and targets is not None:
            _, named = named_slot(targets, n * target_row, lowest, target_slots)
            live &= named
        read = live.to(tl.int32)
        if has_initial_state is not None:
            read *= tl.load(has_initial_state + n).to(tl.int32)
    return slot, live, read


@triton.jit
def target_slot(targets, i, own, lowest, slots):
    """The slot that a state goes to, and whether there is one: what index `i` of `targets` names; without `targets`, `own`."""
    if targets is None:
        slot = own
        named = own < slots
    else:
        slot, named = named_slot(targets, i, lowest, slots)
    return slot, named


@triton.jit
def slot_and_row(slot_indices, row_indices, n, lowest, slots, rows):
    """The slot of sequence `n` in the pool, its row of the buffer, and whether there are both."""
    slot, named = named_slot(slot_indices, n, lowest, slots)
    row = slot
    exists = slot < rows
    if row_indices is not None:
        row, exists = named_slot(row_indices, n, 0, rows)  # a scratch buffer has no reserved row
    return slot, row, named & exists


@triton.jit
def placed(channel, stride, DENSE):
    """Returns the offsets of channels, without a multiplication where they are `DENSE`."""
    return channel if DENSE else channel * stride
