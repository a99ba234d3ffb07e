"""`nn.KimiDeltaAttention` on Triton's kernels, interpreted."""

from __future__ import annotations

import pytest
import torch

from ..support.layers import make_layer, rows
from ..support.oracle import poisoned_memory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_products")]

FP32 = torch.float32


def test_rows_of_no_sequence_leave_gradients_alone():
    """Whatever memory held there: a step is padded to its tokens, and the loss is of the sequences."""
    layer, offsets = make_layer(FP32, backend="triton"), torch.tensor([0, 9, 14])

    def gradients(tokens: int) -> list[torch.Tensor]:
        layer.zero_grad()
        x = rows(1, 20, dtype=FP32, device="cpu")[:, :tokens].requires_grad_()
        with poisoned_memory():
            layer(x, cu_seqlens=offsets)[0][:, :14].square().sum().backward()
        return [x.grad[:, :14], *(parameter.grad.clone() for parameter in layer.parameters())]

    for found, want in zip(gradients(20), gradients(14)):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
