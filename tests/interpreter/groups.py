"""The interpreter tests in groups, one pytest session each: `pytest -p tests.interpreter.groups --group NAME` runs one.

Groups are of about one length, for several to run at once.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SMOKE = "smoke"
"""The group that always runs: together its tests launch every portable kernel."""

# A case, a test, or a part of its cases (every second one from the first on is 1/2); a file stands for all others in it.
GROUPS: dict[str, list[str]] = {
    SMOKE: [
        "test_smoke.py",
        "test_split.py::test_split_is_the_whole[[7, 97, 1, 0]-2-False]",
        "test_prefill.py::test_sizes[K64-V64-C32-tf32x3]",
        "test_parallel.py::test_ranks_find_what_one_finds[kept]",
        "test_parallel.py::test_a_pool_is_read_where_a_sequence_starts_and_stored_where_it_ends",
        "test_decode.py::test_step[paged]",
        "test_decode.py::test_step[spec_packed]",
        "test_decode.py::test_step[transposed]",
        "test_decode.py::test_commit[(1, 0, 5, 2)-torch.float32]",
        "test_decode.py::test_replay[verify]",
        "test_wy.py::test_results_are_the_reference[grouped-sliced]",
        "test_layer.py::test_gradients_of_the_norm[heads]",
        "test_layer.py::test_gradients_of_the_convolution[fla]",
        "test_layer.py::test_convolution[marks_packed]",
        "test_fused.py::test_kernel_is_the_loop[one]",
    ],
    "chunk-1": ["test_kernels.py::test_chunk_fp32 1/2"],
    "chunk-2": ["test_kernels.py::test_chunk_fp32 2/2"],
    "half": [
        "test_kernels.py::test_chunk_fp16",
        "test_kernels.py::test_recurrent_fp16",
        "test_kernels.py::test_recurrent_fp32",
    ],
    "laws": ["test_kernels.py"],
    # the first three together, as importing PyTorch's compiler takes seconds
    "compiled": [
        "test_kernels.py::test_operator_runs_the_kernels_it_is_asked_for",
        "test_pool.py::test_operator_runs_the_kernels_it_is_asked_for",
        "test_prefill.py::test_traced_calls_run_the_kernels_they_are_asked_for",
        "test_pool.py::test_recurrent",
        "test_pool.py::test_warmup_runs",
    ],
    "pool-1": ["test_pool.py::test_chunk 1/2", "test_pool.py::test_chunk_fp16"],
    "pool-2": ["test_pool.py::test_chunk 2/2", "test_pool.py"],
    "buffers": ["test_buffers.py"],
    "split": ["test_split.py"],
    "parallel": ["test_parallel.py"],
    "layer": ["test_layer.py"],
    "fused": ["test_fused.py"],
    "nn": ["test_nn.py"],
    "decode": ["test_decode.py"],
    "prefill": ["test_prefill.py"],
    "backward-1": ["test_backward.py::test_gradients_are_those_of_the_reference 1/2"],
    "backward-2": ["test_backward.py::test_gradients_are_those_of_the_reference 2/2"],
    "backward-3": ["test_backward.py"],
    "wy": ["test_wy.py"],
}


def file_of(selector: str) -> str:
    return selector.partition("::")[0]


def parsed(selector: str) -> tuple[str, int, int]:
    """The name, and which of how many parts of a test's cases."""
    name, number, parts = re.fullmatch(r"(.*?)(?: (\d+)/(\d+))?", selector).groups("1")
    return name, int(number), int(parts)


def selector_of(case: str) -> str:
    """What selects the case: its own name, its test's or its file's, whichever a group has first."""
    named = {parsed(selector)[0] for selectors in GROUPS.values() for selector in selectors}
    names = (case, case.partition("[")[0])
    return next((name for name in names if name in named), file_of(case))


def selection(group: str) -> str:
    """All that decides which tests the group has: its selectors, and what else is selected of its files."""
    files = {file_of(selector) for selector in GROUPS[group]}
    return repr({name: [x for x in selectors if file_of(x) in files] for name, selectors in GROUPS.items()})


def paths(group: str) -> list[str]:
    """What pytest is to collect."""
    return sorted({str(FOLDER / file_of(selector)) for selector in GROUPS[group]})


def chosen(group: str, items: list[tuple[str, object]]) -> list[object]:
    """Those of the group, of all cases by name in the order of collection."""
    wanted = {selector: (number, parts) for selector, number, parts in map(parsed, GROUPS[group])}
    seen: Counter[str] = Counter()
    found = []
    for case, item in items:
        selector = selector_of(case)
        seen[selector] += 1
        number, parts = wanted.get(selector, (0, 1))
        if (seen[selector] - number) % parts == 0 and number > 0:
            found.append(item)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", choices=sorted(GROUPS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if group := config.getoption("group"):
        items[:] = chosen(group, [(f"{item.path.name}::{item.name}", item) for item in items])
