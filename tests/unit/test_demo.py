"""The demo: it writes words, checks itself, and its check can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch

from flashdelta.nn import KdaCache, KdaLanguageModel
from flashdelta.nn.lm import encode
from flashdelta.tools.cli.batching import run_batch
from flashdelta.tools.cli.demo import TOLERANCE, DemoResult, agreement, load_demo_model, run_demo

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


@torch.no_grad()
@pytest.mark.parametrize("part", ["conv", "state"])
def test_a_lost_cache_fails_the_check(model: KdaLanguageModel, part: str) -> None:
    prompt = encode(PROMPT)[None]
    logits, caches = model(prompt, return_caches=True)
    lost = tuple(forget(cache, part) for cache in caches)
    good = list(zip(range(8), model.steps(logits[:, -1], caches)))
    bad = list(zip(range(8), model.steps(logits[:, -1], lost)))
    for steps, wanted in ((good, True), (bad, False)):
        tokens = torch.stack([token for _, (token, _) in steps], dim=1)
        scores = torch.stack([logits[:, -1], *(after for _, (_, after) in steps)], dim=1)
        assert agreement(model, prompt, tokens, scores)[1] is wanted


def forget(cache: KdaCache, part: str) -> KdaCache:
    return replace(cache, **{part: torch.zeros_like(getattr(cache, part))})


ONE = [{"prompt": ""}, {"prompt": "naïve"}, {"tokens": 0}, {"temperature": -0.1}, {"backend": "fast"}]
ONE += [{"device": x} for x in ("nowhere", "meta", "cuda:99")]
MANY = [{"requests": 0}, {"slots": 0}, {"tokens": 0}, {"temperature": -1.0}, {"prompt": ""}, {"device": "nowhere"}]


@pytest.mark.parametrize(("run", "arguments"), [(run_demo, x) for x in ONE] + [(run_batch, x) for x in MANY], ids=str)
def test_bad_arguments_are_named(run: Callable, arguments: dict) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        run(**{"device": "cpu", "backend": "reference", **arguments})
