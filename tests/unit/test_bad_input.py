"""What a call must refuse: the error's type, and a message that names the argument, what came and what was wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem import device_checks as checked
from flashdelta.testing.cases import BF16, BY_NAME, CASES, FP32, Case, case_id, named
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import as_recurrent, same_bits

BOTH = (fd.chunk_kda, fd.fused_recurrent_kda)
CHUNK = (fd.chunk_kda,)


@dataclass(frozen=True)
class Bad:
    """A call gone wrong. `change(call)` gives the arguments to replace."""

    id: str
    change: Callable[[dict], dict]
    error: type[Exception]
    argument: str
    came: str
    wanted: str
    ops: tuple = BOTH
    start: str = "bounded"


def zeros(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# The valid calls they start from have B=1, T=70, H=HV=2, K=32, V=64 ("packed": 5 sequences, T=147).
RANKS = [
    Bad("q_rank", lambda c: {"q": c["q"][0]}, ValueError, "q", "[70, 2, 32]", "rank 4"),
    Bad("k_rank", lambda c: {"k": c["k"][None]}, ValueError, "k", "[1, 1, 70, 2, 32]", "rank 4"),
    Bad("v_rank", lambda c: {"v": c["v"][..., 0]}, ValueError, "v", "[1, 70, 2]", "rank 4"),
    Bad("g_rank", lambda c: {"g": c["g"][..., 0]}, ValueError, "g", "[1, 70, 2]", "rank 4"),
    Bad("beta_rank", lambda c: {"beta": c["g"]}, ValueError, "beta", "[1, 70, 2, 32]", "rank 3"),
    Bad("cu_rank", lambda c: {"cu_seqlens": offsets(0, 70)[None]}, ValueError, "cu_seqlens", "[1, 2]", "rank 1"),
    Bad("out_rank", lambda c: {"out": zeros(70, 2, 64)}, ValueError, "out", "[70, 2, 64]", "rank 4"),
]

SHAPES = [
    Bad("k_tokens", lambda c: {"k": c["k"][:, 1:]}, ValueError, "k", "[1, 69, 2, 32]", "[1, 70, 2, 32]"),
    Bad("k_heads", lambda c: {"k": c["k"][:, :, :1]}, ValueError, "k", "[1, 70, 1, 32]", "[1, 70, 2, 32]"),
    Bad("v_tokens", lambda c: {"v": c["v"][:, 1:]}, ValueError, "v", "[1, 69, 2, 64]", "[1, 70, 2, 64]"),
    Bad("g_heads", lambda c: {"g": c["g"][:, :, :1]}, ValueError, "g", "[1, 70, 1, 32]", "[1, 70, 2, 32]"),
    Bad("g_channels", lambda c: {"g": c["g"][..., :1]}, ValueError, "g", "[1, 70, 2, 1]", "[1, 70, 2, 32]"),
    Bad("beta_heads", lambda c: {"beta": c["beta"][..., :1]}, ValueError, "beta", "[1, 70, 1]", "[1, 70, 2]"),
    Bad("K", lambda c: {n: c[n][..., :31] for n in "qkg"}, ValueError, "q", "K = 31", "(32, 64, 128, 256)"),
    Bad("V", lambda c: {"v": c["v"][..., :48]}, ValueError, "v", "V = 48", "(32, 64, 128, 256)"),
    Bad("A_log", lambda c: {"A_log": zeros(3)}, ValueError, "A_log", "[3]", "[HV] = [2]"),
    Bad("A_log_2d", lambda c: {"A_log": zeros(1, 2)}, ValueError, "A_log", "[1, 2]", "[1, 1, 2, 1]"),
    Bad("dt_bias_flat", lambda c: {"dt_bias": zeros(63)}, ValueError, "dt_bias", "[63]", "[64]"),
    Bad("dt_bias_heads", lambda c: {"dt_bias": zeros(2)}, ValueError, "dt_bias", "[2]", "[2, 32]"),
    Bad("dt_bias_turned", lambda c: {"dt_bias": zeros(32, 2)}, ValueError, "dt_bias", "[32, 2]", "[2, 32]"),
    Bad("out_shape", lambda c: {"out": zeros(1, 70, 2, 32)}, ValueError, "out", "[1, 70, 2, 32]", "[1, 70, 2, 64]"),
]

HEADS = [
    Bad(
        "ratio",
        lambda c: {"q": zeros(1, 70, 3, 32), "k": zeros(1, 70, 3, 32)},
        ValueError,
        "v",
        "2 value",
        "multiple of the 3",
    ),
    Bad(
        "fewer",
        lambda c: {"q": zeros(1, 70, 4, 32), "k": zeros(1, 70, 4, 32)},
        ValueError,
        "v",
        "2 value",
        "multiple of the 4",
    ),
    Bad(
        "no_heads",
        lambda c: {"q": zeros(1, 70, 0, 32), "k": zeros(1, 70, 0, 32)},
        ValueError,
        "q",
        "[1, 70, 0, 32]",
        "one head",
    ),
    Bad("no_value_heads", lambda c: {"v": zeros(1, 70, 0, 64)}, ValueError, "v", "0 value heads", "positive multiple"),
]

DTYPES = [
    Bad("q_int", lambda c: {"q": c["q"].int()}, TypeError, "q", "torch.int32", "bfloat16, float16, float32"),
    Bad("k", lambda c: {"k": c["k"].half()}, TypeError, "k", "torch.float16", "torch.float32"),
    Bad("v", lambda c: {"v": c["v"].bfloat16()}, TypeError, "v", "torch.bfloat16", "torch.float32"),
    Bad("g", lambda c: {"g": c["g"].half()}, TypeError, "g", "torch.float16", "float32"),
    Bad("beta", lambda c: {"beta": c["beta"].double()}, TypeError, "beta", "torch.float64", "float32"),
    Bad("A_log", lambda c: {"A_log": c["A_log"].half()}, TypeError, "A_log", "torch.float16", "float32"),
    Bad("dt_bias", lambda c: {"dt_bias": c["dt_bias"].int()}, TypeError, "dt_bias", "torch.int32", "float32"),
    Bad(
        "state",
        lambda c: {"initial_state": zeros(1, 2, 32, 64, dtype=torch.float16)},
        TypeError,
        "initial_state",
        "torch.float16",
        "float32 or bfloat16",
    ),
    Bad("cu_float", lambda c: {"cu_seqlens": zeros(2)}, TypeError, "cu_seqlens", "torch.float32", "int32 or int64"),
    Bad(
        "cu_int16",
        lambda c: {"cu_seqlens": offsets(0, 70).short()},
        TypeError,
        "cu_seqlens",
        "torch.int16",
        "int32 or int64",
    ),
    Bad("out", lambda c: {"out": zeros(1, 70, 2, 64, dtype=BF16)}, TypeError, "out", "torch.bfloat16", "torch.float32"),
]

DEVICES = [
    *(
        Bad(name, lambda c, name=name: {name: c[name].to("meta")}, ValueError, name, "meta", "cpu")
        for name in ("k", "v", "g", "beta", "A_log", "dt_bias")
    ),
    Bad(
        "cu",
        lambda c: {"cu_seqlens": c["cu_seqlens"].to("meta")},
        ValueError,
        "cu_seqlens",
        "meta",
        "cpu",
        start="packed",
    ),
    Bad(
        "state",
        lambda c: {"initial_state": c["initial_state"].to("meta")},
        ValueError,
        "initial_state",
        "meta",
        "cpu",
        start="state",
    ),
    Bad("out", lambda c: {"out": zeros(1, 70, 2, 64, device="meta")}, ValueError, "out", "meta", "cpu"),
    Bad(
        "cu_cpu",
        lambda c: {"cu_seqlens_cpu": c["cu_seqlens"].to("meta")},
        ValueError,
        "cu_seqlens_cpu",
        "meta",
        "cpu",
        CHUNK,
        "packed",
    ),
]

SEQUENCES = [
    Bad("batch", lambda c: {"cu_seqlens": offsets(0, 70)}, ValueError, "q", "batch size 3", "batch size 1", start="B3"),
    Bad("no_offsets", lambda c: {"cu_seqlens": offsets()}, ValueError, "cu_seqlens", "empty tensor", "N + 1 offsets"),
    Bad(
        "state_count",
        lambda c: {"initial_state": zeros(2, 2, 32, 64)},
        ValueError,
        "initial_state",
        "[2, 2, 32, 64]",
        "[1, 2, 32, 64]",
    ),
    Bad(
        "state_count_packed",
        lambda c: {"initial_state": zeros(1, 2, 32, 64)},
        ValueError,
        "initial_state",
        "[1, 2, 32, 64]",
        "[5, 2, 32, 64]",
        start="packed",
    ),
    Bad(
        "state_turned",
        lambda c: {"initial_state": zeros(1, 2, 64, 32)},
        ValueError,
        "initial_state",
        "[1, 2, 64, 32]",
        "[N, HV, K, V]",
    ),
    Bad(
        "state_v_first",
        lambda c: {"state_v_first": True},
        ValueError,
        "initial_state",
        "[1, 2, 32, 64]",
        "[N, HV, V, K]",
        start="state",
    ),
    Bad(
        "state_rank",
        lambda c: {"initial_state": zeros(2, 32, 64)},
        ValueError,
        "initial_state",
        "[2, 32, 64]",
        "[1, 2, 32, 64]",
    ),
    Bad(
        "cu_cpu_alone",
        lambda c: {"cu_seqlens_cpu": offsets(0, 70)},
        ValueError,
        "cu_seqlens_cpu",
        "without cu_seqlens",
        "cu_seqlens too",
        CHUNK,
    ),
    *(
        Bad(
            f"cu_cpu_{name}",
            lambda c, x=values: {"cu_seqlens": offsets(*x), "cu_seqlens_cpu": offsets(*x)},
            ValueError,
            "cu_seqlens_cpu",
            str(list(values)),
            "never fall",
            CHUNK,
        )
        for name, values in (("falls", (0, 999, 5)), ("late", (1, 70)), ("past", (0, 71)))
    ),
    Bad(
        "cu_cpu_dtype",
        lambda c: {"cu_seqlens": offsets(0, 70), "cu_seqlens_cpu": zeros(2)},
        TypeError,
        "cu_seqlens_cpu",
        "torch.float32",
        "int32 or int64",
        CHUNK,
    ),
    Bad(
        "cu_cpu_length",
        lambda c: {"cu_seqlens_cpu": offsets(0, 70)},
        ValueError,
        "cu_seqlens_cpu",
        "[2]",
        "[6]",
        CHUNK,
        "packed",
    ),
]

OPTIONS = [
    Bad("no_A_log", lambda c: {"A_log": None}, ValueError, "A_log", "None", "[HV] = [2]", start="softplus"),
    Bad("bound_low", lambda c: {"lower_bound": -5.5}, ValueError, "lower_bound", "-5.5", "[-5, 0)"),
    Bad("bound_zero", lambda c: {"lower_bound": 0.0}, ValueError, "lower_bound", "0.0", "[-5, 0)"),
    Bad("bound_above", lambda c: {"lower_bound": 1}, ValueError, "lower_bound", "1", "[-5, 0)"),
    Bad("bound_nan", lambda c: {"lower_bound": float("nan")}, ValueError, "lower_bound", "nan", "[-5, 0)"),
    Bad(
        "bound_missing", lambda c: {"gate": "lower_bound"}, ValueError, "lower_bound", "None", "[-5, 0)", start="decay"
    ),
    Bad("bound_type", lambda c: {"lower_bound": "-5"}, TypeError, "lower_bound", "'-5' (str)", "float or None"),
    Bad("bound_bool", lambda c: {"lower_bound": True}, TypeError, "lower_bound", "True (bool)", "float or None"),
    Bad("scale_type", lambda c: {"scale": zeros(1)}, TypeError, "scale", "(Tensor)", "float or None"),
    Bad("chunk_16", lambda c: {"chunk_size": 16}, ValueError, "chunk_size", "16", "(32, 64)", CHUNK),
    Bad("chunk_128", lambda c: {"chunk_size": 128}, ValueError, "chunk_size", "128", "(32, 64)", CHUNK),
    Bad("split_0", lambda c: {"split": 0}, ValueError, "split", "0", "a number of segments", CHUNK),
    Bad("split_1025", lambda c: {"split": 1025}, ValueError, "split", "1025", "at most 1024", CHUNK),
    Bad("split_name", lambda c: {"split": "all"}, ValueError, "split", "'all'", "'auto'", CHUNK),
    Bad("split_true", lambda c: {"split": True}, TypeError, "split", "True (bool)", "'auto'", CHUNK),
    Bad("split_float", lambda c: {"split": 2.0}, TypeError, "split", "2.0 (float)", "'auto'", CHUNK),
    Bad("invariant", lambda c: {"batch_invariant": 1}, TypeError, "batch_invariant", "1 (int)", "a bool", CHUNK),
    Bad("chunk_float", lambda c: {"chunk_size": 64.0}, TypeError, "chunk_size", "64.0 (float)", "int", CHUNK),
    Bad(
        "neg_eigval",
        lambda c: {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval",
        "use_beta_sigmoid_in_kernel=False",
        "beta logits",
        start="decay_promised",
    ),
    Bad("gate_unknown", lambda c: {"gate": "gelu"}, ValueError, "gate", "'gelu'", "'lower_bound'"),
    Bad(
        "gate_none",
        lambda c: {"gate": "none"},
        ValueError,
        "gate",
        "'none' with use_gate_in_kernel=True",
        "one of the two",
    ),
    Bad("A_log_ignored", lambda c: {"use_gate_in_kernel": False}, ValueError, "A_log", "does not read it", "None"),
    Bad(
        "dt_bias_ignored",
        lambda c: {"dt_bias": zeros(2, 32), "gate": "logsigmoid"},
        ValueError,
        "dt_bias",
        "does not read it",
        "None",
        start="decay",
    ),
    Bad("backend_unknown", lambda c: {"backend": "cuda"}, ValueError, "backend", "'cuda'", "'reference'"),
    *(
        Bad(f"{name}_type", lambda c, name=name: {name: 1}, TypeError, name, "1 (int)", "bool")
        for name in (
            "output_final_state",
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "state_v_first",
        )
    ),
    *(
        Bad(f"{name}_type", lambda c, name=name: {name: None}, TypeError, name, "None (NoneType)", "bool", CHUNK)
        for name in ("safe_gate", "disable_recompute", "return_intermediate_states")
    ),
]

NOT_TENSORS = [
    *(
        Bad(f"{name}_list", lambda c, name=name: {name: [1.0]}, TypeError, name, "list", "torch.Tensor", start="state")
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "out")
    ),
    Bad(
        "cu_cpu_list",
        lambda c: {"cu_seqlens_cpu": [0, 70]},
        TypeError,
        "cu_seqlens_cpu",
        "list",
        "torch.Tensor",
        CHUNK,
        "packed",
    ),
]

OUT = [
    Bad("out_is_v", lambda c: {"out": c["v"]}, ValueError, "out", "shared with v", "memory of its own"),
    Bad(
        "out_in_v",
        lambda c: {"out": c["v"].view(1, 70, 2, 64)[:, :]},
        ValueError,
        "out",
        "shared with v",
        "memory of its own",
    ),
    Bad(
        "out_is_q",
        lambda c: {"v": zeros(1, 70, 2, 32), "out": c["q"]},
        ValueError,
        "out",
        "shared with q",
        "memory of its own",
    ),
    Bad(
        "out_overlaps_itself",
        lambda c: {"out": zeros(1, 300, 2, 64).as_strided((1, 70, 2, 64), (8960, 64, 64, 1))},
        ValueError,
        "out",
        "strides",
        "memory of its own",
    ),
    Bad("out_strided", lambda c: {"out": zeros(1, 70, 2, 128)[..., ::2]}, ValueError, "out", "strides", "dense last"),
    Bad(
        "out_expanded",
        lambda c: {"out": zeros(1, 70, 1, 64).expand(1, 70, 2, 64)},
        ValueError,
        "out",
        "strides",
        "memory of its own",
    ),
    Bad(
        "out_grad",
        lambda c: {"out": zeros(1, 70, 2, 64).requires_grad_()},
        ValueError,
        "out",
        "requires grad",
        "no gradient",
    ),
    Bad(
        "grad",
        lambda c: {"v": c["v"].requires_grad_(), "out": zeros(1, 70, 2, 64)},
        ValueError,
        "out",
        "a tensor",
        "requires grad",
    ),
]

GRADIENTS = [
    Bad(
        "h",
        lambda c: {"q": c["q"].requires_grad_(), "return_intermediate_states": True},
        ValueError,
        "return_intermediate_states",
        "True",
        "no_grad",
        CHUNK,
    ),
]


def pool(**changes) -> dict:
    """Arguments for a pool of 4 slots, changed."""
    named = {"state_v_first": False, "use_qk_l2norm_in_kernel": True}
    return {"state_pool": zeros(4, 2, 32, 64), "state_indices": offsets(1)} | named | changes


def marks(offset: object = 16, index: object = 2, **changes) -> dict:
    """The same with one checkpoint; None leaves an argument out."""
    given = {"checkpoint_offsets": offset, "checkpoint_indices": index}
    return pool(**{n: offsets(x) if isinstance(x, int) else x for n, x in given.items()}, **changes)


POOLS = [
    *(
        Bad(
            f"{name}_unnamed",
            lambda c, n=name: pool(**{n: None}),
            ValueError,
            name,
            "nothing with state_pool",
            "=True or",
        )
        for name in ("state_v_first", "use_qk_l2norm_in_kernel")
    ),
    Bad(
        "q_in_pool",
        lambda c: pool(state_pool=(x := zeros(4, 2, 32, 64)), q=x.flatten()[: 70 * 2 * 32].view(1, 70, 2, 32)),
        ValueError,
        "state_pool",
        "shared with q",
        "memory of its own",
    ),
    *(
        Bad(
            f"{name}_alone",
            lambda c, n=name, x=x: {n: x},
            ValueError,
            name,
            "without state_pool",
            "state_pool too",
            ops,
        )
        for name, x, ops in (
            ("state_indices", offsets(1), BOTH),
            ("has_initial_state", torch.tensor([True]), BOTH),
            ("checkpoint_offsets", offsets(16), CHUNK),
            ("checkpoint_indices", offsets(1), CHUNK),
        )
    ),
    Bad(
        "two_states", lambda c: pool(), ValueError, "state_pool", "with initial_state", "one of the two", start="state"
    ),
    Bad(
        "final",
        lambda c: pool(initial_state=None, output_final_state=True),
        ValueError,
        "output_final_state",
        "True with state_pool",
        "False",
    ),
    Bad("no_indices", lambda c: pool(state_indices=None), ValueError, "state_indices", "None", "[N] = [1]"),
    Bad("rank", lambda c: pool(state_pool=zeros(2, 32, 64)), ValueError, "state_pool", "[2, 32, 64]", "rank 4"),
    Bad(
        "turned",
        lambda c: pool(state_pool=zeros(4, 2, 64, 32)),
        ValueError,
        "state_pool",
        "[4, 2, 64, 32]",
        "[slots, HV, K, V] = [4, 2, 32, 64]",
    ),
    Bad(
        "v_first",
        lambda c: pool(state_v_first=True),
        ValueError,
        "state_pool",
        "[4, 2, 32, 64]",
        "[slots, HV, V, K] = [4, 2, 64, 32]",
    ),
    Bad(
        "slot_not_dense",
        lambda c: pool(state_pool=zeros(4, 2, 32, 128)[..., ::2]),
        ValueError,
        "state_pool",
        "strides",
        "dense",
    ),
    Bad(
        "heads_apart",
        lambda c: pool(state_pool=zeros(4, 4, 32, 64)[:, ::2]),
        ValueError,
        "state_pool",
        "strides",
        "dense",
    ),
    Bad(
        "slots_overlap",
        lambda c: pool(state_pool=zeros(1, 2, 32, 64).expand(4, 2, 32, 64)),
        ValueError,
        "state_pool",
        "strides",
        "must not overlap",
    ),
    Bad(
        "pool_dtype",
        lambda c: pool(state_pool=zeros(4, 2, 32, 64, dtype=torch.float16)),
        TypeError,
        "state_pool",
        "torch.float16",
        "float32 or bfloat16",
    ),
    Bad(
        "pool_device",
        lambda c: pool(state_pool=zeros(4, 2, 32, 64, device="meta")),
        ValueError,
        "state_pool",
        "meta",
        "cpu",
    ),
    Bad("indices_shape", lambda c: pool(state_indices=offsets(1, 2)), ValueError, "state_indices", "[2]", "[N] = [1]"),
    Bad(
        "indices_dtype",
        lambda c: pool(state_indices=offsets(1).short()),
        TypeError,
        "state_indices",
        "torch.int16",
        "int32 or int64",
    ),
    Bad(
        "flags_shape",
        lambda c: pool(has_initial_state=torch.tensor([[True]])),
        ValueError,
        "has_initial_state",
        "[1, 1]",
        "[N] = [1]",
    ),
    Bad(
        "flags_dtype",
        lambda c: pool(has_initial_state=offsets(1)),
        TypeError,
        "has_initial_state",
        "torch.int64",
        "bool",
    ),
    Bad("flag_not_tensor", lambda c: pool(has_initial_state=True), TypeError, "has_initial_state", "bool", "Tensor"),
    Bad(
        "null_index",
        lambda c: pool(null_index="zero"),
        ValueError,
        "null_index",
        "'zero'",
        "('negative', 'non_positive')",
    ),
    Bad("q_grad", lambda c: pool(q=c["q"].requires_grad_()), ValueError, "state_pool", "require grad", "no_grad"),
    Bad(
        "pool_grad",
        lambda c: pool(state_pool=zeros(4, 2, 32, 64).requires_grad_()),
        ValueError,
        "state_pool",
        "require grad",
        "no_grad",
    ),
    Bad(
        "out_in_pool",
        lambda c: pool(state_pool=(x := zeros(4, 2, 32, 64)), out=x.flatten()[: 70 * 2 * 64].view(1, 70, 2, 64)),
        ValueError,
        "out",
        "shared with state_pool",
        "memory of its own",
    ),
    Bad(
        "no_checkpoint_indices",
        lambda c: marks(index=None),
        ValueError,
        "checkpoint_indices",
        "None with checkpoint_offsets",
        "both",
        CHUNK,
    ),
    Bad(
        "no_checkpoint_offsets",
        lambda c: marks(offset=None),
        ValueError,
        "checkpoint_offsets",
        "None with checkpoint_indices",
        "both",
        CHUNK,
    ),
    Bad(
        "checkpoint_count",
        lambda c: marks(offsets(16, 32), offsets(2, 3)),
        ValueError,
        "checkpoint_offsets",
        "[2]",
        "[N] = [1] or [N, M]",
        CHUNK,
    ),
    Bad(
        "checkpoint_shapes",
        lambda c: marks(offsets(16)[None]),
        ValueError,
        "checkpoint_indices",
        "[1]",
        "[1, 1]",
        CHUNK,
    ),
    *(
        Bad(
            f"{M}_checkpoints",
            lambda c, M=M: marks(offsets(*[0] * M)[None], offsets(*[0] * M)[None]),
            ValueError,
            "checkpoint_offsets",
            f"{M} checkpoints",
            "1 to 8",
            CHUNK,
        )
        for M in (0, 9)
    ),
    Bad(
        "checkpoint_dtype",
        lambda c: marks(torch.tensor([16.0])),
        TypeError,
        "checkpoint_offsets",
        "torch.float32",
        "int32 or int64",
        CHUNK,
    ),
    Bad(
        "checkpoints_and_h",
        lambda c: marks(return_intermediate_states=True),
        ValueError,
        "return_intermediate_states",
        "with checkpoint_offsets",
        "one of the two",
        CHUNK,
    ),
]

GROUPS = {
    "rank": RANKS,
    "shape": SHAPES,
    "heads": HEADS,
    "dtype": DTYPES,
    "device": DEVICES,
    "sequences": SEQUENCES,
    "options": OPTIONS,
    "type": NOT_TENSORS,
    "out": OUT,
    "gradient": GRADIENTS,
    "pool": POOLS,
}
TABLE = [
    pytest.param(bad, op, id=f"{group}-{bad.id}-{op.__name__}")
    for group, rows in GROUPS.items()
    for bad in rows
    for op in bad.ops
]


def start(name: str, op: Callable) -> dict:
    """A valid call to spoil."""
    call = make_call(replace(BY_NAME[name], h=False, final=False))
    return call if op is fd.chunk_kda else as_recurrent(call)


@pytest.mark.parametrize(("bad", "op"), TABLE)
def test_refused_with_a_message_that_says_all(bad: Bad, op: Callable):
    call = start(bad.start, op)
    op(**call)
    call = call | bad.change(call)
    with pytest.raises(bad.error) as caught:
        op(**call)
    message = str(caught.value)
    came, _, wanted = message.partition(", wanted ")
    assert caught.type is bad.error
    assert came.startswith(f"{bad.argument}: got ")
    assert bad.came in came
    assert bad.wanted in wanted


@pytest.mark.parametrize("op", BOTH)
def test_a_bound_that_no_gate_reads_changes_nothing(op: Callable):
    call = start("softplus", op) | {"gate": "softplus"}
    assert same_bits(op(**call | {"lower_bound": -5.0})[0], op(**call)[0])


def test_a_hint_about_speed_is_never_refused():
    call = start("softplus", fd.chunk_kda)
    assert same_bits(fd.chunk_kda(**call | {"safe_gate": True})[0], fd.chunk_kda(**call)[0])


SPECIAL = {
    "sparse": (lambda x: x.to_sparse(), "sparse_coo"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("name", ["q", "v", "A_log", "initial_state"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_tensors_without_strides_are_refused_by_name(kind: str, name: str, op: Callable):
    make, said = SPECIAL[kind]
    call = start("state", op) | {"A_log": zeros(2), "use_gate_in_kernel": True}
    with pytest.raises(TypeError, match=rf"^{name}: got a {said} tensor, wanted a dense"):
        op(**call | {name: make(call[name])})


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("name", ["sclae", "use_qk_l2norm", "transpose_state_layout", "head_first", "cp_context"])
def test_unknown_argument_is_an_error(name: str, op: Callable):
    with pytest.raises(TypeError, match=f"'{name}'"):
        op(**start("bounded", op), **{name: None})


@pytest.mark.parametrize(
    "name", ["safe_gate", "chunk_size", "return_intermediate_states", "cu_seqlens_cpu", "checkpoint_offsets", "split"]
)
def test_recurrent_op_refuses_what_only_chunks_have(name: str):
    with pytest.raises(TypeError, match=f"'{name}'"):
        fd.fused_recurrent_kda(**start("bounded", fd.fused_recurrent_kda), **{name: None})


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_missing_tensor_is_an_error(name: str, op: Callable):
    call = start("bounded", op)
    del call[name]
    with pytest.raises(TypeError, match=f"'{name}'"):
        op(**call)


@pytest.mark.parametrize("op", BOTH)
def test_options_are_keyword_only(op: Callable):
    call = start("bounded", op)
    with pytest.raises(TypeError, match="positional"):
        op(*(call[name] for name in ("q", "k", "v", "g", "beta")), 0.5)


@pytest.mark.parametrize("op", BOTH)
def test_every_refusal_is_also_explains(op: Callable):
    """`explain` checks the call as the operator does."""
    call = start("bounded", op)
    with pytest.raises(ValueError, match=r"^lower_bound: got -9\.0, wanted"):
        fd.explain(op, **call | {"lower_bound": -9.0})
    with pytest.raises(TypeError, match="'sclae'"):
        fd.explain(op, **call, sclae=1.0)


# ---- backends ------------------------------------------------------------------------------------------------------


def test_triton_backend_on_the_cpu_says_how(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match=r"^backend: got 'triton', wanted .*tensors are on the CPU \(TRITON_INTERPRET=1"
    ):
        fd.chunk_kda(**start("bounded", fd.chunk_kda), backend="triton")


@pytest.mark.parametrize("name", ["q", "beta", "dt_bias", "initial_state"])
def test_backend_refuses_gradients_token_by_token(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or it would refuse the CPU first; no kernel is reached
    call = start("state", fd.fused_recurrent_kda)
    call[name] = call[name].requires_grad_()
    with pytest.raises(ValueError, match=r"^backend: got 'triton', wanted .*requires grad.*in chunks only"):
        fd.fused_recurrent_kda(**call, backend="triton")


def test_triton_backend_refuses_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^backend: got 'triton', wanted .*float64; it takes bfloat16"):
        fd.chunk_kda(**make_call(BY_NAME["bounded"], torch.float64), backend="triton")


# ---- cu_seqlens is device data -------------------------------------------------------------------------------------

BAD_OFFSETS = {
    "starts late": ((3, 40, 70), "first offset 3", "0"),
    "starts below zero": ((-4, 40, 70), "first offset -4", "0"),
    "falls": ((0, 50, 20, 70), "fall from 50 to 20", "never fall"),
    "past the end": ((0, 20, 71), "last offset 71", "at most T = 70"),
    "wild": ((0, 2**40, -(2**40), 2**62), "fall from", "never fall"),
}


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_offsets_are_verified_when_asked(kind: str, op: Callable, monkeypatch: pytest.MonkeyPatch):
    values, came, wanted = BAD_OFFSETS[kind]
    monkeypatch.setattr(checked, "ENABLED", True)
    call = start("bounded", op)
    op(**call, cu_seqlens=offsets(0, 20, 20, 60))
    with pytest.raises(ValueError) as caught:
        op(**call, cu_seqlens=offsets(*values))
    assert str(caught.value).startswith("cu_seqlens: got ")
    assert came in str(caught.value) and wanted in str(caught.value)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_bad_offsets_touch_nothing_outside_the_tensors(kind: str, op: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked, "ENABLED", False)
    values = BAD_OFFSETS[kind][0]
    call = start("bounded", op) | {"output_final_state": True}
    if op is fd.chunk_kda:
        call["return_intermediate_states"] = True
    results = op(**call, cu_seqlens=offsets(*values))
    assert results[0].shape == call["v"].shape
    assert results[1].shape == (len(values) - 1, 2, 32, 64)


BAD_INDICES = {
    "past the pool": (pool(state_indices=offsets(1, 4, 0)), "state_indices", "index 4", "4 slots"),
    "twice": (pool(state_indices=offsets(1, 2, 1)), "state_indices", "slot 1 again", "another slot"),
    "zero": (pool(state_indices=offsets(0, 2, 0)), "state_indices", "slot 0 again", "another slot"),
    "checkpoint past the pool": (((16, 0, 0), (9, 0, 0)), "checkpoint_indices", "index 9", "4 slots"),
    "checkpoint in a sequence's slot": (((0, 0, 16), (0, 0, 1)), "checkpoint_indices", "slot 1 again", "another slot"),
    "checkpoints in one slot": (((16, 0, 16), (3, 0, 3)), "checkpoint_indices", "slot 3 again", "another slot"),
    "odd checkpoint": (((24, 0, 0), (3, 0, 0)), "checkpoint_offsets", "offset 24", "a multiple of 16"),
    "negative checkpoint": (((-16, 0, 0), (3, 0, 0)), "checkpoint_offsets", "-16 after 0", "rise"),
    "checkpoint past the end": (((32, 0, 0), (3, 0, 0)), "checkpoint_offsets", "offset 32", "20 tokens"),
    "falling": (
        (((0, 0), (0, 0), (32, 16)), ((0, 0), (0, 0), (3, -1))),
        "checkpoint_offsets",
        "16 after 32",
        "rise",
    ),
}


@pytest.mark.parametrize(
    ("kind", "op"),
    [(kind, op) for kind in BAD_INDICES for op in (CHUNK if "checkpoint" in BAD_INDICES[kind][1] else BOTH)],
)
def test_pool_indices_are_verified_when_asked(kind: str, op: Callable, monkeypatch: pytest.MonkeyPatch):
    """Three sequences of 20, 0 and 40 tokens."""
    given, argument, came, wanted = BAD_INDICES[kind]
    call = start("bounded", op) | {"cu_seqlens": offsets(0, 20, 20, 60)}
    if isinstance(given, tuple):
        given = marks(*map(torch.tensor, given), state_indices=offsets(1, 1, 2))
    monkeypatch.setattr(checked, "ENABLED", True)
    # the second sequence has no tokens, so its slot is not stored to
    op(**call | pool(state_indices=offsets(1, 1, 2)))
    op(**call | pool(state_indices=offsets(-1, -1, -9)))
    op(**call | pool(state_indices=offsets(0, 0, 0), null_index="non_positive"))
    if op is fd.chunk_kda:
        good = torch.tensor([[16, 0], [0, 0], [16, 32]]), torch.tensor([[0, 0], [9, 9], [-1, 3]])
        op(**call | marks(*good, state_indices=offsets(1, 1, 2)))
    with pytest.raises(ValueError) as caught:
        op(**call | given)
    assert str(caught.value).startswith(f"{argument}: got ")
    assert came in str(caught.value) and wanted in str(caught.value)


# ---- inputs are never written, out is ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", [c for c in CASES if c.tokens < 200], ids=case_id)
def test_inputs_are_never_written(case: Case, op: Callable):
    call = make_call(case)
    call = call if op is fd.chunk_kda else as_recurrent(call)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    before = {name: (x.clone(), x._version) for name, x in tensors.items()}
    op(**call)
    for name, (copy, version) in before.items():
        assert same_bits(tensors[name], copy), name
        assert tensors[name]._version == version, name


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "packed_int32", "T0", "B3", "gva2"), ids=case_id)
def test_out_is_written_and_returned(case: Case, op: Callable):
    call = as_recurrent(make_call(case))
    want, _ = op(**call)
    out = torch.full_like(call["v"], torch.nan)
    o, _ = op(**call, out=out)
    assert o is out
    assert same_bits(out, want)


@pytest.mark.parametrize("op", BOTH)
def test_out_may_be_a_strided_view(op: Callable):
    """Beside v in one buffer too, as long as the two don't touch."""
    call = start("bounded", op)
    want, _ = op(**call)
    buffer = torch.full((2, 70, 2, 2, 64), torch.nan)
    buffer[0, :, :, 0] = call["v"][0]
    o, _ = op(**call | {"v": buffer[:1, :, :, 0]}, out=buffer[1:, :, :, 0])
    assert same_bits(o, want)
    assert buffer[:, :, :, 1].isnan().all()
