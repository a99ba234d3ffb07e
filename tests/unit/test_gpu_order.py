"""The GPU tier without a GPU: its tests find their fixtures, and sanitizers run every part."""

from __future__ import annotations

import subprocess
import sys

from ..gpu import conftest as tier
from ..gpu import sanitized, test_hazards

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
