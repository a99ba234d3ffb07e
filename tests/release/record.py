"""What runs have left in files, into `benchmarks/results/`; `flashdelta bench pages` shows it from there.

    python -m tests.release.record FILE_OR_FOLDER ... [--results FOLDER]

Takes documents of benchmarks and of the fuzzer, and logs of the GPU tier (`*.jsonl`). Exit code 1 if something failed in them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flashdelta.tools.bench.environment import model_of
from flashdelta.tools.bench.pages import RESULTS
from flashdelta.tools.bench.report import failures, load, new_document, save
from flashdelta.tools.bench.views import VIEWS

from ..fuzz.draw import OPERATORS
from ..fuzz.runner import PARTS
from . import log

# ---- where a document belongs --------------------------------------------------------------------------------------------


def gpu_of(document: dict) -> str:
    gpu = document["environment"]["gpu"]
    return "CPU" if gpu is None else gpu["name"]


def slug(gpu: str) -> str:
    return model_of(gpu).lower().replace(" ", "-")


def kind_of(document: dict) -> tuple[str, str, str]:
    return document["benchmark"], document.get("protocol", {}).get("backend", "auto"), gpu_of(document)


TUNING = ("half_steps", "fused_steps", "trials", "around_attention")
"""Of scripts that time forms of kernels, as wholes; no page shows them."""


def file_of(document: dict, results: Path) -> Path:
    """The file of such documents, or `<benchmark>-<backend>-<gpu>.json`, without a backend that was not asked for.

    Raises:
        ValueError: there are several.
    """
    benchmark, backend, gpu = kind_of(document)
    if benchmark in TUNING:
        return results / "tuning" / f"{benchmark}-{slug(gpu)}.json"
    known = [path for path in sorted(results.glob(f"{benchmark}-*.json")) if kind_of(load(path)) == kind_of(document)]
    if len(known) > 1:
        raise ValueError(f"results: got {', '.join(x.name for x in known)}, wanted one file of {benchmark} on {gpu}")
    named = benchmark if backend == "auto" else f"{benchmark}-{backend}"
    return known[0] if known else results / f"{named}-{slug(gpu)}.json"


# ---- the fuzzer ----------------------------------------------------------------------------------------------------------

RELEASE_CASES = 10_000
"""Of each part."""


def fuzz_rows(run: dict) -> Iterator[dict]:
    """A row for each part of a run."""
    for part in dict.fromkeys(row["part"] for row in run["rows"]):
        own = [row for row in run["rows"] if row["part"] == part]
        verdicts, operators = Counter(), Counter()
        for row in own:
            verdicts[row["verdict"]] += row["cases"]
            operators[row["op"]] += row["cases"]
        failed = [x for x in run["failures"] if x["part"] == part]
        yield {
            **{"name": f"{part}, seed {run['seed']}", "part": part, "seed": run["seed"], "cases": verdicts.total()},
            **{verdict: verdicts[verdict] for verdict in ("right", "refused", "failed")},
            **{"ours": {"problem": f"{len(failed)} failed" if failed else None}, "operators": dict(operators)},
            **{"seconds": run["seconds"], "jobs": run["jobs"], "date": run["date"]},
            **{"commit": run["environment"]["commit"], "versions": run["environment"]["versions"], "failures": failed},
        }


def with_fuzz(kept: dict | None, run: dict) -> dict:
    """A seed counts once: a later run takes an earlier one's place if it has as many cases, or a failure."""
    rows = {(row["part"], row["seed"]): row for row in (kept or {"rows": []})["rows"]}
    for row in fuzz_rows(run):
        before = rows.setdefault((row["part"], row["seed"]), row)
        if row["date"] >= before["date"] and (row["cases"] >= before["cases"] or row["failed"]):
            rows[row["part"], row["seed"]] = row
    ordered = [rows[key] for key in sorted(rows)]
    newest = max([run, *([kept] if kept else [])], key=lambda document: document["date"])
    totals = {}
    for row in ordered:
        own = totals.setdefault(row["part"], Counter(cases=0, right=0, refused=0, failed=0))
        own.update({name: row[name] for name in own})
    found = {name: newest[name] for name in ("benchmark", "date", "environment", "ran")}
    return found | {"totals": totals, "rows": ordered}


def fuzz_lacks(document: dict) -> list[str]:
    """What a release still lacks, by part."""
    lines = []
    for part in PARTS:
        rows = [row for row in document["rows"] if row["part"] == part]
        cases = sum(row["cases"] for row in rows)
        unseen = [op for op in OPERATORS if not any(row["operators"].get(op) for row in rows)]
        lacks = [f"{RELEASE_CASES - cases} more"] if cases < RELEASE_CASES else []
        lacks += [f"any of {', '.join(unseen)}"] if unseen else []
        if lacks:
            lines.append(f"{part}: {cases} of {RELEASE_CASES} cases; wanted {', and '.join(lacks)}")
    return lines


# ---- the GPU tier --------------------------------------------------------------------------------------------------------


def tests_document(lines: list[dict]) -> dict:
    """What all runs of a log came to. A test that has failed stays failed."""
    starts = [line for line in lines if "tests" in line]
    outcomes: dict[str, dict] = {}
    for line in lines:
        if "test" in line and outcomes.get(line["test"], {}).get("outcome") != "failed":
            outcomes[line["test"]] = line
    names = dict.fromkeys(name for start in starts for name in start["tests"])
    by_file: dict[str, Counter] = {}
    for name in names:
        own = by_file.setdefault(name.split("::")[0], Counter(passed=0, failed=0, skipped=0, missing=0, seconds=0))
        found = outcomes.get(name)
        own[found["outcome"] if found else "missing"] += 1
        own["seconds"] += found["seconds"] if found else 0
    failed = [x for x in outcomes.values() if x["outcome"] == "failed"]
    rows = []
    for file, own in sorted(by_file.items()):
        wrong = {"ours": {"problem": f"{own['failed']} failed" if own["failed"] else None}}
        rows.append({"name": file, **own, "seconds": round(own["seconds"], 1), **wrong})
    reasons = Counter(x["said"] for x in outcomes.values() if x["outcome"] == "skipped")
    sanitizers = [x for name, x in outcomes.items() if "memcheck" in name or "racecheck" in name]
    ends = [line for line, after in zip(lines, [*lines[1:], starts[0]]) if "tests" in after]
    document = new_document("tests", starts[0]["environment"]) | {"date": starts[-1]["began"]}
    return document | {
        "totals": {name: sum(row[name] for row in rows) for name in ("passed", "failed", "skipped", "missing")},
        "finished": "finished" in lines[-1] and all(name in outcomes for name in names),
        "seconds": round(sum(line["at"] for line in ends), 1),
        "rows": rows,
        "failures": failed,
        "skips": [{"reason": reason, "tests": n} for reason, n in reasons.most_common()],
        "sanitizers": sanitizers,
        "not run": [name for name in names if name not in outcomes],
    }


# ---- benchmarks ----------------------------------------------------------------------------------------------------------


def with_rows(kept: dict | None, run: dict) -> dict:
    """The newest measurement of each row. A row of another run than the file's has its own date, commit and copy rate."""
    kept = kept or run
    dates = {row["name"]: row.get("date", kept["date"]) for row in kept["rows"]}
    newer = {row["name"]: row for row in run["rows"] if run["date"] >= dates.get(row["name"], "")}
    if dates.keys() <= newer.keys():
        return run
    own = {"date": run["date"], "commit": run["environment"]["commit"]}
    if "ceilings" in run:
        own["copy_tb_s"] = run["ceilings"]["copy_tb_s"]
    rows = {row["name"]: row for row in kept["rows"]} | {name: row | own for name, row in newer.items()}
    return kept | {"rows": list(rows.values())}


# ---- files ---------------------------------------------------------------------------------------------------------------


def document_at(path: Path) -> dict | None:
    """None of a file that is none of ours."""
    if path.suffix == ".jsonl":
        lines = log.read(path)
        return tests_document(lines) if any("tests" in line for line in lines) else None
    found = load(path)
    return found if isinstance(found, dict) and found.get("benchmark") in (*VIEWS, *TUNING) else None


def record(path: Path, results: Path = RESULTS) -> tuple[Path, dict] | None:
    """The results file that has taken it up, and what it now holds.

    Raises:
        ValueError: the run does not say its commit.
    """
    run = document_at(path)
    if run is None:
        return None
    if run["environment"]["commit"] is None:
        raise ValueError(f"{path}: got no commit, wanted one (FLASHDELTA_COMMIT tells it to a copy without git)")
    target = file_of(run, results)
    kept = load(target) if target.exists() else None
    if run["benchmark"] == "fuzz":
        found = with_fuzz(kept, run)
    elif run["benchmark"] in ("tests", *TUNING):
        found = max([run, *([kept] if kept else [])], key=lambda document: document["date"])
    else:
        found = with_rows(kept, run)
    save(found, target)
    return target, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.record", description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results files")
    asked = parser.parse_args(arguments)
    wrong, fuzzed = False, []
    for given in asked.paths:
        inside = sorted(x for x in given.iterdir() if x.suffix in (".json", ".jsonl")) if given.is_dir() else [given]
        for path in inside:
            found = record(path, asked.results)
            if found is None:
                print(f"{path}: left out, no document of a benchmark, the fuzzer or the GPU tier")
                continue
            target, run = found
            print(f"{path}: into {target}")
            if run["benchmark"] == "fuzz":
                fuzzed.append(target)
            for x in run.get("failures", ()):
                print(f"  failed: {x.get('rerun') or x['test']}  # {x.get('message') or x.get('said')}")
            for row in failures(run) if "failures" not in run else ():
                print(f"  failed: {row['name']}: {row['ours']['problem']}")
            wrong |= bool(run.get("failures") or failures(run))
    for target in dict.fromkeys(fuzzed):
        for line in fuzz_lacks(load(target)):
            print(f"{target}: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
