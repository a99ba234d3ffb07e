"""Shared by the integrations of engines: one switch per process, and calls that a kernel runs or nobody."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..backends import KERNEL, other_vendor
from ..problem.switches import is_on
from ..runtime.call import NoKernel
from ..runtime.supports import supports
from ..runtime.warmup import warmup
from . import Status
from .patches import Patches
from .seams import AnySeam, by_module, differences, folder_of

Arguments = dict[str, Any]

MOST_NAMED = 4
"""Names of code that differs in a warning."""


@dataclass(eq=False)
class Engine:
    """An engine whose functions are replaced as its modules are imported.

    `read`: versions that `seams` have digests of. Any other is left alone, and so is one whose code differs from what was read
    (it takes half a second to see). `environment`: the variable that turns the integration off; it is read when the engine
    starts.
    """

    name: str
    environment: str
    read: tuple[str, ...]
    seams: Sequence[AnySeam]
    replaces: str
    patches: Patches = field(default_factory=Patches)
    enabled: bool = False
    warned: bool = False

    def version(self) -> str | None:
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def enable(self) -> None:
        """Lets the engine's calls run on flashdelta, in this process. Where the engine is not one that was read, warns
        once and does nothing. Does nothing either where the environment says so.

        Raises:
            ImportError: the engine is not installed.
        """
        if self.enabled or self.forbidden() is not None:
            return
        version = self.version()
        if version is None:
            raise ImportError(f"{self.name} is not installed")
        found = self.obstacle(version)
        if found is None:
            self.enabled = True
            for module, seams in by_module(self.seams).items():
                self.patches.when_imported(module, functools.partial(self._patch, seams))
        elif not self.warned:
            self.warned = True
            warnings.warn(f"flashdelta leaves {self.name} {version} as it is: {found}", stacklevel=2)

    def disable(self) -> None:
        """Leaves every call to the engine again, but for those in CUDA graphs that are captured already."""
        self.patches.restore()
        self.enabled = False

    def _patch(self, seams: Sequence[AnySeam], module: ModuleType) -> None:
        for seam in seams:
            seam.patch(self.patches, module)

    def obstacle(self, version: str) -> str | None:
        """How an installed version differs from those that were read; its files may be patched."""
        root, release = folder_of(self.name), version.partition("+")[0]
        if root is None:
            return "no source files"
        is_read = release in self.read
        nearest = release if is_read else self.read[-1]
        try:
            found = differences(self.seams, root, self.read.index(nearest))
        except SyntaxError as error:  # of a newer Python
            return f"{error.filename}: {error.msg}"
        more = f" and {len(found) - MOST_NAMED} others" if len(found) > MOST_NAMED else ""
        where = f"{nearest} as read has other code for {', '.join(found[:MOST_NAMED])}{more}" if found else None
        return where if is_read else f"the versions read are {', '.join(self.read)}; {where or 'no code differs'}"

    def forbidden(self) -> str | None:
        if not is_on(self.environment, True):
            return f"{self.environment}={os.environ[self.environment]}"
        return other_vendor()

    def status(self) -> Status:
        """Where the integration stands. Imports nothing of the engine, and turns nothing on."""
        version = self.version()
        if version is None:
            return Status(self.name, "not installed", None, f"pip install {self.name}")
        if (why := self.forbidden()) is not None:
            return Status(self.name, "off", version, why)
        if (found := self.obstacle(version)) is not None:
            return Status(self.name, "unknown version", version, found)
        if self.enabled:
            return Status(self.name, "active", version, f"replaces {self.replaces}")
        return Status(
            self.name, "possible", version, f"{self.name} turns it on as it starts, unless {self.environment}=0"
        )


def take(op: Callable[..., Any], call: Arguments) -> Any:
    """Returns the result of `op(**call)` if a kernel runs it (on a CPU the reference); None, with nothing written, if not."""
    try:
        return op(**call, backend=KERNEL)
    except NoKernel:
        return None


def runs(op: Callable[..., Any], call: Arguments) -> bool:
    """Says whether `take` would run the call. Validates it anew: for a layer that is built, not for its calls."""
    return supports(op, **call, backend=KERNEL).ok


def warm_up(op: Callable[..., Any], **options: Any) -> None:
    """`warmup`, but for calls that ours refuse, which stay the engine's. Engines build layers with gradients enabled."""
    with torch.inference_mode(), contextlib.suppress(ValueError):
        warmup(op, **options)


_rows: dict[torch.device, list[Tensor]] = {}


def first_rows(n: int, device: torch.device) -> Tensor:
    """`[n]` int32: 0, 1, 2, ... One tensor a device, but for graphs that are captured before there is one. A longer one leaves
    the others as they are: graphs read them."""
    known = _rows.setdefault(device, [])
    if known and len(known[-1]) >= n:
        return known[-1][:n]
    rows = torch.arange(max(2 * n, 1024), dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        known.append(rows)
    return rows[:n]
