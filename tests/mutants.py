"""Breaks the code in recorded ways, one at a time, and runs the tests that are to find each (`make mutants`).
The tests must pass before: one that fails anyway finds everything.

    python -m tests.mutants [-j N] [words]

By tests that fail then, a file in `tests/` or a node id: files in `src/flashdelta`, a text that stands there once, and the text
in its place. Rows are the ways in which a kernel, a rule or a replay can be wrong without anything else noticing: keep one for
each. `words` select rows by what they contain.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 1200  # seconds for the tests of a row
PIPELINE = "kernels/hopper/device/pipeline.py"

MUTANTS = {
    "gluon/test_restart.py": [
        ("kernels/hopper/device/tile_scheduler.py", "((slot - 1) * self.HV + head)", "(slot * self.HV + head)"),
        ("kernels/hopper/prepare.py", "return bound * 1.01 <= FORGOTTEN", "return bound <= 1e30"),
        ("kernels/hopper/prepare_steps.py", "K * gl.sum(products, axis=1)", "0.0 * gl.sum(products, axis=1)"),
        ("kernels/hopper/recurrence.py", "gl.where(i < tile.restarts, 0, done_count)", "done_count"),
        ("kernels/hopper/launch.py", "problem.has_pool or ", ""),
    ],
    "gluon/test_backward.py::test_gradients_are_those_of_the_reference": [
        ("kernels/stages/finish.py", "total_k += tl.load(heads_k", "total_k = tl.load(heads_k"),
        ("kernels/triton/reverse.py", "grad -= tl.dot(dv_new", "grad += tl.dot(dv_new"),
        ("kernels/triton/wy.py", "acc_beta += tl.sum(summand(Z, k_exp_g", "acc_beta -= tl.sum(summand(Z, k_exp_g"),
        ("kernels/shared/norms.py", "norm = 1.0 / tl.sqrt(total + L2_EPS)", "norm = 1.0 / tl.sqrt(total)"),
    ],
    "gluon/test_backward.py::test_few_ctas_change_no_bit": [
        ("kernels/hopper/wy.py", "wait_tiles(sums, phase)", "pass"),
        ("kernels/hopper/wy.py", "if HALFWAY:", "if not HALFWAY:"),
    ],
    "gluon/test_backward.py::test_gradients_of_sums": [
        ("kernels/stages/launch.py", '"num_accepted_tokens", "dht"),', '"num_accepted_tokens"),')
    ],
    "gluon/test_backward.py::test_wy_of_persistent_ctas": [
        ("kernels/hopper/device/tma.py", "fence_async_shared()", "pass"),
        ("kernels/hopper/wy.py", "tma.store_wait(0)\n            barrier()", "barrier()"),
        ("kernels/hopper/wy.py", "wait_tiles(outputs, phase)", "pass"),
        ("kernels/hopper/wy.py", "phase = next_phase(phase)", "pass"),
    ],
    "gluon/test_bounded.py": [
        ("kernels/triton/prepare_mma.py", "in_step >= column", "in_step > column"),
        ("kernels/triton/prepare_mma.py", "* onward * onward", "* onward"),
    ],
    "gluon/test_chunk.py::test_turns_change_no_bit": [
        ("kernels/hopper/prepare.py", "if tile == 0:", "if tile == -1:"),
        ("kernels/hopper/recurrence.py", "wait(semaphore - SLICES)", "pass"),
        ("kernels/hopper/recurrence.py", "signal(semaphore)", "pass"),
        (PIPELINE, "mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)", "pass"),
        (PIPELINE, "mbarrier.arrive(self.empty.index(stage), count=1)", "pass"),
        ("kernels/hopper/device/stream_k.py", "chunk1 * (k == 0)", "chunk1 * (k > 0)"),
    ],
    "gluon/test_decode.py": [
        ("kernels/triton/commit.py", "(count - 1) * row_step + inside", "0 * row_step + inside"),
        ("kernels/triton/commit.py", "records += (count - 1) * row_step", "pass"),
        ("kernels/triton/decode.py", "tl.fma(along_k, -norm_k, row_v", "tl.fma(along_k, norm_k, row_v"),
        ("kernels/triton/verify.py", "tl.where(pair_mask(0, COUNT), -A, 0.0)", "tl.where(pair_mask(0, COUNT), A, 0.0)"),
        ("kernels/shared/records.py", "records + K + at", "records + at"),
        ("kernels/hopper/commit.py", "i * (BV * K)", "0"),
    ],
    "gluon/test_fused.py": [
        ("kernels/triton/fused_decode.py", "(tap - 1) * place_stride, row", "tap * place_stride, row"),
        ("kernels/hopper/fused_decode.py", "(slot != guess) | (live != guessed)", "slot < 0"),
        ("kernels/hopper/fused_decode.py", "slot * target_pitch", "slot * (H * K * V)"),
    ],
    "gluon/test_layer.py": [
        ("kernels/triton/convolution.py", "tl.fma(w3, x0, tl.fma(w2, x1, p))", "tl.fma(w3, x1, tl.fma(w2, x0, p))"),
        ("kernels/triton/convolution.py", "read, begin, begin + offset,", "read, begin, end,"),
        ("kernels/triton/convolution.py", "s0 = tl.fma(p0, x3, s0)", "s0 = tl.fma(p0, x2, s0)"),
        ("kernels/triton/norm.py", "norm * (grad - normed * mean)", "norm * grad"),
        ("kernels/triton/sums.py", "mask=tap == TAPS", "mask=tap == TAPS - 1"),
        ("nn/attention.py", "return torch.where(covered[:, None, None], o, 0.0)", "return o"),
    ],
    "gluon/test_pool.py::test_chunk": [
        ("kernels/shared/sequences.py", "offset = tl.where(span < spans - 1, offset, length)", "pass"),
        ("kernels/shared/states.py", "(slot >= lowest) & (slot < slots)", "(slot >= 0) & (slot < slots)"),
    ],
    "gluon/test_portable.py::test_cases": [
        ("kernels/stages/copy.py", "(channel * channel_stride)", "channel"),
        ("kernels/triton/recurrence.py", "tile_v_new -= dot(left", "tile_v_new += dot(left"),
    ],
    "gluon/test_portable.py::test_chunks_and_their_gradients": [
        ("kernels/stages/finish.py", "K + tl.arange(0, K), total)", "K + tl.arange(0, K), 2.0 * total)"),
        ("kernels/triton/intra.py", "dG -= result * k_right", "dG += result * k_right"),
        ("kernels/triton/prepare.py", "return -dot(dot(inv_11, a_10", "return dot(dot(inv_11, a_10"),
        ("kernels/shared/gates.py", "lower_bound * s * (1.0 - s) * rate * grad", "lower_bound * s * (1.0 - s) * grad"),
        ("kernels/triton/sub_chunks.py", "X -= tl.where(row == r", "X += tl.where(row == r"),
    ],
    "gluon/test_prefill.py": [
        ("kernels/triton/output.py", "tl.trans(tile_qg), tile_o", "tl.trans(tile_qg), 0.0 * tile_o"),
        ("kernels/triton/decays.py", "low = x - high.to(tl.float32)", "low = x * 0.0"),
        ("kernels/shared/mma.py", 'acc = tl.dot(a_high, b_low, acc=acc, input_precision="tf32")', "pass"),
    ],
    "gluon/test_ranks.py": [
        ("kernels/stages/merge.py", "key[None, :] * K + key[:, None]", "key[:, None] * K + key[None, :]"),
        ("kernels/stages/merge.py", "if opened < 0:", "if opened < 1:"),
        ("kernels/stages/merge.py", "if goes_on | (begin == end)", "if (begin == end)"),
    ],
    "gluon/test_replay.py": [
        ("program/workspace.py", "memory.take(x) for role", "memory.take(x.clone()) for role"),
        ("runtime/autograd.py", "{name: x.contiguous() for", "{name: x for"),
    ],
    "gluon/test_short.py": [
        ("kernels/hopper/short.py", "if first > 0:", "if first > C:"),
        ("kernels/hopper/short.py", "async_copy.wait_group(0)", "pass"),
    ],
    "gluon/test_smoke.py": [
        ("kernels/hopper/decode.py", "wait_group(TILES - 1 - i)", "wait_group(TILES - i)"),
        ("kernels/hopper/intra.py", "sum_left + sum_right + same * qn", "sum_left - sum_right + same * qn"),
        (
            "kernels/hopper/intra.py",
            "i, s = opaque_indices(T, N, dot_l)\n    zero =",
            "replace_decays(last_rows)\n    i, s = opaque_indices(T, N, dot_l)\n    zero =",
        ),
        ("kernels/hopper/prepare.py", "async_copy.wait_group(1)", "async_copy.wait_group(2)"),
        ("kernels/hopper/prepare.py", "inside = token <", "inside = token <="),
        ("kernels/hopper/recurrence.py", "row < (stop", "row <= (stop"),
        ("kernels/hopper/recurrence.py", "wait(KH if OUTPUT", "wait(KH + 2 if OUTPUT"),
        ("kernels/hopper/reverse.py", "i = chunks - 1 - step\n            stage", "i = step\n            stage"),
        ("kernels/hopper/segments.py", "(place == 0)", "(place == 1)"),
        ("kernels/hopper/verify.py", "nth > s", "nth >= s"),
        ("kernels/hopper/device/layouts.py", "(row < count)[", "(row <= count)["),
        ("kernels/shared/gluon/math.py", "grad * (lower_bound * rate)", "grad * lower_bound"),
        (PIPELINE, "mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)", "pass"),
        ("kernels/hopper/device/tile_scheduler.py", "(tiles - group + groups - 1)", "(tiles - group)"),
    ],
    "gluon/test_split.py": [
        ("kernels/triton/recurrence.py", "stored *= (part + 1 == parts)", "stored *= (part == 0)"),
        ("kernels/triton/segments.py", "== key[None, :], 1.0, 0.0", "== key[None, :], 0.0, 0.0"),
        ("kernels/triton/segments.py", "(ends - parts).to(tl.int32)", "ends.to(tl.int32)"),
        ("kernels/stages/segments.py", "tl.range(first + 1, last, n", "tl.range(first + 2, last, n"),
        ("kernels/shared/segments.py", "((part + 1) * chunks // parts)", "(part * chunks // parts + 1)"),
    ],
    "gluon/test_steps.py::test_errors_of_decays_are_those_of_chunks": [
        ("kernels/hopper/prepare_steps.py", "[4], [0])), axis=0) == 0", "[4], [0])), axis=0) >= 0")
    ],
    "unit/test_bad_input.py": [
        ("problem/arguments.py", "if x.dtype not in dtypes:", "if False:"),
        ("problem/arguments.py", "if x.device != self.device:", "if False:"),
        ("problem/arguments.py", "if self.fits(each.split(), x.shape)", "if True"),
        ("problem/arguments.py", "if stride < span:", "if False:"),
        ("problem/operations.py", "if places[other][0] < places[name][1] and", "if False and"),
        ("problem/arguments.py", "if value is not None and getattr(self, other) is not None:", "if False:"),
        ("problem/operations.py", "if not required:", "if True:"),
        ("problem/operations.py", "LOWEST_DECAY <= value < 0", "LOWEST_DECAY <= value <= 0"),
        ("problem/operations.py", 'c.exclusive("state_pool", "initial_state")', "pass"),
        ("problem/operations.py", "HV > 0 and HV % H == 0, f", "HV > 0, f"),
        ("problem/operations.py", "rows >= least", "True"),
        ("problem/device_checks.py", "if b < a:", "if False:"),
        ("problem/device_checks.py", "if index in self.written:", "if False:"),
        ("problem/arguments.py", "x._is_zerotensor() and x.numel() > 0", "False"),
    ],
    "unit/test_engines.py": [
        ("integrations/seams.py", "self.original, self.defaults | call)", "self.original, call)"),
        ("integrations/seams.py", "return bool(self.digests) and files.digest(", "return False and files.digest("),
        ("integrations/engine.py", "return other if is_read else", "return other if True else"),
        ("integrations/_vllm.py", "states.stored = found is not None", "pass"),
        ("integrations/_vllm.py", '{"null_index": "non_positive", "use', '{"null_index": "negative", "use'),
        ("integrations/_sglang.py", '"update_state": False', '"update_state": True'),
        ("integrations/_sglang.py", ".clamp(min=0) * TRACKED", ".clamp(min=0)"),
    ],
    "unit/test_exchanges.py": [
        ("parallel/exchange.py", "TURNS = 2", "TURNS = 1"),
        ("parallel/exchange.py", "for peer, late in self.unread:", "for peer, late in ():"),
        ("parallel/exchange.py", "self.places.get((nbytes, begin))", "self.places.get((nbytes, 0))"),
    ],
    "unit/test_export.py": [
        ("tools/export/cubins.py", "self.K, self.V, chunk, gate, precision", "self.K, self.V, gate, chunk, precision"),
        ("tools/export/c/prefill.c", "at.kg = at.qg + tile;", "at.kg = at.qg;"),
    ],
    "unit/test_hopper_choice.py": [
        ("backends.py", "range(9, 10)", "range(9, 11)"),
        ("kernels/hopper/build.py", "same = free or", "same = True or"),
        ("kernels/hopper/build.py", "and 0 < longest", "and 0 <= longest"),
        ("program/workspace.py", "self._next(offset if offset % size == 0 else size)", "self._next()"),
    ],
    "unit/test_gloo.py::test_what_one_rank_refuses_the_others_hear": [
        ("parallel/checks.py", "            _refuse(*where)\n        raise", "            pass\n        raise")
    ],
    "unit/test_integrations.py": [
        ("integrations/packing.py", "diff(dim=1) != 1, (1, 0), value=True)", "diff(dim=1) != 1, (1, 0), value=False)"),
        ("integrations/packing.py", "return zero_strays(o, offsets).view", "return o.view"),
        ("integrations/_fla.py", '["initial_state"].float()', '["initial_state"]'),
        ("integrations/_fla.py", 'given.get("inplace_final_state", True) else None', "False else None"),
        ("integrations/_transformers.py", 'if fla.state in ("active", "possible"):', 'if fla.state == "possible":'),
    ],
    "unit/test_nn.py": [
        ("nn/attention.py", "return x.to(applied.device) if is_gate and", "return x if False and"),
        ("nn/attention.py", "cu_seqlens is None and has_initial_state is None and fits", "cu_seqlens is None and fits"),
        ("nn/weights.py", "return x.squeeze(1) if x.dim() == 3 else x", "return x"),
    ],
    "unit/test_operators.py": [("runtime/torch_ops.py", "by_role.get(role) if is_tensor and role else None", "None")],
    "unit/test_parallel.py": [
        ("parallel/checks.py", "if calls[r] != calls[0]:", "if False:"),
        ("problem/arguments.py", "if x._version != version:", "if False:"),
        ("parallel/border.py", "some & (begin < low)", "some & (begin <= low)"),
        ("parallel/context.py", "if n > most:", "if False:"),
        ("parallel/context.py", "self.border[FIRST] + own", "own"),
        ("parallel/halo.py", "+= grads[r][:, start:stop]", "= grads[r][:, start:stop]"),
    ],
    "unit/test_program.py": [
        ("program/cache.py", "found += x.shape, x.stride(), x.dtype", "found += x.shape, x.dtype"),
        ("program/cache.py", "grad and x.requires_grad, address & 15", "False, address & 15"),
        ("program/cache.py", "address & 15", "0"),
        ("program/cache.py", "if entry is not None and entry.types != [*map(type, options)]:", "if False:"),
        ("program/cache.py", "key=lambda item: item[1].used", "key=lambda item: -item[1].used"),
        ("program/plan.py", "torch.zeros if slot in self.memory.zeroed else torch.empty", "torch.empty"),
        ("program/plan.py", "if addresses[j] < end and begin < addresses[j] + length:", "if False:"),
        ("program/plan.py", "x.data_ptr() - tensors[i].data_ptr()", "0"),
        ("program/plan.py", "done[end].append(index)", "done[begin].append(index)"),
        ("program/plan.py", "if seen and kernel is not None:", "if False:"),
        ("program/plan.py", "index, nbytes - slot * SLOT", "index, -slot * SLOT"),
        ("program/workspace.py", "FIRST = 1 << 16", "FIRST = 0"),
        ("problem/lengths.py", "if len(lengths) == 1 else None", ""),
        ("runtime/call.py", "error=NoKernel if for_kernel else ValueError", "error=ValueError"),
        ("program/launch.py", "x.data_ptr() % 16 for x in tensors", "0 for x in tensors"),
        ("program/workspace.py", "// LINE) * LINE for", "// 1) for"),
        ("runtime/call.py", "count_writes(tensors, entry.writes)", "pass"),
        ("runtime/autograd.py", "found[role] = found[role].view(x.shape)", "pass"),
        ("runtime/autograd.py", '"backward", next(_serials)', '"backward", 0'),
    ],
    "unit/test_reference.py::test_chunked_is_the_recurrence": [("reference/chunk.py", "v - p.w @ S", "v + p.w @ S")],
    "unit/test_transforms.py": [("runtime/call.py", "if transformed and", "if False and")],
    "unit/test_supports.py": [
        ("runtime/call.py", "self.remember_refusal(str(refusal), given, key)\n            raise", "raise"),
        ("runtime/call.py", "except REFUSALS as", "except Exception as"),
    ],
}

Row = tuple[str, str, str, str]


def copy_tree(to: Path) -> Path:
    """All that git tracks or would, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def run(tree: Path, test: str) -> tuple[int, str]:
    """Exit status and output of pytest."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    options = "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options, f"tests/{test}"]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return -1, "timed out"
    return done.returncode, done.stdout


def try_row(row: Row, tree: Path) -> tuple[bool, str]:
    """Whether a test finds it, and which."""
    test, file, old, new = row
    path = tree / "src" / "flashdelta" / file
    before, start = path.read_text(), time.monotonic()
    if before.count(old) != 1:
        return False, f"the old text stands there {before.count(old)} times"
    path.write_text(before.replace(old, new))
    try:
        status, output = run(tree, test)
    finally:
        path.write_text(before)
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    # a test fails; that none can be collected shows nothing
    what = f"caught by {found[:1]}" if status == 1 else "SURVIVED" if status == 0 else f"NO RESULT ({status})"
    return status == 1, f"{what}, {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code in recorded ways; tests are to find each.")
    parser.add_argument("words", nargs="*", help="only rows that contain one of these")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="rows at a time (2)")
    options = parser.parse_args()
    rows: list[Row] = [(test, *row) for test, found in MUTANTS.items() for row in found]
    rows = [row for row in rows if not options.words or any(word in text for text in row for word in options.words)]
    own, missed = threading.local(), 0
    with tempfile.TemporaryDirectory() as folder:

        def prepare() -> None:
            own.tree = copy_tree(Path(tempfile.mkdtemp(dir=folder)))

        with ThreadPoolExecutor(options.jobs, initializer=prepare) as pool:
            for (_, file, old, new), (found, said) in zip(rows, pool.map(lambda row: try_row(row, own.tree), rows)):
                missed += not found
                print(f"{file}: {' '.join(old.split())!r} -> {' '.join(new.split())!r}: {said}", flush=True)
    print(f"{len(rows) - missed} of {len(rows)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
