"""FlashKDA's prefill and vLLM's fused step of Kimi-K3, out of vLLM's libraries: contenders without the engine.

The libraries come from the vLLM that is installed, or from a wheel: `VLLM_WHEEL=vllm-0.33.0-....whl`. They use PyTorch's stable
ABI, so that they run under other versions of PyTorch than vLLM asks for; their machine code is for Hopper and Blackwell.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor

FLASH_KDA, VLLM = "vllm/_flashkda_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so"


@functools.cache
def library(name: str) -> None:
    """Loads it, which gives `torch.ops` its operators.

    Raises:
        ImportError: there is no such file.
    """
    wheel = os.environ.get("VLLM_WHEEL")
    if wheel:
        path = Path(tempfile.gettempdir()) / "flashdelta_vllm" / name
        if not path.exists():
            with zipfile.ZipFile(wheel) as z:
                z.extract(name, path.parents[1])
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ImportError("neither vLLM nor VLLM_WHEEL")
        path = Path(spec.origin).parents[1] / name
    if not path.exists():
        raise ImportError(f"no {path}")
    torch.ops.load_library(str(path))


@functools.cache
def _workspace(tokens: int, heads: int, sequences: int, device: torch.device) -> Tensor:
    """As vLLM keeps it from call to call."""
    size = torch.ops._flashkda_C.get_workspace_size(tokens, heads, sequences)
    return torch.empty(size, dtype=torch.uint8, device=device)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    *,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """FlashKDA: `[B, T, H, 128]`, bfloat16, beta's logits; states `[N, H, V, K]`. Writes `out` and `final_state`."""
    (B, T, H, _), sequences = q.shape, len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    torch.ops._flashkda_C.fwd(
        *(x.contiguous() for x in (q, k, v, g)), beta, scale, out, _workspace(B * T, H, sequences, q.device),
        A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens, None, None,
    )  # fmt: skip


def fused_step(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    lower_bound: float,
    out: Tensor,
    norm_eps: float = 1e-5,
) -> Tensor:
    """vLLM's kernel of one token per sequence, for 12, 24, 48 or 96 heads: convolution, attention and norm in one launch. Has
    the arguments of `flashdelta.fused_kda_decode`; `out [1, N, H, 128]`, `conv_state [slots, channels, 3]`."""
    library(VLLM)
    torch.ops._C.fused_kda_decode(
        x, weight, None, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out, lower_bound, output_gate,
        norm_weight, norm_eps,
    )  # fmt: skip
    return out


library(FLASH_KDA)  # an import that fails says why there is none
