"""`chunk_bwd_wy_dqkg`: a stage of the training step as an operator, for code that builds another step around it."""

from __future__ import annotations

from torch import Tensor

from ..problem import operations
from ..runtime.call import Dispatcher


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
        dG = q dq + beta k Z exp(G) - L;   L = k (v' dS'^T) exp(G_C - G)
        dG_C += sum_i L_i + exp(G_C) sum_v S dS'

    Takes the tensors, and returns the results, of FLA's `chunk_kda_bwd_wy_dqkg_fused` as they are (with `use_exp2=True`, whose
    order of arguments differs: name them), number by number. Inputs may be strided views; they are never written.

    Args:
        q: `[B, T, H, K]`, bfloat16, float16 or float32 (float64: reference backend), normalised already; `K` in
            {32, 64, 128, 256}.
        k: as q.
        v: `[B, T, HV, V]`, dtype of q; `HV % H == 0` (value head `i` reads query/key head `i // (HV // H)`); `V` as `K`.
        v_new: `[B, T, HV, V]`, dtype of q: what the recurrence writes, `v'` above.
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
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`; `"auto"` is the first that can run the call. `"hopper"`
            takes A, h and dh in bfloat16 alone: with others `"auto"` is `"triton"`, slower on Hopper. `explain` says which.

    Returns:
        `(dq, dk, dv, dbeta, dg, dA)`: `dq, dk, dg [B, T, HV, K]`, `dbeta [B, T, HV]` and `dA [B, T, HV, chunk_size]` in float32
        (float64 for float64), `dv [B, T, HV, V]` in v's dtype. `dq` and `dk` are by value head: heads that share a query/key
        head are for the caller to sum. `dg` is the gradient of the natural logarithms, with `use_exp2` too. `dA` is that of the
        strictly lower `A`, not of its inverse; 0 elsewhere. Rows of tokens of no sequence are undefined.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    tensors = (q, k, v, v_new, g, beta, A, h, dh, do, dv, cu_seqlens)
    found = _dispatch(tensors, (scale, chunk_size, state_v_first, use_exp2, backend))
    return found["dq"], found["dk"], found["dv"], found["dbeta"], found["dg"], found["dA"]


_dispatch = Dispatcher(operations.WY, chunk_bwd_wy_dqkg)
