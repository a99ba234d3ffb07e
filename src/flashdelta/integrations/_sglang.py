"""SGLang's KDA kernels on flashdelta: decoding, extension with and without tracked states, verification of chains.

Methods of its Triton kernel, which is the default for all three, are replaced. The rest stays SGLang's: trees of
speculative tokens, and its ring of replayed ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import chunk_kda, recurrent_kda
from .engine import Arguments, Engine, first_rows, take, warm_up
from .seams import Patch

Original = Callable[..., Any]

TRACKED = 64
"""Tokens of the chunks that SGLang counts tracked states by."""

LAYOUT = {"null_index": "negative", "use_qk_l2norm_in_kernel": True, "state_v_first": True}
"""Padded sequences have index -1, and slot 0 is a slot."""


def gate(call: Arguments) -> Arguments:
    """Options of the gate, which the layer does not apply: g is what the projection gave, or a log decay without parameters."""
    if call["A_log"] is None:
        return {}
    return {name: call[name] for name in ("A_log", "dt_bias", "lower_bound")} | {"use_gate_in_kernel": True}


def packed_decode(original: Original, call: Arguments) -> Tensor:
    """One token per sequence, in place: `[1, B, HV, V]`."""
    mixed, states, slots = (call[name] for name in ("mixed_qkv", "ssm_states", "cache_indices"))
    if call.get("replayssm_d") is not None and call["lower_bound"] is None:
        return original(**call)
    rows, heads = mixed.shape[0], states.shape[1]
    gates = {"g": call["a"].reshape(rows, heads * states.shape[3]), "beta": call["b"].reshape(rows, heads)}
    ours = {"mixed_qkv": mixed, **gates, "scale": call["scale"], "beta_is_logit": True, **LAYOUT, **gate(call)}
    found = take(recurrent_kda, ours | {"initial_state": states, "ssm_state_indices": slots})
    return original(**call) if found is None else found[0].transpose(0, 1)


def target_verify(original: Original, call: Arguments) -> Tensor:
    """Verifies chains, read-only: the state after each token goes to SGLang's buffer, whence it commits the accepted one."""
    buffer, tokens = call["intermediate_states_buffer"], call["cache_steps"]
    unknown = ("retrieve_parent_token", "replayssm_rawv", "fused_accept_state_indices")
    if buffer is None or any(call.get(name) is not None for name in unknown):
        return original(**call)
    v, sequences = call["v"], call["query_start_loc"].shape[0] - 1
    T, heads, K = v.shape[1], v.shape[2], call["k"].shape[3]
    ours = {name: call[name] for name in "qkv"} | {"cu_seqlens": call["query_start_loc"], **LAYOUT, **gate(call)}
    ours |= {"g": call["a"].reshape(1, T, heads, K), "beta": call["b"].reshape(1, T, heads), "beta_is_logit": True}
    ours |= {"initial_state": call["ssm_states"], "ssm_state_indices": call["cache_indices"][:sequences]}
    ours |= {"num_spec_tokens": tokens - 1, "update_state": False, "intermediate_states": buffer[:, :tokens]}
    ours["intermediate_state_indices"] = call["intermediate_state_indices"][:sequences]
    found = take(recurrent_kda, ours)
    return original(**call) if found is None else found[0]


def extend(original: Original, call: Arguments) -> Any:
    """Runs whole sequences, from the states in the pool to those after them. The tracked states go to SGLang's snapshot."""
    asked, snapshot = call["return_intermediate_states"], call.get("track_state")
    wanted = call.get("track_ssm_h_src")
    if asked and snapshot is None and (wanted is None or wanted.numel() > 0):
        return original(**call)  # the states of all chunks, in the activations' dtype
    sequences = call["query_start_loc"].shape[0] - 1
    ours = {name: call[name] for name in (*"qkvg", "beta")} | {"cu_seqlens": call["query_start_loc"]}
    ours |= {"state_pool": call["ssm_states"], "state_indices": call["cache_indices"][:sequences]}
    ours |= {"use_beta_sigmoid_in_kernel": bool(call["beta_is_raw"]), **LAYOUT, **gate(call)}
    if snapshot is not None:
        # one state per sequence, before the chunk of that number; -1 means none, and SGLang tracks none before the first
        chunks = call["track_chunk_idx"]
        ours |= {"checkpoint_offsets": chunks[:sequences].clamp(min=0) * TRACKED, "checkpoint_states": snapshot}
        ours["checkpoint_indices"] = first_rows(sequences, chunks.device)
    found = take(chunk_kda, ours)
    if found is None:
        return original(**call)
    return (found[0], None) if asked else found[0]


# ---- kernels of a model ----------------------------------------------------------------------------------------------


def built(original: Original, call: Arguments) -> None:
    """Compiles what the layers will call, once the model is loaded and the backend's pool is there."""
    original(**call)
    runner = call["model_runner"]
    states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    if states.is_cuda:
        layers = [x for x in runner.model.modules() if hasattr(x, "lower_bound") and hasattr(x, "conv_weights")]
        spec = getattr(runner.req_to_token_pool.mamba_pool.mamba_cache, "intermediate_ssm", None) is not None
        for bound in {x.lower_bound for x in layers}:
            warm(states.shape[-2:], runner.dtype, states.dtype, bound, spec, states.device)


@functools.cache
def warm(sizes: Any, dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: Any, spec: bool, device: Any) -> None:
    options: Arguments = {"gate": "softplus" if lower_bound is None else "lower_bound", "lower_bound": lower_bound}
    options |= {"dtype": dtype, "state_dtype": state_dtype, "state_v_first": True}
    options |= {"head_dims": [(sizes[1], sizes[0])], "device": device}
    tracks = {"checkpoint_states": (False, True), "checkpoint_dtype": torch.float32}
    warm_up(chunk_kda, **options, packed=(True,), state_pool=(True,), has_initial_state=(False,), **tracks)
    warm_up(recurrent_kda, **options, packed=(False, True) if spec else (False,), speculative=spec)


# ---- where -----------------------------------------------------------------------------------------------------------

LINEAR = "sglang.srt.layers.attention.linear"
KERNEL, BACKEND = f"{LINEAR}.kernels.kda_triton", f"{LINEAR}.kda_backend"
BASE = "sglang.srt.layers.attention.hybrid_linear_attn_backend"

DISPATCHER, GRAPH = "KDAKernelDispatcher", f"{LINEAR}.kda_prefill_graph"
POOLS = "sglang.srt.mem_cache.memory_pool"

RING = "replayssm_d replayssm_k replayssm_g replayssm_write_pos replayssm_force_flush"
ACCEPT = "fused_accept_state_indices fused_accept_num_accepted"
HINTS = """extend_seq_lens_cpu extend_prefix_lens layer_id is_spec_decode track_ssm_h_src track_state track_chunk_idx
    state_checkpoint_cu_starts num_state_checkpoints state_checkpoint_every_n_tokens state_checkpoint_indices
    track_ssm_h_batch_src chunk_indices chunk_offsets"""

PATCHES: tuple[Patch, ...] = (
    Patch(KERNEL, "TritonKDAKernel.packed_decode", "d5b239db8935d95c", packed_decode, RING),
    Patch(KERNEL, "TritonKDAKernel.target_verify", "91ef27869bc18f74", target_verify, ACCEPT),
    Patch(KERNEL, "TritonKDAKernel.extend", "6f18ccb907579f7d 2ae71513e6f4a523", extend, HINTS),
    # SGLang packs steps of decoding with the bounded gate only for kernels that say so
    Patch(KERNEL, "TritonKDAKernel.supports_packed_decode_safe_gate", value=True),
    Patch(BACKEND, "KDAAttnBackend.__init__", "baef4884224e1c0f 5af2ac4381b6ba5f", built),
    # read, not replaced: callers, and what is read to compile kernels
    Patch(BACKEND, f"{DISPATCHER}.__init__", "afe751a871e60ce5"),
    Patch(BACKEND, f"{DISPATCHER}.packed_decode", "af04a49c61e67706"),
    Patch(BACKEND, f"{DISPATCHER}.target_verify", "8ab0dce5f46dbbfe"),
    Patch(BACKEND, f"{DISPATCHER}.effective_extend_kernel", "f1e54cbeac368527 1af1702593d3b673"),
    Patch(BACKEND, f"{DISPATCHER}.extend", "c73b66ac70c841f5 8dad507ce2900196"),
    Patch(BACKEND, "KDAAttnBackend.forward_decode", "4cdc539ac94bfc82 3f91c629c24422ab"),
    Patch(BACKEND, "KDAAttnBackend.forward_extend", "7a867d00909acbb1 d37f721fdd7fb169"),
    Patch(BACKEND, "KDAAttnBackend._forward_target_verify", "9890b978362a4ba6"),
    Patch(GRAPH, "kda_extend_in_graph", "8da37575130f0bd2 5f38f36f88278a13"),
    Patch(BASE, "MambaAttnBackendBase.mamba_chunk_size", "95d355c71137ae0e"),
    Patch(POOLS, "HybridReqToTokenPool.__init__", "e9ec31d9cf57a84a"),
    Patch(POOLS, "MambaPool.__init__", "327cf5fdd61bb684"),
    Patch(POOLS, "MambaPool.State", "45df1bda32dad804"),
    Patch(POOLS, "MambaPool.SpeculativeState", "e8a7a3f670d64781"),
    Patch("sglang.srt.layers.radix_linear_attention", "RadixLinearAttention.__init__", "ccd15219194dd5c2"),
)

ENGINE = Engine(
    name="sglang",
    environment="FLASHDELTA_SGLANG",
    read=("0.5.22", "0.5.23"),
    patches=PATCHES,
    replaces="packed decode, extend and chain verify of the Triton kernel",
)
enable, disable, status = ENGINE.enable, ENGINE.disable, ENGINE.status
