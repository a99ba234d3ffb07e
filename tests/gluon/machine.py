"""The machine that a kernel runs on: CTAs and their partitions of warps, mbarriers, and what is under way.

Everything asynchronous is done as late as the kernel allows. A copy leaves poison where it goes to until the kernel has waited
for it. An MMA reads its operands in shared memory, and a store by TMA its source, when the kernel waits for them. A wait that
is missing, or a place that is written too early, shows as NaN.

Partitions are threads of which one runs at a time, until it has to wait or lets another one pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .values import Fault

Landing = Callable[[], None]
"""Puts a copy's data where they belong."""


class Partition:
    """Warps of a CTA that run one function, and what they have under way."""

    def __init__(self, cta: Cta, name: str, num_warps: int):
        self.cta, self.name, self.num_warps = cta, name, num_warps
        self.open: list[Landing] = []
        """Copies by the threads that belong to no group yet."""
        self.groups: deque[list[Landing]] = deque()
        self.mmas: deque[Callable[[], None]] = deque()
        self.stores: deque[Landing] = deque()
        """Stores by TMA."""
        self.strand: Strand | None = None

    def commit_copies(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for land in self.groups.popleft():
                land()

    def take_copies(self) -> list[Landing]:
        """All that are under way: for a barrier to wait for."""
        taken = [land for group in self.groups for land in group] + self.open
        self.groups.clear()
        self.open = []
        return taken

    def wait(self, under_way: deque, outstanding: int) -> None:
        while len(under_way) > outstanding:
            under_way.popleft()()

    def perform(self, body: Callable[[], None]) -> None:
        body()
        if self.mmas:
            raise Fault(f"{len(self.mmas)} MMAs that nobody waited for at the end of {self.name}")
        if self.stores:
            raise Fault(f"{len(self.stores)} stores by TMA that nobody waited for at the end of {self.name}")


class Cta:
    """`memories`: the tensors that the kernel was given."""

    def __init__(self, kernel: str, place: tuple[int, int], grid: tuple[int, int], num_warps: int, memories: list[Any]):
        self.place, self.grid, self.memories = place, grid, memories
        self.unfenced: set[tuple[int, int]] = set()
        """Addresses in shared memory that threads wrote, which MMAs and the TMA unit may not see yet."""
        self.main = Partition(self, f"{kernel}, CTA {place} of {grid}", num_warps)

    def fence(self) -> None:
        self.unfenced.clear()

    def check_fenced(self, begin: int, end: int, reader: str) -> None:
        if any(begin < stop and start < end for start, stop in self.unfenced):
            raise Fault(f"{reader} reads shared memory that was written without a fence_async_shared since")


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.completed = 0
        self.flying: list[Landing] = []
        """Copies that end in the current phase."""
        self.landed: list[Landing] = []
        """Copies of earlier phases, that nobody has waited for yet."""

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        if self.count == 0:
            raise Fault("an arrival on an mbarrier that was not initialised")
        if count > self.pending:
            raise Fault(f"{count} arrivals on an mbarrier that waits for {self.pending} of {self.count}")
        self.pending -= count
        self._complete()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive(1)

    def copied(self, size: int, land: Landing) -> None:
        self.bytes -= size
        self.flying.append(land)
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count
            self.landed += self.flying
            self.flying = []

    def wait(self, phase: int) -> None:
        if self.count == 0:
            raise Fault("a wait for an mbarrier that was not initialised")
        wait_until(
            lambda: self.completed & 1 != phase,
            lambda: (
                f"phase {phase} of an mbarrier: {self.completed} completed, {self.pending} of {self.count} arrivals "
                f"and {self.bytes} bytes are missing"
            ),
        )
        landed, self.landed = self.landed, []
        for land in landed:
            land()


# ---- one thing at a time -------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends a partition's thread when another one has failed."""


class Strand(threading.Thread):
    """A thread in which a partition runs."""

    def __init__(self, partition: Partition, body: Callable[[], None], pool: Pool):
        super().__init__(daemon=True)
        self.partition, self.body, self.pool = partition, body, pool
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.condition: Callable[[], bool] | None = None
        self.reason: Callable[[], str] = str
        self.stopped = self.done = False
        self.error: BaseException | None = None
        partition.strand = self

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.stopped:
                with np.errstate(all="ignore"):
                    self.partition.perform(self.body)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.back.release()

    def resume(self) -> None:
        with running(self.partition):
            self.go.release()
            self.back.acquire()
            if self.error is not None:
                raise self.error

    def pause(self) -> None:
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _Stopped

    def stop(self) -> None:
        self.stopped = True
        if not self.done:
            self.go.release()
        self.join()


class Pool:
    """Strands that run one at a time. Whenever one stops, the first of them that can go on does."""

    def __init__(self) -> None:
        self.strands: list[Strand] = []

    def add(self, partition: Partition, body: Callable[[], None], at: int | None = None) -> Strand:
        strand = Strand(partition, body, self)
        self.strands.insert(len(self.strands) if at is None else at, strand)
        strand.start()
        return strand

    def ready(self) -> Strand | None:
        return next((x for x in self.strands if not x.done and (x.condition is None or x.condition())), None)

    def run(self) -> None:
        try:
            while left := [strand for strand in self.strands if not strand.done]:
                ready = self.ready()
                if ready is None:
                    reasons = "".join(f"\n  {x.partition.name} waits for {x.reason()}" for x in left)
                    raise Fault(f"all wait for each other:{reasons}")
                ready.resume()
        finally:
            for strand in self.strands:
                strand.stop()


_current: list[Partition] = []


def now() -> Partition:
    """Which runs."""
    return _current[-1]


@contextlib.contextmanager
def running(partition: Partition) -> Iterator[None]:
    _current.append(partition)
    try:
        yield
    except Fault as error:
        raise Fault(f"{partition.name}: {error}") from error
    finally:
        _current.pop()


def wait_until(condition: Callable[[], bool], reason: Callable[[], str]) -> None:
    strand = now().strand
    while not condition():
        if strand is None:
            raise Fault(f"waits for {reason()}, alone")
        strand.condition, strand.reason = condition, reason
        strand.pause()
        strand.condition = None


def let_others_run() -> None:
    """After what another partition may wait for."""
    strand = now().strand
    if strand is not None and strand.pool.ready() is not strand:
        strand.pause()


@dataclass(frozen=True)
class Order:
    """Which of several that can go on does. `workers_first`: of a CTA's partitions the workers, which then run as far ahead as
    their barriers let them, or the default one. `last_first`: all CTAs alternate, the last of them first; else a CTA starts
    when the one before it has ended."""

    workers_first: bool = True
    last_first: bool = False


ORDER = Order()


def run_ctas(bodies: list[tuple[Cta, Callable[[], None]]]) -> None:
    if ORDER.last_first:
        pool = Pool()
        for cta, body in bodies[::-1]:
            pool.add(cta.main, body)
        pool.run()
    else:  # each needs no thread of its own
        for cta, body in bodies:
            with running(cta.main), np.errstate(all="ignore"):
                cta.main.perform(body)


def run_partitions(partitions: Sequence[tuple[Partition, Callable[[], None]]]) -> None:
    """The first is the default one."""
    own = now().strand
    pool, at = (Pool(), 0) if own is None else (own.pool, own.pool.strands.index(own))
    ordered = partitions if ORDER.workers_first else partitions[::-1]
    # each before those that were added before it
    strands = [pool.add(partition, body, at) for partition, body in ordered]
    if own is None:
        pool.run()
    else:
        wait_until(lambda: all(strand.done for strand in strands), lambda: "its partitions")
