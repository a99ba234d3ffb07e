"""Small sets of calls for compute-sanitizer: `compute-sanitizer python -m tests.gpu.sanitized [backend] [races] [PART ...]`,
where PART is one of `PARTS`, all of them without one.

Without PyTorch's caching allocator (PYTORCH_NO_CUDA_MEMORY_CACHING=1) every tensor is an allocation of its own, so a
read or write past its end is seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

import flashdelta as fd
from flashdelta.kernels.hopper import decode as hopper_decode
from flashdelta.kernels.hopper import wy as hopper_wy
from flashdelta.kernels.triton import decode as triton_decode
from flashdelta.problem.operations import PRECISIONS

from ..support.cases import BF16, BY_NAME, FP32, named
from ..support.decoding import SINGLE_BF16, STEPS, make_step
from ..support.decoding_checks import HOPPER_REPLAYED, REPLAYED, check_replay
from ..support.fused import FUSED_STEPS, make_fused
from ..support.fused_checks import HOPPER_FUSED
from ..support.gradients import gradients, incoming
from ..support.inputs import make_call
from ..support.layer import CONVOLUTION_BY_NAME, NORM_BY_NAME, make_convolution, make_norm
from ..support.layer import gradients as layer_gradients
from ..support.pools import BUFFERS_BY_NAME, CHECKPOINT_POOLS, PLAIN_POOLS, PoolCase, as_recurrent, pool_call
from ..support.prefills import PLAIN, SIZES, prefill_call, sized
from ..support.ranks import Cut, incoming_of
from ..support.refusals import BAD_OFFSETS
from ..support.wy import WyCase, make_wy
from .calls import KIMI, UNBOUNDED, in_steps, on_gpu, whole_heads
from .test_pool import POOLS

CASES = [
    *map(on_gpu, named("T1", "T65", "packed", "packed_unused", "packed_all_empty", "fused", "chunk32", "h")),
    replace(UNBOUNDED, T=70, H=1, HV=2),
    replace(UNBOUNDED, T=70, H=1, HV=2, memory="new"),
    replace(KIMI, lengths=(17, 0, 64, 1), state=BF16, v_first=True),
]
LYING = [{"cu_seqlens": torch.tensor(offsets)} for offsets in BAD_OFFSETS]

RACE_CASES = [
    *(replace(model, H=2, HV=2, T=T) for model in (KIMI, UNBOUNDED) for T in (70, 130)),
    replace(UNBOUNDED, H=2, HV=2, T=130, memory="new"),
    *(replace(model, H=2, HV=2, lengths=(1, 0, 65, 64), state=FP32) for model in (KIMI, UNBOUNDED)),
]
"""Looking for races takes far longer than looking at addresses."""

WY_CASES = [
    WyCase(name=f"sanitized{i}", why="a tail, empty sequences", K=128, V=V, lengths=lengths, v_first=v_first)
    for i, (V, v_first) in enumerate(((128, False), (64, True)))
    for lengths in (None, (1, 0, 65, 64))
]

DECODE_RACES = (
    *("paged", "k_first", "bf16", "bf16_k_first", "packed_17", "spec", "K16", "K256"),
    *("paged_K128_V64_bf16", "paged_K64_V128_bf16", "source_null_K128_V64_bf16"),
)
REPLAY_RACES = ("verify", "drafts_7_softplus", "gate_none", "logsigmoid")
HOPPER_REPLAY_RACES = ("packed", "9 tokens", "16 tokens", "17 tokens", "narrow values", "8 tokens without a bound")
FUSED_RACES = ("one", "bf16", "k_first", "spec", "replay", "replay_rows")
"""Steps of every kernel and gate, where races are looked for. But for Hopper's, rows are so short that a lane has one product
of a sum (`kernels/shared/products.py`)."""

NORMS = ("fused", "rows", "wide", "none")
CONVOLUTIONS = ("fused", "tiles", "packed_fla", "pool_by_token", "marks_packed", "every_pool", "step")
LAYER_RACES = ("rows", "wide", "tiles", "marks_packed")
"""Cases of either: rows and tiles that several warps share."""

CHECKPOINTS = ("every_128_batch", "every_pool", "every_too_few", "many_offsets", "bad_offsets", "split_offsets")
CHECKPOINT_RACES = ("every_pool", "at_offsets", "split_offsets")
"""None in which a stage of a ring is filled twice: of such the tool reports false races (`test_hazards.py: race_errors`)."""

OVER_RANKS = [
    (replace(KIMI, name="ranks", H=1, HV=2, lengths=(40, 0, 1, 151), state=FP32), False),
    (replace(UNBOUNDED, name="ranks_kept", H=1, HV=1, lengths=(192,), state=FP32, v_first=True), True),
]
"""Three ranks of a chunk each, with borders inside sequences; whether the forward keeps what the backward needs."""


Calls = Iterator[Callable[[], object]]


def of(op: Callable, calls: Iterable[dict], backend: str) -> Calls:
    for call in calls:
        yield functools.partial(op, **on_device(call), backend=backend)


def on_device(call: dict) -> dict:
    """The call, made on the CPU, so that few kernels but ours run."""
    return {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def forwards(found: list[dict], backend: str, races: bool) -> Calls:
    """In chunks, with Hopper's in steps too, and token by token."""
    yield from of(fd.chunk_kda, found, backend)
    if backend == "hopper":
        for run in of(fd.chunk_kda, filter(takes_steps, found), backend):
            yield in_steps()(run)
    if not races:
        tokens = [as_recurrent(call) for call in found if "checkpoint_states" not in call]
        yield from of(fd.fused_recurrent_kda, tokens, backend)


def takes_steps(call: dict) -> bool:
    """Steps of 32 tokens."""
    fits = call["q"].shape[-1] == 128 or call.get("lower_bound") is not None
    return fits and call["g"].dtype == BF16 and call.get("split") in (None, False, "auto")


def with_splits(found: list[dict]) -> list[dict]:
    return found + [call | {"split": 3} for call in found if call.get("cu_seqlens") is not None]


def chunk(backend: str, races: bool) -> Calls:
    if races:
        found = [make_call(case, BF16) for case in RACE_CASES]
        found += [make_call(case, BF16) | {"split": 2} for case in (RACE_CASES[1], RACE_CASES[-1])]
    else:
        found = [make_call(case, BF16) for case in CASES] + [make_call(on_gpu(BY_NAME["packed"]), FP32)]
        whole = make_call(replace(KIMI, T=70, h=True), BF16)
        found = with_splits(found + [whole | lying for lying in LYING])
    return forwards(found, backend, races)


def gpu_pool(pool_case: PoolCase) -> dict:
    return pool_call(replace(pool_case, case=on_gpu(pool_case.case)), BF16)


def pool(backend: str, races: bool) -> Calls:
    found = [] if races else with_splits([gpu_pool(x) for x in PLAIN_POOLS + CHECKPOINT_POOLS if x in POOLS])
    return forwards(found, backend, races)


def buffers(backend: str, races: bool) -> Calls:
    """Checkpoints and final states into buffers of the caller's."""
    found = [gpu_pool(BUFFERS_BY_NAME[name]) for name in (CHECKPOINT_RACES if races else CHECKPOINTS)]
    return forwards(found, backend, races)


def prefill(backend: str, races: bool) -> Calls:
    cases = [replace(PLAIN, T=T) for T in ((70,) if races else (1, 33, 70))]
    found = [prefill_call(sized(case, size)) for case in cases for size in (SIZES[0], SIZES[-1])]
    calls = [call | {"precision": precision} for call in found for precision in PRECISIONS]
    return of(fd.kda_prefill, calls if backend == "triton" else [], backend)


def few_are(count: int) -> None:
    """Up to how many sequences a step takes the launch parameters for few."""
    triton_decode.DECODE_FEW = hopper_decode.DECODE_FEW = count


def decode(backend: str, races: bool) -> Calls:
    """With the launch parameters of few sequences and of many; Hopper has a kernel of its own for many alone."""
    steps = SINGLE_BF16 if backend == "hopper" else STEPS
    chosen = [step for step in steps if not races or step.name in DECODE_RACES]
    for few in (0,) if backend == "hopper" else (triton_decode.DECODE_FEW, 0):
        few_are(few)
        yield from of(fd.recurrent_kda, [make_step(step, BF16) for step in chosen], backend)


def replay(backend: str, races: bool) -> Calls:
    few_are(0)
    steps, names = (HOPPER_REPLAYED, HOPPER_REPLAY_RACES) if backend == "hopper" else (REPLAYED, REPLAY_RACES)
    for step in (step for step in steps if not races or step.name in names):
        check = functools.partial(check_replay, step, BF16, backend, "cuda")
        yield check
        if backend == "hopper" and step.state == BF16 and step.V == 128:
            yield whole_heads()(check)


def fused(backend: str, races: bool) -> Calls:
    few_are(0)
    steps = [x for x in HOPPER_FUSED if x.HV > x.H] if backend == "hopper" else FUSED_STEPS
    chosen = [step for step in steps if not races or backend == "hopper" or step.name in FUSED_RACES]
    return of(fd.fused_kda_decode, [make_fused(step, BF16) for step in chosen], backend)


def backward(backend: str, races: bool) -> Calls:
    """Offsets that lie are among them, but not where only races are looked for."""
    hopper_wy.sm_count = lambda device: 1  # so that a CTA of `wy` takes several work tiles
    for case in RACE_CASES if races else CASES:
        call = make_call(replace(case, h=False), BF16) | {"backend": backend}
        yield functools.partial(gradients, on_device(call), *(x.cuda() for x in incoming(call)))
    steps = [make_wy(case, BF16) for case in WY_CASES]
    if races and backend == "triton":  # in float32 lanes have one product of a sum
        steps[0] = make_wy(WY_CASES[0], FP32)
    steps += [] if races else [steps[1] | lying for lying in LYING]
    yield from of(fd.kernels.chunk_bwd_wy_dqkg, steps, backend)


def layer(backend: str, races: bool) -> Calls:
    """Norms and convolutions, forward and, where nothing is stored by index, backward. Offsets that lie are among them."""
    norms = [make_norm(NORM_BY_NAME[name], BF16) for name in NORMS if not races or name in LAYER_RACES]
    names = [name for name in CONVOLUTIONS if not races or name in LAYER_RACES]
    convolutions = [make_convolution(CONVOLUTION_BY_NAME[name], BF16) for name in names]
    packed = make_convolution(CONVOLUTION_BY_NAME["packed_new"], BF16)
    convolutions += [] if races else [packed | lying for lying in LYING]
    for op, found in ((fd.gated_rms_norm, norms), (fd.short_convolution, convolutions)):
        calls = found if backend == "triton" else []  # which alone has them
        yield from of(op, calls, backend)
        for call in (x for x in calls if not {"state_pool", "checkpoint_states"} & x.keys()):
            yield functools.partial(layer_gradients, functools.partial(op, backend=backend), on_device(call))


def ranks(backend: str, races: bool) -> Calls:
    """Sequences over virtual ranks, forward and backward."""
    for case, kept in OVER_RANKS[:1] if races else OVER_RANKS:
        call = on_device(make_call(case, BF16)) | {"output_final_state": True, "backend": backend}
        yield functools.partial(Cut(call, 3, incoming_of(call)).over_ranks, disable_recompute=kept)


PARTS: dict[str, Callable[[str, bool], Calls]] = {
    x.__name__: x for x in (chunk, pool, prefill, decode, replay, fused, backward, layer, buffers, ranks)
}


def attempt(call: Callable[[], object], backend: str) -> int:
    """Returns 1, or 0 where Hopper's declines the call."""
    try:
        call()
    except ValueError:
        if backend == "triton":
            raise
        return 0
    return 1


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "triton"
    words = sys.argv[2:]
    unknown = set(words) - {"races", *PARTS}
    if unknown:
        raise SystemExit(f"got {' '.join(sorted(unknown))}, wanted races or parts: {' '.join(PARTS)}")
    parts = [name for name in PARTS if name in words] or list(PARTS)
    ran = sum(attempt(call, backend) for name in parts for call in PARTS[name](backend, "races" in words))
    torch.cuda.synchronize()
    print(f"{ran} calls")


if __name__ == "__main__":
    main()
