"""Engine-shaped calls through the integrations on a GPU: rounds of random arrivals, CUDA graphs, and beside the engines' own
Triton kernels on the same tensors.

The latter want `FLASHDELTA_ENGINES`: a folder made by `python -m tests.support.engine_kernels WHEELS FOLDER`.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import Tensor

from ..support.cases import BF16
from ..support.engine_kernels import ENVIRONMENT, own_functions
from ..support.engines import LAYERS, Batch, K3Step, KimiLinear, Marks, Model, SGLang, exact_sequence
from ..support.oracle import TOLERANCE_FOR_FEW, relative_error, same_bits
from ..support.serving import serve, serve_steps
from .calls import hold_replay

pytestmark = pytest.mark.gpu

ALLOWED, ALLOWED_OF_FEW = 1.1, 1.5
"""Shares of their error, as docs/integrations.md says: of prompts, and of steps of decoding, where chance decides. For outputs
and states that are written alike."""

every_layer = pytest.mark.parametrize("name", LAYERS)
ROUNDS = {"Kimi-K3": 1000, "SGLang": 1000}
"""A tenth of the others, for the time it takes."""


@every_layer
@pytest.mark.parametrize("drafts", (0, 3))
def test_rounds_of_random_arrivals(name: str, drafts: int):
    rounds = ROUNDS.get(name, 100)
    found = serve(LAYERS[name], Model(4, 128), drafts, TOLERANCE_FOR_FEW, rounds)
    print(f"{name}: {found.finished} requests, {found.calls} calls, {found.hits} prefix-cache hits")
    assert found.finished > rounds // 4


@pytest.mark.parametrize("by_channel", (False, True))
@pytest.mark.parametrize("drafts", (0, 3))
@torch.inference_mode()
def test_rounds_of_whole_steps(drafts: int, by_channel: bool):
    assert serve_steps(K3Step(Model(4, 128), drafts, by_channel), TOLERANCE_FOR_FEW, 1000) > 250


@pytest.mark.parametrize("name", ("Kimi-K3", "SGLang"))
@pytest.mark.parametrize("heads", (12, 32))
def test_rounds_with_states_in_bfloat16(name: str, heads: int):
    """Rounded at every step."""
    assert serve(LAYERS[name], Model(heads, 128, state=BF16), 0, 0.05, 50).finished


@every_layer
@pytest.mark.parametrize("kind", ("decode", "verify"))
@pytest.mark.parametrize("order", ((9, 20, 0, 5, 31, 0, 0, 0), (3, 2, 1, 4, 5, 6, 7, 0)), ids=("few", "many"))
@torch.inference_mode()
def test_graphs_take_other_slots_and_tokens(name: str, kind: str, order: tuple[int, ...]):
    """With padded sequences, and fewer tokens than there is room for."""
    model, per = Model(4, 128), 1 if kind == "decode" else 3
    layer, pool = LAYERS[name](model), model.pool(40)
    batch = Batch(model, model.tokens(8 * per), [per] * 8)
    slots, accepted = model.index(range(1, 9)), model.index([1] * 8)
    table = model.index(range(1, 33)).view(8, 4)[:, :3]
    buffer = pool.new_zeros(8, 3, *pool.shape[1:])

    def run() -> Tensor:
        if kind == "decode":
            return layer.decode(batch, pool, slots)
        if isinstance(layer, SGLang):
            return layer.verify_read_only(batch, pool, slots, buffer, 3)
        return layer.verify(batch, pool, table, accepted)

    def change() -> None:
        slots.copy_(model.index([slot or layer.null for slot in order]))
        table.copy_(torch.where(slots[:, None] > 0, model.index(range(1, 25)).view(8, 3), 0))
        accepted.copy_(model.index([1, 3, 1, 2, 1, 1, 2, 1]))
        batch.rows.copy_(model.tokens(8 * per))
        if kind == "verify":
            batch.offsets.copy_(model.index([0, 3, 5, 5, 8, 9, 9, 9, 9]))

    hold_replay(run, [pool, buffer], change, slice(0, 9 if kind == "verify" else 8))


@torch.inference_mode()
def test_graph_of_sglangs_extension():
    """Captured for a number of tokens, and replayed for fewer, with tracked states."""
    model = Model(4, 128)
    layer, pool = LAYERS["SGLang"](model), model.pool(8)
    batch = Batch(model, model.tokens(300), [100, 100, 0, 0])
    slots, chunks = model.index([1, 2, -1, -1]), model.index([1, -1, -1, -1])
    snapshot = pool.new_zeros(4, *pool.shape[1:])
    tokens = [getattr(batch, x) for x in ("q", "k", "v", "g", "beta")]
    states = {"ssm_states": pool, "cache_indices": slots, "track_state": snapshot, "track_chunk_idx": chunks}
    options = {**layer.model.gate, "beta_is_raw": True, "return_intermediate_states": False}

    def change() -> None:
        batch.rows.copy_(model.tokens(300))
        batch.offsets.copy_(model.index([0, 130, 150, 290, 290]))
        slots.copy_(model.index([5, 3, 4, -1]))
        chunks.copy_(model.index([2, -1, 1, -1]))

    run = functools.partial(layer.call.extend, None, *tokens, **states, **options, query_start_loc=batch.offsets)
    # what is not tracked may hold anything
    hold_replay(run, [pool, snapshot[0], snapshot[2]], change, slice(0, 290))


# ---- beside the engines' own kernels -----------------------------------------------------------------------------------------

THEIRS = ("Kimi-Linear", "GLM-5.3-Flash, Triton", "Ling-3", "SGLang")
MARK = 64
"""Tokens before a tracked state."""

PACKED = {"8 x 1024": (1024,) * 8, "1 x 8192": (8192,), "six uneven": (3000, 2000, 1500, 1000, 600, 92)}


beside = pytest.mark.skipif(ENVIRONMENT not in os.environ, reason=f"{ENVIRONMENT} is not set")


def pair(name: str, model: Model) -> tuple[KimiLinear, KimiLinear]:
    return LAYERS[name](model), LAYERS[name](model, own_functions(name), ours=False)


def hold(ours: Tensor, theirs: Tensor, exact: Tensor, what: str, allowed: float = ALLOWED) -> None:
    errors = relative_error(ours, exact), relative_error(theirs, exact)
    print(f"{what}: ours {errors[0]:.3g}, theirs {errors[1]:.3g}")
    assert errors[0] <= allowed * errors[1], what


@beside
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("heads", (12, 32))
@pytest.mark.parametrize("kind", PACKED)
@torch.inference_mode()
def test_prefill_beside_theirs(name: str, heads: int, kind: str):
    """New sequences; with checkpoints where their kernels have them. States that are written must be as near to the truth."""
    model = Model(heads, 128)
    lengths = PACKED[kind]
    rows, count = model.tokens(sum(lengths)), len(lengths)
    prompts = rows.split(lengths)
    exact, states = zip(*(exact_sequence(model, x) for x in prompts))
    found, pools = [], []
    for layer in pair(name, model):
        pool = model.pool(2 * count + 2)
        slots, flags = model.index(range(1, count + 1)), torch.zeros(count, dtype=torch.bool, device=pool.device)
        if not layer.flagged:
            pool[slots] = 0
        marks = Marks([MARK] * count, [*range(count + 1, 2 * count + 1)]) if name == "SGLang" else None
        batch = Batch(model, rows.clone(), lengths)  # their kernels write over v
        found.append(layer.prefill(batch, pool, slots, flags, marks)[0])
        pools.append(pool)
    what = f"{name}, {heads} heads, {kind}"
    hold(*found, torch.cat(exact), what)
    hold(*(x[1 : count + 1] for x in pools), torch.stack(states), f"{what}, states")
    if name == "SGLang":
        marked = torch.stack([exact_sequence(model, x[:MARK])[1] for x in prompts])
        hold(*(x[count + 1 : 2 * count + 1] for x in pools), marked, f"{what}, tracked states")


@pytest.mark.parametrize("drafts", (0, 3), ids=("decode", "verify"))
@pytest.mark.parametrize("by_channel", (False, True))
@torch.inference_mode()
def test_graphs_of_a_whole_step(drafts: int, by_channel: bool):
    """One is captured for eight sequences, and replayed for fewer, in other slots, with fewer tokens."""
    model, per = Model(4, 128), 1 + drafts
    step = K3Step(model, drafts, by_channel)
    step.backends()
    pool, windows, z = model.pool(40), step.windows(40), step.output_gate(8 * per)
    batch, accepted = Batch(model, model.tokens(8 * per), [per] * 8), model.index([1] * 8)
    table = model.index(range(1, 33)).view(8, 4)[:, :per].contiguous()
    slots = table if drafts else table.flatten()

    def run() -> Tensor:
        return step.fused(batch, z, pool, windows, slots, accepted if drafts else None)

    def change() -> None:
        order = model.index([9, 20, 0, 5, 31, 0, 0, 0])
        slots.copy_(torch.where(order[:, None] > 0, table.flip(0), 0) if drafts else order)
        batch.rows.copy_(model.tokens(8 * per))
        if drafts:
            batch.offsets.copy_(model.index([0, 3, 5, 6, 8, 12, 12, 12, 12]))
            accepted.copy_(model.index([1, 3, 1, 2, 4, 1, 1, 1]))

    reserved = pool[0].clone(), windows[0].clone()
    hold_replay(run, [pool, windows], change, slice(0, 12 if drafts else 8))
    assert same_bits(pool[0], reserved[0]) and same_bits(windows[0], reserved[1])
