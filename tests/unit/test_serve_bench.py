"""The judges of `benchmarks/serve`: its float64 layer, what passes, its tables, and processes that take turns."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

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
    x = F.pad(rows["mixed"].double().T, (3, 0))[None]
    x = F.silu(F.conv1d(x, layer.conv1d.weight.double(), groups=3 * H * D))[0].T
    q, k, v = (part.reshape(T, H, D) for part in x.split(H * D, 1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g, rate = rows["g"].double() + layer.dt_bias.double().view(H, D), layer.A_log.double().exp()[:, None]
    g = -rate * F.softplus(g) if bound is None else bound * torch.sigmoid(rate * g)
    S, out = torch.zeros(H, D, D, dtype=torch.float64), []
    for t in range(T):
        S = S * g[t].exp()[..., None]
        new = rows["beta"][t].double().sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + k[t][..., None] * new[:, None]
        out.append(torch.einsum("hk,hkv->hv", q[t], S) * D**-0.5)
    o = torch.stack(out)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight * rows["z"].double().sigmoid()
    torch.testing.assert_close(agree.exact(layer, rows, heads=1), o, rtol=1e-9, atol=1e-9)


def reports(error: float, apart: float = 0.0, missing: int = 0) -> dict:
    def of(error: float, score: float, missing: int = 0) -> dict:
        layer = {"error": error, "late": None, "worst": 0.1, "tokens": 10, "missing": missing}
        scores = {"together": [[1.0, score]], "alone": [[1.0, score + 0.01]]}
        return {"parts": {"prompts": {"layers": [layer]}}, "scores": scores}

    return {"k3:off": of(1e-3, 2.0), "k3:on": of(error, 2.0 + apart, missing)}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"error": 0.9e-3}, 0),
        ({"error": 1.04e-3}, 1),  # the mean
        ({"error": 1.1e-3}, 2),
        ({"error": 0.9e-3, "missing": 1}, 1),
        ({"error": 0.9e-3, "apart": 0.1}, 2),
        ({"error": float("nan")}, 2),
    ],
)
def test_what_passes(changes: dict, wrong: int):
    import agree

    rows, logs = agree.compared(reports(**changes))
    assert len(agree.passes(rows, logs)) == wrong
    assert agree.table(rows, logs).count("| k3 |") == 3


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


CHILD = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import together
case = sys.argv[sys.argv.index("--child") + 1]
if case == "bad:on":
    raise SystemExit("no engine")
print("Triton kernel JIT compilation during inference: decode_kernel. This", flush=True)
together.serve_lines(case, sys.argv[1], lambda line: {{"rows": ["tokens/s"]}} if line == "rows" else {{"found": line + case}})
"""


def test_processes_start_together_and_answer_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    import together

    program = tmp_path / "program.py"
    program.write_text(CHILD)
    monkeypatch.setattr(sys, "argv", [str(program)])
    until = time.monotonic() + 60
    workers, said = together.start(["k3:off", "k3:on", "bad:on"], [str(tmp_path)], str(tmp_path), until)
    assert list(said) == ["k3:off", "k3:on"] and "no engine" in capsys.readouterr().out
    import times

    kept: list[dict] = []
    times.in_turn(workers, until, 0, kept.append)
    expected = {"off": "tokens/sk3:off", "on": "tokens/sk3:on", "scenario": "k3", "row": "tokens/s", "wave": 0}
    assert kept == [expected] * times.REPEATS["tokens/s"]
    for worker in workers:
        assert worker.compiled() == ["decode_kernel"]
        worker.end()
        assert worker.ask("times", until) is None
