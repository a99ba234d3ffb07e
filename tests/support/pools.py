"""Calls that keep states in tensors of the caller's: slots of a pool, buffers of checkpoints and of final states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ..fuzz.truth import Slots, checkpoints, sequences
from .cases import BF16, BOUNDED, FP32, Case
from .decoding import INT32, amid, memory_of
from .held import run_held
from .inputs import TOKEN_TENSORS, Source, make_call
from .oracle import as_recurrent, covered_tokens, one_rounding, same_bits, tolerance_of


@dataclass(frozen=True)
class PoolCase:
    """A call. With `indices`, states are in a pool of `slots`, of the dtype `case.state`. `marks`: offsets of checkpoints, a
    number or a row for each sequence, that go to `mark_rows`; else checkpoints lie `every` so many tokens. They are in a buffer
    of `rows` rows, of dtype `states`, or without `rows` in slots of the pool. States lie `gap` elements apart. With `final` the
    final state goes to a tensor of that dtype."""

    name: str
    why: str
    case: Case
    indices: tuple[int, ...] | None = None
    null_index: str = "negative"
    flags: tuple[bool, ...] | None = None
    slots: int = 6
    marks: tuple | None = None
    mark_rows: tuple | None = None
    every: int | None = None
    rows: int | None = None
    gap: int = 0
    states: torch.dtype = FP32
    final: torch.dtype | None = None
    split: int | bool | str = "auto"
    index_dtype: torch.dtype = torch.int64


def _case(**changes) -> Case:
    return Case(**{"name": "pool", "why": "", "H": 1, "HV": 2, "final": False, **BOUNDED} | changes)


def pooled(name: str, why: str, case: Case, indices: tuple[int, ...], **more: Any) -> PoolCase:
    return PoolCase(name, why, replace(case, state=case.state or FP32), indices, **more)


def buffered(name: str, why: str, case: Case, **more: Any) -> PoolCase:
    """With a buffer, unless it has a final state alone; sequences are whole."""
    rows = None if more.keys().isdisjoint(("marks", "every")) else 6
    return PoolCase(name, why, case, **{"rows": rows, "split": False, **more})


def at(marks: tuple, rows: tuple) -> dict[str, tuple]:
    """Checkpoints after these tokens, in these rows."""
    return {"marks": marks, "mark_rows": rows}


FOUR = _case(lengths=(17, 0, 70, 33))
LONG = _case(lengths=(130, 16, 100), HV=1, state=FP32)

PLAIN_POOLS = [
    pooled("one", "one sequence of fixed length", _case(T=70), (4,)),
    pooled("batch", "rows of a batch, slots in any order", _case(B=3, T=35), (5, 0, 2)),
    pooled("packed", "packed; the empty sequence's slot stays", FOUR, (3, 1, 0, 5)),
    pooled("v_first_int32", "as served", replace(FOUR, v_first=True, HV=1), (3, 1, 0, 5), gap=64, index_dtype=INT32),
    pooled("odd_gap", "slots that no vector load aligns to", FOUR, (3, 1, 0, 5), gap=9),
    pooled("bf16", "read, updated in fp32, rounded once", _case(lengths=(17, 0, 70), state=BF16), (3, 1, 0), gap=32),
    pooled("bf16_v_first", "the same, values first", _case(lengths=(17, 40), state=BF16, v_first=True), (1, 4)),
    pooled("negative", "SGLang's rule: slot 0 is a slot", FOUR, (-1, 2, 0, -7)),
    pooled("non_positive", "vLLM's rule: slot 0 is reserved", FOUR, (0, 2, 1, -1), null_index="non_positive"),
    pooled("past_the_end", "an index of no slot is null", FOUR, (6, 2, 2**40, 3), flags=(True,) * 4),
    pooled("all_null", "graph capture", FOUR, (-1,) * 4, index_dtype=INT32),
    pooled(
        "flags",
        "fresh sequences in slots that hold an old state; one without tokens, whose slot must stay",
        FOUR,
        (3, 1, 0, 5),
        flags=(False, False, True, True),
    ),
    pooled("flags_batch", "in a batch, with a null row", _case(B=3, T=20), (3, 2, -1), flags=(True, False, True)),
    pooled("gva", "grouped heads", _case(lengths=(20, 45), H=2, HV=4), (4, 1), gap=16),
    pooled("no_slots", "an empty pool: every index is null", FOUR, (0, 1, 2, 3), slots=0),
    pooled("one_slot", "slots never touch", _case(T=5), (0,), slots=1),
    pooled("no_tokens", "T = 0", _case(B=2, T=0), (0, 1)),
    pooled("no_sequences", "N = 0", _case(lengths=(), unused=5), ()),
    pooled("unbounded", "the other gate", _case(lengths=(66,), gate="none", lower_bound=None), (2,)),
]
IN_BATCH = at(((48, 64), (0, 0), (16, 0)), ((3, 4), (0, 0), (5, 0)))
NULL_ROWS = at((16, 16, 48), (0, -3, 6))
BAD_OFFSETS = at(
    ((48, 32, 1000), (16, 0, -16), (2**40, 64, -(2**62)), (7, 7, 41)), ((4, 5, 6), (6, 6, 6), (6, 6, 6), (7, 8, 6))
)
"""Past the end, falling, negative, wild, odd: nothing outside is touched."""

LAST = _case(lengths=(130, 0, 100, 40), HV=1)
ROWS = _case(B=3, T=70, HV=1)
CHECKPOINT_POOLS = [
    pooled("one_each", "[N]: none, inside a chunk, at a chunk's end", LONG, (0, 1, 2), **at((16, 0, 64), (3, 4, 5))),
    pooled(
        "several",
        "[N, M], with zeros anywhere, and all tokens",
        _case(lengths=(130, 0, 48), HV=1, v_first=True),
        (0, 1, 2),
        slots=10,
        gap=16,
        index_dtype=INT32,
        **at(((16, 0, 32, 80), (0, 0, 0, 0), (0, 32, 48, 0)), ((3, 8, 4, 5), (9, 9, 9, 9), (9, 6, 7, 9))),
    ),
    pooled(
        "every_16",
        "all there may be",
        _case(T=130, HV=1),
        (0,),
        slots=9,
        **at((tuple(range(16, 129, 16)),), (tuple(range(1, 9)),)),
    ),
    pooled("chunk_ends", "no change", LONG, (0, -1, 2), **at(((64, 128), (0, 0), (64, 0)), ((3, 4), (0, 0), (5, 0)))),
    pooled(
        "at_the_end",
        "the final state goes to both slots",
        _case(lengths=(64, 80, 96), HV=1),
        (0, -1, 2),
        flags=(False, True, True),
        **at((64, 80, 96), (3, 4, 5)),
    ),
    pooled("cut_batch", "rows of a batch with cuts of their own", ROWS, (0, -1, 2), **IN_BATCH),
    pooled("chunk32", "chunks of 32", _case(lengths=(70, 50), HV=1, chunk_size=32), (0, 1), **at((48, 32), (2, 3))),
    pooled("cut_bf16", "rounded, but not what goes on", _case(T=70, HV=1, state=BF16), (0,), **at((48,), (1,))),
    pooled("null_slots", "of no slot: cut, not stored", LONG, (1, 2, 3), null_index="non_positive", **NULL_ROWS),
    pooled("bad_offsets", "nothing outside is touched", LAST, (0, 1, 2, 3), slots=9, **BAD_OFFSETS),
]
PACKED = _case(lengths=(17, 0, 130, 64), HV=1, unused=9)

BUFFERS = [
    buffered("every_64", "before every chunk: what h has", _case(T=150, h=True, state=FP32), every=64, rows=3),
    buffered("every_64_chunk32", "before every other chunk", _case(T=150, HV=1, chunk_size=32, h=True), every=64),
    buffered(
        "every_128_batch",
        "rows of a batch, V first, rows amid other memory",
        _case(B=2, T=260, HV=1, v_first=True, state=FP32),
        every=128,
        gap=24,
        final=FP32,
    ),
    buffered("every_packed", "packed, with an empty sequence", PACKED, every=64, gap=8, final=FP32),
    buffered("every_bf16", "rounded once each", replace(PACKED, v_first=True), every=64, states=BF16, final=BF16),
    buffered("every_longer", "longer than any sequence: the initial states", PACKED, every=2**30, rows=3),
    buffered("every_too_few", "rows past the end are not stored", PACKED, every=64, rows=2),
    buffered("every_no_rows", "none at all", PACKED, every=64, rows=0),
    buffered("every_pool", "beside a pool", replace(PACKED, state=FP32), every=64, indices=(2, 3, -1, 0)),
    buffered("every_h", "with h, packed", replace(PACKED, h=True, state=BF16), every=128, final=FP32),
    buffered("every_gva", "grouped heads", _case(lengths=(70, 20), H=2, HV=4), every=64),
    buffered("every_unbounded", "the other gate", _case(T=70, gate="softplus", lower_bound=None), every=64),
    buffered("at_offsets", "one per sequence, inside chunks and at their ends", LONG, **at((16, 0, 64), (3, 4, 0))),
    buffered(
        "many_offsets",
        "more than a pool takes, in any order, V first",
        _case(lengths=(200, 0, 48), HV=1, v_first=True, h=True),
        marks=(
            (16, 32, 48, 64, 80, 96, 112, 128, 144, 200),
            (0, 16, 0, 0, 0, 0, 0, 0, 0, 0),
            (0, 0, 0, 0, 0, 32, 48, 0, 0, 0),
        ),
        mark_rows=((9, 8, 7, 6, 5, 4, 3, 2, -1, 1), (10,) * 10, (14, 14, 14, 14, 14, 11, 0, 14, 14, 14)),
        rows=14,
        gap=16,
        index_dtype=INT32,
    ),
    buffered("offsets_batch", "with h", replace(ROWS, h=True, state=FP32), states=BF16, final=FP32, **IN_BATCH),
    buffered(
        "offsets_pool",
        "beside a pool whose slot 0 is reserved; row 0 is none",
        replace(LONG, v_first=True),
        indices=(1, 0, 3),
        null_index="non_positive",
        **NULL_ROWS,
    ),
    buffered("bad_offsets", "nothing outside is touched", LAST, rows=9, final=BF16, **BAD_OFFSETS),
    buffered("only_final", "a final state and no checkpoints", replace(PACKED, state=BF16), final=FP32),
    buffered("only_final_bf16", "without an initial state", _case(B=2, T=20, v_first=True), final=BF16),
    buffered("no_tokens", "T = 0", _case(B=2, T=0, state=FP32), every=64, final=FP32),
    buffered("no_sequences", "N = 0", _case(lengths=(), unused=5), every=64, final=FP32),
]
INSIDE = at(((16, 64, 128), (16, 0, 0), (0, 48, 96)), ((0, 1, 2), (3, 3, 3), (4, 4, 5)))
SPLITS = [
    buffered("split_every", "by the segments that have the chunks", LONG, every=64, split=2, final=FP32),
    buffered("split_batch", "rows", _case(B=2, T=200, HV=1, h=True), every=128, split=3, states=BF16, final=BF16),
    buffered("split_offsets", "inside segments and between", replace(LONG, h=True), split=2, final=FP32, **INSIDE),
]


BY_NAME, BUFFERS_BY_NAME = ({x.name: x for x in xs} for xs in (PLAIN_POOLS + CHECKPOINT_POOLS, BUFFERS + SPLITS))
WRITTEN = ("checkpoint_states", "final_state", "state_pool")


def pool_id(pool_case: PoolCase) -> str:
    return pool_case.name


def pool_call(x: PoolCase, dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 0) -> dict:
    """Arguments of `chunk_kda`. States lie amid other memory, and all of it holds random numbers."""
    call, source, inner = make_call(x.case, dtype, device, seed), Source(FP32, device, seed + 1), x.case.state_shape

    def index(values: tuple) -> Tensor:
        return torch.tensor(values, dtype=x.index_dtype, device=device)

    if x.indices is not None:
        del call["initial_state"], call["output_final_state"]
        call |= {"state_indices": index(x.indices), "null_index": x.null_index}
        call["state_pool"] = amid(source, x.case.state, (x.slots, *inner), x.gap)
    if x.flags is not None:
        call["has_initial_state"] = torch.tensor(x.flags, device=device)
    if x.rows is not None:
        call["checkpoint_states"] = amid(source, x.states, (x.rows, *inner), x.gap)
    if x.marks is not None:
        call |= {"checkpoint_offsets": index(x.marks), "checkpoint_indices": index(x.mark_rows)}
    if x.every is not None:
        call["checkpoint_every"] = x.every
    if x.final is not None:
        call["final_state"] = amid(source, x.final, (x.case.sequences, *inner))
    return call | {"split": x.split}


def copied(pool: Tensor) -> Tensor:
    """A copy of the pool with its surroundings."""
    return memory_of(pool).clone().as_strided(pool.shape, pool.stride(), pool.storage_offset())


def with_memory_of_its_own(call: dict) -> dict:
    """The call with copies of what it writes."""
    return call | {name: copied(call[name]) for name in WRITTEN if name in call}


def call_for(op, pool_case: PoolCase, dtype: torch.dtype = FP32) -> dict:
    call = pool_call(pool_case, dtype)
    return call if op is fd.chunk_kda else as_recurrent(call)


def plain_call(call: dict) -> dict:
    """The call without tensors for states; it returns them."""
    left_out = ("state_pool", "state_indices", "has_initial_state", "null_index", "final_state")
    kept = {name: x for name, x in call.items() if name not in left_out and not name.startswith("checkpoint")}
    return kept | {"output_final_state": True}


def initial_states(call: dict) -> Tensor:
    """`[N, ...]` in float32 (float64), gathered by hand."""
    pool, given, K, V = (
        Slots(call, "state_pool", null=True),
        call.get("initial_state"),
        call["q"].shape[3],
        call["v"].shape[3],
    )
    N, inner = len(sequences(call)), (V, K) if call.get("state_v_first") else (K, V)
    wide = torch.float64 if call["q"].dtype == torch.float64 else FP32
    if given is not None:
        return given.to(wide)
    found, flags = call["v"].new_zeros(N, call["v"].shape[2], *inner, dtype=wide), call.get("has_initial_state")
    for n, index in enumerate(call["state_indices"].tolist() if pool.pool is not None else ()):
        if pool.has(index) and (flags is None or flags[n]):
            found[n] = pool.pool[index]
    return found


def gathered_and_scattered(op, call: dict) -> dict[str, Tensor]:
    """Results of a call without checkpoints: states gathered, one plain call, states scattered."""
    o, final = op(**plain_call(call) | {"initial_state": initial_states(call)})
    slots, pool = Slots(call, "state_pool", null=True), copied(call["state_pool"])
    for s, index in zip(sequences(call), call["state_indices"].tolist()):
        if slots.has(index) and s.length > 0:
            pool[index] = final[s.number]
    return {"o": o, "state_pool": pool}


def by_pieces(op, call: dict) -> dict[str, Tensor]:
    """Results of a plain call for each piece of each sequence; they carry the state from one to the next."""
    left, state_of = with_memory_of_its_own(call) | {"o": torch.zeros_like(call["v"])}, initial_states(call)
    pool, buffer = Slots(call, "state_pool", null=True), Slots(call, "checkpoint_states")
    kept, every, rows = pool if buffer.pool is None else buffer, call.get("checkpoint_every"), itertools.count()
    plain = plain_call(call)  # with states before chunks as the call, since the bits of many heads depend on it
    plain.pop("cu_seqlens", None)
    for s in sequences(call):
        state, done = state_of[s.number : s.number + 1], 0
        regular = ((next(rows), cut, True) for cut in range(0, s.length, every or 1))
        marks = checkpoints(call, s) if every is None else regular
        own = -1 if pool.pool is None else int(call["state_indices"][s.number])
        for index, cut, asked, slots in [*((*mark, kept) for mark in marks), (own, s.length, True, pool)]:
            if cut > done:
                tokens = slice(s.begin + done, s.begin + cut)
                piece = {name: call[name][s.row : s.row + 1, tokens] for name in TOKEN_TENSORS}
                left["o"][s.row, tokens], state, *_ = op(**plain | piece | {"initial_state": state})
                done = cut
            if asked and slots.has(index) and s.length > 0:
                left[slots.target][index] = state[0]
        if "final_state" in left:
            left["final_state"][s.number] = state[0]
    return {name: left[name] for name in ("o", *WRITTEN) if name in left}


def hold_pool(op, call: dict, ways: Iterable[Callable] = (), same: Callable = same_bits, more: float = 0.0) -> None:
    """Holds the call to the truth, states with a rounding `more`, and to be the `same` as plain calls that are put together in
    these `ways`. What a CPU stores in bfloat16 is cut off instead of rounded."""
    wanted, tolerance, tokens = [way(op, call) for way in ways], tolerance_of(call), covered_tokens(call)
    out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=call["v"].device)
    roundings = 1 if out.is_cuda else 2
    run_held(op, call | {"out": out}, tolerance, lambda dtype: tolerance + roundings * one_rounding(dtype) + more)
    for want in wanted:
        assert same(out[:, tokens], want.pop("o")[:, tokens])
        for name, x in want.items():
            assert (call[name].dtype == BF16 and not out.is_cuda) or same(call[name], x), name
