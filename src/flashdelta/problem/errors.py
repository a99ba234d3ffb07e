"""How a refusal reads."""

from __future__ import annotations


def wrong(argument: str, got: object, wanted: str) -> ValueError:
    """The error for an argument that does not fit: which one, what came and what was wanted."""
    return ValueError(f"{argument}: got {got}, wanted {wanted}")
