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

_installed = importlib.util.find_spec("vllm")
_folder = Path(_installed.origin).parent if _installed is not None and _installed.origin else Path()
# an import that fails says why there is none
torch.ops.load_library(os.environ.get("FLASH_KDA") or str(_folder / "_flashkda_C.abi3.so"))
operators = torch.ops._flashkda_C
