"""`flashdelta demo`: a small KDA language model continues a text, and the result is checked.

The prompt goes through the chunk form (prefill), the continuation token by token through the recurrence (decode). Then
prompt and continuation go through the chunk form once more, as a whole: both must score every token alike.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ...nn.lm import KdaLanguageModel, decode, encode, load_model
from ...problem.errors import rule
from ..devices import synchronize

DEFAULT_PROMPT = (
    "A function is called with its arguments in parentheses. When the function returns, the value of the call is the "
    "object that the function gave back. If the function raises an exception, "
)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Limits of the relative error of the logits: rounding of the compute dtype, through every layer."""

_T = TypeVar("_T")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs a block on one thread: on a busy CPU threads wait for each other (6 tokens/s, 50 with one)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run_demo(
    *, prompt: str | None, tokens: int, temperature: float, seed: int, backend: str, device: torch.device
) -> dict:
    """Continues `prompt` by `tokens` characters with the model in the package. Prints nothing.

    Args:
        prompt: printable ASCII; None takes a prompt of our own.
        tokens: characters to write, at least 1.
        temperature: 0 always writes the likeliest character; above, samples.
        seed: of the sampling.
        backend: `"auto"` or a backend's name, as in `flashdelta.chunk_kda`.
        device: where to run. A GPU computes in bfloat16, a CPU in float32.

    Returns:
        The text, its speed and the outcome of the check. Tokens per second are of one sequence, without compilation.
        `backend` names what ran the kernels (`"a (prefill), b (decode)"` if two did). `agreement_error` is
        `||decoded - whole|| / ||whole||` over the logits of prefill and decode against one whole prefill; `checked` says that
        it is within tolerance and that every clear best guess is the same.

    Raises:
        ValueError: a prompt that does not fit, or a backend that can't run on the device.
    """
    prompt = DEFAULT_PROMPT if prompt is None else prompt
    model = demo_model(prompt, backend, device)
    prompt_tokens = encode(prompt, "prompt")[None].to(model.device)
    written, logits, prefill_s, decode_s = _write(model, prompt_tokens, tokens, temperature, seed)
    error, checked = agreement(model, prompt_tokens, written, logits)
    prefilled = prompt_tokens.shape[1]
    kinds = ("prefill", prefilled), ("decode", 1)
    used = {kind: model.blocks[0].attention.explain(1, length).chosen for kind, length in kinds}
    same = len({*used.values()}) == 1
    backend = used["decode"] if same else ", ".join(f"{name} ({kind})" for kind, name in used.items())
    speeds = dict(prefill_tokens_per_s=prefilled / prefill_s, decode_tokens_per_s=tokens / decode_s)
    return dict(
        **dict(prompt=prompt, continuation=decode(written[0]), **speeds, backend=backend, **place(model)),
        **dict(parameters=sum(p.numel() for p in model.parameters()), agreement_error=error, checked=checked),
    )


def place(model: KdaLanguageModel) -> dict[str, Any]:
    """Names what a model runs on, and in which dtype."""
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return {"device": name, "dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}


def demo_model(prompt: str | None, backend: str, device: torch.device) -> KdaLanguageModel:
    """The model in the package, to continue `prompt`."""
    rule("prompt", prompt != "", "at least one character", "an empty text")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with resources.as_file(resources.files(__package__) / "assets" / "tiny_lm.safetensors") as path:
        return load_model(path, device=device, dtype=dtype, chunk_size=32, backend=backend)


@torch.no_grad()
def _write(model: KdaLanguageModel, prompt: Tensor, tokens: int, temperature: float, seed: int) -> tuple:
    """The written tokens `[1, N]`; logits `[1, N + 1, vocabulary]`, after the prompt and after every written token; seconds of
    prefill and of decoding."""
    generator = torch.Generator(prompt.device).manual_seed(seed)
    model.generate(prompt, 2)  # compiles what the timed calls will use
    (logits, caches), prefill_s = timed(lambda: model(prompt, return_caches=True), prompt.device)
    after_prompt = logits[:, -1]
    steps = model.steps(after_prompt, caches, temperature=temperature, generator=generator)
    pairs, decode_s = timed(lambda: [next(steps) for _ in range(tokens)], prompt.device)
    written = torch.stack([token for token, _ in pairs], dim=1)
    logits = torch.stack([after_prompt, *(after for _, after in pairs)], dim=1)
    return written, logits, prefill_s, decode_s


def timed(work: Callable[[], _T], device: torch.device) -> tuple[_T, float]:
    """The result of `work()` and the seconds until the device had it."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


@torch.no_grad()
def agreement(model: KdaLanguageModel, prompt: Tensor, continuation: Tensor, logits: Tensor) -> tuple[float, bool]:
    """Compares the logits of prefill and decode with those of one prefill over prompt and continuation.

    Args:
        prompt: `[1, P]`.
        continuation: `[1, N]`.
        logits: `[1, N + 1, vocabulary]`: after the prompt and after every token of the continuation.

    Returns:
        `(||logits - whole|| / ||whole||, ok)`. `ok` wants that error within the dtype's tolerance, and the same best
        guess wherever the best score leads by more than the tolerance explains.
    """
    tolerance = TOLERANCE[model.embedding.weight.dtype]
    whole, _ = model(torch.cat([prompt, continuation], dim=1))
    whole, logits = whole[:, prompt.shape[1] - 1 :].float(), logits.float()
    difference = logits - whole
    error = float(difference.norm() / whole.norm())
    best = whole.topk(2, dim=-1)
    margin = best.values[..., 0] - best.values[..., 1]
    # two scores that are each off by d can swap a lead of 2 d
    clear = margin > 2 * tolerance * whole.abs().amax(-1)
    same = best.indices[..., 0] == logits.argmax(-1)
    # a NaN error compares false, and so fails
    ok = error <= tolerance and bool((same | ~clear).all())
    return error, ok


def show(report: dict, console: Console) -> None:
    """Prints a result's fields: the prompt dimmed, the continuation after it, then speed and check."""
    console.print(Text.assemble((report["prompt"], "dim"), (report["continuation"], "bold")))
    console.print()
    report["millions"] = report["parameters"] / 1e6
    facts = (
        "{millions:.1f}M parameters in {dtype} on {device}, backend {backend}",
        "prefill {prefill_tokens_per_s:,.0f} tokens/s, decode {decode_tokens_per_s:,.0f} tokens/s",
    )
    what = "prefill and decode, token by token, against one prefill of the whole text: error of the logits "
    show_check(console, [fact.format_map(report) for fact in facts], report, f"{what}{report['agreement_error']:.1e}")


def show_check(console: Console, facts: Sequence[str], report: dict, what: str) -> None:
    """Prints facts, and whether the check passed."""
    for fact in facts:
        console.print(fact, markup=False, highlight=False)
    outcome = "[green]check passed[/green]" if report["checked"] else "[red]check failed[/red]"
    console.print(f"{outcome}: {what}", highlight=False)
