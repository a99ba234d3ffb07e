"""`short_convolution`: the convolution of the layer's queries, keys and values."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..problem import operations
from ..problem.problem import NullIndex
from ..runtime.call import Dispatcher


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: NullIndex = "negative",
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_every: int | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Causal convolution over the tokens, each channel by a filter of its own, then SiLU: what makes queries, keys and values
    of their projections (Kimi Linear, arXiv 2510.26692, section 4).

        o[t] = act(bias + sum_j weight[:, j] * x[t - (W - 1) + j])

    Inputs before a sequence's first token are its state's, zeros without one. In float32, rounded once, in one launch (with
    checkpoints two). `x` may be a slice of a fused projection: if its last dimension is dense it is read in place. Convolve q,
    k and v side by side, and `o.split(...)` has the views that `chunk_kda` reads in place. Differentiable in x, weight, bias
    and the initial state; the gradients of weight and bias are summed in a fixed order.

    Examples:
        >>> x, weight = torch.randn(2, 10, 64), torch.randn(64, 4)
        >>> o, state = fd.short_convolution(x, weight, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64, 3]))

    Args:
        x: `[B, T, D]`, bfloat16, float16 or float32 (float64: reference backend).
        weight: `[D, W]` or `[D, 1, W]` (as `torch.nn.Conv1d` has it), float32 or dtype of x; `W` in 2 to 4.
        bias: `[D]`, float32 or dtype of x.
        activation: `"silu"`, or None for none.
        initial_state: `[N, D, L]`, float32 or dtype of x, any strides: the last inputs before the sequence, the newest at the
            end; `L` is `W - 1`, or `W` (as FLA has it; the first is then not read).
        output_final_state: return the last `L` inputs after each sequence, in `initial_state`'s dtype and `L` (without one x's
            dtype and `W - 1`).
        cu_seqlens: `[N + 1]` int32 or int64: token offsets of packed sequences (then `B == 1`), as in `chunk_kda`; not read on
            the host. Rows of `o` of no sequence are undefined, and their gradients zero.
        state_pool: `[slots, D, L]`, float32 or dtype of x, any strides that do not overlap: states of many sequences, read
            and written in place, instead of `initial_state` and `output_final_state`. A sequence without tokens leaves its
            slot alone. Takes no gradients.
        state_indices: `[N]` int32 or int64, required with `state_pool`: each sequence's slot. A null index, or one past the
            pool's end, starts from zeros and stores nothing. No two states may be stored to one slot.
        null_index: which indices are null: `"negative"`, or `"non_positive"` (slot 0 is reserved).
        has_initial_state: `[N]` bool: where False, the sequence starts from zeros though its index names a slot.
        checkpoint_offsets: `[N]` or `[N, M]` int32 or int64, with `checkpoint_states`: the state after so many tokens of the
            sequence is stored too. 0 means none; others must be strictly increasing, to at most the sequence's length. Offsets
            past the end are ignored. The values are not read on the host; FLASHDELTA_CHECK=1 verifies them.
        checkpoint_indices: the rows for them, shaped like `checkpoint_offsets`: null if below 0 or past the end. No two
            states may be stored to one row.
        checkpoint_states: `[rows, D, L]`, float32 or dtype of x whatever other states have, any strides that do not overlap:
            a buffer that receives the checkpoints. Rows of no checkpoint stay as they are. Must not share memory with another
            argument. Takes no gradients.
        checkpoint_every: a multiple of 64, with `checkpoint_states` and without offsets: the states before tokens 0, n, 2n, ...
            of each sequence are stored, in the rows in which `chunk_kda` stores them.
        out: `[B, T, D]`, rows any distance apart: written and returned instead of a new `o`. Must not share memory with an
            input. Takes no gradients.
        final_state: `[N, D, L]`, float32 or dtype of x, any strides that do not overlap: written and returned instead of a new
            final state. Must not share memory with an input. Takes no gradients.
        backend: `"auto"`, `"triton"` or `"reference"`; see `explain`.

    Returns:
        `(o [B, T, D], final_state [N, D, L] or None)`; `o` has x's dtype.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    tensors = (
        x, weight, bias, initial_state, cu_seqlens, state_pool, state_indices, has_initial_state, checkpoint_offsets,
        checkpoint_indices, checkpoint_states, out, final_state,
    )  # fmt: skip
    found = _dispatch(tensors, (activation, output_final_state, null_index, checkpoint_every, backend))
    return found["o"], found.get("final_state")


_dispatch = Dispatcher(operations.SHORT_CONVOLUTION, short_convolution)
