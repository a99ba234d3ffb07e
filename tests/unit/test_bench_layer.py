"""The benchmark of the layer without a GPU: rows, contenders, truths, bounds, table and plot."""

from __future__ import annotations

import importlib
import inspect
import threading

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import flashdelta as fd
from flashdelta.tools.bench import layer, report, tuning
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import PEERS, Setup
from flashdelta.tools.bench.runner import run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.views import PLOTS, VIEWS
from flashdelta.tools.bench.workloads import LAYER, TRAINED, layer_call_row, layer_step_row

from ..support.timers import FakeTimer

CPU = torch.device("cpu")
SMALL = {"H": 2, "HV": 2, "K": 32, "V": 32, "T": 70}
STEP = {"K": 32, "V": 32}
ROWS = [
    *(layer_step_row(3, 2, state, "fits a CPU", **STEP) for state in ("fp32", "bf16")),
    layer_call_row("train", "fits a CPU", "all", TRAINED, **SMALL),
    layer_call_row("train packed", "fits a CPU", "all", **SMALL, lengths=(33, 0, 20)),
    *(
        layer_call_row(f"{part} {backward}", "fits a CPU", part, **SMALL, backward=backward)
        for part in ("convolution", "norm")
        for backward in (False, True)
    ),
    layer_call_row("prefill, norm", "fits a CPU", "attention", **SMALL),
]


def convolution(x, weight, bias=None, activation=None, cu_seqlens=None):
    return fd.short_convolution(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens, backend="reference")


def convolution_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    rows = torch.cat([cache[..., 1:], x.mT], dim=-1)
    cache.copy_(rows)
    y = (rows.float() * weight.float()).sum(-1)
    return torch.nn.functional.silu(y).to(x.dtype)[:, None], cache


def gate(g, A_log=None, dt_bias=None, lower_bound=None):
    rate = A_log.exp()[:, None]
    return lower_bound * (rate * (g.float() + dt_bias.view(g.shape[2:]))).sigmoid()


def decode(*, inplace_final_state, use_beta_sigmoid_in_kernel, out, **call):
    assert inplace_final_state and use_beta_sigmoid_in_kernel
    assert all(call[name].is_contiguous() for name in ("q", "k", "v", "g", "beta"))
    fd.recurrent_kda(**call, beta_is_logit=True, output=out, backend="reference")


def norm(x, g, weight, bias, activation="swish", eps=1e-6):
    return fd.gated_rms_norm(x, g, weight, eps=eps, activation=activation, backend="reference")


def chunk(**call):
    return fd.chunk_kda(**call, backend="reference")


STAND_INS = {
    "fla": chunk,
    "fla_conv": convolution,
    "fla_conv_update": convolution_update,
    "fla_gate": gate,
    "fla_decode": decode,
    "fla_norm": norm,
}


def measure(tmp_path, rows=ROWS, peers=STAND_INS):
    torch.manual_seed(0)  # steps are drawn from the default generator
    ceilings = {"copy_tb_s": 4.3, "gemm_tflop_s": 700.0}
    sizes = {"pool_bytes": 2**20, "graph_bytes": 2**17, "launches": 4, "host_calls": 2}
    setup = Setup(
        CPU, FakeTimer(2.0), Effort(rounds=3, warmup_ms=0.0), "reference", peers=peers, ceilings=ceilings, **sizes
    )
    return run(BENCHMARKS["layer"], setup, tmp_path / "results.json", rows)


@pytest.mark.slow
def test_every_contender_is_right_and_timed(tmp_path):
    document = measure(tmp_path)
    assert report.failures(document) == []
    for row in document["rows"][:2]:
        for name in ("ours", "chain", "bare", "fla", "fla_gated"):
            assert row[name]["problem"] is None, (name, row[name])
            assert row[name]["ms"]["median"] == pytest.approx(2.0 / row["launches"])
        assert row["speedup"] == row["chain_ratio"] == 1.0 and [*row["ours"]["error"]] == ["o", "state"]
        assert row["ours"]["error"]["o"] < 2e-3
    for row in document["rows"][2:4]:
        assert row["fla"]["problem"] is None and [*row["fla"]["error"]] == [*layer.LEAVES]
        assert max(row["ours"]["error"].values()) < 1e-2
    names = [[*row["ours"]["error"]] for row in document["rows"][4:]]
    assert names == [["o"], ["x", "weight"], ["o"], ["x", "z", "weight"], ["o"]]
    for row in document["rows"][4:8]:
        assert row["copy"]["problem"] is None and row["copy"]["sustained_ms"] == row["ours"]["sustained_ms"]
    assert document["rows"][-1]["norm_share"] == 0.0
    text = report.show(document, VIEWS["layer"], wide=True)
    assert all(row["name"] in text for row in document["rows"]) and "single operators/ours, bf16: 1.00x" in text


@pytest.mark.parametrize("part", ["convolution", "norm", "step"])
def test_a_wrong_kernel_is_not_timed(tmp_path, monkeypatch, part):
    name = {"convolution": "short_convolution", "norm": "gated_rms_norm", "step": "fused_kda_decode"}[part]
    right = getattr(fd, name)

    def wrong(*args, **call):
        found = right(*args, **call)
        first = found[0] if isinstance(found, tuple) else found
        if first.dtype == torch.bfloat16:
            first.mul_(1.1) if not first.requires_grad else None
        return found

    monkeypatch.setattr(fd, name, wrong)
    rows = ROWS[:1] if part == "step" else [row for row in ROWS if row.name == f"{part} False"]
    (row,) = measure(tmp_path, rows)["rows"]
    assert row["ours"]["problem"].startswith("wrong"), row["ours"]


def test_without_fla_ours_are_timed_alone(tmp_path):
    for row in measure(tmp_path, ROWS[:3], peers={"fla": "FLA is not here"})["rows"]:
        assert row["ours"]["problem"] is None and row["fla"]["problem"] in ("FLA is not here", "not asked for")


def test_bounds_are_over_the_step_and_over_flas_kernels():
    rows = {row.name: [bound.words for bound in row.bounds] for row in LAYER}
    assert len(rows) == len(LAYER) == 47
    assert rows["decode N32 H12 fp32"] == ["<= 1.12x a bare step", "<= 0.8 of FLA's"]
    assert rows["decode N256 H96 bf16"] == ["<= 1.18x a bare step", "<= 0.65 of FLA's"]
    assert rows["decode N1 H32 bf16"] == ["<= 1.25x a bare step or 1.5 us more", "<= 0.5 of FLA's"]
    assert rows["train T8192 H32"] == ["<= 0.45 of FLA's", "<= 0.6 of its memory beyond results"]
    assert rows["norm backward T4096"] == [">= 85% of a copy's rate"] and rows["prefill T8192 H32, norm"] == []
    assert all(layer.layer_bytes(row.call) >= 32 * 2**20 for row in LAYER if row.table in ("convolution", "norm"))


@pytest.mark.parametrize(
    ("us", "met"), [((10.0, 8.0), True), ((10.1, 8.0), False), ((3.4, 2.0), True), ((3.6, 2.0), False)]
)
def test_few_sequences_may_take_a_little_more(us, met):
    row = {name: {"ms": {"median": x / 1e3}} for name, x in zip(("ours", "bare"), us)}
    bound = next(row for row in LAYER if row.name == "decode N1 H32 fp32").bounds[0]
    assert bound.met(row, []) is met and bound.met({}, []) is None


@pytest.mark.parametrize(("ours", "met"), [(0.020, False), (0.0175, True)])
def test_kernels_around_attention_are_held_to_a_copy(ours, met):
    row = {"ours": {"sustained_ms": ours}, "copy": {"sustained_ms": 0.015}, "share_of_floor": 0.5}
    (bound,) = next(row for row in LAYER if row.name == "norm T1536").bounds
    assert bound.met(row, []) is met and bound.met({"share_of_floor": 1.0}, []) is None


def test_memory_is_beyond_inputs_and_results():
    row = {"result_bytes": 10, "table": "train", "ours": {"peak_above_bytes": 40}, "fla": {"peak_above_bytes": 60}}
    found = layer.layer_extra(row, {})
    assert found == {"beyond_bytes": {"ours": 30, "fla": 50}}
    assert TRAINED[1].met(row | found, []) is True


def test_bytes():
    step, forward, backward = ROWS[0].call, ROWS[4].call, ROWS[7].call
    assert layer.layer_bytes(step) == 2 * 3 * 2 * 32 * 32 * 4
    assert layer.layer_bytes(forward) == 2 * 70 * (6 * 32) * 2
    assert layer.layer_bytes(backward) == 5 * 70 * (2 * 32) * 2


def test_plot_has_a_bar_a_contender(tmp_path, drawn):
    kernels = [{"kernel": "step_kernel", "ms": 0.02, "launches": 1.0}, {"kernel": "norm", "ms": 0.01, "launches": 1.0}]
    row = {"name": "decode N128 H32 fp32", **{x: {"kernels": kernels} for x in ("fla", "chain", "ours", "bare")}}
    document = {"date": "2026-11-24", "environment": {"gpu": {"name": "NVIDIA H200"}}}
    PLOTS["layer"].draw({**document, "rows": [{"name": "none", "ours": {}}, row]}, tmp_path / "plot.svg")
    (axes,) = drawn
    assert [x.get_text() for x in axes.get_xticklabels()] == [
        "FLA",
        "single operators",
        "one launch",
        "attention alone",
    ]
    assert "decode N128" in axes.get_title() and axes.get_title().endswith("\nH200, 2026-11-24")
    assert len(axes.patches) == 8
    assert max(patch.get_y() + patch.get_height() for patch in axes.patches) == pytest.approx(30.0)
    with pytest.raises(ValueError, match="got no row with the kernels of FLA and single operators"):
        PLOTS["layer"].draw({"rows": []}, tmp_path / "plot.svg")


@pytest.mark.slow
@pytest.mark.parametrize("name", layer.PEERS)
def test_flas_functions_take_these_arguments(name):
    pytest.importorskip("fla")
    theirs = inspect.signature(getattr(importlib.import_module(PEERS[name][0]), PEERS[name][1])).parameters
    if name not in ("fla", "fla_decode"):
        assert theirs.keys() >= inspect.signature(STAND_INS[name]).parameters.keys()


def test_fla_chooses_its_kernels_for_each_batch():
    @triton.autotune([triton.Config({}, num_warps=1)], key=["n"], cache_results=True)
    @triton.jit
    def causal_conv1d_update_kernel(x, n):
        pass

    causal_conv1d_update_kernel.cache[1] = "the form of one sequence"
    layer.tune_anew()
    assert not causal_conv1d_update_kernel.cache and not causal_conv1d_update_kernel.cache_results
    assert causal_conv1d_update_kernel.do_bench.keywords == layer.TUNED_MS


FORMS = 3


class Compiled:
    """A kernel whose forms must be compiled at the same time, the second of which can't be."""

    def __init__(self):
        self.together = threading.Barrier(FORMS, timeout=30)
        self.made, self.timed = [], []

    def run(self, x, *, grid, num_warps, warmup, **options):
        if not warmup:
            self.timed.append(num_warps)
        else:
            self.made.append(num_warps)
            self.together.wait()
            if num_warps == 2:
                raise RuntimeError("too many registers")


def test_forms_of_a_kernel_are_compiled_together_and_timed_one_by_one():
    configs = [triton.Config({}, num_warps=2**i) for i in range(FORMS)]

    @triton.autotune(configs, key=["x"])
    @triton.jit
    def tuner(x):
        pass

    kernel = Compiled()
    tuner.fn, tuner.nargs = kernel, {"x": 1}
    tuner._do_bench = lambda call, quantiles: call()
    plain = Autotuner._bench
    with tuning.compiled_together(torch.device("cuda")):
        for config in configs:
            tuner._bench(1, config=config, grid=(1,), warmup=False)
        assert sorted(kernel.made) == kernel.timed == [1, 2, 4]
    assert Autotuner._bench is plain
    with tuning.compiled_together(CPU):
        assert Autotuner._bench is plain
