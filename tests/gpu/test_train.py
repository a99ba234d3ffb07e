"""Training on the GPU: a short run beside the reference, mixed precision, activation checkpointing, torch.compile."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.nn import KimiDeltaAttention

from ..support.cases import FP32
from ..support.gradients import INPUTS, gradients, incoming
from ..support.inputs import TOKEN_TENSORS, sequence_calls
from ..unit.test_training import example
from .calls import CALLS_TO_A_REPLAY, KIMI, gpu_call

pytestmark = pytest.mark.gpu

NOISE = 0.02
"""How far the loss, averaged over 20 steps, may be from the reference's, as a share. On a CPU the reference with activations
in bfloat16 was up to 0.7 % from itself in float32."""


@pytest.mark.long
def test_a_short_run_lies_on_the_reference(tmp_path: Path):
    module = example("train_tiny_lm")

    def losses(*arguments: str) -> torch.Tensor:
        options = module.parse(["--steps", "300", "--device", "cuda", "--out", str(tmp_path / "model"), *arguments])
        _, record = module.train(options, Console(file=io.StringIO()))
        return module.smooth(record.as_json(options)["train"])

    ours, reference = losses(), losses("--backend", "reference", "--no-autocast")
    off = (ours / reference - 1).abs().max()
    print(f"last {ours[-1]:.3f}, reference {reference[-1]:.3f}, furthest apart {off:.2%}")
    assert reference[-1] < 0.5 * reference[0]
    assert off <= NOISE


def layer() -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(256, 2, head_dim=128, backend="triton").cuda()


def test_parameters_and_their_gradients_stay_in_float32():
    module, x = layer(), torch.randn(2, 200, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = module(x)
    y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())
    assert all(p.grad.abs().max() > 0 for p in module.parameters())


def test_inference_tensors_are_refused_by_name(backend: str):
    """By a replay, too."""
    call = gpu_call(fd.chunk_kda, KIMI, backend=backend) | {"return_intermediate_states": False}
    call["q"].requires_grad_()
    with torch.inference_mode():
        k = call["k"].clone()
    for _ in range(CALLS_TO_A_REPLAY):
        with pytest.raises(ValueError, match="k: got an inference tensor"):
            fd.chunk_kda(**call | {"k": k})
        fd.chunk_kda(**call)


def test_checkpointed_activations_give_the_same_bits():
    module = layer().bfloat16()
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    parameters = list(module.parameters())
    want = torch.autograd.grad(module(x)[0].float().square().sum(), parameters)
    again = checkpoint(lambda x: module(x)[0], x, use_reentrant=False).float().square().sum()
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(again, parameters), want))


def test_compiled_gradients_are_the_same_bits():
    call = gpu_call(fd.chunk_kda, KIMI) | {"return_intermediate_states": False}
    leaves = {name: call[name].detach().clone().requires_grad_() for name in INPUTS if call.get(name) is not None}
    grad_o, _ = incoming(call)

    def step(leaves: dict) -> torch.Tensor:
        return fd.chunk_kda(**call | leaves)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    found, want = (
        torch.autograd.grad(f(leaves), list(leaves.values()), grad_o.to(call["v"].dtype)) for f in (compiled, step)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize("lengths", [(1, 63, 0, 200), (64, 65)], ids=str)
def test_packed_gradients_are_those_of_each_sequence(lengths: tuple[int, ...], backend: str):
    call = gpu_call(fd.chunk_kda, replace(KIMI, lengths=lengths, state=FP32), backend=backend)
    grad_o, grad_final = incoming(call)
    together = gradients(call, grad_o, grad_final)
    start = 0
    for n, alone in enumerate(sequence_calls(call)):
        own = slice(start, start := start + lengths[n])
        found = gradients(alone, grad_o[:, own], grad_final[n : n + 1])
        assert all(torch.equal(found[name], together[name][:, own]) for name in TOKEN_TENSORS)
        assert torch.equal(found["initial_state"], together["initial_state"][n : n + 1])
