"""Layers of models with KDA in them, FLA's and Hugging Face's, whose calls run on flashdelta or are left to FLA.

The same module is timed with the integration on ("ours") and off ("fla"). What it gives KDA is taken from one of its calls, so
that this part can be timed, checked and profiled by itself, backward included.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import flashdelta as fd

from ...integrations import _fla
from ...testing.cases import BF16, FP32
from ...testing.oracle import tolerance_of, truth
from . import checks, profiling
from .contenders import PEER_TOLERANCE, RECURRENCE_TOKENS, Contender, Results, Setup, Work, explained, sizes
from .report import kernel_name
from .timing import summarize
from .training import LEAVES, random_like, true_gradients
from .workloads import Block, Row

# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """`cache` makes an empty one; `state` is KDA's in it."""

    module: nn.Module
    cache: Callable[[], Any]
    state: Callable[[Any], Tensor]

    def __call__(self, x: Tensor, cache: Any = None) -> Tensor:
        out = self.module(x, past_key_values=cache, use_cache=cache is not None)
        return out if isinstance(out, Tensor) else out[0]


ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""A model of it initialises the layer; its embedding is not used."""


def fla_layer(case: Block) -> Layer:
    kda = importlib.import_module("fla.models.kda")
    config = kda.KDAConfig(hidden_size=case.hidden, num_heads=case.H, head_dim=case.K, **ONE_LAYER)
    cache = importlib.import_module("fla.models.utils").Cache
    return Layer(kda.KDAModel(config).layers[0], cache, lambda cache: cache[0]["recurrent_state"])


def hf_layer(case: Block) -> Layer:
    library = importlib.import_module("transformers")
    widths = {"hidden_size": case.hidden, "intermediate_size": 4 * case.hidden}
    heads = {"linear_num_heads": case.H, "linear_head_dim": case.K}
    kinds = {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
    config = library.KimiLinearConfig(**widths, **heads, **kinds, **ONE_LAYER)
    cache = functools.partial(library.DynamicCache, config=config)
    return Layer(library.KimiLinearModel(config).layers[0], cache, lambda cache: cache.layers[0].recurrent_states[0])


LAYERS = {"FLA": (fla_layer, "fla"), "HF": (hf_layer, "transformers")}
"""What makes a layer, and whose version is that of the framework."""

FLOAT32 = {"FLA": ("A_log", "dt_bias"), "HF": ()}
"""Ends of the names of parameters that stay float32. Hugging Face loads a bfloat16 model without exceptions."""


def layer_of(case: Block, device: torch.device) -> Layer:
    """With the same weights every time, as the framework initialises them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = LAYERS[case.framework][0](case)
    layer.module.train(case.step == "train").to(device)
    for name, x in layer.module.named_parameters():
        if not name.endswith(FLOAT32[case.framework]):
            x.data = x.data.to(BF16)
    return layer


# ---- on and off ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def session() -> Iterator[None]:
    """With gradients, and with the integration as it was before once all is over."""
    was_on, before = _fla.is_enabled(), os.environ.pop(_fla.ENVIRONMENT, None)
    try:
        with torch.enable_grad():
            yield
    finally:
        os.environ.pop(_fla.ENVIRONMENT, None)
        if before is not None:
            os.environ[_fla.ENVIRONMENT] = before
        if not was_on:
            _fla.disable()


def switched(on: bool, run: Callable[..., Any], *arguments: object) -> Any:
    """Runs with FLA's calls on flashdelta, or left to FLA. The integration asks its variable at every call; to set it takes a
    microsecond, the same for both."""
    os.environ[_fla.ENVIRONMENT] = "1" if on else "0"
    return run(*arguments)


def captured(run: Callable[[], object], tokens: int) -> tuple[str, dict[str, Any]]:
    """The last call of ours that `run` makes with the integration on: the operator's name, and its arguments, leaves where the
    layer wants gradients.

    Raises:
        RuntimeError: no such call, or not of so many tokens, so FLA kept it.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    operators = {name: getattr(_fla, name) for name in ("chunk_kda", "fused_recurrent_kda")}

    def note(name: str, **call: Any) -> Any:
        grad = torch.is_grad_enabled()
        leaves = {
            key: x.detach().requires_grad_(grad and x.requires_grad) for key, x in call.items() if isinstance(x, Tensor)
        }
        kept = call | leaves
        if "initial_state" in kept:  # caches write the next state over it
            kept["initial_state"] = kept["initial_state"].clone()
        found.append((name, kept))
        return operators[name](**call)

    try:
        for name in operators:
            setattr(_fla, name, functools.partial(note, name))
        switched(True, run)
    finally:
        for name, operator in operators.items():
            setattr(_fla, name, operator)
    if not found or found[-1][1]["q"].shape[1] != tokens:
        status = _fla.status()
        raise RuntimeError(
            f"FLA kept its KDA call of {tokens} tokens; the integration is {status.state}: {status.reason}"
        )
    return found[-1]


LONGEST = 8


def kernels(runs: Sequence[profiling.KernelRun], calls: int) -> list[dict]:
    """The longest kernels of a call by short name, and the others as one: PyTorch's names alone would fill a file."""
    found = profiling.times([replace(run, name=kernel_name(run.name)) for run in runs], calls)
    others = {"kernel": "others"} | {key: sum(x[key] for x in found[LONGEST:]) for key in ("ms", "launches")}
    return found[:LONGEST] + ([others] if found[LONGEST:] else [])


# ---- the whole layer -------------------------------------------------------------------------------------------------


def block_contender(layer: Layer, case: Block, on: bool, dtype: torch.dtype = BF16) -> Contender:
    """A training step's results are the gradients of x and of all weights, others' are the output and the state. A cache is
    new for every prefill and every check; a timed decoding goes on with its own, whose size does not change."""
    tolerance, device = PEER_TOLERANCE, next(layer.module.parameters()).device

    def tokens(T: int, seed: int) -> Tensor:
        """As small as embeddings: the output is more what the layer adds to x than x."""
        return 0.02 * random_like(torch.empty(case.B, T, case.hidden, dtype=BF16, device=device), seed)

    x = tokens(case.T, 1).to(dtype)
    if case.step == "train":
        leaves, grad = [x.requires_grad_(), *layer.module.parameters()], tokens(case.T, 2).to(dtype)
        step = functools.partial(switched, on, lambda: torch.autograd.grad(layer(x), leaves, grad))
        return Contender(step, tolerance, describe=kernels)

    @torch.no_grad()
    def forward(cache: Any, x: Tensor = x) -> Results:
        return layer(x, cache), layer.state(cache)

    def filled() -> Any:
        """From a prompt on flashdelta, for either: so both start from the same state."""
        cache = layer.cache()
        if case.step == "decode":
            switched(True, forward, cache, tokens(case.prompt, 3).to(dtype))
        return cache

    def checked() -> Results:
        return switched(on, forward, filled())

    call = functools.partial(switched, on, forward, filled()) if case.step == "decode" else checked
    return Contender(call, tolerance, checked, describe=kernels)


def block(layer: Layer, row: Row, setup: Setup) -> Work:
    case: Any = row.call
    ours = block_contender(layer, case, True)
    name, call = captured(ours.checked or ours.call, case.T)
    names = ("x", "weights") if case.step == "train" else ("out", "state")

    def two(results: Results) -> Sequence[Tensor]:
        return results[0], torch.cat([x.detach().flatten().float() for x in results[1:]])

    exact = block_contender(replace(layer, module=copy.deepcopy(layer.module).float()), case, True, FP32)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        want = two((exact.checked or exact.call)())

    def errors(results: Results) -> checks.Errors:
        return checks.errors(want, names, two(results))

    off = setup.peer("fla", row, lambda _: block_contender(layer, case, False))
    return Work({"ours": ours, "fla": off}, errors, facts={"reference": "float32", **ran(name, call)})


# ---- the KDA part ----------------------------------------------------------------------------------------------------

AXES = {"initial_state": 1, "A_log": 0, "dt_bias": 0}
"""Where the heads are, if not on axis 2."""


def some_heads(call: Mapping[str, Any], case: Block, heads: Sequence[int]) -> dict[str, Any]:
    """The call on these heads; a layer has as many value heads as query and key heads."""
    index = torch.tensor(heads, device=call["q"].device)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    if "dt_bias" in tensors:
        tensors["dt_bias"] = tensors["dt_bias"].view(case.HV, case.K)
    return {**call, **{name: x.index_select(AXES.get(name, 2), index) for name, x in tensors.items()}}


def forward_part(
    function: Callable[..., Results], call: dict[str, Any], case: Block
) -> tuple[Callable, Callable, float]:
    """What runs, the errors of its results, and our tolerance."""
    heads = checks.checked_heads(case)
    want = truth(some_heads(call, case, heads), chunked=case.T > RECURRENCE_TOKENS)

    def errors(results: Results) -> checks.Errors:
        return checks.errors(want, ("o", "state"), (results[0][:, :, heads], results[1][:, heads]))

    return torch.no_grad()(functools.partial(function, **call)), errors, tolerance_of(call)


def training_part(
    function: Callable[..., Results], call: dict[str, Any], case: Block
) -> tuple[Callable, Callable, float]:
    """The same of forward and backward; results are the gradients of the call's tensors."""
    leaves, grad_o = [call[name] for name in LEAVES if name in call], random_like(call["v"])

    def run() -> Results:
        return torch.autograd.grad(function(**call)[0], leaves, grad_o)

    want = true_gradients(call, grad_o, case)
    return run, functools.partial(checks.gradient_errors, want, case), checks.GRADIENT_TOLERANCE


def kda(layer: Layer, row: Row, setup: Setup) -> Work:
    """FLA's function on what the layer gave it."""
    case: Any = row.call
    example = block_contender(layer, case, True)
    name, call = captured(example.checked or example.call, case.T)
    function = getattr(importlib.import_module("fla.ops.kda"), name)
    part = training_part if case.step == "train" else forward_part
    run, errors, tolerance = part(function, call, case)

    def contender(on: bool, tolerance: float) -> Contender:
        return Contender(functools.partial(switched, on, run), tolerance, describe=kernels)

    off = setup.peer("fla", row, lambda _: contender(False, PEER_TOLERANCE))
    reference = f"float64, heads {', '.join(map(str, checks.checked_heads(case)))}"
    return Work(
        {"ours": contender(True, tolerance), "fla": off}, errors, facts={"reference": reference, **ran(name, call)}
    )


def ran(name: str, call: dict[str, Any]) -> dict[str, object]:
    """The operator of ours that the layer called, and its backend."""
    return {"operator": name, **explained(getattr(fd, name), call, "auto")}


PARTS = {"block": block, "KDA": kda}


def models(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    _, package = LAYERS[case.framework]
    try:
        _fla.enable()
        work = PARTS[case.part](layer_of(case, setup.device), row, setup)
        has_conv = importlib.util.find_spec("causal_conv1d") is not None  # Hugging Face's convolution, if it is there
        facts = {
            "framework": f"{package} {importlib.import_module(package).__version__}",
            "causal_conv1d": has_conv,
            **work.facts,
        }
        return replace(work, shape={**sizes(case), "hidden": case.hidden}, facts=facts)
    except Exception as error:  # whatever a framework raises, the other rows are worth having
        return Work(dict.fromkeys(("ours", "fla"), summarize(error)), lambda results: {})
