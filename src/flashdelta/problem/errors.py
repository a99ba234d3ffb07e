"""Words of refusals: the argument, the rule, then the value."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

MOST_SHOWN = 80
"""Characters of a value that an error repeats: a list may have millions."""

Function = TypeVar("Function", bound=Callable[..., Any])


def wrong(argument: str, got: object, wanted: str) -> ValueError:
    """The error for an argument that does not fit: the rule, then the value."""
    return ValueError(f"{argument} must be {wanted}; got {shortened(str(got))}")


def rule(argument: str, holds: bool, wanted: str, got: object) -> None:
    """Refuses an argument unless the rule holds."""
    if not holds:
        raise wrong(argument, got, wanted)


def mistyped(argument: str, got: object, wanted: str) -> TypeError:
    """The error for an argument of the wrong type."""
    return TypeError(f"{argument} must be {wanted}; got {shortened(repr(got))} ({type(got).__name__})")


def shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


@contextlib.contextmanager
def called(**names: str) -> Iterator[None]:
    """Refusals in the block name arguments as the caller does: `names` has the caller's name of each."""
    try:
        yield
    except (ValueError, TypeError) as refusal:
        name, _, rest = str(refusal).partition(" ")
        if name not in names:
            raise
        raise type(refusal)(f"{names[name]} {rest}") from refusal


def named_options(function: Function) -> Function:
    """Hides the `*positional` of a function, which are there to be refused by `by_keyword`, from its signature."""
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_POSITIONAL]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def by_keyword(function: Callable[..., Any], positional: tuple[object, ...]) -> TypeError:
    """The error for options by position, as FLA's functions take them."""
    tensors = [x.name for x in inspect.signature(function).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    return TypeError(
        f"{function.__name__}() takes {', '.join(tensors)} by position and everything else by keyword, such as scale=; "
        f"got {len(tensors) + len(positional)} arguments by position"
    )
