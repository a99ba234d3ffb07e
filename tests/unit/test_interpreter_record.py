"""Which interpreter tests run: fingerprints of functions, the record, and the groups."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from ..interpreter import record
from ..interpreter.fingerprints import MODULE, Module
from ..interpreter.groups import FOLDER, GROUPS, SMOKE, chosen, parsed, selection, selector_of

SOURCE = '''
"""A module."""
import triton

BLOCK = 64  # rows


class Kernel:
    """A class."""

    rows: int = 4

    def run(self, x):
        return x


@triton.jit(debug=False)
def scale(x, n, C: tl.constexpr, by: float = 2.0):
    """Doubles."""
    total = 0
    for i in range(n):
        row = x + i * C
        total += tl.load(row) * by
    names = [name for name in "ab"]
    f = lambda x: f"{total:{n}} {x}" + names[0]
    return total, f
'''
SCALE, RUN = "scale", "Kernel.run"


def changed(old: str, new: str) -> set[str]:
    """The functions whose fingerprint changes with the text."""
    assert old in SOURCE
    before, after = (Module(text).functions for text in (SOURCE, SOURCE.replace(old, new)))
    return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # rows", "  # rows of a block"),
        ('"""Doubles."""', '"""Doubles\n    it."""'),
        ('    """Doubles."""\n', ""),
        ('"""A class."""', '"""One."""'),
        ("total", "result"),
        ("row = x + i * C\n        total += tl.load(row)", "place = x + i * C\n        total += tl.load(place)"),
        ("by: float", "by: int"),
        ("total = 0", "total: int = 0"),
        ("name for name", "letter for letter"),
        ("BLOCK = 64", "\n\n\nBLOCK = (64)"),
        ("* by", "* \\\n            by"),
        (
            "def scale(x, n, C: tl.constexpr, by: float = 2.0):",
            "def scale(\n    x, n, C: tl.constexpr, by=2.0\n) -> int:",
        ),
    ],
)
def test_what_changes_nothing_is_not_seen(old: str, new: str):
    assert changed(old, new) == set()


@pytest.mark.parametrize(
    ("old", "new", "functions"),
    [
        ("i * C", "i + C", {SCALE}),
        ("tl.load(row)", "tl.load(x)", {SCALE}),
        ("range(n)", "range(C)", {SCALE}),
        ("total = 0", "total = 1", {SCALE}),
        ("debug=False", "debug=True", {SCALE}),
        ("@triton.jit(debug=False)\n", "", {SCALE}),
        ("= 2.0", "= 3.0", {SCALE}),
        ("C: tl.constexpr", "C", {SCALE}),
        (", by: ", ", *, by: ", {SCALE}),
        ("n, C", "m, C", {SCALE}),
        ("names[0]", "name[0]", {SCALE}),
        ("return x", "return -x", {RUN}),
        ("BLOCK = 64", "BLOCK = 32", {MODULE}),
        ("import triton", "import triton as tl", {MODULE}),
        ("rows: int = 4", "rows: int = 5", {MODULE}),
        ("rows: int = 4", "rows = 4", {MODULE}),
        ("class Kernel", "@once\nclass Kernel", {MODULE}),
        ("def run", "def go", {MODULE, RUN, "Kernel.go"}),
        ("def scale", "def grow", {SCALE, "grow"}),
    ],
)
def test_what_changes_something_is_seen_where_it_is(old: str, new: str, functions: set[str]):
    assert changed(old, new) == functions


def test_locals_may_not_trade_places():
    one, other, same = (
        Module(f"def f(x):\n    {body}").functions["f"]
        for body in ("a = 1; b = x; return a - b", "a = 1; b = x; return b - a", "b = 1; a = x; return b - a")
    )
    assert one == same != other


def test_a_new_test_changes_its_module_and_a_new_helper_does_not():
    before, test, helper = (
        Module(SOURCE + more).functions[MODULE] for more in ("", "\ndef test_it(): pass", "\ndef it(): pass")
    )
    assert before == helper != test


def test_fingerprints_are_those_of_every_python():
    """As all of them find."""
    found = Module(
        SOURCE + '\ndef g(x):\n    return f"a{x!r}" "b" f"{x:>{x}}", {**x}, x[1:, ...], "\u2028", -1e-9, u"c"\n'
    )
    assert found.functions == {
        MODULE: "6c769a73ad89",
        RUN: "7f69abc8af1c",
        SCALE: "c8dcbd61a6bd",
        "g": "0766687b2273",
    }


def test_lines_belong_to_their_functions():
    module = Module(SOURCE)
    lines = SOURCE.splitlines()
    at = {text.strip(): module.name_at(number) for number, text in enumerate(lines, 1)}
    assert at["class Kernel:"] == MODULE and at["def run(self, x):"] == RUN
    assert at["@triton.jit(debug=False)"] == at['f = lambda x: f"{total:{n}} {x}" + names[0]'] == SCALE


# ---- the record -----------------------------------------------------------------------------------------------------

FIRST, SECOND = "smoke", "backward-1"
ENTRIES = {("a.py:f", "11", FIRST), ("a.py:f", "11", SECOND), ("a.py:g", "22", SECOND)} | {
    ("a.py:h", "33", group) for group in GROUPS
}
MARKS = {"a.py:f": "11", "a.py:g": "22", "a.py:h": "33"}


def test_a_record_is_read_as_it_was_written():
    assert record.read(record.text_of(ENTRIES)) == ENTRIES


@pytest.mark.parametrize(
    ("old", "new"), [("a.py:f  11", "a.py:f  12"), ("digest  ", "digest  0"), ("a.py:g", "a.py:e")]
)
def test_a_record_edited_by_hand_is_refused(old: str, new: str):
    with pytest.raises(ValueError, match="not as it was recorded"):
        record.read(record.text_of(ENTRIES).replace(old, new))


@pytest.mark.parametrize(
    ("function", "groups"), [("a.py:f", {FIRST, SECOND}), ("a.py:g", {SECOND}), ("a.py:h", set(GROUPS))]
)
@pytest.mark.parametrize("mark", ["44", None], ids=["changed", "gone"])
def test_a_function_makes_its_groups_stale(function: str, groups: set[str], mark: str | None):
    stale = record.stale_groups(ENTRIES, (MARKS | {function: mark}).get)
    assert stale == {group: [function] for group in groups}


def test_nothing_is_stale_where_nothing_changed():
    assert record.stale_groups(ENTRIES, MARKS.get) == {}


def test_a_group_that_was_never_recorded_is_stale():
    entries = {entry for entry in ENTRIES if entry[2] != SECOND}
    assert set(record.stale_groups(entries, MARKS.get)) == {SECOND}


def test_a_function_may_be_recorded_twice():
    """Where one group passed since it changed and the other has not."""
    entries = ENTRIES - {("a.py:f", "11", FIRST)} | {("a.py:f", "12", FIRST)}
    assert record.read(record.text_of(entries)) == entries
    assert set(record.stale_groups(entries, (MARKS | {"a.py:f": "12"}).get)) == {SECOND}


# ---- the committed record -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries() -> set[record.Entry]:
    return record.read(record.FILE.read_text())


def jit_functions() -> dict[str, bool]:
    """Every Triton function of the portable backend, and whether it is a kernel."""
    found = {}
    for file in (record.ROOT / "src/flashdelta/triton").glob("*.py"):
        for x in ast.parse(file.read_text()).body:
            if isinstance(x, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in x.decorator_list):
                found[f"{file.relative_to(record.ROOT).as_posix()}:{x.name}"] = x.name.endswith("_kernel")
    return found


def test_every_triton_function_runs_and_the_smoke_tests_launch_every_kernel(entries: set[record.Entry]):
    functions = jit_functions()
    assert functions.keys() <= {function for function, _, _ in entries}
    smoke = {function for function, _, group in entries if group == SMOKE}
    assert {function for function, kernel in functions.items() if kernel} <= smoke


def test_groups_are_recorded(entries: set[record.Entry]):
    assert {group for _, _, group in entries} == GROUPS.keys()


# ---- the groups -----------------------------------------------------------------------------------------------------


def test_groups_select_every_test_once():
    """Every part of every test function."""
    tests = {
        f"{file.name}::{x.name}"
        for file in FOLDER.glob("test_*.py")
        for x in ast.parse(file.read_text()).body
        if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")
    }
    selected = Counter(parsed(selector) for group in GROUPS.values() for selector in group)
    parts = {selector: parts for selector, _, parts in selected}
    cases = {selector for selector in parts if "[" in selector}
    assert {selector_of(test) for test in tests} == parts.keys() - cases
    assert {case.partition("[")[0] for case in cases} <= tests
    assert selected == Counter((x, i + 1, parts[x]) for x in parts for i in range(parts[x]))


def test_a_test_that_changes_groups_makes_both_stale(monkeypatch: pytest.MonkeyPatch):
    before = {group: selection(group) for group in ("half", "laws", "wy")}
    monkeypatch.setitem(GROUPS, "half", GROUPS["half"][:-1])
    assert {group for group, found in before.items() if selection(group) != found} == {"half", "laws"}


def test_parts_of_a_test_are_all_of_its_cases_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GROUPS, "one", ["a.py::test_a 1/2", "a.py::test_b"])
    monkeypatch.setitem(GROUPS, "two", ["a.py::test_a 2/2"])
    monkeypatch.setitem(GROUPS, "rest", ["a.py"])
    monkeypatch.setitem(GROUPS, "case", ["a.py::test_b[b1]"])
    items = [(f"a.py::test_{name[0]}[{name}]", name) for name in ("a0", "b0", "a1", "a2", "c0", "b1")]
    assert chosen("one", items) == ["a0", "b0", "a2"]
    assert chosen("two", items) == ["a1"]
    assert chosen("case", items) == ["b1"]
    assert chosen("rest", items) == ["c0"]
