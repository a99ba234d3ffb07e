"""Calls of `recurrent_kda`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdelta.problem.problem import PLAIN_GATES

from .cases import BF16, FP32, Case
from .inputs import Source, gate_parameters, packed_offsets, token_tensors

INT32, INT64 = torch.int32, torch.int64
MARGIN = 64
"""Elements before and after everything that is written."""


@dataclass(frozen=True, kw_only=True)
class Step(Case):
    """One call. `offsets_dtype` is that of all indices, which lie `every` numbers apart.

    `indices`: slots, one per sequence, or with speculative tokens a row (None: slot `n` of `B`). `source`: slots of another
    pool. `rows`: rows of `intermediate_states` ("slots": as `indices`), which has `buffer` of them (None: 3, or as many as
    slots). Slots lie `gap` elements further apart than they must.
    """

    B: int = 3
    T: int = 1
    H: int = 1
    gate: str = "lower_bound"
    lower_bound: float | None = -5.0
    beta: str = "logit"
    state: torch.dtype | None = FP32
    v_first: bool = True
    final: bool = False
    offsets_dtype: torch.dtype = INT32
    slots: int = 8
    gap: int = 0
    indices: tuple | None = (5, 2, 0)
    null_index: str = "negative"
    spec: int | None = None
    accepted: tuple[int, ...] | None = None
    source: tuple[int, ...] | None = None
    update: bool = True
    rows: tuple[int, ...] | str | None = None
    buffer: int | None = None
    every: int = 1

    @property
    def N(self) -> int:
        """As the operator's documentation calls the rows of a call that is not packed."""
        return self.B

    @property
    def buffer_rows(self) -> int:
        return self.buffer or (self.slots if self.rows == "slots" else 3)

    @property
    def most_tokens(self) -> int:
        """Tokens of a sequence at most, else nothing is stored of it."""
        return 1 + self.spec if self.spec else 17


def rows_of(N: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Slots for each token of `N` sequences, one after another."""
    return tuple(tuple(range(n * tokens, (n + 1) * tokens)) for n in range(N))


ONE_DRAFT, TWO_DRAFTS, THREE_DRAFTS, SIXTEEN_DRAFTS = ({"T": 1 + S, "spec": S} for S in (1, 2, 3, 16))
SPEC = TWO_DRAFTS | {"indices": rows_of(3, 3), "slots": 9}
PADDED_DRAFTS = {"lengths": (3, 1, 0, 2, 0), "spec": 2, "indices": (*rows_of(4, 3), (-1,) * 3), "slots": 12}
PADDED_DRAFTS |= {"accepted": (2, 3, 1, 1, 1)}
BAD_COUNTS = ONE_DRAFT | {"B": 6, "indices": rows_of(6, 2), "accepted": (0, 3, -(2**31), 2**31 - 1, 2, 1), "slots": 12}
PACKED_VERIFY = {"lengths": (3, 0, 2), "spec": 2, "update": False, "indices": (3, 2, 1)}

STEPS = [
    Step("paged", "one token each, slots in any order"),
    Step("k_first", "the other layout", v_first=False),
    Step("bf16", "read, updated in fp32, rounded once", state=BF16),
    Step("bf16_k_first", "the same, keys first", state=BF16, v_first=False, gap=32),
    Step("pitch", "slots further apart than their content", gap=64),
    Step("odd_pitch", "slots that no vector load aligns to", gap=9, v_first=False),
    Step("negative", "SGLang's rule: slot 0 is a slot, -1 padding", indices=(-1, 0, -1)),
    Step("non_positive", "vLLM's rule: slot 0 is reserved", indices=(0, 3, 0), null_index="non_positive"),
    Step("past_the_end", "an index of no slot is null", indices=(8, 2**40, 1), offsets_dtype=INT64),
    Step("all_null", "a padded batch", indices=(-1, -1, -1)),
    Step("no_slots", "an empty pool", slots=0, indices=(0, 1, -1)),
    Step("no_sequences", "B = 0", B=0, indices=()),
    Step("own_slots", "without indices sequence n has slot n", indices=None, slots=3),
    Step("own_final", "the pool is returned", indices=None, slots=3, final=True, state=BF16),
    Step("no_state", "states start at zero and are returned", state=None, indices=None, T=3, final=True),
    Step("dropped", "nothing kept at all", state=None, indices=None),
    Step("T17", "as many tokens as there may be", B=2, T=17, indices=(1, 0)),
    Step("packed", "lengths 0 and 1", lengths=(1, 0, 1, 1), indices=(3, 1, 0, 5), offsets_dtype=INT64),
    Step("packed_17", "lengths 0 to 17", lengths=(3, 0, 17, 1), indices=(3, 1, 0, 5), v_first=False),
    Step("packed_18", "nothing is stored of a sequence too long", lengths=(3, 18, 17, 1), indices=(3, 1, 0, 5)),
    Step(
        "padded",
        "a batch padded for a graph: null slots, repeated last offset, tokens of no sequence",
        lengths=(1, 1, 0, 0),
        unused=2,
        indices=(2, 4, 0, 0),
        null_index="non_positive",
    ),
    Step("packed_own", "an empty sequence leaves its row alone", lengths=(2, 0, 1), indices=None, slots=3),
    Step("gva3", "a ratio that is no power of two", H=2, HV=6),
    Step("gva8", "eight value heads read one key head", H=1, HV=8, B=2, indices=(1, 0)),
    Step("none", "g is the log decay, beta a value", gate="none", beta="value"),
    Step("softplus", "Kimi-Linear's gate, 2 sigmoid", gate="softplus", beta="double_logit"),
    *(Step(gate, "a gate without parameters", gate=gate, wide_gate=True) for gate in PLAIN_GATES),
    Step("no_norm", "keys the caller normalised", l2norm=False, scale=0.3),
    Step("mixed", "q, k, v in one row", layout="mixed", H=2, HV=4),
    Step("mixed_rows", "rows of a wider projection", layout="mixed_rows", state=BF16),
    Step("mixed_packed", "the same when packed", layout="mixed_rows", lengths=(2, 0, 3), v_first=False),
    Step("mixed_spec", "1 + S rows per sequence", **TWO_DRAFTS, layout="mixed", B=2, indices=((1, 2, 3), (4, 5, 6))),
    Step("fused", "all inputs are slices of one projection", layout="fused", B=2, T=2, indices=(1, 0)),
    Step("odd", "inputs off every boundary", layout="odd_offset", B=2, indices=(1, 0)),
    Step("transposed", "q, k, v, g not dense in their last dimension", layout="last_dim_strided", H=2),
    Step("K64", "K < V, 64", K=64, V=128, B=2, indices=(1, 0)),
    Step("V64", "K > V", K=128, V=64, B=2, indices=(1, 0), state=BF16, v_first=False),
    Step("K256", "the widest", K=256, V=256, B=1, HV=1, indices=(1,)),
    Step("K1", "the narrowest", K=1, V=2, HV=3),
    Step("K16", "narrow", K=16, V=4, v_first=False, state=BF16),
    Step("spec", "a state for each token; start after 1, 2, 3 accepted", **SPEC, accepted=(1, 2, 3)),
    Step(
        "spec_bf16",
        "rounded on the way out, not from token to token",
        **THREE_DRAFTS,
        B=2,
        indices=((0, 1, 2, 3), (7, 6, 5, 4)),
        accepted=(4, 1),
        state=BF16,
        v_first=False,
        gap=8,
    ),
    Step(
        "spec_16",
        "as many drafts as there may be",
        **SIXTEEN_DRAFTS,
        B=2,
        indices=(tuple(range(17)), tuple(range(33, 16, -1))),
        accepted=(16, 17),
        slots=34,
    ),
    Step(
        "spec_16_packed",
        "the same, and fewer, in one row of q, k, v",
        lengths=(17, 2, 0),
        spec=16,
        layout="mixed_rows",
        indices=(tuple(range(17)), tuple(range(17, 34)), (-1,) * 17),
        slots=34,
        state=BF16,
    ),
    Step("spec_first", "without counts the start is the first slot", **ONE_DRAFT, B=2, indices=((0, 1), (3, 2))),
    Step("spec_packed", "fewer drafts for some, none for one, padding", **PADDED_DRAFTS),
    Step("spec_bad_counts", "counts of 0, 1 + S + 1 and wild ones make null sequences", **BAD_COUNTS),
    Step(
        "spec_null",
        "null slots inside rows: a start, a target",
        **TWO_DRAFTS,
        indices=((1, 0, 2), (3, 0, 0), (4, 5, -1)),
        accepted=(2, 1, 2),
        null_index="non_positive",
    ),
    Step("source", "from a committed pool to another", source=(1, 2, 4), indices=(0, 5, 3), slots=6),
    Step("source_null", "null in either pool", B=4, source=(1, -1, 4, 0), indices=(-1, 5, 3, 9), slots=6),
    Step("source_own", "to rows of its own", source=(1, 2, 4), indices=None, slots=3, null_index="non_positive"),
    Step(
        "source_spec",
        "drafts from the committed state",
        **TWO_DRAFTS,
        B=2,
        source=(6, 2),
        indices=((0, 1, 2), (5, 4, -1)),
        state=BF16,
    ),
    Step("read_only", "outputs and nothing else", B=2, T=2, update=False, indices=(3, 1)),
    Step("read_source", "the same from a source", update=False, source=(3, -1, 1), indices=None, state=BF16),
    Step("verify", "in the sequence's own row", **TWO_DRAFTS, update=False, indices=(3, -1, 1), rows="slots", gap=32),
    Step("verify_long", "too long for its row", **PACKED_VERIFY | {"lengths": (3, 4, 2)}, rows=(2, 0, 1)),
    Step("verify_rows", "in rows of a smaller buffer", **PACKED_VERIFY, rows=(1, 0, -1), state=BF16, v_first=False),
    Step(
        "verify_row_0",
        "a scratch buffer has no reserved row, even where slot 0 is",
        **PACKED_VERIFY,
        rows=(0, 1, -1),
        null_index="non_positive",
    ),
    Step("verify_16", "sixteen", **SIXTEEN_DRAFTS, B=2, update=False, indices=(3, 1), rows="slots", state=BF16),
    Step("verify_source", "from a source", **ONE_DRAFT, B=2, update=False, source=(3, 1), indices=None, rows=(2, 0)),
    Step("verify_own", "row n", **ONE_DRAFT, B=2, update=False, indices=None, slots=2, rows="slots"),
    Step("verify_short", "slots past a buffer's end have no row", **PACKED_VERIFY, rows="slots", buffer=3),
    Step("verify_strided", "strided indices", **ONE_DRAFT, update=False, indices=(4, 1, 6), rows=(2, 0, 1), every=3),
]
SINGLE_BF16 = [
    replace(step, name=f"{step.name}_K{K}_V{V}_bf16", state=BF16, K=K, V=V)
    for step in STEPS
    if step.T == 1 and step.lengths is None and step.v_first and step.state == FP32 and step.name[0] != "K"
    for K, V in [(128, 64), (64, 128)]
]
"""Layouts that Hopper's kernel takes, or has to leave to the portable one because of how it lies in memory."""

BY_NAME = {step.name: step for step in STEPS}
assert len(BY_NAME) == len(STEPS), "names must differ"

# ---- arguments ------------------------------------------------------------------------------------------------------


def make_step(step: Step, dtype: torch.dtype = FP32, device: str | torch.device = "cpu", seed: int = 0) -> dict:
    """Arguments of `recurrent_kda`. What is written lies amid other memory, and all of it holds random numbers."""
    source = Source(dtype, device, zlib.crc32(step.name.encode()) + seed)
    tensors = token_tensors(source, step, dtype) | gate_parameters(source, step)
    return tensors | packed_offsets(step, device) | _states(step, source) | _options(step)


def _states(step: Step, source: Source) -> dict:
    def index(values: tuple) -> Tensor:
        dense = torch.tensor(values, dtype=step.offsets_dtype, device=source.device)
        amid_others = dense.new_full((*dense.shape, step.every), 3)
        amid_others[..., 0] = dense
        return amid_others[..., 0]

    given = {}
    if step.state is not None and (step.source is None or step.update):
        given["initial_state"] = amid(source, step.state, (step.slots, *step.state_shape), step.gap)
    if step.indices is not None:
        given["ssm_state_indices"] = index(step.indices)
    if step.source is not None:
        given["initial_state_source"] = amid(source, step.state, (7, *step.state_shape), step.gap)
        given["initial_state_indices"] = index(step.source)
    if step.accepted is not None:
        given["num_accepted_tokens"] = index(step.accepted)
    if step.rows is not None:
        shape = step.buffer_rows, 1 + (step.spec or 0), *step.state_shape
        given["intermediate_states"] = amid(source, step.state, shape, step.gap)
        if step.rows != "slots":
            given["intermediate_state_indices"] = index(step.rows)
    return given


def _options(step: Step) -> dict:
    asked = {"use_qk_l2norm_in_kernel": step.l2norm, "gate": step.gate, "scale": step.scale}
    asked |= {"beta_is_logit": step.beta != "value", "allow_neg_eigval": step.beta == "double_logit"}
    asked |= {"lower_bound": step.lower_bound if step.gate == "lower_bound" else None, "state_v_first": step.v_first}
    asked |= {"null_index": step.null_index, "num_spec_tokens": step.spec, "update_state": step.update}
    return asked | {"output_final_state": step.final}


def amid(source: Source, dtype: torch.dtype, shape: tuple[int, ...], gap: int = 0) -> Tensor:
    """Random states whose first dimension has a pitch of its content plus `gap`, with a margin before and after."""
    content = torch.Size(shape[1:]).numel()
    memory = source.normal(shape[0] * (content + gap) + 2 * MARGIN).to(dtype)
    inner = torch.empty(shape[1:], device="meta").stride()
    return memory.as_strided(shape, (content + gap, *inner), MARGIN)


def memory_of(x: Tensor) -> Tensor:
    """All elements of its memory."""
    return x.new_empty(0).set_(x.untyped_storage())
