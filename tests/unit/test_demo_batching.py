"""Continuous batching of the demo: requests join and leave, and each gets the text that it gets alone."""

from __future__ import annotations

import pytest
import torch

from flashdelta.nn import KdaLanguageModel
from flashdelta.nn.lm import decode, encode
from flashdelta.tools.cli.batching import NULL, Batch, Request, make_requests, run_batch, serve
from flashdelta.tools.cli.demo import load_demo_model

REQUESTS = [
    Request("The value of ", 9, 1, 0),
    Request("A class definition", 4, 2, 2),
    Request("An", 1, 3, 3),
    Request("If the sequence is empty, ", 12, 4, 4),
    Request("import", 6, 5, 40),
]


@pytest.fixture(scope="module")
def model() -> KdaLanguageModel:
    return load_demo_model(torch.device("cpu"), torch.float32, "reference")


def test_requests_get_greedily_what_the_model_writes(model: KdaLanguageModel):
    """By caches, one prompt at a time."""
    batch = Batch(model, 3, 12, temperature=0.0)
    texts, joined, left, most = serve(batch, REQUESTS)
    for request, text in zip(REQUESTS, texts):
        assert text == decode(model.generate(encode(request.prompt)[None], request.tokens)[0])
    # the last one comes when nobody runs, and need not be waited for
    assert joined == [0, 2, 3, 4, 15] and left == [8, 5, 4, 15, 20] and most == 3
    assert batch.slot.eq(NULL).all()


def test_a_sampled_text_is_the_one_of_the_request_alone(model: KdaLanguageModel):
    batch = Batch(model, 2, 12, temperature=0.7)
    texts, *_ = serve(batch, REQUESTS)
    assert texts == [serve(batch, [request])[0][0] for request in REQUESTS]
    other = [Request(x.prompt, x.tokens, x.seed + 50, x.arrival) for x in REQUESTS]
    assert serve(batch, other)[0] != texts


@pytest.mark.parametrize("fault", ["slot", "window", "noise"])
def test_rows_that_are_not_their_own_are_found(monkeypatch: pytest.MonkeyPatch, fault: str):
    """The demo's check can fail."""
    step = Batch._step

    def mixed_up(batch: Batch) -> tuple[()]:
        running = batch.slot[batch.slot != NULL]
        if fault == "slot":
            batch.slot.copy_(torch.where(batch.slot == NULL, NULL, running.min()))
        for pool in batch.pools if fault == "window" and len(running) > 1 else ():
            pool.conv.zero_()
            pool.state.zero_()
        if fault == "noise" and len(running) > 1:
            batch.noise.copy_(batch.noise.flip(-1))
        return step(batch)

    monkeypatch.setattr(Batch, "_step", mixed_up)
    assert not run_batch(requests=3, slots=3, tokens=24, seed=0, backend="reference", device="cpu").checked


def test_result_is_complete():
    result = run_batch(requests=3, slots=2, tokens=16, backend="reference", device="cpu")
    assert result.checked and not result.graph and result.tokens_per_s > 0
    assert (result.device, result.dtype, result.slots, result.most_running) == ("cpu", "float32", 2, 2)
    assert [len(text) for text in result.continuations] == [x.tokens for x in make_requests(3, 16, 0, None)]
    assert result.steps == max(result.left) and all(a <= b for a, b in zip(result.joined, result.left))


@pytest.mark.parametrize(
    "arguments",
    [{"requests": 0}, {"slots": 0}, {"tokens": 0}, {"temperature": -1.0}, {"prompt": ""}, {"device": "nowhere"}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_bad_arguments_are_named(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name} must .*; got "):
        run_batch(**{"device": "cpu", "backend": "reference", **arguments})
