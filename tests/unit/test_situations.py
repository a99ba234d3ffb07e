"""Situations that users ran into, each rebuilt: of the layer, its caches and its plans, on a CPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashdelta as fd
from flashdelta.nn.heads import SPLIT
from flashdelta.tools.files import in_bytes

from ..support.forked import imported_once
from ..support.layers import make_layer, rows
from ..support.oracle import relative_error
from ..support.processes import on_processes
from ..support.situations import Situation, every

F32 = torch.float32


class Int8(nn.Module):
    """A projection with weights in eight bits."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.data.abs().amax() / 127
        self.weight = nn.Parameter((linear.weight.data / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


def quantised(dynamic: bool) -> None:
    layer = make_layer(F32).eval()
    if dynamic:
        layer = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    else:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer, name, Int8(getattr(layer, name)))
    pool, x = layer.make_pool(4), rows(2, 1, dtype=F32, device="cpu")
    assert (pool.conv.dtype, pool.state.dtype) == (F32, F32)
    assert layer.explain(1, 100).chosen == "reference"
    with torch.no_grad():
        layer(x, pool=pool, slots=torch.tensor([0, 1]))
        want, _ = layer(x)
        pool = layer.make_pool(4)
        found, _ = layer(x, pool=pool, slots=torch.tensor([2, 0]))
    torch.testing.assert_close(found, want)


def saved() -> None:
    layer = make_layer(F32)
    _, cache = layer(rows(1, 9, dtype=F32, device="cpu"), return_cache=True)
    for kept in (cache, layer.make_pool(3)):
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is type(kept) and torch.equal(loaded.conv, kept.conv)


def positional() -> None:
    x = [torch.randn(1, 4, 2, 32) for _ in "qkvg"] + [torch.rand(1, 4, 2)]
    for op in (fd.chunk_kda, fd.fused_recurrent_kda, fd.recurrent_kda):
        with pytest.raises(TypeError, match=r"takes q, k, v, g, beta by position and .* by keyword, such as scale="):
            op(*x, 0.3)
        op(*x, scale=0.3, gate="logsigmoid")


def refused(*cases: tuple[Callable[[], object], str]) -> None:
    for call, said in cases:
        with pytest.raises((ValueError, TypeError), match=f"^{said}"):
            call()


def own_names() -> None:
    layer, x = make_layer(F32).requires_grad_(False), rows(2, 20, dtype=F32, device="cpu")
    _, cache = layer(x, return_cache=True)
    pool, none = layer.make_pool(4), torch.zeros(2, dtype=torch.bool)
    half = replace(pool, state=pool.state.half())
    for y in (x, x[:, :4], x[:, :1]):
        for given, said in (
            ({"pool": pool, "slots": torch.tensor([0, 9])}, "slots must be below 4, the number of slots; got 9"),
            ({"pool": pool, "slots": torch.tensor([2, 2])}, "slots must be distinct: .* index 2"),
            ({"pool": pool, "slots": none}, "slots must be of dtype"),
            ({"pool": half, "slots": torch.tensor([0, 1])}, "pool.state must be of dtype .*; got float16"),
            ({"cache": replace(cache, state=cache.state.half())}, "cache.state must be of dtype"),
            ({"cache": replace(cache, conv=cache.conv.half())}, "cache.conv must be of dtype"),
        ):
            refused((lambda y=y, given=given: layer(y, **given), said))


def unread() -> None:
    layer, x = make_layer(F32), rows(2, 5, dtype=F32, device="cpu")
    refused(
        (lambda: layer(x, null_index="non_positive"), "null_index must be 'negative' without pool; got 'non_positive'"),
        (lambda: make_layer(F32, gate="softplus", lower_bound=-3.0), "lower_bound must be None .*; got -3.0"),
        (lambda: make_layer(F32, gate="logsigmoid", lower_bound=-5.0), "lower_bound must be None .*; got -5.0"),
    )
    assert make_layer(F32).lower_bound == -5.0 and make_layer(F32, gate="softplus").lower_bound is None


def other_inputs() -> None:
    layer, x = make_layer(F32), rows(2, 5, dtype=F32, device="cpu")
    refused(
        (lambda: layer(x.double()), "x must be in the projections' dtype torch.float32; got torch.float64"),
        (lambda: layer(x.long()), "x must be in the projections' dtype torch.float32; got torch.int64"),
        (lambda: layer(x.to("meta")), "conv_weight must be on x's device meta; got device cpu"),
        (lambda: layer(x.tolist() * 1000), r"x must be a torch.Tensor; got \[.{0,80}\.\.\. \(list\)"),
        (lambda: layer.explain(-1, 3), "batch must be at least 0; got -1"),
        (lambda: layer.explain(1, "3"), "tokens must be an int; got '3'"),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.half())[0].isfinite().all()


def default_device() -> None:
    layer, x = make_layer(F32), rows(1, 9, dtype=F32, device="cpu")
    want, _ = layer(x)
    torch.set_default_device("cpu")  # a mode, which every operator passes
    try:
        found, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, want)


def wide_filters() -> None:
    layer = make_layer(torch.bfloat16)
    layer.conv_weight.data = layer.conv_weight.data.float()
    assert layer.explain(1, 100).chosen == "reference"
    assert layer(rows(1, 9, dtype=torch.bfloat16, device="cpu"))[0].dtype == torch.bfloat16


def no_model(file: Path) -> None:
    model = fd.nn.KdaLanguageModel(fd.nn.LanguageModelConfig(hidden_size=32, num_layers=1, num_heads=1, num_v_heads=1))
    fd.nn.save_model(model, file)
    whole = file.read_bytes()
    with safe_open(str(file), framework="pt") as saved:
        metadata = saved.metadata()
    for content in (b"", b"no tensors", whole[: len(whole) // 2]):
        file.write_bytes(content)
        refused(
            (lambda: fd.nn.load_model(file), "path must be a file that save_model wrote; got '.*no safetensors file")
        )
    save_file({"embedding.weight": torch.zeros(3, 32)}, str(file), metadata)
    refused(
        (lambda: fd.nn.load_model(file), "path must be a file that save_model wrote; got '.*weights of another shape")
    )


def model_inputs() -> None:
    config = fd.nn.LanguageModelConfig(hidden_size=32, num_layers=2, num_heads=1, num_v_heads=1)
    model, tokens = fd.nn.KdaLanguageModel(config).requires_grad_(False), torch.zeros(2, 3, dtype=torch.int64)
    own, pools = {"slots": torch.tensor([0, 1])}, model.make_pools(3)
    refused(
        (lambda: model(tokens, pools=pools[:1], **own), "pools must be one per layer = 2; got 1"),
        (lambda: model(tokens, pools=(), **own), "pools must be one per layer = 2; got 0"),
        (lambda: model(tokens.float()), "tokens must be of dtype int32 or int64; got torch.float32"),
        (lambda: model(tokens.tolist()), "tokens must be a torch.Tensor; got list"),
        (lambda: model(tokens + 96), "tokens must be from 0 to 95; got 96"),
        (lambda: model(tokens - 1), "tokens must be from 0 to 95; got -1"),
        (lambda: model.generate(tokens, -1), "tokens must be at least 0; got -1"),
        (lambda: model.generate(tokens, 2.5), "tokens must be an int; got 2.5"),
        (lambda: model.generate(tokens, 1, temperature=float("nan")), "temperature must be a finite float"),
        (lambda: model.generate(tokens, 1, temperature="hot"), "temperature must be a float"),
        (lambda: fd.nn.KdaLanguageModel(replace(config, num_layers=0)), "num_layers must be at least 1; got 0"),
        (lambda: fd.nn.KdaLanguageModel(replace(config, mlp_size="3")), "mlp_size must be an int; got '3'"),
        (lambda: fd.nn.KdaLanguageModel(None), "config must be a LanguageModelConfig; got None"),
        (lambda: fd.nn.save_model(model, "x", torch.int8), "dtype must be a dtype of floats; got torch.int8"),
        (lambda: fd.nn.save_model(model, "."), "path must be a file that can be written; got '.'"),
        (lambda: fd.nn.load_model("x", device="nowhere"), "device must be a device such as cuda"),
        (lambda: fd.nn.load_model("x", dtype=torch.int8), "dtype must be a dtype of floats; got torch.int8"),
        (lambda: fd.nn.import_weights(3), "weights must be a state dict; got 3"),
        (lambda: fd.nn.export_weights(model, "fla"), "layer must be a KimiDeltaAttention; got KdaLanguageModel"),
        (lambda: fd.explain(fd.commit, *[tokens] * 4, device="nowhere"), "device must be a device such as cuda"),
    )


def no_file() -> None:
    with TemporaryDirectory() as folder:
        no_model(Path(folder) / "model.safetensors")


def sizes() -> None:
    said = {0: "0 bytes", 1: "1 byte", 40: "40 bytes", 2**10: "1.0 KiB", 2**20: "1.0 MiB"}
    assert {size: in_bytes(size) for size in said} == said


# ---- padding --------------------------------------------------------------------------------------------------------------

LENGTHS = (7, 19, 0, 12)


def padded(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[B, T, D]` with NaN-free noise as padding, the mask, and the same rows packed."""
    T = max(LENGTHS)
    x, at = rows(len(LENGTHS), T, dtype=F32, device="cpu"), torch.arange(T)
    mask = torch.stack([at < n if side == "right" else at >= T - n for n in LENGTHS])
    if side == "both":
        mask = torch.stack([(at >= 3) & (at < 3 + n) for n in (7, 16, 0, 12)])
    return x, mask, x[mask][None]


def masked(side: str) -> None:
    layer = make_layer(F32)
    x, mask, packed = padded(side)
    offsets = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    want, cache = layer(packed, cu_seqlens=offsets, return_cache=True)
    found, own = layer(x, attention_mask=mask.long(), return_cache=True)
    assert torch.equal(found[mask], want[0]) and not found[~mask].any()
    assert torch.equal(own.state, cache.state) and torch.equal(own.conv, cache.conv)
    gradients = [torch.autograd.grad(y.square().sum(), [*layer.parameters()]) for y in (want, found)]
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(*gradients))
    alone = [layer(x[b : b + 1, mask[b]])[0][0] for b in range(len(x)) if mask[b].any()]
    assert relative_error(found[mask], torch.cat(alone)) < 2e-6
    # and a token more of each: a mask of all tokens so far
    token = rows(len(LENGTHS), 1, dtype=F32, device="cpu")
    longer = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.bool)], 1)
    again, _ = layer(token, own, attention_mask=longer, return_cache=True)
    assert relative_error(again, layer(token, cache)[0]) < 2e-6


def no_token() -> None:
    layer, x = make_layer(F32), rows(2, 5, dtype=F32, device="cpu")
    y, cache = layer(x, attention_mask=torch.zeros(2, 5, dtype=torch.bool), return_cache=True)
    assert y.shape == x.shape and not y.any() and not cache.state.any()


def masks_refused() -> None:
    layer, x, mask = make_layer(F32), rows(2, 5, dtype=F32, device="cpu"), torch.ones(2, 5)
    cases = (
        ({"attention_mask": mask}, TypeError, "attention_mask must be bool or an integer"),
        ({"attention_mask": [1]}, TypeError, "attention_mask must be a torch.Tensor"),
        ({"attention_mask": mask[:, :4].bool()}, ValueError, r"attention_mask must be \[B, >= T\] = \[2, >= 5\]"),
        ({"attention_mask": mask.bool()[:, None]}, ValueError, "attention_mask must be"),
        ({"attention_mask": mask.bool(), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "got cu_seqlens"),
    )
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            layer(x, **given)


# ---- heads over ranks -------------------------------------------------------------------------------------------------

KINDS = {"bounded": {}, "softplus": {"gate": "softplus", "output_gate_bias": True}, "narrow": {"gate": "logsigmoid"}}
OFFSETS = torch.tensor([0, 13, 40], dtype=torch.int32)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def by_heads(layer: fd.nn.KimiDeltaAttention, ranks: int) -> fd.nn.KimiDeltaAttention:
    plan = {name: ColwiseParallel() for name in SPLIT} | {"o_proj": RowwiseParallel()}
    return parallelize_module(layer, init_device_mesh("cpu", (ranks,)), plan)


def run_layer(layer: fd.nn.KimiDeltaAttention) -> dict[str, Tensor]:
    """Outputs of every way to run it, and gradients."""
    x = rows(1, 40, dtype=F32, device="cpu").requires_grad_()
    y, _ = layer(x, cu_seqlens=OFFSETS)
    y.square().sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()}
    with torch.no_grad():
        first, cache = layer(x[:, :30], return_cache=True)
        found |= {"first": first, "then": layer(x[:, 30:], cache)[0]}
        pool, slots = layer.make_pool(3), torch.tensor([2])
        layer(x[:, :30], pool=pool, slots=slots, has_initial_state=torch.tensor([False]))
        found["step"] = layer(x[:, 30:31], pool=pool, slots=slots)[0]
    assert layer.explain(1, 100).chosen == "reference"
    return found


def refusals(ranks: int) -> list[str]:
    found = []
    layer, mesh = make_layer(F32), init_device_mesh("cpu", (ranks,))
    plans = (
        parallelize_module(layer, mesh, {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}),
        parallelize_module(make_layer(F32), mesh, {name: ColwiseParallel() for name in SPLIT}),
        by_heads(make_layer(F32, num_heads=1, num_v_heads=2), ranks),
    )
    for plan in plans:
        try:
            plan(rows(1, 9, dtype=F32, device="cpu"))
        except ValueError as error:
            found.append(str(error))
    return found


def work(group: dist.ProcessGroup) -> dict[str, object]:
    torch.set_num_threads(1)
    layers = {name: by_heads(make_layer(F32, **kind), group.size()) for name, kind in KINDS.items()}
    return {name: run_layer(layer) for name, layer in layers.items()} | {"refusals": refusals(group.size())}


def tensor_parallel() -> None:
    with imported_once():
        ranks = on_processes(2, work)
    for name, kind in KINDS.items():
        want = run_layer(make_layer(F32, **kind))
        for found in ranks:
            assert found[name].keys() == want.keys()
            for what, x in want.items():
                assert relative_error(found[name][what], x) < 1e-5, (name, what)
    for found in ranks:
        columns, rows, heads = found["refusals"]
        assert "q_proj, k_proj, v_proj, f_proj.1, b_proj, g_proj.1 column-wise, o_proj row-wise" in columns
        assert "and no such plan" in rows
        assert heads.startswith("ranks must divide the number of heads; got 2 ranks and 1 heads of q_proj")


ROWS = [
    Situation("quantised projections", "SGLang #36507, QLoRA: a pool of int8 windows", lambda: quantised(False)),
    Situation("dynamic quantisation", "make_pool and explain where a weight is a method", lambda: quantised(True)),
    Situation("saved caches", "jundot/omlx #825: torch.load of a prompt cache with its default", saved),
    Situation("scale by position", "calls written for FLA, whose scale comes sixth", positional),
    Situation("names", "the layer's slots, pool and cache go by its own names in refusals of operators", own_names),
    Situation("unread arguments", "a null index without a pool, a bound beside a gate without one", unread),
    Situation("inputs of another kind", "a dtype, a device, a list instead of a tensor: refused by name", other_inputs),
    Situation("a default device", "torch.compile of the layer under torch.set_default_device", default_device),
    Situation("inputs of the model", "too few pools; tokens, sizes, files and devices by name", model_inputs),
    Situation("float32 filters", "explain of a layer in bfloat16 whose filters stay in float32", wide_filters),
    Situation("no model", "load_model of what is no safetensors file, a torn one, or one of other weights", no_file),
    Situation("small sizes", "40 bytes are no 0.0 KiB", sizes),
    Situation("left padding", "FLA's attention_mask: equal to packed and to each alone", lambda: masked("left")),
    Situation("right padding", "the same on the other side", lambda: masked("right")),
    Situation("padding around", "the same on both", lambda: masked("both")),
    Situation("nothing but padding", "a batch without a token: zeros, and empty states", no_token),
    Situation("bad masks", "a float mask, too few columns, offsets beside it: refused by name", masks_refused),
    Situation("tensor parallel", "torchtitan #4499, Automodel #3246: heads over two ranks, as on one", tensor_parallel),
]


@every(ROWS)
def test_what_users_ran_into(row: Situation) -> None:
    row.check()
