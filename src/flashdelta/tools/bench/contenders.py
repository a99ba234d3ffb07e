"""What is timed: flashdelta's calls, and those of the libraries beside it, on the same tensors.

A function a benchmark turns a row into a `Work`: the calls by contender, or why there is none, and how their results are
checked. `runner.py` does the rest.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ...problem.problem import record_width
from ...testing import prefills
from ...testing.cases import BF16, FP32, Case
from ...testing.decoding import Step, make_step
from ...testing.inputs import make_call
from ...testing.oracle import TOLERANCE, float64, truth
from ...testing.wy import NAMES as GRADIENTS
from ..export.bindings import Library, PrefillArgs
from . import checks, profiling
from .timing import Effort, Run, Timer
from .training import LEAVES, input_bytes, training_inputs, true_gradients, wy_bytes, wy_inputs, wy_truth
from .workloads import Row

Results = Sequence[Tensor]

PEER_TOLERANCE = 5e-2
"""Relative error past which a peer's result is wrong and its time means nothing."""


@dataclass(frozen=True)
class Contender:
    """`call` returns its results; `checked`, if given, is called instead where they are checked.

    `graph`: it is timed as a CUDA graph "too", "only", or "no". `more` and `host` are further calls, timed on the GPU and on
    the host, by their key in the row. `memory`: its peak is taken. `describe` makes the row's `kernels` of a profile. `beside`
    is the name of a contender from which it differs so little that its sustained time is told from that one's, call by call.
    """

    call: Callable[[], Results]
    tolerance: float = PEER_TOLERANCE
    checked: Callable[[], Results] | None = None
    graph: str = "no"
    more: Mapping[str, Run] = field(default_factory=dict)
    host: Mapping[str, Run] = field(default_factory=dict)
    memory: bool = False
    describe: Callable[[Sequence[profiling.KernelRun], int], list[dict]] | None = None
    beside: str | None = None


@dataclass(frozen=True)
class Work:
    """`errors` of a contender's results; `bytes` that can't but be moved, in `launches` launches of a timed call; `facts` for
    the row's JSON; `name`: what part of the row it is, if the row has parts."""

    contenders: Mapping[str, Contender | str]
    errors: Callable[[Results], checks.Errors]
    shape: dict[str, object] = field(default_factory=dict)
    bytes: int | None = None
    launches: int = 1
    input_bytes: int | None = None
    facts: dict[str, object] = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True)
class Setup:
    """What all rows of a run share. `peers` are entries of `PEERS` by name, or why there is none; they take part in the rows
    named in `peer_rows` (None: in all). The sizes are of decoding: the pools of a state's dtype, the states that a graph reads,
    the most launches in it, and the eager calls whose host time is taken."""

    device: torch.device
    timer: Timer | None
    effort: Effort
    backend: str = "auto"
    peers: Mapping[str, Any] = field(default_factory=dict)
    peer_rows: frozenset[str] | None = None
    ceilings: Mapping[str, float] = field(default_factory=dict)
    library: Library | None = None
    folder: Any = None
    tokens: int = 8192
    pool_bytes: int = 2**32
    graph_bytes: int = 2**31
    launches: int = 512
    host_calls: int = 200
    pools: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def graphs(self) -> bool:
        """Whether there are CUDA graphs."""
        return self.device.type == "cuda"

    def found(self, name: str, row: Row) -> Any:
        """The peer's function, or why it takes no part in this row."""
        asked = row.peers and (self.peer_rows is None or row.name in self.peer_rows)
        return self.peers.get(name, "not asked for") if asked else "not asked for"

    def peer(self, name: str, row: Row, make: Callable[[Any], Contender | str]) -> Contender | str:
        """What `make` makes of the peer's function; else why it takes no part in this row."""
        found = self.found(name, row)
        return found if isinstance(found, str) else make(found)


# ---- peers -----------------------------------------------------------------------------------------------------------

PEERS = {
    "fla": ("fla.ops.kda", "chunk_kda"),
    "fla_decode": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"),
    "fla_conv": ("fla.modules.causal_conv1d", "causal_conv1d"),
    "fla_conv_update": ("fla.modules.causal_conv1d", "causal_conv1d_update"),
    "fla_gate": ("fla.ops.kda.gate", "kda_gate_fwd"),
    "fla_norm": ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"),
    "fla_wy": ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd_wy_dqkg_fused"),
    "flash_kda": ("flash_kda", "fwd"),
    "cula": ("cula.kda", "kda_prefill_hopper"),
    "cudnn": ("cudnn.linear_attention.ops", "kimi_delta_attention"),
    "engine": ("flashdelta.testing.engine_kernels", "own_functions"),
}
"""Module and function. FLA's public decode takes no indices of states, so its launcher is called."""

TITLES = {
    "ours": "ours",
    "fla": "FLA",
    "fla_bf16": "FLA bf16",
    "fla_gated": "FLA, gate inside",
    "chain": "single operators",
    "bare": "bare step",
    "flash_kda": "FlashKDA",
    "cula": "cuLA",
    "cudnn": "cuDNN",
    "cudnn_ready": "cuDNN ready",
    "cudnn_cute": "cuDNN CuTe",
    "engine": "engine",
    "whole": "whole",
    "c": "C library",
}
INSTALL = {"fla": "; pip install 'flashdelta[bench]'", "cudnn": "; pip install nvidia-cudnn-frontend"}
OURS_ONLY = ("backend", "chunk_size", "return_intermediate_states", "split", "cu_seqlens_cpu")
"""Arguments of `chunk_kda` that FLA's has not."""


def find(peer: str) -> Any:
    """The peer's function, or why there is none."""
    module, name = PEERS[peer]
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # peers probe GPUs and Triton while they are imported, and any of that may fail
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        library = peer if peer in TITLES else peer.partition("_")[0]
        return f"{TITLES[library]} can't be imported ({reason}){INSTALL.get(library, '')}"


def let_fla_split() -> None:
    """FLA splits sequences on one card where this is set when it is imported."""
    os.environ.setdefault("FLA_INTRACARD_CP", "1")


def shared(call: dict) -> dict:
    """The arguments that FLA's `chunk_kda` takes, too, under the same names."""
    return {name: x for name, x in call.items() if name not in OURS_ONLY}


def values_first(call: dict, case: Case) -> Tensor | None:
    """The initial state as `[V, K]`."""
    state = call.get("initial_state")
    return state if state is None or case.v_first else state.mT.contiguous()


def flash_kda(forward: Callable, call: dict, case: Case) -> Contender | str:
    """FlashKDA writes into buffers, states `[V, K]`."""
    if case.gate != "lower_bound" or case.H != case.HV or (case.K, case.V) != (128, 128):
        return "FlashKDA takes bounded gates, as many value as key heads, K = V = 128"

    def run() -> Results:
        out = torch.empty_like(call["v"])
        state = call["v"].new_empty(case.sequences, case.HV, case.V, case.K, dtype=FP32)
        tensors = [call[name] for name in ("q", "k", "v", "g", "beta")]
        gate = call["A_log"], call["dt_bias"].view(case.HV, case.K), case.lower_bound
        carried = {} if initial is None else {"initial_state": initial}
        forward(*tensors, case.K**-0.5, out, *gate, final_state=state, cu_seqlens=call.get("cu_seqlens"), **carried)
        return out, state if case.v_first else state.mT

    initial = values_first(call, case)
    return Contender(run, graph="too")


def cula(prefill: Callable, call: dict, case: Case) -> Contender | str:
    """cuLA takes beta as float32 values, so its sigmoid is part of the call."""
    if case.gate != "lower_bound" or case.H != case.HV:
        return "cuLA takes bounded gates, as many value as key heads"
    options = ("output_final_state", "use_qk_l2norm_in_kernel", "safe_gate", "use_gate_in_kernel", "lower_bound")
    names = ("q", "k", "v", "g", "A_log", "dt_bias", *options)
    given = {name: call[name] for name in names}
    if "cu_seqlens" in call:
        given["cu_seqlens"] = call["cu_seqlens"].int()
    return Contender(lambda: prefill(beta=call["beta"].float().sigmoid(), **given))


# ---- cuDNN -----------------------------------------------------------------------------------------------------------

CUDNN = {"cudnn": "kda_hopper_cuda", "cudnn_ready": "kda_hopper_cuda", "cudnn_cute": "kda_hopper"}
"""The engine of each contender. "cudnn" gets what we get. The others get ready inputs, which are made before the time is taken:
the CuTe engine takes no others, and cuDNN's own figures are of such."""


def made_ready(call: dict, case: Case) -> dict[str, Any]:
    """Norms, gate and sigmoid by PyTorch, in float32; q and k are rounded again."""
    raw = call["g"].float() + call["dt_bias"].view(case.HV, case.K)
    rate = call["A_log"].exp()[:, None]
    bounded = case.gate == "lower_bound"
    g = case.lower_bound * (rate * raw).sigmoid() if bounded else -rate * torch.nn.functional.softplus(raw)
    q, k = (torch.nn.functional.normalize(call[name].float(), dim=-1).to(call[name].dtype) for name in ("q", "k"))
    return tokens_of({"q": q, "k": k, "v": call["v"], "g": g, "beta": call["beta"].float().sigmoid()})


def as_given(call: dict, case: Case) -> dict[str, Any]:
    """With norms, gate and sigmoid in the kernel."""
    flags = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    gate = {"a_log": call["A_log"], "dt_bias": call["dt_bias"].view(case.HV, case.K)}
    return tokens_of(call) | gate | {"gate_lower_bound": case.lower_bound, **dict.fromkeys(flags, True)}


def tokens_of(call: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tokens of all sequences in a row."""
    return {name: call[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}


def bind_cudnn(op: Callable, name: str, call: dict, case: Case) -> Callable[[Mapping[str, Any]], Results]:
    """Its operator by its inputs. States are `[V, K]`."""
    offsets = call.get("cu_seqlens", torch.arange(case.sequences + 1, device=call["q"].device) * case.T)
    initial = {} if "initial_state" not in call else {"initial_state": values_first(call, case)}
    fixed = {"cu_seqlens": offsets.int(), **initial, "output_final_state": case.final, "plan_name": CUDNN[name]}

    def run(inputs: Mapping[str, Any]) -> Results:
        try:
            o, state = op(**inputs, **fixed)
        except Exception:
            # a refused graph stays among its graphs, where the next call would find it and run it by another engine
            getattr(sys.modules[op.__module__], "fprop_cache", {}).clear()
            raise
        return o.view(call["v"].shape), state if case.v_first or not case.final else state.mT

    return run


def cudnn_refusal(name: str, case: Case, training: bool = False) -> str | None:
    """Why it can't run the row, if it can't."""
    if (case.K, case.V) != (128, 128):
        return "cuDNN takes K = V = 128"
    if case.H != case.HV and (training or name == "cudnn_cute"):
        return f"{'the backward of cuDNN' if training else TITLES[name]} takes as many value as key heads"
    if case.gate != "lower_bound" and name == "cudnn" and not training:
        return "cuDNN takes bounded gates, or log decays"
    return None


def cudnn_prefills(row: Row, setup: Setup, call: dict) -> dict[str, Contender | str]:
    """Its contenders; where it is not here just the first, which says so."""
    op, case = setup.found("cudnn", row), row.call
    if isinstance(op, str):
        return {"cudnn": op}
    ready, made = made_ready(call, case), {}
    for name in CUDNN:
        run = functools.partial(bind_cudnn(op, name, call, case), as_given(call, case) if name == "cudnn" else ready)
        made[name] = cudnn_refusal(name, case) or Contender(run, graph="too")
    return made


# ---- prefill, classic, split, kernels --------------------------------------------------------------------------------

RECURRENCE_TOKENS = 16384
"""Most tokens for which the truth is the recurrence, about 0.1 ms a token on a GPU; beyond, the chunked reference."""


def sizes(case: Case) -> dict[str, object]:
    names = ("B", "H", "HV", "K", "V")
    return {name: getattr(case, name) for name in names} | {"T": case.tokens, "lengths": case.lengths or ()}


def forward_bytes(case: Case, element_size: int = 2) -> int:
    """Bytes a forward can't avoid moving: q, k, v, g read once and o written once, all at `element_size` bytes."""
    return case.B * case.tokens * (case.H * 2 * case.K + case.HV * (2 * case.V + case.K)) * element_size


def explained(op: Callable, call: dict, backend: str) -> dict[str, object]:
    """The backend that runs the call, by name, and of a prefill how many segments each sequence has there."""
    try:
        found = fd.explain(op, **call, backend=backend)
    except ValueError:
        return {"backend": None, "segments": None}
    return {"backend": found.chosen} | ({} if found.segments is None else {"segments": found.segments})


def checkpoint(case: Case, device: torch.device) -> dict[str, Tensor]:
    """One a sequence, in the middle of it, into a buffer of its own."""
    middle = torch.tensor([length // 128 * 64 for length in case.lengths or [case.T] * case.B], dtype=torch.int32)
    return {
        "checkpoint_offsets": middle.to(device),
        "checkpoint_indices": torch.arange(len(middle), dtype=torch.int32, device=device),
        "checkpoint_states": torch.empty(len(middle), case.HV, case.K, case.V, device=device),
    }


def prefill(row: Row, setup: Setup, describe: bool = False) -> Work:
    case: Any = row.call
    call = make_call(case, BF16, setup.device)
    chunked = case.tokens > RECURRENCE_TOKENS
    want = truth(call, chunked)
    ours = functools.partial(fd.chunk_kda, **call, backend=setup.backend)
    contenders: dict[str, Contender | str] = {
        "ours": Contender(
            ours,
            TOLERANCE[BF16],
            lambda: ours(out=torch.full_like(call["v"], torch.nan)),
            graph="too",
            describe=functools.partial(profiling.describe, case, setup.device, setup.ceilings) if describe else None,
        ),
        "fla": setup.peer("fla", row, lambda f: Contender(functools.partial(f, **shared(call)))),
        "flash_kda": setup.peer("flash_kda", row, lambda f: flash_kda(f, call, case)),
        "cula": setup.peer("cula", row, lambda f: cula(f, call, case)),
        **cudnn_prefills(row, setup, call),
    }
    if any(bound.of == "checkpoint" for bound in row.bounds):
        stores = functools.partial(ours, **checkpoint(case, setup.device))
        contenders["checkpoint"] = Contender(stores, TOLERANCE[BF16], beside="ours")
    facts = {
        "reference": f"{'chunked' if chunked else 'recurrence'}, float64",
        **explained(fd.chunk_kda, call, setup.backend),
    }
    errors = functools.partial(checks.errors, want, ("o", "state"), absolute=True)
    return Work(contenders, errors, sizes(case), forward_bytes(case), facts=facts)


def kernels(row: Row, setup: Setup) -> Work:
    return prefill(row, setup, describe=True)


def split(row: Row, setup: Setup) -> Work:
    """Also ours whole, and ours with the offsets on the host."""
    work = prefill(row, setup)
    ours: Any = work.contenders["ours"]
    offsets = ours.call.keywords.get("cu_seqlens")
    others = {
        "whole": {"split": False},
        "cu_seqlens_cpu": {"cu_seqlens_cpu": None if offsets is None else offsets.cpu()},
    }
    made = {
        name: Contender(functools.partial(ours.call, **options), ours.tolerance, graph="too")
        for name, options in others.items()
    }
    return replace(work, contenders={**work.contenders, **made})


# ---- training --------------------------------------------------------------------------------------------------------


def train(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    call, grad_o = training_inputs(case, setup.device)
    want = true_gradients(call, grad_o, case)

    def contender(op: Callable, tolerance: float, inputs: Mapping[str, Any] = call) -> Contender:
        leaves = [inputs[name] for name in LEAVES if name in inputs]

        def both() -> Results:
            return torch.autograd.grad(op()[0], leaves, grad_o)

        forward = {"forward_ms": lambda: op()[0]}
        return Contender(both, tolerance, more=forward, memory=True, describe=profiling.times)

    def cudnn() -> dict[str, Contender | str]:
        """Its backward takes ready inputs only: "cudnn" makes them in each call, "cudnn_ready" starts from them."""
        op = setup.found("cudnn", row)
        refusal = op if isinstance(op, str) else cudnn_refusal("cudnn", case, training=True)
        if refusal:
            return {"cudnn": refusal}
        run = bind_cudnn(op, "cudnn", call, case)
        ready = {name: x.detach().requires_grad_() for name, x in made_ready(call, case).items()}
        whole = contender(lambda: run(made_ready(call, case)), PEER_TOLERANCE)
        alone = contender(lambda: run(ready), PEER_TOLERANCE, ready)
        # its gradients are of other inputs, and so are checked where they reach ours
        return {"cudnn": whole, "cudnn_ready": replace(alone, checked=whole.call, memory=False)}

    contenders = {
        "ours": contender(functools.partial(fd.chunk_kda, **call, backend=setup.backend), checks.GRADIENT_TOLERANCE),
        "fla": setup.peer("fla", row, lambda f: contender(functools.partial(f, **shared(call)), PEER_TOLERANCE)),
        **cudnn(),
    }
    heads = ", ".join(map(str, checks.checked_heads(case)))
    facts = {"reference": f"float64 autograd, query/key heads {heads}", "backend": setup.backend}
    given = input_bytes(call, grad_o)
    errors = functools.partial(checks.gradient_errors, want, case)
    # inputs and o's gradient are read once, o and the gradients written once
    return Work(contenders, errors, sizes(case), 2 * given, input_bytes=given, facts=facts)


def wy(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    call = wy_inputs(case, setup.device)
    want = wy_truth(call)

    op = fd.kernels.chunk_bwd_wy_dqkg
    ours = functools.partial(op, **call, use_exp2=True, backend=setup.backend)
    contenders = {
        "ours": Contender(ours, checks.WY_TOLERANCE, graph="too", memory=True),
        "fla": setup.peer("fla_wy", row, lambda f: Contender(bind_fla_wy(f, **call), graph="too", memory=True)),
    }
    facts = {"reference": "formulas in float64", **explained(op, call | {"use_exp2": True}, setup.backend)}
    errors = functools.partial(checks.errors, want, GRADIENTS, largest=True)
    return Work(contenders, errors, sizes(case), wy_bytes(case), facts=facts)


def bind_fla_wy(
    function: Callable, scale: float | None = None, chunk_size: int = 64, **call: Any
) -> Callable[[], Results]:
    """FLA's kernel on the tensors of ours. What it looks chunks up in is made here: a training step makes it once."""
    indices = None
    if call.get("cu_seqlens") is not None:
        indices = importlib.import_module("fla.ops.utils").prepare_chunk_indices(call["cu_seqlens"], chunk_size)
    scale = call["q"].shape[-1] ** -0.5 if scale is None else scale  # its own default is no number
    return functools.partial(function, **call, scale=scale, chunk_size=chunk_size, chunk_indices=indices)


# ---- decoding --------------------------------------------------------------------------------------------------------

CHECKED = 2
"""Sequences of a row that are held against float64."""

DECODE_TOLERANCE = 5e-3
LEAST_LAUNCHES = 16
"""In a graph: starting one takes some microseconds, which are not the steps'."""


def state_bytes(step: Step) -> int:
    """Of one sequence."""
    return step.HV * step.K * step.V * step.state.itemsize if step.state else 0


def decode_bytes(step: Step) -> int:
    """States read and written: one before the tokens, one after each. By replay verification reads a state and commit reads and
    writes it; both move the records."""
    if step.rows is not None:
        records = 4 * step.N * step.T * step.HV * record_width(step.K, step.V)
        return 3 * step.N * state_bytes(step) + 2 * records
    return step.N * state_bytes(step) * (1 + step.T)


def pool_of(step: Step, setup: Setup, slots: int) -> Tensor:
    """So many slots of the memory for pools of the state's dtype, which is filled once."""
    dtype = step.state or FP32
    if dtype not in setup.pools:
        empty = torch.empty(setup.pool_bytes // dtype.itemsize, dtype=dtype, device=setup.device)
        setup.pools[dtype] = empty.normal_()
    shape = (slots, step.HV, *((step.V, step.K) if step.v_first else (step.K, step.V)))
    return setup.pools[dtype][: torch.Size(shape).numel()].view(shape)


def decode_calls(step: Step, setup: Setup) -> tuple[dict, list[Tensor]]:
    """Arguments of `recurrent_kda` without slots, and the slots of each launch. A graph holds as many launches as read
    `graph_bytes` of states, at least `LEAST_LAUNCHES` and at most `launches`: about a millisecond or more."""
    bare = Step(**vars(step) | {"state": None, "indices": None})
    call = make_step(bare, BF16, setup.device)
    wanted = max(LEAST_LAUNCHES, -(-setup.graph_bytes // (step.N * state_bytes(step))))
    launches = min(setup.launches, wanted)
    rows = max(1, min(launches, setup.pool_bytes // (step.N * step.T * state_bytes(step))))
    slots = torch.randperm(rows * step.N * step.T, generator=torch.Generator().manual_seed(0)).int().to(setup.device)
    # every launch's indices in a tensor of their own, aligned as an engine's are
    each = [x.clone() for x in slots.view(rows, *((step.N, step.T) if step.T > 1 else (step.N,)))]
    call["initial_state"] = pool_of(step, setup, rows * step.N * step.T)
    call["output"] = torch.empty_like(call["v"])
    return call, [each[i % rows] for i in range(launches)]


def decode_shape(step: Step) -> dict[str, object]:
    shape = {name: getattr(step, name) for name in ("N", "H", "HV", "K", "gate", "v_first")}
    return shape | {"state": "fp32" if step.state == FP32 else "bf16", "S": step.spec or 0}


def launch_all(run: Callable[[Tensor], object], slots: Sequence[Tensor]) -> Callable[[], Results]:
    """A graph's launches, each on slots of its own; it returns nothing, as what it writes is checked by one of them."""

    def run_each() -> Results:
        for each in slots:
            run(each)
        return ()

    return run_each


FLA_DECODE = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias"),
    *("initial_state", "state_v_first", "use_qk_l2norm_in_kernel"),
)


def fla_step(function: Callable, call: dict, slots: Tensor) -> object:
    gated = "A_log" in call
    return function(
        **{name: call[name] for name in FLA_DECODE if name in call},
        **({"lower_bound": call["lower_bound"]} if gated else {}),
        use_gate_in_kernel=gated,
        use_beta_sigmoid_in_kernel=True,
        inplace_final_state=True,
        ssm_state_indices=slots,
        out=call["output"],
    )


def decode(row: Row, setup: Setup) -> Work:
    step: Any = row.call
    if not step.update:
        return verify(row, setup)
    call, slots = decode_calls(step, setup)
    some = slots[0][:CHECKED]
    flat = some.flatten().long()
    before = call["initial_state"][flat]

    def checked(run: Callable[[Tensor], object]) -> Results:
        """The first sequences' outputs and states; the pool is put back as it was."""
        call["output"].fill_(torch.nan)
        run(slots[0])
        after = call["initial_state"][flat]
        call["initial_state"][flat] = before
        return call["output"][:CHECKED], after

    def contender(run: Callable[[Tensor], object], tolerance: float) -> Contender:
        host = {"host_us": lambda: run(slots[0])} if row.host else {}
        return Contender(launch_all(run, slots), tolerance, lambda: checked(run), graph="only", host=host)

    def ours(slots: Tensor) -> object:
        return fd.recurrent_kda(**call, ssm_state_indices=slots, backend=setup.backend)

    contenders = {
        "ours": contender(ours, DECODE_TOLERANCE),
        "fla": setup.peer(
            "fla_decode",
            row,
            lambda f: contender(lambda slots: fla_step(f, call, slots), PEER_TOLERANCE),
        ),
    }
    exact = float64({**call, "initial_state": before})
    exact |= {name: exact[name][:CHECKED] for name in ("q", "k", "v", "g", "beta")} | {"output": None}
    own = torch.arange(len(flat), device=flat.device).view(some.shape)
    o, _ = fd.recurrent_kda(**exact, ssm_state_indices=own, backend="reference")
    errors = functools.partial(checks.errors, (o, exact["initial_state"]), ("o", "state"))
    return Work(contenders, errors, decode_shape(step), decode_bytes(step), len(slots))


@dataclass
class Verification:
    """Drafts verified read-only and the accepted ones committed, through a buffer of records or of states. `slots`: of each
    launch and token."""

    step: Any
    setup: Setup

    def __post_init__(self) -> None:
        self.call, self.slots = decode_calls(replace(self.step, update=True, rows=None), self.setup)
        N, S1, self.pool = self.step.N, self.step.T, self.call["initial_state"]
        sizes = self.step.HV, self.step.K, self.step.V
        self.records = fd.replay_buffer(N, S1 - 1, *sizes, device=self.pool.device)
        self.states = self.pool.new_empty(N, S1, *self.pool.shape[1:])
        self.starts = [x[:, 0].contiguous() for x in self.slots]
        counts = torch.randint(1, S1 + 1, (N,), generator=torch.Generator().manual_seed(0))
        self.accepted, rows = (x.int().to(self.pool.device) for x in (counts, torch.arange(N)))
        self.options = {"intermediate_state_indices": rows, "backend": self.setup.backend}
        self.some = self.slots[0][:CHECKED].flatten().long()
        self.before = self.pool[self.some]

    def verify(self, buffer: Tensor, starts: Tensor) -> None:
        verified = {"update_state": False, "ssm_state_indices": starts, "intermediate_states": buffer}
        fd.recurrent_kda(**self.call | verified, **self.options)

    def commit(self, buffer: Tensor, starts: Tensor) -> None:
        """Verified first."""
        self.verify(buffer, starts)
        fd.commit(self.pool, buffer, starts, self.accepted, state_v_first=self.step.v_first, **self.options)

    def last(self, slots: Tensor) -> Tensor:
        """Of the first sequences, the slot of the last accepted token."""
        return slots[:CHECKED].gather(1, self.accepted[:CHECKED, None].long() - 1)[:, 0].long()

    def contender(
        self,
        run: Callable[[Tensor], object],
        slots: Sequence[Tensor],
        ends: Tensor,
        tolerance: float = DECODE_TOLERANCE,
    ) -> Contender:
        """`run` by launch. Checked are the first sequences' outputs, and their states, which lie in the slots `ends`."""

        def checked() -> Results:
            self.call["output"].fill_(torch.nan)
            run(slots[0])
            found = self.pool[ends]
            self.pool[self.some] = self.before
            return self.call["output"][:CHECKED], found

        return Contender(launch_all(run, slots), tolerance, checked, graph="only")

    def exact(self) -> tuple[Tensor, Tensor]:
        """What is checked, by the reference in float64."""
        call = float64({**self.call, "initial_state": self.before})
        call |= {name: call[name][:CHECKED] for name in ("q", "k", "v", "g", "beta")} | {"output": None}
        slots = torch.arange(len(self.some), device=self.pool.device).view(-1, self.step.T)
        o, _ = fd.recurrent_kda(**call, ssm_state_indices=slots, backend="reference")
        return o, call["initial_state"][self.last(slots)]


def verify(row: Row, setup: Setup) -> Work:
    """By replay ("ours"); with a state a token, in a buffer ("states"), or in slots of the pool, where no commit is needed
    ("slots", and FLA). "verify" is ours without its commit, "bare" a step of one token; they are checked as ours is."""
    step: Any = row.call
    both = Verification(step, setup)
    starts, ends = both.starts, both.starts[0][:CHECKED].long()
    replays = both.contender(functools.partial(both.commit, both.records), starts, ends)
    alone = both.contender(functools.partial(both.verify, both.records), starts, ends)
    bare = {name: both.call[name][:, :1].clone() for name in ("q", "k", "v", "g", "beta", "output")}
    bare = {**both.call, **bare, "num_spec_tokens": None, "backend": setup.backend}
    one = both.contender(lambda x: fd.recurrent_kda(**bare, ssm_state_indices=x), starts, ends)
    contenders = {
        "ours": replays,
        "states": both.contender(functools.partial(both.commit, both.states), starts, ends),
        "slots": both.contender(
            lambda x: fd.recurrent_kda(**both.call, ssm_state_indices=x, backend=setup.backend),
            both.slots,
            both.last(both.slots[0]),
        ),
        "verify": replace(alone, checked=replays.checked),
        "bare": replace(one, checked=replays.checked),
        "fla": setup.peer(
            "fla_decode",
            row,
            lambda f: both.contender(
                lambda x: fla_step(f, both.call, x), both.slots, both.last(both.slots[0]), PEER_TOLERANCE
            ),
        ),
    }
    facts = {"scratch_bytes": {"ours": both.records.nbytes, "states": both.states.nbytes}}
    errors = functools.partial(checks.errors, both.exact(), ("o", "state"))
    return Work(contenders, errors, decode_shape(step), decode_bytes(step), len(both.slots), facts=facts)


# ---- float32 ---------------------------------------------------------------------------------------------------------

CHECKED_HEADS = 4
"""Heads of a row of `fp32` that are held against float64."""

WORKSPACES, ALIGNMENT = 32, 16
"""Of the C library's calls with changing memory: more than it keeps graphs, and bytes between two."""


def fp32_flop(case: Case) -> int:
    """Of the matrix products. A chunk's: `A`, `Aqk`, `w`, `u`, `Aqk v'` (`C x C x K`), `w S`, `qg S` and `kg^T v'`
    (`C x K x K`), and `C^3 / 3` for the inverse of a unit lower triangle."""
    C, K = case.chunk_size, case.K
    return case.B * case.H * -(-case.T // C) * (5 * 2 * C**2 * K + 3 * 2 * C * K**2 + C**3 // 3)


def fp32_bytes(case: Case) -> int:
    """Those that can't be avoided: q, k, v, g and beta read, o, w and u written, in float32."""
    heads, C = case.B * case.H, case.chunk_size
    return 4 * heads * (case.T * (5 * case.K + 1) + -(-case.T // C) * C * 2 * case.K)


def fp32(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    call = prefills.prefill_call(case, setup.device)
    heads = checks.spread(CHECKED_HEADS, case.B * case.H)
    picked = {name: call[name].flatten(0, 1)[heads][None] for name in prefills.INPUTS}
    want = [x[0] for x in prefills.truth(call | picked)]

    def ours(precision: str) -> Contender:
        run = functools.partial(fd.kda_prefill, **call, precision=precision)
        return Contender(run, TOLERANCE[FP32], graph="only", host={"host_us": run} if precision == "tf32x3" else {})

    def fla(function: Any, dtype: torch.dtype) -> Contender:
        """Tokens lie before heads, and inputs are brought there once; g and beta stay float32, as they are for us."""
        given = {name: call[name].transpose(1, 2).contiguous() for name in prefills.INPUTS}
        given |= {name: given[name].to(dtype) for name in ("q", "k", "v")}
        return Contender(lambda: (function(**given)[0].transpose(1, 2),))

    contenders = {
        "ours": ours("tf32x3"),
        "ieee": ours("ieee"),
        "c": c_library(setup.library, call, case) if setup.library else "not asked for (--library)",
        "fla": setup.peer("fla", row, lambda f: fla(f, FP32)),
        "fla_bf16": setup.peer("fla", row, lambda f: fla(f, BF16)),
    }

    def errors(results: Results) -> checks.Errors:
        return checks.errors(want, ("o", "w", "u"), [x.flatten(0, 1)[heads] for x in results])

    shape = {"B": case.B, "H": case.H, "T": case.T, "K": case.K, "C": case.chunk_size}
    return Work(contenders, errors, shape, fp32_bytes(case), facts={"flop": fp32_flop(case)})


def c_library(library: Library, call: dict, case: Case) -> Contender:
    """On the current stream, its tensors allocated once. The host's time is that of calls that leave out all a C caller has
    not: with the same memory, and with another workspace than any of the last calls."""
    tensors = [call[name] for name in prefills.INPUTS]
    args = PrefillArgs(B=case.B, H=case.H, T=case.T, K=case.K, V=case.K, C=case.chunk_size)
    chunked = (case.B, case.H, -(-case.T // case.chunk_size), case.chunk_size, case.K)
    results = [tensors[0].new_empty(shape) for shape in (tensors[0].shape, chunked, chunked)]
    args.workspace_bytes = library.workspace_bytes(args)
    size = args.workspace_bytes + ALIGNMENT * WORKSPACES
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    for name, x in zip((*prefills.INPUTS, "o", "w", "u", "workspace"), (*tensors, *results, workspace)):
        setattr(args, name, x.data_ptr())
    function, given = library.functions.fd_prefill_f32, ctypes.byref(args)
    others = [PrefillArgs.from_buffer_copy(args) for _ in range(WORKSPACES)]
    for i, other in enumerate(others):
        other.workspace += i * ALIGNMENT
    turns = itertools.cycle([ctypes.byref(other) for other in others])

    def run() -> Results:
        library.prefill(args, torch.cuda.current_stream().cuda_stream if workspace.is_cuda else 0)
        return results

    # both calls keep `others` and `run` the results and the workspace alive
    host = {"host_us": lambda: function(given, None), "host_changed_us": lambda: function(next(turns), None)}
    return Contender(run, TOLERANCE[FP32], graph="only", host=host)
