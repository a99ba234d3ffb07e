"""What every case of the tables launches: grids, constants, options and kinds of arguments, from meta tensors.

`launches.tsv` holds a line a case, table and backend: how many launches, and a digest of them for all architectures. Names are
left out, so that a rename changes nothing. `make record` writes the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.hopper.build import build as build_hopper
from flashdelta.problem.operations import PRECISIONS
from flashdelta.problem.problem import BACKWARD
from flashdelta.program.launch import Launch
from flashdelta.runtime.call import check
from flashdelta.testing.cases import BF16, CASES, FP32, Case
from flashdelta.testing.decoding import STEPS, Step, make_step
from flashdelta.testing.inputs import TOKEN_TENSORS, make_call, meta_call, on_meta
from flashdelta.testing.oracle import as_recurrent
from flashdelta.testing.prefills import CASES as PREFILLS
from flashdelta.testing.prefills import PLAIN, SIZES, prefill_call, sized
from flashdelta.testing.wy import CASES as WY_CASES
from flashdelta.testing.wy import make_wy
from flashdelta.tools.compile import ARCHITECTURES
from flashdelta.triton.build import build as build_triton

from ..gpu.calls import KIMI, UNBOUNDED, on_gpu
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, as_recurrent_pool, pool_call
from ..support.split_cases import LENGTHS, split_call, split_pool_call
from ..unit.test_decode import commit_call

FILE = Path(__file__).with_name("launches.tsv")

HOPPER, PORTABLE = (90,), ARCHITECTURES
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


def launches(op: Callable, call: dict, backend: str, arch: int) -> Iterable[Launch]:
    problem, t = check(op, **on_meta(call))
    return (build_hopper if backend == "hopper" else build_triton)(problem, t, arch).launches


def forward(call: dict, backend: str, arch: int) -> Iterable[Launch]:
    return launches(fd.chunk_kda if "chunk_size" in call else fd.fused_recurrent_kda, call, backend, arch)


def backward(call: dict, backend: str, arch: int) -> Iterable[Launch]:
    problem, t = check(fd.chunk_kda, **on_meta(call | {"return_intermediate_states": False}))
    o = torch.empty(t.v.shape, dtype=t.v.dtype, device=t.device)
    final = problem.results().get("final_state")
    dht = o.new_zeros(0) if final is None else o.new_empty(final.shape, dtype=final.dtype)
    problem, t = replace(problem, operation=problem.operation + BACKWARD), replace(t, do=o, dht=dht)
    return (build_hopper if backend == "hopper" else build_triton)(problem, t, arch).launches


def decode(step: Step, dtype: torch.dtype, backend: str, arch: int) -> Iterable[Launch]:
    return launches(fd.recurrent_kda, make_step(step, dtype), backend, arch)


def many_decode(step: Step, arch: int) -> Iterable[Launch]:
    """As with many sequences and heads, which alone have a kernel of Hopper's own."""
    with patch("flashdelta.hopper.decode.DECODE_FEW", 0):
        return decode(step, BF16, "hopper", arch)


def commit(call: dict, arch: int) -> Iterable[Launch]:
    return launches(fd.commit, call, "triton", arch)


def prefill(case: Case, precision: str, arch: int) -> Iterable[Launch]:
    return launches(fd.kda_prefill, prefill_call(case) | {"precision": precision}, "triton", arch)


def wy(call: dict, backend: str, arch: int) -> Iterable[Launch]:
    return launches(fd.kernels.chunk_bwd_wy_dqkg, call, backend, arch)


def in_dtype(call: dict, dtype: torch.dtype) -> dict:
    """With q, k and v in another dtype, and g and beta if they were in theirs."""
    own = call["q"].dtype
    return call | {name: call[name].to(dtype) for name in TOKEN_TENSORS if call[name].dtype == own}


def takes_hopper(case: Case) -> bool:
    return case.chunk_size == 64 and case.V >= 64


def cases() -> Iterator[tuple[str, tuple[int, ...], object]]:
    """Name, architectures, and what makes the launches for one of them."""
    models = [
        replace(model, name=f"{model.name} H{heads}", T=8192, H=heads, HV=heads)
        for model in (KIMI, UNBOUNDED)
        for heads in (4, 32, 96)
    ]
    calls = [(case, make_call(case, BF16), make_call(on_gpu(case), BF16)) for case in CASES]
    for case, call, wide in [*calls, *((model, meta_call(model), meta_call(model)) for model in models)]:
        for dtype in (BF16, FP32, torch.float16):
            name, call = f"{case.name} {str(dtype).removeprefix('torch.')}", in_dtype(call, dtype)
            yield f"chunk {name}, triton", PORTABLE, lambda arch, call=call: forward(call, "triton", arch)
            yield f"chunk {name}, triton, backward", PORTABLE, lambda arch, call=call: backward(call, "triton", arch)
            recurrent = as_recurrent(call)
            yield f"recurrent {name}, triton", PORTABLE, lambda arch, call=recurrent: forward(call, "triton", arch)
        if takes_hopper(on_gpu(case)):
            yield f"chunk {case.name}, hopper", HOPPER, lambda arch, call=wide: forward(call, "hopper", arch)
            yield f"chunk {case.name}, hopper, backward", HOPPER, lambda arch, call=wide: backward(call, "hopper", arch)
    for pool in PLAIN_POOLS + CHECKPOINT_POOLS:
        call = pool_call(pool, BF16)
        yield f"pool {pool.name}, triton", PORTABLE, lambda arch, call=call: forward(call, "triton", arch)
        if pool in PLAIN_POOLS:
            recurrent = as_recurrent_pool(call)
            yield (
                f"recurrent pool {pool.name}, triton",
                PORTABLE,
                lambda arch, call=recurrent: forward(call, "triton", arch),
            )
        if takes_hopper(on_gpu(pool.case)):
            call = pool_call(replace(pool, case=on_gpu(pool.case)), BF16)
            yield f"pool {pool.name}, hopper", HOPPER, lambda arch, call=call: forward(call, "hopper", arch)
    for parts in (2, 5, "auto"):
        calls = {str(lengths): split_call(lengths) for lengths in LENGTHS} | {"pool": split_pool_call()}
        for name, call in calls.items():
            call = call | {"split": parts}
            yield f"split {name} in {parts}, triton", PORTABLE, lambda arch, call=call: forward(call, "triton", arch)
        call = meta_call(replace(KIMI, T=8192)) | {"split": parts}
        yield f"split kimi in {parts}, hopper", HOPPER, lambda arch, call=call: forward(call, "hopper", arch)
    for step in STEPS:
        yield f"decode {step.name}, triton", PORTABLE, lambda arch, step=step: decode(step, BF16, "triton", arch)
        if step.T == 1 and step.lengths is None and step.state is not None:
            wide = replace(step, K=128, V=128, state=BF16, v_first=True)
            yield f"decode {step.name}, hopper", HOPPER, lambda arch, step=wide: many_decode(step, arch)
    for state in (FP32, BF16):
        yield f"commit {state}", PORTABLE, lambda arch, state=state: commit(commit_call(state), arch)
    sizes = [replace(sized(PLAIN, size), name=f"at {size}") for size in SIZES]
    for case in [*PREFILLS, *sizes]:
        for precision in PRECISIONS:
            yield (
                f"prefill {case.name}, {precision}",
                PORTABLE,
                lambda arch, case=case, precision=precision: prefill(case, precision, arch),
            )
    for case in WY_CASES:
        call = make_wy(case, BF16)
        yield f"wy {case.name}, triton", PORTABLE, lambda arch, call=call: wy(call, "triton", arch)
        if case.chunk_size == 64:
            call = make_wy(replace(case, K=128, V=128), BF16)
            yield f"wy {case.name}, hopper", HOPPER, lambda arch, call=call: wy(call, "hopper", arch)


def traced() -> Traces:
    """Number of launches and digest of each case, by its name."""
    found: Traces = {}
    for name, architectures, launches in cases():
        traces = [trace(launches(arch)) for arch in architectures]
        assert name not in found, name
        digest = hashlib.sha256(repr(traces).encode()).hexdigest()[:12]
        found[name] = f"{sum(map(len, traces))}\t{digest}"
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
