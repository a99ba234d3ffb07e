"""Switches in the environment, all of which take the same words."""

import functools
import os
import warnings

WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def is_on(variable: str, default: bool) -> bool:
    """True if a switch is on: `default` where it is not set, or empty. A word may have any case. A strange one gives one
    warning, and the default."""
    word = os.environ.get(variable)
    return _read(variable, word, default) if word else default


@functools.cache
def _read(variable: str, word: str, default: bool) -> bool:
    found = WORDS.get(word.strip().lower())
    if found is None:
        warnings.warn(f"{variable} must be one of {', '.join(WORDS)}; got {word!r}, so it is {default:d}", stacklevel=3)
        return default
    return found
