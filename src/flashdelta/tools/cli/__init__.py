"""The command line, `flashdelta`."""

import os
import sys

CLI = "typer", "rich", "safetensors", "numpy"
INSTALL = {**dict.fromkeys(CLI, " ".join(CLI)), "triton": "triton"}
"""Packages that a command may lack, and what pip is asked for."""


def main() -> None:
    """Runs the command line; without a package that it needs, says how to install it and exits with 2."""
    if os.environ.get("NO_COLOR"):  # typer and rich would obey these first
        os.environ.pop("FORCE_COLOR", None)
        os.environ.pop("PY_COLORS", None)
    try:
        from .app import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in INSTALL:
            raise
        print(f"flashdelta: {missing} is not installed; run: pip install {INSTALL[missing]}", file=sys.stderr)
        sys.exit(2)
