"""Peers choose among forms of each of their kernels in the first call of a row, which takes most of the row's time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

THREADS = 12
"""That compile. Triton holds Python's lock for a seventh of the time, so more would wait for it."""


@contextlib.contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Compiles all forms of a kernel at once where a tuner of Triton would compile one after another. It times them as ever."""
    if device.type != "cuda":
        yield
        return
    from triton.runtime.autotuner import Autotuner  # Triton is for Linux only

    timed = Autotuner._bench

    def after_all(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
        forms = tuner.prune_configs(meta)
        if config == forms[0]:  # which is timed first

            def make(form: Any) -> None:
                with contextlib.suppress(Exception):  # the tuner meets it again, and knows what to make of it
                    tuner.fn.run(*args, **{**meta, **form.all_kwargs(), "warmup": True})

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(make, forms))
        return timed(tuner, *args, config=config, **meta)

    Autotuner._bench = after_all
    try:
        yield
    finally:
        Autotuner._bench = timed
