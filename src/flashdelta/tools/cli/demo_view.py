"""How `flashdelta demo` prints what `demo.run_demo` returns."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .demo import DemoResult


def show(result: DemoResult, console: Console) -> None:
    """The prompt dimmed, the continuation after it, then speed and check."""
    console.print(Text.assemble((result.prompt, "dim"), (result.continuation, "bold")))
    console.print()
    facts = (
        f"{result.parameters / 1e6:.1f}M parameters in {result.dtype} on {result.device}, backend {result.backend}",
        f"prefill {result.prefill_tokens_per_s:,.0f} tokens/s, decode {result.decode_tokens_per_s:,.0f} tokens/s",
    )
    for fact in facts:
        console.print(fact, markup=False, highlight=False)
    outcome = "[green]check passed[/green]" if result.checked else "[red]check failed[/red]"
    console.print(
        f"{outcome}: prefill and decode, token by token, against one prefill of the whole text: "
        f"error of the logits {result.agreement_error:.1e}",
        highlight=False,
    )
