"""`flashdelta demo --requests N`: requests of different lengths join and leave a running batch (continuous batching).

A batch has a fixed number of rows. A request that joins has its prompt prefilled into the slot of a free row; every step
writes a token of every row, those without a request with a null index, which reads and stores nothing. On a GPU a step is one
CUDA graph, sampling included: who joins or leaves changes what its tensors hold, and never which. A row does not
depend on the others, so that a request gets the text that it gets alone; the demo checks that.
"""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ...nn.lm import VOCABULARY, KdaLanguageModel, decode, encode
from ..devices import capture
from ..files import counted
from .demo import DEFAULT_PROMPT, demo_model, one_thread, place, show_check, timed

PROMPTS = (
    DEFAULT_PROMPT,
    "The value of an object can be changed when ",
    "A class definition ",
    "If the sequence is empty, the statement does nothing. Otherwise the items of the sequence are assigned, from left "
    "to right, to the ",
    "An import statement ",
    "The `yield` expression is used when defining a generator function, and so can only be used in the body of ",
)
STEPS_APART = 5
"""Steps from one request's arrival to the next one's."""

NULL = -1


@dataclass(frozen=True)
class Request:
    """Continue `prompt` by `tokens` characters; `seed` of the sampling. It may join from step `arrival` on, and before if no
    other one runs."""

    prompt: str
    tokens: int
    seed: int
    arrival: int


class Batch:
    """Rows that requests join and leave. `token`, `slot`, `position` and `noise` are what a step reads of every row; it writes
    `token`, `position` and `written`."""

    def __init__(self, model: KdaLanguageModel, slots: int, most_tokens: int, temperature: float) -> None:
        self.model, self.temperature, device = model, temperature, model.device
        self.pools = model.make_pools(slots)
        self.token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.slot = torch.full((slots,), NULL, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.written = torch.zeros(slots, most_tokens, dtype=torch.int64, device=device)
        self.noise = torch.ones(slots, most_tokens, len(VOCABULARY), device=device)
        self.step: Callable[[], object] = self._step

    def capture(self) -> None:
        """Makes a step a CUDA graph. No request may run."""
        self.step, _ = capture(self._step)

    @torch.no_grad()
    def join(self, row: int, request: Request) -> None:
        """Prefills the prompt into the row's slot, and samples the first token."""
        device = self.model.device
        source = torch.Generator().manual_seed(request.seed)
        draws = torch.empty(request.tokens, len(VOCABULARY)).exponential_(generator=source)
        self.noise[row, : request.tokens] = draws.to(device)
        slot = torch.tensor([row], dtype=torch.int32, device=device)
        anew = torch.zeros(1, dtype=torch.bool, device=device)
        prompt = encode(request.prompt, "prompt")[None].to(device)
        logits, _ = self.model(prompt, pools=self.pools, slots=slot, has_initial_state=anew)
        self.token[row] = self._sampled(logits[:, -1], self.noise[row, :1])[0]
        self.written[row, 0] = self.token[row]
        self.position[row], self.slot[row] = 1, row

    def leave(self, row: int, request: Request) -> Tensor:
        """Frees the row: the tokens that were written."""
        self.slot[row] = NULL
        return self.written[row, : request.tokens].clone()

    @torch.no_grad()
    def _step(self) -> tuple[()]:
        logits, _ = self.model(self.token[:, None], pools=self.pools, slots=self.slot)
        # of a row without a request, which has come to its end, the last place
        at = self.position.clamp(max=self.written.shape[1] - 1)[:, None]
        noise = self.noise.gather(1, at[..., None].expand(-1, -1, len(VOCABULARY)))[:, 0]
        self.token.copy_(self._sampled(logits[:, -1], noise))
        self.written.scatter_(1, at, self.token[:, None])
        self.position.add_(1)
        return ()

    def _sampled(self, logits: Tensor, noise: Tensor) -> Tensor:
        """One token per row: the likeliest, or the first of exponential clocks, which is a draw from the softmax."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return (torch.softmax(logits.float() / self.temperature, dim=-1) / noise).argmax(-1)


def serve(batch: Batch, requests: Sequence[Request]) -> tuple[list[str], list[int], list[int], int]:
    """Runs the requests to their ends, in order of arrival: texts, the steps at which each joined and left, and the most that
    ran at a time."""
    waiting = collections.deque(range(len(requests)))
    running: dict[int, tuple[int, int]] = {}  # request and step at which it joined, by row
    texts: dict[int, Tensor] = {}
    joined, left, step, most = [0] * len(requests), [0] * len(requests), 0, 0
    while waiting or running:
        free = [row for row in range(len(batch.slot)) if row not in running]
        while waiting and free and (requests[waiting[0]].arrival <= step or not running):
            i, row = waiting.popleft(), free.pop(0)
            batch.join(row, requests[i])
            running[row], joined[i] = (i, step), step
        most = max(most, len(running))
        if any(requests[i].tokens > 1 + step - since for i, since in running.values()):
            batch.step()
        step += 1
        for row, (i, since) in list(running.items()):
            if step - since + 1 >= requests[i].tokens:
                texts[i], left[i] = batch.leave(row, requests[i]), step
                del running[row]
    return [decode(texts[i].cpu()) for i in range(len(requests))], joined, left, most


@one_thread()
def run_batch(
    requests: int, slots: int, tokens: int, temperature: float, seed: int, prompt: str | None, backend: str, device: Any
) -> dict[str, Any]:
    """Serves requests with the model in the package. Prints nothing.

    Args:
        requests: how many, at least 1.
        slots: rows of the batch, at least 1.
        tokens: characters of the longest request, at least 1.
        prompt: of all requests, printable ASCII; None takes prompts of our own.
        temperature, seed, backend, device: as in `run_demo`.

    Returns:
        Texts that the run wrote, and how it went. `tokens_per_s`: written tokens of all requests over the seconds of the run,
        prefills included, without compilation. `joined` and `left`: the steps at which each request did. `most_running`:
        requests at a time. `checked`: each one's text is the one that it gets alone in the batch.

    Raises:
        ValueError: as `run_demo`.
    """
    model = demo_model(prompt, backend, device)
    asked = [  # prompts in turn, lengths from all of `tokens` to a quarter
        Request(prompt or PROMPTS[i % len(PROMPTS)], max(1, tokens * (4 - i % 4) // 4), seed + i, i * STEPS_APART)
        for i in range(requests)
    ]
    batch = Batch(model, slots, max(request.tokens for request in asked), temperature)
    for text in {request.prompt for request in asked}:  # compiles what the timed run will use
        serve(batch, [Request(text, min(2, tokens), 0, 0)])
    graph = model.device.type == "cuda"
    if graph:
        batch.capture()
    (texts, joined, left, most), seconds = timed(lambda: serve(batch, asked), model.device)
    alone = [serve(batch, [request])[0][0] for request in asked]
    return dict(
        **dict(prompts=[request.prompt for request in asked], continuations=texts, joined=joined, left=left),
        **dict(slots=slots, steps=max(left), most_running=most, graph=graph, checked=texts == alone, **place(model)),
        tokens_per_s=sum(request.tokens for request in asked) / seconds,
    )


def show(report: dict, console: Console) -> None:
    """Prints every request's text with the steps at which it ran, then speed and check."""
    for prompt, text, joined, left in zip(*(report[x] for x in ("prompts", "continuations", "joined", "left"))):
        console.print(Text.assemble((f"steps {joined} to {left}  ", "cyan"), (prompt, "dim"), (text, "bold")))
        console.print()
    way = "a CUDA graph a step" if report["graph"] else "without graphs"
    facts = (
        f"{counted(len(report['prompts']), 'request')} in {counted(report['steps'], 'step')}, up to "
        f"{report['most_running']} of {counted(report['slots'], 'slot')} at a time, {way}, "
        f"{report['dtype']} on {report['device']}",
        f"{report['tokens_per_s']:,.0f} tokens/s, prefills included",
    )
    show_check(console, facts, report, "each request's text is the one that it gets alone")
