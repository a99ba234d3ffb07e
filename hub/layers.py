"""Functions that transformers' models ask the hub for, as `kernels` wants them: layers without parameters, with the signatures
of transformers' own functions. Packed sequences come as `cu_seqlens` or as `cu_seq_lens_q`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .integrations.packing import packed_attention, packed_convolution
from .ops.chunk import chunk_kda
from .ops.convolution import short_convolution
from .ops.recurrent import fused_recurrent_kda


def _on() -> bool:
    return True


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    names = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "chunk_size")
    return chunk_kda(q, k, v, cu_seqlens=cu_seqlens, **{name: options[name] for name in names})


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any) -> Tensor:
    return short_convolution(x.mT, weight, bias, activation=activation)[0].mT


_packed_attend = packed_attention(_attend, _on)
_packed_convolve = packed_convolution(_convolve, _on)


class chunk_kimi_delta_attention(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        options = {"initial_state": initial_state, "output_final_state": output_final_state, "chunk_size": chunk_size}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return _packed_attend(query, key, value, g=g, beta=beta, **options, **kwargs)


class recurrent_kimi_delta_attention(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return fused_recurrent_kda(query, key, value, g, beta, **options)


class causal_conv1d_fn(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        return _packed_convolve(hidden_states, weight, bias=bias, activation=activation, **kwargs)
