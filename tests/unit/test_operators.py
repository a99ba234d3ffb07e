"""The `torch.library` operators (tracing, fake tensors, autograd), `explain` and `warmup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashdelta as fd
from flashdelta import backends
from flashdelta.kernels.triton import build  # noqa: F401  decorated here, as tests set TRITON_INTERPRET
from flashdelta.problem import device_checks
from flashdelta.problem.problem import inputs_of
from flashdelta.runtime import call as runtime
from flashdelta.runtime.autograd import Differentiable
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import operator_of

from ..full import FULL, thinned
from ..support.cases import BF16, BY_NAME, FP32, Case, case_id, named
from ..support.decoding import BY_NAME as STEPS
from ..support.decoding import make_step, memory_of
from ..support.decoding_checks import commit_call
from ..support.fused import FUSED_BY_NAME, make_fused
from ..support.gradients import INPUTS
from ..support.inputs import TOKEN_TENSORS, make_call, on_meta
from ..support.layer import CONVOLUTION_BY_NAME, NORM_BY_NAME, make_convolution, make_norm
from ..support.oracle import as_recurrent, assert_close, same_bits
from ..support.pools import BUFFERS_BY_NAME as BUFFERS
from ..support.pools import BY_NAME as POOLS
from ..support.pools import call_for, pool_call
from ..support.prefills import LOGITS, PLAIN, prefill_call
from ..support.refusals import commit_of_records
from ..support.wy import BY_NAME as WY_CASES
from ..support.wy import make_wy

pytestmark = pytest.mark.long

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]
wy = fd.kernels.chunk_bwd_wy_dqkg


def short_call(case: Case, op, dtype: torch.dtype = FP32, **changes) -> dict:
    """The call on few tokens: the token recurrence is traced step by step where it runs as plain PyTorch."""
    lengths = case.lengths and (3, 0, 4)
    call = make_call(replace(case, T=7, lengths=lengths, h=False, **changes), dtype)
    return call if op is fd.chunk_kda else as_recurrent(call)


# ---- torch.compile ------------------------------------------------------------------------------------------------


def calls(*rows: tuple[str, Callable, Callable[[], dict]], marks: tuple = ()) -> list:
    return [pytest.param(op, make, id=f"{op.__name__}-{name}", marks=marks) for name, op, make in rows]


def whole_sequences(*names: str, ops: Sequence[Callable] = BOTH) -> list[tuple]:
    return [(case.name, op, partial(short_call, case, op)) for case in named(*names) for op in ops]


def steps(*names: str) -> list[tuple]:
    return [(name, fd.recurrent_kda, partial(make_step, STEPS[name])) for name in names]


FLAGS = POOLS["flags"]
POOL_CALLS = [
    (f"pool {pool_case.name}", op, partial(call_for, op, pool_case))
    for op, pool_case in (
        (fd.chunk_kda, FLAGS),
        (fd.chunk_kda, POOLS["one_each"]),
        (fd.chunk_kda, POOLS["one"]),
        (fd.fused_recurrent_kda, replace(FLAGS, case=replace(FLAGS.case, lengths=(3, 0, 2, 1)))),
    )
]
TRACED = ("bounded", "packed_bf16_state", "no_final_state", "fused")

TRACED_STEPS = ("paged", "mixed_packed", "own_final", "no_state", "spec_packed", "source", "verify_rows")
LONG = [*whole_sequences(*TRACED), *POOL_CALLS, *steps(*TRACED_STEPS)]
FUSED_CALLS = [
    (name, fd.fused_kda_decode, partial(make_fused, FUSED_BY_NAME[name]))
    for name in ("bias", "replay", *("two_taps", "gva8", "spec_packed") * FULL)
]
CONVOLUTIONS = ("packed", "marks_pool", "step", *("bias", "packed_fla", "pool_flags", "every", "every_packed") * FULL)
LAYER_CALLS = [
    *((name, fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME[name])) for name in ("heads", "rows", "fused")),
    *((name, fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME[name])) for name in CONVOLUTIONS),
]
BUFFERED = ("split_every", "offsets_pool", *("every_packed", "many_offsets") * FULL)
OTHERS = [
    *FUSED_CALLS,
    *LAYER_CALLS,
    *((name, fd.chunk_kda, partial(pool_call, BUFFERS[name])) for name in BUFFERED),
    ("", fd.commit, commit_call),
    ("records", fd.commit, commit_of_records),
    ("", wy, partial(make_wy, WY_CASES["plain"])),
    ("", fd.kda_prefill, partial(prefill_call, LOGITS)),
]
WITH_OUT = [*whole_sequences("bounded", "packed_int32"), *POOL_CALLS, *steps(*TRACED_STEPS)]


def compiled(function: Callable, **options) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager"} | options)


def results_of(found: tuple | Tensor | None) -> tuple:
    return found or () if not isinstance(found, Tensor) else (found,)


def assert_compiles(op: Callable, call: dict, make: Callable[[], dict]) -> tuple:
    """In one graph, with the bits of the eager call in its results and in all that it writes. Returns what that found."""
    eager = make()
    want = results_of(op(**eager))
    found = results_of(compiled(lambda arguments: op(**arguments))(call))
    for got, x in zip(found, want, strict=True):
        assert same_bits(got, x)
    for name, x in eager.items():
        assert not isinstance(x, Tensor) or same_bits(memory_of(call[name]), memory_of(x)), name
    return want


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize(("op", "make"), [*calls(*thinned(LONG, 4), marks=(pytest.mark.slow,)), *calls(*OTHERS)])
def test_compiles_in_one_graph(op: Callable, make: Callable[[], dict]):
    assert_compiles(op, make(), make)


@pytest.mark.parametrize(("op", "make"), calls(*thinned(WITH_OUT, 4, 1), marks=(pytest.mark.slow,)))
def test_compiles_with_out(op: Callable, make: Callable[[], dict]):
    out = torch.full_like(op(**make())[0], torch.nan)
    want = assert_compiles(op, make() | {"output" if op is fd.recurrent_kda else "out": out}, make)
    assert same_bits(out, want[0])


@pytest.mark.slow
@pytest.mark.parametrize(("op", "make"), calls(*thinned(whole_sequences("softplus", "packed_bf16_state"), 3)))
def test_compiles_with_gradients(op: Callable, make: Callable[[], dict]):
    call = make()
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def loss(arguments: dict) -> Tensor:
        o, state = op(**arguments)
        return o.square().sum() + state.float().square().sum()

    def gradients(function) -> list[Tensor]:
        leaves = {name: call[name].detach().clone().requires_grad_() for name in names}
        return torch.autograd.grad(function(call | leaves), list(leaves.values()))

    for name, got, want in zip(names, gradients(compiled(loss)), gradients(loss)):
        assert_close(f"grad of {name}", got, want, 1e-6)


def test_compiled_graph_holds_one_operator():
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled(lambda arguments: fd.chunk_kda(**arguments), backend=keep)(short_call(BY_NAME["bounded"], fd.chunk_kda))
    called = [node.target for node in graphs[0].graph.nodes if "flashdelta" in str(node.target)]
    assert called == [torch.ops.flashdelta.kda_forward]


@pytest.mark.parametrize(
    ("options", "fullgraph", "error", "said"),
    [
        ({"allow_neg_eigval": True}, True, torch._dynamo.exc.Unsupported, "allow_neg_eigval must be False"),
        ({"final_state": torch.zeros(1, 2, 32, 64).half()}, False, TypeError, "final_state must be of dtype float32"),
    ],
    ids=["rule", "dtype"],
)
def test_a_traced_call_says_what_is_wrong(options: dict, fullgraph: bool, error: type[Exception], said: str):
    call = short_call(BY_NAME["state"], fd.chunk_kda) | {"use_beta_sigmoid_in_kernel": False} | options
    with pytest.raises(error, match=said):
        compiled(lambda arguments: fd.chunk_kda(**arguments), fullgraph=fullgraph)(call)


# ---- the operators themselves -------------------------------------------------------------------------------------


CHECKED = thinned([*whole_sequences("bounded", "state", "packed_int32", "no_final_state"), *POOL_CALLS], 3)
WITHOUT_TOKENS = [
    (case.name, fd.chunk_kda, partial(make_call, replace(case, h=False))) for case in named("T0", "packed_all_empty")
]
"""An operator must not return its input, which is the final state here."""

STEPPED = calls(*steps("spec_packed", "verify_rows", *("paged", "source") * FULL), marks=(pytest.mark.slow,))


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("way", ["plain", "out", "gradients"])
@pytest.mark.parametrize(
    ("op", "make"),
    [*calls(*CHECKED, *WITHOUT_TOKENS, *LAYER_CALLS, ("", fd.commit, commit_call)), *STEPPED],
)
def test_opcheck(op: Callable, make: Callable[[], dict], way: str):
    """Checks the operator that a traced call goes through."""
    call = make()
    forward_only = {"state_pool", "checkpoint_states"} & call.keys() or op in (fd.commit, fd.recurrent_kda)
    if way == ("gradients" if forward_only else "plain"):
        pytest.skip("no gradients, or the same with gradients")
    if way == "gradients":
        for x in call.values():
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
    problem, t = check(op, **call)
    if way == "out" and op not in (fd.commit, fd.gated_rms_norm):
        t = replace(t, out=torch.empty_like(t.x if op is fd.short_convolution else t.v))
    operator = operator_of(problem, t)
    torch.library.opcheck(operator.call, operator.arguments(problem, t, "reference"))


def test_opcheck_of_those_without_gradients():
    # aot_dispatch asks for gradients, which a backward pass has none of
    tests = ("test_schema", "test_faketensor")
    stages = [(name, wy, partial(make_wy, WY_CASES[name])) for name in ("plain", "packed", "none")]
    for _, op, make in (*stages, *FUSED_CALLS):
        problem, t = check(op, **make())
        operator = operator_of(problem, t)
        torch.library.opcheck(operator.call, operator.arguments(problem, t, "reference"), test_utils=tests)
    tensors = [prefill_call(PLAIN)[name] for name in TOKEN_TENSORS]
    assert set(torch.library.opcheck(torch.ops.kda_prefill.forward, (*tensors, 32)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", named("h", "packed", "chunk32", "state_bf16", "wide_gate", "T0"), ids=case_id)
def test_fake_tensors_have_the_real_shapes_and_dtypes(case: Case, v_first: bool):
    call = make_call(replace(case, v_first=v_first, h=True), BF16)
    real = fd.chunk_kda(**call)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        results = fd.chunk_kda(**fake)
        out = torch.empty_like(fake["v"])
        assert fd.chunk_kda(**fake, out=out)[0] is out
    for got, want in zip(results, real):
        assert type(got) is not Tensor
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@pytest.mark.parametrize("op", BOTH)
def test_backward_under_a_dispatch_mode(op):
    """As under selective checkpointing or a FLOP counter."""
    call = short_call(BY_NAME["state"], op)
    v = call["v"].requires_grad_()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    (want,) = torch.autograd.grad(op(**call)[0].sum(), v)
    with Mode():
        (got,) = torch.autograd.grad(op(**call)[0].sum(), v)
    assert same_bits(got, want)


# ---- explain ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize(("op", "make"), calls(*whole_sequences("bounded"), *steps("spec")))
def test_explain_covers_every_backend_and_says_why_not(op, make, interpreted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    explanation = fd.explain(op, **make())
    verdicts = {v.backend: v for v in explanation.verdicts}
    assert [*verdicts] == [b.name for b in backends.BACKENDS]
    assert explanation.chosen == "reference" and verdicts["reference"].preferred and not verdicts["hopper"].supported
    assert verdicts["triton"].supported == interpreted and not verdicts["triton"].preferred
    said = (
        "supported, not preferred: the Triton interpreter" if interpreted else "not supported: tensors are on the CPU"
    )
    assert said in str(explanation) and "runs on: reference" in str(explanation)
    assert not interpreted or fd.explain(op, **make() | {"backend": "triton"}).chosen == "triton"


class Named(Tensor):
    """A tensor that is no plain one."""


UNREPLAYED = {
    "v stands for a negative": (lambda x: torch.view_as_complex(torch.stack([x, x], dim=-1)).conj().imag, "negative"),
    "v is known to be zeros": (lambda x: torch._efficientzerotensor(x.shape), "zeros"),
    "v is a subclass": (lambda x: x.as_subclass(Named), "v is a Named"),
    "values are checked": (lambda x: x, "FLASHDELTA_CHECK=1"),
    "replayed": (lambda x: x.mT.contiguous().mT, None),
}


@pytest.mark.parametrize("name", UNREPLAYED)
def test_explain_says_what_is_not_replayed(name: str, monkeypatch: pytest.MonkeyPatch):
    change, reason = UNREPLAYED[name]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device_checks, "ENABLED", name == "values are checked")
    call = short_call(BY_NAME["bounded"], fd.chunk_kda)
    explanation = fd.explain(fd.chunk_kda, **call | {"v": change(call["v"]), "backend": "triton"})
    assert explanation.not_replayed is None if reason is None else reason in explanation.not_replayed
    assert ("  not replayed: " in str(explanation)) == (reason is not None)


def test_explain_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"^op must be one of flashdelta\..*; got .*"):
        fd.explain(torch.matmul, **short_call(BY_NAME["bounded"], fd.chunk_kda))


# ---- warmup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
def test_warmup_calls_every_combination(op):
    axes = dict.fromkeys(("packed", "initial_state"), (False, True))
    assert fd.warmup(op, [(32, 32), (64, 32)], dtype=FP32, device="cpu", **axes) == 2 * 2 * 2
    with torch.device("meta"):  # a default device, as where engines build layers
        assert fd.warmup(op, [(32, 64)], packed=(True,), state_v_first=True, state_dtype=BF16, device="cpu") == 2


def test_warmup_of_recurrent_kda():
    options = {"state_v_first": False, "state_dtype": BF16, "device": "cpu"}
    assert fd.warmup(fd.recurrent_kda, [(32, 64)], **options) == 2
    assert fd.warmup(fd.recurrent_kda, [(32, 64)], speculative=True, **options) == 2 * 7


BAD_WARMUPS = {
    **{name: (True, None, (1,), ()) for name in ("packed", "initial_state", "state_pool", "checkpoints")},
    "head_dims": (64, (64, 64), [], [(64,)], [(64, "a")]),
    **dict.fromkeys(("dtype", "g_dtype", "beta_dtype", "state_dtype", "cu_seqlens_dtype"), ("bf16",)),
    "device": ("cuda:99", "gpu", torch.device("meta"), None),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_WARMUPS.items() for value in values])
def test_warmup_names_what_it_cannot_vary(name: str, value: object):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b.*got "):
        fd.warmup(fd.chunk_kda, **{"head_dims": [(32, 32)], "device": "cpu", name: value})


def test_warmup_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = {"q": (fd.chunk_kda, [(48, 64)]), "op": (torch.matmul,), "device": (fd.chunk_kda,)}
    for argument, given in rows.items():
        with pytest.raises(ValueError, match=f"^{argument} must .*; got "):
            fd.warmup(*given, **({"device": "cpu"} if argument == "q" else {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what this asks about")
def test_explain_judges_another_device_than_the_tensors():
    call = {name: x for name, x in on_meta(make_call(BY_NAME["one_head"])).items() if name in TOKEN_TENSORS}
    verdicts = {v.backend: v for v in fd.explain(fd.chunk_kda, **call, device="cuda").verdicts}
    assert verdicts["triton"].reason == "no NVIDIA GPU on this machine"
    assert fd.explain(fd.chunk_kda, **call, device="cpu").chosen == "reference"


class Asked(Exception):
    pass


every_function = pytest.mark.parametrize("call", runtime.CALLS.values(), ids=lambda call: call.function.__name__)


@every_function
def test_every_argument_is_passed_under_its_own_name(call: runtime.Dispatcher, monkeypatch: pytest.MonkeyPatch):
    """A forgotten one would let a call run as an earlier one that differs in it."""
    find = mock.Mock(side_effect=Asked)
    monkeypatch.setattr(runtime.CACHE, "find", find)
    with pytest.raises(Asked):
        call.function(**{name: name for name in call.signature.parameters if name != "positional"})
    _, tensors, options = find.call_args.args
    assert tensors == tuple(name if name in call.signature.parameters else None for name in call.tensors)
    assert options == call.options


@every_function
def test_a_replay_with_gradients_finds_every_tensor_that_may_have_one(call: runtime.Dispatcher):
    """Only calls on a GPU are replayed."""
    if call.operation.no_gradients is not None:
        pytest.skip(call.operation.no_gradients)
    named = SimpleNamespace(operation=call.kind)
    replayed = Differentiable(named, None, runtime.CACHE, call.tensors, True)
    assert [call.tensors[i] for i in replayed.places] == [*replayed.inputs]
    own = inputs_of(call.kind)
    assert {*replayed.inputs} >= {*(INPUTS if own is inputs_of("chunk") else own)}
