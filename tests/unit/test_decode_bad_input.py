"""What `recurrent_kda` and `commit` must refuse: the error's type, and a message that names the argument, what came and what
was wanted. Nothing is written then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem import device_checks as checked
from flashdelta.testing.cases import BF16, FP32
from flashdelta.testing.decoding import BY_NAME, make_step
from flashdelta.testing.oracle import same_bits

from .test_bad_input import Bad, offsets, zeros
from .test_decode import commit_call

FP16 = torch.float16
KEPT = {
    name: BY_NAME[name]
    for name in (
        *("paged", "packed", "no_state", "own_slots", "T8", "mixed", "mixed_spec", "spec"),
        *("source", "verify", "verify_source", "read_only"),
    )
}


def bad(name: str, change, argument: str, came: str, wanted: str, start: str = "paged", error=ValueError) -> Bad:
    return Bad(name, change, error, argument, came, wanted, start=start)


def give(**changes):
    return lambda call: changes


# "paged": N = 3 of one token, H = 1, HV = 2, K = 32, V = 64, 8 slots; "spec": 3 x 3 tokens; "verify": 3 x 3, 8 rows.
ROWS = [
    bad("no_q", give(q=None), "q", "NoneType", "torch.Tensor", error=TypeError),
    bad("no_g", give(g=None), "g", "NoneType", "torch.Tensor", error=TypeError),
    bad("q_rank", lambda c: {"q": c["q"][0]}, "q", "[1, 1, 32]", "rank 4"),
    bad("k_shape", lambda c: {"k": c["k"][:2]}, "k", "[2, 1, 1, 32]", "[3, 1, 1, 32]"),
    bad("K", lambda c: {n: c[n][..., :24] for n in "qkg"}, "q", "K = 24", "64, 128, 256"),
    bad("ratio", give(q=zeros(3, 1, 3, 32), k=zeros(3, 1, 3, 32)), "v", "2 value heads", "multiple of the 3"),
    bad("fewer", give(q=zeros(3, 1, 4, 32), k=zeros(3, 1, 4, 32)), "v", "2 value heads", "multiple of the 4"),
    bad("beta_heads", lambda c: {"beta": c["beta"][..., :1]}, "beta", "[3, 1, 1]", "[3, 1, 2]"),
    bad("k_dtype", lambda c: {"k": c["k"].half()}, "k", "torch.float16", "torch.float32", error=TypeError),
    bad("A_log", give(A_log=zeros(3)), "A_log", "[3]", "[HV] = [2]"),
    bad("dt_bias", give(dt_bias=zeros(63)), "dt_bias", "[63]", "[64]"),
    bad("T9", lambda c: nine(c), "q", "9 tokens a sequence", "at most 8", start="T8"),
    bad("bound", give(lower_bound=-9.0), "lower_bound", "-9.0", "[-5, 0)"),
    bad("gate", give(gate="relu"), "gate", "'relu'", "'softplus'"),
    bad("null_index", give(null_index="zero"), "null_index", "'zero'", "'non_positive'"),
    bad("backend", give(backend="cuda"), "backend", "'cuda'", "'triton'"),
    bad("hopper", give(backend="hopper"), "backend", "'hopper'", "can run this call"),
    bad(
        "neg_eigval",
        give(allow_neg_eigval=True, beta_is_logit=False),
        "allow_neg_eigval",
        "beta_is_logit=False",
        "beta_is_logit=True",
    ),
    *(
        bad(f"{name}_type", give(**{name: 1}), name, "1 (int)", "bool", error=TypeError)
        for name in ("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "beta_is_logit")
    ),
    *(
        bad(f"{name}_type", give(**{name: None}), name, "None (NoneType)", "bool", error=TypeError)
        for name in ("allow_neg_eigval", "state_v_first", "update_state")
    ),
]

POOL = [
    bad("heads", give(initial_state=zeros(8, 1, 64, 32)), "initial_state", "[8, 1, 64, 32]", "[8, 2, 64, 32]"),
    bad("turned", give(state_v_first=False), "initial_state", "[8, 2, 64, 32]", "[slots, HV, K, V] = [8, 2, 32, 64]"),
    bad("rank", give(initial_state=zeros(2, 64, 32)), "initial_state", "[2, 64, 32]", "rank 4"),
    bad("list", give(initial_state=[0.0]), "initial_state", "list", "torch.Tensor", error=TypeError),
    bad(
        "dtype",
        give(initial_state=zeros(8, 2, 64, 32, dtype=FP16)),
        "initial_state",
        "torch.float16",
        "bfloat16",
        error=TypeError,
    ),
    bad("device", give(initial_state=zeros(8, 2, 64, 32, device="meta")), "initial_state", "meta", "cpu"),
    bad("not_dense", give(initial_state=zeros(8, 2, 64, 64)[..., ::2]), "initial_state", "strides", "dense"),
    bad("heads_apart", give(initial_state=zeros(8, 4, 64, 32)[:, ::2]), "initial_state", "strides", "dense"),
    bad("overlap", give(initial_state=zeros(1, 2, 64, 32).expand(8, 2, 64, 32)), "initial_state", "strides", "overlap"),
    bad("own_count", give(ssm_state_indices=None), "initial_state", "[8, 2, 64, 32]", "[N, HV, V, K] = [3, 2, 64, 32]"),
    bad("grad", lambda c: {"q": c["q"].requires_grad_()}, "q", "requires grad", "no_grad"),
    bad("A_grad", lambda c: {"A_log": c["A_log"].requires_grad_()}, "A_log", "requires grad", "no_grad"),
]

INDICES = [
    bad("shape", give(ssm_state_indices=offsets(1, 2)), "ssm_state_indices", "[2]", "[N] = [3]"),
    bad("two_dim", give(ssm_state_indices=offsets(1, 2, 3)[:, None]), "ssm_state_indices", "[3, 1]", "[N] = [3]"),
    bad(
        "dtype",
        give(ssm_state_indices=offsets(1, 2, 3).short()),
        "ssm_state_indices",
        "torch.int16",
        "int32 or int64",
        error=TypeError,
    ),
    bad(
        "float",
        give(ssm_state_indices=zeros(3)),
        "ssm_state_indices",
        "torch.float32",
        "int32 or int64",
        error=TypeError,
    ),
    bad("device", give(ssm_state_indices=offsets(1, 2, 3).to("meta")), "ssm_state_indices", "meta", "cpu"),
    bad("no_pool", give(ssm_state_indices=offsets(1)), "ssm_state_indices", "without initial_state", "too", "no_state"),
    bad("cu_rank", give(cu_seqlens=offsets(0, 3)[None]), "cu_seqlens", "[1, 2]", "rank 1", "packed"),
    bad("cu_batch", give(cu_seqlens=offsets(0, 1, 2, 3)), "q", "batch size 3", "batch size 1"),
]

SPECULATIVE = [
    *(bad(f"tokens_{n}", give(num_spec_tokens=n), "num_spec_tokens", str(n), "1 to 7", "spec") for n in (0, -1, 8)),
    bad("tokens_type", give(num_spec_tokens=2.0), "num_spec_tokens", "2.0 (float)", "int", "spec", TypeError),
    bad("tokens_bool", give(num_spec_tokens=True), "num_spec_tokens", "True (bool)", "int", "spec", TypeError),
    bad("T", give(num_spec_tokens=1), "q", "3 tokens a sequence", "1 + num_spec_tokens = 2", "spec"),
    bad(
        "no_tokens",
        give(num_spec_tokens=None, num_accepted_tokens=None),
        "ssm_state_indices",
        "[3, 3]",
        "[N] = [3]",
        "spec",
    ),
    bad(
        "no_indices",
        give(ssm_state_indices=None),
        "ssm_state_indices",
        "None",
        "[3, 3] (num_spec_tokens needs it)",
        "spec",
    ),
    bad(
        "row",
        lambda c: {"ssm_state_indices": c["ssm_state_indices"][:, :2]},
        "ssm_state_indices",
        "[3, 2]",
        "[3, 3]",
        "spec",
    ),
    bad("flat", give(ssm_state_indices=offsets(1, 2, 3)), "ssm_state_indices", "[3]", "[3, 3]", "spec"),
    bad("no_pool", give(num_spec_tokens=2), "num_spec_tokens", "without initial_state", "too", "no_state"),
    bad(
        "counts_alone",
        give(num_accepted_tokens=offsets(1, 1, 1)),
        "num_accepted_tokens",
        "without num_spec_tokens",
        "num_spec_tokens too",
    ),
    bad("counts_shape", give(num_accepted_tokens=offsets(1, 1)), "num_accepted_tokens", "[2]", "[N] = [3]", "spec"),
    bad(
        "counts_dtype",
        give(num_accepted_tokens=zeros(3)),
        "num_accepted_tokens",
        "torch.float32",
        "int32 or int64",
        "spec",
        TypeError,
    ),
    bad(
        "counts_read_only",
        give(num_accepted_tokens=offsets(1, 1, 1)),
        "num_accepted_tokens",
        "with update_state=False",
        "commit takes",
        "verify",
    ),
    bad(
        "intermediate_alone",
        give(intermediate_states=zeros(8, 3, 2, 64, 32)),
        "intermediate_states",
        "without num_spec_tokens",
        "num_spec_tokens too",
    ),
    bad(
        "intermediate_updated",
        give(update_state=True, ssm_state_indices=offsets(*range(9)).view(3, 3)),
        "intermediate_states",
        "with update_state=True",
        "update_state=False",
        "verify",
    ),
    bad(
        "intermediate_tokens",
        give(intermediate_states=zeros(8, 2, 2, 64, 32)),
        "intermediate_states",
        "[8, 2, 2, 64, 32]",
        "[8, 3, 2, 64, 32]",
        "verify",
    ),
    bad(
        "intermediate_heads",
        give(intermediate_states=zeros(8, 3, 1, 64, 32)),
        "intermediate_states",
        "[8, 3, 1, 64, 32]",
        "[8, 3, 2, 64, 32]",
        "verify",
    ),
    bad(
        "intermediate_rank",
        give(intermediate_states=zeros(8, 2, 64, 32)),
        "intermediate_states",
        "[8, 2, 64, 32]",
        "rank 5",
        "verify",
    ),
    bad(
        "intermediate_dtype",
        give(intermediate_states=zeros(8, 3, 2, 64, 32, dtype=BF16)),
        "intermediate_states",
        "torch.bfloat16",
        "initial_state's dtype",
        "verify",
        TypeError,
    ),
    bad(
        "intermediate_in_pool",
        lambda c: {
            "initial_state": (x := zeros(24, 2, 64, 32)),
            "intermediate_states": x.view(8, 3, 2, 64, 32),
        },
        "intermediate_states",
        "shared with initial_state",
        "memory of its own",
        "verify",
    ),
    bad(
        "rows_alone",
        give(intermediate_state_indices=offsets(0, 1, 2)),
        "intermediate_state_indices",
        "without intermediate_states",
        "intermediate_states too",
    ),
    bad(
        "rows_shape",
        give(intermediate_state_indices=offsets(0, 1)),
        "intermediate_state_indices",
        "[2]",
        "[N] = [3]",
        "verify",
    ),
    bad(
        "final_read_only",
        give(output_final_state=True),
        "output_final_state",
        "with update_state=False",
        "one of the two",
        "read_only",
    ),
    bad("read_nothing", give(update_state=False), "update_state", "False without initial_state", "too", "no_state"),
]

SOURCES = [
    bad(
        "no_indices",
        give(initial_state_indices=None),
        "initial_state_indices",
        "None with initial_state_source",
        "both",
        "source",
    ),
    bad(
        "no_source",
        give(initial_state_source=None),
        "initial_state_source",
        "None with initial_state_indices",
        "both",
        "source",
    ),
    bad(
        "heads",
        give(initial_state_source=zeros(7, 1, 64, 32)),
        "initial_state_source",
        "[7, 1, 64, 32]",
        "[7, 2, 64, 32]",
        "source",
    ),
    bad("shape", give(initial_state_indices=offsets(1)), "initial_state_indices", "[1]", "[N] = [3]", "source"),
    bad("no_pool", give(initial_state=None), "initial_state", "None with initial_state_source", "pool", "source"),
    bad(
        "pool_read_only",
        give(initial_state=zeros(8, 2, 64, 32)),
        "initial_state",
        "update_state=False",
        "None",
        "verify_source",
    ),
    bad(
        "counts",
        lambda c: {
            "initial_state_source": c["initial_state"],
            "initial_state_indices": offsets(0, 1, 2),
        },
        "num_accepted_tokens",
        "with initial_state_source",
        "one of the two",
        "spec",
    ),
]

MIXED = [
    bad("with_q", give(q=zeros(3, 1, 2, 32)), "mixed_qkv", "a tensor with q", "one of the two", "mixed"),
    bad("no_pool", give(initial_state=None), "initial_state", "None with mixed_qkv", "tells the heads", "mixed"),
    bad("rank", lambda c: {"mixed_qkv": c["mixed_qkv"][None]}, "mixed_qkv", "[1, 3, 384]", "rank 2", "mixed"),
    bad(
        "width",
        lambda c: {"mixed_qkv": c["mixed_qkv"][:, :-1]},
        "mixed_qkv",
        "[3, 383]",
        "K = 32 and HV * V = 256",
        "mixed",
    ),
    bad("no_keys", lambda c: {"mixed_qkv": c["mixed_qkv"][:, :256]}, "mixed_qkv", "[3, 256]", "2 * H * K", "mixed"),
    bad("rows", lambda c: {"mixed_qkv": c["mixed_qkv"][:5]}, "mixed_qkv", "5 rows", "a multiple of", "mixed_spec"),
    bad("g", lambda c: {"g": c["g"][:, :-1]}, "g", "[3, 127]", "[N, HV * K] = [3, 128]", "mixed"),
    bad("beta", lambda c: {"beta": c["beta"][:2]}, "beta", "[2, 4]", "[N, HV] = [3, 4]", "mixed"),
]

OUTPUT = [
    bad("shape", give(output=zeros(3, 1, 2, 32)), "output", "[3, 1, 2, 32]", "[3, 1, 2, 64]"),
    bad("rank", give(output=zeros(3, 2, 64)), "output", "[3, 2, 64]", "rank 4"),
    bad("dtype", give(output=zeros(3, 1, 2, 64, dtype=BF16)), "output", "torch.bfloat16", "float32", error=TypeError),
    bad("device", give(output=zeros(3, 1, 2, 64, device="meta")), "output", "meta", "cpu"),
    bad("strided", give(output=zeros(3, 1, 2, 128)[..., ::2]), "output", "strides", "dense last"),
    bad("is_v", lambda c: {"output": c["v"]}, "output", "shared with v", "memory of its own"),
    bad(
        "in_pool",
        lambda c: {"output": c["initial_state"].flatten()[-384:].view(3, 1, 2, 64)},
        "output",
        "shared with initial_state",
        "memory of its own",
        "own_slots",
    ),
    bad(
        "in_source",
        lambda c: {"initial_state_source": (x := zeros(7, 2, 64, 32)), "output": x[0, 0, :12].view(3, 1, 2, 64)},
        "output",
        "shared with initial_state_source",
        "memory of its own",
        "source",
    ),
    bad("packed", give(output=zeros(3, 1, 2, 64)), "output", "[3, 1, 2, 64]", "[1, 3, 2, 64]", "packed"),
]


def nine(call: dict) -> dict:
    return {name: torch.cat([call[name], call[name][:, :1]], dim=1) for name in ("q", "k", "v", "g", "beta")}


GROUPS = {
    "call": ROWS,
    "pool": POOL,
    "index": INDICES,
    "spec": SPECULATIVE,
    "source": SOURCES,
    "mixed": MIXED,
    "output": OUTPUT,
}
TABLE = [pytest.param(row, id=f"{group}-{row.id}") for group, rows in GROUPS.items() for row in rows]


def hold(bad: Bad, run) -> None:
    with pytest.raises(bad.error) as caught:
        run()
    message = str(caught.value)
    came, _, wanted = message.partition(", wanted ")
    assert caught.type is bad.error
    assert came.startswith(f"{bad.argument}: got "), message
    assert bad.came in came, message
    assert bad.wanted in wanted, message


@pytest.mark.parametrize("bad", TABLE)
def test_refused_with_a_message_that_says_all(bad: Bad):
    call = make_step(KEPT[bad.start])
    fd.recurrent_kda(**call)
    call = call | bad.change(call)
    written = [call[name] for name in ("initial_state", "intermediate_states") if isinstance(call.get(name), Tensor)]
    before = [x.clone() for x in written if x.device.type == "cpu"]
    hold(bad, lambda: fd.recurrent_kda(**call))
    assert all(same_bits(x, y) for x, y in zip(written, before))


@pytest.mark.parametrize("name", ["sclae", "state_pool", "out", "state_indices", "transpose_state_layout"])
def test_unknown_argument_is_an_error(name: str):
    with pytest.raises(TypeError, match=f"'{name}'"):
        fd.recurrent_kda(**make_step(KEPT["paged"]), **{name: None})


def test_options_are_keyword_only():
    call = make_step(KEPT["paged"])
    with pytest.raises(TypeError, match="positional"):
        fd.recurrent_kda(*(call[name] for name in ("q", "k", "v", "g", "beta")), call["A_log"])


COMMITS = [
    bad("list", give(initial_state=[1]), "initial_state", "list", "torch.Tensor", error=TypeError),
    bad("none", give(num_accepted_tokens=None), "num_accepted_tokens", "NoneType", "Tensor", error=TypeError),
    bad("pool_rank", give(initial_state=zeros(2, 8, 4)), "initial_state", "[2, 8, 4]", "rank 4"),
    bad("states_rank", give(intermediate_states=zeros(6, 2, 8, 4)), "intermediate_states", "[6, 2, 8, 4]", "rank 5"),
    bad(
        "states",
        give(intermediate_states=zeros(6, 3, 2, 4, 8)),
        "intermediate_states",
        "[6, 3, 2, 4, 8]",
        "HV, V, K] = [6, 3, 2, 8, 4]",
    ),
    bad(
        "states_dtype",
        give(intermediate_states=zeros(6, 3, 2, 8, 4, dtype=BF16)),
        "intermediate_states",
        "torch.bfloat16",
        "torch.float32",
        error=TypeError,
    ),
    bad("counts", give(num_accepted_tokens=offsets(1)), "num_accepted_tokens", "[1]", "[4]"),
    bad("counts_dtype", give(num_accepted_tokens=zeros(4)), "num_accepted_tokens", "float32", "int32", error=TypeError),
    bad("rows", give(intermediate_state_indices=offsets(1)), "intermediate_state_indices", "[1]", "[4]"),
    bad("null", give(null_index="none"), "null_index", "'none'", "'negative'"),
    bad("device", give(num_accepted_tokens=offsets(1, 1, 1, 1).to("meta")), "num_accepted_tokens", "meta", "cpu"),
    bad("pitch", give(initial_state=zeros(1, 2, 8, 4).expand(6, 2, 8, 4)), "initial_state", "strides", "overlap"),
    bad(
        "one_memory",
        lambda c: {"initial_state": (x := zeros(18, 2, 8, 4)), "intermediate_states": x.view(6, 3, 2, 8, 4)},
        "initial_state",
        "shared with intermediate_states",
        "memory of its own",
    ),
    bad("backend", give(backend="hopper"), "backend", "'hopper'", "can run this call"),
]


@pytest.mark.parametrize("bad", [pytest.param(row, id=row.id) for row in COMMITS])
def test_commit_refuses_with_a_message_that_says_all(bad: Bad):
    call = commit_call(FP32)
    fd.commit(**call)
    call = call | bad.change(call)
    hold(bad, lambda: fd.commit(**call))


# ---- index tensors are device data ----------------------------------------------------------------------------------

VALUES = {
    "past the pool": ("paged", {"ssm_state_indices": offsets(1, 8, 0)}, "ssm_state_indices", "index 8", "8 slots"),
    "twice": ("paged", {"ssm_state_indices": offsets(1, 2, 1)}, "ssm_state_indices", "slot 1 again", "another slot"),
    "too long": ("packed", {"cu_seqlens": offsets(0, 1, 1, 1, 10)}, "cu_seqlens", "9 tokens", "at most 8"),
    "count": ("spec", {"num_accepted_tokens": offsets(1, 4, 1)}, "num_accepted_tokens", "4", "1 to 3"),
    "source": ("source", {"initial_state_indices": offsets(1, 7, 1)}, "initial_state_indices", "index 7", "7 slots"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_verified_when_asked(kind: str, monkeypatch: pytest.MonkeyPatch):
    start, change, argument, came, wanted = VALUES[kind]
    call = make_step(KEPT[start])
    if kind == "too long":
        for name in ("q", "k", "v", "g", "beta"):
            call[name] = call[name].repeat_interleave(4, dim=1)
    fd.recurrent_kda(**call | change)
    monkeypatch.setattr(checked, "ENABLED", True)
    fd.recurrent_kda(**call)
    with pytest.raises(ValueError) as caught:
        fd.recurrent_kda(**call | change)
    assert str(caught.value).startswith(f"{argument}: got ")
    assert came in str(caught.value) and wanted in str(caught.value)
