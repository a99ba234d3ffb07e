"""The exported C library on the GPU against float64 and the Python functions."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashdelta as fd
from flashdelta.problem.operations import PRECISIONS
from flashdelta.tools.export.bindings import Library

from ..support.cases import BF16, Case
from ..support.exports import ROOT
from ..support.oracle import TOLERANCE, assert_close, relative_error, same_bits
from ..support.prefills import CASES, INPUTS, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth
from ..support.shared import folder_of_run
from .c_library import GIVEN, c_decode, c_prefill, can_build, library_for_this_gpu
from .calls import assert_same_bits, captured, case_and_dtype, in_turn
from .test_prefill import tokens_of

pytestmark = pytest.mark.gpu

DECODE_TOLERANCE = 1e-2
"""For single tokens in bfloat16, as in `oracle.TOLERANCE_FOR_FEW`."""


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported and built by the first worker that asks."""
    if not can_build():
        pytest.skip(f"no CMake and C compiler here, and no {GIVEN}")
    shared = folder_of_run(tmp_path_factory)
    with open(shared / "gpu_export.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / "gpu_export" / "build" / "libflashdelta.so"
        return done if done.exists() else library_for_this_gpu(shared / "gpu_export")


@pytest.fixture(scope="session")
def library(library_path: Path) -> Library:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context current
    return Library(str(library_path))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("case", "size"), in_turn([x for x in CASES if x.T > 0][::2], *SIZES), ids=case_and_dtype)
def test_f32(library: Library, case: Case, size: tuple[int, int, int], precision: str):
    case = sized(case, size)
    call = prefill_call(case, "cuda")
    found = c_prefill(library, call, precision=1 + ("tf32x3", "ieee").index(precision))
    hold(case, tuple(found.values()), truth(call))
    for got, want in zip(found.values(), fd.kda_prefill(**call, precision=precision)):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("gate", ["none", "logsigmoid"])
def test_bf16_then_decode(library: Library, size: tuple[int, int, int], gate: str):
    """A prompt, whose final state a step of decoding starts from; two rows of two heads are two sequences."""
    case = sized(replace(PLAIN if gate == "none" else LOGITS, B=2, T=131), size)
    call = prefill_call(case, "cuda")
    for name in ("q", "k", "v"):
        call[name] = call[name].bfloat16().float()
    prompt = tokens_of(call, slice(-1))
    K, V, _ = size
    # slots lie further apart than they must
    pool = torch.full((5, 2 * V * K + 48), torch.nan, device="cuda")[:, : 2 * V * K].view(5, 2, V, K)
    state = torch.full((2, 2, V, K), torch.nan, device="cuda")
    found = c_prefill(library, prompt, "bf16", final_state=state)
    options = {"gate": gate, "output_final_state": True, "state_v_first": True, "backend": "reference"}
    want, last = fd.fused_recurrent_kda(**{name: call[name].transpose(1, 2).double() for name in INPUTS}, **options)
    assert_close("o", found["o"], want[:, :-1].transpose(1, 2), TOLERANCE[BF16])
    pool[[3, 1]] = state
    indices = torch.tensor([3, 1, -1, 7], dtype=torch.int32, device="cuda")
    step = {name: torch.cat([call[name][:, :, -1]] * 2) for name in INPUTS}
    step |= {name: step[name].to(BF16) for name in ("q", "k", "v")}
    untouched = pool[[0, 2, 4]].clone()
    o = c_decode(library, step | {"states": pool, "state_indices": indices}, gate)
    assert_close("o of the step", o[:2], want[:, -1], DECODE_TOLERANCE)
    assert o[2:].eq(0).all() and same_bits(pool[[0, 2, 4]], untouched)
    assert_close("pool", pool[[3, 1]], last, TOLERANCE[BF16])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_carried_states_make_one_sequence_of_two(library: Library, kind: str):
    call = prefill_call(replace(PLAIN, T=150), "cuda")
    whole_state, state = (torch.full((1, 2, 64, 64), torch.nan, device="cuda") for _ in range(2))
    whole = c_prefill(library, call, kind, final_state=whole_state)["o"]
    halves = [tokens_of(call, part) for part in (slice(64), slice(64, 150))]
    first = c_prefill(library, halves[0], kind, final_state=state)["o"]
    second = c_prefill(library, halves[1], kind, initial_state=state.clone(), final_state=state)["o"]
    assert same_bits(torch.cat([first, second], dim=2), whole)
    assert same_bits(state, whole_state)


def test_graph_capture(library: Library):
    call = prefill_call(PLAIN, "cuda")
    want = c_prefill(library, call)
    graph, found = captured(lambda: tuple(c_prefill(library, call).values()))
    graph.replay()
    assert_same_bits(found, want.values())


def test_ctypes_example(library_path: Path):
    """It looks for FOLDER/build/libflashdelta.so."""
    if library_path.parent.name != "build":
        pytest.skip(f"{GIVEN} lies outside an export")
    folder = library_path.parent.parent
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "c" / "kda.py", folder], capture_output=True, text=True, timeout=300
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == 3
