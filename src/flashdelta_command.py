"""The command `flashdelta`. It stands outside the package, which takes seconds to import: Ctrl-C is caught from the first."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from flashdelta.tools.cli import main as run

        run()
    except KeyboardInterrupt:
        print("flashdelta: interrupted", file=sys.stderr)
        sys.exit(130)
