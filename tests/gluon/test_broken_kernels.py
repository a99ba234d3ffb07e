"""Kernels that are broken on purpose, in one place at a time: the tests of this tier find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from triton.runtime.jit import JITFunction

from flashdelta.hopper import (
    commit,
    decode,
    fused_decode,
    intra,
    prepare,
    prepare_steps,
    recurrence,
    reverse,
    segments,
    verify,
    wy,
)
from flashdelta.hopper.device import layouts, pipeline, tma, trial
from flashdelta.testing.cases import BF16, FP32
from flashdelta.testing.decoding import SINGLE_BF16
from flashdelta.testing.wy import WyCase
from flashdelta.triton.segments import compose_kernel

from ..gpu.calls import KIMI
from ..support.decoding_checks import HOPPER_REPLAYED, WHOLE_HEADS
from ..support.fused_checks import HOPPER_FUSED, check_fused
from . import (
    checks,
    test_backward,
    test_chunk,
    test_decode,
    test_fused,
    test_steps,
    test_trials,
    test_unbounded_steps,
)
from .interpreter import hopper_on_cpu, interpreted

pytestmark = pytest.mark.slow

LONG = replace(KIMI, H=1, HV=1, T=330, memory="long")
EXACT = replace(LONG, gate="none", lower_bound=None, hard="g-50", T=129)
PACKED = replace(LONG, lengths=(130, 0, 64, 70), state=FP32)


def prefill() -> None:
    test_chunk.check(LONG)


def exact_prefill() -> None:
    test_chunk.check(EXACT)


def exact_steps() -> None:
    with test_unbounded_steps.unbounded_steps():
        for kind in ("tokens that forget", "steep, then flat", "first halves", "second halves"):
            test_unbounded_steps.hold_decays(kind)


def fine_factors() -> None:
    with test_unbounded_steps.unbounded_steps():
        test_unbounded_steps.test_no_factor_loses_what_its_product_has()


def fitting_steps() -> None:
    with test_unbounded_steps.unbounded_steps():
        checks.check_steps(replace(test_unbounded_steps.SMALL, T=70, memory="long"))


def steps_over_ranks() -> None:
    with test_unbounded_steps.unbounded_steps():
        test_steps.test_ranks_find_what_one_finds("through all, V first", None, True)


def split_ranks() -> None:
    test_backward.test_ranks_find_what_one_finds("packed", None, 3)


def packed() -> None:
    test_chunk.check(PACKED)


def in_segments() -> None:
    test_chunk.check(replace(PACKED, lengths=(330, 70)), split=3)


def forgotten() -> None:
    with test_trials.tried():
        test_trials.test_what_is_forgotten(test_trials.PACKED, False)


def in_long_segments() -> None:
    """Longer than the ring."""
    with test_trials.tried(), hopper_on_cpu(sms=8):
        test_chunk.check(replace(test_trials.ONE, T=1100, memory="random"))


def moved() -> None:
    with test_trials.tried():
        test_trials.test_what_moves_between_channels_is_remembered(70)
        test_trials.test_what_moves_between_channels_is_remembered(9)


def remembered_once() -> None:
    with test_trials.tried():
        test_trials.test_each_chunk_is_tried_by_itself((1,))


def small_decays() -> None:
    with test_trials.tried():
        test_trials.test_many_small_decays_are_remembered()


def one_stays() -> None:
    with test_trials.tried():
        test_trials.test_one_channel_that_stays_is_enough(100)


def nan_decay() -> None:
    with test_trials.tried():
        test_trials.test_a_decay_that_is_nan_forgets_nothing()


def stream_k() -> None:
    with hopper_on_cpu(sms=2, last_first=True), mock.patch.object(recurrence, "stream_k_pays", lambda *_: True):
        test_chunk.check(replace(PACKED, V=64, lengths=(200, 0, 520)), split=False)


def gradients() -> None:
    test_backward.test_gradients_are_those_of_the_reference(PACKED)


def persistent_wy() -> None:
    with hopper_on_cpu(sms=2):
        test_backward.check_wy(WyCase("persistent", "", K=128, V=128, B=2, T=150, H=1, HV=2, log2=True))


def step() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_decode.test_step(next(x for x in SINGLE_BF16 if x.name.startswith("negative")), patch)


def replay() -> None:
    test_decode.test_a_replay_is_the_accepted_state(next(x for x in HOPPER_REPLAYED if x.name == "4 tokens"))


def replay_of_heads() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_decode.check_heads(next(x for x in WHOLE_HEADS if x.name == "4 tokens"), patch)


def replay_of_17() -> None:
    for name in ("17 tokens", "17 tokens without a bound"):
        test_decode.test_a_replay_is_the_accepted_state(next(x for x in HOPPER_REPLAYED if x.name == name))


def unbounded_replay() -> None:
    test_decode.test_decays_without_a_bound("logsigmoid", 7)


def fused() -> None:
    steps = {step.name: step for step in HOPPER_FUSED}
    for name in ("scattered K64 torch.float32 1", "null K128 torch.bfloat16 1", "gva3 K64 torch.float32 3"):
        check_fused(steps[name], BF16, "hopper")


def late() -> None:
    test_fused.test_an_index_that_the_kernel_before_writes_late(1, 0)


@dataclass(frozen=True)
class Break:
    """The `nth` place of `function` that reads `old` reads `new`, which `run` finds."""

    name: str
    function: JITFunction
    old: str
    new: str
    run: Callable[[], None]
    nth: int = 0


WAIT_FULL = "mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)"
WAIT_EMPTY = "mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)"
ARRIVE = "mbarrier.arrive(self.empty.index(stage), count=1)"
STORE_WAIT = "tma.store_wait(0)"
FUSED = fused_decode.fused_decode_kernel
STEPS = prepare_steps.prepare_steps_kernel
EXACT_PAIRS = prepare_steps.exact_pairs
ALL = "propagate_nan=tl.PropagateNan.ALL"

FAULTS = [
    Break("a row too many is copied", prepare.copy_pair, "inside = token <", "inside = token <=", prefill),
    Break("a row too many is fetched", recurrence.load, "row < (stop", "row <= (stop", packed),
    Break("a row too many is stored", layouts.store_transposed, "row < count", "row <= count", packed),
    Break("a stage is read before it is full", pipeline.Ring.wait, WAIT_FULL, "pass", prefill),
    Break("a stage is filled before it is empty", pipeline.Ring.acquire, WAIT_EMPTY, "pass", prefill),
    Break("the other phase", pipeline.Ring.wait, "& 1)", "& 1 ^ 1)", prefill),
    Break("no stage is released", pipeline.Ring.release, ARRIVE, "pass", prefill),
    Break("the next stage", recurrence.compute, "= iteration % ring", "= (iteration + 1) % ring", prefill),
    Break("the wrong tile", recurrence.compute, "KG + 1), state1", "KG), state1", prefill),
    Break("too few MMAs are waited for", recurrence.compute, "wait(KH, deps", "wait(KH + 2, deps", prefill),
    Break(
        "the gate is read before it is there",
        prepare.prepare_kernel,
        "copy.wait_group(1)",
        "copy.wait_group(2)",
        prefill,
    ),
    Break("no fence", prepare.bounded_pairs, "fence_async_shared()", "pass", prefill),
    Break("no fence, exact", prepare.exact_pairs, "fence_async_shared()", "pass", exact_prefill, nth=1),
    Break("all fits", STEPS, "axis=0) == 0", "axis=0) >= 0", exact_steps),
    Break("nothing is too far in a second half", STEPS, "& (rest >= LOWEST_HALF)", "", exact_steps),
    Break("no fence, steps", STEPS, "fence_async_shared()", "pass", fitting_steps),
    Break("no fence, exact steps", STEPS, "fence_async_shared()", "pass", exact_steps, nth=1),
    Break("no clamp", EXACT_PAIRS, f"gl.maximum(step, LOWEST, {ALL})", "step", exact_steps),
    Break("no clamp of a half", EXACT_PAIRS, f"gl.maximum(total, LOWEST_HALF, {ALL})", "total", exact_steps),
    Break("rows of two distances", EXACT_PAIRS, "kn_l * a_far", "kn_l * a_l", exact_steps),
    Break("queries of two distances", EXACT_PAIRS, "qn_l * a_far", "qn_l * a_l", exact_steps),
    Break(
        "exponents in half precision", EXACT_PAIRS, "round_half(step - high.to(gl.float32))", "high * 0", fine_factors
    ),
    Break("a state is taken before it is there", recurrence.compute, "wait(semaphore - SLICES)", "pass", stream_k),
    Break("a state is passed on in silence", recurrence.compute, "signal(semaphore)", "pass", stream_k),
    Break("semaphores are not cleared", prepare.prepare_kernel, "if tile == 0", "if tile == -1", stream_k),
    Break("all is forgotten", trial.trial, "<= FORGOTTEN * FORGOTTEN", "<= 1e30", moved),
    Break("only a part of M counts", trial.trial, "squares +=", "squares += 0.0 if i != j else", moved),
    Break("only decays count", trial.trial, "M += gl.where", "M = gl.where", moved),
    Break("no decays count", trial.trial, "M += gl.where", "gl.where", small_decays),
    Break("all is tried", trial.may_forget, "<= FORGOTTEN", "<= 1.0", one_stays),
    Break("a NaN is small", trial.may_forget, "decays <= FORGOTTEN", "~(decays > FORGOTTEN)", nan_decay),
    Break("the loader alone tries", segments.load, "if tried:", "if wanted > 0:", one_stays),
    Break("the loader alone does not try", segments.load, "if tried:", "if wanted < 0:", forgotten),
    Break("another chunk's decays", segments.is_tried, "chunks - 1)", "chunks - 2)", remembered_once),
    Break("a border is not looked at", compose_kernel, "first + 1 + tl", "first + 2 + tl", remembered_once),
    Break("the loader is not told", pipeline.Decision.make, "yes.to(gl.int32)", "0", in_long_segments),
    Break("another chunk is tried", segments.load, "wanted - 1", "0 * wanted", forgotten),
    Break(
        "the loader decides by itself",
        pipeline.Decision.wait,
        "mbarrier.wait(self.made, 0)",
        "pass",
        in_long_segments,
    ),
    Break("the initial state of another segment", segments.scan, "(place == 0)", "(place == 1)", in_segments),
    Break("tiles of chunks", segments.fetch, "1 if STEPS else 2", "2", steps_over_ranks),
    Break("decays of chunks", segments.fetch, "4 * K if STEPS else K", "K", steps_over_ranks),
    Break("decays of the first step", segments.start_columns, "STEP + KH, ACC", "0 + KH, ACC", steps_over_ranks),
    Break(
        "a product of the step is not there yet",
        segments.start_columns,
        "wait(0, deps",
        "wait(1, deps",
        steps_over_ranks,
    ),
    Break(
        "no segment's state goes to the next rank",
        recurrence.compute,
        "tile.stop == 0",
        "tile.stop < 0",
        split_ranks,
    ),
    Break("a state of another sequence goes there", recurrence.compute, "border + 1", "border + 2", split_ranks),
    Break("the last segment's gradient goes there", reverse.compute, "tile.first == 0", "tile.stop == 0", split_ranks),
    Break("half a state is not there yet", segments.end_columns, "wait(1, deps", "wait(2, deps", steps_over_ranks),
    *(
        Break(f"store_wait {nth} is missing", wy.wy_kernel, STORE_WAIT, "pass", persistent_wy, nth=nth)
        for nth in range(3)
    ),
    Break("a store is not fenced", tma.tma_store, "fence_async_shared()", "pass", persistent_wy),
    Break("an operand is not waited for", wy.wy_kernel, "wait_tiles(outputs, phase)", "pass", persistent_wy),
    Break("the phase stays", wy.wy_kernel, "phase = next_phase(phase)", "pass", persistent_wy),
    Break("chunks in the wrong order", reverse.load, "chunks - 1 - step", "step", gradients),
    Break(
        "a place is overwritten too early",
        intra.bounded_pairs,
        "i, s = opaque",
        "replace_decays(last_rows); i, s = opaque",
        gradients,
    ),
    Break("a tile of the state is not there yet", decode.decode_kernel, "(TILES - 1 - i)", "(TILES - i)", step),
    Break("a state of no slot is read", decode.copy_tiles, "(in_slot, read)", "(in_slot, read + 1)", step),
    Break("a step's state is not there yet", FUSED, "TILES - 1 - i if", "TILES - i if", fused),
    Break("a group's state is not there yet", FUSED, "else TILES - 1)", "else TILES)", fused),
    Break("a group's last state is not asked for", FUSED, "member + 1 < GROUP", "member + 2 < GROUP", fused),
    Break("a group's state is that of the head before", FUSED, "(K * V + tile)", "tile", fused),
    Break("a group's window rolls with its key", FUSED, "roll(to_v, kept_v", "roll(windows + in_k, kept_v", fused),
    Break("a step's copies are no groups", FUSED, "async_copy.commit_group()", "pass", fused),
    Break("a step of no slot stores a state", FUSED, "mask=everywhere(in_tile, live)", "mask=None", fused),
    Break("a step of no slot has an output", FUSED, "gl.where(everywhere(channel, live), y, 0.0)", "y", fused),
    Break("a window of no slot rolls", fused_decode.roll, "everywhere(channel, live)", "None", fused),
    Break("a window stays", FUSED, "roll(windows + in_k, kept_k, own_k, channel, conv_place, live)", "pass", fused),
    Break("a window rolls too far", fused_decode.roll, "(tap - 1)", "(tap - 2)", fused),
    Break("rows of a gate as dense as the others'", FUSED, "g_token, g_head)", "g_token, K)", fused),
    Break("an index that comes late is not looked at", FUSED, "(slot != guess) | (live != guessed)", "slot < 0", late),
    Break("a window by an index of before", FUSED, "conv_state + slot * conv_slot", "windows", late),
    Break("a state by an index of before", FUSED, "initial_state + slot * start_pitch", "states", late),
    Break("states as dense as their content", FUSED, "slot * target_pitch", "slot * (H * K * V)", fused),
    Break("outputs in one place", FUSED, "out_s.slice(i * ROWS, ROWS)", "out_s.slice(0, ROWS)", fused),
    Break("a token sees itself", verify.verify_kernel, "nth > s", "nth >= s", replay),
    Break("without a bound, no token's own B", verify.verify_kernel, "diagonal[None, :]", "0.0", unbounded_replay),
    Break(
        "a source decays by its own token", verify.pairs_by_levels, "k_1 * until_1", "k_1 * since_1", unbounded_replay
    ),
    Break("a source decays no further", verify.pairs_by_levels, "until_1 * whole_2", "until_1", unbounded_replay),
    Break("a row decays from its half on", verify.pairs_by_levels, "since_2 * whole_1", "since_2", unbounded_replay),
    Break(
        "a level has the first halves, too", verify.pairs_of, "== (s >> level) + 1", ">= (s >> level)", unbounded_replay
    ),
    Break("a 17th token has no gate", verify.verify_kernel, "* more_exp_g * AHEAD", "* AHEAD", replay_of_17),
    Break("a 17th token does not see itself", verify.verify_kernel, "+ more_diagonal * of_last", "", replay_of_17),
    Break(
        "a 17th token reads by its query", verify.verify_kernel, "slice(FIRST, 1", "slice(FIRST + 1, 1", replay_of_17
    ),
    Break("a 17th token sees all as they came", verify.verify_kernel, "tile_k * until", "tile_k", replay_of_17),
    Break(
        "a 17th token has no record",
        verify.verify_kernel,
        "(key, recorded & more)",
        "(key, more & ~more)",
        replay_of_17,
    ),
    Break("a head's slices are all the first", commit.load_slices, "next_ + ", "", replay_of_heads),
    Break("a head's slices go where the first does", commit.replay_kernel, "i * (BV * K)", "0", replay_of_heads),
    Break("one count of a head stays", commit.replay_kernel, "// SLICES == part", "== part", replay_of_heads),
    Break("the first of 17 is not accepted", commit.load_first, "> TOKENS", "> TOKENS + 1", replay_of_17),
    Break("the first of 17 does not decay", commit.replay_kernel, "first_k * every", "first_k", replay_of_17),
    Break("one decay of 17 is missing", commit.replay_kernel, "every *= second_decay", "pass", replay_of_17),
]


def around(fault: Break) -> list[str]:
    """The source of the function, cut at what is to be replaced."""
    parts = "".join(fault.function.raw_src).split(fault.old)
    assert len(parts) > fault.nth + 1, f"{fault.function.__name__} has no {fault.old!r} any more"
    return parts


@pytest.fixture
def broken(fault: Break) -> Iterator[None]:
    parts, function = around(fault), interpreted(fault.function)
    wrong = fault.old.join(parts[: fault.nth + 1]) + fault.new + fault.old.join(parts[fault.nth + 1 :])
    before = function.__dict__.pop("python", None)
    with mock.patch.object(fault.function, "raw_src", [wrong]):
        yield
    function.__dict__.pop("python", None)
    if before is not None:
        function.__dict__["python"] = before


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_found(fault: Break):
    with pytest.raises(AssertionError):
        fault.run()


@pytest.mark.parametrize("run", {fault.run: None for fault in FAULTS}, ids=lambda run: run.__name__)
def test_unbroken_kernels_pass(run: Callable[[], None]):
    run()
