"""A release's GPU evidence without a GPU: parts that pass, fail, hang, write garbage; logs of runs that are killed; records."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.main import get_command

from flashdelta.tools.bench import pages
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.report import new_document, show
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.cli.app import app
from flashdelta.tools.cli.bench import Options, chosen_rows

from .. import conftest
from ..fuzz import runner
from ..fuzz.draw import OPERATORS
from ..release import log, loop, processes, record
from ..release.parts import LONGEST, PARTS, RANKS, Part

ROOT = Path(__file__).parents[2]
FACTS = {"commit": "c" * 40, "gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}}

# ---- the loop ---------------------------------------------------------------------------------------------------------------


def fake(name: str, code: str, limit: int = 60, **more: object) -> Part:
    return Part(name, ("-c", code, "{out}/{name}.json"), limit, "", "a fake", least=0, **more)


GOOD = "import sys; open(sys.argv[1], 'w').write('{}'); print('all well')"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f'{{"child": {child.pid}}}')
time.sleep(600)
"""
GARBAGE = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100); open(sys.argv[1], 'w').write('{\"rows\": [')"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STARTS", 0.0)
    monkeypatch.setattr(processes, "GRACE", 1.0)


def lives(pid: int) -> bool:
    """Neither gone nor waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_part_has_its_own_end(quick: None, tmp_path: Path):
    parts = [
        fake("fails", "print('why'); raise SystemExit(3)"),
        fake("hangs", HANGS, limit=2),
        fake("garbage", GARBAGE),
        fake("silent", "pass"),
        fake("absent", GOOD, needs=("json", "no_such_module", "NO_SUCH_VARIABLE")),
        fake("good", GOOD),
    ]
    found = loop.run_all(parts, tmp_path, 300.0, FACTS)
    assert [(x.part, x.status) for x in found] == [
        ("fails", "failed"),
        ("hangs", "timed out"),
        ("garbage", "failed"),
        ("silent", "failed"),
        ("absent", "skipped"),
        ("good", "passed"),
    ]
    assert [x.said for x in found if x.part in ("fails", "absent", "good")] == [
        "why",
        "not here: no_such_module, NO_SUCH_VARIABLE",
        "all well",
    ]
    assert "garbage.json: JSONDecodeError" in found[2].said and "silent.json: FileNotFoundError" in found[3].said
    assert not lives(json.loads((tmp_path / "hangs.json").read_text())["child"])
    lines = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == [part.name for part in parts]
    assert all(line["commit"] == FACTS["commit"] for line in lines)


def test_it_goes_on_where_it_ended(quick: None, tmp_path: Path):
    fails = fake("second", "raise SystemExit(1)")
    first, third = (fake(name, GOOD, again=name == "third") for name in ("first", "third"))
    assert [x.status for x in loop.run_all([first, fails], tmp_path, 60.0, FACTS)] == ["passed", "failed"]
    found = loop.run_all([first, fake("second", GOOD), third], tmp_path, 60.0, FACTS)
    before = "before: all well"
    assert [(x.part, x.said) for x in found] == [("first", before), ("third", "all well"), ("second", "all well")]
    assert [x.said for x in loop.run_all([first, third], tmp_path, 60.0, FACTS)] == [before, before]
    found = loop.run_all([first, third], tmp_path, 60.0, FACTS, again=True)
    assert [x.said for x in found] == [before, "all well"], "with another seed it is another part"
    found = loop.run_all([first], tmp_path, 60.0, FACTS | {"commit": "d" * 40})
    assert found[0].said == "all well", "what passed on another commit says nothing"


@pytest.mark.parametrize("resumes", [False, True])
def test_what_timed_out_starves_no_other(quick: None, tmp_path: Path, resumes: bool):
    """Unless it goes on where it ended."""
    parts = [fake("hangs", HANGS, limit=1, resumes=resumes), fake("good", GOOD)]
    assert [x.status for x in loop.run_all(parts[:1], tmp_path, 60.0, FACTS)] == ["timed out"]
    order = [x.part for x in loop.run_all(parts, tmp_path, 60.0, FACTS)]
    assert order == (["hangs", "good"] if resumes else ["good", "hangs"])
    assert [part.name for part in PARTS if part.resumes] == ["tests"]


def test_it_keeps_to_its_time(quick: None, tmp_path: Path):
    sleeps = fake("sleeps", "import time; time.sleep(600)", limit=500)
    began = time.monotonic()
    found = loop.run_all([sleeps, fake("late", GOOD)], tmp_path, 3.0, FACTS)
    assert [x.status for x in found] == ["timed out", "no time"] and time.monotonic() - began < 300
    long = Part("long", ("-c", GOOD, "{out}/{name}.json"), 500, "", "", least=100)
    assert [x.status for x in loop.run_all([long], tmp_path, 90.0, FACTS)] == ["no time"]


# ---- GPUs -------------------------------------------------------------------------------------------------------------------

MEETS = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
here.with_suffix(".gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
until = time.monotonic() + 90
while len(list(here.parent.glob("*.gpu"))) < 3 and time.monotonic() < until:
    time.sleep(0.05)
print(os.environ["CUDA_VISIBLE_DEVICES"], time.monotonic() < until)
here.write_text("{}")
"""
SEES = GOOD.replace("'all well'", "__import__('os').environ['CUDA_VISIBLE_DEVICES']")


def test_a_part_runs_on_each_gpu(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At once, after those that take all of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,1,7")
    beside = [fake(name, MEETS) for name in "abc"]
    wide = [fake("all", SEES, gpus=0), fake("two", SEES, gpus=2), fake("four", SEES, gpus=4)]
    found = {x.part: x for x in loop.run_all([*beside, *wide], tmp_path, 100.0, FACTS)}
    assert list(found) == ["all", "two", "four", "a", "b", "c"]
    assert [found[name].said for name in ("all", "two", "four")] == ["4,1,7", "4,1,7", "not here: 4 GPUs"]
    assert sorted(found[name].said for name in "abc") == ["1 True", "4 True", "7 True"]
    lines = {line["part"]: line for line in log.read(tmp_path / "parts.jsonl")}
    assert {name: lines[name]["beside"] for name in ("all", "two", "a", "b", "c")} == {
        **{"all": [], "two": []},
        **{"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]},
    }
    assert lines["all"]["gpus"] == ["4", "1", "7"] and [lines["a"]["gpus"][0]] == found["a"].said.split()[:1]


def test_what_has_its_gpu_only_shares_the_host():
    """The parts that time two GPUs, or fill the host with tests, do not."""
    assert {part.name for part in PARTS if part.gpus != 1} == {"tests", *(f"ranks-{x}" for x in (*RANKS, "layers"))}


def test_workers_find_other_gpus_first(monkeypatch: pytest.MonkeyPatch):
    for visible, wanted in (("4,1,7", ["4,1,7", "1,7,4", "7,4,1", "4,1,7"]), ("2", [None] * 4), ("", [None] * 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        specs = [SimpleNamespace(env={}) for _ in range(4)]
        conftest.pytest_xdist_setupnodes(specs)
        assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs] == wanted


# ---- seeds ------------------------------------------------------------------------------------------------------------------


def test_a_seed_is_used_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir(), out.mkdir()
    monkeypatch.setattr(loop, "RESULTS", results)
    (part,) = (x for x in PARTS if x.name == "fuzz")
    (results / "fuzz-cpu.json").write_text(json.dumps({"rows": [{"seed": 4}, {"seed": 112}]}))
    assert f"--seed 113 --json {out}/fuzz-113.json" in " ".join(loop.command_of(part, out, 500))
    (out / "fuzz-113.json").write_text(json.dumps({"seed": 113, "rows": [{"part": "calls"}]}))
    (out / "fuzz-114.json").write_text('{"seed"')
    assert loop.next_seed(results, out) == 114


def test_the_command_ends_with_a_short_table(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("FLASHDELTA_COMMIT", "c" * 40)
    with pytest.raises(SystemExit, match="got no GPU"):
        loop.main(["--out", str(tmp_path)])
    monkeypatch.setattr(loop, "gpu", lambda device: {"name": "NVIDIA H200"})
    monkeypatch.setattr(loop, "PARTS", (fake("good", GOOD), fake("fails", "raise SystemExit('why')")))
    assert loop.main(["--out", str(tmp_path), "--only", "good"]) == 0
    assert loop.main(["--out", str(tmp_path)]) == 1
    found = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split() for line in found] == [
        ["good", "passed", "0", "before:", "all", "well"],
        ["fails", "failed", "0", "why"],
    ]
    lost = "missed bounds: T8192 H4, random gates (by graph <= 1.15x the fastest other; 0.088 ms)"
    monkeypatch.setattr(loop, "PARTS", (fake("misses", GOOD.replace("all well", lost)),))
    for said in (lost, f"before: {lost}"):
        assert loop.main(["--out", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"misses: {said}"
    monkeypatch.setattr(loop, "git_commit", lambda: None)
    with pytest.raises(SystemExit, match="FLASHDELTA_COMMIT"):
        loop.main(["--out", str(tmp_path)])


# ---- the parts --------------------------------------------------------------------------------------------------------------


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(words: list[str]) -> list:
    """Those that a command of `flashdelta` measures; raises where it does not parse."""
    assert words[0] == "bench"
    name, *rest = words[1:]
    options = Options(**get_command(app).commands["bench"].commands[name].make_context(name, rest).params)
    assert options.json is not None
    return chosen_rows(BENCHMARKS[name], options)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_command_parses(part: Part, tmp_path: Path):
    assert 0 < part.limit <= LONGEST and part.least <= part.limit and part.why
    words = loop.command_of(part, tmp_path, part.limit)[1:]
    assert any(word.startswith(str(tmp_path)) for word in words) and not any("{" in word for word in words)
    if words[:2] == ["-m", "flashdelta"]:
        found = rows_of(words[2:])
        assert 0 < len(found) <= 100
        assert part.results.startswith(words[3]) and part.results.endswith("-<gpu>.json")
    elif words[:2] == ["-m", "tests.fuzz"]:
        assert runner.parsed(words[2:]).seconds < part.limit
    elif words[0].startswith("benchmarks/"):
        assert script(words[0]).PARSER.parse_args(words[1:]).out.parent == tmp_path
    else:
        assert words[:3] == ["-m", "pytest", "-q"]


def test_a_command_that_does_not_parse_shows():
    with pytest.raises(Exception, match="No such option"):
        rows_of(["bench", "decode", "--row", "verify", "--json", "x.json"])
    with pytest.raises(ValueError, match="matches none"):
        rows_of(["bench", "decode", "--rows", "no such row", "--json", "x.json"])


def measured_rows() -> list[tuple[str, str]]:
    """Of all parts, by the benchmark's name."""
    found = []
    for part in PARTS:
        if part.command[:2] == ("-m", "flashdelta"):
            stem = part.results.removesuffix("-<gpu>.json").removesuffix("-hopper")
            found += [(stem, row.name) for row in rows_of(list(part.command[2:]))]
    return found


def test_parts_of_a_benchmark_are_all_of_it():
    found = measured_rows()
    for name in ("cp", "layer", "models", "prefill", "shards", "train"):
        wanted = [row.name for row in BENCHMARKS[name].rows]
        wanted += [row.name for row in BENCHMARKS[name].more] if name in ("cp", "prefill", "train") else []
        assert sorted(row for stem, row in found if stem == name) == sorted(wanted)


def test_parts_over_ranks_are_short():
    """And each of one number of heads, for which FLA tunes its kernels once."""
    over = [part for part in PARTS if part.gpus > 1]
    assert Counter(part.gpus for part in over) == {2: 9, 4: 6, 8: 5}
    assert [part.name for part in PARTS].index("prefill") < PARTS.index(over[0])
    for part in over:
        found = rows_of(list(part.command[2:]))
        assert len(found) <= 4 and part.limit < LONGEST and len({row.call.H for row in found}) == 1


def test_every_row_of_the_readme_is_measured():
    measured = {*measured_rows()}
    wanted = {(x.results.removesuffix("-hopper"), x.row) for x in pages.HEADLINES}
    assert wanted <= measured


def test_the_table_is_for_reading(capsys: pytest.CaptureFixture):
    assert loop.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(part.name in said and part.why in said for part in PARTS)
    with pytest.raises(SystemExit, match="2"):
        loop.main(["--only", "no such part"])


# ---- the log of tests -------------------------------------------------------------------------------------------------------

SOME = """
import os, pytest
@pytest.mark.parametrize("i", range(3))
def test_passes(i): pass
def test_fails(): assert 1 == 2, "the sum"
def test_skipped(): pytest.skip("no such device")
def test_memcheck_finds_nothing(): pass
def test_last():
    if os.environ.get("ENDS"): os._exit(9)
@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the end")
def test_teardown(broken): pass
"""


def test_a_log_tells_what_a_killed_run_had_done_and_a_second_run_does_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second one under xdist."""
    (tmp_path / "test_some.py").write_text(SOME)
    path = tmp_path / "out" / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.release.log", "--run-log", str(path)]
    command += ["-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_some.py"), "-p", "no:cacheprovider"]
    given = {**os.environ, "FLASHDELTA_COMMIT": "c" * 40, "PYTEST_ADDOPTS": ""}
    subprocess.run(command, cwd=ROOT, env=given | {"ENDS": "1"}, capture_output=True, timeout=300, check=False)
    document = record.tests_document(log.read(path))
    assert document["totals"] == {"passed": 4, "failed": 1, "skipped": 1, "missing": 2} and not document["finished"]
    assert document["not run"] == ["test_some.py::test_last", "test_some.py::test_teardown"]
    with path.open("a") as file:
        file.write('{"test": "test_some.py::te')  # a line that the end cut off
    done = subprocess.run([*command, "-n", "2"], cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "1 failed, 2 passed, 1 skipped, 1 error" in done.stdout, done.stdout
    document = record.tests_document(log.read(path))
    assert document["totals"] == {"passed": 5, "failed": 2, "skipped": 1, "missing": 0} and document["finished"]
    assert document["environment"]["commit"] == "c" * 40 and document["not run"] == []
    assert {x["test"]: x["said"] for x in document["failures"]} == {
        "test_some.py::test_fails": "AssertionError: the sum assert 1 == 2",
        "test_some.py::test_teardown": "RuntimeError: in the end",
    }
    assert document["skips"] == [{"reason": "no such device", "tests": 1}]
    assert [(x["test"], x["outcome"]) for x in document["sanitizers"]] == [
        ("test_some.py::test_memcheck_finds_nothing", "passed")
    ]
    monkeypatch.setenv("FLASHDELTA_COMMIT", "c" * 40)
    again, session = log.Log(path), SimpleNamespace(exitstatus=pytest.ExitCode.NO_TESTS_COLLECTED)
    again.pytest_sessionfinish(session, session.exitstatus)
    assert len(again.passed) == 5 and session.exitstatus == 0
    monkeypatch.setenv("FLASHDELTA_COMMIT", "d" * 40)
    with pytest.raises(pytest.UsageError, match=r"--run-log: .* is of .*cccc.*, not .*dddd"):
        log.Log(path)


def test_what_workers_skip_passes_alone():
    """The part that runs it writes into the same log, later."""
    tests, alone = (next(part for part in PARTS if part.name == name) for name in ("tests", "tutorial"))
    logs = [part.command[-1].format(out="out", name=part.name) for part in (tests, alone)]
    assert logs[0] == logs[1] and alone.gpus == 1 and not {"-n", "{jobs}"} & {*alone.command}
    start = {"environment": {"commit": "c", "gpu": None, "versions": {}}, "began": "2026", "at": 2}
    skipped, passed = ({"test": "a.py::x", "seconds": 1.0, "said": "", "outcome": x} for x in ("skipped", "passed"))
    first = [start | {"tests": ["a.py::x", "a.py::y"]}, skipped | {"at": 3}, passed | {"test": "a.py::y", "at": 3}]
    document = record.tests_document(
        [*first, {"finished": 0, "at": 4}, start | {"tests": ["a.py::x"]}, passed | {"at": 5}]
    )
    assert document["totals"] == {"passed": 2, "failed": 0, "skipped": 0, "missing": 0}


def test_a_test_that_failed_once_stays_failed():
    start = {
        "environment": {"commit": "c", "gpu": None, "versions": {}},
        "began": "2026",
        "tests": ["a.py::x"],
        "at": 2,
    }
    found = {"test": "a.py::x", "seconds": 1.0, "said": "no"}
    lines = [start, found | {"outcome": "failed", "at": 4}, start, found | {"outcome": "passed", "at": 5}]
    document = record.tests_document(lines)
    assert document["seconds"] == 9 and not document["finished"]
    assert record.tests_document([*lines, {"finished": 0, "at": 6}])["finished"]
    assert document["totals"]["failed"] == 1 and [x["test"] for x in document["failures"]] == ["a.py::x"]
    assert "1 of 1 rows failed" in show(document | {"environment": environment()}, VIEWS["tests"], wide=True)


# ---- records ----------------------------------------------------------------------------------------------------------------


def environment(gpu: str | None = "NVIDIA H200", commit: str | None = "c" * 40) -> dict:
    return {"gpu": None if gpu is None else {"name": gpu}, "versions": {"torch": "2.11.0"}, "commit": commit}


def fuzz_run(seed: int, cases: int, failed: int = 0, hour: int = 1, **more: object) -> dict:
    rows = [{"part": "calls", "op": "commit", "verdict": "right", "cases": cases - failed}]
    rows += [{"part": "calls", "op": "commit", "verdict": "failed", "cases": failed}] if failed else []
    failures = [
        {"part": "calls", "op": "commit", "case": i, "message": "off", "rerun": f"rerun {seed} {i}"}
        for i in range(failed)
    ]
    document = new_document("fuzz", environment(**more)) | {"date": f"2026-01-01T0{hour}"}
    return document | {"seed": seed, "seconds": 9.0, "jobs": 2, "ran": "kernels", "rows": rows, "failures": failures}


def kept(tmp_path: Path, *runs: dict) -> dict:
    for run in runs:
        path = tmp_path / "run.json"
        path.write_text(json.dumps(run))
        target, _ = record.record(path, tmp_path / "results")
    return json.loads(target.read_text())


def test_seeds_add_up_and_count_once(tmp_path: Path):
    found = kept(tmp_path, fuzz_run(8, 100), fuzz_run(7, 50), fuzz_run(8, 100, hour=2), fuzz_run(8, 90, hour=3))
    assert [(row["seed"], row["cases"], row["date"]) for row in found["rows"]] == [
        (7, 50, "2026-01-01T01"),
        (8, 100, "2026-01-01T02"),
    ]
    assert found["totals"] == {"calls": {"cases": 150, "right": 150, "refused": 0, "failed": 0}}
    assert "calls: 150 cases, 150 right, 0 failed; commits ccccccc; seeds 7, 8" in VIEWS["fuzz"].summary(found)


def test_a_failure_stays_until_its_seed_has_passed(tmp_path: Path):
    found = kept(tmp_path, fuzz_run(7, 100), fuzz_run(7, 60, failed=2, hour=2), fuzz_run(7, 40, hour=3))
    assert found["totals"]["calls"] == {"cases": 60, "right": 58, "refused": 0, "failed": 2}
    assert "failed at ccccccc: rerun 7 1: off" in VIEWS["fuzz"].summary(found)
    assert "correctness: 1 of 1 rows failed" in show(found, VIEWS["fuzz"], wide=True)
    assert kept(tmp_path, fuzz_run(7, 60, hour=4))["totals"]["calls"]["failed"] == 0


def test_the_page_shows_both(tmp_path: Path):
    kept(tmp_path, fuzz_run(7, 100))
    said = pages.section(tmp_path / "results" / "fuzz-h200.json")
    assert "`make fuzz`, fuzz on NVIDIA H200" in said and "* calls: 100 cases" in said and "commit `ccccccc`" in said
    log_of_two = [
        {
            "environment": environment(),
            "began": "2026-01-01T01",
            "tests": ["a.py::x", "a.py::test_racecheck"],
            "at": 1.0,
        },
        {"test": "a.py::x", "outcome": "skipped", "seconds": 1.0, "said": "no such device", "at": 2.0},
        {"test": "a.py::test_racecheck", "outcome": "passed", "seconds": 2.0, "at": 3.0},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in log_of_two))
    said = pages.section(record.record(path, tmp_path / "results")[0])
    assert "`make gpu-test`, tests on NVIDIA H200" in said and "| a.py | 1 | 0 | 1 | 0 | 3.00 |" in said
    assert "* sanitizer: a.py::test_racecheck: passed in 2 s" in said and "* 1 skipped: no such device" in said
    assert "* not finished; not run: 0" in said


def test_what_a_release_still_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "fuzz-7.json"
    path.write_text(json.dumps(fuzz_run(7, 9589)))
    assert record.main([str(path), "--results", str(tmp_path / "results")]) == 0
    calls, mutations = (line for line in capsys.readouterr().out.splitlines() if "of 10000 cases" in line)
    others = ", ".join(name for name in OPERATORS if name != "commit")
    assert "calls: 9589 of 10000 cases; wanted 411 more, and any of " + others in calls
    assert "mutations: 0 of 10000 cases; wanted 10000 more, and any of chunk_kda, " in mutations
    full = {
        "rows": [{"part": part, "cases": 10_000, "operators": dict.fromkeys(OPERATORS, 1)} for part in runner.PARTS]
    }
    assert record.fuzz_lacks(full) == []


def test_each_gpu_has_its_file(tmp_path: Path):
    kept(tmp_path, fuzz_run(1, 5), fuzz_run(1, 5, gpu=None), fuzz_run(1, 5, gpu="NVIDIA H100 80GB HBM3"))
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"fuzz-h200.json", "fuzz-cpu.json", "fuzz-h100.json"}


def test_a_run_without_a_commit_is_no_evidence(tmp_path: Path):
    with pytest.raises(ValueError, match="FLASHDELTA_COMMIT"):
        kept(tmp_path, fuzz_run(1, 5, commit=None))


def test_failures_are_said_and_files_of_others_left_out(tmp_path: Path, capsys: pytest.CaptureFixture):
    out, results = tmp_path / "out", str(tmp_path / "results")
    out.mkdir()
    (out / "parts.jsonl").write_text('{"part": "fuzz", "status": "failed"}\n')
    (out / "fuzz-7.json").write_text(json.dumps(fuzz_run(7, 10)))
    assert record.main([str(out), "--results", results]) == 0
    assert "parts.jsonl: left out" in capsys.readouterr().out
    (out / "fuzz-8.json").write_text(json.dumps(fuzz_run(8, 10, failed=1)))
    assert record.main([str(out), "--results", results]) == 1
    assert "failed: rerun 8 0  # off" in capsys.readouterr().out


def bench_run(commit: str, *names: str, benchmark: str = "train", backend: str = "auto") -> dict:
    rows = [{"name": name, "ours": {"problem": None}, "speedup": float(len(commit))} for name in names]
    document = new_document(benchmark, environment(commit=commit)) | {"protocol": {"backend": backend}}
    return document | {"ceilings": {"copy_tb_s": 4.0}, "rows": rows}


def test_rows_of_a_benchmark_take_the_place_of_their_own(tmp_path: Path):
    results = tmp_path / "results"
    results.mkdir()
    (results / "train-hopper-h200.json").write_text(json.dumps(bench_run("a", "x", "y")))
    found = kept(tmp_path, bench_run("bb", "y", "z"))
    assert {path.name for path in results.iterdir()} == {"train-hopper-h200.json"}
    assert [(row["name"], row["speedup"], row.get("commit")) for row in found["rows"]] == [
        ("x", 1.0, None),
        ("y", 2.0, "bb"),
        ("z", 2.0, "bb"),
    ]
    assert found["environment"]["commit"] == "a" and found["rows"][1]["copy_tb_s"] == 4.0
    older = bench_run("older", "x", "y", "z") | {"date": "2020-01-01"}
    assert kept(tmp_path, older) == found
    assert kept(tmp_path, bench_run("ccc", "x", "y", "z"))["environment"]["commit"] == "ccc"
    kept(
        tmp_path,
        bench_run("a", "x", benchmark="prefill", backend="hopper"),
        bench_run("a", "x", benchmark="half_steps"),
    )
    assert (results / "prefill-hopper-h200.json").exists() and (results / "tuning/half_steps-h200.json").exists()
