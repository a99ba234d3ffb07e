"""FlashKDA's prefill out of vLLM's library: a contender without the engine.

The library is that of the vLLM that is installed, or a file: `unzip vllm-0.33.0-....whl vllm/_flashkda_C.abi3.so`, then
`FLASH_KDA=vllm/_flashkda_C.abi3.so`. It uses PyTorch's stable ABI, so that it runs under other versions of PyTorch than vLLM
asks for; its machine code is for Hopper and Blackwell.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

LIBRARY = "_flashkda_C.abi3.so"


def load() -> None:
    """Loads the library, which gives `torch.ops` its operators.

    Raises:
        ImportError: there is no such file.
    """
    installed = importlib.util.find_spec("vllm")
    folder = Path(installed.origin).parent if installed is not None and installed.origin else Path()
    path = Path(os.environ.get("FLASH_KDA") or folder / LIBRARY)
    if not path.exists():
        raise ImportError(f"no {path}")
    torch.ops.load_library(str(path))


load()  # an import that fails says why there is none
operators = torch.ops._flashkda_C
