"""Wrong calls of `kda_prefill`."""

from __future__ import annotations

import torch

BAD = {
    "rank": ({"q": torch.zeros(2, 70, 64)}, ValueError, "q: got shape [2, 70, 64], wanted [B, H, T, K], of rank 4"),
    "no tensor": ({"beta": 1.0}, TypeError, "beta: got float, wanted a torch.Tensor"),
    "k shape": ({"k": torch.zeros(1, 2, 71, 64)}, ValueError, "k: got shape [1, 2, 71, 64], wanted [B, H, T, K]"),
    "v tokens": ({"v": torch.zeros(1, 2, 71, 64)}, ValueError, "v: got shape [1, 2, 71, 64], wanted [B, H, T, V]"),
    "g heads": ({"g": torch.zeros(1, 1, 70, 64)}, ValueError, "g: got shape [1, 1, 70, 64], wanted [B, H, T, K]"),
    "beta shape": ({"beta": torch.zeros(1, 70, 2)}, ValueError, "beta: got shape [1, 70, 2], wanted [B, H, T]"),
    "dtype": ({"g": torch.zeros(1, 2, 70, 64).bfloat16()}, TypeError, "g: got dtype torch.bfloat16, wanted float32"),
    "float64": ({"q": torch.zeros(1, 2, 70, 64).double()}, TypeError, "q: got dtype torch.float64, wanted float32"),
    "strides": ({"v": torch.zeros(1, 70, 2, 64).transpose(1, 2)}, ValueError, "v: got strides "),
    "device": (
        {"k": torch.zeros(1, 2, 70, 64, device="meta")},
        ValueError,
        "k: got device meta, wanted q's device cpu",
    ),
    "chunk": ({"chunk_size": 16}, ValueError, "chunk_size: got (K, V, C) = (64, 64, 16), wanted one of (64, 64, 32)"),
    "chunk type": ({"chunk_size": 64.0}, TypeError, "chunk_size: got 64.0 (float), wanted an int"),
    "scale": ({"scale": "1"}, TypeError, "scale: got '1' (str), wanted a float or None"),
    "gate": ({"gate": "softplus"}, ValueError, "gate: got 'softplus', wanted one of ('none', 'logsigmoid')"),
    "tf32": ({"precision": "tf32"}, ValueError, "precision: got 'tf32', wanted one of ('ieee', 'tf32x3')"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda', wanted one of"),
    "hopper": ({"backend": "hopper"}, ValueError, "backend: got 'hopper', wanted one that can run this call"),
}
"""Changes that make a call of `PLAIN` with 70 tokens a wrong one, the error and how its message begins."""
