"""The command line, `flashdelta`."""

from __future__ import annotations

import sys

NEEDS = ("typer", "rich")


def main() -> None:
    """Runs the command line; without the packages it needs, says how to install them and exits with 2."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDS:
            raise
        print(f"flashdelta: {error.name} is not installed; run: pip install 'flashdelta[cli]'", file=sys.stderr)
        sys.exit(2)
    app()


__all__ = ["main"]
