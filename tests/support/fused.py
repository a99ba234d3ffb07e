"""Calls of `fd.fused_kda_decode`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from flashdelta.problem.problem import record_width

from .decoding import BAD_COUNTS, BF16, FP32, PADDED_DRAFTS, SPEC, TWO_DRAFTS, Step, amid, make_step, rows_of
from .inputs import Source
from .layer import in_memory

EPS = 1e-5
RECORD_GAP = 16
"""Elements between the rows of a replay buffer."""


@dataclass(frozen=True, kw_only=True)
class FusedStep(Step):
    """One call. `W` taps; windows hold `room` inputs more than they must, and lie by `"token"` (channels innermost), by
    `"channel"`, or in one `"page"` with the state; weights are those of `"channels"`, of `"conv1d"`, or `"parts"`. With `rows`
    the call records what tokens change. `scattered`: heads of gates, and each number of a parameter, lie amid NaN.
    `zero_rows`: all that q and k are made of is 0."""

    K: int = 32
    V: int = 32
    W: int = 4
    layout: str = "mixed_rows"
    bias: bool = False
    order: str = "token"
    room: int = 0
    weights: str = "channels"
    activation: str = "sigmoid"
    scattered: bool = False
    zero_rows: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def places(self) -> int:
        """That windows have."""
        return self.W - 1 + (self.spec or 0) + self.room

    @property
    def plain(self) -> Step:
        """The call without convolution and norm, whose counts say nothing where it records."""
        given = {f: getattr(self, f) for f in Step.__dataclass_fields__}
        accepted = None if self.rows is not None else self.accepted
        return Step(**given | {"accepted": accepted, "update": self.rows is None})


REPLAY = {"T": 4, "spec": 3, "indices": (3, 1, 6), "rows": "slots"}

FUSED_STEPS = [
    FusedStep("one", "one token each, slots in any order"),
    FusedStep("bias", "a bias, two heads", bias=True, H=2, HV=2),
    FusedStep("two_taps", "W = 2, windows by channels", W=2, order="channel"),
    FusedStep("three_taps", "W = 3 with room, as Conv1d has weights", W=3, room=2, weights="conv1d", bias=True),
    FusedStep("parts", "weights of q, k and v side by side", weights="parts", HV=2, H=2, null_index="non_positive"),
    FusedStep("page", "window and state of a slot in one page", order="page", gap=8, HV=2),
    FusedStep("softplus", "Kimi-Linear's gate, 2 sigmoid", gate="softplus", beta="double_logit", order="channel"),
    FusedStep("scalar", "one decay for all channels", scalar=True, gate="softplus", H=1, HV=2, activation="silu"),
    FusedStep("silu", "the other output gate", activation="silu", **SPEC, accepted=(1, 2, 3)),
    FusedStep("none", "raw_g is the log decay, beta a value", gate="none", beta="value"),
    FusedStep("k_first", "the other layout of states", v_first=False, K=64, V=32, H=2, HV=4),
    FusedStep("no_norm", "q and k as they come, another scale", l2norm=False, scale=0.3),
    FusedStep("wide", "K < V", K=32, V=64, bias=True),
    FusedStep("model", "the heads of all models", K=128, V=128, B=1, indices=(1,)),
    FusedStep("bf16", "states in bfloat16, rounded once", state=BF16, gap=9),
    FusedStep("odd_pitch", "slots that no vector load aligns to", gap=9),
    FusedStep(
        "scattered",
        "gates, parameters, indices and slots amid others; a bound that is not -5",
        scattered=True,
        bias=True,
        lower_bound=-1.5,
        every=3,
        gap=32,
        H=2,
        HV=2,
    ),
    FusedStep("zero_rows", "q and k of zeros under the L2 norm", zero_rows=True),
    FusedStep("null", "null slots, and one past the end", indices=(-1, 8, 3)),
    FusedStep("reserved", "slot 0 is reserved", indices=(0, 3, 0), null_index="non_positive"),
    FusedStep("no_slots", "empty pools", slots=0, indices=(0, 1, -1)),
    FusedStep("no_sequences", "N = 0", B=0, indices=()),
    FusedStep("gva3", "a ratio that is no power of two", H=2, HV=6, B=2, indices=(1, 0)),
    FusedStep("gva8", "eight value heads share windows", H=1, HV=8, B=2, indices=(1, 0), order="channel"),
    FusedStep("packed", "lengths 0 and 1, tokens of none", lengths=(1, 0, 1, 1), indices=(3, 1, 0, -1), unused=2),
    FusedStep("long", "nothing is stored of a sequence too long", lengths=(1, 2, 1), indices=(3, 1, 0)),
    FusedStep("spec_long", "nor here", **SPEC | {"lengths": (3, 4, 2)}, accepted=(1, 2, 3)),
    FusedStep("spec", "a state for each token; start after 1, 2, 3 accepted", **SPEC, accepted=(1, 2, 3)),
    FusedStep("spec_two", "the same with two taps", **SPEC, accepted=(3, 2, 1), W=2, order="channel", HV=2),
    FusedStep("spec_first", "without counts", **SPEC, room=1, state=BF16, v_first=False),
    FusedStep("spec_packed", "fewer drafts for some, none for one, padding", **PADDED_DRAFTS, HV=2),
    FusedStep(
        "spec_null",
        "null slots inside rows: a start, a target, and the window's",
        **TWO_DRAFTS,
        B=4,
        indices=((1, 0, 2), (3, 0, 0), (4, 5, -1), (0, 6, 7)),
        accepted=(2, 1, 2, 2),
        null_index="non_positive",
    ),
    FusedStep("spec_bad_counts", "counts of 0, 1 + S + 1 and wild ones make null sequences", **BAD_COUNTS),
    FusedStep(
        "spec_16", "as many drafts as there may be", T=17, spec=16, B=1, indices=rows_of(1, 17), slots=17, accepted=(9,)
    ),
    FusedStep("replay", "records instead of states", **REPLAY, accepted=(1, 4, 2), HV=2),
    FusedStep("replay_scalar", "records of one decay", **REPLAY, accepted=(1, 4, 2), scalar=True),
    FusedStep("replay_gva8", "the same for eight value heads", **REPLAY, accepted=(1, 4, 2), HV=8, state=BF16),
    FusedStep("replay_long", "a row too short", **REPLAY | {"lengths": (4, 5, 2)}, accepted=(1, 4, 2)),
    FusedStep(
        "replay_rows",
        "in rows of their own, packed, null ones and bad counts",
        lengths=(3, 0, 2, 1, 2),
        spec=2,
        indices=(3, 2, 1, -1, 4),
        rows=(1, 0, -1, 2, 2),
        accepted=(3, 1, 2, 1, 9),
        v_first=False,
        gate="softplus",
    ),
]
FUSED_BY_NAME = {step.name: step for step in FUSED_STEPS}


def make_fused(step: FusedStep, dtype: torch.dtype = FP32, device: str | torch.device = "cpu", seed: int = 0) -> dict:
    """Arguments of `fused_kda_decode`. What is written lies amid other memory, and all of it holds random numbers, a replay
    buffer NaN."""
    source = Source(dtype, device, zlib.crc32(step.name.encode()) + seed + 1)
    plain = make_step(step.plain, dtype, device, seed)
    names = {"mixed_qkv": "x", "g": "raw_g", "beta": "raw_beta", "initial_state": "state"}
    names["ssm_state_indices"] = "state_indices"
    dropped = ("update_state", "output_final_state", "intermediate_states")
    call = {"A_log": None, "dt_bias": None, "bias": None, "norm_eps": EPS, "output_activation": step.activation}
    call |= {names.get(name, name): x for name, x in plain.items() if name not in dropped}
    D, W = step.channels, step.W
    weight = (source.normal(D, W) / W).to(dtype)
    if step.weights == "parts":
        weight = weight.view(3, D // 3, W).mT.contiguous()
    call["weight"] = weight[:, None] if step.weights == "conv1d" else weight
    if step.bias:
        call["bias"] = source.normal(D)
    call["norm_weight"] = 1.0 + 0.1 * source.normal(step.V)
    rows = step.batch * step.tokens
    call["output_gate"] = source.normal(rows, 2 * step.HV * step.V).to(dtype)[:, : step.HV * step.V]
    _windows(step, call, source, dtype)
    if step.accepted is not None:
        call["num_accepted_tokens"] = torch.tensor(step.accepted, dtype=step.offsets_dtype, device=device)
    if step.rows is not None:
        shape = len(plain["intermediate_states"]), 1 + (step.spec or 0), step.HV, record_width(step.K, step.V)
        wide = torch.float64 if step.state == torch.float64 else FP32
        call["intermediate_states"] = amid(source, wide, shape, RECORD_GAP).fill_(torch.nan)
    if step.zero_rows:
        for x in (call["x"], call["conv_state"]):
            x[:, : 2 * step.H * step.K] = 0.0
    return _scattered(step, call) if step.scattered else call


def _scattered(step: FusedStep, call: dict) -> dict:
    """Rows of a head stay dense."""
    heads = {"raw_g": (step.HV, step.K), "output_gate": (step.HV, step.V)}
    # as far as nothing else is
    apart = {"raw_g": 3, "output_gate": 4}
    found = {name: in_memory(call[name].reshape(-1, *heads[name]), n) for name, n in apart.items()}
    for name in ("raw_beta", "A_log", "dt_bias", "bias", "norm_weight"):
        if call[name] is not None:
            x = call[name].reshape(-1, step.HV) if name == "raw_beta" else call[name]
            found[name] = in_memory(x[..., None], 3)[..., 0]
    return call | found


def _windows(step: FusedStep, call: dict, source: Source, dtype: torch.dtype) -> None:
    D, L = step.channels, step.places
    if step.order == "channel":
        call["conv_state"] = amid(source, dtype, (step.slots, D, L), step.gap)
    elif step.order == "token":
        call["conv_state"] = amid(source, dtype, (step.slots, L, D), step.gap).mT
    else:  # as vLLM has them: the window, then the state
        state = call["state"]
        content = state.shape[1:].numel() * state.element_size()
        page = D * L * dtype.itemsize + content
        memory = torch.empty(step.slots * page, dtype=torch.uint8, device=source.device)
        windows = memory.view(dtype).as_strided((step.slots, D, L), (page // dtype.itemsize, 1, D))
        inner = torch.empty(state.shape[1:], device="meta").stride()
        at = (page // state.element_size(), *inner)
        states = memory.view(state.dtype).as_strided(state.shape, at, D * L * dtype.itemsize // state.element_size())
        call["conv_state"] = windows.copy_(source.normal(step.slots, D, L))
        call["state"] = states.copy_(state)
