"""Device functions of the portable kernels, as Gluon kernels call them. Their contracts are where they are defined."""

from __future__ import annotations

from triton.experimental import gluon
from triton.runtime.jit import JITFunction

from ...triton import backward as _backward
from ...triton import decode as _decode
from ...triton import recurrence as _recurrence
from ...triton import segments as _segments
from ...triton.device import common as _common
from ...triton.device import states as _states


def _gluon(function: JITFunction) -> JITFunction:
    return gluon.jit(function.fn)


L2_EPS, LOG2E = _common.L2_EPS, _common.LOG2E

chunk_of_sequence = _gluon(_common.chunk_of_sequence)
chunk_slots = _gluon(_common.chunk_place)
clamp_bounds = _gluon(_common.clamp_bounds)
decay_rate = _gluon(_common.decay_rate)
exact_beta = _gluon(_common.write_strength)
exact_log2_decay = _gluon(_common.log2_decay)
first_slot = _gluon(_common.first_slot)
locate = _gluon(_common.locate)
locate_tile = _gluon(_common.locate_item)
span_count = _gluon(_common.piece_count)
span_extent = _gluon(_common.piece_extent)

everywhere = _gluon(_states.everywhere)
load_state = _gluon(_states.load_state)
sequence_slot = _gluon(_states.sequence_slot)
state_offsets = _gluon(_states.state_offsets)
store_state = _gluon(_states.store_state)

checkpoint_slot = _gluon(_recurrence.checkpoint_slot)

chunks_of = _gluon(_segments.chunks_of)
locate_segment = _gluon(_segments.place_segment)
planned_segments = _gluon(_segments.planned_parts)
segment_of = _gluon(_segments.segment_of)
segment_part_of_span = _gluon(_segments.part_of_piece)
states_fit = _gluon(_segments.states_fit)

beta_gradient = _gluon(_backward.strength_gradient)

DECODE_SCALARS = _decode.SCALARS
source_slot = _gluon(_decode.start_slot)
target_slot = _gluon(_decode.target_slot)
