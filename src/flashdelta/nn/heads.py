"""Tensor parallelism of a layer by heads: which heads a rank has, and its part of the parameters beside the projections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _SummedGradient(torch.autograd.Function):
    """Returns a parameter that all ranks have as it is; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


@dataclass(frozen=True)
class Share:
    """The heads of one rank: the `rank`-th of `ranks` equal parts, over a process group."""

    ranks: int = 1
    rank: int = 0
    group: Any = None

    def heads(self, number: int) -> int:
        return number // self.ranks

    def whole(self, x: Tensor) -> Tensor:
        """A parameter that every head reads. Its gradient is of all ranks' heads."""
        return x if self.ranks == 1 else _SummedGradient.apply(x, self.group)

    def part(self, x: Tensor | None, blocks: Sequence[int] = ()) -> Tensor | None:
        """This rank's rows of a parameter `[rows, ...]`, which lie by heads, in `blocks` of rows one after the other. Every
        rank gets the gradient of all rows."""
        if x is None or self.ranks == 1:
            return x
        parts = self.whole(x).split([*blocks] or [x.shape[0]])
        return torch.cat([block.chunk(self.ranks)[self.rank] for block in parts])


SPLIT = ("q_proj", "k_proj", "v_proj", "f_proj.1", "b_proj", "g_proj.1")
"""Projections whose outputs lie by heads. `o_proj` takes them."""


def share_of(layer: nn.Module, found: Mapping[str, int], heads: Mapping[str, tuple[int, int]]) -> Share:
    """A rank's share of a layer's heads, as `parallelize_module` has split them.

    Args:
        found: width of every projection's output here.
        heads: of the same names: number of heads, width of each.

    Raises:
        ValueError: projections that are split otherwise than by heads, or not by `parallelize_module`.
    """
    if all(found[name] == number * width for name, (number, width) in heads.items()):
        return Share()
    mesh = getattr(getattr(layer.q_proj, "weight", None), "device_mesh", None)
    ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
    plan = f"{', '.join(SPLIT)} column-wise, o_proj row-wise, by torch.distributed.tensor.parallel.parallelize_module"
    if mesh is None or ranks == 1 or not hasattr(getattr(layer.o_proj, "weight", None), "device_mesh"):
        raise ValueError(f"a layer must be split over ranks by {plan}; got {found} channels, and no such plan")
    for name, (number, width) in heads.items():
        if number % ranks:
            raise ValueError(f"ranks must divide the number of heads; got {ranks} ranks and {number} heads of {name}")
        if found[name] * ranks != number * width:
            raise ValueError(f"a layer must be split over ranks by {plan}; got {found[name]} channels of {name}")
    return Share(ranks, mesh.get_local_rank(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1))


def share_of_weights(layer: nn.Module) -> Share:
    """`share_of` a layer that does not run, from its weights. Shards of FSDP are no parts of heads."""
    mesh = getattr(getattr(layer.q_proj, "weight", None), "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or type(layer.q_proj).__name__.startswith("FSDP"):
        return Share()
    return Share(mesh.size(), mesh.get_local_rank(), mesh.get_group())
