"""Failures that are known, by what they say: counted, and not fatal. A line goes when what it says is mended."""

from __future__ import annotations

import re

KNOWN = {
    "the reference obeys autocast": r"in autocast: AssertionError",
    "views with the negative or conjugate bit are read with the wrong sign": r"is_(neg|conj)",
    "forward mode drops the tangent": r"in forward_mode: .*(tangent|forward)",
    "torch.func fails without a name": r"in func\.\w+: ",
    "NaN in rows of no sequence spoils gradients of the reference": r"AssertionError: gradient of \w+: off by nan of \d",
}


def known(message: str) -> str | None:
    """What a failure is known as."""
    return next((name for name, pattern in KNOWN.items() if re.search(pattern, message)), None)
