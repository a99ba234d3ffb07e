"""Engine-shaped calls through the integrations on a GPU: rounds of random arrivals, CUDA graphs, and beside the engines' own
Triton kernels on the same tensors.

The latter want `FLASHDELTA_ENGINES`: a folder made by `python -m tests.support.engine_kernels WHEELS FOLDER`.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashdelta.integrations import _vllm

from ..support.cases import BF16, FP32
from ..support.engine_kernels import ENVIRONMENT, STEP, own_functions
from ..support.engines import LAYERS, Batch, K3Step, KimiLinear, Marks, Model, SGLang, exact_sequence, exact_steps
from ..support.oracle import TOLERANCE_FOR_FEW, relative_error, same_bits
from ..support.serving import serve, serve_steps
from .calls import hold_replay, nothing_compiles

pytestmark = pytest.mark.gpu

ALLOWED, ALLOWED_OF_FEW = 1.1, 1.5
"""Of their error, as docs/integrations.md says: of prompts, and of steps of decoding, where chance decides. Of outputs and of
states that are written alike."""

every_layer = pytest.mark.parametrize("name", LAYERS)
ROUNDS = {"Kimi-K3": 1000, "SGLang": 1000}
"""Of the others a tenth, for the time it takes."""


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


@beside
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("heads", (12, 32))
@pytest.mark.parametrize("state", (FP32, BF16), ids=("fp32", "bf16"))
@torch.inference_mode()
def test_decode_and_verify_beside_theirs(name: str, heads: int, state: torch.dtype):
    """Outputs and states after each token, be they in the pool or in SGLang's buffer."""
    model, count, per = Model(heads, 128, state=state), 40, 4
    rows, start = model.tokens(count * per), model.pool(count * per + 1)
    table = model.index(range(1, count * per + 1)).view(count, per)
    slots = table[:, 0].contiguous()
    o, states = exact_steps(model, rows, start[slots.long()], per)
    exact = {"decode": o[:, 0], "decoded states": states[:, 0], "verify": o.flatten(0, 1), "states of drafts": states}
    found = []
    for layer in pair(name, model):
        pool = start.clone()
        first = Batch(model, rows.view(count, per, -1)[:, 0].contiguous(), [1] * count)
        results = {"decode": layer.decode(first, pool, slots)[0], "decoded states": pool[slots.long()]}
        pool.copy_(start)
        batch = Batch(model, rows.clone(), [per] * count)
        if isinstance(layer, SGLang):
            buffer = pool.new_zeros(count, per, *pool.shape[1:])
            results["verify"] = layer.verify_read_only(batch, pool, slots, buffer, per)[0]
            assert torch.equal(pool, start)
        else:
            results["verify"] = layer.verify(batch, pool, table, model.index([1] * count))[0]
            buffer = pool[table.long()]
        found.append(results | {"states of drafts": buffer})
    for what, want in exact.items():
        hold(found[0][what], found[1][what], want, f"{name}, {heads} heads, {what}", ALLOWED_OF_FEW)


STEPS = pytest.mark.parametrize("drafts", (0, 3), ids=("decode", "verify"))


@beside
@STEPS
@pytest.mark.parametrize("by_channel", (False, True))
@pytest.mark.parametrize("heads", (12, 32))
@pytest.mark.parametrize("state", (FP32, BF16), ids=("fp32", "bf16"))
@torch.inference_mode()
def test_a_whole_step_beside_the_chain(drafts: int, by_channel: bool, heads: int, state: torch.dtype):
    """Convolution, attention and norm of Kimi-K3: two rounds, the second of which starts from windows and states of the first.
    The windows must have the same bits."""
    model, count = Model(heads, 128, state=state), 40
    step, counts = K3Step(model, drafts, by_channel), model.index([1 + i % (1 + drafts) for i in range(count)])
    assert step.backends() == ("flashdelta", "flashinfer" if drafts else "native")
    tokens, slots = count * (1 + drafts), model.index(range(1, count * (1 + drafts) + 1))
    pool, windows = model.pool(tokens + 1), step.windows(tokens + 1)
    accepted = (torch.ones_like(counts), counts) if drafts else (None, None)
    slots = slots.view(count, 1 + drafts) if drafts else slots
    chain = functools.partial(step.chain, own_functions(STEP))
    for what, given in zip(("first", "second"), accepted):
        batch, z = Batch(model, model.tokens(tokens), [1 + drafts] * count), step.output_gate(tokens)
        want, states = step.exact(batch, z, pool, windows, slots, given)
        found = []
        for run in (step.fused, chain):
            own, kept = model.pool(tokens + 1).copy_(pool), windows.clone(memory_format=torch.preserve_format)
            found.append((run(batch, z, own, kept, slots, given), own, kept))
        hold(found[0][0], found[1][0], want, f"{heads} heads, {what} round", ALLOWED_OF_FEW)
        hold(found[0][1], found[1][1], states, f"{heads} heads, states of the {what} round", ALLOWED_OF_FEW)
        assert same_bits(found[0][2], found[1][2])
        _, pool, windows = found[0]


@STEPS
@pytest.mark.parametrize("by_channel", (False, True))
@torch.inference_mode()
def test_graphs_of_a_whole_step(drafts: int, by_channel: bool):
    """Of one that is captured for eight sequences, and replayed for fewer, in other slots, with fewer tokens."""
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


@pytest.mark.long
@torch.inference_mode()
def test_a_layer_that_is_built_compiles_its_steps():
    """Afterwards no batch of either kind compiles."""
    model = Model(16, 128, state=BF16)  # as in vLLM, rows lie a multiple of 16 elements apart
    step = K3Step(model, 3, False)
    backend, verify = step.backends()
    places, channels = 6, step.channels
    layer = SimpleNamespace(
        **dict(local_num_heads=16, head_dim=128, conv_size=4, num_spec=3, gate_lower_bound=-5.0),
        model_config=SimpleNamespace(dtype=BF16),
        get_state_shape=lambda: ((places, channels), (16, 128, 128)),
        get_state_dtype=lambda: (BF16, BF16),
        kda_decode_backend=backend,
        kda_spec_decode_backend=verify,
    )
    limits = SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8)
    _vllm.built_k3(lambda **call: None, {"self": layer, "vllm_config": SimpleNamespace(scheduler_config=limits)})
    pool, windows = model.pool(200), step.windows(200)
    with nothing_compiles():
        for count in (1, 3, 60):
            slots = model.index(range(1, 3 * count + 1)).view(3, count)
            step.fused(Batch(model, model.tokens(count), [1] * count), step.output_gate(count), pool, windows, slots[0])
        for count in (1, 3, 40):
            batch, table = Batch(model, model.tokens(4 * count), [4] * count), model.index(range(1, 4 * count + 1))
            accepted = model.index([1] * count)
            step.fused(batch, step.output_gate(4 * count), pool, windows, table.view(count, 4), accepted)
