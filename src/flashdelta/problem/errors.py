"""How a refusal reads."""

from __future__ import annotations


def wrong(argument: str, got: object, wanted: str) -> ValueError:
    """The error for an argument that does not fit: which one, what came and what was wanted."""
    return ValueError(f"{argument}: got {got}, wanted {wanted}")


def mistyped(argument: str, got: object, wanted: str) -> TypeError:
    """The error for an argument of the wrong type."""
    return TypeError(f"{argument}: got {got!r} ({type(got).__name__}), wanted {wanted}")
