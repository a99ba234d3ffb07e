"""Patches of an engine: each names a function or class, with digests of its code as it was read. A check reads source files
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any
from weakref import WeakSet

# ---- replaced attributes, which can be put back -------------------------------------------------------------------------


ABSENT = object()
"""Stands for an attribute that was not there."""


class Patches:
    """Patches attributes of modules or classes, and puts back what was there."""

    def __init__(self) -> None:
        self.replaced: list[tuple[ModuleType | type, str, Any, Any]] = []
        self.watches: list[Watch] = []
        self.wrappers: WeakSet[Any] = WeakSet()

    def set(self, owner: ModuleType | type, name: str, value: object) -> None:
        """Sets `name`, which may be the owner's own, inherited or new."""
        self.replaced.append((owner, name, vars(owner).get(name, ABSENT), value))
        setattr(owner, name, value)

    def wrap(self, owner: ModuleType | type, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces `name`, the owner's own, by `make` of it, unless it is a wrapper from here already: others may put one back
        after `restore`."""
        original = vars(owner)[name]
        if original not in self.wrappers:
            wrapper = make(original)
            self.wrappers.add(wrapper)
            self.set(owner, name, wrapper)

    def when_imported(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        """Calls `patch(module)` once the module of that name is imported: at once if it is."""
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            self.watches.append(Watch(name, patch))
            sys.meta_path.insert(0, self.watches[-1])

    def restore(self) -> None:
        """Puts back what is still ours; what somebody else has replaced since is left as it is."""
        for watch in self.watches:
            sys.meta_path.remove(watch)
        self.watches.clear()
        while self.replaced:
            owner, name, before, ours = self.replaced.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class Watch(MetaPathFinder):
    """Finds a module of Python source as usual, and has it patched as soon as its code has run."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]):
        self.name, self.patch = name, patch

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, Watch)]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---- patches of an engine --------------------------------------------------------------------------------------------

Adapter = Callable[[Callable[..., Any], dict[str, Any]], Any]
"""Takes the engine's function and the call's arguments by name."""


@dataclass(frozen=True)
class Patch:
    """A patch of an engine, or code that adapters rely on: the function or class `name`, or `Class.method`, of `module`,
    wherever it is defined.

    `digests`: of the versions that were read, separated by spaces; none where there is nothing to read. `adapter` replaces a
    function. `keywords`: names that a call may pass to `**kwargs` besides the parameters; a call with other arguments stays the
    engine's. `value`: an attribute that the class gets.
    """

    module: str
    name: str
    digests: str = ""
    adapter: Adapter | None = None
    keywords: str = ""
    value: object = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def differs(self, files: Source) -> bool:
        """Tells whether the code is in none of the versions that were read."""
        return bool(self.digests) and files.digest(self.module, self.name) not in self.digests.split()

    def apply(self, patches: Patches, module: ModuleType) -> None:
        """Replaces the code in the imported module."""
        *classes, name = self.name.split(".")
        owner = functools.reduce(getattr, classes, module)
        if self.adapter is not None:
            patches.wrap(owner, name, functools.partial(Replacement, self.adapter, keywords=self.keywords))
        elif self.value is not None:
            patches.set(owner, name, self.value)


class TensorProxy:
    """Stands for a tensor of states in the engine's code."""

    stored = False
    """True once the states are in their slots."""

    def __init__(self, states: Any):
        self.states = states

    def tensor(self) -> Any:
        return self.states

    def to(self, dtype: Any) -> TensorProxy:
        """Returns the same: they have the pool's."""
        return self


def real(x: Any) -> Any:
    """Returns `x`, or the tensor that it stands for."""
    return x.tensor() if isinstance(x, TensorProxy) else x


class Replacement:
    """Stands for a function or method of the engine, whose signature and other attributes it keeps."""

    def __init__(self, adapter: Adapter, original: Callable[..., Any], keywords: str = ""):
        functools.update_wrapper(self, original, updated=())
        self.adapter, self.original = adapter, original
        parameters = [x for x in inspect.signature(original).parameters.values() if x.kind not in VARIADIC]
        self.names = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
        self.defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        self.known = frozenset((*(x.name for x in parameters), *keywords.split()))

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        call = dict(zip(self.names, arguments), **named)
        if not self.known.issuperset(call) or len(call) != len(arguments) + len(named):
            return self.original(*map(real, arguments), **{name: real(x) for name, x in named.items()})
        return self.adapter(self.original, self.defaults | call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.original, name)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# ---- source files ----------------------------------------------------------------------------------------------------


class Source:
    """Files of a package, `root` being the folder that holds it (or a path in a zip file)."""

    def __init__(self, root: Any):
        self.root = root
        self.tree = functools.cache(self._tree)

    def _tree(self, module: str) -> tuple[ast.Module, str]:
        """Syntax tree of the module, and its package; an empty tree if there is no such file."""
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
            names = [x.name for x in node.names if x.asname in (None, name)] if isinstance(node, ast.ImportFrom) else ()
            if isinstance(node, ast.ImportFrom) and name in names:
                yield from self.definitions(resolve_name("." * node.level + (node.module or ""), package), name)

    def digest(self, module: str, name: str) -> str | None:
        """Digest of that code; None where there is none."""
        found = [content(x) for x in self.definitions(module, name)]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else None


DOCUMENTED = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


def content(x: Any) -> Any:
    """Values of a syntax tree, the same in all Pythons: without docstrings, and without what is empty."""
    if isinstance(x, list):
        return [content(y) for y in x]
    if not isinstance(x, ast.AST):
        return x
    fields = {name: y for name, y in ast.iter_fields(x) if y is not None and y != []}
    if isinstance(x, DOCUMENTED) and ast.get_docstring(x, clean=False) is not None:
        fields["body"] = x.body[1:]
    if isinstance(x, ast.JoinedStr):  # Python 3.12.1 has empty strings in formats
        fields["values"] = [y for y in x.values if getattr(y, "value", None) != ""]
    return type(x).__name__, [(name, content(y)) for name, y in fields.items()]


def folder_of(package: str) -> Path | None:
    """The folder that holds an installed package."""
    spec = find_spec(package)  # of a package: this imports nothing
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))).parent if places else None


def differences(patches: Sequence[Patch], root: Path | Any) -> list[str]:
    """Names of the code that the package in folder `root` has otherwise than the versions that were read."""
    files = Source(root)
    return [patch.path for patch in patches if patch.differs(files)]


def main(name: str, folder: str | None = None) -> None:
    """Prints digests of the code of an engine, or of `transformers`."""
    module = import_module(f"flashdelta.integrations._{name}")
    files = Source(Path(folder) if folder else folder_of(name))
    for patch in module.ENGINE.patches if hasattr(module, "ENGINE") else module.PATCHES:
        if patch.digests:
            print(files.digest(patch.module, patch.name), patch.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
