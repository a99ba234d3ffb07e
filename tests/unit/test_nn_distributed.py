"""`nn.KimiDeltaAttention` in training over two processes (gloo): the gradients are those of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flashdelta.nn import KdaLanguageModel, LanguageModelConfig, shard_attention
from flashdelta.nn.lm import VOCABULARY

from ..support.forked import imported_once
from ..support.layers import make_layer, rows
from ..support.processes import on_processes
from ..support.shared import folder_of_run, once

RANKS = 2
BF16, F32 = torch.bfloat16, torch.float32
OFFSETS = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
Found = dict[str, Tensor]


def inputs(packed: bool) -> list[Tensor]:
    """A row, or two, of each rank."""
    return [*rows(RANKS * (1 if packed else 2), 40, dtype=F32, device="cpu").chunk(RANKS)]


def loss_of(layer: nn.Module, x: Tensor, packed: bool = False, again: bool = False) -> Tensor:
    given = {"cu_seqlens": OFFSETS} if packed else {}

    def run(x: Tensor) -> Tensor:
        return layer(x, **given)[0]

    y = checkpoint(run, x, use_reentrant=False) if again else run(x)
    return y.float().square().mean()


def gradients(module: nn.Module) -> Found:
    """Whole ones, by name."""
    found = {}
    for name, x in module.named_parameters():
        assert x.grad is not None, name
        grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        assert grad.dtype == F32
        found[name.removeprefix("module.")] = grad.clone()
    return found


WAYS = ("plain", "packed", "checkpointed", "autocast")


def one_step(layer: nn.Module, x: Tensor, way: str) -> Found:
    layer.zero_grad()
    with torch.autocast("cpu", BF16, enabled=way == "autocast"):
        loss = loss_of(layer, x, way == "packed", way == "checkpointed")
    loss.backward()
    return gradients(layer)


KINDS = {"ddp": DistributedDataParallel, "fsdp": shard_attention}


def seen_in_bfloat16(rank: int) -> dict[str, torch.dtype]:
    """The dtypes in which a layer's parameters are when it runs."""
    layer, found = shard_attention(make_layer(F32), param_dtype=BF16), {}

    def look(module: nn.Module, *_: object) -> None:
        found.update({name: x.dtype for name, x in module.named_parameters(recurse=False)})

    for module in layer.modules():
        module.register_forward_pre_hook(look)
    loss_of(layer, inputs(False)[rank].to(BF16)).backward()
    gradients(layer)
    return found


CONFIG = LanguageModelConfig(hidden_size=48, num_layers=2, num_heads=2, num_v_heads=2, gate_rank=16, mlp_size=32)


def make_model() -> KdaLanguageModel:
    torch.manual_seed(0)
    return KdaLanguageModel(CONFIG, chunk_size=32)


def tokens_of(rank: int) -> Tensor:
    return torch.randint(len(VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(rank))


def model_gradients(model: nn.Module, tokens: Tensor) -> Found:
    logits = model(tokens[:, :-1])[0]
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return gradients(model)


def whole_model(rank: int, param_dtype: torch.dtype | None) -> Found:
    """As a user shards it: layers, blocks, model."""
    model = shard_attention(make_model(), param_dtype=param_dtype)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model_gradients(model, tokens_of(rank))


def work(group: dist.ProcessGroup) -> dict[str, object]:
    torch.set_num_threads(1)
    rank, found = group.rank(), {}
    for kind, way in itertools.product(KINDS, WAYS):
        found[f"{kind} {way}"] = one_step(KINDS[kind](make_layer(F32)), inputs(way == "packed")[rank], way)
    found["dtypes"] = seen_in_bfloat16(rank)
    sharded = shard_attention(make_layer(F32)).named_parameters()
    found["marked"] = {name for name, x in sharded if getattr(x, "_no_weight_decay", False)}
    found["model"], found["model bf16"] = whole_model(rank, None), whole_model(rank, BF16)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    with imported_once():
        return once(folder_of_run(tmp_path_factory) / "nn_distributed.pt", lambda: on_processes(RANKS, work))


def mean_of(gradients: list[Found]) -> Found:
    return {name: sum(x[name] for x in gradients) / len(gradients) for name in gradients[0]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(found: list[dict], kind: str, way: str):
    layer = make_layer(F32)
    want = mean_of([one_step(layer, x, way) for x in inputs(way == "packed")])
    for rank in found:
        assert rank[f"{kind} {way}"].keys() == want.keys()
        for name, x in rank[f"{kind} {way}"].items():
            torch.testing.assert_close(
                x, want[name], rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
def test_only_projections_are_narrowed(found: list[dict]):
    """And sharded parameters keep their mark."""
    own = dict.fromkeys(("A_log", "dt_bias", "conv_weight", "conv_bias", "o_norm"), F32)
    for rank in found:
        assert rank["dtypes"] == own | {"weight": BF16}
        assert rank["marked"] == {"A_log", "dt_bias"}


@pytest.mark.slow
def test_a_sharded_model_has_the_gradients_of_one_process(found: list[dict]):
    model = make_model()
    each = [model_gradients(copy.deepcopy(model), tokens_of(rank)) for rank in range(RANKS)]
    want = mean_of(each)
    for rank in found:
        for name, x in rank["model"].items():
            torch.testing.assert_close(x, want[name], rtol=1e-4, atol=1e-6)
        for name, x in rank["model bf16"].items():
            assert (x - want[name]).norm() <= 0.1 * want[name].norm(), name


def test_what_can_not_be_sharded_is_named():
    with pytest.raises(ValueError, match=r"^module must be a KimiDeltaAttention, or hold one; got Linear"):
        shard_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^module must be in torch.float32.*; got conv_weight in torch.bfloat16"):
        shard_attention(make_layer(BF16))
