"""Integrations of frameworks: one switch per process, and calls that a kernel runs or nobody."""

import logging
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
from ..runtime.warmup import warmup
from . import Status
from .seams import Patch, Patches, differences, folder_of

Arguments = dict[str, Any]

MAX_NAMED = 4
"""Names of code that differs in a warning."""


@dataclass(eq=False, kw_only=True)
class Integration:
    """A framework whose calls can run on flashdelta.

    `environment`: the variable that turns the integration off. `replaces`, `way`: what is replaced, and how it is turned on.
    `package`: what pip calls it, where that is another name.
    """

    name: str
    environment: str
    replaces: str
    way: str
    package: str = ""
    applied: Patches = field(default_factory=Patches)
    enabled: bool = False
    warned: bool = False

    def version(self) -> str | None:
        """The version that is installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def obstacle(self, version: str) -> str | None:
        """Says how the framework differs from what this was written for."""

    def apply(self) -> None:
        """Replaces the framework's code."""

    def enable(self) -> None:
        """Lets the framework's calls run on flashdelta, in this process. Where it is not what this was written for, warns once
        and does nothing.

        Raises:
            ImportError: the framework is not installed.
        """
        if self.enabled:
            return
        version = self.version()
        if version is None:
            raise ImportError(f"{self.name} is not installed")
        found = self.obstacle(version)
        if found is None:
            self.enabled = True
            self.apply()
        elif not self.warned:
            self.warned = True
            warnings.warn(f"flashdelta leaves {self.name} {version} as it is: {found}", stacklevel=3)

    def disable(self) -> None:
        """Leaves every call to the framework again, but for those in CUDA graphs that are captured already."""
        self.applied.restore()
        self.enabled = False

    def forbidden(self) -> str | None:
        """Says what turns the integration off."""
        if not is_on(self.environment, True):
            return f"{self.environment}={os.environ[self.environment]}"
        return other_vendor()

    def status(self) -> Status:
        """Says where the integration stands. Turns nothing on."""
        version = self.version()
        if version is None:
            return Status(self.name, "not installed", None, f"pip install {self.package or self.name}")
        if (why := self.forbidden()) is not None:
            return Status(self.name, "off", version, why)
        if (found := self.obstacle(version)) is not None:
            return Status(self.name, "unknown version", version, found)
        if self.enabled:
            return Status(self.name, "active", version, f"replaces {self.replaces}")
        return Status(self.name, "possible", version, self.way)


@dataclass(eq=False, kw_only=True)
class Engine(Integration):
    """An engine whose functions are replaced as its modules are imported. It turns its integration on as it starts.

    `read`: versions that `patches` have digests of. Any other is left alone, and so is one whose code differs from what was
    read (it takes half a second to see).
    """

    read: tuple[str, ...]
    patches: Sequence[Patch]
    way: str = ""

    def __post_init__(self) -> None:
        self.way = f"{self.name} turns it on as it starts, unless {self.environment}=0"

    def enable(self) -> None:
        """Lets the engine's calls run on flashdelta, in this process. Does nothing where the environment says so, and warns
        once where the engine is not one that was read.

        Raises:
            ImportError: the engine is not installed.
        """
        if self.forbidden() is None:
            super().enable()

    def apply(self) -> None:
        for module in dict.fromkeys(patch.module for patch in self.patches):
            self.applied.when_imported(module, self._patch)

    def _patch(self, module: ModuleType) -> None:
        for patch in self.patches:
            if patch.module == module.__name__:
                patch.apply(self.applied, module)

    def obstacle(self, version: str) -> str | None:
        """Says how an installed version differs from those that were read; its files may be patched."""
        root = folder_of(self.name)
        if root is None:
            return "no source files"
        try:
            found = differences(self.patches, root)
        except SyntaxError as error:  # of a newer Python
            return f"{error.filename}: {error.msg}"
        more = f" and {len(found) - MAX_NAMED} others" if len(found) > MAX_NAMED else ""
        other = f"other code than was read: {', '.join(found[:MAX_NAMED])}{more}" if found else None
        is_read = version.partition("+")[0] in self.read
        return other if is_read else f"the versions read are {', '.join(self.read)}; {other or 'no code differs'}"


def take(op: Callable[..., Any], call: Arguments) -> Any:
    """Returns the result of `op(**call)` if a kernel runs it (on a CPU the reference); None, with nothing written, if not."""
    try:
        return op(**call, backend=KERNEL)
    except NoKernel:
        return None


def warm_up(op: Callable[..., Any], **options: Any) -> None:
    """Calls `warmup`. What ours refuse stays the engine's, which the log says. Engines build layers with gradients enabled."""
    with torch.inference_mode():
        try:
            warmup(op, **options)
        except ValueError as error:
            logging.getLogger("flashdelta").warning("calls of %s are not all compiled ahead: %s", op.__name__, error)


_rows: dict[torch.device, list[Tensor]] = {}


def first_rows(n: int, device: torch.device) -> Tensor:
    """Returns `[n]` int32: 0, 1, 2, ... from one tensor per device, but for graphs that are captured before there is one. A
    longer one leaves the others as they are: graphs read them."""
    known = _rows.setdefault(device, [])
    if known and len(known[-1]) >= n:
        return known[-1][:n]
    rows = torch.arange(max(2 * n, 1024), dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        known.append(rows)
    return rows[:n]
