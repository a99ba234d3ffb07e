"""`flashdelta doctor`: what is here, what can run, and is it right."""

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import flashdelta

from ... import integrations
from ...problem import device_checks
from ..cases import BF16, TOLERANCE, Case, make_call, truth
from ..environment import environment
from .verify import outcome, saying

TYPICAL = Case("typical", "what a model calls, and small", T=130, safe=True)
"""Two chunks and a tail of two heads reach every kernel, and the float64 recurrence takes well under a second."""


LABELS = {"cudnn": "cuDNN's Python frontend"}
"""Packages by what they are, where the name to import says more."""


def examine(device: torch.device, progress: bool = True) -> dict:
    """Reports the environment, every backend's verdict on a typical bf16 call, a self-check of the `auto` backend, and what
    frameworks can run on flashdelta. `progress`: say on stderr what takes seconds."""
    with saying(progress) as say:
        say("checking a call against float64")
        call = make_call(TYPICAL, BF16, device)
        explanation = flashdelta.explain(flashdelta.chunk_kda, **call)
        verdicts = [{"name": x.pop("backend"), **x} for x in map(asdict, explanation.verdicts)]
        found = {"environment": environment(device), "FLASHDELTA_CHECK": device_checks.ENABLED}
        found["backends"] = {"chosen": explanation.chosen, "verdicts": verdicts}
        return found | {"self_check": self_check(call), "integrations": integrated(say)}


def integrated(say: Callable[[str], None]) -> list[dict]:
    found = []
    with warnings.catch_warnings():  # of frameworks that look for a GPU as they are imported
        warnings.simplefilter("ignore")
        for name in integrations.NAMES:
            say(f"looking for {name} (an import takes seconds)")
            found.append(asdict(integrations.status(name)))
    return found


@torch.no_grad()
def self_check(call: dict) -> dict:
    """One call of `chunk_kda` against the float64 recurrence on the same inputs."""
    tolerance = TOLERANCE[call["q"].dtype]
    start = time.perf_counter()
    found = outcome(TYPICAL, flashdelta.chunk_kda, call, "auto", truth(call), tolerance)
    seconds = time.perf_counter() - start
    return {"passed": found["status"] == "passed", **found, "tolerance": tolerance, "seconds": seconds}


def show(report: dict, console: Console) -> None:
    found = report["environment"]
    facts = Table.grid(padding=(0, 2))
    for name, version in found["versions"].items():
        facts.add_row(LABELS.get(name, name), version or "[dim]not installed[/dim]")
    gpu = found["gpu"]
    facts.add_row("device", found["device"])
    if gpu:
        facts.add_row("GPU", f"{gpu['name']}, {gpu['capability']}, {gpu['memory_gib']} GiB, {gpu['sms']} SMs")
    facts.add_row("driver", found["driver"] or "[dim]no NVIDIA driver[/dim]")
    facts.add_row("CUDA of torch", found["cuda"] or "[dim]built without CUDA[/dim]")
    checks = "on: calls read indices and offsets on the host" if report["FLASHDELTA_CHECK"] else "off"
    facts.add_row("FLASHDELTA_CHECK", f"{checks} (read once, when flashdelta is imported)")
    console.print(facts)
    console.print()
    for verdict in report["backends"]["verdicts"]:
        can = "[green]yes[/green]" if verdict["supported"] else "[red]no[/red]"
        chosen = " (auto takes it)" if verdict["name"] == report["backends"]["chosen"] else ""
        reason = escape(verdict["reason"])
        console.print(f"backend {verdict['name']}: {can}{chosen}; {reason}", highlight=False, soft_wrap=True)
    console.print(_verdict(report["self_check"]), highlight=False, soft_wrap=True)
    for found in report["integrations"]:
        version = f" {found['version']}" if found["version"] else ""
        text = f"integration {found['name']}{version}: {found['state']}; {found['reason']}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)  # a reason may quote code, with brackets


def _verdict(check: dict) -> str:
    if check["problem"] is not None:
        return f"[red]self-check failed[/red]: {escape(check['problem'])}"
    errors = f"error of o {check['error_o']:.1e}, of the state {check['error_state']:.1e}"
    state = "[green]self-check passed[/green]" if check["passed"] else "[red]self-check failed[/red]"
    return f"{state}: {errors} (tolerance {check['tolerance']:.0e}), {check['seconds']:.1f} s"
