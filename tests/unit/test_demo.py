"""The demo: it writes words, and checks itself."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import pytest
import torch

from flashdelta.nn import KdaLanguageModel
from flashdelta.nn.lm import decode, encode
from flashdelta.tools.cli.batching import NULL, Batch, Request, serve
from flashdelta.tools.cli.demo import TOLERANCE, demo_model, run_demo

PROMPT = "The value of an object can be changed when "


@pytest.fixture(scope="module")
def result() -> dict:
    return run_demo(prompt=PROMPT, tokens=200, temperature=0.5, seed=0, backend="reference", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model() -> KdaLanguageModel:
    return demo_model(PROMPT, "reference", torch.device("cpu"))


def test_the_demo_writes_words_and_checks_itself(result: dict) -> None:
    assert result["prompt"] == PROMPT and len(result["continuation"]) == 200
    assert result["prefill_tokens_per_s"] > 0 and result["decode_tokens_per_s"] > 0
    assert (result["backend"], result["device"], result["dtype"]) == ("reference", "cpu", "float32")
    assert result["checked"] and result["agreement_error"] <= TOLERANCE[torch.float32]
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]+", result["continuation"].lower())[:-1]
    assert len(words) >= 20 and sum(word in known for word in words) >= 0.6 * len(words), result["continuation"]


# ---- continuous batching: requests join and leave, and each gets the text that it gets alone -----------------------------


REQUESTS = [
    Request("The value of ", 9, 1, 0),
    Request("A class definition", 4, 2, 2),
    Request("An", 1, 3, 3),
    Request("If the sequence is empty, ", 12, 4, 4),
    Request("import", 6, 5, 40),
]


def test_requests_get_greedily_what_the_model_writes(model: KdaLanguageModel):
    """With caches, one prompt at a time."""
    batch = Batch(model, 3, 12, temperature=0.0)
    texts, joined, left, most = serve(batch, REQUESTS)
    for request, text in zip(REQUESTS, texts):
        assert text == decode(model.generate(encode(request.prompt)[None], request.tokens)[0])
    # the last one comes when nobody runs, and need not be waited for
    assert joined == [0, 2, 3, 4, 15] and left == [8, 5, 4, 15, 20] and most == 3
    assert batch.slot.eq(NULL).all()
