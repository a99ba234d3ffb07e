"""The demo: it writes words, checks itself, and its check can fail."""

from __future__ import annotations

import re
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch

from flashdelta.nn import KdaCache, KdaLanguageModel
from flashdelta.nn.lm import encode
from flashdelta.tools.cli.demo import TOLERANCE, DemoResult, agreement, load_demo_model, run_demo

from ..full import FULL

PROMPT = "The value of an object can be changed when "
MIN_KNOWN_WORDS = 0.6


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run_demo(prompt=PROMPT, tokens=300, temperature=0.5, seed=0, backend="reference", device="cpu")


@pytest.fixture(scope="module")
def model() -> KdaLanguageModel:
    return load_demo_model(torch.device("cpu"), torch.float32, "reference")


def test_result_is_complete(result: DemoResult) -> None:
    assert result.prompt == PROMPT
    assert len(result.continuation) == 300
    assert result.prefill_tokens_per_s > 0
    assert result.decode_tokens_per_s > 0
    assert (result.backend, result.device, result.dtype) == ("reference", "cpu", "float32")
    assert 100_000 < result.parameters < 2_000_000


def test_prefill_and_decode_agree(result: DemoResult) -> None:
    assert result.checked
    assert result.agreement_error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("seed", range(3 if FULL else 1))
def test_most_words_are_words_of_the_training_text(seed: int) -> None:
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    text = run_demo(prompt=PROMPT, tokens=300, seed=seed, backend="reference", device="cpu").continuation
    # the last word may be cut short
    words = re.findall(r"[a-z]+", text.lower())[:-1]
    assert len(words) >= 30
    assert sum(word in known for word in words) >= MIN_KNOWN_WORDS * len(words), text


def test_same_seed_same_text(result: DemoResult) -> None:
    again = run_demo(prompt=PROMPT, tokens=20, temperature=0.5, seed=0, backend="reference", device="cpu")
    other = run_demo(prompt=PROMPT, tokens=20, temperature=0.5, seed=1, backend="reference", device="cpu")
    assert again.continuation == result.continuation[:20]
    assert other.continuation != again.continuation


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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prompt", dict(prompt="")),
        ("prompt", dict(prompt="naïve")),
        ("tokens", dict(tokens=0)),
        ("temperature", dict(temperature=-0.1)),
        ("backend", dict(backend="fast")),
        ("device", dict(device="nowhere")),
        ("device", dict(device="meta")),
        ("device", dict(device="cuda:99")),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*; got "):
        run_demo(**{"device": "cpu", "backend": "reference", **arguments})
