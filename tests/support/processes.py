"""Ranks in processes of this machine, for tests and benchmarks: each with a GPU of its own, or none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def on_processes(
    ranks: int, function: Callable[..., T], *arguments: Any, device: str = "cpu", timeout: timedelta | None = None
) -> list[T]:
    """`function(group, *arguments)` of every rank: over NCCL on the rank's GPU ("cuda"), or over gloo ("cpu").

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="flashdelta-ranks-") as name:
        folder = Path(name)
        torch.multiprocessing.spawn(_run, (ranks, folder, device, timeout, function, arguments), nprocs=ranks)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run(
    rank: int,
    ranks: int,
    folder: Path,
    device: str,
    timeout: timedelta | None,
    function: Callable[..., object],
    arguments: tuple,
) -> None:
    bound = None
    if device == "cuda":
        bound = torch.device("cuda", rank)
        torch.cuda.set_device(bound)
        # nothing here needs NVLink multicast, which not every machine has
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    dist.init_process_group(
        "gloo" if bound is None else "nccl",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        device_id=bound,
        timeout=timeout,
    )
    torch.save(function(dist.group.WORLD, *arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Who keeps the group (FLA's cache of contexts does) keeps its threads, and one that asks for the GIL while the
    # interpreter ends aborts the process.
    os._exit(0)
