"""Names of kernels' integers and numbers whose values leave the machine code as it is: Triton makes no variant for them."""

from __future__ import annotations

SCALARS = (
    *("B", "T", "N", "H", "HV", "group", "tokens", "rows", "tile_count", "channels", "token_tiles", "BT"),
    *("scale", "lower_bound", "eps", "beta_batch", "beta_token", "beta_head"),
    # chunks, checkpoints and segments
    *("slots", "chunk_slots", "checkpoints", "checkpoint_every", "checkpoint_rows", "room", "split", "batch_invariant"),
    *("parts", "step", "transition", "compose", "fixed", "shortest", "margin"),
    # states
    *("lowest", "pool_slots", "start_slots", "target_slots", "has_initial", "has_final", "most_tokens"),
    *("start_row", "start_token", "target_row", "target_token", "first_ahead", "past_ahead"),
    *("key_channels", "value_channels", "key_taps", "value_taps", "rank", "packets"),
)

SCALARS_AND_STRIDES = (
    *SCALARS,
    *(f"{x}_{dimension}" for x in ("q", "k", "v", "g", "o") for dimension in ("batch", "token", "head")),
)
