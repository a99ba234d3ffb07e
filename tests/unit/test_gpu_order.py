"""The GPU tier without a GPU: its tests find their fixtures, and in which order workers get them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from ..gpu import conftest as tier
from ..gpu import sanitized, test_hazards
from ..gpu.calls import first_configurations

WORKER = SimpleNamespace(workerinput={})


def item(name: str, long: bool = False, fixtures: tuple[str, ...] = (), folder: Path = tier.HERE) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=name,
        path=folder / "test_some.py",
        fixturenames=fixtures,
        get_closest_marker=lambda mark: mark if long and mark == "long" else None,
    )


def test_neighbours_are_parted_and_others_stay():
    ours, others = [item(f"gpu {n}") for n in range(200)], [item(f"{n}", folder=Path("/unit")) for n in range(3)]
    mixed = [others[0], *ours[:100], others[1], *ours[100:], others[2]]
    found = list(mixed)
    tier.pytest_collection_modifyitems(WORKER, found)
    assert [found[i] for i in (0, 101, 202)] == others
    moved = [x for x in found if x not in others]
    assert sorted(map(id, moved)) == sorted(map(id, ours))
    together = sum(abs(ours.index(x) - ours.index(y)) < 5 for x, y in itertools.pairwise(moved))
    assert together < 20


def test_a_single_process_runs_file_by_file():
    items = [item(f"gpu {n}") for n in range(50)]
    found = list(items)
    tier.pytest_collection_modifyitems(SimpleNamespace(), found)
    assert found == items


@pytest.mark.parametrize("fixture", sorted(tier.MADE_ONCE))
def test_long_ones_begin_early_and_those_that_wait_for_them_late(fixture: str):
    for n in range(100):
        assert tier.begins(item(f"{n}", long=True, fixtures=(fixture,))) < 0.25
        assert tier.begins(item(f"{n}", fixtures=(fixture,))) >= 0.5


# a test's cases differ in values alone where they have the same fixtures
ONE_CASE_EACH = """
import sys
import pytest

class OneCaseEach:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = {(item.path, item.originalname, *item.fixturenames): item for item in items}.values()

sys.exit(pytest.main(sys.argv[1:], [OneCaseEach()]))
"""


def test_every_test_finds_its_fixtures():
    """Which shows only when it is set up; here nothing is."""
    plan = ["-q", "-m", "gpu", "--setup-plan", "-p", "no:cacheprovider", str(tier.HERE)]
    command = [sys.executable, "-c", ONE_CASE_EACH, *plan]
    done = subprocess.run(command, cwd=tier.HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    planned = {line.split()[0].partition("[")[0] for line in done.stdout.splitlines() if "::test_" in line}
    assert len(planned) > 100


def test_sanitizers_run_every_part():
    for groups, left_out in ((test_hazards.PARTS, set()), (test_hazards.RACES, {"pool"})):
        words = [word for group in groups for word in group.split()]
        assert sorted(words) == sorted({*sanitized.PARTS} - left_out)


def test_kernels_of_others_are_not_tuned():
    @triton.autotune([triton.Config({}, num_warps=warps) for warps in (1, 2)], key=[])
    @triton.jit
    def kernel(x):
        pass

    with first_configurations():
        assert [config.num_warps for config in kernel.configs] == [1]
    assert len(kernel.configs) == 2
