"""Kernels of the training step as operators of their own, for code that builds another step around them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .backends.hopper import wy_obstacle
from .backends.triton import TritonBackend
from .problem.problem import is_plain
from .problem.wy_spec import WY_NAMES, WyGradients, WySpec, WyTensors, check_wy, wy_spec_of
from .program import cache as plans


def chunk_bwd_wy_dqkg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    dh: Tensor,
    do: Tensor,
    dv: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
    use_exp2: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""The fused backward of a chunk's WY step: from states and their gradients to those of its inputs.

    Without what goes through the entries of the chunk's matrix `A` and of its attention matrix `Aqk`.
    With `G` the sums of log decays in the chunk, `M = (I + A)^-1`, the state `S` before the chunk and the gradient `dS'` of the
    state after it (Kimi Linear, arXiv 2510.26692, section 3; docs/backward.md derives each line):

        dw = -dv S^T;   R = M^T dv;   Z = M^T dw;   dM = (dv v^T + dw (k exp G)^T) diag(beta)
        dq = scale (do S^T) exp(G)
        dk = (v' dS'^T) exp(G_C - G) + beta Z exp(G)
        dv = beta R;   dbeta = <R, v> + <Z, k exp(G)>;   dA = -strict_lower(M^T dM M^T)
        dG = q dq + beta k Z exp(G) - L;   dG_C += sum_i L_i + exp(G_C) sum_v S dS',   L = k (v' dS'^T) exp(G_C - G)

    Takes the tensors, and returns the results, of FLA's `chunk_kda_bwd_wy_dqkg_fused` as they are (with `use_exp2=True`, whose
    order of arguments differs: name them), number by number. Inputs may be strided views; they are never written.

    Args:
        q, k: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend), normalised already; `K` in
            {32, 64, 128, 256}.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0` (value head `i` reads query/key head `i // (HV // H)`); `V` as `K`.
        v_new: `[B, T, HV, V]`, dtype of q: the pseudo-values `v'`.
        g: `[B, T, HV, K]`, float32: the sum of the chunk's log decays up to and with the token; natural logarithms, base 2 with
            `use_exp2`.
        beta: `[B, T, HV]`, float32 or dtype of q: write strength.
        A: `[B, T, HV, chunk_size]`, float32 or dtype of q: the token's row of `(I + A)^-1` of its chunk, without beta. What is
            right of the diagonal is not looked at.
        h: `[B, NT, HV, K, V]` (`[B, NT, HV, V, K]` if `state_v_first`), float32 or dtype of q: the state before every chunk;
            `NT = ceil(T / chunk_size)`. Packed, the chunks of all sequences follow one another without gaps, and rows past the
            last are not looked at.
        dh: as `h`: the gradient of the state after every chunk.
        do: `[B, T, HV, V]`, dtype of q: the gradient of the output.
        dv: `[B, T, HV, V]`, dtype of q: the gradient of `v_new`.
        scale: factor on the output; `K ** -0.5` by default.
        cu_seqlens: `[N + 1]` int32 or int64 on the inputs' device: token offsets of packed sequences (then `B == 1`), as in
            `chunk_kda`; not read on the host. FLASHDELTA_CHECK=1 verifies them, and that `h` has a row for every chunk.
        chunk_size: 32 or 64 tokens.
        state_v_first: `h` and `dh` are `[.., V, K]`.
        use_exp2: g is in base 2.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`; `"auto"` is the first that can run the call.

    Returns:
        `(dq, dk, dv, dbeta, dg, dA)`: `dq, dk, dg [B, T, HV, K]`, `dbeta [B, T, HV]` and `dA [B, T, HV, chunk_size]` in float32
        (float64 for float64), `dv [B, T, HV, V]` in v's dtype. `dq` and `dk` are by value head: heads that share a query/key
        head are for the caller to sum. `dg` is the gradient of the natural logarithms, with `use_exp2` too. `dA` is that of the
        strictly lower `A`, not of its inverse; 0 elsewhere. Rows of tokens of no sequence are undefined.

    Raises:
        ValueError, TypeError: an argument that does not fit, or a backend that can't run the call; the message names it, what
            came and what was wanted.
    """
    t = WyTensors(q, k, v, v_new, g, beta, A, h, dh, do, dv, cu_seqlens)
    key, addresses = plans.key(t.in_order(), ("wy", scale, chunk_size, state_v_first, use_exp2, backend))
    steps = plans.find(key)
    if steps is not None:
        return WyGradients(**steps.run(addresses)).in_order()
    options = {"scale": scale, "chunk_size": chunk_size, "state_v_first": state_v_first, "use_exp2": use_exp2}
    problem = check_wy(t, **options)
    chosen = choose(problem, t.q.device, backend)
    if torch.compiler.is_compiling() or not all(map(is_plain, t.present().values())):
        given = (*t.in_order(), problem.scale, chunk_size, state_v_first, use_exp2, chosen)
        return torch.ops.flashdelta.chunk_bwd_wy_dqkg(*given)
    return plans.recorded(key, t.in_order(), lambda recorder: _run(problem, t, chosen, recorder)).in_order()


# ---- backends -----------------------------------------------------------------------------------------------------------

_NAMES = ("hopper", "triton", "reference")


def _obstacle(name: str, problem: WySpec, device: torch.device) -> str | None:
    """Why a backend can't run the call, or None if it can."""
    if name == "hopper":
        return wy_obstacle(problem, device)
    return TritonBackend().obstacle(problem, device) if name == "triton" else None


def choose(problem: WySpec, device: torch.device, backend: str) -> str:
    """The backend that runs the call, by name.

    Raises:
        ValueError: `backend` is none, or can't run this call.
    """
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend: got {backend!r}, wanted one of {('auto', *_NAMES)}")
    if backend != "auto":
        obstacle = _obstacle(backend, problem, device)
        if obstacle:
            raise ValueError(f"backend: got {backend!r}, wanted one that can run this call ({backend}: {obstacle})")
        return backend
    # the interpreter is for testing: on the CPU it must be named
    able = (name for name in _NAMES if device.type == "cuda" or name == "reference")
    return next(name for name in able if _obstacle(name, problem, device) is None)


def _run(problem: WySpec, t: WyTensors, backend: str, recorder: plans.Recorder | None = None) -> WyGradients:
    if backend == "hopper":
        from .hopper.gradients import wy_dqkg

        return wy_dqkg(problem, t, recorder)
    if backend == "triton":
        from .triton.wy import wy_dqkg  # decorated kernels read TRITON_INTERPRET when first imported

        return wy_dqkg(problem, t, recorder)
    return reference.chunk_bwd_wy_dqkg(problem, t)


# ---- the operator -------------------------------------------------------------------------------------------------------

torch.library.define(
    "flashdelta::chunk_bwd_wy_dqkg",
    "(Tensor q, Tensor k, Tensor v, Tensor v_new, Tensor g, Tensor beta, Tensor A, Tensor h, Tensor dh, Tensor do, Tensor dv, "
    "Tensor? cu_seqlens, float scale, int chunk_size, bool state_v_first, bool use_exp2, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg, Tensor dA)",
)


@torch.library.impl("flashdelta::chunk_bwd_wy_dqkg", "default")
def _operator(*arguments) -> tuple[Tensor, ...]:
    *given, backend = arguments
    t = WyTensors(*given[: len(WY_NAMES)])
    return _run(wy_spec_of(t, *given[len(WY_NAMES) :]), t, backend).in_order()


@torch.library.register_fake("flashdelta::chunk_bwd_wy_dqkg")
def _operator_fake(*arguments) -> tuple[Tensor, ...]:
    *given, _ = arguments
    t = WyTensors(*given[: len(WY_NAMES)])
    return WyGradients.allocate(wy_spec_of(t, *given[len(WY_NAMES) :]), t).in_order()
