"""`nn.KimiDeltaAttention` on Triton's kernels, run on the CPU by Triton's interpreter."""

from __future__ import annotations

import torch

from ..support.layers import check_joining, check_packed, check_pool, make_layer

FP32, CLOSE = torch.float32, 1e-4


def test_a_pool_is_a_cache():
    check_pool(make_layer(FP32, backend="triton"), FP32, CLOSE)


def test_packed_sequences_are_sequences():
    check_packed(make_layer(FP32, gate="softplus", backend="triton"), FP32, CLOSE)


def test_requests_join_and_leave():
    check_joining(make_layer(FP32, backend="triton"), FP32, CLOSE)
