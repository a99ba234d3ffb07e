"""The demo: it writes words, and checks itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pydoc_data.topics import topics

import pytest
import torch

from flashdelta.nn import KdaLanguageModel
from flashdelta.nn.lm import decode, encode
from flashdelta.tools.cli.batching import NULL, Batch, Request, run_batch, serve
from flashdelta.tools.cli.demo import TOLERANCE, DemoResult, load_demo_model, run_demo

PROMPT = "The value of an object can be changed when "


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run_demo(prompt=PROMPT, tokens=300, temperature=0.5, seed=0, backend="reference", device="cpu")


@pytest.fixture(scope="module")
def model() -> KdaLanguageModel:
    return load_demo_model(torch.device("cpu"), torch.float32, "reference")


def test_the_demo_writes_words_and_checks_itself(result: DemoResult) -> None:
    assert result.prompt == PROMPT and len(result.continuation) == 300
    assert result.prefill_tokens_per_s > 0 and result.decode_tokens_per_s > 0
    assert (result.backend, result.device, result.dtype) == ("reference", "cpu", "float32")
    assert result.checked and result.agreement_error <= TOLERANCE[torch.float32]
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]+", result.continuation.lower())[:-1]
    assert len(words) >= 30 and sum(word in known for word in words) >= 0.6 * len(words), result.continuation


ONE = [{"prompt": ""}, {"prompt": "naïve"}, {"tokens": 0}, {"temperature": -0.1}, {"backend": "fast"}]
ONE += [{"device": x} for x in ("nowhere", "meta", "cuda:99")]
MANY = [{"requests": 0}, {"slots": 0}, {"tokens": 0}, {"temperature": -1.0}, {"prompt": ""}, {"device": "nowhere"}]


@pytest.mark.parametrize(
    ("run", "arguments"),
    [(run_demo, x) for x in ONE] + [(run_batch, x) for x in MANY],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_bad_arguments_are_named(run: Callable, arguments: dict) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name}\b.*got "):
        run(**{"device": "cpu", "backend": "reference", **arguments})


# ---- continuous batching: requests join and leave, and each gets the text that it gets alone -----------------------------


REQUESTS = [
    Request("The value of ", 9, 1, 0),
    Request("A class definition", 4, 2, 2),
    Request("An", 1, 3, 3),
    Request("If the sequence is empty, ", 12, 4, 4),
    Request("import", 6, 5, 40),
]


def test_requests_get_greedily_what_the_model_writes(model: KdaLanguageModel):
    """By caches, one prompt at a time."""
    batch = Batch(model, 3, 12, temperature=0.0)
    texts, joined, left, most = serve(batch, REQUESTS)
    for request, text in zip(REQUESTS, texts):
        assert text == decode(model.generate(encode(request.prompt)[None], request.tokens)[0])
    # the last one comes when nobody runs, and need not be waited for
    assert joined == [0, 2, 3, 4, 15] and left == [8, 5, 4, 15, 20] and most == 3
    assert batch.slot.eq(NULL).all()
