"""The interpreter tests in groups, one pytest session each: `pytest -p tests.interpreter.groups --group NAME` runs one.

Groups are of about one length, for several to run at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SMOKE = "smoke"
"""The group that always runs: together its tests launch every portable kernel."""

# file::test, or a part of the test's cases: every second one from the first on is 1/2
GROUPS: dict[str, list[str]] = {
    SMOKE: [
        "test_smoke.py::test_chunks_and_their_gradients",
        "test_smoke.py::test_split",
        "test_smoke.py::test_prefill",
        "test_smoke.py::test_step",
        "test_smoke.py::test_commit",
        "test_smoke.py::test_wy_step",
    ],
    "chunk-1": ["test_kernels.py::test_chunk_fp32 1/2"],
    "chunk-2": ["test_kernels.py::test_chunk_fp32 2/2"],
    "half": [
        "test_kernels.py::test_chunk_fp16",
        "test_kernels.py::test_recurrent_fp16",
        "test_kernels.py::test_recurrent_fp32",
    ],
    "laws": [
        "test_kernels.py::test_other_head_dims",
        "test_kernels.py::test_no_state_and_zeros_give_the_same_bits",
        "test_kernels.py::test_packed_gives_each_sequences_own_bits",
        "test_kernels.py::test_split_at_a_chunk_boundary_gives_the_same_bits",
        "test_kernels.py::test_nan_stays_in_its_sequence",
        "test_kernels.py::test_inputs_are_never_written",
        "test_kernels.py::test_out_may_be_a_strided_view_and_nothing_beside_it_is_written",
        "test_kernels.py::test_bad_offsets_touch_nothing_outside_the_tensors",
        "test_kernels.py::test_warmup_runs",
    ],
    # the first three together, as importing PyTorch's compiler takes seconds
    "compiled": [
        "test_kernels.py::test_operator_runs_the_kernels_it_is_asked_for",
        "test_pool.py::test_operator_runs_the_kernels_it_is_asked_for",
        "test_prefill.py::test_traced_calls_run_the_kernels_they_are_asked_for",
        "test_pool.py::test_recurrent",
        "test_pool.py::test_warmup_runs",
    ],
    "pool-1": ["test_pool.py::test_chunk 1/2", "test_pool.py::test_chunk_fp16"],
    "pool-2": [
        "test_pool.py::test_chunk 2/2",
        "test_pool.py::test_kernels_find_the_planned_chunks",
        "test_pool.py::test_kernels_find_no_chunk_outside",
        "test_pool.py::test_bad_offsets_and_indices_touch_nothing_outside",
    ],
    "split": [
        "test_split.py::test_split_is_the_whole",
        "test_split.py::test_split_of_batch_rows",
        "test_split.py::test_split_with_a_pool_and_checkpoints",
        "test_split.py::test_plan_is_the_planners",
        "test_split.py::test_falling_offsets_get_no_more_segments_than_there_is_room_for",
    ],
    "decode": [
        "test_decode.py::test_step",
        "test_decode.py::test_step_fp16",
        "test_decode.py::test_step_of_a_large_batch",
        "test_decode.py::test_commit",
        "test_decode.py::test_warmup_runs",
    ],
    "prefill": [
        "test_prefill.py::test_cases",
        "test_prefill.py::test_sizes",
        "test_prefill.py::test_sizes_with_logits",
        "test_prefill.py::test_wide_slices_of_the_states",
        "test_prefill.py::test_a_batch_gives_each_heads_own_bits",
        "test_prefill.py::test_small_decays_are_not_rounded_away",
        "test_prefill.py::test_a_nan_of_a_gpus_arithmetic_is_one_as_any_other",
    ],
    "backward-1": ["test_backward.py::test_gradients_are_those_of_the_reference 1/2"],
    "backward-2": ["test_backward.py::test_gradients_are_those_of_the_reference 2/2"],
    "backward-3": [
        "test_backward.py::test_gradients_with_held_value_channels",
        "test_backward.py::test_kept_gradients_are_those_of_a_forward_that_runs_again",
        "test_backward.py::test_what_was_kept_serves_one_backward_pass",
        "test_backward.py::test_gradients_have_their_inputs_dtypes",
        "test_backward.py::test_packed_gradients_are_those_of_each_sequence",
        "test_backward.py::test_nan_stays_in_its_sequence",
    ],
    "wy": [
        "test_wy.py::test_results_are_the_reference",
        "test_wy.py::test_half_precision_rounds_operands_only",
        "test_wy.py::test_nan_stays_in_its_sequence",
        "test_wy.py::test_chunks_without_a_row_are_left_alone",
    ],
}


def parsed(selector: str) -> tuple[str, int, int]:
    """The test, and which of how many parts of its cases."""
    test, _, part = selector.partition(" ")
    number, _, parts = (part or "1/1").partition("/")
    return test, int(number), int(parts)


def paths(group: str) -> list[str]:
    """What pytest is to collect."""
    return [str(FOLDER / parsed(selector)[0]) for selector in GROUPS[group]]


def chosen(group: str, items: list[tuple[str, object]]) -> list[object]:
    """Those of the group, of all `(test, case)` in the order of collection."""
    wanted = {test: (number, parts) for test, number, parts in map(parsed, GROUPS[group])}
    seen: dict[str, int] = {}
    found = []
    for test, case in items:
        seen[test] = seen.get(test, 0) + 1
        number, parts = wanted.get(test, (0, 1))
        if (seen[test] - number) % parts == 0 and number > 0:
            found.append(case)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", choices=sorted(GROUPS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if group := config.getoption("group"):
        items[:] = chosen(group, [(f"{item.path.name}::{item.originalname}", item) for item in items])
