"""Serves random Kimi-Linear and Kimi-K3 layers with vLLM, without flashdelta and with it: do they agree, and who is faster?

    python benchmarks/serve/run.py agree                     # 4 dense layers, each against float64
    python benchmarks/serve/run.py times --waves 3           # 16 layers; three processes each, off and on in turn
    python benchmarks/serve/run.py memory                    # one engine that measures its own memory, filled to the brim
    python benchmarks/serve/run.py report FILE.json ...      # the tables of earlier runs, together
    python benchmarks/serve/run.py docs FILE.json ...        # the same, into docs/integrations.md and docs/numerics.md

Nothing is fetched. Results are saved after each measurement to `serve-agree.json`, `serve-times.json` in --out. The exit status
of `agree` is 0 if everything agrees. See README.md for a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import agree
import models
import times
import together

NOT_STOCK = "torch 2.11 (vLLM 0.33.0 asks for 2.14); no cutlass-dsl, FlashInfer or torchvision; one process"
DEFAULT = {
    "agree": "linear:off,linear:on,linear:base,draft:off,draft:on;k3:off,k3:on,k3:base,preempt:off,preempt:on",
    "times": "k3:off,k3:on,linear:off,linear:on;draft:off,draft:on,k3-24:off,k3-24:on,k3-24:fused",
    "memory": "k3:off;k3:on",
}
SIZES = {
    "agree": models.Sizes(layers=4, experts=0, longest=24_000, cache_gib=5.0),
    "times": models.Sizes(cache_gib=6.0),
    "memory": models.Sizes(layers=4, experts=0, longest=24_000, cache_gib=0.0),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("agree", "times", "memory", "report", "docs"))
    add("files", nargs="*", help="of report and docs")
    add("--cases", help="SCENARIO:MODE,... that start together; groups after ';' start when those before have ended")
    add("--waves", type=int, default=1, help="how often processes start anew (default: 1)")
    add("--rows", default="", help="of times: those whose names have one of PART,...")
    add("--limit", type=float, default=3600, help="seconds for everything; what is there by then is reported")
    work = os.environ.get("SERVE_DIR") or os.path.join(tempfile.gettempdir(), "flashdelta_serve")
    add("--work", help="for engines' logs and caches", default=work)
    add("--out", default=os.environ.get("OUT", "."))
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def child(args: argparse.Namespace) -> None:
    """One engine: it warms up, then answers."""
    name, mode = args.child.split(":")
    if args.what == "agree":
        agree.install()
    models.register()
    folder = os.path.join(args.work, "models", f"{args.what}-{name}-{mode}")
    llm = models.engine(models.SCENARIOS[name], mode, SIZES[args.what], folder)
    if args.what != "memory":
        times.warm(llm, name)
    rows = times.rows(llm, name) if args.what == "times" else {}
    known = {"": lambda: models.described(llm), "rows": lambda: {"rows": [*rows]}}
    known |= {"agree": lambda: agree.report(llm, name), "memory": lambda: filled(llm)}
    together.serve_lines(args.child, args.work, lambda x: known[x]() if x in known else {"found": rows[x]()})


def filled(llm) -> dict:
    """The most memory that the device had to give, after the largest prefill of the most sequences; in GiB."""
    import torch

    for seed in range(3):
        models.run(llm, [models.tokens(1000 * seed + i, 64) for i in range(128)], 4)
        models.run(llm, [models.tokens(1000 * seed, 8192)], 1)
    free, whole = torch.cuda.mem_get_info()
    return {"used": (whole - free) / 2**30, "allowed": 0.9 * whole / 2**30}


def main() -> int:
    args = parse()
    if args.child:
        child(args)
    if args.what not in SIZES:
        return report([json.loads(Path(name).read_text()) for name in args.files], args.what == "docs")
    for folder in (args.work, args.out):
        os.makedirs(folder, exist_ok=True)
    until = time.monotonic() + args.limit
    found: dict = {"what": args.what, "sizes": vars(SIZES[args.what]), "not stock": NOT_STOCK, "samples": []}
    found |= {"engines": {}, "reports": {}, "compiled": {}}
    arguments = [x for x in sys.argv[1:] if x != "--child"]
    for wave in range(args.waves):
        for group in (args.cases or DEFAULT[args.what]).split(";"):
            if until - time.monotonic() < 60:
                print(f"no time left for {group}", flush=True)
                continue
            workers, said = together.start(group.split(","), arguments, args.work, until - 20)
            found["engines"] |= said
            if args.what == "times":
                times.in_turn(workers, until, wave, found["samples"].append, args.rows)
            for worker in workers if args.what != "times" else ():
                answer = worker.ask(args.what, until)
                print(worker.case, "measured" if answer else "ended without an answer", flush=True)
                if answer is None:
                    print(*worker.log().splitlines()[-15:], sep="\n", flush=True)
                else:
                    found["reports"][worker.case] = answer
                together.write(os.path.join(args.out, f"serve-{args.what}.json"), found)
            for worker in workers:
                found["compiled"][worker.case] = worker.compiled()
                worker.end()
            together.write(os.path.join(args.out, f"serve-{args.what}.json"), found)
    found["compared"] = agree.compared(found["reports"]) if args.what == "agree" else ([], [])
    for answer in found["reports"].values():
        answer.pop("scores", None)  # thousands of numbers, of which the comparison has what counts
    together.write(os.path.join(args.out, f"serve-{args.what}.json"), found)
    return report([found])


def ours(names: list[str]) -> list[str]:
    """Those of the kernels, named first, that are flashdelta's."""
    source = "".join(x.read_text() for x in (Path(__file__).parents[2] / "src" / "flashdelta").rglob("*.py"))
    return [name for name in names if f"def {name.split()[0]}(" in source]


def fill(page: str, name: str, table: str) -> None:
    path = Path(__file__).parents[2] / "docs" / page
    text, mark = path.read_text(), f"<!-- serve: {name} -->\n"
    before, rest = text.split(mark)
    path.write_text(f"{before}{mark}{table}\n{rest[rest.index('<!-- serve: end -->') :]}")


def report(files: list[dict], docs: bool = False) -> int:
    wrong: list[str] = []
    for case, found in {k: v for f in files for k, v in f["engines"].items()}.items():
        print(f"{case}: {found}")
        wanted = "active" if case.split(":")[1].startswith(("on", "fused")) else "possible"
        wrong += [] if found["flashdelta"] == wanted else [f"{case}: flashdelta is {found['flashdelta']}"]
    for f in files:
        for case, names in f["compiled"].items():
            wrong += [f"{case}: compiled while it served: {name}" for name in ours(names)]
        for case, x in f["reports"].items() if f["what"] == "memory" else ():
            print(case, x)
            off = f["reports"].get(f"{case.split(':')[0]}:off", {"used": 0.0})["used"]
            allowed = max(x["allowed"], off)
            wrong += [] if x["used"] <= allowed else [f"{case}: {x['used']:.1f} GiB of {allowed:.1f}"]
    if samples := [s for f in files for s in f["samples"]]:
        print(table := times.table(times.summary(samples)))
        if docs:
            fill("integrations.md", "times", table)
    if compared := [f["compared"] for f in files if f["what"] == "agree"]:
        rows, logs = ([x for both in compared for x in both[i]] for i in range(2))
        print(table := agree.table(rows, logs))
        if docs:
            fill("numerics.md", "agreement", table)
        for case, x in ((case, x) for f in files for case, x in f["reports"].items() if "parts" in x):
            print(case, {part: {k: y for k, y in p.items() if k != "layers"} for part, p in x["parts"].items()})
        wrong += agree.passes(rows, logs) or ([] if rows else ["nothing to compare"])
    print(*(f"WRONG {x}" for x in wrong), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
