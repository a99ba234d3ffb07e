"""Whether all cases run (`make test-full`)."""

from __future__ import annotations

import os

FULL = os.environ.get("FLASHDELTA_TESTS") == "full"
