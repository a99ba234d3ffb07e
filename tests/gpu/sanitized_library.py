"""Calls of the C library for compute-sanitizer: `compute-sanitizer python -m tests.gpu.sanitized_library`, with the library's
path in FLASHDELTA_LIBRARY. As in `sanitized.py`, every tensor should be an allocation of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from flashdelta.tools.export.bindings import Library

from ..support.cases import BF16
from ..support.prefills import INPUTS, PLAIN, SIZES, prefill_call, sized
from .c_library import c_decode, c_prefill, library_for_this_gpu
from .sanitized import on_device


def main() -> None:
    library = Library(str(library_for_this_gpu(Path())))
    torch.zeros(1, device="cuda")
    ran = 0
    for size in SIZES:
        for T in (1, 33, 70):
            call = on_device(prefill_call(sized(replace(PLAIN, T=T), size)))
            state = torch.zeros(1, 2, size[1], size[0], device="cuda")
            c_prefill(library, call, final_state=state)
            c_prefill(library, call, "bf16", initial_state=state, final_state=state.clone())
            step = {name: call[name][:, :, -1].contiguous() for name in INPUTS}
            step |= {name: step[name].to(BF16) for name in ("q", "k", "v")}
            c_decode(library, step | {"states": state, "state_indices": torch.zeros(1, dtype=torch.int32).cuda()})
            ran += 3
    torch.cuda.synchronize()
    print(f"{ran} calls")


if __name__ == "__main__":
    main()
