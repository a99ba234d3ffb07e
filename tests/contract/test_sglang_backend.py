"""SGLang's own backend code, taken out of its wheel and run on a CPU with the integration's methods: decoding, extension with
and without tracked states, verification. Convolution is left out, as it is not ours."""

from __future__ import annotations
import __future__

import ast
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdelta.integrations import _sglang
from flashdelta.integrations.seams import Source

from ..support.cases import FP32
from ..support.engine_kernels import wheel
from ..support.engines import LAYERS, Batch, Marks, Model
from ..support.oracle import same_bits

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

H, D = 2, 32


def own(module: str, name: str) -> Callable[..., Any]:
    """A method of SGLang's, with what it finds in its module stood in for."""
    source = Source(zipfile.Path(wheel(Path(str(FOLDER)), "sglang", _sglang.ENGINE.read[-1])))
    (node,) = source.definitions(module, name)
    contents = {
        "torch": torch,
        "is_gfx95_supported": lambda: False,
        "causal_conv1d_update": lambda x, *others, **named: x,
        "select_verify_intermediate_state_indices": lambda default, *others: default,
    }
    code = compile(ast.Module([node], []), module, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, contents)
    return contents[node.name]


class Backend:
    """As far as its methods look."""

    def __init__(self) -> None:
        self.model = Model(H, D, dtype=FP32, device="cpu")
        self.pool = self.model.pool(12)
        call = LAYERS["SGLang"](self.model).call
        self.buffer = self.pool.new_zeros(4, 5, H, D, D)  # of more tokens than are verified
        cache = SimpleNamespace(temporal=self.pool, conv=[torch.zeros(12, 3, 3 * H * D)], intermediate_ssm=self.buffer)
        cache.intermediate_conv_window = [torch.zeros(4, 5, 3, 3 * H * D)]
        vars(cache).update(dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g")))
        kernel = SimpleNamespace(supports_track_state_snapshot=True)
        self.kernel_dispatcher = SimpleNamespace(
            extend=lambda q, k, v, g, beta, **named: call.extend(None, q, k, v, g, beta, **named),
            target_verify=lambda **named: call.target_verify(None, **named),
            packed_decode=lambda mixed_qkv, a, b, **named: call.packed_decode(None, mixed_qkv, a, b, **named),
            effective_extend_kernel=lambda *x: kernel,
            supports_packed_decode=True,
            supports_packed_decode_safe_gate=True,
        )
        self.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer: cache)
        self.req_to_token_pool.size = 4
        self.prefill_graph_metadata = self.accept_lens_pool = None
        self.verify_intermediate_state_indices = self.model.index(range(4))
        self._can_run_dspark_cutedsl_mtp = self._can_run_fused_chain_verify = lambda **named: False
        dims = {f"{x}_dim": H * D for x in "qkv"} | {f"head_{x}_dim": D for x in "qkv"}
        self.layer = SimpleNamespace(layer_id=0, conv_weights=None, bias=None, num_v_heads=H, **self.model.gate, **dims)

    def _convolve_prefill(self, layer: Any, batch: Any, mixed: Tensor, *others: Any) -> Tensor:
        return mixed

    def _track_mamba_state_decode(self, *others: Any) -> None:
        """Copies states that are stored."""

    def _track_mamba_state_extend(self, *arguments: Any, **named: Any) -> None:
        own(_sglang.BASE, "MambaAttnBackendBase._track_mamba_state_extend")(self, *arguments, **named)

    def run(self, method: str, batch: Batch, slots: Tensor, **metadata: Any) -> Tensor:
        hints = ("cu_starts", "indices", "every_n_tokens")
        fields: dict[str, Any] = {f"state_checkpoint_{x}": None for x in hints} | {"num_state_checkpoints": None}
        fields |= {"logical_num_tokens": sum(batch.lengths), "has_mamba_track_mask": False, "track_chunk_idx": None}
        fields |= {"track_ssm_h_batch_src": None, "query_start_loc": batch.offsets, "mamba_cache_indices": slots}
        fields |= dict.fromkeys([f"retrieve_{x}" for x in ("next_token", "next_sibling", "parent_token")])
        self.forward_metadata = SimpleNamespace(**(fields | metadata))
        mode = SimpleNamespace(is_target_verify=lambda: False, is_draft_extend_v2=lambda: False)
        lengths = [*batch.lengths]
        prefixes = torch.zeros(len(lengths), dtype=torch.int32)
        forward_batch = SimpleNamespace(
            forward_mode=mode,
            extend_prefix_lens=prefixes,
            extend_seq_lens_cpu=lengths,
            req_pool_indices=None,
            spec_info=SimpleNamespace(draft_token_num=lengths[0], ragged_verify_layout=None),
        )
        a, b = batch.g.flatten(2), batch.beta
        with torch.inference_mode():
            function = own(_sglang.BACKEND, f"KDAAttnBackend.{method}")
            return function(self, self.layer, forward_batch, batch.mixed, a, b)


def test_decode():
    backend = Backend()
    other = backend.model.pool(12).copy_(backend.pool)
    batch, slots = Batch(backend.model, backend.model.tokens(3), [1] * 3), backend.model.index([4, 0, -1])
    o = backend.run("forward_decode", batch, slots)
    with torch.inference_mode():
        want = LAYERS["SGLang"](backend.model).decode(batch, other, slots)
    assert same_bits(o, want) and same_bits(backend.pool, other)


TRACKED = {"none": (0, 0), "within": (64, 0), "at the end": (0, 2)}
"""After how many tokens of the first sequence a state is tracked, and whether the second's last one is: in slot 9 and 10."""


@pytest.mark.parametrize("kind", TRACKED)
def test_extend(kind: str):
    """130 tokens, 128 tokens, and rows that no sequence has."""
    backend, (offset, final) = Backend(), TRACKED[kind]
    index = backend.model.index
    other = backend.model.pool(12).copy_(backend.pool)
    rows = backend.model.tokens(270)
    batch, slots = Batch(backend.model, rows, [130, 128]), index([3, 5])
    long = torch.int64
    metadata: dict[str, Any] = {}
    if kind != "none":
        some = torch.tensor([0] * bool(offset), dtype=long)
        metadata = {
            "has_mamba_track_mask": True,
            "conv_states_mask_indices": torch.tensor([9]),
            "track_conv_indices": torch.arange(3)[None],
            "track_chunk_idx": index([offset // 64 if offset else -1, -1]),
            "track_ssm_h_src": some,
            "track_ssm_h_batch_src": some,
            "track_ssm_h_dst": some + 9,
            "track_ssm_recompute_dst": None,
            "track_ssm_final_src": torch.tensor([5] * bool(final), dtype=long),
            "track_ssm_final_dst": torch.tensor([10] * bool(final), dtype=long),
        }
    o = backend.run("forward_extend", batch, slots, **metadata)
    marks = Marks([offset, 0], [9, -1]) if offset else None
    with torch.inference_mode():
        own_rows = Batch(backend.model, rows[:258], [130, 128])
        want = LAYERS["SGLang"](backend.model).prefill(own_rows, other, slots, torch.ones(2, dtype=torch.bool), marks)
        if final:
            other[10] = other[5]
    assert same_bits(o[:, :258], want) and not o[:, 258:].any() and same_bits(backend.pool, other)


def test_verify():
    """Three tokens per sequence, the last one padding; SGLang commits the states from its buffer."""
    backend = Backend()
    batch, slots = Batch(backend.model, backend.model.tokens(9), [3] * 3), backend.model.index([4, 0, -1])
    before, buffer = backend.pool.clone(), torch.zeros_like(backend.buffer)
    o = backend.run("_forward_target_verify", batch, slots)
    with torch.inference_mode():
        want = LAYERS["SGLang"](backend.model).verify_read_only(batch, backend.pool, slots, buffer, 3)
    assert same_bits(o, want) and same_bits(backend.buffer, buffer) and same_bits(backend.pool, before)
    assert buffer[:2, :3].any((2, 3, 4)).all() and not buffer[2:].any() and not buffer[:, 3:].any()
