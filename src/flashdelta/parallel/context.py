"""A call's knowledge of the other ranks of a process group, over which its sequences lie (docs/parallel.md)."""

import contextlib
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..problem import device_checks
from ..problem.arguments import Arguments, check_tensor, flag, positive, shape_of
from ..problem.errors import rule, wrong
from .border import ANY_HALO, FIRST, counts, new_border, shard
from .checks import broadcast_errors, check_on_all_ranks
from .exchange import EXCHANGES, check_alive, chosen_exchange, members

MOST_TOKENS = 2**31 - 1
"""The most that a rank may have."""


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Layout of a call's tokens over the ranks of `group`: `context_parallel` makes one. Two are equal if a call's launches
    are the same with them, whatever their offsets.

    `cu_seqlens [N + 1]` int32: offsets of this rank's tokens, on the device; None if each batch row is one sequence over all
    ranks. `border [10]` int32, on the device, is what kernels read of the other ranks (`parallel/border.py` lists its places).
    `tokens`: of a rank (None: each rank has its own). `conv_size`: taps of the layer's convolution.
    """

    _group: weakref.ref[Any] | None = field(repr=False)
    name: str
    rank: int
    ranks: int
    border: Tensor = field(repr=False)
    cu_seqlens: Tensor | None = field(default=None, repr=False)
    tokens: int | None = None
    conv_size: int | None = None
    exchange: str = "auto"
    """Way of states from rank to rank: `"gather"`, `"put"`, or `"auto"`, which the first exchange decides."""
    relay: bool = True
    """True if the first of two ranks sends the state that its own scan ends with."""
    knows_halo: bool = True
    """True if the border tells how many tokens lie on earlier ranks: an object like FLA's may not."""
    capacity: tuple[int, ...] = ()
    """Sequences that `cu_seqlens` of each rank has room for."""
    sequences: int = field(default=0, repr=False)
    """Their number over all ranks: as many as the offsets are for."""
    alike: tuple = field(init=False, repr=False)
    """All that launches depend on. Contexts with other offsets are equal if this is: calls with them replay each other."""

    def __post_init__(self) -> None:
        offsets = None if self.cu_seqlens is None else (self.cu_seqlens.shape, self.cu_seqlens.dtype)
        ranks = self.name, self.rank, self.ranks, self.exchange, self.relay
        object.__setattr__(self, "alike", (*ranks, self.tokens, offsets, self.device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContextParallel) and self.alike == other.alike

    def __hash__(self) -> int:
        return hash(self.alike)

    @property
    def group(self) -> Any:
        """The process group, until it is destroyed: calls are remembered with their context, and keep no group alive."""
        return None if self._group is None else self._group()

    @property
    def device(self) -> torch.device:
        return self.border.device

    def check_tokens(self, x: Tensor, name: str = "x") -> None:
        """Checks that a call's `x [B, T, ...]` has as many tokens as the offsets are for."""
        if self.cu_seqlens is not None and (x.shape[0] != 1 or self.tokens not in (None, x.shape[1])):
            wanted = f"[{', '.join(['1', 'T', *map(str, x.shape[2:])])}]"
            if self.tokens is not None:
                wanted += f" with the context's T = {self.tokens} tokens per rank"
            raise wrong(name, f"shape {list(x.shape)}", wanted)

    def update_(self, cu_seqlens: Tensor) -> None:
        """Takes other offsets, for as many tokens per rank, into the same memory: a captured CUDA graph replays with them.

        Every rank must call this with the same offsets, which FLASHDELTA_CHECK=1 verifies, and not between a forward and its
        backward pass, which reads the same memory and raises a RuntimeError then. Reentrant checkpointing, which runs the
        forward again, can't notice: its gradients are wrong.

        Args:
            cu_seqlens: `[M + 1]` int32 or int64: all ranks' offsets, non-decreasing from 0 to at most `ranks * tokens` tokens.
                On the host they are checked, and on a device with FLASHDELTA_CHECK=1. Else their values there are not read:
                offsets that go past all tokens are clamped to these, of more sequences than there is room for the last
                ones are left out, and where offsets fall it is undefined which tokens make a sequence. Nothing outside
                the tensors is read or written.

        Raises:
            ValueError, TypeError: offsets that do not fit.
        """
        assert self.cu_seqlens is not None and self.tokens is not None, "context_parallel gives both"
        with broadcast_errors(self):
            check_offsets(cu_seqlens)
            if cu_seqlens.device.type == "cpu" or device_checks.enabled():
                on_host = cu_seqlens.cpu()
                check_values(on_host, self.ranks * self.tokens)
                # of all ranks, so that all refuse alike
                for r, (n, most) in enumerate(zip(counts(on_host, self.ranks, self.tokens).tolist(), self.capacity)):
                    if n > most:
                        room = f"{most} sequences per rank, as context_parallel left room for (max_sequences)"
                        raise wrong("cu_seqlens", f"{n} sequences on rank {r}", f"of at most {room}")
            local, border = shard(cu_seqlens, self.rank, self.ranks, self.tokens, self.cu_seqlens.numel() - 1)
        check_on_all_ranks(self, "update_", "cu_seqlens", border)
        self.cu_seqlens.copy_(local, non_blocking=True)
        self.border.copy_(border, non_blocking=True)
        object.__setattr__(self, "sequences", len(cu_seqlens) - 1)

    def rows(self, x: Tensor) -> Tensor:
        """Selects this rank's rows of a tensor with a row for each sequence of all ranks: slots, flags, initial states.

        Nothing is read on the host: in a captured graph it follows `update_`.

        Args:
            x: `[M, ...]` or longer, in the order of the `M + 1` offsets that `context_parallel` or `update_` took last, on the
                context's device.

        Returns:
            `[N, ...]`. Entries past the rank's last sequence, which have no tokens, repeat a row.

        Raises:
            ValueError, TypeError: x has no row for some sequence, or each batch row is one.
        """
        if self.cu_seqlens is None:
            raise wrong("rows", "a context of batch rows", "one of packed sequences")
        check_tensor("x", x)
        wanted = f"[M, ...] with a row for each of the {self.sequences} sequences of all ranks"
        rule("x", x.dim() > 0 and len(x) >= max(self.sequences, 1), wanted, shape_of(x))
        own = torch.arange(len(self.cu_seqlens) - 1, device=self.device)
        return x[(self.border[FIRST] + own).clamp(max=len(x) - 1)]


def context_parallel(
    cu_seqlens: Tensor,
    *,
    group: Any,
    cu_seqlens_cpu: Tensor | None = None,
    max_sequences: int | None = None,
    conv_size: int | None = None,
    exchange: str = "auto",
    relay: bool = True,
) -> ContextParallel:
    """Cuts packed sequences into equal runs of tokens, one for each rank of a process group.

    Rank `r` of `R` has the tokens `[r T / R, (r + 1) T / R)` of the `T` that all have. A sequence may start and end anywhere:
    it may lie on one rank, on several, on all. Every rank must call this with the same offsets.

    Args:
        cu_seqlens: `[M + 1]` int32 or int64, offsets of all ranks' tokens on the device of the calls, from 0, non-decreasing;
            empty sequences are legal, and belong to the rank of the token after them (at the end: to the last one).
        group: a `torch.distributed.ProcessGroup` that this process is in.
        cu_seqlens_cpu: the same offsets on the host, if at hand: without them they are read from the device, once.
            FLASHDELTA_CHECK=1 verifies that they are the same.
        max_sequences: how many sequences a rank may have: `N` of its calls, the last ones empty if there are fewer. By default
            as many as it has.
        conv_size: taps of the layer's short convolution, of which modules ask.
        exchange: how states go from rank to rank, with the same bits: `"gather"`, an all-gather of the group; `"put"`, copies
            into the memory of the other ranks, which are GPUs of one host; or `"auto"`: put where all ranks can, which is
            asked once of a group. A capture of a CUDA graph needs one call of its size before it.
        relay: what the first of two ranks sends of a forward. True: the state that its own scan ends with, so calls that
            follow each other take what one GPU takes, and the second rank is a call behind. False: a state that it forms
            before its scan, so that both ranks scan at the same time; a single call, or one of layers that all ranks wait
            for each other in, ends sooner, and calls that follow each other take longer (docs/parallel.md). Results differ in
            rounding. More ranks always do the latter.

    Returns:
        A `ContextParallel`, for `chunk_kda(..., cp_context=)` on this rank's tokens.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value. Where
            `"put"` can't be, every rank says why.
    """
    with broadcast_errors(group):
        name, rank, ranks = members(group)
        offsets = _offsets_on_host(cu_seqlens, cu_seqlens_cpu)
        rule("exchange", exchange in EXCHANGES, f"one of {EXCHANGES}", repr(exchange))
        flag("relay", relay)
        for option, value in (("max_sequences", max_sequences), ("conv_size", conv_size)):
            if value is not None:
                positive(option, value, "an int or None")
        total = check_values(offsets)
        multiple = f"of a multiple of the {ranks} ranks' tokens (each has as many)"
        rule("cu_seqlens", total % ranks == 0, multiple, f"{total} tokens")
        tokens = total // ranks
        most = f"of at most {MOST_TOKENS} tokens per rank (offsets are int32)"
        rule("cu_seqlens", tokens <= MOST_TOKENS, most, f"{tokens} tokens per rank")
        capacity = counts(offsets, ranks, tokens).tolist()
        if max_sequences is not None:
            least = f"at least {max(capacity)}, the sequences that a rank has of these offsets"
            rule("max_sequences", max(capacity) <= max_sequences, least, max_sequences)
            capacity = [max_sequences] * ranks
    with torch.inference_mode(False):  # calls with gradients take them, too
        local, border = shard(offsets, rank, ranks, tokens, capacity[rank])
        local, border = (x.to(cu_seqlens.device, non_blocking=True) for x in (local, border))
    places = weakref.ref(group), name, rank, ranks, border, local, tokens, conv_size, exchange, relay
    context = ContextParallel(*places, capacity=tuple(capacity), sequences=len(offsets) - 1)
    check_on_all_ranks(context, ("context_parallel", max_sequences, conv_size, exchange, relay), "cu_seqlens")
    way = exchange if ranks == 1 else chosen_exchange(exchange, name, cu_seqlens.device)
    return context if way == exchange else replace(context, exchange=way)


def _offsets_on_host(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    check_offsets(cu_seqlens)
    if cu_seqlens_cpu is None:
        return cu_seqlens.cpu()
    name, x = "cu_seqlens_cpu", cu_seqlens_cpu
    check_offsets(x, name)
    rule(name, x.is_cpu, "on the CPU", f"device {x.device}")
    rule(name, x.shape == cu_seqlens.shape, f"of cu_seqlens' shape {list(cu_seqlens.shape)}", shape_of(x))
    same = not device_checks.enabled() or torch.equal(x.long(), cu_seqlens.cpu().long())
    rule(name, same, "equal to cu_seqlens", "other offsets")
    return x


def check_offsets(offsets: Any, name: str = "cu_seqlens") -> None:
    Arguments({name: offsets}, {}).require(name, "M+1", torch.int32, torch.int64)
    rule(name, offsets.numel() > 0, "of M + 1 offsets", "an empty tensor")


def check_values(offsets: Tensor, most: int = 2**63) -> int:
    """Checks the values of offsets on the host; returns the last."""
    values = offsets.tolist()
    device_checks.check_offsets(values, most, f"the {most} tokens of all ranks")
    return values[-1]


# ---- of a call ------------------------------------------------------------------------------------------------------------

FOREIGN = ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks")
"""Attributes of FLA's context, which stands for one of ours."""


def context_of(cp_context: Any, group: Any, device: torch.device, *arguments: str) -> ContextParallel:
    """The context of a call that names a context or a group, by the caller's `arguments` for them."""
    argument, of_group = arguments or ("cp_context", "group")
    if cp_context is None and group is not None:
        name, rank, ranks = members(group, of_group)
        return _of_rows(group, name, rank, ranks, device)
    rule("group", group is None, "None with cp_context", "both")
    if isinstance(cp_context, ContextParallel):
        context = cp_context
    elif all([hasattr(cp_context, name) for name in FOREIGN]):
        context = _from_fla(cp_context)
    else:
        also = ", a process group" if of_group == argument else ""
        wanted = f"a ContextParallel{also}, or an object with FLA's attributes {', '.join(FOREIGN)}"
        raise TypeError(f"{argument} must be {wanted}; got {type(cp_context).__name__}")
    if not torch.compiler.is_compiling() and context._group is not None:
        check_alive(context.group, context.name, argument)
    return context


def context_in_call(cp_context: Any, group: Any, cu_seqlens: Tensor | None, q: Tensor) -> tuple[Any, Any, Any]:
    """Returns, for a call that names ranks, its context, the rank's offsets, and the border (None where there is one rank)."""
    context = context_of(cp_context, group, q.device)
    rule("cp_context", context.device == q.device, f"on q's device {q.device}", f"device {context.device}")
    # it would run the reference, whose exchange is not that of the other ranks' kernels
    if context.cu_seqlens is None and context.ranks > 1 and q.dim() == 4 and q.shape[1] == 0:
        raise wrong("q", shape_of(q), "of at least one token on every rank of a group")
    if cu_seqlens is not None and cu_seqlens is not context.cu_seqlens:
        wanted = "None (context_parallel takes those of all ranks)"
        raise wrong("cu_seqlens", f"a tensor with {'group' if cp_context is None else 'cp_context'}", wanted)
    return context, context.cu_seqlens, context.border if context.ranks > 1 else None


_of_groups: weakref.WeakKeyDictionary[Any, dict[torch.device, ContextParallel]] = weakref.WeakKeyDictionary()


def _of_rows(group: Any, name: str, rank: int, ranks: int, device: torch.device) -> ContextParallel:
    """Each batch row is one sequence over all ranks."""
    tracing = torch.compiler.is_compiling()
    known = {} if tracing else _of_groups.setdefault(group, {})
    if device in known:
        return known[device]
    goes_on = dict(open_in=0 if rank > 0 else -1, open_out=0 if rank + 1 < ranks else -1)
    border = new_border(device, **goes_on, last_rank=ranks - 1, halo=ANY_HALO if rank > 0 else 0)
    found = ContextParallel(None if tracing else weakref.ref(group), name, rank, ranks, border)
    if type(border) is Tensor:  # not what a mode of fake tensors makes
        known[device] = found
    return found


def _from_fla(context: Any) -> ContextParallel:
    """FLA's context, kept on it for the next call while it says the same. A traced call, which reads no offsets, does not know
    how many tokens they have."""
    layout, halo = getattr(context, "layout", "contiguous"), getattr(context, "pre_num_conv_tokens", None)
    said = (context.group, context.cu_seqlens, context.pre_num_ranks, context.post_num_ranks, halo, layout)
    tracing = torch.compiler.is_compiling()
    known = None if tracing else getattr(context, "_flashdelta", None)
    if known is not None and all([a is b for a, b in zip(known[0], said)]):
        return known[1]
    rule("cp_context", layout == "contiguous", "of layout 'contiguous'", f"layout {layout!r}")
    rule("cp_context", context.group is not None, "one with a process group", "one whose group is None")
    name, rank, ranks = members(context.group)
    before, after = _fla_count(context, "pre_num_ranks", rank), _fla_count(context, "post_num_ranks", ranks - 1 - rank)
    check_offsets(context.cu_seqlens)
    N, tokens, device, group = context.cu_seqlens.shape[0] - 1, None, context.cu_seqlens.device, None
    places = dict(open_in=0 if before > 0 else -1, open_out=N - 1 if after > 0 else -1, halo=halo or 0, sequences=N)
    places |= dict(first_rank=rank - before, last_rank=rank + after)
    if tracing:
        opened = context.cu_seqlens[:2][-1].int() * (before > 0)
        border = torch.cat([new_border(device, **places)[:-1], opened[None]])
    else:
        offsets = context.cu_seqlens if getattr(context, "cu_seqlens_cpu", None) is None else context.cu_seqlens_cpu
        tokens, group = check_values(offsets), weakref.ref(context.group)
        border = new_border(device, **places, opened_end=int(offsets[:2][-1]) if before > 0 else 0)
    values = group, name, rank, ranks, border, context.cu_seqlens, tokens, getattr(context, "conv1d_kernel_size", None)
    found = ContextParallel(*values, knows_halo=halo is not None, capacity=(N,) * ranks)
    if not tracing:
        with contextlib.suppress(AttributeError):  # of a class that takes no others
            context._flashdelta = said, found
    return found


def _fla_count(context: Any, name: str, most: int) -> int:
    """Reads and checks a number of ranks. The kernels read what these ranks sent."""
    value = getattr(context, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"cp_context must be one with an int {name}; got {name} {value!r} ({type(value).__name__})")
    rule("cp_context", 0 <= value <= most, f"one with {name} from 0 to {most} on this rank", f"{name} {value}")
    return value
