"""The `torch.library` operators (tracing, fake tensors, autograd), `explain` and `warmup`."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashdelta as fd
from flashdelta import backends
from flashdelta.runtime import call as road
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import FORWARD, FORWARD_OUT, Operator
from flashdelta.testing.cases import BF16, BY_NAME, FP32, Case, case_id, named
from flashdelta.testing.inputs import TOKEN_TENSORS, make_call
from flashdelta.testing.oracle import as_recurrent, assert_close, same_bits

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]
TRACED = named(
    "bounded", "softplus", "state_v_first", "packed_int32", "packed_bf16_state", "gva2", "no_final_state", "fused"
)


def short_call(case: Case, op, dtype: torch.dtype = FP32, **changes) -> dict:
    """The call on few tokens: the token recurrence is traced step by step where it runs as plain PyTorch."""
    lengths = case.lengths and (3, 0, 4)
    call = make_call(replace(case, T=7, lengths=lengths, h=False, **changes), dtype)
    return call if op is fd.chunk_kda else as_recurrent(call)


# ---- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", TRACED, ids=case_id)
def test_compiles_in_one_graph(case: Case, op):
    call = short_call(case, op)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: op(**arguments), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**call), op(**call)):
        assert same_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "packed_int32"), ids=case_id)
def test_compiles_with_out(case: Case, op):
    call = short_call(case, op)
    want, want_state = op(**call)
    torch._dynamo.reset()
    compiled = torch.compile(lambda out, arguments: op(**arguments, out=out), fullgraph=True, backend="aot_eager")
    out = torch.full_like(call["v"], torch.nan)
    _, state = compiled(out, call)
    assert same_bits(out, want)
    assert same_bits(state, want_state)


@pytest.mark.slow
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "softplus", "state", "packed_bf16_state"), ids=case_id)
def test_compiles_with_gradients(case: Case, op):
    call = short_call(case, op)
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def loss(arguments: dict) -> Tensor:
        o, state = op(**arguments)
        return o.square().sum() + state.float().square().sum()

    def gradients(function) -> list[Tensor]:
        leaves = {name: call[name].detach().clone().requires_grad_() for name in names}
        return torch.autograd.grad(function(call | leaves), list(leaves.values()))

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for name, got, want in zip(names, gradients(compiled), gradients(loss)):
        assert_close(f"grad of {name}", got, want, 1e-6)


def test_compiled_graph_holds_one_operator():
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    call = short_call(BY_NAME["bounded"], fd.chunk_kda)
    torch.compile(lambda **arguments: fd.chunk_kda(**arguments), fullgraph=True, backend=keep)(**call)
    called = [node.target for node in graphs[0].graph.nodes if "flashdelta" in str(node.target)]
    assert called == [torch.ops.flashdelta.kda_forward]


def test_device_capability_is_no_node_of_the_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "_cached_capability", lambda index: (9, 0))
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + backends.nvidia_capability(0)[0], fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch.compile warns of caches it looks through
        assert function(torch.zeros(1)).item() == 9


def test_compiled_call_refuses_bad_input():
    call = short_call(BY_NAME["bounded"], fd.chunk_kda) | {"lower_bound": -9.0}
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: fd.chunk_kda(**arguments), backend="aot_eager")
    with pytest.raises(ValueError, match=r"lower_bound: got -9\.0"):
        compiled(**call)


# ---- the operators themselves -------------------------------------------------------------------------------------


def operator_arguments(case: Case, op, operator: Operator = FORWARD, *, grad: bool = False, **others: Tensor) -> tuple:
    """What a traced call passes to the operator."""
    call = short_call(case, op) | others
    if grad:
        for x in call.values():
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
    return operator.arguments(*check(op, **call), "reference")


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "autograd"])
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "state", "packed_int32", "no_final_state"), ids=case_id)
def test_opcheck_forward(case: Case, op, grad: bool):
    torch.library.opcheck(torch.ops.flashdelta.kda_forward, operator_arguments(case, op, grad=grad))


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "state", "packed_int32"), ids=case_id)
def test_opcheck_forward_out(case: Case, op):
    out = torch.empty_like(short_call(case, op)["v"])
    torch.library.opcheck(torch.ops.flashdelta.kda_forward_out, operator_arguments(case, op, FORWARD_OUT, out=out))


@pytest.mark.slow
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("bounded", "state", "packed_int32", "no_final_state"), ids=case_id)
def test_opcheck_backward(case: Case, op):
    arguments = operator_arguments(case, op)
    o, final_state, _ = torch.ops.flashdelta.kda_forward(*arguments)
    grads = torch.randn_like(o), torch.randn_like(final_state)
    torch.library.opcheck(torch.ops.flashdelta.kda_backward, (*grads, *arguments))


@pytest.mark.parametrize("case", named("T0", "packed_all_empty"), ids=case_id)
def test_opcheck_without_tokens(case: Case):
    """An operator must not return its input, which is the final state here."""
    call = check(fd.chunk_kda, **make_call(replace(case, h=False)))
    torch.library.opcheck(torch.ops.flashdelta.kda_forward, FORWARD.arguments(*call, "reference"))


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


@pytest.mark.parametrize("op", BOTH)
def test_eager_and_operator_give_the_same_bits(op):
    """A call without gradients skips the dispatcher; one with them goes through the operator."""
    call = short_call(BY_NAME["state"], op)
    through = op(**call | {"v": call["v"].clone().requires_grad_()})
    for a, b in zip(op(**call), through):
        assert same_bits(a, b)


# ---- explain ------------------------------------------------------------------------------------------------------


def verdict(explanation: fd.Explanation, backend: str) -> backends.Verdict:
    return next(v for v in explanation.verdicts if v.backend == backend)


@pytest.mark.parametrize("op", BOTH)
def test_explain_covers_every_backend_and_says_why_not(op, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    explanation = fd.explain(op, **short_call(BY_NAME["bounded"], op))
    assert [v.backend for v in explanation.verdicts] == [b.name for b in backends.BACKENDS]
    assert explanation.chosen == "reference"
    assert verdict(explanation, "reference").preferred
    triton = verdict(explanation, "triton")
    assert not triton.supported and not triton.preferred
    assert "CPU" in triton.reason
    assert "runs on: reference" in str(explanation)
    assert "not supported: tensors are on the CPU" in str(explanation)


def test_explain_tells_supported_from_preferred(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = short_call(BY_NAME["bounded"], fd.chunk_kda)
    explanation = fd.explain(fd.chunk_kda, **call)
    triton = verdict(explanation, "triton")
    assert triton.supported and not triton.preferred
    assert explanation.chosen == "reference"
    assert "supported, not preferred: the Triton interpreter" in str(explanation)
    assert fd.explain(fd.chunk_kda, **call, backend="triton").chosen == "triton"


@pytest.mark.parametrize("op", BOTH)
def test_explain_runs_nothing_and_takes_meta_tensors(op):
    call = short_call(BY_NAME["packed_int32"], op, dtype=BF16)
    meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call.items()}
    explanation = fd.explain(op, **meta, out=torch.empty_like(meta["v"]))
    assert explanation.chosen == "reference"
    assert "meta" in verdict(explanation, "triton").reason


def test_explain_says_that_gradients_are_the_obstacle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = short_call(BY_NAME["bounded"], fd.fused_recurrent_kda)
    call["q"].requires_grad_()
    assert "in chunks only" in verdict(fd.explain(fd.fused_recurrent_kda, **call), "triton").reason


def test_explain_refuses_what_it_does_not_know():
    call = short_call(BY_NAME["bounded"], fd.chunk_kda)
    with pytest.raises(TypeError, match="'chunk'"):
        fd.explain(fd.chunk_kda, **call, chunk=64)
    with pytest.raises(ValueError, match=r"^op: got .*, wanted one of flashdelta\."):
        fd.explain(torch.matmul, **call)
    with pytest.raises(ValueError, match=r"^backend: got 'fast', wanted"):
        fd.explain(fd.chunk_kda, **call, backend="fast")


# ---- warmup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
def test_warmup_calls_every_combination(op):
    calls = fd.warmup(
        op, [(32, 32), (64, 32)], dtype=FP32, packed=(False, True), initial_state=(False, True), device="cpu"
    )
    # one token a sequence, few and many, are kinds of their own
    assert calls == 2 * 2 * (2 if op is fd.chunk_kda else 1 + 3)
    assert fd.warmup(op, [(32, 64)], packed=(True,), state_v_first=True, state_dtype=BF16, device="cpu") == 2


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "softplus", "lower_bound": None},
        {"gate": "none", "lower_bound": None, "dt_bias": False},
        {"gate": "logsigmoid", "lower_bound": None, "dt_bias": False},
        {"g_dtype": FP32, "beta_dtype": FP32, "cu_seqlens_dtype": torch.int64},
        {"allow_neg_eigval": True},
        {"use_beta_sigmoid_in_kernel": False, "use_qk_l2norm_in_kernel": False, "output_final_state": (False, True)},
    ],
    ids=lambda options: "-".join(options),
)
def test_warmup_takes_the_options_of_a_call(options: dict):
    assert fd.warmup(fd.chunk_kda, [(32, 32)], device="cpu", initial_state=(False,), **options) >= 2


@pytest.mark.parametrize("v_first", [True, False])
def test_warmup_of_recurrent_kda(v_first: bool):
    options = {"state_v_first": v_first, "state_dtype": BF16, "device": "cpu"}
    assert fd.warmup(fd.recurrent_kda, [(32, 64)], **options) == 1 + 3
    assert fd.warmup(fd.recurrent_kda, [(32, 64)], speculative=True, **options) == (1 + 3) + (4 + 4)


def test_warmup_refuses_what_the_operator_refuses():
    with pytest.raises(ValueError, match=r"^q: got K = 48, wanted"):
        fd.warmup(fd.chunk_kda, [(48, 64)], device="cpu")
    with pytest.raises(ValueError, match=r"^op: got"):
        fd.warmup(torch.matmul, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what this asks about")
def test_explain_judges_another_device_than_the_tensors():
    call = {
        name: x.to("meta") for name, x in make_call(BY_NAME["one_head"]).items() if name in ("q", "k", "v", "g", "beta")
    }
    verdicts = {v.backend: v for v in fd.explain(fd.chunk_kda, **call, device="cuda").verdicts}
    assert verdicts["triton"].reason == "no NVIDIA GPU on this machine"
    assert fd.explain(fd.chunk_kda, **call, device="cpu").chosen == "reference"


def test_vmap():
    """Inside it tensors have no address by which a repeated call could be told."""
    call = short_call(BY_NAME["one_head"], fd.chunk_kda)
    scaled = torch.stack([call["v"], 2 * call["v"]])
    for found, v in zip(torch.vmap(lambda v: fd.chunk_kda(**call | {"v": v})[0])(scaled), scaled):
        assert_close("o", found, fd.chunk_kda(**call | {"v": v})[0], 1e-6)


class Asked(Exception):
    pass


@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda, fd.recurrent_kda, fd.kda_prefill])
def test_a_kept_call_is_known_by_all_its_arguments(op, monkeypatch):
    """A forgotten one would let a call run as an earlier one that differs in it."""
    seen = []

    def key(kind, tensors, options):
        seen.extend((*tensors, *options))
        raise Asked

    monkeypatch.setattr(road.CACHE, "find", key)
    names = inspect.signature(op).parameters
    arguments = {name: torch.empty(0) if name in TOKEN_TENSORS else object() for name in names}
    with pytest.raises(Asked):
        op(**arguments)
    assert [name for name, x in arguments.items() if not any(x is other for other in seen)] == []
