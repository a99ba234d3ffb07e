"""Breaks the code in recorded ways, one at a time, and runs the tests that are to find each (`make mutants`).

    python -m tests.mutants [-j N] [--all-tests] [words]

Each row is a file in `src/flashdelta`, a text that stands there once, the text in its place, and tests that fail then: files in
`tests/`, or node ids. Rows are the ways in which a kernel, a rule or a replay can be wrong without anything else noticing: keep
one for each. `words` select rows by what they contain. `--all-tests` runs the whole suite and names the files that find each.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 1200
"""Seconds for the tests of a row, and an hour for all tests."""

Row = tuple[str, ...]

# fmt: off
MUTANTS: list[Row] = [
    # ---- portable kernels, interpreted by tests/gluon
    ("kernels/triton/commit.py", "(count - 1) * row_step + inside", "0 * row_step + inside",
     "gluon/test_decode.py::test_commit"),
    ("kernels/triton/commit.py", "records += (count - 1) * row_step", "pass",
     "gluon/test_decode.py::test_portable_replay"),
    ("kernels/triton/convolution.py", "tl.fma(w3, x0, tl.fma(w2, x1, p))", "tl.fma(w3, x1, tl.fma(w2, x0, p))",
     "gluon/test_layer.py::test_convolution"),
    ("kernels/triton/convolution.py", "read, begin, begin + offset,", "read, begin, end,",
     "gluon/test_layer.py::test_convolution[marks_packed]"),
    ("kernels/triton/convolution.py", "s0 = tl.fma(p0, x3, s0)", "s0 = tl.fma(p0, x2, s0)",
     "gluon/test_layer.py::test_gradients_of_the_convolution"),
    ("kernels/stages/copy.py", "(channel * channel_stride)", "channel",
     "gluon/test_portable.py::test_cases[last_dim_strided-chunk_kda-torch.float32]"),
    ("kernels/triton/decode.py", "tl.fma(along_k, -norm_k, row_v", "tl.fma(along_k, norm_k, row_v",
     "gluon/test_decode.py::test_portable_step"),
    ("kernels/stages/finish.py", "total_k += tl.load(heads_k", "total_k = tl.load(heads_k",
     "gluon/test_backward.py::test_gradients_are_those_of_the_reference[gva2-triton]"),
    ("kernels/stages/finish.py", "K + tl.arange(0, K), total)", "K + tl.arange(0, K), 2.0 * total)",
     "gluon/test_portable.py::test_chunks_and_their_gradients"),
    ("kernels/triton/fused_decode.py", "(tap - 1) * place_stride, row", "tap * place_stride, row",
     "gluon/test_fused.py::test_portable_kernel_is_the_loop"),
    ("kernels/triton/intra.py", "dG -= result * k_right", "dG += result * k_right",
     "gluon/test_portable.py::test_chunks_and_their_gradients"),
    ("kernels/stages/merge.py", "key[None, :] * K + key[:, None]", "key[:, None] * K + key[None, :]",
     "gluon/test_ranks.py::test_ranks_find_what_one_finds"),
    ("kernels/stages/merge.py", "if opened < 0:", "if opened < 1:",
     "gluon/test_ranks.py::test_ranks_find_what_one_finds"),
    ("kernels/stages/merge.py", "if goes_on | (begin == end)", "if (begin == end)",
     "gluon/test_ranks.py::test_a_pool_is_read_where_a_sequence_starts_and_stored_where_it_ends"),
    ("kernels/triton/norm.py", "norm * (grad - normed * mean)", "norm * grad",
     "gluon/test_layer.py::test_norm_and_its_gradients"),
    ("kernels/triton/output.py", "tl.trans(tile_qg), tile_o, PRECISION", "tl.trans(tile_qg), 0.0 * tile_o, PRECISION",
     "gluon/test_prefill.py::test_cases"),
    ("kernels/triton/prepare.py", "return -dot(dot(inv_11, a_10", "return dot(dot(inv_11, a_10",
     "gluon/test_portable.py::test_chunks_and_their_gradients[prepare]"),
    ("kernels/triton/prepare_bounded.py", "(i >= j) if diagonal", "(i > j) if diagonal",
     "gluon/test_portable.py::test_chunks_and_their_gradients[prepare_bounded]"),
    ("kernels/triton/recurrence.py", "tile_v_new -= dot(left", "tile_v_new += dot(left",
     "gluon/test_portable.py::test_cases[state-chunk_kda-torch.float32]"),
    ("kernels/triton/recurrence.py", "stored *= (part + 1 == parts)", "stored *= (part == 0)", "gluon/test_split.py"),
    ("kernels/triton/reverse.py", "grad -= tl.dot(dv_new", "grad += tl.dot(dv_new",
     "gluon/test_backward.py::test_gradients_are_those_of_the_reference[state-triton]"),
    ("kernels/triton/segments.py", "column[:, None] == key[None, :], 1.0, 0.0",
     "column[:, None] == key[None, :], 0.0, 0.0",
     "gluon/test_split.py"),
    ("kernels/triton/segments.py", "(ends - parts).to(tl.int32)", "ends.to(tl.int32)",
     "gluon/test_split.py"),
    ("kernels/stages/segments.py", "tl.range(first + 1, chained", "tl.range(first + 2, chained", "gluon/test_split.py"),
    ("kernels/triton/sums.py", "mask=tap == TAPS", "mask=tap == TAPS - 1",
     "gluon/test_layer.py::test_gradients_of_the_convolution"),
    ("kernels/triton/verify.py", "tl.where(pair_mask(0, COUNT), -A, 0.0)", "tl.where(pair_mask(0, COUNT), A, 0.0)",
     "gluon/test_decode.py::test_portable_replay"),
    ("kernels/triton/wy.py", "acc_beta += tl.sum(summand(Z, k_exp_g", "acc_beta -= tl.sum(summand(Z, k_exp_g",
     "gluon/test_backward.py::test_gradients_are_those_of_the_reference[state-triton]"),
    ("kernels/triton/decays.py", "low = x - high.to(tl.float32)", "low = x * 0.0",
     "gluon/test_prefill.py::test_small_decays_are_not_rounded_away"),
    ("kernels/shared/gates.py", "lower_bound * s * (1.0 - s) * rate * grad", "lower_bound * s * (1.0 - s) * grad",
     "gluon/test_portable.py::test_chunks_and_their_gradients"),
    ("kernels/shared/mma.py", 'acc = tl.dot(a_high, b_low, acc=acc, input_precision="tf32")', "pass",
     "gluon/test_prefill.py::test_sizes"),
    ("kernels/shared/norms.py", "return 1.0 / tl.sqrt(total + L2_EPS)", "return 1.0 / tl.sqrt(total)",
     "gluon/test_backward.py::test_gradients_are_those_of_the_reference[zero_rows-triton]"),
    ("kernels/shared/records.py", "records + K + at", "records + at",
     "gluon/test_decode.py::test_portable_replay"),
    ("kernels/shared/segments.py", "((part + 1) * chunks // parts)", "(part * chunks // parts + 1)",
     "gluon/test_split.py"),
    ("kernels/shared/sequences.py", "offset = tl.where(span < spans - 1, offset, length)", "pass",
     "gluon/test_pool.py::test_chunk"),
    ("kernels/shared/states.py", "(slot >= lowest) & (slot < slots)", "(slot >= 0) & (slot < slots)",
     "gluon/test_pool.py::test_chunk"),
    ("kernels/triton/sub_chunks.py", "X -= tl.where(row == r", "X += tl.where(row == r",
     "gluon/test_portable.py::test_chunks_and_their_gradients"),
    # ---- Hopper's kernels, interpreted by tests/gluon
    ("kernels/hopper/commit.py", "i * (BV * K)", "0", "gluon/test_decode.py::test_a_replay_of_whole_heads"),
    ("kernels/hopper/decode.py", "wait_group(TILES - 1 - i)", "wait_group(TILES - i)",
     "gluon/test_smoke.py::test_step"),
    ("kernels/hopper/fused_decode.py", "(slot != guess) | (live != guessed)", "slot < 0",
     "gluon/test_fused.py::test_an_index_that_the_kernel_before_writes_late"),
    ("kernels/hopper/fused_decode.py", "slot * target_pitch", "slot * (H * K * V)", "gluon/test_fused.py"),
    ("kernels/hopper/intra.py", "sum_left + sum_right + same * qn", "sum_left - sum_right + same * qn",
     "gluon/test_smoke.py::test_gradients"),
    ("kernels/hopper/intra.py", "i, s = opaque_indices(T, N, dot_l)\n    zero =",
     "replace_decays(last_rows)\n    i, s = opaque_indices(T, N, dot_l)\n    zero =",
     "gluon/test_smoke.py::test_gradients"),
    ("kernels/hopper/prepare.py", "async_copy.wait_group(1)", "async_copy.wait_group(2)",
     "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/prepare.py", "if tile == 0:", "if tile == -1:", "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/prepare.py", "inside = token <", "inside = token <=", "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/prepare_scalar.py", "exp2(whole + to_end_s", "exp2(to_end_s",
     "gluon/test_chunk.py::test_cases[scalar_softplus]"),
    ("kernels/hopper/prepare_scalar.py", "step < LOWEST, LOWEST", "step < LOWEST, step",
     "gluon/test_chunk.py::test_cases[scalar_forget]"),
    ("kernels/hopper/prepare_steps.py", "[4], [0])), axis=0) == 0", "[4], [0])), axis=0) >= 0",
     "gluon/test_steps.py::test_errors_of_decays_are_those_of_chunks"),
    ("kernels/hopper/recurrence.py", "row < (stop", "row <= (stop", "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/recurrence.py", "wait(KH if OUTPUT", "wait(KH + 2 if OUTPUT", "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/recurrence.py", "wait(semaphore - SLICES)", "pass",
     "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/recurrence.py", "signal(semaphore)", "pass", "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/reverse.py", "i = chunks - 1 - step\n            stage", "i = step\n            stage",
     "gluon/test_smoke.py::test_gradients"),
    ("kernels/hopper/segments.py", "(place == 0)", "(place == 1)", "gluon/test_smoke.py::test_split"),
    ("kernels/hopper/verify.py", "nth > s", "nth >= s", "gluon/test_smoke.py::test_replay"),
    ("kernels/hopper/wy.py", "tma.store_wait(0)\n            barrier()", "barrier()",
     "gluon/test_backward.py::test_wy_of_persistent_ctas"),
    ("kernels/hopper/wy.py", "wait_tiles(outputs, phase)", "pass",
     "gluon/test_backward.py::test_wy_of_persistent_ctas"),
    ("kernels/hopper/wy.py", "phase = next_phase(phase)", "pass", "gluon/test_backward.py::test_wy_of_persistent_ctas"),
    ("kernels/hopper/device/layouts.py", "(row < count)[", "(row <= count)[", "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/device/math.py", "(s - s * s) * grad * (lower_bound * rate)", "(s - s * s) * grad * lower_bound",
     "gluon/test_smoke.py::test_gradients"),
    ("kernels/hopper/device/pipeline.py", "mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)",
     "pass",
     "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/device/pipeline.py", "mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)",
     "pass", "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/device/pipeline.py", "mbarrier.arrive(self.empty.index(stage), count=1)", "pass",
     "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/device/stream_k.py", "chunk1 * (k == 0)", "chunk1 * (k > 0)",
     "gluon/test_chunk.py::test_turns_change_no_bit"),
    ("kernels/hopper/device/tile_scheduler.py", "(tiles - group + groups - 1)", "(tiles - group)",
     "gluon/test_smoke.py::test_prefill"),
    ("kernels/hopper/device/tma.py", "fence_async_shared()", "pass", "gluon/test_smoke.py::test_wy"),
    ("kernels/hopper/device/trial.py", "<= FORGOTTEN * FORGOTTEN", "<= 1e30",
     "gluon/test_trials.py::test_what_moves_between_channels_is_remembered"),
    # ---- validation
    ("problem/arguments.py", "if x.dtype not in dtypes:", "if False:", "unit/test_bad_input.py"),
    ("problem/arguments.py", "if x.device != self.device:", "if False:", "unit/test_bad_input.py"),
    ("problem/arguments.py", "if self.fits(each.split(), x.shape):", "if self.fits(each.split(), x.shape) or True:",
     "unit/test_bad_input.py"),
    ("problem/arguments.py", "if stride < span:", "if False:", "unit/test_bad_input.py"),
    ("problem/operations.py", "if first < end and begin < last and", "if False and",
     "unit/test_bad_input.py"),
    ("problem/arguments.py", "getattr(self, name) is None or getattr(self, other) is None", "True",
     "unit/test_bad_input.py"),
    ("problem/operations.py", "if not required:", "if True:", "unit/test_bad_input.py"),
    ("problem/operations.py", "LOWEST_BOUND <= value < 0", "LOWEST_BOUND <= value <= 0",
     "unit/test_bad_input.py"),
    ("problem/operations.py", 'c.exclusive("state_pool", "initial_state")', "pass", "unit/test_bad_input.py"),
    ("problem/operations.py", "HV > 0 and HV % H == 0, f", "HV > 0, f", "unit/test_bad_input.py"),
    ("problem/operations.py", "rows >= least", "True", "unit/test_bad_input.py"),
    ("problem/device_checks.py", "if b < a:", "if False:", "unit/test_bad_input.py"),
    ("problem/device_checks.py", "if index in self.written:", "if False:", "unit/test_bad_input.py"),
    ("parallel/checks.py", "if calls[r] != calls[0]:", "if False:", "unit/test_parallel.py"),
    ("backends.py", "if capability[0] != 9:", "if capability[0] < 9:", "unit/test_hopper_choice.py"),
    # ---- launch cache, replay, answers that are kept
    ("program/cache.py", "found += x.shape, x.stride(), x.dtype", "found += x.shape, x.dtype",
     "unit/test_program.py"),
    ("program/cache.py", "grad and x.requires_grad, address & 15", "False, address & 15", "unit/test_program.py"),
    ("program/cache.py", "address & 15", "0", "unit/test_program.py"),
    ("program/cache.py", "if entry is not None and entry.types != [*map(type, options)]:", "if False:",
     "unit/test_program.py"),
    ("program/cache.py", "key=lambda item: item[1].used", "key=lambda item: -item[1].used", "unit/test_program.py"),
    ("program/plan.py", "torch.zeros if slot in self.memory.zeroed else torch.empty", "torch.empty",
     "unit/test_program.py"),
    ("program/plan.py", "if addresses[j] < end and begin < addresses[j] + length:", "if False:",
     "unit/test_program.py"),
    ("program/plan.py", "(i, x.data_ptr() - begins[i])", "(i, 0)", "unit/test_program.py"),
    ("program/plan.py", "done[end].append(index)", "done[begin].append(index)", "unit/test_program.py"),
    ("program/plan.py", "if seen and kernel is not None:", "if False:", "unit/test_program.py"),
    ("program/workspace.py", "return slot, address - self.begins[slot]", "return slot, 0", "unit/test_program.py"),
    ("program/workspace.py", "if not x.is_meta or not 0 <= slot < len(self.begins):", "if False:",
     "unit/test_program.py"),
    ("program/workspace.py", "self._next(offset if offset % size == 0 else size)", "self._next()",
     "unit/test_hopper_choice.py::test_what_is_aligned_is_read_in_place"),
    ("program/workspace.py", "memory.take(x) for role", "memory.take(x.clone()) for role",
     "gluon/test_replay.py::test_losses"),
    ("problem/arguments.py", "x._is_zerotensor() and x.numel() > 0", "False", "unit/test_bad_input.py"),
    ("program/launch.py", "found += x.dtype, x.data_ptr() % 16", "found += x.dtype, 0", "unit/test_program.py"),
    ("program/workspace.py", "[-(-n // ALIGNMENT) * ALIGNMENT for n in exact]", "[*exact]", "unit/test_program.py"),
    ("runtime/call.py", "count_writes(tensors, entry.writes)", "pass", "unit/test_program.py"),
    ("runtime/call.py", "self.remember_refusal(str(refusal), given, key)\n            raise", "raise",
     "unit/test_supports.py"),
    # ---- gradients
    ("runtime/autograd.py", "found[role] = (grad if grad.numel() == x.numel() else grad.sum(-1)).view(x.shape)", "pass",
     "unit/test_program.py::test_gradients_of_parameters_have_their_shapes"),
    ("runtime/autograd.py", "else grad.sum(-1))", "else grad[..., 0])",
     "gluon/test_backward.py::test_gradients_are_those_of_the_reference[scalar-triton]"),
    ("problem/arguments.py", "if x._version != version:", "if False:", "unit/test_parallel.py"),
    ("runtime/autograd.py", '"backward", next(_serials)', '"backward", 0', "unit/test_program.py"),
    ("runtime/autograd.py", "{name: x.contiguous() for", "{name: x for",
     "gluon/test_replay.py::test_wrapped_losses[packed_and_unpacked]"),
    ("runtime/torch_ops.py", "by_role.get(role) if is_tensor and role else None", "None", "unit/test_operators.py"),
    # the gradient of a sum is no dense tensor
    ("kernels/stages/launch.py", '"num_accepted_tokens", "dht"),', '"num_accepted_tokens"),',
     "gluon/test_backward.py::test_gradients_of_sums"),
    # ---- several GPUs
    ("parallel/exchange.py", "TURNS = 2", "TURNS = 1", "unit/test_exchanges.py"),
    ("parallel/exchange.py", "for peer, late in self.unread:", "for peer, late in ():", "unit/test_exchanges.py"),
    ("parallel/exchange.py", "self.places.get((nbytes, begin))", "self.places.get((nbytes, 0))",
     "unit/test_exchanges.py"),
    ("parallel/border.py", "some & (begin < low)", "some & (begin <= low)", "unit/test_parallel.py"),
    ("parallel/halo.py", "+= grads[r][:, start:stop]", "= grads[r][:, start:stop]", "unit/test_parallel.py"),
    # ---- layer, reference, integrations, export
    ("nn/attention.py", "return torch.where(covered[:, None, None], o, 0.0)", "return o",
     "gluon/test_layer.py::test_rows_of_no_sequence_leave_gradients_alone"),
    ("nn/attention.py", "return x.to(applied.device) if is_gate and", "return x if False and", "unit/test_nn.py"),
    ("nn/attention.py", "cu_seqlens is None and has_initial_state is None and fits", "cu_seqlens is None and fits",
     "unit/test_nn.py::test_a_pool_is_a_cache"),
    ("nn/weights.py", "return x.squeeze(1) if x.dim() == 3 else x", "return x",
     "unit/test_nn.py::test_weights_go_and_come_back"),
    ("reference/chunk.py", "v_new = p.inverse @ v - p.w @ S", "v_new = p.inverse @ v + p.w @ S",
     "unit/test_reference.py::test_chunked_is_the_recurrence"),
    ("integrations/_fla.py", '["initial_state"].float()', '["initial_state"]', "unit/test_integrations.py"),
    ("integrations/_fla.py", 'given.get("inplace_final_state", True) else None', "False else None",
     "unit/test_integrations.py"),
    ("integrations/_transformers.py", 'if fla.state in ("active", "possible"):', 'if fla.state == "possible":',
     "unit/test_integrations.py"),
    ("integrations/_vllm.py", "states.stored = found is not None", "pass", "unit/test_engines.py"),
    ("integrations/_vllm.py", '{"null_index": "non_positive", "use', '{"null_index": "negative", "use',
     "unit/test_engines.py"),
    ("integrations/_sglang.py", '"update_state": False', '"update_state": True', "unit/test_engines.py"),
    ("integrations/_sglang.py", ".clamp(min=0) * TRACKED", ".clamp(min=0)", "unit/test_engines.py"),
    ("tools/export/cubins.py", "self.K, self.V, chunk, gate, precision", "self.K, self.V, gate, chunk, precision",
     "unit/test_export.py::test_prefill_launches_what_python_does"),
    ("tools/export/c/prefill.c", "at.kg = at.qg + tile;", "at.kg = at.qg;",
     "unit/test_export.py::test_prefill_launches_what_python_does"),
]
# fmt: on


def describe(row: Row) -> str:
    file, old, new, *_ = row
    return f"{file}: {' '.join(old.split())!r} -> {' '.join(new.split())!r}"


def copy_tree(to: Path) -> Path:
    """All that git tracks or would, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def run(tree: Path, tests: Sequence[str], *options: str, limit: int = LIMIT) -> tuple[int, str]:
    """Exit status and output of pytest."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    named = [f"tests/{x}" for x in tests] or ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *named]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return -1, "timed out"
    return done.returncode, done.stdout


def try_row(row: Row, tree: Path, all_tests: bool) -> tuple[bool, str]:
    """Whether tests find it, and which."""
    file, old, new, *tests = row
    path = tree / "src" / "flashdelta" / file
    before, start = path.read_text(), time.monotonic()
    if before.count(old) != 1:
        return False, f"the old text stands there {before.count(old)} times"
    path.write_text(before.replace(old, new))
    try:
        status, output = run(tree, [], limit=3600) if all_tests else run(tree, tests, "-x")
    finally:
        path.write_text(before)
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    named = sorted({x.partition("::")[0] for x in found}) if all_tests else found[:1]
    # a test fails; that none can be collected shows nothing
    what = f"caught by {', '.join(named)}" if status == 1 else "SURVIVED" if status == 0 else f"NO RESULT ({status})"
    return status == 1, f"{what}, {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code in recorded ways; tests are to find each.")
    parser.add_argument("words", nargs="*", help="only rows that contain one of these")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="rows at a time (2)")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite, and name all files that find it")
    options = parser.parse_args()
    rows = [row for row in MUTANTS if not options.words or any(word in text for text in row for word in options.words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(options.jobs):
            trees.put(copy_tree(Path(folder, str(i))))

        def attempt(row: Row) -> tuple[bool, str]:
            tree = trees.get()
            try:
                return try_row(row, tree, options.all_tests)
            finally:
                trees.put(tree)

        missed = 0
        for row, (found, said) in zip(rows, pool.map(attempt, rows)):
            missed += not found
            print(f"{describe(row)}: {said}", flush=True)
    print(f"{len(rows) - missed} of {len(rows)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
