"""vLLM's and SGLang's calls through the integrations, on a CPU: served against one request at a time; what stays theirs; how
the integrations are turned on, and off."""

from __future__ import annotations

import importlib
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdelta import integrations
from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations.engine import Engine
from flashdelta.integrations.patches import Patches
from flashdelta.integrations.seams import Attribute, Replacement, Seam, differences
from flashdelta.testing.cases import BF16, FP32
from flashdelta.testing.engines import LAYERS, Batch, KimiLinear, Marks, Model, adapted
from flashdelta.testing.oracle import TOLERANCE, assert_close

from ..support.serving import serve, truth

ROUNDS = 12
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def small(**changes: Any) -> Model:
    return Model(**{"H": 2, "D": 32, "dtype": FP32, "device": "cpu"} | changes)


def softplus(make: type[KimiLinear]) -> bool:
    """Whether its models may have a gate without a bound."""
    return make.modules[0] not in (_vllm.GLM, _vllm.LING)


# ---- served ---------------------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("drafts", (0, 2))
def test_serving(make: type[KimiLinear], drafts: int):
    """Random arrivals, prompts in pieces, prefix-cache hits, padded batches, drafts: each request as if alone."""
    found = serve(make, small(), drafts, 10 * TOLERANCE[FP32], ROUNDS)
    assert found.finished >= 4 and found.calls >= ROUNDS
    assert found.hits or not found.layer.aligned


@every_layer
def test_states_and_tokens_in_bfloat16(make: type[KimiLinear]):
    found = serve(make, small(dtype=BF16, state=BF16), 2, 0.05, ROUNDS // 2)
    assert found.finished


@pytest.mark.parametrize("make", [x for x in LAYERS.values() if softplus(x)])
def test_the_gate_without_a_bound(make: type[KimiLinear]):
    assert serve(make, small(lower_bound=None), 1, 10 * TOLERANCE[FP32], ROUNDS // 2).finished
