"""Arguments in every memory layout, with new numbers at every call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashdelta.runtime.call import CALLS as PUBLIC
from flashdelta.runtime.call import check

from .rows import Row


def around(x: Tensor, *before_after: int) -> Tensor:
    """A copy amid NaN, or amid what no index may be; as `torch.nn.functional.pad` counts."""
    fill = torch.nan if x.is_floating_point() else 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).min
    return torch.nn.functional.pad(x, before_after, value=fill)


def _expanded(x: Tensor) -> Tensor:
    dim = next((i for i, n in enumerate(x.shape[:-1]) if n > 1), 0)
    return x.narrow(dim, 0, 1).clone().expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous().clone(),
    "expanded": _expanded,
    "stride 0 in the last dimension": lambda x: x[..., :1].clone().expand_as(x),
    "stride 0": lambda x: x.flatten()[:1].clone().expand(x.shape),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() < 3 else x.mT.contiguous().mT,
    "every second": lambda x: around(x[..., None], 0, 1)[..., 0],
    "offset": lambda x: around(x.flatten(), 1, 0)[1:].view(x.shape),
    "padded rows": lambda x: around(x, 0, 4)[..., :-4],
    "padded": lambda x: around(x.flatten(1) if x.dim() > 1 else x, 0, 16)[..., :-16].unflatten(
        -1, x.shape[1:] or x.shape
    ),
}


def lay(x: Tensor, layout: str) -> Tensor:
    """A copy that lies so, of the same numbers where it may have them all."""
    return LAYOUTS[layout](x) if x.numel() > 0 else x


def without_repeats(x: Tensor) -> Tensor:
    """Each element of the memory once."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


REPEATS = ("expanded", "stride 0 in the last dimension", "stride 0")
"""Layouts that give elements the same number, which indices must not have."""

GRADIENTS = ("gradient of o", "gradient of the state")


def fresh(row: Row, seed: int, device: str = "cpu") -> dict:
    """The row's call with other numbers, of the same signs and no larger: what is an index stays."""
    call, source = row.make(), torch.Generator().manual_seed(zlib.crc32(row.name.encode()) + seed)
    for name, x in call.items():
        if isinstance(x, Tensor):
            if x.is_floating_point() and name not in row.tied:
                x = (x * (0.5 + 0.5 * torch.rand(x.shape, generator=source))).to(x.dtype)
            call[name] = x.to(device)
    return call


def takes(row: Row, call: dict, name: str, layout: str) -> bool:
    """Whether the operation's validation takes this tensor so."""
    if name in GRADIENTS:
        return True
    x = call[name]
    if layout in REPEATS and (not x.is_floating_point() or name in row.writes):
        return False
    if row.op not in PUBLIC:
        return name not in row.writes or layout == "padded"
    try:
        check(row.op, **call | {name: lay(x, layout)})
    except ValueError:
        return False
    return True


def tensors_of(row: Row) -> list[str]:
    """Names of the call's tensors, and of the gradients that come in."""
    names = [name for name, x in row.make().items() if isinstance(x, Tensor)]
    if not row.leaves:
        return names
    return [*names, *(GRADIENTS if "initial_state" in row.leaves else GRADIENTS[:1])]


def laid_out(row: Row, call: dict, layouts: dict[str, str]) -> dict:
    """The call with tensors in layouts by name, those left out as they are; one that is not taken so is contiguous."""
    chosen = {
        name: layout if takes(row, call, name, layout) else "contiguous"
        for name, layout in layouts.items()
        if name in call
    }
    return call | {name: lay(call[name], layout) for name, layout in chosen.items()}


def rotated(row: Row, turn: int) -> dict[str, str]:
    """Every tensor in another layout; over all turns each in each."""
    layouts = [*LAYOUTS]
    return {name: layouts[(i + turn) % len(layouts)] for i, name in enumerate(tensors_of(row))}


def drawn(row: Row, seed: int) -> dict[str, str]:
    source, layouts = torch.Generator().manual_seed(seed), [*LAYOUTS]
    picks = torch.randint(len(layouts), (len(tensors_of(row)),), generator=source).tolist()
    return {name: layouts[i] for name, i in zip(tensors_of(row), picks)}


def in_one_row(call: dict, names: Sequence[str], rows: int, shared: bool) -> dict:
    """The call with these tensors as slices of rows, in this order: of one buffer, or of one like it each."""
    flat = {name: call[name].reshape(rows, -1) for name in names}
    width = sum(x.shape[1] for x in flat.values())
    buffer, begin, found = None, 0, {}
    for name, x in flat.items():
        if buffer is None or not shared:
            buffer = x.new_full((rows, width), torch.nan)
        shape, own = call[name].shape, buffer[:, begin : begin + x.shape[1]]
        own.copy_(x)
        leading = next(i for i in range(1, len(shape) + 1) if shape[:i].numel() == rows)
        found[name] = own.unflatten(1, shape[leading:]).unflatten(0, shape[:leading])
        begin += x.shape[1]
    return call | found
