"""Calls of `chunk_kda` cut into those of the ranks of a group, and what these find put together again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import flashdelta as fd
from flashdelta.parallel import ContextParallel, context_parallel
from flashdelta.parallel.border import FIRST_RANK, HALO, LAST_RANK, OPEN_IN, OPEN_OUT, counts, shard

from .inputs import TOKEN_TENSORS, Source
from .virtual import on_ranks

SHARED = ("A_log", "dt_bias")

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """A packed call whose tokens lie over `ranks` ranks. `incoming`: gradients of its results, if it is differentiated."""

    call: dict
    ranks: int
    incoming: tuple[Tensor, Tensor] | None = None
    exchange: str = "auto"
    relay: bool = True

    @property
    def offsets(self) -> list[int]:
        return self.call["cu_seqlens"].tolist()

    @property
    def tokens(self) -> int:
        return self.offsets[-1] // self.ranks

    def sequences(self, rank: int) -> list[int]:
        """Those that a rank has, brute force."""
        low, high, last = rank * self.tokens, (rank + 1) * self.tokens, rank + 1 == self.ranks
        found = []
        for n, (a, b) in enumerate(itertools.pairwise(self.offsets)):
            if (a < b and a < high and b > low) or (a == b and (low <= a < high or (last and a >= high))):
                found.append(n)
        return found

    def local(self, context: ContextParallel, spare: int = 0) -> dict:
        """The call of a rank, whose context has room for `spare` sequences more than it has."""
        low = context.rank * self.tokens
        call = {name: x for name, x in self.call.items() if name != "cu_seqlens"} | {"cp_context": context}
        for name in TOKEN_TENSORS:
            call[name] = call[name][:, low : low + self.tokens].detach().clone()
        if call.get("initial_state") is not None:
            rows = call["initial_state"][self.sequences(context.rank)]
            # states of sequences that start elsewhere are not read
            if int(context.border[0]) >= 0:
                rows[0] = torch.nan
            call["initial_state"] = torch.cat([rows, rows.new_zeros(spare, *rows.shape[1:])])
        for name in SHARED:
            if call.get(name) is not None:
                call[name] = call[name].detach().clone()
        return call

    def gradients(self, rank: int, spare: int = 0) -> tuple[Tensor, Tensor]:
        """Those that come in on a rank: of final states where sequences end."""
        assert self.incoming is not None
        do, dht = self.incoming
        low = rank * self.tokens
        rows = dht[self.sequences(rank)].clone()
        for i, n in enumerate(self.sequences(rank)):
            if self.offsets[n + 1] > low + self.tokens:
                rows[i] = 0
        return do[:, low : low + self.tokens], torch.cat([rows, rows.new_zeros(spare, *rows.shape[1:])])

    def joined(self, found: Sequence[Found]) -> Found:
        """Results and gradients of all ranks as those of the whole call."""
        whole = {}
        for name in found[0]:
            parts = [x[name] for x in found]
            if name in SHARED:
                whole[name] = torch.stack(parts).sum(0)
            elif name in ("final_state", "initial_state"):
                rows = parts[0].new_zeros(len(self.offsets) - 1, *parts[0].shape[1:])
                for rank, part in enumerate(parts):
                    for n, row in zip(self.sequences(rank), part):
                        ends = self.offsets[n + 1] <= (rank + 1) * self.tokens
                        if name == "initial_state":
                            rows[n] += row
                        elif ends:
                            rows[n] = row
                whole[name] = rows
            else:
                whole[name] = torch.cat(parts, dim=1)
        return whole

    def run(self, group: object, spare: int = 0, **options: object) -> Found:
        """On the rank of `group`."""
        offsets = self.call["cu_seqlens"]
        counts = [len(self.sequences(rank)) for rank in range(self.ranks)]
        most = max(counts) + spare if spare else None
        ways = {"exchange": self.exchange, "relay": self.relay}
        context = context_parallel(offsets, group=group, max_sequences=most, **ways)
        room = context.cu_seqlens.numel() - 1 - counts[context.rank]
        return self._run(context.rank, self.local(context, room) | options, room)

    def run_by(self, other: object, group: ProcessGroup, **options: object) -> Found:
        """As `run`, by an `other` library's context of the same offsets."""
        call = self.local(context_parallel(self.call["cu_seqlens"], group=group)) | {"cp_context": other} | options
        return self._run(group.rank(), call)

    def _run(self, rank: int, call: dict, room: int = 0) -> Found:
        return results_of(call, None if self.incoming is None else self.gradients(rank, room))

    def over_ranks(self, spare: int = 0, **options: object) -> Found:
        return self.joined(on_ranks(self.ranks, lambda group: self.run(group, spare, **options)))

    def whole(self, **options: object) -> Found:
        call = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in self.call.items()}
        return results_of(call | options, self.incoming)


def results_of(call: dict, incoming: tuple[Tensor, Tensor] | None, op: Callable = fd.chunk_kda) -> Found:
    """`o`, `final_state` and, if gradients come in, those of the inputs."""
    names = [*TOKEN_TENSORS, "initial_state", *SHARED]
    inputs = {name: call[name] for name in names if call.get(name) is not None}
    if incoming is not None:
        for x in inputs.values():
            x.requires_grad_()
    o, final_state = op(**call)
    found = {"o": o.detach(), "final_state": final_state.detach()}
    if incoming is not None:
        torch.autograd.backward([o, final_state], list(incoming))
        found |= {name: x.grad for name, x in inputs.items()}
    return found


def incoming(call: dict, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Incoming gradients of `o` and of the final state, in float64."""
    q, v, source = call["q"], call["v"], Source(torch.float64, "cpu", seed)
    sequences = len(q) if call.get("cu_seqlens") is None else len(call["cu_seqlens"]) - 1
    inner = (v.shape[3], q.shape[3]) if call.get("state_v_first") else (q.shape[3], v.shape[3])
    return source.normal(*v.shape).to(q.device), source.normal(sequences, v.shape[2], *inner).to(q.device)


def incoming_of(call: dict, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The same in the dtypes of the results of a packed call."""
    (do, dht), v, state = incoming(call, seed), call["v"], call.get("initial_state")
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    return do.to(v.dtype), dht.to(wide if state is None else state.dtype)


def fla_context(group, cu_seqlens: Tensor) -> SimpleNamespace:
    """The context that FLA's `build_cp_context` makes of these offsets, which has no empty sequences."""
    offsets, rank, ranks = cu_seqlens.cpu(), group.rank(), group.size()
    tokens = int(offsets[-1]) // ranks
    local, border = shard(offsets, rank, ranks, tokens, int(counts(offsets, ranks, tokens)[rank]))
    local, said = local.to(cu_seqlens.device), border.tolist()
    return SimpleNamespace(
        group=group,
        cu_seqlens=local,
        cu_seqlens_cpu=local,
        is_first_rank=said[OPEN_IN] < 0,
        is_last_rank=said[OPEN_OUT] < 0,
        pre_num_ranks=rank - said[FIRST_RANK],
        post_num_ranks=said[LAST_RANK] - rank,
        conv1d_kernel_size=4,
        pre_num_conv_tokens=said[HALO],
        layout="contiguous",
    )
