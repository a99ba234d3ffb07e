import os, pathlib
done = set(pathlib.Path(".carry/done.txt").read_text().split("\n")) if os.path.exists(".carry/done.txt") else set()
out = os.environ.get("OUT", ".")
def pytest_collection_modifyitems(config, items):
    keep = [i for i in items if i.nodeid not in done]
    gone = [i for i in items if i.nodeid in done]
    if gone:
        config.hook.pytest_deselected(items=gone); items[:] = keep
def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER"): return
    if report.when == "call":
        with open("/tmp/durations.tsv", "a") as f: f.write(f"{report.nodeid}\t{report.outcome}\t{report.duration:.2f}\n")
    elif report.outcome != "passed":
        with open("/tmp/durations.tsv", "a") as f: f.write(f"{report.nodeid}\t{report.when}-{report.outcome}\t{report.duration:.2f}\n")
    if report.failed:
        with open("/tmp/fails.txt", "a") as f: f.write(f"==== {report.nodeid} {report.when}\n{str(report.longrepr)[-2500:]}\n")
