"""Ranks in one process, for tests: each is a thread, and one runs at a time, up to its next exchange."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

_serials = itertools.count()


class _Meeting:
    """Where the ranks of a virtual group meet. `turn` is held by the one that runs; `arrived` wait for the others. Rank `late`
    is slower than they are: see `let_pass`."""

    def __init__(self, ranks: int, late: int | None):
        self.late = late
        self.signals: set[tuple[int, int, int, int]] = set()
        self.unready: dict[int, Callable[[], bool]] = {}
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(ranks)
        self.packets: list[Any] = [None] * ranks
        self.arrived = self.left = 0

    def wait(self) -> None:
        self.arrived = (self.arrived + 1) % len(self.packets)
        self.check()
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def until(self, rank: int, ready: Callable[[], bool]) -> None:
        """Others run until they have made it so."""
        self.unready[rank] = lambda: not ready()
        while not ready():
            if self.stuck() == len(self.packets):
                raise RuntimeError("an exchange that another rank does not come to")
            self.let_run()
        del self.unready[rank]

    def stuck(self) -> int:
        """Ranks that can't go on, or have left."""
        return self.arrived + self.left + sum(unready() for unready in self.unready.values())

    def let_pass(self, rank: int) -> None:
        """The late rank goes on from here when the others have done all that they can without it."""
        while rank == self.late and self.stuck() < len(self.packets) - 1:
            self.let_run()

    def let_run(self) -> None:
        self.turn.release()
        time.sleep(1e-4)
        self.turn.acquire()
        if self.barrier.broken:
            raise threading.BrokenBarrierError

    def leave(self) -> None:
        self.left += 1
        self.check()

    def check(self) -> None:
        if self.left > 0 and self.arrived > 0:
            raise RuntimeError("an exchange that another rank does not come to")


class _Done(Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Shared:
    """Memory that ranks share, instead of PyTorch's symmetric memory."""

    def __init__(self, meeting: _Meeting, rank: int, buffers: Sequence[Tensor]):
        self.meeting, self.rank, self.buffers = meeting, rank, buffers
        self.name = buffers[0].data_ptr()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        flat = self.buffers[rank].view(dtype)[storage_offset:]
        return flat[: torch.Size(sizes).numel()].view(*sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for signals of the channel that `put_signal` and `wait_signal` have, too: one to each other rank and one from
        it, for all of these at once."""
        meeting, signals = self.meeting, self.meeting.signals
        # the signals of each other rank that are left to do: to it, then from it
        left = {
            peer: [self._signal(channel, self.rank, peer), self._signal(channel, peer, self.rank)]
            for peer in range(len(self.buffers))
            if peer != self.rank
        }

        def can(peer: int) -> bool:
            # a signal is sent once the one before has been taken, and taken once it is there
            return (left[peer][0] in signals) == (len(left[peer]) == 1)

        while left:
            meeting.until(self.rank, lambda: any(map(can, left)))
            for peer in [*filter(can, left)]:
                signals ^= {left[peer].pop(0)}
                if not left[peer]:
                    del left[peer]
        meeting.let_pass(self.rank)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        signal, signals = self._signal(channel, self.rank, dst_rank), self.meeting.signals
        self.meeting.until(self.rank, lambda: signal not in signals)
        signals.add(signal)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        signal, signals = self._signal(channel, src_rank, self.rank), self.meeting.signals
        self.meeting.until(self.rank, lambda: signal in signals)
        signals.remove(signal)
        self.meeting.let_pass(self.rank)

    def _signal(self, channel: int, src_rank: int, dst_rank: int) -> tuple[int, int, int, int]:
        return self.name, channel, src_rank, dst_rank


class VirtualRank(ProcessGroup):
    """A process group of which this process is every rank. It has an all-gather, memory that all ranks share, and nothing
    else."""

    def __init__(self, rank: int, ranks: int, meeting: _Meeting):
        super().__init__(rank, ranks)
        self.place, self.meeting = rank, meeting
        self.own_name = f"virtual_{next(_serials)}"
        torch._C._distributed_c10d._register_process_group(self.own_name, self)

    @property
    def group_name(self) -> str:
        return self.own_name

    def _allgather_base(self, packets: Tensor, packet: Tensor, opts: Any = None) -> Work:
        meeting = self.meeting
        meeting.packets[self.place] = packet
        meeting.wait()
        shapes = {x.shape for x in meeting.packets}
        if len(shapes) > 1:
            raise RuntimeError(f"an exchange of packets of shapes {sorted(map(list, shapes))}")
        with torch.no_grad():
            for to, x in zip(packets.view(len(meeting.packets), *packet.shape), meeting.packets):
                to.copy_(x)
        meeting.wait()
        return _Done()

    all_gather_single = _allgather_base

    def share(self, own: Tensor) -> _Shared:
        """The memory of all ranks, of which this one brings its `own`."""
        meeting = self.meeting
        meeting.packets[self.place] = own
        meeting.wait()
        buffers = [*meeting.packets]
        meeting.wait()
        return _Shared(meeting, self.place, buffers)


def on_ranks(ranks: int, function: Callable[[VirtualRank], T], late: int | None = None) -> list[T]:
    """`function(group)` of every rank of a virtual group; raises what one of them raises first. Rank `late` does what comes
    after a barrier of shared memory when the others wait at the next one."""
    meeting = _Meeting(ranks, late)
    groups = [VirtualRank(r, ranks, meeting) for r in range(ranks)]
    found: list[Any] = [None] * ranks
    failures: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def run(r: int) -> None:
        # GPU work of a backward pass runs in this thread too: in autograd's own, ranks would wait for each other
        with meeting.turn, torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad):
            try:
                found[r] = function(groups[r])
                meeting.leave()
            except threading.BrokenBarrierError:
                pass
            except BaseException as failure:
                failures.append(failure)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        torch._C._distributed_c10d._unregister_process_group(group.own_name)
    if failures:
        raise failures[0]
    return found
