"""The command in processes of its own: Ctrl-C, missing packages, colours."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..full import FULL

pytestmark = pytest.mark.slow


def process(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


CLI = "typer rich safetensors numpy"
WITHOUT = {
    "typer": ("doctor --device cpu", CLI),
    "rich": ("doctor --device cpu", CLI),
    "safetensors": ("demo --device cpu --tokens 1", CLI),
    "triton": ("export --out out --arch sm_90", "triton"),
}
"""Per package: a command that needs it, and what pip is to install. What an earlier one lacked is there again."""

EACH = """
import sys
from flashdelta_command import main
for package, (line, _) in {without!r}.items():
    sys.modules[package], sys.argv[1:] = None, line.split()
    try:
        main()
    except SystemExit as end:
        print(end.code)
    del sys.modules[package]
"""


def test_a_missing_package_is_named_in_one_line():
    done = process(EACH.format(without=WITHOUT))
    assert done.stdout == "2\n" * len(WITHOUT)
    *said, last = (f"flashdelta: {x} is not installed; run: pip install {y}" for x, (_, y) in WITHOUT.items())
    said.insert(2, "writing 1 characters; kernels compile on first use")
    assert done.stderr.splitlines() == [*said, last]


IN_AN_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from flashdelta_command import main
main()
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", ["torch", "flashdelta.tools.cli.verify", *["flashdelta.tools.cli", "typer"] * FULL])
def test_ctrl_c_while_modules_are_imported(name: str):
    done = process(IN_AN_IMPORT.format(name=name), "verify", "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flashdelta: interrupted\n")
