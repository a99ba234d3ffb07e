"""FlashKDA's prefill out of vLLM's library: a contender without the engine.

The library is that of the vLLM that is installed, or a file: `unzip vllm-0.33.0-....whl vllm/_flashkda_C.abi3.so`, then
`FLASH_KDA=vllm/_flashkda_C.abi3.so`. It uses PyTorch's stable ABI, so that it runs under other versions of PyTorch than vLLM
asks for; its machine code is for Hopper and Blackwell.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor

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


@functools.cache
def _workspace(tokens: int, heads: int, sequences: int, device: torch.device) -> Tensor:
    """Scratch memory, kept from call to call as vLLM keeps it."""
    size = torch.ops._flashkda_C.get_workspace_size(tokens, heads, sequences)
    return torch.empty(size, dtype=torch.uint8, device=device)


def fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, initial_state: Tensor | None, final_state: Tensor | None, cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    """FlashKDA: `[B, T, H, 128]`, bfloat16, beta's logits; states `[N, H, V, K]`. Writes `out` and `final_state`."""
    (B, T, H, _), sequences = q.shape, len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    torch.ops._flashkda_C.fwd(
        *(x.contiguous() for x in (q, k, v, g)), beta, scale, out, _workspace(B * T, H, sequences, q.device),
        A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens, None, None,
    )  # fmt: skip


load()  # an import that fails says why there is none
