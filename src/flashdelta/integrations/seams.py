"""Where an engine's code is replaced: by name, read from its source files, so that a check imports nothing."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from .patches import Patches

Adapter = Callable[[Callable[..., Any], dict[str, Any]], Any]
"""Of the engine's function and the call's arguments by name."""


@dataclass(frozen=True)
class Seam:
    """A function of the engine that is replaced, or that is called where `adapter` is None: `name`, or `Class.method`, of
    `module`.

    `parameters`: those it has where it is defined, in order, separated by spaces. `source`: the module that defines it, if
    `module` only imports it, anywhere in its code. `keywords`: what callers pass to its `**kwargs`. A call with other
    arguments stays the engine's.
    """

    module: str
    name: str
    adapter: Adapter | None
    parameters: str
    source: str | None = None
    keywords: str = ""

    def patch(self, patches: Patches, module: ModuleType) -> None:
        if self.adapter is not None:
            *classes, name = self.name.split(".")
            owner = functools.reduce(getattr, classes, module)
            patches.set(owner, name, Replacement(self.adapter, self, vars(owner)[name]))


@dataclass(frozen=True)
class Wrapper(Seam):
    """The same of a name that `source` assigns, which tells no parameters: callers pass `keywords`."""


@dataclass(frozen=True)
class Attribute:
    """An attribute that a class of the engine gets: `Class.name` of `module`."""

    module: str
    name: str
    value: object

    def patch(self, patches: Patches, module: ModuleType) -> None:
        owner, name = self.name.split(".")
        patches.add(getattr(module, owner), name, self.value)


@dataclass(frozen=True)
class Statement:
    """Code that a function of the engine must have for a seam to do what it should, as `ast.unparse` writes it."""

    module: str
    name: str
    text: str

    def patch(self, patches: Patches, module: ModuleType) -> None:
        """Nothing."""


AnySeam = Seam | Attribute | Statement


class Replacement:
    """Stands for a function or method of the engine, whose other attributes it keeps."""

    def __init__(self, adapter: Adapter, seam: Seam, theirs: Callable[..., Any]):
        functools.update_wrapper(self, theirs, updated=())
        self.adapter, self.theirs = adapter, theirs
        self.parameters = tuple(seam.parameters.split())
        self.known = {*self.parameters, *seam.keywords.split()}

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(self.parameters, arguments), **named)
        if not self.known.issuperset(call) or len(call) != len(arguments) + len(named):
            return self.theirs(*arguments, **named)
        return self.adapter(self.theirs, call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


# ---- against source files --------------------------------------------------------------------------------------------


class Source:
    """Files of a package, `root` being the folder that holds it (or a path in a zip file)."""

    def __init__(self, root: Any):
        self.root = root
        self.trees: dict[str, tuple[ast.Module, bool] | None] = {}

    def tree(self, module: str) -> tuple[ast.Module, bool] | None:
        """The module's, and whether it is a package; None if there is no such file."""
        if module not in self.trees:
            path = module.replace(".", "/")
            files = ((f"{path}.py", False), (f"{path}/__init__.py", True))
            found = ((self.root / name, is_package) for name, is_package in files)
            there = next(((file, is_package) for file, is_package in found if file.is_file()), None)
            if there is not None:
                file, is_package = there
                there = ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), is_package
            self.trees[module] = there
        return self.trees[module]

    def definition(self, module: str, name: str) -> ast.AST | None:
        """Of a function, class, `Class.method`, or of what a package takes from its own modules."""
        found = self.tree(module)
        node: ast.AST | None = None if found is None else found[0]
        for part in name.split("."):
            body = getattr(node, "body", ())
            node = next((x for x in body if isinstance(x, DEFINITIONS) and x.name == part), None)
        if node is None:
            place = next((place for place, imported in self.imports(module) if imported == name), None)
            return None if place is None else self.definition(place, name)
        return node

    def imports(self, module: str) -> Iterator[tuple[str, str]]:
        """Modules and the names that are taken from them, anywhere in the code."""
        found = self.tree(module)
        if found is None:
            return
        tree, is_package = found
        package = module if is_package else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from ((base, alias.name) for alias in node.names if alias.asname in (None, alias.name))

    def assigns(self, module: str, name: str) -> bool:
        found = self.tree(module)
        nodes = () if found is None else found[0].body
        return any(ast.unparse(x) == name for node in nodes if isinstance(node, ast.Assign) for x in node.targets)

    def difference(self, seam: AnySeam) -> str | None:
        """How the source differs from what the seam was written for."""
        module, path = seam.module, f"{seam.module}.{seam.name}"
        if isinstance(seam, Statement):
            found = self.definition(module, seam.name)
            return None if found is not None and seam.text in ast.unparse(found) else f"{path} lacks {seam.text}"
        if isinstance(seam, Attribute):
            return None if self.definition(module, seam.name.split(".")[0]) else f"no {path.rpartition('.')[0]}"
        if seam.source is not None:
            if (seam.source, seam.name) not in self.imports(module):
                return f"{module} takes no {seam.name} from {seam.source}"
            module = seam.source
        if isinstance(seam, Wrapper):
            return None if self.assigns(module, seam.name) else f"{module} assigns no {seam.name}"
        node = self.definition(module, seam.name)
        if not isinstance(node, ast.FunctionDef):
            return f"no {path}"
        arguments = node.args
        names = [x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if names != seam.parameters.split():
            return f"{path} has parameters {', '.join(names)}"
        if seam.keywords and arguments.kwarg is None:
            return f"{path} takes no other arguments by name"
        return None


DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def differences(seams: Sequence[AnySeam], root: Path | Any) -> list[str]:
    """Of the package in folder `root` from what the seams were written for."""
    source = Source(root)
    return [difference for seam in seams if (difference := source.difference(seam)) is not None]


def by_module(seams: Sequence[AnySeam]) -> Mapping[str, list[AnySeam]]:
    found: dict[str, list[AnySeam]] = {}
    for seam in seams:
        found.setdefault(seam.module, []).append(seam)
    return found
