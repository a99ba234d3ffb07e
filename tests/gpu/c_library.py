"""The C library on the GPU: exported and built for it, and called with PyTorch's memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flashdelta.tools.export.bindings import GATES, DecodeArgs, Library, PrefillArgs

from ..support.exports import build, export
from ..support.prefills import INPUTS

GIVEN = "FLASHDELTA_LIBRARY"
"""Environment variable: a libflashdelta.so with all kernels for the GPU at hand, for machines without CMake."""

NEW = {"f32": torch.float32, "bf16": torch.bfloat16}


def can_build() -> bool:
    return GIVEN in os.environ or (shutil.which("cmake") is not None and shutil.which("gcc") is not None)


def library_for_this_gpu(folder: Path) -> Path:
    """Path of a library with everything for this GPU, built in `folder` unless there is one."""
    if GIVEN in os.environ:
        return Path(os.environ[GIVEN])
    major, minor = torch.cuda.get_device_capability()
    export(folder, f"--arch=sm_{major}{minor}", "--precision=tf32x3", "--precision=ieee")
    build(folder / "build", folder)
    return folder / "build" / "libflashdelta.so"


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def pointers(tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items() if x is not None}


def c_prefill(library: Library, call: Mapping[str, object], kind: str = "f32", **options: object) -> dict[str, Tensor]:
    """A call of `kda_prefill` by the C library, in `kind` ("f32" or "bf16"): `o`, and for f32 `w` and `u`. All that it is to
    write starts as NaN. `options` are further fields, or others than the call's; tensors are passed by address."""
    tensors = {name: call[name] for name in INPUTS}
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].to(NEW[kind])
    B, H, T, K = tensors["q"].shape
    V, C = tensors["v"].shape[-1], call["chunk_size"]
    results = {"o": (B, H, T, V)}
    if kind == "f32":
        results |= {"w": (B, H, -(-T // C), C, K), "u": (B, H, -(-T // C), C, V)}
    found = {name: torch.full(shape, torch.nan, dtype=NEW[kind], device="cuda") for name, shape in results.items()}
    given = pointers(tensors | found | {name: x for name, x in options.items() if isinstance(x, Tensor)})
    fields = {"B": B, "H": H, "T": T, "K": K, "V": V, "C": C, "gate": GATES.index(call["gate"])}
    size = library.workspace_bytes(PrefillArgs(**fields), kind)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    fields |= {"scale": call.get("scale") or 0.0, "workspace": workspace.data_ptr(), "workspace_bytes": size}
    fields |= {name: x for name, x in options.items() if not isinstance(x, Tensor)}
    library.prefill(PrefillArgs(**given, **fields), stream(), kind)
    # its memory may be given to others on this stream, which come later
    return found


def c_decode(library: Library, tensors: Mapping[str, Tensor], gate: str = "none", scale: float = 0.0) -> Tensor:
    """`o [N, H, V]`. `tensors`: `q, k, v [N, H, ..]` in bf16, `g, beta, states, state_indices`."""
    N, H, K = tensors["q"].shape
    o = torch.full_like(tensors["v"], torch.nan)
    states = tensors["states"]
    sizes = {"N": N, "H": H, "slots": states.shape[0], "K": K, "V": tensors["v"].shape[-1]}
    given = pointers(dict(tensors) | {"o": o})
    options = {"gate": GATES.index(gate), "scale": scale, "slot_pitch": states.stride(0)}
    library.decode(DecodeArgs(**sizes, **given, **options), stream())
    return o
