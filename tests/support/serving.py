"""An engine in small: requests arrive at random, are prefilled in pieces, decoded together and verified, through a layer of
`tests.support.engines`; each request's outputs are held against its own tokens in one float64 call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .engines import Batch, K3Step, KimiLinear, Marks, Model, SGLang
from .oracle import assert_close, same_bits

PIECE, LONGEST, MOST_NEW, RUNNING = 96, 200, 12, 6
"""Tokens of a piece of a prompt, of a prompt and after it, and requests that run at once."""

GRAPH = 4
"""Captured batches of decoding have a multiple of so many rows."""

REUSED = 0.4
"""Chance that a request starts with the tokens of one whose checkpoint is kept."""

EVICTED = 0.05
"""Chance that a request loses its slots in a round, and starts again with all that it has so far as its prompt."""


@dataclass(eq=False)
class Request:
    """`rows`: its tokens, of which `done` have run; the outputs before `known` are not its own to check. `slots`: one, or one
    for each speculative token, of which `accepted` tells the last state's."""

    rows: Tensor
    prompt: int
    slots: list[int]
    done: int = 0
    known: int = 0
    accepted: int = 1
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Checkpoint:
    """A state in a slot of its own, after the first tokens of some request."""

    rows: Tensor
    slot: int


class Serving:
    """`drafts`: speculative tokens per sequence, 0 for none. `longest`: prompt; without prompts nothing is prefilled."""

    def __init__(self, layer: KimiLinear, drafts: int, tolerance: float, seed: int = 0, longest: int = LONGEST):
        self.layer, self.model, self.drafts = layer, layer.model, drafts
        self.tolerance, self.longest = tolerance, longest
        self.random = random.Random(seed)
        self.read_only = isinstance(layer, SGLang)
        slots = RUNNING * (1 + drafts) + 8
        self.pool = self.model.pool(slots)
        self.free = [*range(slots - 1, layer.null, -1)]
        self.running: list[Request] = []
        self.checkpoints: list[Checkpoint] = []
        self.finished = self.hits = self.evicted = self.calls = 0
        self.around = self.memory_around()
        self.reserved = self.pool[0].clone()

    def memory_around(self) -> Tensor:
        """Memory between the slots."""
        size = self.pool[0].numel()
        return torch.as_strided(self.pool, (len(self.pool), self.model.gap), (self.pool.stride(0), 1), size).clone()

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()
        while self.running:
            self.round(arrivals=False)
        assert same_bits(self.around, self.memory_around()), "written between slots"
        if self.layer.null == 0:
            assert same_bits(self.reserved, self.pool[0]), "slot 0 was written"

    def round(self, arrivals: bool = True) -> None:
        while arrivals and len(self.running) < RUNNING and self.random.random() < 0.5:
            self.arrive()
        for request in self.running:
            if arrivals and self.longest and request.done and self.random.random() < EVICTED:
                self.evict(request)
        waiting = [x for x in self.running if x.done < x.prompt]
        ready = [x for x in self.running if x.done >= x.prompt]
        if waiting:
            self.prefill(waiting)
        if ready:
            self.verify(ready) if self.drafts else self.decode(ready)
        for request in [x for x in self.running if x.done == len(x.rows)]:
            self.finish(request)

    # ---- requests -------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        prompt = self.random.randint(min(1, self.longest), self.longest)
        taken = self.random.choice(self.checkpoints) if self.checkpoints and self.random.random() < REUSED else None
        rows = self.model.tokens(prompt + self.random.randint(1, MOST_NEW))
        count = 1 if self.read_only else 1 + self.drafts
        request = Request(rows, prompt, [self.free.pop() for _ in range(count)])
        if taken is not None:
            request.rows = torch.cat((taken.rows, rows))
            request.prompt += len(taken.rows)
            request.done = request.known = len(taken.rows)
            self.pool[request.slots[0]] = self.pool[taken.slot]
            self.hits += 1
        elif not self.layer.flagged:
            self.layer.start(self.pool, request.slots[0])
        self.running.append(request)

    def evict(self, request: Request) -> None:
        """Others get its slots, and it some with states of others."""
        self.free += request.slots
        self.random.shuffle(self.free)
        request.slots = [self.free.pop() for _ in request.slots]
        request.prompt, request.done, request.known, request.accepted = max(request.prompt, request.done), 0, 0, 1
        request.outputs.clear()
        if not self.layer.flagged:
            self.layer.start(self.pool, request.slots[0])
        self.evicted += 1

    def finish(self, request: Request) -> None:
        got = torch.cat(request.outputs)
        assert_close("o", got, self.layer.exact(request.rows)[request.known :], self.tolerance)
        self.running.remove(request)
        self.free += request.slots
        self.finished += 1

    def batch(self, requests: list[Request], lengths: list[int], padding: int = 0) -> Batch:
        """Their next tokens; those past a request's end, and those of the padding, are made up."""
        rows = []
        for request, length in zip(requests, lengths):
            own = request.rows[request.done : request.done + length]
            rows += [own, self.model.tokens(length - len(own))]
        self.calls += 1
        return Batch(self.model, torch.cat([*rows, self.model.tokens(padding)]), [*lengths, *[1] * padding])

    # ---- calls ----------------------------------------------------------------------------------------------------------

    def prefill(self, requests: list[Request]) -> None:
        index = self.model.index
        lengths = [min(PIECE, x.prompt - x.done) for x in requests]
        flags = torch.tensor([x.done > 0 for x in requests], device=self.pool.device)
        marks = self.marks(requests, lengths)
        slots = index([x.slots[0] for x in requests])
        o = self.layer.prefill(self.batch(requests, lengths), self.pool, slots, flags, marks)
        for request, out, length in zip(requests, o[0].split(lengths), lengths):
            request.outputs.append(out)
            request.done += length

    def marks(self, requests: list[Request], lengths: list[int]) -> Marks | None:
        """A checkpoint within some pieces, that later requests start from."""
        aligned = self.layer.aligned
        found = Marks([0] * len(requests), [self.layer.null] * len(requests))
        for row, (request, length) in enumerate(zip(requests, lengths)):
            most = (length - 1) // aligned if aligned else 0
            if most and self.random.random() < 0.5:
                if len(self.checkpoints) >= 4:
                    self.free.append(self.checkpoints.pop(0).slot)
                offset, slot = self.random.randint(1, most) * aligned, self.free.pop()
                found.offsets[row], found.slots[row] = offset, slot
                self.checkpoints.append(Checkpoint(request.rows[: request.done + offset], slot))
        return found if any(found.offsets) else None

    def decode(self, requests: list[Request]) -> None:
        padding = -len(requests) % GRAPH
        slots = self.model.index([*(x.slots[0] for x in requests), *[self.layer.null] * padding])
        o = self.layer.decode(self.batch(requests, [1] * len(requests), padding), self.pool, slots)
        assert o.shape == (1, len(slots), self.model.H, self.model.D)
        assert not o[0, len(requests) :].any(), "a padded row is not zero"
        for row, request in enumerate(requests):
            request.outputs.append(o[0, row : row + 1])
            request.done += 1

    def verify(self, requests: list[Request]) -> None:
        """Drafts are a request's next tokens as far as they are accepted: no output past them is looked at."""
        lengths = [self.random.randint(1, 1 + self.drafts) for _ in requests]
        counts = [min(self.random.randint(1, n), len(x.rows) - x.done) for n, x in zip(lengths, requests)]
        batch = self.batch(requests, lengths)
        if isinstance(self.layer, SGLang):
            buffer = self.pool.new_full((len(requests) + 2, 2 + self.drafts, *self.pool.shape[1:]), torch.nan)
            slots = self.model.index([x.slots[0] for x in requests])
            o = self.layer.verify_read_only(batch, self.pool, slots, buffer, 1 + self.drafts)
            for row, (request, count) in enumerate(zip(requests, counts)):
                self.pool[request.slots[0]] = buffer[row, count - 1]
        else:
            table = [*(x.slots for x in requests), [0] * (1 + self.drafts)]
            slots = torch.tensor(table, dtype=torch.int32, device=self.pool.device)
            accepted = self.model.index([*(x.accepted for x in requests), 1])
            o = self.layer.verify(batch, self.pool, slots, accepted)
        for request, out, count in zip(requests, o[0].split(lengths), counts):
            request.outputs.append(out[:count])
            request.done += count
            request.accepted = count


def serve(make: Callable[[Model], KimiLinear], model: Model, drafts: int, tolerance: float, rounds: int) -> Serving:
    serving = Serving(make(model), drafts, tolerance)
    with torch.inference_mode():
        serving.run(rounds)
    return serving


def serve_steps(step: K3Step, tolerance: float, rounds: int) -> int:
    """The same of a `K3Step`, without prompts: windows and states start from zeros. Returns how many requests finished."""
    assert step.backends() == ("flashdelta", "flashinfer" if step.drafts else "native")
    layer = Stepped(step)
    reserved = layer.windows[0].clone()
    serving = Serving(layer, step.drafts, tolerance, longest=0)
    serving.run(rounds)
    assert same_bits(layer.windows[0], reserved), "slot 0 was written"
    return serving.finished


class Stepped(KimiLinear):
    """A layer of a whole step. What gates decays gates outputs, too."""

    flagged = False

    def __init__(self, step: K3Step):
        self.step, self.model = step, step.model
        self.windows = step.windows(RUNNING * (1 + step.drafts) + 8)

    def start(self, pool: Tensor, slot: int) -> None:
        pool[slot] = self.windows[slot] = 0

    def exact(self, rows: Tensor) -> Tensor:
        return self.step.exact_sequence(rows, Batch(self.model, rows, [len(rows)]).g[0])

    def decode(self, batch: Batch, pool: Tensor, slots: Tensor) -> Tensor:
        return self.step.fused(batch, batch.g[0], pool, self.windows, slots)

    def verify(self, batch: Batch, pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        return self.step.fused(batch, batch.g[0], pool, self.windows, slots, accepted)
