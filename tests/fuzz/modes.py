"""How a drawn call is run: plain, repeated, refilled, from a CUDA graph, from threads on streams, beside neighbours."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from ..support.layouts import lay, without_repeats
from ..support.oracle import assert_close, poisoned_memory, relative_error, same_bits
from . import truth
from .draw import OPERATORS, Contents, Spec

ROUNDINGS = {torch.bfloat16: 4, torch.float16: 6, torch.float32: 256, torch.float64: 2**16}
"""How many times the rounding error of its dtype a result may be off. In 16 bits operands are rounded once, and sums are in
float32. In float32 what adds up are the sums and the exponentials themselves."""

GRADIENTS = 2
"""Twice as much for gradients, which go through the recurrence twice."""

GRADIENT = "gradient of "
"""Begins the names of gradients among results."""

LARGE = 1e4
"""Results beyond this are undefined: keys that are not normalised let a state grow without end, and float16 ends at 65504."""

Results = dict[str, Tensor]


def tolerance(dtype: torch.dtype) -> float:
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps / 2


# ---- a call -------------------------------------------------------------------------------------------------------------


def run(spec: Spec, call: dict, incoming: dict[str, Tensor] | None = None) -> Results:
    """The call's results by name; with gradients, those of its inputs too."""
    if incoming is None:
        with torch.no_grad():
            found = spec.function(**call)
    else:
        names = [name for name in truth.LEAVES if name in call]
        leaves = {name: call[name].detach().requires_grad_() for name in names}
        found = spec.function(**call | leaves)
    found = (found,) if isinstance(found, Tensor) else found or ()
    results = {name: x for name, x in zip(OPERATORS[spec.op].results, found) if x is not None}
    if incoming is None:
        return results
    outputs = [name for name in ("o", "final_state") if name in results and results[name].requires_grad]
    if not outputs:
        return {name: x.detach() for name, x in results.items()}
    given = [incoming[name] for name in outputs]
    grads = torch.autograd.grad([results[name] for name in outputs], list(leaves.values()), given, allow_unused=True)
    named = {GRADIENT + name: x for name, x in zip(leaves, grads) if x is not None}
    return {name: x.detach() for name, x in results.items()} | named


def first_of(call: dict) -> Tensor:
    """The tensor whose dtype is the call's."""
    return next(call[name] for name in ("q", "mixed_qkv", "x", "initial_state") if call.get(name) is not None)


def incoming_of(spec: Spec, call: dict, seed: int) -> dict[str, Tensor]:
    """Gradients of the results, which a call without gradients shows."""
    source, results = torch.Generator().manual_seed(seed), run(spec, call)

    def drawn(x: Tensor, layout: str) -> Tensor:
        return lay(torch.randn(*x.shape, generator=source, dtype=torch.float64).to(x.dtype).to(x.device), layout)

    layouts = zip(("o", "final_state"), spec.incoming)
    return {name: drawn(results[name], layout) for name, layout in layouts if name in results}


@dataclass
class Wanted:
    """Claims that must hold: None of a call that has no defined result. Gradients are worked out when they are asked for."""

    claims: list[truth.Claim] | None
    gradients: dict[str, Tensor] | None = None


class Case:
    """A drawn call with contents, and what must come out. `known`: what must, by the seed of the contents."""

    odd: frozenset[str] = frozenset()
    """Arguments that are not the contents' own."""

    def __init__(self, spec: Spec, device: torch.device, seed: int, known: dict[int, Wanted] | None = None):
        self.spec, self.contents = spec, Contents(spec, device, seed)
        self.known = {} if known is None else known
        self.judge(seed)

    def judge(self, seed: int) -> None:
        """Works out what must come out of the call, from its tensors as they are."""
        self.call = self.contents.call()
        self.before = {name: memory.bytes.clone() for name, memory in self.contents.memories.items()}
        self.incoming = incoming_of(self.spec, self.call, seed) if self.spec.grad else None
        if seed not in self.known:
            claims = None
            with contextlib.suppress(truth.Undefined):
                claims = truth.claims_of(self.spec.op, self.call)
            self.known[seed] = Wanted(claims)
        self.wanted = self.known[seed]

    @property
    def claims(self) -> list[truth.Claim] | None:
        return self.wanted.claims

    def twin(self, seed: int, device: torch.device) -> Case:
        """The call with other contents in other memory."""
        return Case(self.spec, device, seed, self.known)

    def refill(self, seed: int) -> None:
        self.contents.fill(seed)
        self.judge(seed)

    def restore(self) -> None:
        """Puts back what the call has written."""
        for name, memory in self.contents.memories.items():
            memory.bytes.copy_(self.before[name])

    def run(self) -> Results:
        return run(self.spec, self.call, self.incoming)

    def hold(self, results: Results) -> None:
        """Fails where a result is off, or a byte changed that must stay."""
        written = self.spec.written()
        claims = self.claims
        for name, memory in self.contents.memories.items():
            free = [claim.index for claim in claims or () if claim.target == name and name in written]
            if name in ("out", "output") or (name in written and (claims is None or name in self.odd)):
                free = [()]
            if memory.changed(self.before[name], free):
                raise AssertionError(f"{name}: bytes changed that the call must not write")
        for name, result in (("out", "o"), ("output", "o"), ("final_state", "final_state")):
            given, found = self.call.get(name), results.get(result)
            if given is not None and found is not None and found.data_ptr() != given.data_ptr():
                raise AssertionError(f"{name}: the result lies elsewhere")
        if claims is None:
            return
        hold_claims(self.spec, self.call, claims, results)
        if any(name.startswith(GRADIENT) for name in results):
            self.hold_gradients(results)

    def hold_gradients(self, results: Results) -> None:
        grads = self.incoming
        final = grads["final_state"] if "final_state" in results else None
        if self.wanted.gradients is None:
            self.wanted.gradients = truth.gradients_of(self.spec.op, self.call, grads["o"], final)
        want = self.wanted.gradients
        most = max((float(x.norm()) for x in want.values()), default=0.0)
        dtype = first_of(self.call).dtype
        for name, x in want.items():
            found = results[GRADIENT + name]
            if found.shape != self.call[name].shape or found.dtype != self.call[name].dtype:
                raise AssertionError(f"gradient of {name}: {list(found.shape)} in {found.dtype}")
            allowed = GRADIENTS * (tolerance(dtype) + torch.finfo(found.dtype).eps / 2)
            error, size = float((found.double().cpu() - x).norm()), float(x.norm())
            if error <= allowed * (size + 0.1 * most):
                continue
            others = (truth.gradients_of(self.spec.op, shaken(self.call, n), grads["o"], final) for n in range(SHAKES))
            slack = SLACK * max(float((other[name] - x).norm()) for other in others)
            if not error <= allowed * (size + 0.1 * most) + slack:
                raise AssertionError(f"gradient of {name}: off by {error:.3g} of {size:.3g}, allowed {allowed:.3g}")


def hold_claims(spec: Spec, call: dict, claims: list[truth.Claim], results: Results) -> None:
    dtype = first_of(call).dtype
    # a comparison with NaN is false
    wild = {c.group for c in claims if c.want is not None and not bool((c.want.abs() <= LARGE).all())} - {None}
    for place, claim in enumerate(claims):
        if claim.want is None or claim.group in wild:
            continue
        where = results if claim.target in OPERATORS[spec.op].results else call
        try:
            hold_claim(claim, where, dtype)
        except AssertionError:
            hold_claim(claim, where, dtype, slack_of(spec, call, place, claims))


SHAKES, SLACK = 3, 4


def shaken(call: dict, seed: int) -> dict:
    """The call with every operand of a product off by a rounding error."""
    dtype = first_of(call).dtype
    # a float32 operand of a matrix product keeps 22 bits at least
    unit = 2.0**-22 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    source = torch.Generator().manual_seed(seed)
    found = dict(call)
    for name, x in call.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name not in ("g", "raw_g", "A_log", "dt_bias"):
            noise = torch.randn(x.shape, generator=source, dtype=torch.float64)
            found[name] = truth.wide(x) * (1 + unit * noise)
    return found


def slack_of(spec: Spec, call: dict, place: int, claims: list[truth.Claim]) -> float:
    """Measures what rounding the operands once costs this claim: much where terms cancel."""
    want = claims[place].want
    others = (truth.claims_of(spec.op, shaken(call, n))[place].want for n in range(SHAKES))
    return SLACK * max(relative_error(other, want) for other in others)


def hold_claim(claim: truth.Claim, where: dict, dtype: torch.dtype, slack: float = 0.0) -> None:
    name = f"{claim.target}{list(claim.index)}"
    if claim.target not in where:
        raise AssertionError(f"{claim.target}: nothing was returned")
    target = where[claim.target].detach()[claim.index].resolve_conj().resolve_neg().cpu()
    target = target if claim.read is None else claim.read(target.double()).to(target.dtype)
    want = claim.want.expand(target.shape) if claim.want.dim() == 0 else claim.want
    if claim.exact:
        if not same_bits(target + 0.0, want.to(target.dtype).contiguous() + 0.0):
            raise AssertionError(f"{name}: other values than wanted")
        return
    # what is made of a record is a product of two stored numbers
    stored = 1 if claim.read is None else 2
    allowed = tolerance(dtype) + stored * torch.finfo(target.dtype).eps / 2 + slack
    if want.norm() == 0.0 and target.isfinite().all() and target.double().norm() == 0.0:
        return
    assert_close(name, target.reshape(-1, target.shape[-1]), want.reshape(-1, want.shape[-1]), allowed)


def assert_same(found: Results, want: Results, case: Case, why: str) -> None:
    """To the bit, but for rows of no sequence."""
    for name in want:
        same = same_bits(found[name], want[name])
        if not same and case.claims is not None and name in OPERATORS[case.spec.op].results:
            claims = [claim for claim in case.claims if claim.target == name]
            same = all(same_bits(found[name][c.index], want[name][c.index]) for c in claims)
        if not same:
            raise AssertionError(f"{name}: other bits {why}, off by {relative_error(found[name], want[name]):.3g}")


def writes(case: Case) -> Results:
    """Copies what the call wrote into its arguments, where that is defined."""
    found = {}
    for number, claim in enumerate(case.claims or ()):
        if claim.target in case.spec.written() and claim.target not in ("out", "output"):
            found[f"{claim.target}{number}"] = case.call[claim.target][claim.index].clone()
    return found


def outcome(case: Case) -> Results:
    """Runs from the contents as they were."""
    case.restore()
    with poisoned_memory():
        results = {name: x.clone() for name, x in case.run().items()}
    return results | writes(case)


# ---- modes --------------------------------------------------------------------------------------------------------------

Mode = Callable[[Case, torch.device, int], None]


def plain(case: Case, device: torch.device, seed: int) -> None:
    with poisoned_memory():
        case.hold(case.run())


def repeated(case: Case, device: torch.device, seed: int) -> None:
    """Calls alike, with other tensors and other contents: what is kept of a call is no address and no number."""
    want = outcome(case)
    other = case.twin(seed + 1, device)
    with poisoned_memory():
        other.hold(other.run())
    assert_same(outcome(case), want, case, "when repeated")


def refilled(case: Case, device: torch.device, seed: int) -> None:
    """The same tensors with other numbers."""
    if case.contents.host:
        return
    case.refill(seed + 1)
    with poisoned_memory():
        case.hold(case.run())


def graphed(case: Case, device: torch.device, seed: int) -> None:
    if device.type != "cuda":
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            case.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run()
    for shift in (1, 2):
        fixed = case.incoming
        case.refill(seed if case.contents.host else seed + shift)
        if fixed is not None:  # the graph reads the memory that it was captured with
            for name, x in fixed.items():
                without_repeats(x).copy_(without_repeats(case.incoming[name]))
            case.incoming = fixed
        for name, x in results.items():
            # zeros of packed `h` past its last chunk are the graph's own to write
            if name != "h":
                x.fill_(math.nan)
        for name in {"out", "output"} & case.contents.memories.keys():
            case.contents.memories[name].tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.hold(results)


def threaded(case: Case, device: torch.device, seed: int) -> None:
    cases = [case, *(case.twin(seed + i, device) for i in (1, 2))]
    want = [outcome(each) for each in cases]
    for each in cases:
        each.restore()
    torch.cuda.synchronize() if device.type == "cuda" else None

    def one(each: Case) -> Results:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
        with stream:
            found = {name: x.clone() for name, x in each.run().items()} | writes(each)
            torch.cuda.current_stream().synchronize() if device.type == "cuda" else None
        return found

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        for each, results, wanted in zip(cases, pool.map(one, cases), want):
            assert_same(results, wanted, each, "from threads")


def neighboured(case: Case, device: torch.device, seed: int) -> None:
    """A sequence whose numbers are not finite changes no bit of the others'."""
    victims = {claim.group for claim in case.claims or () if isinstance(claim.group, int)}
    if len(victims) < 2 or case.spec.op not in ("chunk_kda", "fused_recurrent_kda", "recurrent_kda"):
        return
    if any(0 in place.strides for place in case.spec.places.values()) or "v" not in case.call:
        return

    def finish() -> Results:
        # without gradients: those of the neighbours are not the question
        with poisoned_memory():
            return {name: x.clone() for name, x in run(case.spec, case.call).items()} | writes(case)

    case.restore()
    want = finish()
    victim = Random(seed).choice(sorted(victims))
    case.restore()
    sequence = truth.sequences(truth.arguments(case.call))[victim]
    case.call["v"][sequence.row, sequence.begin : sequence.end] = math.nan
    found = finish()
    for number, claim in enumerate(case.claims):
        if claim.group == victim or claim.target in ("out", "output"):
            continue
        is_result = claim.target in OPERATORS[case.spec.op].results
        name, index = (claim.target, claim.index) if is_result else (f"{claim.target}{number}", ...)
        if not same_bits(found[name][index], want[name][index]):
            raise AssertionError(f"{claim.target}{list(claim.index)}: other bits beside a sequence of NaN")


MODES: tuple[Mode, ...] = (plain, repeated, refilled, graphed, threaded, neighboured)


@contextlib.contextmanager
def attributed(said: str) -> Iterator[None]:
    """Says of a failure where it came."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error


def check(spec: Spec, device: torch.device, seed: int) -> None:
    """Runs the call in every mode."""
    known: dict[int, Wanted] = {}
    for mode in MODES:
        with attributed(mode.__name__):
            mode(Case(spec, device, seed, known), device, seed)
