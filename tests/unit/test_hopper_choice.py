"""Which calls the Hopper backend takes, why it declines the others, and what it launches: none of it needs a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

import flashdelta as fd
from flashdelta import backends
from flashdelta.kernels.hopper.build import build, in_steps
from flashdelta.kernels.hopper.launch import ctas, layout, prefetching_ctas
from flashdelta.kernels.hopper.recurrence import stream_k_pays
from flashdelta.kernels.hopper.segments import SPLIT_COSTS, may_try, room, split_layout
from flashdelta.problem.problem import record_width
from flashdelta.problem.split import segments_of_call
from flashdelta.program.launch import Launch
from flashdelta.program.workspace import Workspace
from flashdelta.runtime.call import check
from flashdelta.runtime.warmup import _warm_sizes

from ..compile.variants import BETWEEN, on_rank
from ..gpu.calls import KIMI, UNBOUNDED, on_gpu
from ..gpu.test_pool import MODELS as POOL_MODELS
from ..support.cases import BF16, BOUNDED, CASES, FP32, GATE_CASES, Case, case_id
from ..support.decoding import BY_NAME, make_step
from ..support.inputs import make_call, meta_call, on_meta
from ..support.oracle import as_recurrent
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, PoolCase, pool_call, pool_id
from ..support.wy import WyCase, make_wy

FP16 = torch.float16
TABLE = [case for case in map(on_gpu, CASES) if case.chunk_size == 64 and case.V >= 64]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    has_capability(monkeypatch, (9, 0))


def has_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(backends, "_cached_capability", lambda index: capability)


def verdict(call: dict, op=fd.chunk_kda, device: str = "cuda") -> backends.Verdict:
    explanation = fd.explain(op, **call, device=device)
    return next(v for v in explanation.verdicts if v.backend == "hopper")


def assert_takes(call: dict) -> None:
    found = verdict(call)
    assert found.supported and found.preferred, found.reason
    assert fd.explain(fd.chunk_kda, **call, device="cuda").chosen == "hopper"
    problem, _ = check(fd.chunk_kda, **call)
    assert backends.HopperBackend().obstacle(problem, torch.device("cuda")) is None


# ---- what it takes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TABLE, ids=case_id)
def test_takes_the_table_of_cases(case: Case):
    assert_takes(on_meta(make_call(case, BF16)))


RANK_HEADS = (1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
GROUPED = ((1, 2), (2, 6), (4, 16), (1, 8), (2, 16), (16, 32), (16, 64), (12, 96))
PACKED = ((), (0,), (1,) * 600, (131_072, *(1024,) * 5), (3000, 0, 1))
STATES = itertools.product((None, FP32, BF16), *[(False, True)] * 3, (None, (100, 0, 28)))
TAKEN = [
    *({"H": H, "HV": H, "T": 8192, "lengths": x, "state": FP32} for H in RANK_HEADS for x in (None, (3000, 0, 17))),
    *({"H": H, "HV": HV, "T": 4096} for H, HV in GROUPED),
    *(dict(zip(("state", "v_first", "final", "h", "lengths"), x)) for x in STATES),
    *({"lengths": x, "unused": 5, "offsets_dtype": y} for x in PACKED for y in (torch.int32, torch.int64)),
    *({"H": H, "HV": H, "T": T} for H in (12, 64) for T in (131_072, 1_048_576)),
]


@pytest.mark.parametrize("model", [KIMI, UNBOUNDED], ids=case_id)
def test_takes_heads_states_and_lengths(model: Case):
    for changes in TAKEN:
        assert_takes(meta_call(replace(model, **changes)))


@pytest.mark.parametrize("beta_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("beta", ["value", "logit", "double_logit"])
@pytest.mark.parametrize("grad", ["q", "v", "beta", "A_log"])
def test_takes_every_beta_and_gradients(grad: str, beta: str, beta_dtype: torch.dtype):
    call = meta_call(replace(KIMI, beta=beta))
    call["beta"] = call["beta"].to(beta_dtype)
    call[grad].requires_grad_()
    assert_takes(call)


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("g_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("case", GATE_CASES, ids=case_id)
def test_takes_every_gate(case: Case, g_dtype: torch.dtype, dims: tuple[int, int]):
    call = meta_call(replace(case, K=dims[0], V=dims[1], wide_gate=False))
    assert_takes(call | {"g": call["g"].to(g_dtype)})


POOLS = [
    replace(pool_case, case=on_gpu(pool_case.case))
    for pool_case in PLAIN_POOLS + CHECKPOINT_POOLS + POOL_MODELS
    if pool_case.case.chunk_size == 64
]


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_takes_pools(pool_case: PoolCase):
    assert_takes(on_meta(pool_call(pool_case, BF16)))


# ---- what it declines, and in which words ---------------------------------------------------------------------------


def assert_declines(call: dict, reason: str, op=fd.chunk_kda, device: str = "cuda") -> None:
    found = verdict(call, op, device)
    assert not found.supported
    assert reason in found.reason
    assert fd.explain(op, **call, device=device).chosen != "hopper"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_declines_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    has_capability(monkeypatch, capability)
    assert_declines(meta_call(KIMI), f"compute capability {capability}; it runs on Hopper, (9, 0)")
    assert fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda").chosen == "triton"
    with pytest.raises(ValueError, match=r"^backend must be .*\(hopper: compute capability.*; got 'hopper'"):
        fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda", backend="hopper")


@pytest.mark.parametrize("capability", [(9, 0), (9, 4)])
def test_amd_gpus_are_left_to_the_reference(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """Which ROCm's PyTorch calls "cuda", with capabilities like those of Hopper."""
    has_capability(monkeypatch, capability)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    explanation = fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda")
    assert explanation.chosen == "reference"
    assert all(not found.supported and "AMD" in found.reason for found in explanation.verdicts[:2])


def test_declines_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    assert_declines(meta_call(KIMI), "device type 'cpu'; it runs on NVIDIA Hopper GPUs", device="cpu")
    assert_declines(meta_call(KIMI), "device type 'meta'", device="meta")
    has_capability(monkeypatch, None)
    assert_declines(meta_call(KIMI), "no NVIDIA GPU on this machine")


def test_declines_without_gluon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "has_gluon", lambda: False)
    assert_declines(meta_call(KIMI), "no Gluon for Hopper; it needs Triton 3.6 or newer")


DECLINED = [
    ({"chunk_size": 32}, BF16, "chunk_size 32; it takes 64"),
    ({"H": 64, "HV": 64, "T": 2**23}, BF16, "more than 2^31 workspace rows"),
    *(({"K": K, "V": V}, BF16, f"K = {K}, V = {V}; it takes") for K, V in ((32, 64), (128, 32), (256, 128), (64, 256))),
    *(({}, dtype, f"dtype {dtype}; it computes in bfloat16") for dtype in (FP16, FP32, torch.float64)),
]


@pytest.mark.parametrize(("changes", "dtype", "reason"), DECLINED)
def test_declines_other_sizes_and_dtypes(changes: dict, dtype: torch.dtype, reason: str):
    assert_declines(meta_call(replace(KIMI, **changes), dtype), reason)


def test_declines_the_token_recurrence_but_for_one_token():
    several = as_recurrent(meta_call(KIMI))
    assert_declines(several, "several tokens a sequence; token by token it takes one", fd.fused_recurrent_kda)
    one = as_recurrent(meta_call(replace(KIMI, T=1, lengths=None, state=FP32)))
    assert_declines(one, "states in torch.float32, K first; it takes bfloat16, V first", fd.fused_recurrent_kda)
    state = torch.empty(one["q"].shape[0], one["v"].shape[2], 128, 128, dtype=torch.bfloat16, device="meta")
    taken = one | {"initial_state": state, "state_v_first": True}
    assert verdict(taken, fd.fused_recurrent_kda).supported


# ---- what it launches -----------------------------------------------------------------------------------------------


def launched(call: dict) -> tuple[list, tuple[Tensor, ...]]:
    """The launches of a call on the CPU's memory (they are not run), and its inputs."""
    problem, t = check(fd.chunk_kda, **call)
    return [*build(problem, t, 90).launches], (t.q, t.k, t.v, t.g, t.beta)


def read(launch, *names: str) -> list:
    by_name = dict(zip((param.name for param in launch.kernel.params), launch.arguments))
    return [by_name[name] for name in names]


@pytest.mark.parametrize("case", TABLE, ids=case_id)
def test_a_forward_is_two_launches(case: Case):
    """After copies of what kernels do not read in place."""
    found, _ = launched(make_call(case, BF16))
    names = [launch.kernel.__name__ for launch in found]
    assert [name for name in names if not name.endswith("copy_kernel")] == ["prepare_kernel", "recurrence_kernel"]


IN_PLACE = {"layout": "fused", "H": 8, "HV": 8}


@pytest.mark.parametrize(
    ("changes", "copied"),
    [
        (IN_PLACE, ""),
        (IN_PLACE | {"lengths": (30, 40)}, ""),
        ({"layout": "head_first"}, ""),
        ({"layout": "expanded"}, ""),
        ({"layout": "odd_offset"}, "qkvg"),
        ({"layout": "last_dim_strided"}, "qkvg"),
        ({"layout": "tokens_innermost"}, "qkvg"),
        ({"layout": "fused", "H": 3, "HV": 3}, "qkvg"),
        ({"layout": "padded"}, "qkvg"),
    ],
    ids=str,
)
def test_what_is_aligned_is_read_in_place(changes: dict, copied: str):
    """Slices of a model's fused projection are; what no 16-byte copy can read is copied first. beta is always in place."""
    (*copies, prepare, recurrence), inputs = launched(
        make_call(replace(KIMI, B=1 if "lengths" in changes else 2, **changes), BF16)
    )
    read_from = dict(zip("qkgb", read(prepare, "q", "k", "g", "beta"))) | {"v": read(recurrence, "v")[0]}
    for name, x in zip("qkvgb", inputs):
        assert (read_from[name].data_ptr() != x.data_ptr()) == (name in copied), name
    assert len(copies) == (copied != "")


@pytest.mark.parametrize(("layout", "copied"), [("dense", False), ("odd_offset", True)])
def test_wy_reads_copies_of_what_is_off_a_boundary(layout: str, copied: bool):
    call = make_wy(WyCase("copied", "", K=64, V=128, H=1, HV=2, layout=layout, log2=True), BF16)
    problem, t = check(fd.kernels.chunk_bwd_wy_dqkg, **call)
    *copies, wy = build(problem, t, 90).launches
    names = ("q", "k", "g", "v", "A", "h", "v_new", "do", "dv", "dh")
    parameters = ("q", "k", "g", "v", "Akk_inv", "h", "v_new", "grad_o", "grad_v_new", "grad_h")
    for name, x in zip(names, read(wy, *parameters)):
        assert (x.data_ptr() != call[name].data_ptr()) == copied, name
        assert x.shape == call[name].shape
    # by dtypes, tokens and channels, four at most together
    assert sum(launch.rows for launch in copies) == len(names) * copied and len(copies) <= 8
    assert {launch.kernel.__name__ for launch in copies} <= {"copy_kernel", "strided_copy_kernel"}


@pytest.mark.parametrize("wide_gate", [False, True], ids=["bf16 gate", "fp32 gate"])
@pytest.mark.parametrize("layout", ["dense", "head_first", "padded", "odd_offset", "expanded"])
def test_strides_are_told_in_whole_steps(layout: str, wide_gate: bool):
    """Kernels take them in units of 8 elements: none may be rounded, in fp32 neither."""
    (*_, prepare, recurrence), _ = launched(make_call(replace(KIMI, B=2, layout=layout, wide_gate=wide_gate), BF16))
    for launch, name in ((prepare, "q"), (prepare, "k"), (prepare, "g"), (recurrence, "v"), (recurrence, "o")):
        x, *steps = read(launch, name, *(f"{name}_{dim}" for dim in ("batch", "token", "head")))
        assert [8 * step for step in steps] == list(x.stride()[:3]), name
        assert x.data_ptr() % 16 == 0 and x.stride(-1) == 1


def test_rows_of_a_batch_may_be_any_distance_apart():
    """Kernels take strides as int32: where one does not fit a copy is read, and one row has none."""
    one = make_call(replace(KIMI, B=1), BF16)
    for name in ("q", "k", "v", "g", "beta"):
        one[name] = one[name].as_strided(one[name].shape, (2**40, *one[name].stride()[1:]))
    (prepare, recurrence), inputs = launched(one)
    assert read(prepare, "q_batch", "k_batch", "g_batch", "beta_batch") == [0, 0, 0, 0]
    assert read(recurrence, "v_batch") == [0]
    assert [x.data_ptr() for x in read(prepare, "q", "k", "g", "beta")] == [inputs[i].data_ptr() for i in (0, 1, 3, 4)]

    two = meta_call(replace(KIMI, B=2), BF16)
    dense = {name: two[name].stride(0) for name in ("q", "k", "g", "beta")}
    for name, far in (("q", 2**34), ("k", 2**34 - 8), ("g", 2**40), ("beta", 2**31)):
        two[name] = torch.empty_strided(two[name].shape, (far, *two[name].stride()[1:]), dtype=BF16, device="meta")
    (*_, prepare, _), _ = launched(two)
    found = read(prepare, "q_batch", "k_batch", "g_batch", "beta_batch")
    assert found == [dense["q"] // 8, 2**31 - 1, dense["g"] // 8, dense["beta"]]


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths", [None, (65, 0, 3)], ids=["fixed", "packed"])
def test_the_workspace_has_the_size_it_states(lengths: tuple[int, ...] | None, dims: tuple[int, int]):
    problem, _ = check(fd.chunk_kda, **meta_call(replace(KIMI, K=dims[0], V=dims[1], T=300, lengths=lengths)))
    workspace = Workspace.allocate(layout(problem), torch.device("cpu"))
    tensors = workspace.select(*layout(problem))
    assert {x.untyped_storage().data_ptr() for x in tensors} == {workspace.buffer.data_ptr()}, (
        "more than one allocation"
    )
    assert sum(x.nbytes for x in tensors) == workspace.buffer.nbytes
    assert all(x.data_ptr() % 16 == 0 for x in tensors)
    assert math.prod(workspace["decay"].shape) == problem.B * problem.slots * problem.HV * problem.K


@pytest.mark.parametrize("heads", [1, 3, 66, 96])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_every_program_has_a_place_to_leave_a_state(dims: tuple[int, int], heads: int):
    call = meta_call(replace(KIMI, K=dims[0], V=dims[1], H=heads, HV=heads, T=300))
    (prepare, recurrence), _ = launched(
        {name: x.new_empty(x.shape, device="cpu") if isinstance(x, Tensor) else x for name, x in call.items()}
    )
    carry, semaphores = read(recurrence, "carry", "semaphores")
    assert recurrence.ctas % (dims[1] // 64) == 0
    assert recurrence.ctas == min(heads * dims[1] // 64, 132)
    assert carry.numel() >= recurrence.ctas * 64 * dims[0]
    assert semaphores.numel() == prepare.constants["FLAGS"] >= recurrence.ctas
    assert read(prepare, "semaphores")[0].data_ptr() == semaphores.data_ptr()


def test_bounded_and_exact_paths_are_told_apart():
    """`safe_gate` is what a bound, or a promise, implies."""
    for case, safe in ((KIMI, True), (UNBOUNDED, False), (Case(name="p", why="", safe=True, K=128), True)):
        (prepare, _), _ = launched(make_call(replace(case, K=128, V=128), BF16))
        assert prepare.constants["SAFE"] is safe
    assert BOUNDED["lower_bound"] == -5.0


MANY = replace(KIMI, H=64, HV=64)


@pytest.mark.parametrize(
    ("changes", "options", "wanted"),
    [
        ({}, {}, True),
        ({"V": 64, "lengths": (70, 0, 200_000)}, {}, True),
        ({"B": 3, "T": 1, "state": BF16, "v_first": True}, {"batch_invariant": True}, True),
        ({"gate": "none", "lower_bound": None, "safe": True}, {}, True),
        ({"H": 8, "HV": 32}, {}, True),
        ({"H": 32, "HV": 32, "V": 64}, {"split": False}, True),
        ({"H": 31, "HV": 31}, {}, False),
        ({}, {"split": 2}, False),
        ({}, {"requires_grad": True}, False),
        ({"K": 64}, {}, True),
        ({"K": 64, "H": 32, "HV": 32}, {}, True),  # not split, however long its sequences
        ({"K": 64, "H": 31, "HV": 31}, {}, False),
        ({"K": 64, "gate": "softplus", "lower_bound": None}, {}, True),
        ({"K": 64, "H": 32, "HV": 32}, {"split": 2}, False),
        ({"l2norm": False}, {}, False),
        ({"gate": "softplus", "lower_bound": None}, {}, True),
        ({"gate": "none", "lower_bound": None}, {}, True),
        ({"gate": "none", "lower_bound": None, "safe": True, "wide_gate": True}, {}, False),
        ({"h": True}, {}, False),
    ],
    ids=str,
)
def test_steps_for_many_heads(changes: dict, options: dict, wanted: bool):
    """Whatever the lengths and however many sequences: the bits of one must not depend on the others."""
    call = meta_call(replace(MANY, **changes)) | options
    call["q"].requires_grad_(call.pop("requires_grad", False))
    problem, t = check(fd.chunk_kda, **call)
    assert in_steps(problem, room(problem, t.device)) == wanted


@pytest.mark.parametrize(
    ("K", "heads", "split", "wanted"),
    [(128, 48, "auto", True), (128, 47, "auto", False), (128, 64, 2, False), (64, 32, "auto", True)],
)
def test_ranks_take_steps_from_more_heads_on(K: int, heads: int, split: str | int, wanted: bool):
    problem, t = check(fd.chunk_kda, **meta_call(replace(KIMI, H=heads, HV=heads, K=K)) | {"split": split})
    launches = build(*on_rank(problem, t, *BETWEEN), 90).launches
    steps = {x.constants["STEPS"] for x in launches if isinstance(x, Launch) and "STEPS" in x.constants}
    assert steps == {wanted}


@pytest.mark.parametrize("heads", [31, 32, 47, 48])
def test_two_ranks_take_steps_where_one_gpu_does(heads: int):
    """Between two there are no transitions, but where the first one sends what it forms before its scan."""
    problem, t = check(fd.chunk_kda, **meta_call(replace(KIMI, H=heads, HV=heads)))
    for rank in range(2):
        own, _ = on_rank(problem, t, rank, 2)
        assert in_steps(own, room(own, t.device)) == in_steps(problem, room(problem, t.device)) == (heads >= 32)
        assert in_steps(replace(own, relay=False), room(own, t.device)) == (heads >= 48)


@pytest.mark.parametrize("V", [64, 128])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_warmup_calls_every_form(packed: bool, K: int, V: int):
    """In steps and in chunks, by whole tiles, of few at once with `prepare`, and by stream-K, and chunks that may be split."""
    forms = set()
    for B, T, H, N in _warm_sizes("chunk", packed, V, torch.device("cuda")):
        lengths = (T,) * N if packed else None
        problem, t = check(fd.chunk_kda, **meta_call(replace(KIMI, B=B, T=T, K=K, V=V, H=H, HV=H, lengths=lengths)))
        most = room(problem, t.device)
        split = segments_of_call(replace(problem, T=T), most, SPLIT_COSTS) > 0
        scan = next(x for x in build(problem, t, 90).launches if isinstance(x, Launch) and "STREAM_K" in x.constants)
        stream_k = stream_k_pays(problem, ctas(V // 64, t.device))
        forms.add((in_steps(problem, most), stream_k, scan.overlaps, split))
    assert forms == {
        *((steps, stream_k, False, False) for steps in (False, True) for stream_k in (False, True)),
        (False, False, True, False),
        *((False, stream_k, False, True) for stream_k in ((False, True) if packed else (False,))),
    }


SHARD = replace(KIMI, T=2048, H=12, HV=12)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"T": 4096}, 3),
        ({}, 0),  # transitions would not pay
        ({"T": 8192, "H": 24, "HV": 24}, 0),  # of one segment of all heads no transitions fit beside another
        ({"B": 5}, 0),  # five rows fill the GPU
    ],
    ids=str,
)
def test_segments_on_trial(changes: dict, most: int):
    """Where transitions pay, and nowhere else."""
    problem, t = check(fd.chunk_kda, **meta_call(replace(SHARD, **changes)))
    found = split_layout(problem, t.device)
    assert found["forgets"] == ((most, problem.HV), torch.int32) if most else found == {}


@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"split": 3}, {"split": False}, {"requires_grad": True}, {"checkpoints": True}],
    ids=str,
)
def test_segments_that_are_not_tried(options: dict):
    """What must not depend on the batch, is asked for, or will be computed again."""
    options = dict(options)
    call = meta_call(replace(SHARD, T=8192, lengths=(8192,), state=FP32))
    call["q"].requires_grad_(options.pop("requires_grad", False))
    if options.pop("checkpoints", False):
        index = torch.zeros(1, 1, dtype=torch.int32, device="meta")
        options |= {"checkpoint_offsets": index, "checkpoint_indices": index}
        options |= {"checkpoint_states": torch.empty_like(call["initial_state"])}
    problem, t = check(fd.chunk_kda, **call | options)
    assert not may_try(problem)
    assert "forgets" not in split_layout(problem, t.device)


@pytest.mark.parametrize(
    "heads, lengths, wanted",
    [
        (96, (8192,), True),  # 1.45 items for each of 132 programs
        (64, (8192,), False),  # 0.97
        (32, (8192,), False),
        (96, (1300, 547, 2048, 963, 271, 3063), True),  # the last sequence's items are 1.45 of them
        (64, (410,) * 20, False),
        (96, (410,) * 20, False),  # 29: the last ones hardly matter
    ],
)
def test_stream_k_where_that_pays(heads: int, lengths: tuple[int, ...], wanted: bool):
    problem, _ = check(fd.chunk_kda, **meta_call(replace(KIMI, H=heads, HV=heads, lengths=lengths)))
    assert stream_k_pays(problem, 132) == wanted
    assert stream_k_pays(replace(problem, checkpoints=1), 132) == wanted


@pytest.mark.parametrize(
    ("N", "HV", "V", "tokens", "wanted"),
    [
        *((8, 12, 128, 4, 168), (8, 32, 128, 4, 128), (32, 32, 128, 4, 168), (8, 32, 128, 8, 168)),
        *((8, 32, 128, 16, None), (8, 32, 128, 17, None), (8, 32, 64, 4, 168), (16, 32, 64, 4, 128)),
    ],
)
def test_registers_of_a_verification(N: int, HV: int, V: int, tokens: int, wanted: int | None):
    """Of 132 SMs. An SM has room for a multiple of its share of CTAs."""
    sizes = {"H": HV, "HV": HV, "V": V, "state": BF16, "B": N, "T": tokens, "spec": tokens - 1, "slots": N}
    step = replace(BY_NAME["verify"], K=128, indices=tuple(range(N)), **sizes)
    records = torch.empty(N, tokens, HV, record_width(128, V), device="meta")
    call = on_meta(make_step(step, BF16) | {"intermediate_states": records})
    (launch,) = build(*check(fd.recurrent_kda, **call), 90).launches
    assert isinstance(launch, Launch) and launch.max_registers == wanted


@pytest.mark.parametrize(
    ("N", "HV", "V", "tokens", "state", "wanted"),
    [
        *((8, 32, 128, 8, BF16, (512, 1, 128)), (32, 12, 128, 16, BF16, (384, 2, 168))),
        *((32, 12, 128, 17, BF16, (768, 1, None)), (32, 12, 128, 8, FP32, (768, 1, 128))),
        (32, 32, 64, 8, BF16, (1024, 1, 128)),
    ],
)
def test_slices_of_a_commit(
    N: int, HV: int, V: int, tokens: int, state: torch.dtype, wanted: tuple[int, int, int | None]
):
    """CTAs, slices each and registers, on 132 SMs."""
    index = torch.empty(N, dtype=torch.int32, device="meta")
    pool = torch.empty(N, HV, V, 128, dtype=state, device="meta")
    records = torch.empty(N, tokens, HV, record_width(128, V), device="meta")
    (launch,) = build(*check(fd.commit, pool, records, index, index), 90).launches
    assert isinstance(launch, Launch)
    assert (launch.ctas, launch.constants["SLICES"], launch.max_registers) == wanted


@pytest.mark.parametrize("tokens", [16, 17])
def test_seventeen_tokens_are_verified_and_committed_at_once(tokens: int):
    step = replace(BY_NAME["verify"], K=128, V=128, v_first=True, T=tokens, spec=tokens - 1)
    given = make_step(step, BF16)
    records = torch.empty(step.slots, tokens, step.HV, record_width(128, 128))
    pool, slots = given["initial_state"], given["ssm_state_indices"]
    names = ("initial_state", "intermediate_states", "ssm_state_indices", "num_accepted_tokens")
    accepted = dict(zip(names, (pool, records, slots, torch.ones_like(slots)))) | {"state_v_first": True}
    for function, call in (
        (fd.recurrent_kda, given | {"intermediate_states": records}),
        (fd.commit, accepted | {"null_index": "negative"}),
    ):
        (launch,) = build(*check(function, **on_meta(call)), 90).launches
        assert isinstance(launch, Launch) and isinstance(launch.kernel, GluonJITFunction)
        assert (launch.constants["TOKENS"], launch.constants["ONE_MORE"]) == (16, tokens == 17)


def test_the_last_quarter_of_the_ctas_that_run_at_once_prefetches():
    assert prefetching_ctas(1000, 400) == (300, 400)
    assert prefetching_ctas(10, 400) == (8, 10)
