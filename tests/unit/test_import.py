"""Costs and output of `import flashdelta`, in processes of its own; words of switches in the environment."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from flashdelta.problem.switches import is_on

IMPORT = """
import sys, time, warnings
sys.modules["numpy"] = None
began = time.process_time()
import torch
print("imported torch", file=sys.stderr)  # PyTorch warns of a missing numpy itself
known, between = set(sys.modules), time.process_time()
import flashdelta
print((time.process_time() - between) / (between - began), *(set(sys.modules) - known))
assert "nn" in dir(flashdelta) and "flashdelta.nn" not in sys.modules and not hasattr(flashdelta, "no_such_name")
assert flashdelta.nn.KimiDeltaAttention
"""

MOST = 0.2
"""Share of PyTorch's own import, in processor time: machines differ."""


def imported() -> tuple[float, set[str], str]:
    """Processor time as a share of that of `import torch`, modules that this did not bring, and what was said."""
    done = subprocess.run([sys.executable, "-W", "always", "-c", IMPORT], capture_output=True, text=True, check=True)
    share, *modules = done.stdout.split()
    return float(share), set(modules), done.stderr.partition("imported torch\n")[2]


@pytest.mark.slow
def test_import_is_quick_and_brings_no_compiler():
    """Nor `nn`, which comes when it is asked for; nothing is said, not even without numpy."""
    share, modules, said = imported()
    # once more where others kept the machine busy
    assert share < MOST or min(imported()[0] for _ in range(2)) < MOST
    assert not {name for name in modules if name.startswith(("triton", "torch._dynamo", "torch._inductor"))}
    assert said == ""


NAME = "FLASHDELTA_NO_SUCH_SWITCH"


@pytest.mark.parametrize("default", (False, True))
def test_words(default: bool, monkeypatch: pytest.MonkeyPatch):
    """One that is none of them is told once."""
    monkeypatch.delenv(NAME, raising=False)
    assert is_on(NAME, default) is default
    words = {"": default} | dict.fromkeys(("0", "off", "No", "FALSE"), False)
    for word, wanted in (words | dict.fromkeys(("1", "on", "Yes", " true "), True)).items():
        monkeypatch.setenv(NAME, word)
        assert is_on(NAME, default) is wanted
    word = f"maybe {default}"
    monkeypatch.setenv(NAME, word)
    with pytest.warns(UserWarning, match=f"{NAME} must be one of 1, true, .* no; got '{word}', so it is {default:d}"):
        assert is_on(NAME, default) is default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_on(NAME, default) is default
