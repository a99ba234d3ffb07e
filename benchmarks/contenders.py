"""Calls of other libraries on the tensors of ours: FLA, cuDNN, FlashKDA, attention-gym, the engines' kernels."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import FP32, Case
from tests.support.engines import EPS

from .gate import Results

PEERS = {
    "fla": ("fla.ops.kda", "chunk_kda"),
    "fla_decode": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"),
    "fla_conv": ("fla.modules.causal_conv1d", "causal_conv1d"),
    "fla_conv_update": ("fla.modules.causal_conv1d", "causal_conv1d_update"),
    "fla_gate": ("fla.ops.kda.gate", "kda_gate_fwd"),
    "fla_norm": ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"),
    "fla_wy": ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd_wy_dqkg_fused"),
    "flash_kda": ("vllm", "_flashkda_C"),
    "vllm_fused": ("vllm", "_C_stable_libtorch"),
    "cudnn": ("cudnn.linear_attention.ops", "kimi_delta_attention"),
    "attn_gym": ("attn_gym.linear.kda", "chunk_kda"),
    "engine": ("tests.support.engine_kernels", "own_functions"),
}
"""Module and function, or a library of vLLM's. FLA's public decode takes no slots, so its launcher is called."""


def operators(library: str) -> Any:
    """The operators of a library of vLLM 0.33.0's: one in the folder `VLLM_LIBRARIES`, such as `vllm` of its unzipped wheel,
    or that of the vLLM that is installed. They use PyTorch's stable ABI, so that they run under other versions of PyTorch."""
    folder = os.environ.get("VLLM_LIBRARIES") or importlib.metadata.distribution("vllm").locate_file("vllm")
    torch.ops.load_library(f"{folder}/{library}.abi3.so")
    return getattr(torch.ops, library.removesuffix("_stable_libtorch"))


def find(peer: str) -> Any:
    """The library's function, or why there is none."""
    module, name = PEERS[peer]
    try:
        return operators(name) if module == "vllm" else getattr(importlib.import_module(module), name)
    except Exception as error:  # libraries probe GPUs and Triton while they are imported, and any of that may fail
        return f"can't be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def shared(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that FLA's `chunk_kda` takes, too, under the same names, but no offsets on the host."""
    theirs = {*inspect.signature(find("fla")).parameters, "A_log", "dt_bias"} - {"cu_seqlens_cpu"}
    return {name: x for name, x in call.items() if name in theirs}


def values_first(call: Mapping[str, Any], case: Case) -> Tensor | None:
    """The initial state as `[V, K]`."""
    state = call.get("initial_state")
    return state if state is None or case.v_first else state.mT.contiguous()


def refusal(case: Case, bounded: bool = True, ungrouped: bool = True) -> str | None:
    """Why a library for K = V = 128, bounded gates, ungrouped heads can't run the case, if it can't."""
    wanted = {
        "bounded gates": not bounded or case.gate == "lower_bound",
        "as many value as key heads": not ungrouped or case.H == case.HV,
        "K = V = 128": (case.K, case.V) == (128, 128),
    }
    return None if all(wanted.values()) else f"takes {', '.join(x for x, there in wanted.items() if not there)}"


# ---- whole sequences -----------------------------------------------------------------------------------------------------


def flash_kda(operators: Any, call: dict, case: Case) -> Callable[[], Results] | str:
    """FlashKDA writes into buffers, states `[V, K]`. Its scratch memory is kept from call to call, as vLLM keeps it."""
    if refused := refusal(case):
        return refused
    initial, given = values_first(call, case), [call[name].contiguous() for name in ("q", "k", "v", "g")]
    size = operators.get_workspace_size(case.batch * case.tokens, case.H, case.sequences)
    workspace = torch.empty(size, dtype=torch.uint8, device=call["q"].device)
    gate = call["A_log"], call["dt_bias"].view(case.HV, case.K), case.lower_bound

    def run() -> Results:
        out = torch.empty_like(call["v"])
        state = call["v"].new_empty(case.sequences, case.HV, case.V, case.K, dtype=FP32)
        states = initial, state, call.get("cu_seqlens"), None, None
        operators.fwd(*given, call["beta"], case.K**-0.5, out, workspace, *gate, *states)
        return out, state if case.v_first else state.mT

    return run


def attn_gym(op: Callable, call: dict, case: Case) -> Callable[[], Results] | str:
    """attention-gym normalises and makes gates by kernels of their own; states are `[V, K]`."""
    if refused := refusal(case):
        return refused
    kda = importlib.import_module("attn_gym.linear.kda")
    bound_gate = importlib.import_module("attn_gym.linear.kda.gate").bound_gate
    initial, offsets = values_first(call, case), call.get("cu_seqlens")
    options = {"cu_seqlens": None if offsets is None else offsets.int(), "output_final_state": True}

    def run() -> Results:
        gate = bound_gate(call["g"], call["A_log"], call["dt_bias"].view(case.HV, -1), lower_bound=case.lower_bound)
        q, k, beta = kda.l2norm(call["q"]), kda.l2norm(call["k"]), call["beta"].float().sigmoid()
        o, state = op(q, k, call["v"], gate, beta, initial, **options)
        return o, state if case.v_first else state.mT

    return run


CUDNN = {"cudnn": "kda_hopper_cuda", "cudnn_ready": "kda_hopper_cuda", "cudnn_cute": "kda_hopper"}
"""Engines by contender. "cudnn" gets our inputs; the others get ready ones, made before the clock starts, as the CuTe engine
takes no others and cuDNN's own figures are of such."""


def made_ready(call: dict, case: Case) -> dict[str, Tensor]:
    """Norms, gate and sigmoid by PyTorch in float32; q and k are rounded again."""
    raw = call["g"].float() + call["dt_bias"].view(case.HV, case.K)
    rate = call["A_log"].exp()[:, None]
    bounded = case.gate == "lower_bound"
    g = case.lower_bound * (rate * raw).sigmoid() if bounded else -rate * torch.nn.functional.softplus(raw)
    q, k = (torch.nn.functional.normalize(call[name].float(), dim=-1).to(call[name].dtype) for name in ("q", "k"))
    return tokens_of({"q": q, "k": k, "v": call["v"], "g": g, "beta": call["beta"].float().sigmoid()})


def as_given(call: dict, case: Case) -> dict[str, Any]:
    """Arguments with norms, gate and sigmoid in the kernel."""
    flags = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    gate = {"a_log": call["A_log"], "dt_bias": call["dt_bias"].view(case.HV, case.K)}
    return tokens_of(call) | gate | {"gate_lower_bound": case.lower_bound, **dict.fromkeys(flags, True)}


def tokens_of(call: Mapping[str, Tensor]) -> dict[str, Any]:
    """All sequences' tokens in one row."""
    return {name: call[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}


def bind_cudnn(op: Callable, name: str, call: dict, case: Case) -> Callable[[Mapping[str, Any]], Results]:
    """cuDNN's operator as a function of its inputs. States are `[V, K]`."""
    offsets = call.get("cu_seqlens", torch.arange(case.sequences + 1, device=call["q"].device) * case.T)
    initial = {} if "initial_state" not in call else {"initial_state": values_first(call, case)}
    fixed = {"cu_seqlens": offsets.int(), **initial, "output_final_state": case.final, "plan_name": CUDNN[name]}

    def run(inputs: Mapping[str, Any]) -> Results:
        try:
            o, state = op(**inputs, **fixed)
        except Exception:
            # a refused graph stays among its graphs, where the next call would find it and run it by another engine
            getattr(sys.modules[op.__module__], "fprop_cache", {}).clear()
            raise
        return o.view(call["v"].shape), state if case.v_first or not case.final else state.mT

    return run


def cudnn_refusal(name: str, case: Case, training: bool = False) -> str | None:
    return refusal(case, bounded=name == "cudnn" and not training, ungrouped=training or name == "cudnn_cute")


def cudnn_prefills(op: Any, call: dict, case: Case) -> dict[str, Callable[[], Results] | str]:
    if isinstance(op, str):
        return {"cudnn": op}
    ready = made_ready(call, case)
    made: dict[str, Callable[[], Results] | str] = {}
    for name in CUDNN:
        run = bind_cudnn(op, name, call, case)
        made[name] = cudnn_refusal(name, case) or functools.partial(
            run, ready if name != "cudnn" else as_given(call, case)
        )
    return made


def fla_wy(function: Callable, call: dict) -> Callable[[], Results]:
    """FLA's kernel on our tensors. Its table of chunks is made here: a training step makes it once."""
    given = {name: x for name, x in call.items() if name not in ("use_exp2", "backend")}
    indices, size = None, given["chunk_size"]
    if given.get("cu_seqlens") is not None:
        indices = importlib.import_module("fla.ops.utils").prepare_chunk_indices(given["cu_seqlens"], size)
    scale = given["scale"] or given["q"].shape[-1] ** -0.5  # its default is no number
    return functools.partial(function, **given | {"scale": scale}, chunk_indices=indices)


# ---- a step of decoding --------------------------------------------------------------------------------------------------

FLA_DECODE = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "state_v_first", "use_qk_l2norm_in_kernel"),
)


def fla_step(function: Callable, call: Mapping[str, Any], slots: Tensor, gate: bool = True) -> object:
    """FLA's step on slots of the pool; without `gate`, g are log decays already."""
    gated = gate and "A_log" in call
    dropped = () if gated else ("A_log", "dt_bias")
    return function(
        **{name: call[name] for name in FLA_DECODE if name in call and name not in dropped},
        **({"lower_bound": call["lower_bound"]} if gated else {}),
        use_gate_in_kernel=gated,
        use_beta_sigmoid_in_kernel=True,
        inplace_final_state=True,
        ssm_state_indices=slots,
        out=call["output"],
    )


FLA_TUNED = ("causal_conv1d_update_kernel", "kda_gate_fwd_kernel", "layer_norm_gated_fwd_kernel")
"""Kernels of FLA's step that keep the configuration that was fastest for the first batch, whatever its size."""


def tune_anew() -> None:
    """Lets FLA choose these for the next batch: at 128 sequences the choice for 1 takes 14 times as long."""
    from triton.runtime.autotuner import Autotuner  # Triton is for Linux only
    from triton.testing import do_bench

    for tuner in [x for x in gc.get_objects() if issubclass(type(x), Autotuner)]:
        if tuner.base_fn.__name__ in FLA_TUNED:
            tuner.cache.clear()
            tuner.cache_results = False
            tuner.do_bench = functools.partial(do_bench, warmup=5, rep=20)


def fla_layer_step(
    functions: Mapping[str, Any], call: dict, x: Sequence[Tensor], weights: Sequence[Tensor], z: Tensor, norm: Tensor
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """FLA's kernels as its layer calls them: a convolution each for q, k and v, gate, step, norm. Its windows are rows of a
    batch, `[N, D, W]`; the caller fills them."""
    caches = [rows.new_zeros(len(rows), w.shape[0], w.shape[1]) for rows, w in zip(x, weights)]
    heads = [call[name].shape[-2:] for name in "qkv"]
    gate = {name: call[name] for name in ("A_log", "dt_bias", "lower_bound")}

    def run(slots: Tensor) -> Tensor:
        qkv = [
            functions["fla_conv_update"](rows[:, None], cache, weight=w, activation="silu")[0].unflatten(-1, head)
            for rows, cache, w, head in zip(x, caches, weights, heads)
        ]
        g = functions["fla_gate"](call["g"], **gate)
        fla_step(functions["fla_decode"], {**call, **dict(zip("qkv", qkv)), "g": g}, slots, gate=False)
        return functions["fla_norm"](call["output"], z[:, None], norm, bias=None, activation="sigmoid", eps=EPS)

    return caches, run
