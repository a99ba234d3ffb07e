"""What a validated call of `kernels.chunk_bwd_wy_dqkg` is: the one door through which it is made, as in `problem.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import device_checks as checked
from .errors import wrong
from .problem import CHUNK_SIZES, HEAD_DIMS, check_bool, check_index_dtype, check_tensor, shape_of


@dataclass(frozen=True)
class WyTensors:
    """The tensors of a call, under the names that the caller used. None is ever written."""

    q: Tensor
    k: Tensor
    v: Tensor
    v_new: Tensor
    g: Tensor
    beta: Tensor
    A: Tensor
    h: Tensor
    dh: Tensor
    do: Tensor
    dv: Tensor
    cu_seqlens: Tensor | None = None

    def in_order(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in WY_NAMES)

    def present(self) -> dict[str, Tensor]:
        named = zip(WY_NAMES, self.in_order())
        return {name: x for name, x in named if x is not None}


WY_NAMES = tuple(f.name for f in fields(WyTensors))


@dataclass(frozen=True)
class WyGradients:
    """The results, in the order in which the operator returns them: `q, k, g [B, T, HV, K]`, `v [B, T, HV, V]` (in v's dtype),
    `beta [B, T, HV]` and `A [B, T, HV, C]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    A: Tensor

    def in_order(self) -> tuple[Tensor, ...]:
        return tuple(self.by_name().values())

    def by_name(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v, "beta": self.beta, "g": self.g, "A": self.A}

    @classmethod
    def allocate(cls, problem: WySpec, t: WyTensors) -> WyGradients:
        """Dense and unwritten; rows of tokens of no sequence stay so."""
        tokens = (problem.B, problem.T, problem.HV)
        wide = torch.float64 if problem.dtype == torch.float64 else torch.float32

        def empty(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return t.q.new_empty(shape, dtype=dtype)

        return cls(
            q=empty(*tokens, problem.K),
            k=empty(*tokens, problem.K),
            v=empty(*tokens, problem.V, dtype=problem.dtype),
            beta=empty(*tokens),
            g=empty(*tokens, problem.K),
            A=empty(*tokens, problem.chunk_size),
        )


@dataclass(frozen=True, kw_only=True)
class WySpec:
    """A call, validated. `B, T, H, HV, K, V` are the tensor sizes, `N` the number of sequences (`B`, or
    `len(cu_seqlens) - 1` when packed) and `rows` the chunks that `h` and `dh` hold of a batch row. `dtype` is that of q and of
    all operands of products; `state_dtype` and `state_grad_dtype` those of `h` and `dh`. `log2`: g is in base 2.
    `requires_grad` and `algorithm` are what backends ask of a call."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    rows: int
    chunk_size: int
    scale: float
    state_v_first: bool
    log2: bool
    packed: bool
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    A_dtype: torch.dtype
    state_dtype: torch.dtype
    state_grad_dtype: torch.dtype
    requires_grad: bool = False
    algorithm: str = "wy"

    @property
    def group(self) -> int:
        """Value heads per query/key head."""
        return self.HV // self.H

    @property
    def slots(self) -> int:
        """Upper bound on a batch row's chunks, known without reading a device tensor, as in `Problem`."""
        if self.packed:
            return self.T // self.chunk_size + self.N
        return -(-self.T // self.chunk_size)

    @property
    def state_shape(self) -> tuple[int, int, int, int, int]:
        """Of `h` and `dh`."""
        inner = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return (self.B, self.rows, self.HV, *inner)


def check_wy(
    t: WyTensors,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
    use_exp2: bool = False,
) -> WySpec:
    """Validates a call and returns its problem.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: anything else; the message names the argument, what came and what was wanted.
    """
    check_bool("state_v_first", state_v_first)
    check_bool("use_exp2", use_exp2)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale: got {scale!r} ({type(scale).__name__}), wanted a float or None")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        kind = type(chunk_size).__name__
        raise TypeError(f"chunk_size: got {chunk_size!r} ({kind}), wanted an int, one of {CHUNK_SIZES}")
    if chunk_size not in CHUNK_SIZES:
        raise wrong("chunk_size", repr(chunk_size), f"one of {CHUNK_SIZES}")
    _check_shapes(t, chunk_size, state_v_first)
    _check_dtypes(t)
    for name, x in t.present().items():
        if x.device != t.q.device:
            raise wrong(name, f"device {x.device}", f"q's device {t.q.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise wrong(name, "a tensor that requires grad", "torch.no_grad() (this is a backward pass: it has none)")
    problem = wy_spec_of(t, scale, chunk_size, state_v_first, use_exp2)
    if problem.packed and checked.enabled():
        checked.check_offsets(t.cu_seqlens, problem.T)
        checked.check_rows(problem, t.cu_seqlens)
    return problem


def wy_spec_of(t: WyTensors, scale: float | None, chunk_size: int, state_v_first: bool, use_exp2: bool) -> WySpec:
    """The problem of tensors already validated."""
    B, T, H, K = t.q.shape
    return WySpec(
        B=B,
        T=T,
        H=H,
        HV=t.v.shape[2],
        K=K,
        V=t.v.shape[3],
        N=B if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1,
        rows=t.h.shape[1],
        chunk_size=chunk_size,
        scale=K**-0.5 if scale is None else float(scale),
        state_v_first=state_v_first,
        log2=use_exp2,
        packed=t.cu_seqlens is not None,
        dtype=t.q.dtype,
        g_dtype=t.g.dtype,
        beta_dtype=t.beta.dtype,
        A_dtype=t.A.dtype,
        state_dtype=t.h.dtype,
        state_grad_dtype=t.dh.dtype,
    )


def _check_shapes(t: WyTensors, C: int, state_v_first: bool) -> None:
    ranks = {"beta": 3, "h": 5, "dh": 5, "cu_seqlens": 1}
    for name in WY_NAMES:
        if name != "cu_seqlens" or t.cu_seqlens is not None:
            check_tensor(name, getattr(t, name), ranks.get(name, 4))
    B, T, H, K = t.q.shape
    HV, V = t.v.shape[2:]
    if H == 0:
        raise wrong("q", f"shape {shape_of(t.q)}", "at least one head")
    if HV == 0 or HV % H != 0:
        raise wrong("v", f"{HV} value heads", f"a positive multiple of the {H} query/key heads")
    if K not in HEAD_DIMS:
        raise wrong("q", f"K = {K}", f"K in {HEAD_DIMS}")
    if V not in HEAD_DIMS:
        raise wrong("v", f"V = {V}", f"V in {HEAD_DIMS}")
    if t.cu_seqlens is not None:
        if t.cu_seqlens.numel() < 1:
            raise wrong("cu_seqlens", "an empty tensor", "N + 1 offsets")
        if B != 1:
            raise wrong("q", f"batch size {B}", "batch size 1 with cu_seqlens (pack the sequences along T)")
    keys, values, tokens = ("[B, T, HV, K]", (B, T, HV, K)), ("[B, T, HV, V]", (B, T, HV, V)), (B, T, HV)
    wanted = {
        "k": ("q's shape", (B, T, H, K)),
        "v": values,
        "v_new": values,
        "g": keys,
        "beta": ("[B, T, HV]", tokens),
        "A": ("[B, T, HV, chunk_size]", (*tokens, C)),
        "do": values,
        "dv": values,
    }
    for name, (words, shape) in wanted.items():
        _expect(name, getattr(t, name), words, shape)
    rows = -(-T // C) if t.cu_seqlens is None else t.h.shape[1]
    inner = (V, K) if state_v_first else (K, V)
    words = f"[B, NT, HV, {'V, K' if state_v_first else 'K, V'}]"
    for name in ("h", "dh"):
        _expect(name, getattr(t, name), words, (B, rows, HV, *inner))


def _expect(name: str, x: Tensor, words: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise wrong(name, f"shape {shape_of(x)}", f"{words} = {list(shape)}")


def _check_dtypes(t: WyTensors) -> None:
    dtype = t.q.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"q: got dtype {dtype}, wanted bfloat16, float16, float32 or float64")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name in ("k", "v", "v_new", "do", "dv"):
        x = getattr(t, name)
        if x.dtype != dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted q's dtype {dtype}")
    if t.g.dtype != wide:
        raise TypeError(f"g: got dtype {t.g.dtype}, wanted {wide}")
    for name in ("beta", "A", "h", "dh"):
        x = getattr(t, name)
        if x.dtype not in (dtype, wide):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted {wide} or q's dtype {dtype}")
    check_index_dtype("cu_seqlens", t.cu_seqlens)
