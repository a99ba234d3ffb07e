"""`shard_attention`: FSDP2 for layers of attention, whose small parameters stay float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..problem.errors import rule
from .attention import KimiDeltaAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_attention(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shards every `KimiDeltaAttention` in `module` by `torch.distributed.fsdp.fully_shard`, in two groups: its projections,
    which are gathered and multiplied in `param_dtype`, and what it has beside them, which is gathered in float32. Those are
    `A_log` and `dt_bias`, of which a rounded one would change the decay of every token, and the filters and weights of
    convolution and norm, whose kernels read them in float32: a thousandth of the layer. `fully_shard` alone would round all.

    Call it before `fully_shard` of the blocks and the model around the layers, which then leave these to their own groups:

        shard_attention(model, param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    Args:
        module: a layer, or what holds layers; their parameters in float32, as an optimizer should have them.
        mesh: of the data-parallel ranks; all ranks by default.
        param_dtype: of the projections while they run; None: float32.
        reduce_dtype: in which gradients of the projections are added up; `param_dtype` by default. Others: float32.
        reshard_after_forward: as `fully_shard` takes it.

    Returns:
        `module`.

    Raises:
        ValueError: a layer with parameters that are not float32, or no layer.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # not every build of PyTorch has it

    layers = [x for x in module.modules() if isinstance(x, KimiDeltaAttention)]
    rule("module", len(layers) > 0, "a KimiDeltaAttention, or hold one", type(module).__name__)
    for layer in layers:
        for name, x in layer.named_parameters():
            wanted = "in torch.float32 (param_dtype is for the projections)"
            rule("module", x.dtype == torch.float32, wanted, f"{name} in {x.dtype}")
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
        fully_shard(list(layer.children()), mp_policy=policy, **options)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        layer.mark_parameters()
    return module
