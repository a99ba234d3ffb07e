"""A plugin of pytest that writes down what each test came to as it ends, for runs that may not live to their end.

    python -m pytest -m gpu -p tests.release.log --run-log FILE

A line of JSON for each start of pytest (environment, tests collected), each test, and each end. Called again with the same file
it leaves out the tests that have passed. Works under xdist, where the controller writes.
"""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest

PASSED = "passed by the run log"
"""What workers are told by the controller: all must collect the same tests."""


def read(path: Path) -> list[dict]:
    """Its lines; a last one that was cut off is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-log", type=Path, help="file for what each test came to; leaves out what passed in it")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--run-log")
    if path is None:
        return
    worker = getattr(config, "workerinput", None)
    log = None if worker is not None else Log(path)
    config.pluginmanager.register(LeaveOut(log.passed if log is not None else frozenset(worker[PASSED])))
    if log is not None:
        config.pluginmanager.register(log)


class LeaveOut:
    """Of the tests that are collected, those that have passed."""

    def __init__(self, passed: frozenset[str]):
        self.passed = passed

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self.passed]
        items[:] = [item for item in items if item.nodeid not in self.passed]
        config.hook.pytest_deselected(items=left_out)


class Log:
    """Appends to the file.

    Raises:
        pytest.UsageError: the file is of another commit, GPU or version, or the commit is not known.
    """

    def __init__(self, path: Path):
        from flashdelta.tools.bench.environment import (  # PyTorch, which workers may not need
            default_device,
            environment,
        )

        self.path, self.started = path, time.monotonic()
        self.environment = environment(default_device())
        if self.environment["commit"] is None:
            raise pytest.UsageError("--run-log: this copy has no git history; set FLASHDELTA_COMMIT")
        before = read(path)
        for line in before:
            if "environment" in line and of(line["environment"]) != of(self.environment):
                raise pytest.UsageError(
                    f"--run-log: {path} is of {of(line['environment'])}, not {of(self.environment)}"
                )
        self.passed = frozenset(line["test"] for line in before if line.get("outcome") == "passed")
        self.passed -= {line["test"] for line in before if line.get("outcome") == "failed"}
        self.said: dict[str, dict] = {}
        self.begun = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if before and not path.read_text().endswith("\n"):
            whole = "".join(json.dumps(line) + "\n" for line in before)
            path.write_text(whole)

    def write(self, line: dict[str, Any]) -> None:
        """With the seconds since the start."""
        line["at"] = round(time.monotonic() - self.started, 1)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, tests: list[str]) -> None:
        if not self.begun:
            self.begun = True
            began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            self.write({"environment": self.environment, "began": began, "tests": tests})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # under xdist the workers collect
            self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.begin(list(ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[PASSED] = sorted(self.passed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.said.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        if report.outcome != "passed" and found["outcome"] != "failed":
            found |= {"outcome": report.outcome, "said": why(report)}
        if report.when not in ("setup", "call"):  # a worker that died says "???"
            self.write(self.said.pop(report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:  # nothing was left to do
            session.exitstatus = exitstatus = pytest.ExitCode.OK
        self.write({"finished": int(exitstatus)})


def of(environment: dict) -> tuple:
    """What all runs of a log must share."""
    return environment["commit"], (environment["gpu"] or {}).get("name"), tuple(environment["versions"].items())


def why(report: pytest.TestReport) -> str:
    """The reason of a skip, or the message of a failure."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:400]
