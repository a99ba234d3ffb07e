"""What a function does, as a hash: comments, docstrings, line numbers, annotations and names of locals do not count.

Read from the source alone, and the same under every Python that the package supports.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import symtable
from collections.abc import Iterator
from pathlib import Path

MODULE = "<module>"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IGNORED = ("ctx", "kind", "type_comment", "returns")


class Module:
    """`functions`: the fingerprint of every outermost function and method by qualified name, and of `MODULE`, which is what
    remains without them."""

    def __init__(self, source: str) -> None:
        tree, lines = ast.parse(source), source.split("\n")
        self._found = [*_functions(tree)]
        texts = {MODULE: [_Dump({}).text(tree)]}
        for name, node in self._found:
            own = "if True:\n" * (node.col_offset > 0) + "\n".join(lines[node.lineno - 1 : node.end_lineno])
            texts.setdefault(name, []).append(_Dump(_locals(own), node).text(node))
        self.functions = {name: hash_of("".join(own)) for name, own in texts.items()}

    def name_at(self, line: int) -> str:
        """Which of the functions the code object that starts at `line` belongs to."""
        for name, node in self._found:
            if min(x.lineno for x in (node, *node.decorator_list)) <= line <= node.end_lineno:
                return name
        return MODULE


@functools.cache
def module(path: Path) -> Module:
    return Module(path.read_text(encoding="utf-8"))


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _locals(source: str) -> dict[str, str]:
    """The variables of a function and of those within it whose names mean nothing else in any of them, each to be renamed."""
    found, others, tables = set(), set(), [symtable.symtable(source, "", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for x in table.get_symbols():
            named = x.is_parameter() or x.is_imported() or x.is_namespace()  # callers may name parameters
            variable = table.get_type() == "function" and x.is_local() and not named
            if not x.is_free():
                (found if variable else others).add(x.get_name())
    return dict.fromkeys(found - others, "")


class _Dump:
    """A module's text, or with `function` that of one in it, with its `names` replaced by numbers as they appear."""

    def __init__(self, names: dict[str, str], function: ast.AST | None = None) -> None:
        self.names, self.function, self.count = names, function, 0

    def text(self, x: object, field: str = "") -> str:
        if isinstance(x, list):
            return "[" + ",".join(filter(None, (self.text(item, field) for item in x))) + "]"
        if not isinstance(x, ast.AST):
            # `repr` shows as they are the characters that its Python knows
            return ascii(self.renamed(x) if field in ("id", "name", "names", "rest") else x)
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant):
            return ""  # a docstring, or a constant's
        if self.function is None and isinstance(x, FUNCTIONS):
            # in a class or among tests a name is enough to be called
            return x.name if field == "ClassDef" or x.name.startswith(("test_", "pytest_")) else ""
        if self.function is not None and isinstance(x, ast.AnnAssign):
            return self.text(ast.Assign([x.target], x.value)) if x.value else ""
        if isinstance(x, ast.arg):  # of annotations this one counts, as Triton reads it
            return f"{x.arg}:{x.annotation is not None and 'constexpr' in ast.dump(x.annotation)}"
        kind, shown = type(x).__name__, ""
        for name in x._fields:
            value = getattr(x, name, None)
            if kind == "JoinedStr":  # Python 3.12 has empty texts in some
                value = [part for part in value if getattr(part, "value", None) != ""]
            # empty fields are left out: which there are differs from one Python to the next
            if name not in IGNORED and (kind == "Constant" or value not in (None, [])):
                shown += f"{name}={self.text(value, 'ClassDef' if (kind, name) == ('ClassDef', 'body') else name)},"
        return f"{kind}({shown})"

    def renamed(self, name: str) -> str:
        if self.names.get(name) == "":
            self.names[name] = f"${self.count}"
            self.count += 1
        return self.names.get(name, name)
