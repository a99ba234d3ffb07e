"""Runs `vllm bench serve` of an installed vLLM against a real model, without flashdelta and with it, in turn.

    python benchmarks/serve/stock.py moonshotai/Kimi-Linear-48B-A3B-Instruct [-- --tensor-parallel-size 4 ...]

Random prompts of 8192 tokens, 128 tokens out, by 1, 32 and 128 users at once; three servers each, off and on in turn. Results
go to `stock.json`, the table to the screen. What follows `--` goes to `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

USERS = (1, 32, 128)
NUMBERS = {"median_ttft_ms": "first token, ms", "median_tpot_ms": "token, ms", "total_token_throughput": "tokens/s"}
PORT = 8123


def measured(model: str, options: list[str], on: bool) -> dict[str, float]:
    """One server, by number of users and number."""
    environment = os.environ | {"FLASHDELTA_VLLM": str(int(on))}
    command = ["vllm", "serve", model, "--port", str(PORT), "--trust-remote-code", *options]
    server = subprocess.Popen(command, env=environment)
    try:
        found: dict[str, float] = {}
        for users in USERS:
            with tempfile.TemporaryDirectory() as folder:
                bench = f"""vllm bench serve --model {model} --port {PORT} --trust-remote-code --dataset-name random
                    --random-input-len 8192 --random-output-len 128 --ignore-eos --max-concurrency {users}
                    --num-prompts {max(8, 2 * users)} --num-warmups {min(users, 8)} --save-result --result-dir {folder}
                    --ready-check-timeout-sec 3600"""
                subprocess.run(bench.split(), check=True)
                numbers = json.loads(next(Path(folder).glob("*.json")).read_text())
            found |= {f"{users} users: {said}": numbers[name] for name, said in NUMBERS.items()}
        return found
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("options", nargs="*", help="of `vllm serve`")
    model, options = vars(parser.parse_args()).values()
    samples: dict[str, list[dict]] = {"off": [], "on": []}
    for _ in range(3):
        for mode, found in samples.items():
            found.append(measured(model, options, mode == "on"))
            Path("stock.json").write_text(json.dumps({"model": model, "options": options, **samples}))
    print("| what | off | on | on / off |\n| --- | ---: | ---: | ---: |")
    for row in samples["off"][0]:
        off, on = (statistics.median(x[row] for x in samples[mode]) for mode in samples)
        print(f"| {row} | {off:,.4g} | {on:,.4g} | {on / off:.3f} |")


if __name__ == "__main__":
    main()
