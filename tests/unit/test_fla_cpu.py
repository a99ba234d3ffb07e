"""FLA's modules on a CPU: values and gradients against plain definitions in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashdelta.integrations import fla_cpu
from flashdelta.integrations.fla_cpu import on_cpu, replacements
from flashdelta.integrations.patches import Patches

pytest.importorskip("fla")

import fla.modules as modules
from fla.modules import mlp
from fla.modules.l2warp import l2_warp

ROUNDED_ONCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Relative error of a result that was computed wide and rounded once."""


def through_a_linear_map(dtype: torch.dtype) -> dict[torch.dtype, float]:
    """Of results whose parts were rounded to a dtype, too."""
    limits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-5}
    return dict.fromkeys(limits, limits[dtype])


by_dtype = pytest.mark.parametrize("dtype", ROUNDED_ONCE, ids=str)


@pytest.fixture
def patches() -> Iterator[Patches]:
    patches = Patches()
    for module, name, ours in replacements()[0]:
        patches.set(module, name, on_cpu(ours, getattr(module, name)))
    yield patches
    patches.restore()


on_a_cpu = pytest.mark.usefixtures("patches")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(run: Callable, oracle: Callable, inputs: dict[str, Tensor], limits: dict[torch.dtype, float]) -> None:
    """Results and gradients of `run` against those of `oracle`, which takes float64. Both return a tuple."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    got, wanted = run(**inputs), oracle(**exact)
    towards = [normal(*x.shape, seed=7).to(x.dtype) for x in got]
    gradients = torch.autograd.grad(got, [*inputs.values()], towards)
    exact_gradients = torch.autograd.grad(wanted, [*exact.values()], [x.double() for x in towards])
    for x, gradient in zip(inputs.values(), gradients):
        assert gradient.dtype == x.dtype
    for x, y in zip((*got, *gradients), (*wanted, *exact_gradients), strict=True):
        limit = limits[x.dtype]
        torch.testing.assert_close(x.double(), y, rtol=limit, atol=limit * y.abs().max().item() / 16)


def check_module(
    module: nn.Module, oracle: Callable, inputs: dict[str, Tensor], limits: dict[torch.dtype, float], **options: object
) -> None:
    """The same with a module's parameters among the inputs; they are made random."""
    for i, parameter in enumerate(module.parameters()):
        nn.init._no_grad_normal_(parameter, 0.2, 0.6, torch.Generator().manual_seed(i))
    parameters = {name.replace(".", "_"): name for name, _ in module.named_parameters()}

    def run(**given: Tensor) -> tuple[Tensor, ...]:
        own = {name: given.pop(flat) for flat, name in parameters.items()}
        result = torch.func.functional_call(module, own, (), {**given, **options})
        return result if isinstance(result, tuple) else (result,)

    own = {flat: module.get_parameter(name) for flat, name in parameters.items()}
    check(run, oracle, {**inputs, **own}, limits)


CONVOLUTIONS = {
    "plain": dict(),
    "bias": dict(bias=True),
    "no activation": dict(activation=None),
    "residual": dict(residual=True),
    "initial state": dict(state=True),
    "all at once": dict(bias=True, residual=True, state=True),
    "shorter than the kernel": dict(state=True, bounds=(0, 2)),
    "one tap": dict(taps=1, state=True),
    "five taps": dict(taps=5, state=True),
    "packed": dict(bounds=(0, 3, 4, 15)),
    "packed, states": dict(bounds=(0, 3, 4, 15), state=True, bias=True, residual=True),
    "packed, an empty one": dict(bounds=(0, 3, 3, 15), state=True),
}


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolution(case: dict, dtype: torch.dtype) -> None:
    bounds, taps, activation = case.get("bounds", (0, 9)), case.get("taps", 4), case.get("activation", "silu")
    packed = len(bounds) > 2
    rows, D = 1 if packed else 2, 6
    module = modules.ShortConvolution(D, taps, bias="bias" in case, activation=activation, dtype=dtype)
    inputs = {"x": normal(rows, bounds[-1], D).to(dtype)}
    if "residual" in case:
        inputs["residual"] = normal(rows, bounds[-1], D, seed=1).to(dtype)
    if "state" in case:
        inputs["cache"] = normal(len(bounds) - 1 if packed else rows, D, taps, seed=2).to(dtype)

    def oracle(x: Tensor, weight: Tensor, bias=None, residual=None, cache=None) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for n, (start, end) in enumerate(pairwise(bounds)):
            own = slice(n, n + 1) if packed else slice(None)
            past = x.new_zeros(rows, D, taps) if cache is None else cache[own]
            piece = torch.cat([past, x[:, start:end].mT], -1)
            y = F.conv1d(piece, weight, bias, groups=D)[..., 1:]
            outputs.append(y if activation is None else y * torch.sigmoid(y))
            states.append(piece[..., piece.shape[-1] - taps :])
        y = torch.cat(outputs, -1).mT
        return y if residual is None else y + residual, torch.cat(states)

    cu_seqlens = torch.tensor(bounds) if packed else None
    check_module(module, oracle, inputs, ROUNDED_ONCE, output_final_state=True, cu_seqlens=cu_seqlens)


@on_a_cpu
@torch.no_grad()
@by_dtype
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_steps_of_a_convolution(packed: bool, dtype: torch.dtype) -> None:
    module = modules.ShortConvolution(6, 4, bias=True, dtype=dtype)
    x, residual = normal(3, 9, 6).to(dtype), normal(3, 9, 6, seed=1).to(dtype)
    whole, end = module(x, residual, output_final_state=True)
    y, cache = module(x[:, :2], residual[:, :2], output_final_state=True)
    assert cache.is_contiguous()
    options = dict(cu_seqlens=torch.arange(4)) if packed else {}
    for t in range(2, 9):
        token, plus = (x[:, t : t + 1], residual[:, t : t + 1])
        if packed:
            token, plus = token.mT.reshape(1, 3, 6), plus.reshape(1, 3, 6)
        y, after = module(token, plus, cache=cache, output_final_state=True, **options)
        assert after is cache and y.shape == token.shape
        torch.testing.assert_close(y.reshape(3, 6), whole[:, t])
    assert torch.equal(cache, end)


@on_a_cpu
@torch.no_grad()
def test_a_convolutions_cache_keeps_its_dtype_in_a_step_and_gets_the_inputs_in_a_prefill() -> None:
    module = modules.ShortConvolution(6, 4, dtype=torch.bfloat16)
    cache, x = normal(2, 6, 4), normal(2, 3, 6).bfloat16()
    assert module(x[:, :1], cache=cache.clone(), output_final_state=True)[1].dtype == torch.float32
    assert module(x, cache=cache, output_final_state=True)[1].dtype == torch.bfloat16
    assert module(x[:, :1])[1] is None and module(x)[1] is None


NORMS = {
    "rms": (modules.RMSNorm, dict()),
    "rms, bias": (modules.RMSNorm, dict(bias=True)),
    "rms, no weight": (modules.RMSNorm, dict(elementwise_affine=False)),
    "layer": (modules.LayerNorm, dict(bias=True)),
    "group": (modules.GroupNorm, dict(num_groups=4, bias=True)),
    "group rms": (modules.GroupNorm, dict(num_groups=4, is_rms_norm=True)),
}


def exact_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, cls: type, options: dict) -> Tensor:
    groups = options.get("num_groups", 1)
    x = x.unflatten(-1, (groups, -1))
    if cls is modules.RMSNorm or options.get("is_rms_norm"):
        y = F.rms_norm(x, x.shape[-1:], eps=1e-5)
    else:
        y = F.layer_norm(x, x.shape[-1:], eps=1e-5)
    y = y.flatten(-2) * (1 if weight is None else weight)
    return y + (0 if bias is None else bias)


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls, options", NORMS.values(), ids=NORMS.keys())
def test_norm(cls: type, options: dict, residual: torch.dtype | None, dtype: torch.dtype) -> None:
    module = cls(hidden_size=32, dtype=dtype, **options)
    inputs = {"x": normal(2, 5, 32).to(dtype)}
    if residual is not None:
        inputs["residual"] = normal(2, 5, 32, seed=1).to(residual)

    def oracle(x: Tensor, weight=None, bias=None, residual=None) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        return exact_norm(x, weight, bias, cls, options), x

    check_module(module, oracle, inputs, ROUNDED_ONCE, prenorm=True)
    y, carried = module(**inputs, prenorm=True)
    assert (y.dtype, carried.dtype) == (dtype, residual or dtype)
    assert torch.equal(module(**inputs), y)


@on_a_cpu
def test_residual_in_fp32() -> None:
    x = normal(2, 32).bfloat16()
    y, carried = modules.RMSNorm(32, dtype=torch.bfloat16)(x, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16 and carried.dtype == torch.float32 and torch.equal(carried, x.float())


@on_a_cpu
def test_a_norm_is_of_the_sum_before_its_rounding() -> None:
    x, residual = torch.tensor([[1.0, 2.0**-9]]).bfloat16(), torch.tensor([[2.0**-9, 1.0]]).bfloat16()
    _, carried = modules.LayerNorm(2, eps=1e-12)(x, residual, prenorm=True)
    y = modules.LayerNorm(2, eps=1e-12)(x + torch.tensor([[2.0**-9, 0.0]]).bfloat16(), residual)
    assert torch.equal(carried, torch.ones_like(x)) and torch.equal(y, torch.zeros_like(x))


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("cls", [modules.FusedRMSNormGated, modules.FusedLayerNormGated])
def test_gated_norm(cls: type, activation: str, dtype: torch.dtype) -> None:
    module = cls(32, activation=activation, dtype=dtype)
    inputs = {name: normal(2, 5, 3, 32, seed=i).to(dtype) for i, name in enumerate(("x", "g", "residual"))}

    def oracle(x: Tensor, g: Tensor, residual: Tensor, weight: Tensor, bias=None) -> tuple[Tensor, Tensor]:
        kind = modules.RMSNorm if cls is modules.FusedRMSNormGated else modules.LayerNorm
        gate = torch.sigmoid(g) * (1 if activation == "sigmoid" else g)
        return exact_norm(x + residual, weight, bias, kind, {}) * gate, x + residual

    check_module(module, oracle, inputs, ROUNDED_ONCE, prenorm=True)


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("kind", ["swish", "powlu"])
def test_gated_mlp(kind: str, fused: bool, dtype: torch.dtype) -> None:
    if kind == "powlu" and not hasattr(mlp, "powglu"):
        pytest.skip("this FLA has no PowLU")
    module = modules.GatedMLP(
        8, intermediate_size=12, fuse_swiglu=fused, **({} if kind == "swish" else {"hidden_act": kind})
    )

    def oracle(x: Tensor, gate_proj_weight: Tensor, up_proj_weight: Tensor, down_proj_weight: Tensor) -> tuple[Tensor]:
        gate, up = x @ gate_proj_weight.T, x @ up_proj_weight.T
        linear = gate
        if kind == "powlu":
            linear = torch.where(gate > 0, gate.clamp(min=1e-30).pow(3 / (gate.clamp(min=1e-30).sqrt() + 1)), gate)
        return ((linear * torch.sigmoid(gate) * up) @ down_proj_weight.T,)

    check_module(module.to(dtype), oracle, {"x": normal(2, 5, 8).to(dtype)}, through_a_linear_map(dtype))


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("name", ["swiglu", "powglu"])
def test_gated_product(name: str, dtype: torch.dtype) -> None:
    if not hasattr(mlp, name):
        pytest.skip("this FLA has no PowLU")
    x = torch.cat([normal(60), torch.tensor([0.0, 1e-6, 30.0, -30.0])]).to(dtype)

    def oracle(x: Tensor, y: Tensor) -> tuple[Tensor]:
        power = [x_i ** (3 / (x_i**0.5 + 1)) if name == "powglu" and x_i > 0 else x_i for x_i in x.unbind()]
        return (torch.stack(power) * torch.sigmoid(x) * y,)

    check(
        lambda **given: (getattr(mlp, name)(*given.values()),),
        oracle,
        {"x": x, "y": normal(64).to(dtype)},
        ROUNDED_ONCE,
    )


def exact_loss(logits: Tensor, target: Tensor, smoothing=0.0, scale=1.0, square=0.0, cap=None) -> tuple[Tensor, Tensor]:
    """By token; zero where the target is -100."""
    logits = logits * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p, lse = torch.log_softmax(logits, -1), torch.logsumexp(logits, -1)
    loss = -(1 - smoothing) * log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0] - smoothing * log_p.mean(-1)
    return (loss + square * lse**2) * (target != -100), square * lse.detach() ** 2 * (target != -100)


TARGET = torch.tensor([3, -100, 0, 10, 5, -100, 2])

LOSSES = {
    "plain": (dict(), dict()),
    "in place": (dict(inplace_backward=True), dict()),
    "smoothed": (dict(label_smoothing=0.1), dict(smoothing=0.1)),
    "scaled": (dict(logit_scale=0.5), dict(scale=0.5)),
    "z loss": (dict(lse_square_scale=0.01), dict(square=0.01)),
    "capped": (dict(logit_softcapping=2.0, logit_scale=1.5), dict(cap=2.0, scale=1.5)),
}


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options, exact", LOSSES.values(), ids=LOSSES.keys())
def test_cross_entropy(options: dict, exact: dict, reduction: str, dtype: torch.dtype) -> None:
    module = modules.FusedCrossEntropyLoss(reduction=reduction, **options)
    logits = normal(7, 11).to(dtype)

    def oracle(input: Tensor) -> tuple[Tensor]:
        loss = exact_loss(input, TARGET, **exact)[0]
        return (loss if reduction == "none" else loss.sum() / (5 if reduction == "mean" else 1),)

    before = logits.clone()
    check(lambda input: (module(input, TARGET),), oracle, {"input": logits}, ROUNDED_ONCE)
    assert torch.equal(logits, before)
    assert module(logits, TARGET).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@on_a_cpu
def test_z_loss_is_a_part_of_the_loss_without_a_gradient() -> None:
    logits = normal(7, 11).requires_grad_()
    loss, z_loss = modules.FusedCrossEntropyLoss(lse_square_scale=0.01, return_z_loss=True)(logits, TARGET)
    torch.testing.assert_close(z_loss, exact_loss(logits, TARGET, square=0.01)[1].sum() / 5)
    assert not z_loss.requires_grad and loss.requires_grad


LINEAR_LOSSES = {
    "plain": (dict(), dict()),
    "sum": (dict(reduction="sum"), dict()),
    "smoothed": (dict(label_smoothing=0.1), dict(smoothing=0.1)),
    "capped": (dict(logit_softcapping=2.0, logit_scale=1.5), dict(cap=2.0, scale=1.5)),
    "L2Warp": (dict(use_l2warp=True, l2_penalty_factor=3.0), dict()),
}


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("options, exact", LINEAR_LOSSES.values(), ids=LINEAR_LOSSES.keys())
def test_linear_cross_entropy(options: dict, exact: dict, dtype: torch.dtype) -> None:
    module = modules.FusedLinearCrossEntropyLoss(**options)

    def oracle(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        logits = x @ weight.T + bias
        loss = exact_loss(logits[0], TARGET, **exact)[0].sum() / (1 if "reduction" in options else 5)
        return (l2_warp(loss, logits, 3.0) if "use_l2warp" in options else loss,)

    inputs = {"x": normal(1, 7, 8), "weight": normal(11, 8, seed=1), "bias": normal(11, seed=2)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    check(lambda x, **own: (module(x, TARGET[None], **own),), oracle, inputs, through_a_linear_map(dtype))
    loss = module(inputs["x"], TARGET[None], inputs["weight"])
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@on_a_cpu
def test_without_targets_the_linear_loss_is_zero() -> None:
    x, weight = normal(2, 8).requires_grad_(), normal(11, 8)
    loss = modules.FusedLinearCrossEntropyLoss()(x, torch.full((2,), -100), weight)
    loss.backward()
    assert loss == 0 and torch.equal(x.grad, torch.zeros_like(x))


@on_a_cpu
@by_dtype
@pytest.mark.parametrize("normalised", [True, False])
def test_attention_residuals(normalised: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    model = pytest.importorskip("fla.models.kda.modeling_kda")
    if not hasattr(model, "fused_attnres"):
        pytest.skip("this FLA has no attention residuals")
    from fla.ops.attnres import naive_attnres

    def call(function: Callable) -> Callable:
        def run(query: Tensor, a: Tensor, b: Tensor, rms_weight: Tensor, **output: Tensor) -> tuple[Tensor, ...]:
            o, p = function(query, (a, b), rms_weight, **output, rms_eps=1e-5, scale=0.7, return_weights=True)
            weights.append(p)
            return (o,)

        return run

    weights: list[Tensor] = []
    inputs = {
        "query": normal(1, 8),
        "a": normal(2, 3, 8, seed=1),
        "b": normal(2, 3, 8, seed=2),
        "rms_weight": normal(8),
    }
    inputs |= {"output_rms_weight": normal(8, seed=4)} if normalised else {}
    # FLA's definition computes in float32, whatever its inputs are
    limits = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2**-8 * 1.01}
    check(call(model.fused_attnres), call(naive_attnres), {name: x.to(dtype) for name, x in inputs.items()}, limits)
    torch.testing.assert_close(*weights, check_dtype=False)


class Block(nn.Module):
    """A piece of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = modules.RMSNorm(8), modules.ShortConvolution(8, 4)
        self.out, self.mlp = modules.FusedRMSNormGated(8), modules.GatedMLP(8, intermediate_size=16)
        self.loss, self.head = modules.FusedLinearCrossEntropyLoss(), nn.Linear(8, 11, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        y, residual = self.norm(x, x, prenorm=True)
        y, _ = self.conv(y)
        return residual + self.mlp(self.out(y, x))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.inner(x), target, self.head.weight)


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*module.parameters()]))


@on_a_cpu
def test_checkpointing_and_compilation_change_nothing() -> None:
    block, x, target = Block(), normal(2, 7, 8), TARGET.repeat(2, 1)
    wanted = gradients(block, block(x, target))
    kept = block.loss(checkpoint(block.inner, x, use_reentrant=False), target, block.head.weight)
    compiled = torch.compile(block, backend="aot_eager")(x, target)
    for found in (gradients(block, kept), gradients(block, compiled)):
        torch.testing.assert_close(found, wanted)


@on_a_cpu
def test_a_compiled_block_is_one_graph() -> None:
    block, x = Block(), normal(2, 7, 8)
    compiled = torch.compile(block.inner, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block.inner(x))


@on_a_cpu
def test_autocast() -> None:
    block, x, target = Block(), normal(2, 7, 8), TARGET.repeat(2, 1)
    wanted = gradients(block, block(x, target))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block.norm(x).dtype == torch.float32 and block.mlp(x).dtype == torch.bfloat16
        loss = block(x, target)
    for found, exact in zip(gradients(block, loss), wanted):
        assert found.dtype == torch.float32
        assert (found - exact).norm() < 0.03 * exact.norm()


@on_a_cpu
def test_what_is_split_among_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="process_group"):
        modules.FusedCrossEntropyLoss(process_group="some")(normal(7, 11), TARGET)
    with pytest.raises(ValueError, match="cp_context"):
        modules.ShortConvolution(6, 4)(normal(1, 9, 6), cp_context="some")


def test_other_devices_are_theirs() -> None:
    def theirs(*args: object, **kwargs: object) -> tuple:
        """What FLA says."""
        return args, kwargs

    chosen = on_cpu(lambda *args, **kwargs: "ours", theirs)
    x, y = torch.empty(2, device="meta"), torch.empty(2)
    assert chosen(1, x, y=y) == ((1, x), {"y": y})
    assert chosen(1, y, y=x) == chosen(1, y=y) == "ours"
    assert chosen(2, a=3) == ((2,), {"a": 3})
    assert chosen.__doc__ == theirs.__doc__


def test_all_of_fla_is_known_and_is_put_back() -> None:
    found, left = replacements()
    assert left == []
    before = [getattr(module, name) for module, name, _ in found]
    patches = Patches()
    for module, name, ours in found:
        patches.set(module, name, on_cpu(ours, getattr(module, name)))
    # what is replaced is known as what it was
    assert replacements() == (found, [])
    patches.restore()
    assert all(getattr(module, name) is theirs for (module, name, _), theirs in zip(found, before))
    assert patches.replaced == []


def test_what_is_no_longer_ours_is_not_put_back() -> None:
    class Theirs:
        first, second = 1, 2

    patches = Patches()
    patches.set(Theirs, "first", 3)
    patches.set(Theirs, "second", 4)
    patches.set(Theirs, "second", 5)
    Theirs.first = 6
    patches.restore()
    assert (Theirs.first, Theirs.second) == (6, 2)
    with pytest.raises(KeyError):
        patches.set(Theirs, "third", 1)


def test_unknown_parameters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    owner = next(module for module, name, _ in replacements()[0] if name == "rms_norm")
    monkeypatch.setattr(owner, "rms_norm", rms_norm)
    monkeypatch.delattr(mlp, "swiglu")
    found, left = replacements()
    assert not {"rms_norm", "swiglu"} & {name for _, name, _ in found}
    assert len(left) == 2
    assert "rms_norm: parameters x, scale, known are x, weight, bias" in left[0] and "swiglu: in none of" in left[1]


def test_other_defaults_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms_norm() -> None: ...

    owner = next(module for module, name, _ in replacements()[0] if name == "rms_norm")
    known = inspect.signature(owner.rms_norm)
    assert known.parameters["eps"].default == 1e-5
    changed = [x.replace(default=1e-3) if x.name == "eps" else x for x in known.parameters.values()]
    rms_norm.__signature__ = known.replace(parameters=changed)
    monkeypatch.setattr(owner, "rms_norm", rms_norm)
    (left,) = replacements()[1]
    assert "eps=0.001" in left and "known are" in left and "eps=1e-05" in left


def test_every_replacement_is_of_this_file() -> None:
    for _, _, ours in replacements()[0]:
        assert getattr(ours, "func", ours).__module__ == fla_cpu.__name__
