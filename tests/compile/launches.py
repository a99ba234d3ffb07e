"""Records what every case of the tables launches: grids, constants, options and kinds of arguments, from meta tensors.

`launches.tsv` holds a line per case, table and backend, with a digest of each launch on all architectures. Names are left out,
so that a rename changes nothing. `python -m tests.compile launches` writes the file; `make record` does so, too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.operations import PRECISIONS
from flashdelta.problem.problem import Tensors
from flashdelta.program.launch import base_of
from flashdelta.program.plan import Plan
from flashdelta.program.workspace import FIRST, SLOT, address_of
from flashdelta.runtime.call import check

from ..gpu.calls import KIMI, UNBOUNDED, on_gpu, takes_hopper
from ..support.cases import BF16, CASES, FP32
from ..support.decoding import STEPS, make_step
from ..support.decoding_checks import REPLAYED, commit_call, replay_buffer
from ..support.inputs import TOKEN_TENSORS, make_call, meta_call, on_meta
from ..support.oracle import NO_H, as_recurrent
from ..support.pools import BUFFERS, CHECKPOINT_POOLS, PLAIN_POOLS, SPLITS, pool_call
from ..support.prefills import CASES as PREFILLS
from ..support.prefills import PLAIN, SIZES, prefill_call, sized
from ..support.split_cases import LENGTHS, split_call, split_pool_call
from ..support.wy import CASES as WY_CASES
from ..support.wy import make_wy
from .variants import ARCHITECTURES, BUILD, backward_of

FILE = Path(__file__).with_name("launches.tsv")

Traces = dict[str, str]


def kind(x: object, plan: Plan, inputs: list[Tensor], storages: dict[int, int]) -> object:
    """Describes an argument. Storages are numbered as they appear, so that what one launch leaves another shows."""
    tensor = base_of(x)
    if tensor is None:
        return x
    # not so what stands for an absent tensor
    in_slots = tensor.numel() > 0 or tensor.storage_offset() > 0
    storage, begin = divmod(address_of(tensor), SLOT) if in_slots else (id(tensor), 0)
    place = storage - FIRST
    if in_slots and place < len(inputs):
        given, begin = inputs[place], begin - plan.memory.begins[place] % SLOT
        storage, begin = given.untyped_storage()._cdata, begin + given.storage_offset() * given.element_size()
    number = storages.setdefault(storage, len(storages))
    where = tensor.dtype, *tensor.shape, *tensor.stride(), number, begin // tensor.element_size()
    return where if tensor is x else (*where, x.block_shape, x.layout.swizzle_byte_width)


def trace(plan: Plan, t: Tensors) -> list[tuple]:
    """Describes the launches, by position."""
    storages, inputs = dict[int, int](), [*t.present().values()]
    return [
        (
            (launch.ctas, launch.rows),
            tuple(kind(x, plan, inputs, storages) for x in launch.arguments),
            tuple(launch.constants.values()),
            tuple(sorted(launch.options().items())),
        )
        for launch in plan.launches
    ]


class Traced(NamedTuple):
    """A call of a table, forward or backward, and the backend whose launches are traced."""

    name: str
    op: Callable
    call: dict
    backend: str = "triton"
    backward: bool = False

    def plans(self) -> tuple[dict[int, Plan], Tensors]:
        """Plans per architecture, and the tensors of all."""
        program = check(self.op, **on_meta(self.call))
        if self.backward:
            program = backward_of(*program)
        architectures = (90,) if self.backend == "hopper" else ARCHITECTURES
        return {arch: BUILD[self.backend](*program, arch) for arch in architectures}, program[1]

    def digests(self) -> str:
        """Digests of each launch, on all architectures."""
        plans, t = self.plans()
        launches = itertools.zip_longest(*(trace(plan, t) for plan in plans.values()))
        return " ".join(hashlib.sha256(repr(x).encode()).hexdigest()[:6] for x in launches)


def in_dtype(call: dict, dtype: torch.dtype) -> dict:
    """With q, k and v in another dtype, and g and beta if they were in theirs."""
    own = call["q"].dtype
    return call | {name: call[name].to(dtype) for name in TOKEN_TENSORS if call[name].dtype == own}


def cases() -> Iterator[Traced]:
    models = [
        replace(model, name=f"{model.name} H{heads}", T=8192, H=heads, HV=heads)
        for model in (KIMI, UNBOUNDED)
        for heads in (4, 32, 96)
    ]
    calls = [(case, make_call(case, BF16), make_call(on_gpu(case), BF16)) for case in CASES]
    for case, call, wide in [*calls, *((model, meta_call(model), meta_call(model)) for model in models)]:
        for dtype in (BF16, FP32, torch.float16):
            name, call = f"{case.name} {str(dtype).removeprefix('torch.')}", in_dtype(call, dtype)
            yield from both_ways(f"chunk {name}", call, "triton")
            yield Traced(f"recurrent {name}, triton", fd.fused_recurrent_kda, as_recurrent(call))
        if takes_hopper(on_gpu(case)):
            yield from both_ways(f"chunk {case.name}", wide, "hopper")
    for pool in PLAIN_POOLS:
        call = as_recurrent(pool_call(pool, BF16))
        yield Traced(f"recurrent pool {pool.name}, triton", fd.fused_recurrent_kda, call)
    kinds = {"pool": PLAIN_POOLS + CHECKPOINT_POOLS, "buffer": BUFFERS + SPLITS}
    for name, pool in ((f"{kind} {pool.name}", pool) for kind, pools in kinds.items() for pool in pools):
        yield Traced(f"{name}, triton", fd.chunk_kda, pool_call(pool, BF16))
        wide = replace(pool, case=on_gpu(pool.case))
        if takes_hopper(wide.case):
            yield Traced(f"{name}, hopper", fd.chunk_kda, pool_call(wide, BF16), "hopper")
    for parts in (2, 5, "auto"):
        calls = {str(lengths): split_call(lengths) for lengths in LENGTHS} | {"pool": split_pool_call()}
        for name, call in calls.items():
            yield Traced(f"split {name} in {parts}, triton", fd.chunk_kda, call | {"split": parts})
        call = meta_call(replace(KIMI, T=8192)) | {"split": parts}
        yield Traced(f"split kimi in {parts}, hopper", fd.chunk_kda, call, "hopper")
    for step in STEPS:
        yield Traced(f"decode {step.name}, triton", fd.recurrent_kda, make_step(step, BF16))
        if step.T == 1 and step.lengths is None and step.state is not None:
            wide = replace(step, K=128, V=128, state=BF16, v_first=True)
            yield Traced(f"decode {step.name}, hopper", fd.recurrent_kda, make_step(wide, BF16), "hopper")
    for state in (FP32, BF16):
        yield Traced(f"commit {state}", fd.commit, commit_call(state))
    for step in REPLAYED:
        call = make_step(step, BF16) | {"intermediate_states": replay_buffer(step)}
        yield Traced(f"decode {step.name} by replay, triton", fd.recurrent_kda, call)
    for v_first in (True, False):
        call = commit_call() | {"intermediate_states": fd.replay_buffer(6, 2, 2, *((4, 8) if v_first else (8, 4)))}
        yield Traced(f"commit by replay, {'V' if v_first else 'K'} first", fd.commit, call | {"state_v_first": v_first})
    sizes = [replace(sized(PLAIN, size), name=f"at {size}") for size in SIZES]
    for case in [*PREFILLS, *sizes]:
        for precision in PRECISIONS:
            call = prefill_call(case) | {"precision": precision}
            yield Traced(f"prefill {case.name}, {precision}", fd.kda_prefill, call)
    for case in WY_CASES:
        yield Traced(f"wy {case.name}, triton", fd.kernels.chunk_bwd_wy_dqkg, make_wy(case, BF16))
        if case.chunk_size == 64:
            call = make_wy(replace(case, K=128, V=128), BF16)
            yield Traced(f"wy {case.name}, hopper", fd.kernels.chunk_bwd_wy_dqkg, call, "hopper")


FOR_MANY = patch("flashdelta.kernels.hopper.decode.DECODE_FEW", 0)
"""Hopper has a decode kernel of its own for many sequences and heads alone."""


def both_ways(name: str, call: dict, backend: str) -> Iterator[Traced]:
    yield Traced(f"{name}, {backend}", fd.chunk_kda, call, backend)
    yield Traced(f"{name}, {backend}, backward", fd.chunk_kda, call | NO_H, backend, backward=True)


def traced() -> Traces:
    """The digests of each case, by its name."""
    found: Traces = {}
    with FOR_MANY:
        for case in cases():
            assert case.name not in found, case.name
            found[case.name] = case.digests()
    return found


def parse(text: str) -> Traces:
    return dict(line.split("\t", 1) for line in text.splitlines()[1:])


def write() -> None:
    lines = ["case\tdigests", *(f"{name}\t{found}" for name, found in traced().items())]
    FILE.write_text("\n".join(lines) + "\n")


def differences(before: Traces, after: Traces) -> list[str]:
    """Cases whose launches differ, a line each."""
    lines = [f"{name}: launches differ" for name, found in after.items() if before.get(name, found) != found]
    lines += [f"{name}: new" for name in after if name not in before]
    return lines + [f"{name}: gone" for name in before if name not in after]
