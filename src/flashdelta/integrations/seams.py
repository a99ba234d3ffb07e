"""Where an engine's code is replaced: by name, read from its source files, so that a check imports nothing."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from .patches import Patches

Adapter = Callable[[Callable[..., Any], dict[str, Any]], Any]
"""Of the engine's function and the call's arguments by name."""


@dataclass(frozen=True)
class AnySeam:
    """What an integration wants of `name` in `module` of an engine. It is checked by source files; what replaces nothing only
    that."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def patch(self, patches: Patches, module: ModuleType) -> None:
        """Replaces it in the imported module."""

    def difference(self, files: Source) -> str | None:
        """How the source differs from what this was written for."""
        raise NotImplementedError


@dataclass(frozen=True)
class Seam(AnySeam):
    """A function of the engine that is replaced, or that is called where `adapter` is None: `name`, or `Class.method`, of
    `module`.

    `parameters`: those it has where it is defined, in order, separated by spaces, with their defaults (`scale=None`): adapters
    get them for what a call leaves out. `source`: the module that defines it, if `module` only imports it, anywhere in its
    code. `keywords`: what callers pass to its `**kwargs`. `callers`: modules, beside its own, whose code calls it. A call with
    other arguments stays the engine's.
    """

    adapter: Adapter | None
    parameters: str
    source: str | None = None
    keywords: str = ""
    callers: tuple[str, ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of its parameters."""
        return tuple(x.partition("=")[0] for x in self.parameters.split())

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        parts = (x.partition("=") for x in self.parameters.split())
        return {name: ast.literal_eval(value) for name, is_optional, value in parts if is_optional}

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """Names of all arguments that a call may have."""
        return frozenset((*self.names, *self.keywords.split()))

    def patch(self, patches: Patches, module: ModuleType) -> None:
        if self.adapter is not None:
            *classes, name = self.name.split(".")
            owner = functools.reduce(getattr, classes, module)
            patches.set(owner, name, Replacement(self.adapter, self, vars(owner)[name]))

    def difference(self, files: Source) -> str | None:
        for caller in (self.module, *self.callers):
            for passed in files.passed(caller, self.name):
                if (wrong := self.misfit(passed)) is not None:
                    return f"{caller} passes {wrong} to {self.name}"
        if self.source is not None and (self.source, self.name) not in files.imports(self.module):
            return f"{self.module} takes no {self.name} from {self.source}"
        return self.misdefined(files, self.source or self.module)

    def misfit(self, passed: set[str]) -> str | None:
        """Names that a call passes and should not."""
        return ", ".join(sorted(passed - self.known)) or None

    def misdefined(self, files: Source, module: str) -> str | None:
        node = files.definition(module, self.name)
        if not isinstance(node, ast.FunctionDef):
            return f"no {self.path}"
        if (theirs := parameters(node.args)) != self.parameters.split():
            return f"{self.path} has parameters {', '.join(theirs)}"
        if self.keywords and node.args.kwarg is None:
            return f"{self.path} takes no other arguments by name"
        return None


@dataclass(frozen=True)
class Wrapper(Seam):
    """The same of a name that `source` assigns, which tells no parameters: callers pass `keywords`, all of them."""

    def misfit(self, passed: set[str]) -> str | None:
        missing = ", ".join(sorted(self.known - passed))
        return super().misfit(passed) or (f"no {missing}" if missing else None)

    def misdefined(self, files: Source, module: str) -> str | None:
        return None if files.assigns(module, self.name) else f"{module} assigns no {self.name}"


@dataclass(frozen=True)
class Attribute(AnySeam):
    """An attribute that a class of the engine gets: `Class.name` of `module`."""

    value: object

    def patch(self, patches: Patches, module: ModuleType) -> None:
        owner, name = self.name.split(".")
        patches.add(getattr(module, owner), name, self.value)

    def difference(self, files: Source) -> str | None:
        owner = self.name.split(".")[0]
        return None if files.definition(self.module, owner) else f"no {self.module}.{owner}"


@dataclass(frozen=True)
class Statement(AnySeam):
    """Code that a function of the engine must have for a seam to do what it should, as `ast.unparse` writes it."""

    text: str

    def difference(self, files: Source) -> str | None:
        found = files.definition(self.module, self.name)
        return None if found is not None and self.text in written(found) else f"{self.path} lacks {self.text}"


@dataclass(frozen=True)
class Uses(AnySeam):
    """What a function of the engine may do with its local variable `variable`, of which something else may be the value: as
    `use_of` writes it, separated by semicolons."""

    variable: str
    text: str

    def difference(self, files: Source) -> str | None:
        found = files.definition(self.module, self.name)
        if found is None:
            return f"no {self.path}"
        others = uses(found, self.variable) - {*self.text.split("; ")}
        return f"{self.path} uses {self.variable} otherwise: {'; '.join(sorted(others))}" if others else None


@dataclass(frozen=True)
class Fields(AnySeam):
    """What adapters read of objects of class `name` of the engine: attributes that it or its bases set, or methods."""

    text: str

    def difference(self, files: Source) -> str | None:
        lacks = {*self.text.split()} - files.fields(self.module, self.name)
        return f"{self.path} lacks {', '.join(sorted(lacks))}" if lacks else None


class StandIn:
    """Of a tensor, in the engine's code."""

    def tensor(self) -> Any:
        raise NotImplementedError


def real(x: Any) -> Any:
    """`x`, or the tensor that it stands for."""
    return x.tensor() if isinstance(x, StandIn) else x


class Replacement:
    """Stands for a function or method of the engine, whose other attributes it keeps."""

    def __init__(self, adapter: Adapter, seam: Seam, theirs: Callable[..., Any]):
        functools.update_wrapper(self, theirs, updated=())
        self.adapter, self.theirs, self.seam = adapter, theirs, seam

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(self.seam.names, arguments), **named)
        if not self.seam.known.issuperset(call) or len(call) != len(arguments) + len(named):
            return self.theirs(*map(real, arguments), **{name: real(x) for name, x in named.items()})
        return self.adapter(self.theirs, self.seam.defaults | call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # of a copy that is being made
            raise AttributeError(name)
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
        return self.place(module, name)[1]

    def place(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        """The module that has the definition, and that."""
        found = self.tree(module)
        node: ast.AST | None = None if found is None else found[0]
        for part in name.split("."):
            body = getattr(node, "body", ())
            node = next((x for x in body if isinstance(x, DEFINITIONS) and x.name == part), None)
        if node is None:
            place = next((place for place, imported in self.imports(module) if imported == name), None)
            return (module, None) if place is None else self.place(place, name)
        return module, node

    def fields(self, module: str, name: str) -> set[str]:
        """Attributes that the methods of a class set, its own ones, and those of its bases as far as they are found."""
        module, node = self.place(module, name)
        if not isinstance(node, ast.ClassDef):
            return set()
        found = stored(node)
        for x in node.body:
            if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
                found.add(x.name)
            elif isinstance(x, ast.AnnAssign):
                found.add(ast.unparse(x.target))
        for base in node.bases:
            found |= self.fields(module, ast.unparse(base))
        return found

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

    def passed(self, module: str, name: str) -> list[set[str]]:
        """Names of the arguments of each call of a function or method in the module's code."""
        found, last = self.tree(module), name.split(".")[-1]
        nodes = ast.walk(found[0]) if found is not None and not last.endswith("__") else ()
        calls = (x for x in nodes if isinstance(x, ast.Call) and ast.unparse(x.func).split(".")[-1] == last)
        return [{x.arg for x in call.keywords if x.arg is not None} for call in calls]


DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def parameters(arguments: ast.arguments) -> list[str]:
    """Those that a call may name, with their defaults."""
    required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    defaults = [*[None] * required, *arguments.defaults][len(arguments.posonlyargs) :]
    pairs = [*zip(arguments.args, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return [x.arg if default is None else f"{x.arg}={ast.unparse(default)}" for x, default in pairs]


def written(node: ast.AST) -> str:
    """By `ast.unparse` as of Python 3.11: 3.10 has parentheses around names that values are unpacked to."""
    return re.sub(r"(?m)^( *)\(([^()]*)\) = ", r"\1\2 = ", ast.unparse(node))


def stored(node: ast.AST) -> set[str]:
    """Attributes of `self` that are set."""
    return {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"
    }


def uses(node: ast.AST, variable: str) -> set[str]:
    """What becomes of a variable's value."""
    parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    loads = (x for x in parents if isinstance(x, ast.Name) and x.id == variable and isinstance(x.ctx, ast.Load))
    return {use_of(parents[x]) for x in loads}


def use_of(parent: ast.AST) -> str:
    if isinstance(parent, ast.keyword):
        return f"{parent.arg}="
    if isinstance(parent, ast.Attribute):
        return f".{parent.attr}"
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        return "pool[...] ="
    return ast.unparse(parent.func if isinstance(parent, ast.Call) else parent)


def differences(seams: Sequence[AnySeam], root: Path | Any) -> list[str]:
    """Of the package in folder `root` from what the seams were written for."""
    files = Source(root)
    return [difference for seam in seams if (difference := seam.difference(files)) is not None]


def obstacle(package: str, seams: Sequence[AnySeam]) -> str | None:
    """How an installed package differs from those that were read: one of a version that was read, too, as it may be patched."""
    spec = find_spec(package)  # of a package: this imports nothing
    if spec is None or not spec.submodule_search_locations:
        return "no source files"
    root = Path(next(iter(spec.submodule_search_locations))).parent
    try:
        return "; ".join(differences(seams, root)) or None
    except SyntaxError as error:  # of a newer Python
        return f"{error.filename}: {error.msg}"


def by_module(seams: Sequence[AnySeam]) -> Mapping[str, list[AnySeam]]:
    found: dict[str, list[AnySeam]] = {}
    for seam in seams:
        found.setdefault(seam.module, []).append(seam)
    return found
