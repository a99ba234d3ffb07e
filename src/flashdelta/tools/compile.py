"""Compiles a launch's kernel for any GPU on a machine without one."""

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any

import torch
from triton._utils import canonicalize_dtype
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..program.launch import Launch
from ..program.plan import Plan


def only_launches(plan: Plan) -> list[Launch]:
    """Returns the launches, without exchanges between ranks."""
    return [step for step in plan.launches if isinstance(step, Launch)]


def source(launch: Launch) -> ASTSource | GluonASTSource:
    """The kernel with the types and alignments of the launch's arguments."""
    signature, constants, attributes = {}, dict(launch.constants), {}
    for i, (param, x) in enumerate(zip(launch.kernel.params, launch.arguments)):
        if x is None:
            constants[param.name] = None
        elif isinstance(x, torch.Tensor):
            signature[param.name] = f"*{canonicalize_dtype(x.dtype)}"
        elif isinstance(x, TensorDescriptor):
            signature[param.name] = f"tensordesc<{canonicalize_dtype(x.base.dtype)}{list(x.block_shape)},{x.layout!r}>"
        elif isinstance(x, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = param.annotation_type or "i32"
        address = x.data_ptr() if isinstance(x, torch.Tensor) else x
        aligned = isinstance(address, int) and address % 16 == 0
        if aligned and not param.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    order = {p.name: signature.get(p.name, "constexpr") for p in launch.kernel.params}
    kind = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return kind(launch.kernel, order, constants, attributes)


def in_processes(work: Callable[..., Any], tasks: Sequence[tuple], jobs: int) -> Iterator[Any]:
    """`work(*task)` of every task in order, `jobs` at a time."""
    if min(jobs, len(tasks)) <= 1:
        yield from itertools.starmap(work, tasks)
        return
    others = set(active_children())
    # not forked: PyTorch has threads. Ctrl-C, which each would answer with a traceback, ends them through this one
    deaf = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn"), *deaf)
    try:
        yield from pool.map(work, *zip(*tasks))
    except BaseException:  # Ctrl-C among them: what is being compiled is not waited for
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
