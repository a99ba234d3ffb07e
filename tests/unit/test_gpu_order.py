"""The GPU tier without a GPU: its tests find their fixtures, and sanitizers run every part."""

from __future__ import annotations

import subprocess
import sys

from ..gpu import conftest as tier

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
