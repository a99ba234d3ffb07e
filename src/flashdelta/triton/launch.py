"""From a validated call to the program that runs it: one workspace, and a launch for each stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..problem.problem import Problem, Tensors
from ..problem.split import segments_of_call
from ..program.launch import Launch, dense, sm_count, strides
from ..program.program import Outputs
from ..program.workspace import Layout, Workspace
from . import config
from .commit import commit_kernel
from .decode import decode_kernel
from .output import output_kernel
from .prepare import prepare_kernel
from .prepare_bounded import prepare_bounded_kernel
from .recurrence import recurrence_kernel
from .segments import compose_kernel, plan_kernel, transitions_kernel


@dataclass(frozen=True)
class Call:
    """What every stage of a call needs. `t`: as the kernels read them. `arch`: the GPU's compute capability, e.g. 90."""

    problem: Problem
    t: Tensors
    arch: int
    workspace: Workspace

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (self.workspace.buffer,)


DENSE = (
    *("A_log", "dt_bias", "initial_state", "cu_seqlens", "has_initial_state", "checkpoint_offsets"),
    *("checkpoint_indices", "num_accepted_tokens"),
)


def prepare_inputs(problem: Problem, t: Tensors) -> Tensors:
    """The kernels read any strides but the last dimension's, which must be 1, dense parameters, states and indices, and a
    pool in place; `decode` reads indices of any strides too."""
    if problem.operation == "wy":
        return replace(
            t, **strided(t, ("q", "k", "v", "g", "do")), **densed(t, ("v_new", "A", "h", "dh", "dv", "cu_seqlens"))
        )
    if problem.operation == "commit":
        return replace(t, **densed(t, ("state_indices", "intermediate_indices", "num_accepted_tokens")))
    chunk = ("state_indices",) if problem.operation == "chunk" else ()
    return replace(t, **strided(t, ("q", "k", "v", "g")), **densed(t, (*DENSE, *chunk)))


def strided(t: Tensors, roles: tuple[str, ...]) -> dict[str, Tensor]:
    """With a dense last dimension."""
    named = ((role, getattr(t, role)) for role in roles)
    return {role: x if x.stride(-1) == 1 else x.contiguous() for role, x in named}


def densed(t: Tensors, roles: tuple[str, ...]) -> dict[str, Tensor | None]:
    return dict(zip(roles, dense(*(getattr(t, role) for role in roles))))


# ---- whole sequences, in chunks -----------------------------------------------------------------------------------------


def segment_layout(problem: Problem, segments: int) -> Layout:
    """What the stages of a split leave for each other (`segments.py`), with up to `segments` of them; nothing without."""
    if segments == 0:
        return {}
    rows = {"maps": problem.K, "offsets": problem.V, "starts": problem.V}
    states = {name: ((segments, problem.HV, n, problem.K), torch.float32) for name, n in rows.items()}
    return {**states, "first_segment": ((problem.N + 1,), torch.int32)}


def layout(problem: Problem, segments: int = 0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `prepare` leaves for `recurrence`, for `S = B * slots` chunk slots, and what a split keeps, if there is one."""
    S, HV, C, K = problem.B * problem.slots, problem.HV, problem.chunk_size, problem.K
    operand, square = ((S, HV, C, K), problem.dtype), ((S, HV, C, C), problem.dtype)
    tiles = {"w": operand, "qg": operand, "kg": operand, "Akk_inv": square, "Aqk": square}
    return {**tiles, "decay": ((S, HV, K), torch.float32), **segment_layout(problem, segments)}


TILES = ("w", "qg", "kg", "Akk_inv", "Aqk", "decay")


def chunk(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    room = config.room(problem, arch, sm_count(t.device))
    segments = segments_of_call(problem, room, config.SPLIT_COSTS)
    call = Call(problem, t, arch, Workspace.allocate(layout(problem, segments), t.device))
    o, final_state, h = outputs["o"], outputs.get("final_state"), outputs.get("h")
    split = [plan(call, room), maps(call, segments, final_state), compose(call, final_state)] if segments else []
    return [prepare(call), *split, recurrence(call, o, final_state, h, segments=segments)]


def prepare(call: Call, Akk_inv: Tensor | None = None, u: Tensor | None = None) -> Launch:
    """`Akk_inv`: receives the inverses in float32, or by token, for the backward pass. With `u`, that is left instead of the
    workspace's `Akk_inv`, which then has none."""
    problem, t = call.problem, call.t
    c = config.prepare_config(problem, call.arch)
    inputs = (t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, t.checkpoint_offsets)
    left = (*call.workspace.select(*TILES), Akk_inv)
    scalars = (
        *(problem.scale, problem.lower_bound or 0.0),
        *(problem.T, problem.N, problem.H, problem.HV, problem.slots, problem.checkpoints),
    )
    constants = dict(
        C=problem.chunk_size,
        K=problem.K,
        BK=c.BK,
        GATE=problem.gate,
        BETA=problem.beta_kind,
        L2NORM=problem.l2norm,
        PRECISION=precision(problem),
        STAGES=c.stages,
    )
    kernel = prepare_bounded_kernel
    arguments = (*inputs, *left, *scalars, *strides(t.q, t.k, t.g, t.beta))
    if not config.bounded(problem):
        kernel, constants = prepare_kernel, constants | {"V": problem.V}
        values = (None if u is None else t.v, u)
        arguments = (*inputs, *left, *values, *scalars, *strides(t.q, t.k, t.g, t.beta, t.v))
    return Launch(kernel, chunks(problem), arguments, constants, c.num_warps, scratch=call.buffers)


def chunks(problem: Problem) -> int:
    """Chunk slots of all heads."""
    return problem.B * problem.slots * problem.HV if problem.N > 0 else 0


def precision(problem: Problem) -> str:
    """Of products whose operands are float32 in the kernel."""
    return problem.precision if problem.operation == "prefill" else config.dot_precision(problem.dtype)


def plan(call: Call, room: int) -> Launch:
    problem, costs = call.problem, config.SPLIT_COSTS
    return Launch(
        plan_kernel,
        1,
        (
            *(call.t.cu_seqlens, call.t.checkpoint_offsets, call.workspace["first_segment"]),
            *(problem.T, problem.N, problem.checkpoints, room, problem.split, int(problem.batch_invariant)),
            *(costs.step, costs.map, costs.compose, costs.fixed, costs.shortest, costs.margin),
        ),
        dict(C=problem.chunk_size, BLOCK=128),
        num_warps=4,
        scratch=call.buffers,
    )


def scan_constants(problem: Problem, c: config.RecurrenceConfig, BV: int) -> dict[str, object]:
    """Of the kernels that scan a sequence's chunks, with slices of `BV` columns."""
    return dict(
        C=problem.chunk_size,
        K=problem.K,
        V=problem.V,
        BV=BV,
        V_FIRST=problem.state_v_first,
        PRECISION=precision(problem),
        STAGES=c.stages,
    )


def state_arguments(problem: Problem, t: Tensors, final_state: Tensor | None) -> tuple:
    """Where states are read and stored, as the kernels take it (`device/states.py`). For a state that the call does not
    have, an empty tensor, which the kernel leaves alone."""
    if problem.has_pool:
        assert t.state_pool is not None
        initial = final = t.state_pool
        pitch = t.state_pool.stride(0)
    else:
        initial, final = or_empty(problem, t, t.initial_state, final_state)
        pitch = problem.HV * problem.K * problem.V
    return (
        *(initial, final, t.state_indices, t.has_initial_state, problem.lowest_index, problem.pool_slots),
        *(int(problem.has_initial_state), int(final_state is not None), pitch),
    )


def or_empty(problem: Problem, t: Tensors, *states: Tensor | None) -> list[Tensor]:
    """The states, with one empty tensor for all that the call does not have."""
    absent = t.v.new_empty(0, dtype=problem.state_dtype) if any(x is None for x in states) else None
    return [absent if x is None else x for x in states]  # type: ignore[misc]


def maps(call: Call, segments: int, final_state: Tensor | None) -> Launch:
    problem, t, workspace = call.problem, call.t, call.workspace
    c = config.recurrence_config(problem, call.arch)
    BV = config.maps_width(problem, call.arch)
    return Launch(
        transitions_kernel,
        segments * problem.HV * ((problem.K + problem.V) // BV),
        (
            *(*workspace.select("w", "kg", "Akk_inv", "decay"), t.v),
            *(*workspace.select("maps", "offsets", "first_segment"), t.cu_seqlens, t.checkpoint_offsets),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *strides(t.v),
        ),
        scan_constants(problem, c, BV),
        c.num_warps,
        scratch=call.buffers,
    )


def compose(call: Call, final_state: Tensor | None) -> Launch:
    problem, t = call.problem, call.t
    c = config.compose_config(problem, call.arch)
    overlaps = call.arch >= 90
    return Launch(
        compose_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(*call.workspace.select("maps", "offsets", "starts", "first_segment"), t.cu_seqlens),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV),
        ),
        dict(
            K=problem.K, V=problem.V, BV=c.BV, BK=c.BK, V_FIRST=problem.state_v_first, STAGES=c.stages, OVERLAP=overlaps
        ),
        c.num_warps,
        overlaps=overlaps,
        scratch=call.buffers,
    )


def recurrence(
    call: Call,
    o: Tensor | None,
    final_state: Tensor | None,
    h: Tensor | None,
    *,
    segments: int = 0,
    v_new: Tensor | None = None,
    u: Tensor | None = None,
) -> Launch:
    """Without `o`, that is left to `output`. With `u`, neither `Akk_inv` nor v is read."""
    problem, t, workspace = call.problem, call.t, call.workspace
    c = config.recurrence_config(problem, call.arch)
    if u is not None:
        c = config.states_config(problem, call.arch, problem.precision)
    inverse, v = (workspace["Akk_inv"], t.v) if u is None else (None, None)
    return Launch(
        recurrence_kernel,
        (segments or problem.N) * problem.HV * (problem.V // c.BV),
        (
            *(*workspace.select("w", "qg", "kg"), inverse, *workspace.select("Aqk", "decay")),
            *(v, o, h, v_new, u, t.cu_seqlens, t.checkpoint_offsets, t.checkpoint_indices),
            *workspace.select("first_segment", "starts"),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *strides(t.v, t.v if o is None else o),
        ),
        scan_constants(problem, c, c.BV),
        c.num_warps,
        scratch=call.buffers,
    )


# ---- kda_prefill --------------------------------------------------------------------------------------------------------


def prefill_layout(problem: Problem, values: bool) -> Layout:
    """That of `chunk_kda` without `w`, which is a result. With `values`, `u` is one too: it takes the place of `Akk_inv`, and
    `output` reads the state before each chunk."""
    tiles = layout(problem)
    del tiles["w"]
    if values:
        del tiles["Akk_inv"]
        tiles["h"] = (problem.B * problem.slots, problem.HV, problem.V, problem.K), torch.float32
    return tiles


def prefill(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Without `u` among the outputs those of `chunk_kda`, but that `w` lies in one; with it `output` is a stage of its own."""
    o, w, u, final_state = outputs["o"].view(t.v.shape), outputs["w"], outputs.get("u"), outputs.get("final_state")
    call = Call(problem, t, arch, Workspace.allocate(prefill_layout(problem, u is not None), t.device, {"w": w}))
    if u is None:
        return [prepare(call), recurrence(call, o, final_state, None)]
    states = recurrence(call, None, final_state, call.workspace["h"], v_new=o, u=u)
    return [prepare(call, u=u), states, output(call, o)]


def output(call: Call, o: Tensor) -> Launch:
    """`o` holds the pseudo-values."""
    problem, workspace = call.problem, call.workspace
    c = config.output_config(problem, call.arch)
    return Launch(
        output_kernel,
        problem.B * problem.slots * problem.HV * (problem.V // c.BV),
        (
            *(*workspace.select("qg", "Aqk", "h"), o),
            *(problem.T, problem.N, problem.HV, problem.slots, *strides(o)),
        ),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            V=problem.V,
            BK=c.BK,
            BV=c.BV,
            PRECISION=precision(problem),
            STAGES=c.stages,
        ),
        c.num_warps,
        scratch=call.buffers,
    )


# ---- token by token -----------------------------------------------------------------------------------------------------


def step(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    return [decode(problem, t, arch, outputs)]


def decode(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> Launch:
    """Token by token: `fused_recurrent_kda` and `recurrent_kda`."""
    o = outputs["o"]
    c = config.decode_config(problem, arch)
    states = decode_states(problem, t, outputs.get("final_state"))
    overlaps = arch >= 90
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
            SINGLE=problem.T == 1 and not problem.packed,
            STREAM=c.stream,
            GATE=problem.gate,
            BETA=problem.beta_kind,
            L2NORM=problem.l2norm,
            V_FIRST=problem.state_v_first,
            EACH=2 if problem.has_intermediate else problem.stores_each_state,
            IN_PLACE=problem.has_pool,
            TWO_POOLS=states.two_pools,
            NULL_GIVES_ZERO=problem.operation == "decode" and states.starts is not None,
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

    initial: Tensor
    final: Tensor
    starts: Tensor | None
    targets: Tensor | None
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


def decode_states(problem: Problem, t: Tensors, final_state: Tensor | None) -> DecodeStates:
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
    return DecodeStates(states[0], states[1], starts, targets, initial is not None, final is not None, two_pools)


def _index_strides(indices: Tensor | None) -> tuple[int, int]:
    """Of `[N]` or `[N, 1 + S]`."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(1) if indices.dim() == 2 else 0


def commit(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    block, size = config.COMMIT_BLOCK, problem.HV * problem.V * problem.K
    assert t.state_pool is not None and t.intermediate_states is not None
    return [
        Launch(
            commit_kernel,
            problem.N * -(-size // block),
            (
                *(t.state_pool, t.intermediate_states),
                *(t.state_indices, t.intermediate_indices, t.num_accepted_tokens),
                *(problem.lowest_index, problem.pool_slots, problem.rows, problem.most_tokens, size),
                *(t.state_pool.stride(0), *t.intermediate_states.stride()[:2]),
            ),
            dict(BLOCK=block),
            num_warps=4,
        )
    ]
