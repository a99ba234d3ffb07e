"""What `import flashdelta` costs and says, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = """
import sys, time, warnings
{before}
import torch
print("{mark}", file=sys.stderr)  # PyTorch warns of a missing numpy itself
known, began = set(sys.modules), time.process_time()
import flashdelta
print(time.process_time() - began, *(set(sys.modules) - known))
"""

MARK = "imported torch"
MOST_SECONDS = 0.3


def imported(before: str = "") -> tuple[float, set[str], str]:
    """Processor seconds after `import torch`, modules that it did not bring, and what was said."""
    command = [sys.executable, "-W", "always", "-c", IMPORT.format(before=before, mark=MARK)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, *modules = done.stdout.split()
    return float(seconds), set(modules), done.stderr.partition(f"{MARK}\n")[2]


@pytest.mark.slow
def test_import_is_quick_and_brings_no_compiler():
    found = [imported() for _ in range(3)]
    assert min(seconds for seconds, _, _ in found) < MOST_SECONDS
    _, modules, said = found[0]
    assert not {name for name in modules if name.startswith(("triton", "torch._dynamo", "torch._inductor"))}
    assert said == ""


@pytest.mark.slow
def test_nn_is_imported_when_it_is_asked_for():
    code = (
        "import sys, flashdelta as fd\n"
        "assert 'nn' in dir(fd) and 'flashdelta.nn' not in sys.modules\n"
        "print(fd.nn.KimiDeltaAttention.__name__, hasattr(fd, 'no_such_name'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["KimiDeltaAttention", "False"]


@pytest.mark.slow
def test_import_without_numpy_says_nothing():
    _, _, said = imported("sys.modules['numpy'] = None")
    assert said == ""
