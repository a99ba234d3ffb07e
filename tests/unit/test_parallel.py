"""Sequences over the ranks of a process group, on the reference: virtual ranks in one process, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.parallel import ContextParallel, context_parallel, halo
from flashdelta.parallel import border as at
from flashdelta.parallel import context as contexts
from flashdelta.parallel.border import shard
from flashdelta.problem import device_checks

from ..full import FULL
from ..support.cases import BY_NAME, Case
from ..support.inputs import make_call, on_meta
from ..support.layers import HIDDEN, make_layer
from ..support.ranks import Cut, Found, fla_context, incoming_of, results_of
from ..support.refusals import says
from ..support.virtual import on_ranks

FP64 = torch.float64


def packed(lengths: tuple[int, ...], **changes) -> Case:
    return replace(
        Case("ranks", "", K=32, V=64, H=1, HV=2, chunk_size=32, memory="long", state=FP64), lengths=lengths, **changes
    )


def cut_of(case: Case, ranks: int, gradients: bool = True) -> Cut:
    call = make_call(case, FP64) | {"output_final_state": True, "backend": "reference"}
    return Cut(call, ranks, incoming_of(call) if gradients else None)


def assert_same(found: Found, wanted: Found, tolerance: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        error = (found[name] - x).norm() / x.norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: {error:.1e}"


# ---- values -----------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Lengths whose sum the ranks share equally, borders of sequences on and beside those of ranks among them."""
    ranks = draw(st.integers(2, 6))
    tokens = draw(st.integers(1, 40))
    border = st.integers(1, ranks - 1).map(lambda r: r * tokens)
    anywhere = st.integers(0, ranks * tokens)
    cuts = draw(st.lists(st.one_of(border, anywhere), max_size=6))
    offsets = [0, *sorted(cuts), ranks * tokens]
    return tuple(b - a for a, b in itertools.pairwise(offsets)), ranks


@settings(max_examples=30 if FULL else 15)
@given(batches(), st.integers(0, 2), st.sampled_from(["auto", 2, 3]))
def test_ranks_find_what_one_finds(batch: tuple[tuple[int, ...], int], spare: int, split: str | int):
    """Also where each cuts its tokens into segments."""
    lengths, ranks = batch
    cut = cut_of(packed(lengths), ranks)
    assert_same(cut.over_ranks(spare, split=split), cut.whole())


CASES = {
    "through_all": (packed((192,)), 6),
    "no_state": (packed((50, 46), state=None), 4),
    "v_first": (packed((50, 0, 46), v_first=True), 4),
    "gva": (packed((20, 76), HV=3), 3),
    "softplus": (packed((70, 26), gate="softplus", beta="logit"), 4),
    "lower_bound": (packed((70, 26), gate="lower_bound", lower_bound=-5.0, beta="double_logit"), 4),
    "one_token_each": (packed((9,)), 9),
    "many_ranks": (packed((3, 93, 0)), 16),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_call(name: str):
    case, ranks = CASES[name]
    cut = cut_of(case, ranks)
    assert_same(cut.over_ranks(), cut.whole())


@pytest.mark.parametrize("lengths", [(40, 40), (30, 50)])
def test_a_batch_row_over_all_ranks(lengths: tuple[int, int]):
    """`group=` alone; ranks may have different numbers of tokens."""
    call = make_call(Case("rows", "", B=2, T=80, chunk_size=32, memory="long", state=FP64), FP64)
    call |= {"output_final_state": True, "backend": "reference"}
    wanted = fd.chunk_kda(**call)

    def run(group) -> tuple:
        begin = sum(lengths[: group.rank()])
        tokens = {name: call[name][:, begin : begin + lengths[group.rank()]] for name in ("q", "k", "v", "g", "beta")}
        return fd.chunk_kda(**call | tokens, group=group)

    found = on_ranks(2, run)
    torch.testing.assert_close(torch.cat([o for o, _ in found], dim=1), wanted[0], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found[1][1], wanted[1], rtol=1e-10, atol=1e-11)


def test_a_nan_stays_in_its_sequence(spoiled: int = 1):
    """In values and gradients, on every rank."""
    cut = cut_of(packed((40, 30, 26)), 4)
    begin, end = cut.offsets[spoiled : spoiled + 2]
    clean = cut.whole()
    for name in ("q", "k", "v", "g", "beta"):
        cut.call[name][:, begin:end] = torch.nan
    found = cut.over_ranks()
    outside = torch.ones(cut.offsets[-1], dtype=torch.bool)
    outside[begin:end] = False
    others = [n for n in range(3) if n != spoiled]
    for name in ("o", "q", "k", "v", "g", "beta"):
        torch.testing.assert_close(found[name][:, outside], clean[name][:, outside], rtol=1e-10, atol=1e-11)
    for name in ("final_state", "initial_state"):
        torch.testing.assert_close(found[name][others], clean[name][others], rtol=1e-10, atol=1e-11)
    assert found["o"][:, begin:end].isnan().all()


def test_a_pool_is_read_where_a_sequence_starts_and_stored_where_it_ends():
    cut = cut_of(packed((40, 0, 56)), 3, gradients=False)
    states = cut.call.pop("initial_state")
    cut.call.pop("output_final_state")
    whole = Cut(cut.call | {"initial_state": states, "output_final_state": True}, 3).whole()

    def run(group) -> Tensor:
        context = context_parallel(cut.call["cu_seqlens"], group=group)
        own = cut.sequences(context.rank)
        pool = states.clone()
        call = cut.local(context) | {"state_pool": pool, "state_indices": torch.tensor(own), "state_v_first": False}
        fd.chunk_kda(**call)
        return pool

    for rank, pool in enumerate(on_ranks(3, run)):
        for n, (a, b) in enumerate(itertools.pairwise(cut.offsets)):
            ends = a < b and rank * 32 < b <= (rank + 1) * 32
            wanted = whole["final_state"][n] if ends else states[n]
            torch.testing.assert_close(pool[n], wanted, rtol=1e-10, atol=1e-11)


# ---- contexts ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-99, 199), min_size=1, max_size=6))
def test_offsets_that_nobody_reads_name_ranks_that_are_there(offsets: list[int]):
    """On a device values are not checked, and kernels read what these ranks have sent."""
    for rank in range(3):
        local, border = shard(torch.tensor(offsets), rank, 3, 16, 2)
        assert 0 <= int(border[at.FIRST_RANK]) <= rank <= int(border[at.LAST_RANK]) < 3
        assert -1 <= int(border[at.OPEN_IN]) < 2 and -1 <= int(border[at.OPEN_OUT]) < 2
        assert 0 <= int(local.min()) <= int(local.max()) <= 16


def test_nothing_keeps_a_destroyed_group():
    """Neither the context of its batch rows, nor answers about calls with it, nor a context that the caller keeps."""
    gone, contexts_left = [], []

    def run(group) -> None:
        call = small_call()
        context = context_parallel(OFFSETS, group=group)
        fd.chunk_kda(**call, group=group)
        halo(torch.zeros(1, 32, 3), group, 3)
        fd.chunk_kda(**call, cp_context=context)
        assert fd.supports(fd.chunk_kda, **call, group=group).ok and context.group is group
        gone.append(weakref.ref(group))
        contexts_left.append(context)

    on_ranks(2, run)
    gc.collect()
    assert [x() for x in gone] == [None, None] and [x.group for x in contexts_left] == [None, None]


def test_update_takes_other_lengths_into_the_same_memory():
    first, second = (cut_of(packed(lengths), 2) for lengths in ((64, 0, 0), (20, 30, 14)))

    def run(group) -> Found:
        context = context_parallel(first.call["cu_seqlens"], group=group, max_sequences=3)
        pointers = context.cu_seqlens.data_ptr(), context.border.data_ptr()
        context.update_(second.call["cu_seqlens"])
        assert pointers == (context.cu_seqlens.data_ptr(), context.border.data_ptr())
        assert context.rows(torch.arange(3)).tolist() == ([0, 1, 2] if context.rank == 0 else [1, 2, 2])
        spare = 3 - len(second.sequences(context.rank))
        return results_of(second.local(context, spare), second.gradients(context.rank, spare))

    assert_same(second.joined(on_ranks(2, run)), second.whole())


def test_a_context_of_fla_is_taken():
    cut = cut_of(packed((40, 50, 6), state=None), 3)

    def run(group) -> Found:
        context = fla_context(group, cut.call["cu_seqlens"])
        found, device = cut.run_by(context, group), cut.call["q"].device
        assert contexts.context_of(context, None, device) is contexts.context_of(context, None, device)
        return found

    assert_same(cut.joined(on_ranks(3, run)), cut.whole())


@pytest.mark.parametrize("by", ["context", "group"])
def test_what_inference_mode_made_takes_gradients_later(by: str):
    """A model is evaluated, then trained on."""

    def run(group) -> float:
        call, x = small_call(), torch.ones(1, 32, 3)
        with torch.inference_mode():
            where = {"cp_context": context_parallel(OFFSETS, group=group)} if by == "context" else {"group": group}
            fd.chunk_kda(**call, **where)
            halo(x, *where.values(), 3)
        fd.chunk_kda(**call | {"q": call["q"].requires_grad_()}, **where)[0].sum().backward()
        halo(x.requires_grad_(), *where.values(), 3).sum().backward()
        return x.grad.sum().item() + 1000.0 * bool(call["q"].grad.isfinite().all())

    assert on_ranks(2, run) == [1009.0, 1000.0]


# ---- halo -------------------------------------------------------------------------------------------------------------


def test_halo_sends_memory_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """The caller may write to `x` while other ranks are still being sent what was there."""
    sent: list[Tensor] = []

    def noted(packet: Tensor, packets: Tensor, *where: object) -> None:
        sent.append(packet)
        packets.zero_()

    monkeypatch.setattr(importlib.import_module("flashdelta.parallel.halo"), "exchange", noted)
    x, offsets = torch.rand(1, 8, 3), torch.tensor([0, 16])
    on_ranks(2, lambda group: halo(x, context_parallel(offsets, group=group), 3))
    assert len(sent) == 2 and all(y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for y in sent)


@pytest.mark.parametrize("W", [2, 4, 5])
@pytest.mark.parametrize(("lengths", "ranks"), [((40, 5, 51), 4), ((96,), 4), ((2, 6), 4), ((8,), 8), ((3, 0, 1), 2)])
def test_halo_makes_a_convolution_whole(lengths: tuple[int, ...], ranks: int, W: int):
    """In values and gradients, also where a rank has fewer tokens than the halo."""
    D = 3
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x, w = torch.randn(1, sum(lengths), D, dtype=FP64), torch.randn(D, 1, W, dtype=FP64)
    grad = torch.randn_like(x)
    x.requires_grad_()
    spans = [(a, b) for a, b in itertools.pairwise(offsets.tolist()) if b > a]
    pieces = [F.conv1d(F.pad(x[:, a:b].mT, (W - 1, 0)), w, groups=D).mT for a, b in spans]
    whole = torch.cat(pieces, dim=1)
    whole.backward(grad)

    def run(group) -> tuple[Tensor, Tensor]:
        context = context_parallel(offsets, group=group)
        low = context.rank * context.tokens
        own = x[:, low : low + context.tokens].detach().clone().requires_grad_()
        before = halo(own, context, W - 1)
        outputs = []
        for n, (a, b) in enumerate(itertools.pairwise(context.cu_seqlens.tolist())):
            past = before if n == 0 else torch.zeros_like(before)
            outputs.append(F.conv1d(torch.cat([past, own[:, a:b]], dim=1).mT, w, groups=D).mT if b > a else own[:, :0])
        # a halo of zeros where no sequence comes from another rank
        found = torch.cat(outputs, dim=1)
        (found * grad[:, low : low + context.tokens]).sum().backward()
        return found.detach(), own.grad

    found = on_ranks(ranks, run)
    torch.testing.assert_close(torch.cat([o for o, _ in found], dim=1), whole.detach())
    torch.testing.assert_close(torch.cat([d for _, d in found], dim=1), x.grad)


# ---- what is refused --------------------------------------------------------------------------------------------------


OFFSETS = torch.tensor([0, 20, 64])
X = torch.zeros(1, 32, 3)


def small_call(**changes) -> dict:
    return make_call(replace(BY_NAME["bounded"], **({"T": 32} | changes))) | {"backend": "reference"}


def kda(cp_context: object = None, **options):
    return fd.chunk_kda(**small_call() | options, cp_context=cp_context)


def of_case(**changes):
    return lambda c: kda(c, **small_call(**changes))


def in_layer(cp_context: object, backend: str = "auto", **options):
    layer = make_layer(torch.float32)
    layer.backend = backend
    return layer(torch.zeros(1, 32, HIDDEN), cp_context=cp_context, **options)


def other_of_fla(group, /, **changes) -> SimpleNamespace:
    """A context of FLA that says something else."""
    return SimpleNamespace(**vars(fla_context(group, OFFSETS)) | changes)


def of_fla(**changes):
    """A layer's call with one."""
    return lambda c: in_layer(other_of_fla(c.group, **changes))


def context_of(offsets: Tensor = OFFSETS, **options):
    return lambda c: context_parallel(offsets, **{"group": c.group} | options)


def halo_of(width: int = 3, x: Tensor = X):
    return lambda c: halo(x, c, width)


def with_other_offsets(offsets: list[int], call: Callable):
    """On a rank that did not hear of the others' offsets."""

    def run(c: ContextParallel):
        local, border = shard(torch.tensor(offsets), c.rank, c.ranks, c.tokens, c.capacity[c.rank])
        return call(replace(c, border=border, cu_seqlens=local))

    return run


CALLS = {"kda": kda, "layer": in_layer, "halo": halo_of(), "context": context_of()}
CALLS["update"] = lambda c: c.update_(OFFSETS)
NOBODY = torch.distributed.GroupMember.NON_GROUP_MEMBER
REFUSED = {
    "kda_tokens": (of_case(T=31), "q must be [1, T, 2, 32] with the context's T = 32...; got shape [1, 31, 2, 32]"),
    "kda_rows": (of_case(B=2), "q must ...; got batch size 2"),
    "other_device": (lambda c: kda(c, **on_meta(small_call())), "cp_context must ...; got device cpu"),
    "both": (lambda c: kda(c, group=c.group), "group must ...; got both"),
    "offsets": (partial(kda, cu_seqlens=OFFSETS), "cu_seqlens must ...; got a tensor with cp_context"),
    "states": (partial(kda, initial_state=torch.zeros(3, 2, 32, 64)), "initial_state must ...; got shape"),
    "zigzag": (lambda c: kda(other_of_fla(c.group, layout="zigzag")), "cp_context must ...; got layout 'zigzag'"),
    "context_indivisible": (context_of(torch.tensor([0, 63])), "cu_seqlens must ...; got 63 tokens"),
    "context_falling": (context_of(torch.tensor([0, 9, 8])), "cu_seqlens must ...; got 9 then 8"),
    "context_room": (context_of(max_sequences=1), "max_sequences must ...; got 1"),
    "update_last": (lambda c: c.update_(torch.tensor([0, 65])), "cu_seqlens must ...; got last offset 65"),
    "layer_cache": (lambda c: in_layer(c, return_cache=True), "return_cache must be left out with cp_context; got one"),
    "layer_taps": (lambda c: in_layer(replace(c, conv_size=3)), "cp_context must ...; got one for 3 taps"),
    # its halo has passed the checks on all ranks then
    "layer_between_exchanges": (lambda c: in_layer(c, backend="triton"), "backend must ...; got 'triton'"),
    "fla_halo": (of_fla(pre_num_conv_tokens=None), "context must ...; got one without pre_num_conv_tokens"),
    "fla_before": (of_fla(pre_num_ranks=2), "cp_context must ...; got pre_num_ranks 2"),
    "fla_offsets": (of_fla(cu_seqlens_cpu=torch.tensor([2, 32])), "cu_seqlens must ...; got first offset 2"),
    "halo_width": (halo_of(0), "width must ...; got 0"),
    "halo_tokens": (lambda c: halo(torch.zeros(1, 2, 3), c.group, 3), "x must ...; got 2 tokens"),
}
"""A call by a rank's context, whose first word tells what other ranks call, and what it says."""


def heard(*calls: Callable) -> list[str]:
    """Errors that two ranks get from these calls of theirs, which leave the context as it was."""

    def run(group) -> str:
        context = context_parallel(OFFSETS, group=group, max_sequences=2)
        before = context.border.tolist()
        with pytest.raises((TypeError, ValueError, RuntimeError)) as refused:
            calls[group.rank()](context)
        assert context.border.tolist() == before
        return str(refused.value)

    return on_ranks(2, run)


UNTOLD = {
    "group": (context_of(group="world"), "group must ...; got str"),
    "other_group": (context_of(group=NOBODY), "group must ...; got a group that this process is not in"),
    "no_context": (lambda c: kda(7), "cp_context must ...; got int"),
    "fla_disabled": (of_fla(group=None), "cp_context must ...; got one whose group is None"),
}
"""The same of calls that name no group whose ranks could be told."""


@pytest.mark.parametrize("name", [*REFUSED, *UNTOLD])
def test_what_does_not_fit_is_refused_on_every_rank(name: str):
    call, message = (REFUSED | UNTOLD)[name]
    assert all(says(message, text) for text in heard(call, call)), message


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_the_others_hear_where_values_are_checked(name: str, checked: None):
    call, message = REFUSED[name]
    other = name.partition("_")[0]
    for good in (other,) if other in CALLS else ("kda", "layer"):
        first, second = heard(CALLS[good], call)
        argument = "cu_seqlens" if good in ("context", "update") else "context"
        assert says(f"{argument} must ...; got one that rank 1 rejected", first)
        assert says(message, second)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "ENABLED", True)


def of_group(**options):
    return lambda c: kda(group=c.group, **options)


HOST = context_of(cu_seqlens_cpu=torch.tensor([0, 30, 64]))
OTHER_CALL = "context must ...; got another call on rank 1 than on rank 0"
OTHER_OFFSETS = "cu_seqlens must ...; got other offsets on rank 1 than on rank 0"
ODD = {
    "borders": (kda, with_other_offsets([0, 32, 64], kda), OTHER_OFFSETS),
    # the ranks' states go on alike, but not the inputs of a convolution
    "inside": (kda, with_other_offsets([0, 31, 64], kda), OTHER_OFFSETS),
    "beta": (kda, of_case(beta="double_logit"), OTHER_CALL),
    "group": (of_group(), of_group(scale=2.0), "group must ...; got another call on rank 1"),
    "relay": (context_of(), context_of(relay=False), "cu_seqlens must ...; got another call on rank 1"),
    "update": (CALLS["update"], lambda c: c.update_(torch.tensor([0, 19, 64])), OTHER_OFFSETS),
    "host": (HOST, HOST, "cu_seqlens_cpu must ...; got other offsets"),
    "halo_width": (halo_of(), halo_of(2), OTHER_CALL),
    # whose backward pass would wait
    "halo_gradients": (halo_of(), halo_of(x=X.clone().requires_grad_()), OTHER_CALL),
    "halo_and_kda": (halo_of(), kda, OTHER_CALL),
}
"""Calls of the two ranks, and what both hear."""


@pytest.mark.parametrize("name", ODD)
def test_ranks_that_disagree_are_refused_where_values_are_checked(name: str, checked: None):
    *calls, wanted = ODD[name]
    assert all(says(wanted, text) for text in heard(*calls))


@pytest.mark.parametrize("how", ["plain", "checkpointed", "offloaded"])
@pytest.mark.parametrize("of", ["kda", "kept", "halo"])
def test_offsets_must_stay_until_the_backward_pass(how: str, of: str):
    """Also where what was saved is not what the caller changes: the gradients would be those of other offsets."""

    def run(group) -> None:
        context, x = context_parallel(OFFSETS, group=group), torch.rand(1, 32, 3)
        loss = lambda x: halo(x, context, 3).square().sum()  # noqa: E731
        if of != "halo":
            call = small_call()
            x = call.pop("q")
            loss = lambda q: kda(context, **call, q=q, disable_recompute=of == "kept")[0].square().sum()  # noqa: E731
        x.requires_grad_()
        copies = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda x: x)
        with copies if how == "offloaded" else contextlib.nullcontext():
            found = checkpoint(loss, x, use_reentrant=False) if how == "checkpointed" else loss(x)
        context.update_(torch.tensor([0, 10, 64]))
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            found.backward()
        assert x.grad is None

    on_ranks(2, run)


def test_tokens_on_earlier_ranks_are_counted_up_to_a_bound():
    """Beyond 2^31 an int32 would wrap."""
    tokens = 2**30
    _, border = shard(torch.tensor([0, 4 * tokens]), 3, 4, tokens, 1)
    assert border[at.HALO] == at.ANY_HALO and border[at.FIRST_RANK] == 0


def test_an_update_has_the_room_that_each_rank_has():
    """Without `max_sequences` ranks have as much as they need; all refuse what one has no room for."""

    def run(group) -> str:
        context = context_parallel(torch.tensor([0, 10, 20, 64]), group=group)
        context.update_(torch.tensor([0, 12, 30, 64]))
        assert context.cu_seqlens.tolist() == ([0, 12, 30, 32] if group.rank() == 0 else [0, 32])
        before = context.border.tolist(), context.cu_seqlens.tolist()
        with pytest.raises(ValueError) as refused:
            context.update_(torch.tensor([0, 40, 64]))
        assert (context.border.tolist(), context.cu_seqlens.tolist()) == before
        return str(refused.value)

    assert all(says("cu_seqlens must be of at most 1...; got 2 sequences on rank 1", text) for text in on_ranks(2, run))


@pytest.mark.parametrize("lengths", [(40, 50, 6), (96,), (10, 80, 6)])
def test_ranks_that_agree_pass_the_checks(lengths: tuple[int, ...], checked: None):
    """Also where a sequence goes on from the first rank to the last, over one that has nothing else; and of a halo's batch
    rows ranks may have different numbers of tokens."""
    cut = cut_of(packed(lengths), 3)
    assert_same(cut.over_ranks(1), cut.whole())
    found = on_ranks(2, lambda group: halo(torch.full((2, 4 + group.rank(), 3), 1.0 + group.rank()), group, 3))
    assert found[0].eq(0).all() and found[1].eq(1).all()
