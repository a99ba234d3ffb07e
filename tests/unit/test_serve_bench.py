"""The judge of `benchmarks/serve`: its float64 layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashdelta as fd

FOLDER = Path(__file__).parents[2] / "benchmarks" / "serve"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no benchmarks in this tree")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("bound", (-5.0, None))
def test_the_layer_in_float64_is_the_recurrence(bound: float | None):
    import agree

    T, H, D = 70, 2, 32
    torch.manual_seed(0)
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.randn(3 * H * D, 1, 4)),
        A_log=torch.rand(H),
        dt_bias=torch.randn(H * D) - 3,
        gate_lower_bound=bound,
        o_norm=SimpleNamespace(eps=1e-5, weight=torch.rand(D)),
    )
    rows = {"mixed": torch.randn(T, 3 * H * D), "beta": torch.randn(T, H), "key": torch.arange(T)}
    rows |= {name: torch.randn(T, H, D) for name in "gz"}
    exact = {name: x.double()[None] for name, x in rows.items()}
    x, _ = fd.short_convolution(exact["mixed"], layer.conv1d.weight.double())
    q, k, v = (part.reshape(1, T, H, D) for part in x.split(H * D, 2))
    gate = {"A_log": layer.A_log.double(), "dt_bias": layer.dt_bias.double(), "lower_bound": bound}
    gate |= {f"use_{x}_in_kernel": True for x in ("qk_l2norm", "gate", "beta_sigmoid")}
    o, _ = fd.fused_recurrent_kda(q, k, v, exact["g"], exact["beta"], **gate)
    o = fd.gated_rms_norm(o, exact["z"], layer.o_norm.weight.double(), eps=1e-5)[0]
    torch.testing.assert_close(agree.exact(layer, rows, heads=1), o, rtol=1e-9, atol=1e-9)


def test_gains_are_ratios_of_neighbours():
    import times

    pairs = {"step of 1": [(2.0, 1.0), (4.0, 2.0), (3.0, 3.0)], "tokens/s": [(10.0, 30.0)]}
    samples = [
        {"scenario": "k3", "row": row, "wave": wave, "off": off, "on": on}
        for wave in range(3)
        for row, x in pairs.items()
        for off, on in x
    ]
    step, rate = times.summary(samples)
    assert step["on"]["gain"] == 2.0 and rate["on"]["gain"] == 3.0 and step["on"]["processes"] == 3
    assert "| k3 | step of 1, ms | 3 | 2 | 2.00 (2.00 to 2.00) |" in times.table([step, rate])
