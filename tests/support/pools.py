"""Calls over a state pool, and what they must do: one plain call for each piece of each sequence, states carried by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.runtime import torch_ops

from .cases import BF16, BOUNDED, FP32, Case
from .decoding import amid, memory_of, untouched
from .inputs import TOKEN_TENSORS, Source, make_call
from .oracle import as_recurrent, assert_close, covered_tokens, float64, poisoned_memory, same_bits

POOL = (*torch_ops.POOL, *torch_ops.CHECKPOINTS, *torch_ops.SPECULATIVE)


@dataclass(frozen=True)
class PoolCase:
    """A call over a pool of `slots` states that lie `gap` elements apart. `marks`: checkpoint offsets, a number or a row for
    each sequence; `mark_slots`: their slots. The pool has the dtype `case.state`."""

    name: str
    why: str
    case: Case
    indices: tuple[int, ...]
    null_index: str = "negative"
    flags: tuple[bool, ...] | None = None
    marks: tuple | None = None
    mark_slots: tuple | None = None
    slots: int = 6
    gap: int = 0
    index_dtype: torch.dtype = torch.int64


def _case(**changes) -> Case:
    kinds = {"name": "pool", "why": "", "H": 1, "HV": 2, "state": FP32, **BOUNDED} | changes
    return Case(**kinds)


PACKED = _case(lengths=(17, 0, 70, 33))
V_FIRST = _case(lengths=(17, 0, 70, 33), v_first=True, HV=1)
LONG = _case(lengths=(130, 16, 100), HV=1)
INT32 = torch.int32

PLAIN_POOLS = [
    PoolCase("one", "one sequence of fixed length", _case(T=70), (4,)),
    PoolCase("batch", "rows of a batch, slots in any order", _case(B=3, T=35), (5, 0, 2)),
    PoolCase("packed", "packed; the empty sequence's slot stays", PACKED, (3, 1, 0, 5)),
    PoolCase("v_first_int32", "as engines keep it", V_FIRST, (3, 1, 0, 5), gap=64, index_dtype=INT32),
    PoolCase("odd_gap", "slots that no vector load aligns to", PACKED, (3, 1, 0, 5), gap=9),
    PoolCase("bf16", "read, updated in fp32, rounded once", _case(lengths=(17, 0, 70), state=BF16), (3, 1, 0),
        gap=32),
    PoolCase("bf16_v_first", "the same, values first", _case(lengths=(17, 40), state=BF16, v_first=True), (1, 4)),
    PoolCase("negative", "SGLang's rule: slot 0 is a slot", PACKED, (-1, 2, 0, -7)),
    PoolCase("non_positive", "vLLM's rule: slot 0 is reserved", PACKED, (0, 2, 1, -1), null_index="non_positive"),
    PoolCase("past_the_end", "an index of no slot is null", PACKED, (6, 2, 2**40, 3), flags=(True,) * 4),
    PoolCase("all_null", "graph capture", PACKED, (-1,) * 4, index_dtype=INT32),
    PoolCase("flags", "fresh sequences in slots that hold an old state; one without tokens, whose slot must stay",
        PACKED, (3, 1, 0, 5), flags=(False, False, True, True)),
    PoolCase("flags_batch", "the same in a batch, with a null row", _case(B=3, T=20), (3, 2, -1), flags=(True, False,
        True)),
    PoolCase("gva", "grouped heads", _case(lengths=(20, 45), H=2, HV=4), (4, 1), gap=16),
    PoolCase("no_slots", "an empty pool: every index is null", PACKED, (0, 1, 2, 3), slots=0),
    PoolCase("one_slot", "slots never touch", _case(T=5), (0,), slots=1),
    PoolCase("no_tokens", "T = 0", _case(B=2, T=0), (0, 1)),
    PoolCase("no_sequences", "N = 0", _case(lengths=(), unused=5), ()),
    PoolCase("unbounded", "the other gate", _case(lengths=(66,), gate="none", lower_bound=None), (2,)),
]  # fmt: skip
CHECKPOINT_POOLS = [
    PoolCase("one_each", "[N]: none, inside a chunk, at a chunk's end", LONG, (0, 1, 2), marks=(16, 0, 64),
        mark_slots=(3, 4, 5)),
    PoolCase("several", "[N, M], with zeros anywhere, and all tokens", _case(lengths=(130, 0, 48), HV=1,
        v_first=True), (0, 1, 2), marks=((16, 0, 32, 80), (0, 0, 0, 0), (0, 32, 48, 0)), mark_slots=((3, 8, 4, 5), (9,
        9, 9, 9), (9, 6, 7, 9)), slots=10, gap=16, index_dtype=INT32),
    PoolCase("every_16", "as many as there may be", _case(T=130, HV=1), (0,), marks=((16, 32, 48, 64, 80, 96, 112,
        128),), mark_slots=(tuple(range(1, 9)),), slots=9),
    PoolCase("chunk_ends", "multiples of the chunk size change nothing", LONG, (0, -1, 2), marks=((64, 128), (0, 0),
        (64, 0)), mark_slots=((3, 4), (0, 0), (5, 0))),
    PoolCase("at_the_end", "the final state goes to both slots", _case(lengths=(64, 80, 96), HV=1), (0, -1, 2),
        marks=(64, 80, 96), mark_slots=(3, 4, 5), flags=(False, True, True)),
    PoolCase("cut_batch", "rows of a batch with cuts of their own", _case(B=3, T=70, HV=1), (0, -1, 2), marks=((48,
        64), (0, 0), (16, 0)), mark_slots=((3, 4), (0, 0), (5, 0))),
    PoolCase("chunk32", "the other chunk size", _case(lengths=(70, 50), HV=1, chunk_size=32), (0, 1), marks=(48, 32),
        mark_slots=(2, 3)),
    PoolCase("cut_bf16", "checkpoints are rounded, what goes on is not", _case(T=70, HV=1, state=BF16), (0,),
        marks=(48,), mark_slots=(1,)),
    PoolCase("null_slots", "checkpoints of no slot are not stored, but cut", LONG, (1, 2, 3),
        null_index="non_positive", marks=(16, 16, 48), mark_slots=(0, -3, 6)),
    PoolCase("bad_offsets", "past the end, falling, negative, wild, odd: nothing outside is touched",
        _case(lengths=(130, 0, 100, 40), HV=1), (0, 1, 2, 3), marks=((48, 32, 1000), (16, 0, -16), (2**40, 64,
        -(2**62)), (7, 7, 41)), mark_slots=((4, 5, 6), (6, 6, 6), (6, 6, 6), (7, 8, 6)), slots=9),
]  # fmt: skip


BY_NAME = {pool_case.name: pool_case for pool_case in PLAIN_POOLS + CHECKPOINT_POOLS}


def pool_id(pool_case: PoolCase) -> str:
    return pool_case.name


def pool_call(pool_case: PoolCase, dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 0) -> dict:
    """Arguments of `chunk_kda`. The pool lies amid other memory, and all of it holds random numbers."""
    case = pool_case.case
    call = make_call(case, dtype, device, seed)
    del call["initial_state"], call["output_final_state"]
    inner = (case.HV, case.V, case.K) if case.v_first else (case.HV, case.K, case.V)
    call["state_pool"] = amid(Source(FP32, device, seed + 1), case.state, (pool_case.slots, *inner), pool_case.gap)
    call["null_index"] = pool_case.null_index

    def index(values: tuple) -> Tensor:
        return torch.tensor(values, dtype=pool_case.index_dtype, device=device)

    call["state_indices"] = index(pool_case.indices)
    if pool_case.flags is not None:
        call["has_initial_state"] = torch.tensor(pool_case.flags, device=device)
    if pool_case.marks is not None:
        call["checkpoint_offsets"], call["checkpoint_indices"] = index(pool_case.marks), index(pool_case.mark_slots)
    return call


def as_recurrent_pool(call: dict) -> dict:
    return as_recurrent({name: x for name, x in call.items() if not name.startswith("checkpoint")})


def copied(pool: Tensor) -> Tensor:
    """A copy of the pool with its surroundings."""
    return memory_of(pool).clone().as_strided(pool.shape, pool.stride(), pool.storage_offset())


def call_for(op, pool_case: PoolCase, dtype: torch.dtype = FP32) -> dict:
    call = pool_call(pool_case, dtype)
    return call if op is fd.chunk_kda else as_recurrent_pool(call)


def without_pool(call: dict) -> dict:
    return {name: x for name, x in call.items() if name not in POOL}


def slot_named(call: dict, index: int) -> int | None:
    lowest = 1 if call["null_index"] == "non_positive" else 0
    return index if lowest <= index < call["state_pool"].shape[0] else None


def sequences(call: dict) -> list[tuple[int, int, int]]:
    """Batch row, first and past-the-last token of every sequence."""
    if "cu_seqlens" in call:
        return [(0, start, stop) for start, stop in itertools.pairwise(call["cu_seqlens"].tolist())]
    B, T = call["q"].shape[:2]
    return [(b, 0, T) for b in range(B)]


def initial_states(call: dict) -> Tensor:
    """`[N, ...]` in float32 (float64), gathered by hand."""
    pool = call["state_pool"]
    rows = []
    flags = call["has_initial_state"].tolist() if "has_initial_state" in call else itertools.repeat(True)
    for index, flag in zip(call["state_indices"].tolist(), flags):
        slot = slot_named(call, index)
        rows.append(pool[slot] if slot is not None and flag else pool.new_zeros(pool.shape[1:]))
    wide = torch.float64 if pool.dtype == torch.float64 else FP32
    return torch.stack(rows).to(wide) if rows else pool.new_zeros(0, *pool.shape[1:], dtype=wide)


def gathered_and_scattered(op, call: dict) -> tuple[Tensor, Tensor]:
    """`(o, pool)` of a call without checkpoints: states gathered, one plain call, states scattered."""
    o, final = op(**without_pool(call), initial_state=initial_states(call), output_final_state=True)
    pool = copied(call["state_pool"])
    for index, state, (_, start, stop) in zip(call["state_indices"].tolist(), final, sequences(call)):
        slot = slot_named(call, index)
        if slot is not None and stop > start:
            pool[slot] = state
    return o, pool


def cuts(offsets: Iterable[int], length: int) -> list[tuple[int, bool]]:
    """Where a sequence is cut at its checkpoints, in order, and whether the state there is asked for."""
    found, cut = [], 0
    for offset in offsets:
        cut = min(max(cut, offset), length)
        found.append((cut, 0 < offset == cut))
    return found


def marks_of(call: dict, n: int, length: int) -> list[tuple[int, int | None]]:
    """Where sequence `n` is cut, in order, and the slot that gets the state there (None: no slot)."""
    if "checkpoint_offsets" not in call:
        return []
    offsets, indices = (
        call[name].reshape(call["state_indices"].shape[0], -1)[n].tolist()
        for name in ("checkpoint_offsets", "checkpoint_indices")
    )
    marks = zip(cuts(offsets, length), indices)
    return [(cut, slot_named(call, index) if asked else None) for (cut, asked), index in marks]


def piece_by_piece(op, call: dict) -> tuple[Tensor, Tensor]:
    """`(o, pool)`: a plain call for each piece of each sequence, which carries the state from one to the next."""
    o, pool = torch.zeros_like(call["v"]), copied(call["state_pool"])
    initial = initial_states(call)
    plain = without_pool(call) | {"output_final_state": True}
    plain.pop("cu_seqlens", None)
    for n, (b, start, stop) in enumerate(sequences(call)):
        length, state, done = stop - start, initial[n : n + 1], 0
        if length == 0:
            continue
        own = slot_named(call, int(call["state_indices"][n]))
        for cut, slot in [*marks_of(call, n, length), (length, own)]:
            if cut > done:
                tokens = slice(start + done, start + cut)
                piece = {name: call[name][b : b + 1, tokens] for name in TOKEN_TENSORS}
                o[b, tokens], state = op(**plain | piece, initial_state=state)
                done = cut
            if slot is not None:
                pool[slot] = state[0]
    return o, pool


def untouched_memory(call: dict) -> Tensor:
    """Mask over the pool's memory: what the call must leave alone, slots and what lies around and between them."""
    stored = set()
    for n, (_, start, stop) in enumerate(sequences(call)):
        if stop > start:
            stored.add(slot_named(call, int(call["state_indices"][n])))
            stored |= {slot for _, slot in marks_of(call, n, stop - start)}
    return untouched(call["state_pool"], stored - {None})


def pool_truth(call: dict) -> tuple[Tensor, Tensor]:
    """`(o, pool)` by the float64 token recurrence."""
    exact = as_recurrent(float64(call)) | {"backend": "reference", "out": None}
    return piece_by_piece(fd.fused_recurrent_kda, exact)


def hold_pool(
    op, call: dict, tolerance: float, of_pool: float, ways: Iterable[Callable] = (), same: Callable = same_bits
) -> None:
    """A call over a pool: against float64, with nothing written beside its slots, and the `same` as plain calls that are put
    together in these `ways`; what a CPU stores in bfloat16 is cut off instead of rounded."""
    true_o, true_pool = pool_truth(call)
    wanted = [way(op, call) for way in ways]
    pool, tokens = call["state_pool"], covered_tokens(call)
    before, mask = memory_of(pool).clone(), untouched_memory(call)
    out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=pool.device)
    with poisoned_memory():
        o, final_state = op(**call, out=out)
    assert o is out and final_state is None
    assert same_bits(memory_of(pool)[mask], before[mask])
    for want_o, want_pool in wanted:
        assert same(out[:, tokens], want_o[:, tokens])
        assert (pool.dtype == BF16 and not pool.is_cuda) or same(memory_of(pool), memory_of(want_pool))
    assert_close("o", out[:, tokens], true_o[:, tokens], tolerance)
    assert_close("pool", pool, true_pool, of_pool)
