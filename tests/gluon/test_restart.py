"""Work tiles that begin where a chunk forgets, interpreted: parts of whole sequences, in chunks and in steps, and segments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import build, prepare, segments
from flashdelta.problem.split import SplitCosts

from ..full import FULL
from ..gpu.calls import KIMI, hold
from ..support.cases import BF16, FP32, Case
from ..support.decays import EXPLICIT, OTHERS, explicit_call, moved
from ..support.oracle import assert_close, chunked_truth, covered_tokens, relative_error, same_bits
from .checks import hopper_call, poisoned
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow

FREE = SplitCosts(step=100, transition=0, compose=1, fixed=0, shortest=1, margin=0)


@contextlib.contextmanager
def cut(how: str, last_first: bool = False) -> Iterator[None]:
    """Work tiles wherever there are CTAs for them: a part has two chunks."""
    changed = []
    if how == "segments":
        changed = [mock.patch.object(module, "SPLIT_COSTS", FREE) for module in (prepare, segments)]
    if how == "steps":
        changed = [mock.patch.object(build, "in_steps", lambda problem, transitions_at_once: True)]
    with contextlib.ExitStack() as stack:
        for patch in (*changed, hopper_on_cpu(sms=24, last_first=last_first)):
            stack.enter_context(patch)
        yield


EACH = pytest.mark.parametrize("how", ["parts", "steps", "segments"])


def found_by(call: dict, how: str, last_first: bool = False) -> tuple[torch.Tensor, ...]:
    with cut(how, last_first):
        assert (max(fd.explain(fd.chunk_kda, **call).segments) > 1) == (how == "segments")
        return poisoned(call | ({"g": call["g"].to(BF16)} if how == "steps" else {}))


def remembers(call: dict, how: str) -> list[bool]:
    """Says of each head whether NaN in the values of the first chunk reaches the last token."""
    v = call["v"].clone()
    v[:, :64] = torch.nan
    o, state = found_by(call | {"v": v}, how)
    lasts = o[0, -1].isnan().any(dim=-1)
    assert (o[0, :64].isnan().all()) and torch.equal(lasts, state[0].flatten(1).isnan().any(dim=-1))
    return lasts.tolist()


CASES = [
    replace(KIMI, name="one", H=1, HV=1, T=300, state=FP32),
    replace(KIMI, name="packed", H=1, HV=2, lengths=(130, 0, 64, 257), state=FP32, v_first=True),
]
SHORT = replace(EXPLICIT, H=1, HV=1, T=384)


@EACH
@pytest.mark.parametrize(
    ("case", "memory"),
    [(x, y) for x in CASES for y in ("random", "slow") if FULL or x is CASES[0] or y == "random"],
    ids=lambda x: getattr(x, "name", x),
)
def test_as_whole(case: Case, memory: str, how: str):
    call = hopper_call(replace(case, memory=memory))
    found, want = found_by(call, how, last_first=case is CASES[1]), chunked_truth(call)
    hold(call, found, want)
    if how == "parts":
        with cut(how):
            whole = poisoned(call | {"split": False})
        for x, y in zip(found, whole):
            tokens = covered_tokens(call) if x.shape == found[0].shape else slice(None)
            assert relative_error(x[:, tokens].double(), y[:, tokens].double()) < 1e-6 * (memory == "random") + 1e-30


@EACH
def test_each_head_decides_by_its_norm(how: str):
    """What is forgotten has a norm below 2^-60; what has one below 2^-100 is forgotten, though channels differ in rate."""
    call = hopper_call(replace(SHORT, H=6, HV=6))
    rates = torch.linspace(0.2, 1.6, 6)[:, None] * (1 + torch.arange(128) % 2)
    call["g"] = (rates * -(0.9 + 0.2 * torch.rand(1, 384, 6, 128))).to(BF16)
    found = remembers(call, how)
    assert True in found and False in found
    k, g, beta = (call[name][0, 64:256].double() for name in ("k", "g", "beta"))
    k = torch.nn.functional.normalize(k, dim=-1)
    norms = []
    for chunk in (0, 128):
        M = torch.eye(128, dtype=torch.float64).expand(6, 128, 128)
        for t in range(chunk, chunk + 64):
            M = g[t].exp()[:, :, None] * M
            M = M - (beta[t, :, None] * k[t])[:, :, None] * (k[t][:, None] @ M)
        norms.append(torch.linalg.matrix_norm(M, 2).log2())
    for least, most, remembered in zip(torch.minimum(*norms), torch.maximum(*norms), found):
        assert most > -100 if remembered else least < -60


@EACH
@pytest.mark.parametrize(("channel", "gate"), [(3, -5.0), (3, -1 / 64), (100, -1 / 64), (7, torch.nan)])
def test_one_channel_that_stays_is_enough(channel: int, gate: float, how: str):
    g = torch.full((6, 64, 128), -5.0)
    g[..., channel] = gate
    assert remembers(explicit_call(SHORT, g), how) == [gate != -5.0]


@pytest.mark.parametrize("how", ["parts", "segments"])
def test_some_chunks_forget(how: str):
    """A segment that is needed lies between those that are not."""
    g = torch.full((8, 64, 128), -0.01)
    g[[1, 2, 5]] = -5.0
    call = explicit_call(replace(SHORT, T=512), g)
    hold(call, found_by(call, how), chunked_truth(call))


@EACH
@pytest.mark.parametrize("other", [*OTHERS, None], ids=str)
def test_what_moves_between_channels_is_remembered(other: int | None, how: str):
    """And many small decays: each of them is as small as M may be, not all together, except to the norm that steps bound."""
    if other is None:
        call = explicit_call(SHORT, torch.full((6, 64, 128), -0.65625))
        call["beta"].zero_()
    else:
        call = moved(SHORT, other)
    assert remembers(call, how) == [other is not None or how != "steps"]


@EACH
def test_what_moves_twice_in_a_half_step_is_remembered(how: str):
    """No channel's decay after the half step's reference is above 2^-72, so that only keys tell it."""
    g, k = torch.full((6, 64, 128), -5.0), torch.zeros(6, 64, 128)
    g[:, :21, 3] = g[:, 21:26, 7] = g[:, 26:, 9] = 0.0
    k[:, 20, [3, 7]] = k[:, 25, [7, 9]] = k[:, 63, [3, 9]] = 0.5**0.5
    assert remembers(explicit_call(SHORT, g, k), how) == [True]


@pytest.mark.parametrize("how", ["parts", "segments"])
def test_a_pool_is_read_before_it_is_written(how: str):
    """The last work tile stores where the first one reads, and may be done first."""
    call = hopper_call(replace(KIMI, H=1, HV=1, T=320, state=FP32, v_first=True, memory="random"))
    pool = torch.cat([torch.randn_like(call["initial_state"]), call.pop("initial_state")])
    call |= {"state_pool": pool, "state_indices": torch.tensor([1], dtype=torch.int32), "output_final_state": False}
    alone = call | {"state_pool": pool.clone(), "split": False}
    with cut("parts"):
        want, _ = poisoned(alone)
    found, _ = found_by(call, how, last_first=True)
    assert relative_error(found.double(), want.double()) < 1e-6
    assert_close("pool", pool, alone["state_pool"], 1e-6)
    assert same_bits(pool[0], alone["state_pool"][0])
