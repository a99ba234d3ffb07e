"""Device functions of the portable kernels, as Gluon kernels call them. Their contracts are where they are defined."""

from __future__ import annotations

from triton.experimental import gluon
from triton.runtime.jit import JITFunction

from .. import gates as _gates
from .. import mma as _mma
from .. import norms as _norms
from .. import records as _records
from .. import segments as _segments
from .. import sequences as _sequences
from .. import states as _states


def _gluon(function: JITFunction) -> JITFunction:
    return gluon.jit(function.fn)


L2_EPS, LOG2E = _norms.L2_EPS, _gates.LOG2E

at_token = _gluon(_sequences.at_token)
chunk_of_sequence = _gluon(_sequences.chunk_of_sequence)
chunk_slots = _gluon(_sequences.sequence_chunk_slots)
crossing_packet = _gluon(_sequences.crossing_packet)
clamp_bounds = _gluon(_sequences.clamp_bounds)
end_of_few = _gluon(_sequences.end_of_few)
decay_rate = _gluon(_gates.decay_rate)
exact_beta = _gluon(_gates.beta_of)
exact_log2_decay = _gluon(_gates.log2_decay)
first_slot = _gluon(_sequences.first_chunk_slot)
locate = _gluon(_sequences.own_work_tile)
placed = _gluon(_states.placed)
head_bias = _gluon(_gates.head_bias)
sigmoid = _gluon(_gates.sigmoid)
locate_tile = _gluon(_sequences.locate_work_tile)
own_chunk = _gluon(_sequences.own_chunk)
span_count = _gluon(_sequences.span_count)
span_extent = _gluon(_sequences.span_extent)

checkpoint_slot = _gluon(_states.checkpoint_slot)
checkpoint_target = _gluon(_states.checkpoint_target)
everywhere = _gluon(_states.everywhere)
load_state = _gluon(_states.load_state)
sequence_slot = _gluon(_states.sequence_slot)
state_offsets = _gluon(_states.state_offsets)
store_state = _gluon(_states.store_state)

chunks_of = _gluon(_segments.chunks_of)
outgoing_sequence = _gluon(_segments.outgoing_sequence)
locate_segment = _gluon(_segments.place_segment)
planned_segments = _gluon(_segments.planned_parts)
segment_of = _gluon(_segments.segment_of)
segment_part_of_span = _gluon(_segments.part_of_span)
states_fit = _gluon(_segments.states_fit)

beta_gradient = _gluon(_gates.beta_gradient)

source_slot = _gluon(_states.start_slot)
target_slot = _gluon(_states.target_slot)
open_record = _gluon(_records.open_record)

RECORD_COUNTS = _records.COUNTS
record_counts = _gluon(_records.record_counts)
record_values = _gluon(_records.record_values)
record_width = _records.record_width
slot_and_row = _gluon(_states.slot_and_row)
store_decay_and_key = _gluon(_records.store_decay_and_key)

AHEAD = _gates.AHEAD
stacked = _gluon(_mma.stacked)
two_parts = _gluon(_mma.two_parts)
