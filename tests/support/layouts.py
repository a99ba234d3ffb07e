"""Arguments in every memory layout, with new numbers at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .inputs import around
from .rows import Row


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
"""Layouts that give elements the same number, which neither indices nor what is written may have."""

GAPS = ("transposed", "every second", "padded rows")
"""Layouts that are not dense inside a slot."""

POOLS = dict.fromkeys(("initial_state", "initial_state_source", "state"), (*REPEATS[1:], *GAPS))
STATES = dict.fromkeys(("state_pool", "checkpoint_states", "intermediate_states"), GAPS)
ROWS_OF_TOKENS = dict.fromkeys(("out", "output"), GAPS[:2])
CALL = STATES | ROWS_OF_TOKENS | {"final_state": (*GAPS, "padded")}
STEP = POOLS | STATES | ROWS_OF_TOKENS
REFUSED = {
    "chunk_kda": CALL,
    "fused_recurrent_kda": CALL,
    "recurrent_kda": STEP,
    "draft_and_commit": STEP,
    "fused_kda_decode": STEP,
    "short_convolution": ROWS_OF_TOKENS,
    "kda_prefill": dict.fromkeys(("q", "k", "v", "g", "beta"), (*REPEATS, *GAPS)),
}
"""Layouts that an operation refuses, by tensor."""

GRADIENTS = ("gradient of o", "gradient of the state")


def fresh(row: Row, seed: int, device: str = "cpu") -> dict:
    """The row's call with other numbers. Sequences have each other's slots, flags, counts and lengths."""
    call = row.make(seed)
    for name, x in call.items():
        if name == "cu_seqlens":
            x = torch.nn.functional.pad(x.diff().roll(seed).cumsum(0), (1, 0)).to(x.dtype)
        elif isinstance(x, Tensor) and not x.is_floating_point():
            x = x.roll(seed)
        call[name] = x.to(device) if isinstance(x, Tensor) else x
    return call


def refused(row: Row, name: str) -> set[str]:
    """Layouts in which the operation does not take this tensor."""
    return {*REFUSED.get(row.op.__name__, {}).get(name, ()), *(REPEATS if name in row.writes else ())}


def takes(row: Row, call: dict, name: str, layout: str) -> bool:
    return layout not in refused(row, name) and (layout not in REPEATS or call[name].is_floating_point())


def tensors_of(row: Row) -> list[str]:
    """Names of the call's tensors, and of the gradients that come in."""
    names = [name for name, x in row.make(0).items() if isinstance(x, Tensor)]
    if not row.leaves:
        return names
    return [*names, *(GRADIENTS if "initial_state" in row.leaves else GRADIENTS[:1])]


def laid_out(row: Row, call: dict, layouts: dict[str, str]) -> dict:
    """The call with tensors in layouts by name, those left out as they are; one that is not taken so is contiguous."""
    taken = {name: takes(row, call, name, layout) for name, layout in layouts.items() if name in call}
    return call | {name: lay(call[name], layouts[name] if taken[name] else "contiguous") for name in taken}


def rotated(row: Row, turn: int) -> dict[str, str]:
    """Every tensor in another layout; over as many turns as there are layouts each in each."""
    return {name: [*LAYOUTS][(i + turn) % len(LAYOUTS)] for i, name in enumerate(tensors_of(row))}


def in_one_row(call: dict, names: Sequence[str], rows: int, shared: bool) -> dict:
    """The call with these tensors as slices of rows, in this order: of one buffer, or of one like it each."""
    flat = {name: call[name].reshape(rows, -1).contiguous().view(torch.uint8) for name in names}
    width = sum(x.shape[1] for x in flat.values())
    buffer, begin, found = None, 0, {}
    for name, x in flat.items():
        if buffer is None or not shared:
            buffer = x.new_full((rows, width), 255)  # NaN
        shape, own = call[name].shape, buffer[:, begin : begin + x.shape[1]].copy_(x).view(call[name].dtype)
        leading = next(i for i in range(1, len(shape) + 1) if shape[:i].numel() == rows)
        found[name] = own.unflatten(1, shape[leading:]).unflatten(0, shape[:leading])
        begin += x.shape[1]
    return call | found
