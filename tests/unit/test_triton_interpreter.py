"""Runs `tests/interpreter` in sessions of its own: Triton decides at import whether its kernels are interpreted.

Runs the smoke tests, and the groups of which a function has changed since they were recorded (`interpreter/record.py`);
with FLASHDELTA_TESTS=full all groups. To work on one of the tests: `TRITON_INTERPRET=1 pytest tests/interpreter -k name`.
"""

from __future__ import annotations

import functools

import pytest

from ..full import FULL
from ..interpreter import record
from ..interpreter.groups import GROUPS, SMOKE


@functools.cache
def groups_to_run() -> set[str]:
    if FULL:
        return set(GROUPS)
    try:
        entries = record.read(record.FILE.read_text())
    except ValueError:  # `test_interpreter_record.py` fails
        return set(GROUPS)
    return {SMOKE, *record.stale_groups(entries)}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_under_the_interpreter(group: str):
    if group not in groups_to_run():
        pytest.skip("unchanged since the record")
    done = record.run(group)
    assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
