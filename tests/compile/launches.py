"""What every case of the tables launches: grids, constants, options and kinds of arguments, from meta tensors.

`launches.tsv` holds a line a case, table and backend: how many launches, and a digest of them for all architectures. Names are
left out, so that a rename changes nothing. `make record` writes the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.operations import PRECISIONS
from flashdelta.program.launch import Launch
from flashdelta.runtime.call import check

from ..gpu.calls import KIMI, UNBOUNDED, on_gpu
from ..support.buffers import CASES as BUFFERS
from ..support.buffers import SPLITS, buffer_call
from ..support.cases import BF16, CASES, FP32, Case
from ..support.decoding import STEPS, make_step
from ..support.decoding_checks import REPLAYED, replay_buffer
from ..support.inputs import TOKEN_TENSORS, make_call, meta_call, on_meta
from ..support.oracle import as_recurrent
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, as_recurrent_pool, pool_call
from ..support.prefills import CASES as PREFILLS
from ..support.prefills import PLAIN, SIZES, prefill_call, sized
from ..support.split_cases import LENGTHS, split_call, split_pool_call
from ..support.wy import CASES as WY_CASES
from ..support.wy import make_wy
from ..unit.test_decode import commit_call
from .variants import ARCHITECTURES, BUILD, backward_of

FILE = Path(__file__).with_name("launches.tsv")

Traces = dict[str, str]


def kind(x: object, storages: dict[int, int]) -> object:
    """Of an argument. Storages are numbered as they appear, so that what one launch leaves another shows."""
    tensor = getattr(x, "base", x)
    if not isinstance(tensor, Tensor):
        return x
    number = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
    where = tensor.dtype, *tensor.shape, *tensor.stride(), number, tensor.storage_offset()
    return where if tensor is x else (*where, x.block_shape, x.layout.swizzle_byte_width)


def trace(launches: Iterable[Launch]) -> list[tuple]:
    """What the launches are, by position."""
    storages: dict[int, int] = {}
    found = list(launches)  # all at once: a storage that is gone could give its identity to another
    return [
        (
            (launch.ctas, launch.rows),
            tuple(kind(x, storages) for x in launch.arguments),
            tuple(launch.constants.values()),
            tuple(sorted(launch.options().items())),
        )
        for launch in found
    ]


class Traced(NamedTuple):
    """A call of a table, forward or backward, and the backend whose launches are traced."""

    name: str
    op: Callable
    call: dict
    backend: str = "triton"
    backward: bool = False

    def traces(self) -> list[list[tuple]]:
        """For every architecture."""
        program = check(self.op, **on_meta(self.call))
        if self.backward:
            program = backward_of(*program)
        architectures = (90,) if self.backend == "hopper" else ARCHITECTURES
        return [trace(BUILD[self.backend](*program, arch).launches) for arch in architectures]


def in_dtype(call: dict, dtype: torch.dtype) -> dict:
    """With q, k and v in another dtype, and g and beta if they were in theirs."""
    own = call["q"].dtype
    return call | {name: call[name].to(dtype) for name in TOKEN_TENSORS if call[name].dtype == own}


def takes_hopper(case: Case) -> bool:
    return case.chunk_size == 64 and case.V >= 64


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
    for pool in PLAIN_POOLS + CHECKPOINT_POOLS:
        call = pool_call(pool, BF16)
        yield Traced(f"pool {pool.name}, triton", fd.chunk_kda, call)
        if pool in PLAIN_POOLS:
            yield Traced(f"recurrent pool {pool.name}, triton", fd.fused_recurrent_kda, as_recurrent_pool(call))
        if takes_hopper(on_gpu(pool.case)):
            call = pool_call(replace(pool, case=on_gpu(pool.case)), BF16)
            yield Traced(f"pool {pool.name}, hopper", fd.chunk_kda, call, "hopper")
    for buffer_case in BUFFERS + SPLITS:
        yield Traced(f"buffer {buffer_case.name}, triton", fd.chunk_kda, buffer_call(buffer_case, BF16))
        if takes_hopper(on_gpu(buffer_case.case)):
            call = buffer_call(replace(buffer_case, case=on_gpu(buffer_case.case)), BF16)
            yield Traced(f"buffer {buffer_case.name}, hopper", fd.chunk_kda, call, "hopper")
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
        records = {"intermediate_states": replay_buffer(step)}
        yield Traced(f"decode {step.name} by replay, triton", fd.recurrent_kda, make_step(step, BF16) | records)
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


def both_ways(name: str, call: dict, backend: str) -> Iterator[Traced]:
    yield Traced(f"{name}, {backend}", fd.chunk_kda, call, backend)
    call = call | {"return_intermediate_states": False}
    yield Traced(f"{name}, {backend}, backward", fd.chunk_kda, call, backend, backward=True)


def traced() -> Traces:
    """Number of launches and digest of each case, by its name."""
    found: Traces = {}
    # Hopper has a decode kernel of its own for many sequences and heads alone
    with patch("flashdelta.kernels.hopper.decode.DECODE_FEW", 0):
        for case in cases():
            traces = case.traces()
            assert case.name not in found, case.name
            digest = hashlib.sha256(repr(traces).encode()).hexdigest()[:12]
            found[case.name] = f"{sum(map(len, traces))}\t{digest}"
    return found


def parse(text: str) -> Traces:
    return dict(line.split("\t", 1) for line in text.splitlines()[1:])


def write() -> None:
    lines = ["case\tlaunches\tdigest", *(f"{name}\t{found}" for name, found in traced().items())]
    FILE.write_text("\n".join(lines) + "\n")


def differences(before: Traces, after: Traces) -> list[str]:
    """Cases whose launches differ, a line each."""
    lines = [f"{name}: launches differ" for name, found in after.items() if before.get(name, found) != found]
    lines += [f"{name}: new" for name in after if name not in before]
    return lines + [f"{name}: gone" for name in before if name not in after]
