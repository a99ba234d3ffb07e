"""Where an engine's code is replaced: functions by name, and digests of their code as it was read. A check reads source files
and imports nothing.

    python -m flashdelta.integrations.seams vllm [FOLDER]

prints the digests of the installed package, or of the one in FOLDER, so that a version that was read can be added.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from .patches import Patches

Adapter = Callable[[Callable[..., Any], dict[str, Any]], Any]
"""Takes the engine's function and the call's arguments by name."""


@dataclass(frozen=True)
class Seam:
    """Code of an engine that was read: the function or class `name`, or `Class.method`, of `module`, wherever it is defined.

    `digests`: of each version that was read, or one of all, separated by spaces. `adapter` replaces a function; without one it
    is code that adapters rely on. `keywords`: names that a call may pass beside the parameters, to `**kwargs`. A call with
    other arguments stays the engine's.
    """

    module: str
    name: str
    digests: str
    adapter: Adapter | None = None
    keywords: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def differs(self, files: Source, version: int) -> bool:
        """Says whether it is other code than in the read version of that number."""
        known = self.digests.split()
        return files.digest(self.module, self.name) != known[version if len(known) > 1 else 0]

    def patch(self, patches: Patches, module: ModuleType) -> None:
        """Replaces it in the imported module."""
        if self.adapter is not None:
            *classes, name = self.name.split(".")
            owner = functools.reduce(getattr, classes, module)
            patches.wrap(owner, name, functools.partial(Replacement, self.adapter, keywords=self.keywords))


@dataclass(frozen=True)
class Attribute:
    """An attribute that a class of the engine gets: `Class.name` of `module`."""

    module: str
    name: str
    value: object

    def differs(self, files: Source, version: int) -> bool:
        return False

    def patch(self, patches: Patches, module: ModuleType) -> None:
        owner, name = self.name.split(".")
        patches.add(getattr(module, owner), name, self.value)


AnySeam = Seam | Attribute


class StandIn:
    """Stands for a tensor in the engine's code."""

    def tensor(self) -> Any:
        raise NotImplementedError


def real(x: Any) -> Any:
    """`x`, or the tensor that it stands for."""
    return x.tensor() if isinstance(x, StandIn) else x


class Replacement:
    """Stands for a function or method of the engine, whose signature and other attributes it keeps."""

    def __init__(self, adapter: Adapter, theirs: Callable[..., Any], keywords: str = ""):
        functools.update_wrapper(self, theirs, updated=())
        self.adapter, self.theirs = adapter, theirs
        told = [
            x for x in inspect.signature(theirs).parameters.values() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        ]
        self.names = [x.name for x in told if x.kind is not x.KEYWORD_ONLY]
        self.defaults = {x.name: x.default for x in told if x.default is not x.empty}
        self.known = frozenset((*(x.name for x in told), *keywords.split()))

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(self.names, arguments), **named)
        if not self.known.issuperset(call) or len(call) != len(arguments) + len(named):
            return self.theirs(*map(real, arguments), **{name: real(x) for name, x in named.items()})
        return self.adapter(self.theirs, self.defaults | call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.theirs, name)


# ---- source files ----------------------------------------------------------------------------------------------------


class Source:
    """Files of a package, `root` being the folder that holds it (or a path in a zip file)."""

    def __init__(self, root: Any):
        self.root = root
        self.tree = functools.cache(self._tree)

    def _tree(self, module: str) -> tuple[ast.Module, str]:
        """The module's, and its package; an empty one if there is no such file."""
        path, above = module.replace(".", "/"), module.rpartition(".")[0]
        for name, package in ((f"{path}.py", above), (f"{path}/__init__.py", module)):
            if (file := self.root / name).is_file():
                return ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), package
        return ast.Module([], []), above

    def definitions(self, module: str, name: str) -> Iterator[ast.AST]:
        """Yields what defines or assigns `name` in the module, or in those that it imports it from, anywhere in its code."""
        tree, package = self.tree(module)
        owner, _, last = name.rpartition(".")
        nodes = [tree] if not owner else [*self.definitions(module, owner)]
        for node in (x for owner_node in nodes for x in getattr(owner_node, "body", ())):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if getattr(node, "name", None) == last or any(getattr(x, "id", None) == last for x in targets):
                yield node
        for node in ast.walk(tree) if not owner else ():
            if isinstance(node, ast.ImportFrom) and any(
                x.name == name and x.asname in (None, name) for x in node.names
            ):
                yield from self.definitions(resolve_name("." * node.level + (node.module or ""), package), name)

    def digest(self, module: str, name: str) -> str | None:
        """Digest of that code; None where there is none."""
        found = [content(x) for x in self.definitions(module, name)]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else None


def content(x: Any) -> Any:
    """A syntax tree by values, the same in all Pythons: without docstrings, and without what is empty."""
    if isinstance(x, list):
        return [content(y) for y in x]
    if not isinstance(x, ast.AST):
        return x
    fields = {name: y for name, y in ast.iter_fields(x) if y is not None and y != []}
    if (
        isinstance(x, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        and ast.get_docstring(x, clean=False) is not None
    ):
        fields["body"] = x.body[1:]
    if isinstance(x, ast.JoinedStr):  # Python 3.12.1 has empty strings in formats
        fields["values"] = [y for y in x.values if getattr(y, "value", None) != ""]
    return type(x).__name__, [(name, content(y)) for name, y in fields.items()]


def folder_of(package: str) -> Path | None:
    """The folder that holds an installed package."""
    spec = find_spec(package)  # of a package: this imports nothing
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))).parent if places else None


def differences(seams: Sequence[AnySeam], root: Path | Any, version: int = -1) -> list[str]:
    """Names of the code in the package in folder `root` that is not as in the read version of that number."""
    files = Source(root)
    return [f"{seam.module}.{seam.name}" for seam in seams if seam.differs(files, version)]


def by_module(seams: Sequence[AnySeam]) -> Mapping[str, list[AnySeam]]:
    found: dict[str, list[AnySeam]] = {}
    for seam in seams:
        found.setdefault(seam.module, []).append(seam)
    return found


def main(name: str, folder: str | None = None) -> None:
    engine = import_module(f"flashdelta.integrations._{name}").ENGINE
    files = Source(Path(folder) if folder else folder_of(name))
    for seam in engine.seams:
        if hasattr(seam, "digests"):
            print(files.digest(seam.module, seam.name), seam.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
