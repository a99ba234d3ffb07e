"""Calls that leave checkpoints and final states in buffers of the caller's, and what they must do: one plain call for each
piece of each sequence, states carried by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import flashdelta as fd

from .cases import BF16, BOUNDED, FP32, Case
from .decoding import amid, memory_of, untouched
from .inputs import TOKEN_TENSORS, Source, make_call
from .oracle import as_recurrent, assert_close, covered_tokens, float64, poisoned_memory, same_bits
from .pools import copied, cuts, initial_states, sequences, slot_named, without_pool

INT32 = torch.int32


@dataclass(frozen=True)
class BufferCase:
    """A call with `rows` rows for checkpoints, of dtype `states`, that lie `gap` elements apart. `marks`: offsets, a number or
    a row for each sequence, and `mark_rows` their rows; else checkpoints lie `every` so many tokens. With `final` the final
    state goes to a tensor of that dtype; with `indices`, to slots of a pool of 6."""

    name: str
    why: str
    case: Case
    marks: tuple | None = None
    mark_rows: tuple | None = None
    every: int | None = None
    rows: int = 6
    gap: int = 0
    states: torch.dtype = FP32
    final: torch.dtype | None = None
    indices: tuple[int, ...] | None = None
    null_index: str = "negative"
    split: int | bool = False
    index_dtype: torch.dtype = torch.int64


def _case(**changes) -> Case:
    return Case(**{"name": "buffer", "why": "", "H": 1, "HV": 2, "final": False, **BOUNDED} | changes)


LONG = _case(lengths=(130, 16, 100), HV=1, state=FP32)
PACKED = _case(lengths=(17, 0, 130, 64), HV=1, unused=9)

CASES = [
    BufferCase("every_64", "before every chunk: what h has", _case(T=150, h=True, state=FP32), every=64, rows=3),
    BufferCase("every_64_chunk32", "before every other chunk", _case(T=150, HV=1, chunk_size=32, h=True), every=64),
    BufferCase("every_128_batch", "rows of a batch, V first, rows amid other memory", _case(B=2, T=260, HV=1,
        v_first=True, state=FP32), every=128, gap=24, final=FP32),
    BufferCase("every_packed", "packed, with an empty sequence", PACKED, every=64, gap=8, final=FP32),
    BufferCase("every_bf16", "rounded once each", replace(PACKED, v_first=True), every=64, states=BF16, final=BF16),
    BufferCase("every_longer", "longer than any sequence: the initial states", PACKED, every=2**30, rows=3),
    BufferCase("every_too_few", "rows past the end are not stored", PACKED, every=64, rows=2),
    BufferCase("every_no_rows", "none at all", PACKED, every=64, rows=0),
    BufferCase("every_pool", "beside a pool", replace(PACKED, state=FP32), every=64, indices=(2, 3, -1, 0)),
    BufferCase("every_h", "with h, packed", replace(PACKED, h=True, state=BF16), every=128, final=FP32),
    BufferCase("every_gva", "grouped heads", _case(lengths=(70, 20), H=2, HV=4), every=64),
    BufferCase("every_unbounded", "the other gate", _case(T=70, gate="softplus", lower_bound=None), every=64),
    BufferCase("at_offsets", "one a sequence, inside chunks and at their ends", LONG, marks=(16, 0, 64), mark_rows=(3,
        4, 0)),
    BufferCase("many_offsets", "more than a pool takes, in any order, V first", _case(lengths=(200, 0, 48), HV=1,
        v_first=True, h=True), marks=((16, 32, 48, 64, 80, 96, 112, 128, 144, 200), (0, 16, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0, 32, 48, 0, 0, 0)), mark_rows=((9, 8, 7, 6, 5, 4, 3, 2, -1, 1), (10, 10, 10, 10, 10, 10, 10,
        10, 10, 10), (14, 14, 14, 14, 14, 11, 0, 14, 14, 14)), rows=14, gap=16, index_dtype=INT32),
    BufferCase("offsets_batch", "rows of a batch, with h", _case(B=3, T=70, HV=1, h=True, state=FP32), marks=((48,
        64), (0, 0), (16, 0)), mark_rows=((3, 4), (0, 0), (5, 0)), states=BF16, final=FP32),
    BufferCase("offsets_pool", "beside a pool whose slot 0 is reserved; row 0 is none", replace(LONG, v_first=True),
        marks=(16, 16, 48), mark_rows=(0, -3, 6), indices=(1, 0, 3), null_index="non_positive"),
    BufferCase("bad_offsets", "past the end, falling, negative, wild, odd: nothing outside is touched",
        _case(lengths=(130, 0, 100, 40), HV=1), marks=((48, 32, 1000), (16, 0, -16), (2**40, 64, -(2**62)), (7, 7,
        41)), mark_rows=((4, 5, 6), (6, 6, 6), (6, 6, 6), (7, 8, 6)), rows=9, final=BF16),
    BufferCase("only_final", "a final state and no checkpoints", replace(PACKED, state=BF16), final=FP32),
    BufferCase("only_final_bf16", "without an initial state", _case(B=2, T=20, v_first=True), final=BF16),
    BufferCase("no_tokens", "T = 0", _case(B=2, T=0, state=FP32), every=64, final=FP32),
    BufferCase("no_sequences", "N = 0", _case(lengths=(), unused=5), every=64, final=FP32),
]  # fmt: skip
SPLITS = [
    BufferCase("split_every", "by the segments that have the chunks", LONG, every=64, split=2, final=FP32),
    BufferCase("split_batch", "rows of a batch", _case(B=2, T=200, HV=1, h=True), every=128, split=3, states=BF16,
        final=BF16),
    BufferCase("split_offsets", "inside segments and between them", replace(LONG, h=True), marks=((16, 64, 128), (16,
        0, 0), (0, 48, 96)), mark_rows=((0, 1, 2), (3, 3, 3), (4, 4, 5)), split=2, final=FP32),
]  # fmt: skip
BY_NAME = {buffer_case.name: buffer_case for buffer_case in CASES + SPLITS}


def buffer_id(buffer_case: BufferCase) -> str:
    return buffer_case.name


def buffer_call(buffer_case: BufferCase, dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 0) -> dict:
    """Arguments of `chunk_kda`. Checkpoints lie amid other memory, and all of it holds random numbers."""
    case = buffer_case.case
    call, source = make_call(case, dtype, device, seed), Source(FP32, device, seed + 1)
    inner = case.state_shape

    def index(values: tuple) -> Tensor:
        return torch.tensor(values, dtype=buffer_case.index_dtype, device=device)

    if buffer_case.marks is not None or buffer_case.every is not None:
        call["checkpoint_states"] = amid(source, buffer_case.states, (buffer_case.rows, *inner), buffer_case.gap)
    if buffer_case.marks is not None:
        call |= {"checkpoint_offsets": index(buffer_case.marks), "checkpoint_indices": index(buffer_case.mark_rows)}
    if buffer_case.every is not None:
        call["checkpoint_every"] = buffer_case.every
    if buffer_case.indices is not None:
        del call["initial_state"]
        call["state_pool"] = amid(source, FP32, (6, *inner))
        call |= {"state_indices": index(buffer_case.indices), "null_index": buffer_case.null_index}
    if buffer_case.final is not None:
        call["final_state"] = amid(source, buffer_case.final, (case.sequences, *inner))
    return call | {"split": buffer_case.split}


class Left(NamedTuple):
    """What a call leaves. `stored`: rows of `buffer` that it writes. What it does not have is None."""

    o: Tensor
    final: Tensor
    h: Tensor | None
    buffer: Tensor | None
    stored: set[int]
    pool: Tensor | None


def checkpoints_of(call: dict, n: int, first_row: int, length: int) -> list[tuple[int, int | None]]:
    """Where sequence `n` is cut, in order, and the row that gets the state there."""
    buffer = call.get("checkpoint_states")
    if buffer is None:
        return []
    every = call.get("checkpoint_every")
    if every is not None:
        return [(cut, row) for row, cut in enumerate(range(0, length, every), first_row)]
    names = ("checkpoint_offsets", "checkpoint_indices")
    offsets, rows = (call[name].reshape(len(call[name]), -1)[n].tolist() for name in names)
    return [(cut, row if asked else None) for (cut, asked), row in zip(cuts(offsets, length), rows)]


def starts(call: dict) -> Tensor:
    """Initial states `[N, ...]`, in float32 (float64)."""
    if "state_pool" in call:
        return initial_states(call)
    wide = torch.float64 if call["q"].dtype == torch.float64 else FP32
    N, K, V = len(sequences(call)), call["q"].shape[3], call["v"].shape[3]
    inner = (V, K) if call.get("state_v_first") else (K, V)
    given = call.get("initial_state")
    return call["v"].new_zeros(N, call["v"].shape[2], *inner, dtype=wide) if given is None else given.to(wide)


def by_pieces(op: Callable, call: dict) -> Left:
    """By a plain call for each piece of each sequence, which carries the state from one to the next."""
    state_of, o = starts(call), torch.zeros_like(call["v"])
    C, cut_at_marks = call.get("chunk_size", 64), "checkpoint_offsets" in call
    final, buffer = state_of.clone(), None
    pool = copied(call["state_pool"]) if "state_pool" in call else None
    if "checkpoint_states" in call:
        buffer = copied(call["checkpoint_states"])
    plain = without_pool(call) | {"output_final_state": True, "split": False}
    for name in ("cu_seqlens", "final_state", "checkpoint_every", "initial_state", "out"):
        plain.pop(name, None)
    asked = op is fd.chunk_kda and call.get("return_intermediate_states", False)
    if op is not fd.chunk_kda:
        plain.pop("split")
    rows_of_h: list[list[Tensor]] = []
    stored, first_row = set(), 0
    for n, (b, start, stop) in enumerate(sequences(call)):
        length, state, done = stop - start, state_of[n : n + 1], 0
        marks = checkpoints_of(call, n, first_row, length)
        first_row += len(marks)
        rows_of_h.append([])
        for cut, row in [*marks, (length, None)]:
            if cut > done:
                tokens = slice(start + done, start + cut)
                piece = {name: call[name][b : b + 1, tokens] for name in TOKEN_TENSORS}
                found = op(**plain | piece, initial_state=state)
                o[b, tokens], state = found[0], found[1]
                rows_of_h[-1] += [*found[2][0]] if asked else []
                done = cut
            if row is not None and 0 <= row < buffer.shape[0] and length > 0:
                buffer[row] = state[0]
                stored.add(row)
        final[n] = state[0]
        if pool is not None and length > 0:
            slot = slot_named(call, int(call["state_indices"][n]))
            if slot is not None:
                pool[slot] = state[0]
    h = None
    if asked:
        B, T = call["q"].shape[:2]
        M = call["checkpoint_offsets"].reshape(len(final), -1).shape[1] if cut_at_marks else 0
        NT = T // C + len(final) * (1 + M) if "cu_seqlens" in call else -(-T // C) + M
        h = o.new_zeros(B, NT, *final.shape[1:])
        groups = [[x for rows in rows_of_h for x in rows]] if "cu_seqlens" in call else rows_of_h
        for b, rows in enumerate(groups):
            for i, x in enumerate(rows):
                h[b, i] = x
    return Left(o, final, h, buffer, stored, pool)


def buffer_truth(call: dict) -> Left:
    """By the float64 token recurrence. (It has no `h`.)"""
    exact = as_recurrent(float64(call)) | {"backend": "reference"}
    return by_pieces(fd.fused_recurrent_kda, exact)


def untouched_rows(call: dict, left: Left) -> Tensor:
    """Mask over the buffer's memory: what the call must leave alone."""
    return untouched(call["checkpoint_states"], left.stored)


def with_memory_of_its_own(call: dict) -> dict:
    """The call with copies of what it writes."""
    return call | {name: copied(call[name]) for name in WRITTEN if name in call}


WRITTEN = ("checkpoint_states", "final_state", "state_pool")


def hold_buffers(
    call: dict, tolerance: float, of_states: Callable, pieces: Left | None = None, want: Left | None = None
) -> tuple:
    """The results of `chunk_kda`: against float64, `of_states` by dtype, with nothing written beside the rows, and to the bit
    against plain calls for `pieces`; what a CPU stores in bfloat16 is cut off instead of rounded."""
    want, tokens = want or buffer_truth(call), covered_tokens(call)
    buffer = call.get("checkpoint_states")
    before = None if buffer is None else memory_of(buffer).clone()
    out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=call["v"].device)
    with poisoned_memory():
        results = fd.chunk_kda(**call, out=out)
    assert results[0] is out and results[1] is call.get("final_state")
    assert_close("o", out[:, tokens], want.o[:, tokens], tolerance)
    for name, part in zip(WRITTEN, ("buffer", "final", "pool")):
        if name in call:
            assert_close(name, call[name], getattr(want, part), of_states(call[name].dtype))
            if pieces is not None and (call[name].dtype != BF16 or out.is_cuda):
                assert same_bits(call[name], getattr(pieces, part).to(call[name].dtype)), name
    if before is not None:
        mask = untouched_rows(call, want)
        assert same_bits(memory_of(buffer)[mask], before[mask])
    if pieces is not None:
        assert same_bits(out[:, tokens], pieces.o[:, tokens])
        assert pieces.h is None or same_bits(results[2], pieces.h)
    return results
