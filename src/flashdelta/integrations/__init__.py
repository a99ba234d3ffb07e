"""Frameworks whose calls can run on flashdelta: `import flashdelta.integrations.<name>` turns one on (docs/integrations.md).

Nothing here imports a framework before it is asked for.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Literal

NAMES = ("fla", "transformers", "vllm", "sglang")

State = Literal["active", "possible", "off", "not installed", "unknown version"]


@dataclass(frozen=True)
class Status:
    """State of an integration. `version`: of the framework, None where there is none. `reason`: what is replaced, how to
    turn it on, or why it can't be."""

    name: str
    state: State
    version: str | None
    reason: str


def status(name: str) -> Status:
    """Says where the integration stands in this process. Imports FLA for its own and that of transformers, if it is there, and
    turns nothing on."""
    found: Status = import_module(f"{__name__}._{name}").status()
    return found
