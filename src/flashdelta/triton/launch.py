"""From a validated call to kernel launches: allocates one workspace, picks the launch parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..problem.decode_spec import CommitSpec, CommitTensors
from ..problem.prefill import RESULTS, PrefillSpec
from ..problem.problem import Problem, Results, Tensors
from ..problem.split import segments_of_call
from ..program.cache import Recorder
from ..program.launch import Launch, dense, launch_all, multiprocessors, or_empty, state_arguments, strides
from ..program.launch import capability as capability_of
from ..program.launch import forward as run_forward
from . import config
from .commit import commit_kernel
from .decode import decode_kernel
from .output import output_kernel
from .prepare import prepare_kernel
from .prepare_bounded import prepare_bounded_kernel
from .recurrence import recurrence_kernel
from .segments import compose_kernel, plan_kernel, transitions_kernel


@dataclass(frozen=True)
class SegmentStates:
    """What the stages of a split leave for each other (`segments.py`), with up to `G` segments: their `maps [G, HV, K, K]`,
    `offsets` and `starts [G, HV, V, K]` in fp32, and `first_segment [N + 1]` int32. Without a split all None."""

    maps: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    first_segment: torch.Tensor | None = None

    @staticmethod
    def layout(problem: Problem, segments: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes, in order; none without segments."""
        if segments == 0:
            return []
        states = [
            ((segments, problem.HV, rows, problem.K), torch.float32) for rows in (problem.K, problem.V, problem.V)
        ]
        return [*states, ((problem.N + 1,), torch.int32)]


@dataclass(frozen=True)
class Workspace:
    """What `prepare` leaves for `recurrence`, chunk by chunk: `w, qg, kg [S, HV, C, K]`, `inverse, Aqk [S, HV, C, C]` in the
    operand dtype and `decay [S, HV, K]` fp32, for `S = B * slots` chunk slots; what a split keeps, if there is one. One
    allocation: `buffer`. `inverse` is None where `prepare` applies it to the values itself."""

    w: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    inverse: torch.Tensor | None
    Aqk: torch.Tensor
    decay: torch.Tensor
    segments: SegmentStates
    buffer: torch.Tensor

    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return (self.w, self.qg, self.kg, self.inverse, self.Aqk, self.decay)

    @staticmethod
    def layout(problem: Problem, segments: int = 0) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of all but the buffer, in order."""
        S, HV, C, K = problem.B * problem.slots, problem.HV, problem.chunk_size, problem.K
        operands = [((S, HV, C, K), problem.dtype)] * 3 + [((S, HV, C, C), problem.dtype)] * 2
        return [*operands, ((S, HV, K), torch.float32), *SegmentStates.layout(problem, segments)]

    @classmethod
    def sizes(cls, problem: Problem, segments: int = 0) -> list[int]:
        """Bytes of the parts."""
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in cls.layout(problem, segments)]

    @classmethod
    def nbytes(cls, problem: Problem, segments: int = 0) -> int:
        return sum(cls.sizes(problem, segments))

    @classmethod
    def allocate(
        cls, problem: Problem, device: torch.device, segments: int = 0, w: torch.Tensor | None = None
    ) -> Workspace:
        """With `w`, which then is no part of the buffer, `prepare` leaves it there."""
        own = 0 if w is None else 1
        buffer = torch.empty(sum(cls.sizes(problem, segments)[own:]), dtype=torch.uint8, device=device)
        return cls.over(problem, buffer, segments, w)

    @classmethod
    def over(
        cls, problem: Problem, buffer: torch.Tensor, segments: int = 0, w: torch.Tensor | None = None
    ) -> Workspace:
        own = 0 if w is None else 1
        layout, sizes = cls.layout(problem, segments)[own:], cls.sizes(problem, segments)[own:]
        parts = [x.view(dtype).view(shape) for x, (shape, dtype) in zip(buffer.split(sizes), layout)]
        parts = [w][:own] + parts
        return cls(*parts[:6], SegmentStates(*parts[6:]), buffer)

    @classmethod
    def with_states(cls, problem: Problem, device: torch.device, w: torch.Tensor) -> tuple[Workspace, torch.Tensor]:
        """Without `w` and `inverse`, and with the state before each chunk, `[S, HV, V, K]` fp32."""
        _, *tiles, _, Aqk, decay = cls.layout(problem)
        layout = [*tiles, Aqk, decay, ((problem.B * problem.slots, problem.HV, problem.V, problem.K), torch.float32)]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        qg, kg, Aqk, decay, h = (x.view(dtype).view(s) for x, (s, dtype) in zip(buffer.split(sizes), layout))
        return cls(w, qg, kg, None, Aqk, decay, SegmentStates(), buffer), h


def forward(problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
    """`(o, final_state or None, h or None)`; see `ops.chunk_kda`."""
    return run_forward(problem, t, out, launches)


def readable(problem: Problem, t: Tensors) -> Tensors:
    """The kernels read any strides but the last dimension's, which must be 1, dense parameters, states and indices, and a
    pool in place; `decode` reads indices of any strides too."""
    return Tensors(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g)),
        t.beta,
        *dense(t.A_log, t.dt_bias, t.initial_state, t.cu_seqlens),
        t.state_pool,
        dense(t.state_indices)[0] if problem.algorithm == "chunk" else t.state_indices,
        *dense(t.has_initial_state, t.checkpoint_offsets, t.checkpoint_indices),
        *(
            *dense(t.num_accepted_tokens),
            t.source_pool,
            t.source_indices,
            t.intermediate_states,
            t.intermediate_indices,
        ),
    )


def launches(problem: Problem, t: Tensors, capability: int, results: Results) -> list[Launch]:
    """The launches that run the call, in order."""
    t = readable(problem, t)
    if problem.algorithm != "chunk":
        return [decode(problem, t, capability, results)]
    room = config.room(problem, capability, multiprocessors(t.q.device))
    segments = segments_of_call(problem, room, config.SPLIT_COSTS)
    workspace = Workspace.allocate(problem, t.q.device, segments)
    split = []
    if segments:
        split = [
            plan(problem, t, workspace, room),
            maps(problem, t, capability, workspace, results, segments),
            compose(problem, t, capability, workspace.segments, results, workspace.buffer),
        ]
    return [
        prepare(problem, t, capability, workspace),
        *split,
        recurrence(problem, t, capability, workspace, results, segments),
    ]


def prepare(
    problem: Problem,
    t: Tensors,
    capability: int,
    workspace: Workspace,
    solved: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
) -> Launch:
    """With `u`, that is left instead of `inverse`, which then is no part of the workspace."""
    c = config.prepare_config(problem, capability)
    inputs = (t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, t.checkpoint_offsets)
    scalars = (
        problem.scale,
        problem.lower_bound or 0.0,
        problem.T,
        problem.N,
        problem.H,
        problem.HV,
        problem.slots,
        problem.checkpoints,
    )
    constants = dict(
        C=problem.chunk_size,
        K=problem.K,
        BK=c.BK,
        GATE=problem.gate,
        BETA=problem.beta_kind,
        L2NORM=problem.l2norm,
        PRECISION=config.dot_precision(problem.dtype),
        STAGES=c.stages,
    )
    kernel = prepare_bounded_kernel
    arguments = (*inputs, *workspace.parts(), solved, *scalars, *strides(t.q, t.k, t.g, t.beta))
    if not config.bounded(problem):
        kernel, constants = prepare_kernel, constants | {"V": problem.V}
        values = (None if u is None else t.v, u)
        arguments = (*inputs, *workspace.parts(), solved, *values, *scalars, *strides(t.q, t.k, t.g, t.beta, t.v))
    programs = problem.B * problem.slots * problem.HV if problem.N > 0 else 0
    return Launch(kernel, programs, arguments, constants, c.num_warps, scratch=(workspace.buffer,))


def plan(problem: Problem, t: Tensors, workspace: Workspace, room: int) -> Launch:
    costs = config.SPLIT_COSTS
    return Launch(
        plan_kernel,
        1,
        (
            *(t.cu_seqlens, t.checkpoint_offsets, workspace.segments.first_segment),
            *(problem.T, problem.N, problem.checkpoints, room, problem.split, int(problem.batch_invariant)),
            *(costs.step, costs.map, costs.compose, costs.fixed, costs.shortest, costs.margin),
        ),
        dict(C=problem.chunk_size, BLOCK=128),
        num_warps=4,
        scratch=(workspace.buffer,),
    )


def walk_constants(problem: Problem, c: config.RecurrenceConfig, BV: int) -> dict[str, object]:
    """Of the kernels that walk a sequence's chunks, with slices of `BV` columns."""
    return dict(
        C=problem.chunk_size,
        K=problem.K,
        V=problem.V,
        BV=BV,
        V_FIRST=problem.state_v_first,
        PRECISION=config.dot_precision(problem.dtype),
        STAGES=c.stages,
    )


def maps(
    problem: Problem, t: Tensors, capability: int, workspace: Workspace, results: Results, segments: int
) -> Launch:
    c = config.recurrence_config(problem, capability)
    BV, found = config.maps_width(problem, capability), workspace.segments
    return Launch(
        transitions_kernel,
        segments * problem.HV * ((problem.K + problem.V) // BV),
        (
            *(workspace.w, workspace.kg, workspace.inverse, workspace.decay, t.v),
            *(found.maps, found.offsets, found.first_segment, t.cu_seqlens, t.checkpoint_offsets),
            *state_arguments(problem, t, results[1]),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *strides(t.v),
        ),
        walk_constants(problem, c, BV),
        c.num_warps,
        scratch=(workspace.buffer,),
    )


def compose(
    problem: Problem, t: Tensors, capability: int, found: SegmentStates, results: Results, buffer: torch.Tensor
) -> Launch:
    c = config.compose_config(problem, capability)
    overlaps = capability >= 90
    return Launch(
        compose_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(found.maps, found.offsets, found.starts, found.first_segment, t.cu_seqlens),
            *state_arguments(problem, t, results[1]),
            *(problem.T, problem.N, problem.HV),
        ),
        dict(
            K=problem.K, V=problem.V, BV=c.BV, BK=c.BK, V_FIRST=problem.state_v_first, STAGES=c.stages, OVERLAP=overlaps
        ),
        c.num_warps,
        overlaps=overlaps,
        scratch=(buffer,),
    )


def recurrence(
    problem: Problem,
    t: Tensors,
    capability: int,
    workspace: Workspace,
    results: Results,
    segments: int = 0,
    pseudo: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    states: config.RecurrenceConfig | None = None,
) -> Launch:
    """Without `o` among the results, that is left to `output`. With `u`, neither `inverse` nor v is read. `states`: how to run
    where that is so."""
    o, final_state, h = results
    c = states or config.recurrence_config(problem, capability)
    inverse, v = (workspace.inverse, t.v) if u is None else (None, None)
    return Launch(
        recurrence_kernel,
        (segments or problem.N) * problem.HV * (problem.V // c.BV),
        (
            *(workspace.w, workspace.qg, workspace.kg, inverse, workspace.Aqk, workspace.decay),
            *(v, o, h, pseudo, u, t.cu_seqlens, t.checkpoint_offsets, t.checkpoint_indices),
            *(workspace.segments.first_segment, workspace.segments.starts),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *strides(t.v, t.v if o is None else o),
        ),
        walk_constants(problem, c, c.BV),
        c.num_warps,
        scratch=(workspace.buffer,),
    )


def output(problem: Problem, capability: int, workspace: Workspace, h: torch.Tensor, o: torch.Tensor) -> Launch:
    """`o` holds the pseudo-values."""
    c = config.output_config(problem, capability)
    return Launch(
        output_kernel,
        problem.B * problem.slots * problem.HV * (problem.V // c.BV),
        (workspace.qg, workspace.Aqk, h, o, problem.T, problem.N, problem.HV, problem.slots, *strides(o)),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            V=problem.V,
            BK=c.BK,
            BV=c.BV,
            PRECISION=config.dot_precision(problem.dtype),
            STAGES=c.stages,
        ),
        c.num_warps,
        scratch=(workspace.buffer,),
    )


def prefill(
    problem: PrefillSpec, t: Tensors, recorder: Recorder | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(o, w, u)`; see `ops.kda_prefill`."""
    device = t.q.device
    results = problem.allocate(device)
    stages = prefill_launches(problem, t, capability_of(device), *results)
    launch_all(stages, device, recorder, dict(zip(RESULTS, results)))
    return results


def prefill_launches(
    problem: PrefillSpec,
    t: Tensors,
    capability: int,
    o: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor | None,
    final_state: torch.Tensor | None = None,
) -> list[Launch]:
    """The launches of a `kda_prefill`. Without `u`, which is not stored then, those of `chunk_kda`; with it `output` is a stage
    of its own."""
    call, o, device = problem.call, o.view(t.v.shape), t.q.device
    if u is None:
        workspace = Workspace.allocate(call, device, w=w)
        stages = [
            prepare(call, t, capability, workspace),
            recurrence(call, t, capability, workspace, (o, final_state, None)),
        ]
    else:
        workspace, h = Workspace.with_states(call, device, w)
        states = config.states_config(call, capability, problem.precision)
        stages = [
            prepare(call, t, capability, workspace, u=u),
            recurrence(call, t, capability, workspace, (None, final_state, h), pseudo=o, u=u, states=states),
            output(call, capability, workspace, h, o),
        ]
    return [replace(stage, constants=stage.constants | {"PRECISION": problem.precision}) for stage in stages]


def decode(problem: Problem, t: Tensors, capability: int, results: Results) -> Launch:
    """Token by token: `fused_recurrent_kda` and `recurrent_kda`."""
    o, final_state, _ = results
    c = config.decode_config(problem, capability)
    states = decode_states(problem, t, final_state)
    single = problem.T == 1 and not problem.packed
    overlaps = capability >= 90
    return Launch(
        decode_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(t.q, t.k, t.v, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, o),
            *states.arguments(problem, t),
            *(problem.most_tokens, problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.HV // problem.H, problem.HV),
            *strides(t.q, t.k, t.v, t.g, t.beta, o),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            BV=c.BV,
            SINGLE=single,
            STREAM=c.stream,
            GATE=problem.gate,
            BETA=problem.beta_kind,
            L2NORM=problem.l2norm,
            V_FIRST=problem.state_v_first,
            EACH=problem.stores_each_state,
            IN_PLACE=problem.has_pool,
            TWO_POOLS=states.two_pools,
            NULL_GIVES_ZERO=problem.algorithm == "decode" and states.starts is not None,
            OVERLAP=overlaps,
        ),
        c.num_warps,
        overlaps=overlaps,
    )


@dataclass(frozen=True)
class DecodeStates:
    """Where a call of `decode` reads states (slot `starts[n]` of `initial`) and stores them (slot `targets[n]` of `final`, or
    `targets[n, i]` after the `i`-th token). Without `starts` that is row `n`; without `targets` the slot that was read.
    `two_pools`: one is read and the other is written."""

    initial: torch.Tensor
    final: torch.Tensor
    starts: torch.Tensor | None
    targets: torch.Tensor | None
    has_initial: bool
    has_final: bool
    two_pools: bool

    def arguments(self, problem: Problem, t: Tensors) -> tuple:
        """As the kernel takes them."""
        content = problem.HV * problem.K * problem.V
        pitches = [x.stride(0) if x.dim() > 3 else content for x in (self.initial, self.final)]
        step = self.final.stride(1) if problem.has_intermediate else 0
        return (
            *(self.initial, self.final, self.starts, self.targets, t.num_accepted_tokens, t.has_initial_state),
            *(problem.lowest_index, *(x.shape[0] for x in (self.initial, self.final))),
            *(int(self.has_initial), int(self.has_final), *pitches, step),
            *_index_strides(self.starts),
            *_index_strides(self.targets),
        )


def decode_states(problem: Problem, t: Tensors, final_state: torch.Tensor | None) -> DecodeStates:
    two_pools = t.source_pool is not None and problem.update_state
    initial, starts = t.state_pool, t.state_indices
    if t.source_pool is not None:
        initial, starts = t.source_pool, t.source_indices
    elif t.state_pool is None:
        initial = t.initial_state
    final, targets = final_state, None
    if problem.has_intermediate:
        final, targets = t.intermediate_states, t.intermediate_indices
    elif t.state_pool is not None and problem.update_state:
        final = t.state_pool
        targets = t.state_indices if two_pools or problem.spec_tokens else None
    states = or_empty(problem, t, initial, final)
    return DecodeStates(*states, starts, targets, initial is not None, final is not None, two_pools)


def _index_strides(indices: torch.Tensor | None) -> tuple[int, int]:
    """Of `[N]` or `[N, 1 + S]`."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(1) if indices.dim() == 2 else 0


def commit(problem: CommitSpec, t: CommitTensors) -> None:
    """See `ops.commit`."""
    launch_all([commit_launch(problem, t)], t.initial_state.device)


def commit_launch(problem: CommitSpec, t: CommitTensors) -> Launch:
    block = config.COMMIT_BLOCK
    indices = dense(t.ssm_state_indices, t.intermediate_state_indices, t.num_accepted_tokens)
    return Launch(
        commit_kernel,
        problem.N * -(-problem.size // block),
        (
            *(t.initial_state, t.intermediate_states, *indices),
            *(problem.lowest_index, problem.slots, problem.rows, problem.tokens, problem.size),
            *(t.initial_state.stride(0), *t.intermediate_states.stride()[:2]),
        ),
        dict(BLOCK=block),
        num_warps=4,
    )
