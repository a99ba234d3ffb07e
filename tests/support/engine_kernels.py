"""The engines' own Triton kernels, taken out of their wheels, and nothing of this project.

`python -m tests.support.engine_kernels WHEELS FOLDER` downloads the wheels to one folder, if they are not there, and
copies the few files that are needed to the other. `load` imports those without the engines, whose helpers are stood in for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from flashdelta.integrations import _sglang, _vllm

ENVIRONMENT = "FLASHDELTA_ENGINES"
"""Names the folder."""

PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")


def wheel(folder: Path, name: str, version: str) -> Path:
    """The wheel in `folder`, downloaded without what it depends on if it is not there yet; "newest" has a folder of its own."""
    if version == "newest":
        folder, version, wanted = folder / version, "*", name
    else:
        wanted = f"{name}=={version}"
    pattern = f"{name}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", *(f"--platform={x}" for x in PLATFORMS)]
        subprocess.run([*command, f"--dest={folder}", wanted], check=True)
    return next(folder.glob(pattern))


GLM_KERNELS = "vllm.models.glm5next.nvidia.ops.third_party.kda"
SHARED_KERNELS = "vllm.third_party.flash_linear_attention.ops.kda"

FOLDERS = {
    "vllm": (
        "vllm/models/kimi_k3/nvidia/ops/third_party/kda",
        "vllm/models/glm5next/nvidia/ops/third_party/kda",
        "vllm/third_party/flash_linear_attention/ops",
        "vllm/utils/math_utils.py",
        "vllm/model_executor/layers/mamba/ops/gather_initial_states.py",
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    ),
    "sglang": (
        "sglang/kernels/ops/attention/fla",
        "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
    ),
}
"""Files, and folders without those below."""


def extract(wheels: Path, folder: Path) -> int:
    """Copies the files of the versions that the integrations were written against; returns how many."""
    count = 0
    for engine in (_vllm.ENGINE, _sglang.ENGINE):
        with zipfile.ZipFile(wheel(wheels, engine.name, engine.read[-1])) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                wanted = {name, str(path.parent)} & {*FOLDERS[engine.name]} and path.suffix == ".py"
                # packages that import all of their modules
                if wanted and not name.endswith(("ops/__init__.py", "fla/__init__.py")):
                    archive.extract(name, folder)
                    count += 1
    return count


# ---- what they import of their engines ---------------------------------------------------------------------------------------


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


class Platform:
    """vLLM's, for an NVIDIA GPU."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        answers = {"is_cuda": True, "is_cuda_alike": True, "is_arch_support_pdl": capability() >= (9, 0)}
        return lambda *arguments: answers.get(name, False)

    def has_device_capability(self, wanted: int | tuple[int, int]) -> bool:
        return capability() >= (divmod(wanted, 10) if isinstance(wanted, int) else wanted)

    def is_device_capability_family(self, wanted: int) -> bool:
        return capability()[0] == wanted // 10


def registered(*arguments: Any, **named: Any) -> Callable[[type], type]:
    return lambda cls: cls


class CustomOp(torch.nn.Module):
    register = staticmethod(registered)


def to_device(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


STANDING_IN: dict[str, dict[str, Any]] = {
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice},
    "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
    "vllm.utils.platform_utils": {"num_compute_units": lambda *x: sms()},
    "vllm.utils.torch_utils": {"async_tensor_h2d": to_device},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
    "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
    "sglang.srt.utils.common": {"torch_release": tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])},
    "sglang.srt.utils": {
        "is_cuda": lambda: True,
        "is_hip": lambda: False,
        "is_gfx95_supported": lambda: False,
        "is_sm90_supported": lambda *x: capability()[0] == 9,
        "get_device_sm": lambda: capability()[0] * 10 + capability()[1],
    },
    "sglang.kernels.ops.attention.fla.fused_norm_gate": {"layer_norm_gated_fwd": None},
    # CUDA code that is compiled when it is first called
    "sglang.kernels.ops.attention.kda_packed_decode": {"covered": lambda *x: False},
    "sglang.kernels.jit.utils": {
        "is_arch_support_pdl": lambda: capability() >= (9, 0),
        "get_jit_cuda_arch": lambda: SimpleNamespace(major=capability()[0], minor=capability()[1]),
    },
}


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    for name, contents in STANDING_IN.items():
        module = ModuleType(name)
        vars(module).update(contents)
        module.__path__ = []
        sys.modules[name] = module
    try:
        yield
    finally:
        sys.path.remove(str(folder))


STEP = "Kimi-K3"
"""Its own fused kernels are CUDA code, as is FlashKDA."""


def load(folder: Path) -> dict[str, dict[str, Callable[..., Any]]]:
    """The engines' functions by name, for layers of `tests.support.engines`, and for a `K3Step` (`STEP`)."""
    with standing_in(folder):
        gather = import_module(f"{_vllm.MAMBA}.ops.gather_initial_states").gather_initial_states
        convolution = import_module(f"{_vllm.MAMBA}.ops.causal_conv1d").causal_conv1d_update
        kimi, glm, shared = (import_module(x) for x in (_vllm.KIMI_KERNELS, GLM_KERNELS, SHARED_KERNELS))
        chunks, steps, gated = (
            import_module(f"sglang.kernels.ops.attention.{x}")
            for x in ("fla.kda", "fla.fused_recurrent", "linear.fused_sigmoid_gating_recurrent")
        )
    names = ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode")
    found = {
        "Kimi-Linear": {name: getattr(kimi, name) for name in names} | {"gather_initial_states": gather},
        "GLM-5.3-Flash, Triton": {name: getattr(glm, name) for name in names[:2]}
        | {"gather_initial_states": gather, "scatter_states": store},
        "Ling-3": {x: getattr(shared, x) for x in ("chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd")},
    }
    found[STEP] = {name: getattr(kimi, name) for name in names[1:]}
    found[STEP] |= {"causal_conv1d_update": convolution, "rms_norm_gated": shared.rms_norm_gated}
    kernel = SGLangKernel(chunks.chunk_kda, steps.fused_recurrent_kda_packed_decode, gated)
    found["SGLang"] = {name: getattr(kernel, name) for name in ("packed_decode", "extend", "target_verify")}
    return found


@functools.cache
def own_functions(layer: str) -> dict[str, Callable[..., Any]]:
    """Functions of one of `load`'s layers, from the folder that the environment names."""
    folder = os.environ.get(ENVIRONMENT)
    if folder is None:
        raise ValueError(f"{ENVIRONMENT}: names no folder with the engines' kernels")
    return load(Path(folder))[layer]


def store(state: torch.Tensor, src: torch.Tensor, indices: torch.Tensor) -> None:
    state[indices] = src


class SGLangKernel:
    """How SGLang's Triton kernel calls its functions."""

    def __init__(self, chunk_kda: Callable, packed: Callable, gated: ModuleType):
        self.chunk_kda, self.packed = chunk_kda, packed
        update = gated.fused_sigmoid_gating_delta_rule_update
        self.update = functools.partial(update, softplus_beta=1.0, softplus_threshold=20.0, is_kda=True)

    def packed_decode(self, _: None, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **call: Any) -> Any:
        rows, H, D = len(mixed_qkv), call["num_v_heads"], call["head_v_dim"]
        out = mixed_qkv.new_empty(rows, 1, H, D)
        gate = {name: call[name] for name in ("A_log", "dt_bias", "lower_bound", "scale")}
        states = {"initial_state": call["ssm_states"], "ssm_state_indices": call["cache_indices"], "out": out}
        options = {"use_qk_l2norm_in_kernel": True}
        self.packed(mixed_qkv=mixed_qkv, a=a.reshape(rows, -1), b=b.reshape(rows, -1), **gate, **states, **options)
        return out.transpose(0, 1)

    def extend(self, _: None, *tokens: torch.Tensor, **call: Any) -> Any:
        q, k, v, g, beta = tokens
        states = {"initial_state": call["ssm_states"], "initial_state_indices": call["cache_indices"]}
        named = ("A_log", "dt_bias", "lower_bound", "beta_is_raw", "track_state", "track_chunk_idx")
        given = {name: call.get(name) for name in named} | states
        given["output_intermediate_states"] = call["return_intermediate_states"]
        offsets = {"cu_seqlens": call["query_start_loc"], "use_qk_l2norm_in_kernel": True}
        return self.chunk_kda(q=q, k=k, v=v, g=g, beta=beta, **given, **offsets)

    def target_verify(self, _: None, **call: Any) -> Any:
        named = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "lower_bound", "cache_steps", "retrieve_parent_token")
        given = {name: call[name] for name in (*named, "intermediate_states_buffer", "intermediate_state_indices")}
        states = {"initial_state_source": call["ssm_states"], "initial_state_indices": call["cache_indices"]}
        options = {"use_qk_l2norm_in_kernel": True, "disable_state_update": True}
        return self.update(**given, **states, **options, cu_seqlens=call["query_start_loc"])


if __name__ == "__main__":
    print(extract(Path(sys.argv[1]), Path(sys.argv[2])), "files")
