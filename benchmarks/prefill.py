"""Whole prompts: `chunk_kda` beside FLA, cuDNN, FlashKDA and attention-gym; split sequences; float32; engines' layers."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

import flashdelta as fd
from tests.support import prefills
from tests.support.cases import BF16, FP32
from tests.support.inputs import make_call
from tests.support.oracle import TOLERANCE, chunked_truth, truth

from . import contenders, engines, gate, workloads
from .gate import Results
from .run import Contender, Program, Setup, Work, main
from .workloads import Row, Served

RECURRENCE_TOKENS = 16384
"""Most tokens for which the truth is the recurrence, about 0.1 ms per token on a GPU; beyond, the chunked reference."""

BOTH = ("eager", "graph")


def make(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    if isinstance(case, Served):
        return engines.prefill(row, setup)
    return float32(row, setup) if row.table == "fp32" else prefill(row, setup)


def prefill(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    call = make_call(case, BF16, setup.device)
    want = (chunked_truth if case.tokens > RECURRENCE_TOKENS else truth)(call)[:2]
    run = functools.partial(fd.chunk_kda, **call, backend=setup.backend)

    def ours(**options: Any) -> Contender:
        one = functools.partial(run, **options)
        return Contender(one, TOLERANCE[BF16], lambda: one(out=torch.full_like(call["v"], torch.nan)), BOTH)

    def peer(bound: Any) -> Contender | str:
        return bound if isinstance(bound, str) else Contender(bound, modes=BOTH)

    made: dict[str, Any] = {
        "ours": ours(),
        "fla": setup.peer("fla", lambda f: Contender(functools.partial(f, **contenders.shared(call)))),
        "flash_kda": setup.peer("flash_kda", lambda f: peer(contenders.flash_kda(f, call, case))),
        "attn_gym": setup.peer("attn_gym", lambda f: peer(contenders.attn_gym(f, call, case))),
    }
    cudnn = contenders.cudnn_prefills(setup.peers.get("cudnn", "not asked for"), call, case)
    made |= {name: peer(bound) for name, bound in cudnn.items()}
    if row.table == "split":
        made |= {"whole": ours(split=False)}
    if case.lengths and (row.table == "split" or max(case.lengths) <= 128):
        # where it decides which kernels a call has
        made |= {"cu_seqlens_cpu": ours(cu_seqlens_cpu=call["cu_seqlens"].cpu())}
    chosen = fd.explain(fd.chunk_kda, **call, backend=setup.backend)
    facts = {"backend": chosen.chosen} | ({} if chosen.segments is None else {"segments": chosen.segments})
    return Work(made, functools.partial(gate.errors, want, ("o", "state")), facts)


# ---- float32 -------------------------------------------------------------------------------------------------------------


def float32(row: Row, setup: Setup) -> Work:
    """`kda_prefill` in both precisions, beside FLA on float32 and on bfloat16. Four heads are checked."""
    case: Any = row.call
    call = prefills.prefill_call(case, setup.device)
    heads = gate.spread(4, case.B * case.H)
    picked = {name: call[name].flatten(0, 1)[heads][None] for name in prefills.INPUTS}
    want = [x[0] for x in prefills.truth(call | picked)]

    def ours(precision: str) -> Contender:
        run = functools.partial(fd.kda_prefill, **call, precision=precision)
        return Contender(run, TOLERANCE[FP32], modes=("graph",), host=run)

    def fla(function: Any, dtype: torch.dtype) -> Contender:
        """Tokens lie before heads, and inputs are brought there once; g and beta stay float32."""
        given = {name: call[name].transpose(1, 2).contiguous() for name in prefills.INPUTS}
        given |= {name: given[name].to(dtype) for name in ("q", "k", "v")}
        return Contender(lambda: (function(**given)[0].transpose(1, 2),))

    made: dict[str, Any] = {"ours": ours("tf32x3"), "ieee": ours("ieee")}
    made |= {
        name: setup.peer("fla", functools.partial(fla, dtype=dtype))
        for name, dtype in (("fla", FP32), ("fla_bf16", BF16))
    }

    def errors(results: Results) -> gate.Errors:
        return gate.errors(want, ("o", "w", "u"), [x.flatten(0, 1)[heads] for x in results])

    return Work(made, errors)


PROGRAM = Program("prefill", workloads.PREFILL, make, peers=("fla", "cudnn", "flash_kda", "attn_gym", "engine"))

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
