"""SGLang's KDA kernels on flashdelta: decoding, extension with and without tracked states, verification of chains.

Methods of its Triton kernel, which is the default for all three, are replaced. What ours has not stays SGLang's: trees of
speculative tokens, and its ring of replayed ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import chunk_kda, recurrent_kda
from .engine import Arguments, Engine, first_rows, take, warm_up
from .seams import AnySeam, Attribute, Fields, Seam, Statement

Theirs = Callable[..., Any]

TRACKED = 64
"""Tokens of the chunks that SGLang counts tracked states by."""

LAYOUT = {"null_index": "negative", "use_qk_l2norm_in_kernel": True, "state_v_first": True}
"""Padded sequences have index -1, and slot 0 is a slot."""


def gate(call: Arguments) -> Arguments:
    """The layer applies none: g is what the projection gave, or a log decay where there are no parameters."""
    if call["A_log"] is None:
        return {}
    given = {name: call[name] for name in ("A_log", "dt_bias", "lower_bound")}
    return given | {"use_gate_in_kernel": True}


def packed_decode(theirs: Theirs, call: Arguments) -> Tensor:
    """A token a sequence, in place: `[1, B, HV, V]`."""
    mixed, states, slots = (call[name] for name in ("mixed_qkv", "ssm_states", "cache_indices"))
    if call.get("replayssm_d") is not None and call["lower_bound"] is None:
        return theirs(**call)
    rows, heads = mixed.shape[0], states.shape[1]
    ours = {
        "mixed_qkv": mixed,
        "g": call["a"].reshape(rows, heads * states.shape[3]),
        "beta": call["b"].reshape(rows, heads),
        "initial_state": states,
        "ssm_state_indices": slots,
        "scale": call["scale"],
        "beta_is_logit": True,
        **LAYOUT,
        **gate(call),
    }
    found = take(recurrent_kda, ours)
    return theirs(**call) if found is None else found[0].transpose(0, 1)


def target_verify(theirs: Theirs, call: Arguments) -> Tensor:
    """Of chains, read-only: the state after each token goes to SGLang's buffer, whence it commits the accepted one."""
    buffer, tokens = call["intermediate_states_buffer"], call["cache_steps"]
    unknown = ("retrieve_parent_token", "replayssm_rawv", "fused_accept_state_indices")
    if buffer is None or any(call.get(name) is not None for name in unknown):
        return theirs(**call)
    v, sequences = call["v"], call["query_start_loc"].shape[0] - 1
    T, heads, K = v.shape[1], v.shape[2], call["k"].shape[3]
    ours = {name: call[name] for name in "qkv"} | {
        "g": call["a"].reshape(1, T, heads, K),
        "beta": call["b"].reshape(1, T, heads),
        "initial_state": call["ssm_states"],
        "cu_seqlens": call["query_start_loc"],
        "ssm_state_indices": call["cache_indices"][:sequences],
        "num_spec_tokens": tokens - 1,
        "update_state": False,
        "intermediate_states": buffer[:, :tokens],
        "intermediate_state_indices": call["intermediate_state_indices"][:sequences],
        "beta_is_logit": True,
        **LAYOUT,
        **gate(call),
    }
    found = take(recurrent_kda, ours)
    return theirs(**call) if found is None else found[0]


def extend(theirs: Theirs, call: Arguments) -> Any:
    """Whole sequences, from the states in the pool to those after them. The tracked states go to SGLang's snapshot."""
    asked, snapshot = call["return_intermediate_states"], call.get("track_state")
    wanted = call.get("track_ssm_h_src")
    if asked and snapshot is None and (wanted is None or wanted.numel() > 0):
        return theirs(**call)  # the states of all chunks, in the activations' dtype
    sequences = call["query_start_loc"].shape[0] - 1
    ours = {name: call[name] for name in ("q", "k", "v", "g", "beta")} | {
        "cu_seqlens": call["query_start_loc"],
        "state_pool": call["ssm_states"],
        "state_indices": call["cache_indices"][:sequences],
        "use_beta_sigmoid_in_kernel": bool(call["beta_is_raw"]),
        **LAYOUT,
        **gate(call),
    }
    if snapshot is not None:
        ours |= tracked(snapshot, call["track_chunk_idx"], sequences)
    found = take(chunk_kda, ours)
    if found is None:
        return theirs(**call)
    return (found[0], None) if asked else found[0]


def tracked(snapshot: Tensor, chunks: Tensor, sequences: int) -> Arguments:
    """A state a sequence, before the chunk of that number; -1 means none, and SGLang tracks none before the first."""
    offsets = chunks[:sequences].clamp(min=0) * TRACKED
    rows = first_rows(sequences, chunks.device)
    return {"checkpoint_offsets": offsets, "checkpoint_indices": rows, "checkpoint_states": snapshot}


# ---- kernels of a model ----------------------------------------------------------------------------------------------


def built(theirs: Theirs, call: Arguments) -> None:
    """Of the backend, once the model is loaded and its pool is there: compiles what the layers will call."""
    theirs(**call)
    runner = call["model_runner"]
    states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    if states.is_cuda:
        bounds = {
            x.lower_bound for x in runner.model.modules() if hasattr(x, "lower_bound") and hasattr(x, "conv_weights")
        }
        spec = getattr(runner.req_to_token_pool.mamba_pool.mamba_cache, "intermediate_ssm", None) is not None
        for bound in bounds:
            warm(states.shape[-2:], runner.dtype, states.dtype, bound, spec, states.device)


@functools.cache
def warm(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    lower_bound: float | None,
    spec: bool,
    device: torch.device,
) -> None:
    options: Arguments = {
        "head_dims": [(sizes[1], sizes[0])],
        "dtype": dtype,
        "state_dtype": state_dtype,
        "gate": "softplus" if lower_bound is None else "lower_bound",
        "lower_bound": lower_bound,
        "state_v_first": True,
        "device": device,
    }
    tracks = {"checkpoint_states": (False, True), "checkpoint_dtype": torch.float32}
    warm_up(chunk_kda, **options, packed=(True,), state_pool=(True,), has_initial_state=(False,), **tracks)
    warm_up(recurrent_kda, **options, packed=(False, True) if spec else (False,), speculative=spec)


# ---- where -----------------------------------------------------------------------------------------------------------

LINEAR = "sglang.srt.layers.attention.linear"
KERNEL, BACKEND = f"{LINEAR}.kernels.kda_triton", f"{LINEAR}.kda_backend"
BASE = "sglang.srt.layers.attention.hybrid_linear_attn_backend"

DECODE = "self mixed_qkv a b A_log dt_bias scale ssm_states cache_indices num_v_heads head_v_dim lower_bound=None"
VERIFY = """self A_log dt_bias q k v a b ssm_states cache_indices query_start_loc intermediate_states_buffer
    intermediate_state_indices cache_steps retrieve_parent_token lower_bound=None cache_ring=False replayssm_rawv=None
    replayssm_rawk=None replayssm_g=None replayssm_beta=None"""
EXTEND = """self q k v g beta ssm_states cache_indices query_start_loc A_log=None dt_bias=None lower_bound=None
    beta_is_raw=False return_intermediate_states=False"""
RING = "replayssm_d replayssm_k replayssm_g replayssm_write_pos replayssm_force_flush"
ACCEPT = "fused_accept_state_indices fused_accept_num_accepted"
HINTS = """extend_seq_lens_cpu extend_prefix_lens layer_id is_spec_decode track_ssm_h_src track_state track_chunk_idx
    state_checkpoint_cu_starts num_state_checkpoints state_checkpoint_every_n_tokens state_checkpoint_indices
    track_ssm_h_batch_src chunk_indices chunk_offsets"""

PACKED = "supports_packed_decode_safe_gate"
SNAPSHOT = (
    "torch.empty((track_chunk_idx.shape[0], *ssm_states.shape[1:]), dtype=torch.float32, device=ssm_states.device)"
)

STATEMENTS = (
    Statement(BACKEND, "KDAKernelDispatcher.__init__", f"getattr(self.decode_kernel, '{PACKED}', False)"),
    Statement(BACKEND, "KDAAttnBackend.forward_extend", SNAPSHOT),
    Statement(BACKEND, "KDAAttnBackend.forward_extend", "core_attn_out, h = core_attn_out"),
    Statement(BASE, "MambaAttnBackendBase.mamba_chunk_size", f"'mamba_chunk_size', {TRACKED}"),
)
"""What asks for the attribute below, and what tracked states are: one for each sequence, by chunks of so many tokens."""

POOLS = "sglang.srt.mem_cache.memory_pool"

FIELDS = (
    # of what is read to compile kernels
    Fields("sglang.srt.model_executor.model_runner", "ModelRunner", "model dtype req_to_token_pool"),
    Fields(POOLS, "HybridReqToTokenPool", "mamba_pool"),
    Fields(POOLS, "MambaPool", "mamba_cache"),
    Fields(POOLS, "MambaPool.State", "temporal"),
    Fields(POOLS, "MambaPool.SpeculativeState", "intermediate_ssm"),
    Fields("sglang.srt.layers.radix_linear_attention", "RadixLinearAttention", "lower_bound conv_weights"),
)

CALLERS = (BACKEND, f"{LINEAR}.kda_prefill_graph")

SEAMS: tuple[AnySeam, ...] = (
    *STATEMENTS,
    *FIELDS,
    Seam(KERNEL, "TritonKDAKernel.packed_decode", packed_decode, DECODE, keywords=RING, callers=CALLERS),
    Seam(KERNEL, "TritonKDAKernel.target_verify", target_verify, VERIFY, keywords=ACCEPT, callers=CALLERS),
    Seam(KERNEL, "TritonKDAKernel.extend", extend, EXTEND, keywords=HINTS, callers=CALLERS),
    # SGLang packs steps of decoding with the bounded gate only for kernels that say so
    Attribute(KERNEL, f"TritonKDAKernel.{PACKED}", True),
    Seam(BACKEND, "KDAAttnBackend.__init__", built, "self model_runner"),
)

ENGINE = Engine(
    "sglang",
    environment="FLASHDELTA_SGLANG",
    read=("0.5.22", "0.5.23"),
    seams=SEAMS,
    replaces="packed decode, extend and chain verify of the Triton kernel",
)
enable, disable, status = ENGINE.enable, ENGINE.disable, ENGINE.status
