"""Compares layers with flashdelta and without: every token that a KDA layer serves is recorded with the layer's inputs, and
each sequence is held against one float64 run of the layer on those inputs.

A recorded row finds its sequence by position and token: the prompt and the outputs of request i have tokens of class i alone.
"""

from __future__ import annotations

import functools
import importlib
import math
import random
import statistics
from types import SimpleNamespace

from models import SCENARIOS, VOCABULARY, accepted, counters, run

CLASSES = 64
LAYERS = {
    "vllm.models.kimi_k3.nvidia.kda": "KimiK3DeltaAttention",
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": "KimiGatedDeltaNetAttention",
}
ROWS = 60_000
"""Tokens that a layer's tape has room for."""

NOW = SimpleNamespace(input_ids=None, positions=None, tapes={})
"""Inputs of the model's last call, and a tape for each layer by its prefix."""


class Tape:
    """A layer's rows, on the device: written by kernels alone, so that CUDA graphs record, too."""

    def __init__(self, layer, found: dict):
        import torch

        self.layer, self.count = layer, torch.zeros(1, dtype=torch.int64, device="cuda")
        self.kept = {name: x.new_empty(ROWS, *x.shape[1:]) for name, x in found.items()}

    def write(self, found: dict) -> None:
        import torch

        n = len(found["key"])
        places = (self.count + torch.arange(n, device="cuda")).clamp(max=ROWS - 1)
        for name, x in found.items():
            self.kept[name].index_copy_(0, places, x)
        self.count += n


def is_real(m, n: int):
    """Tells which of a step's rows are tokens: graphs have others, too."""
    import torch

    rows = torch.arange(n, device="cuda")
    if m.num_prefills == 0 and m.num_decodes == 0 and m.spec_query_start_loc is not None:
        return rows < m.spec_query_start_loc[-1]
    if m.num_prefills == 0 and m.spec_query_start_loc is None:
        return m.non_spec_state_indices_tensor[:n] > 0
    return rows >= 0


def recording(theirs):
    """A layer's `_forward` that keeps its rows."""

    @functools.wraps(theirs)
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        import torch
        from vllm.forward_context import get_forward_context

        theirs(self, mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)
        metadata = get_forward_context().attn_metadata
        m = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        n = len(mixed_qkv) if m is None else min(len(mixed_qkv), m.num_actual_tokens)
        ids, positions = (x.as_strided((n,), (1,)).long() for x in (NOW.input_ids, NOW.positions))
        found = {"mixed": mixed_qkv[:n], "g": g1[0, :n], "z": g2[:n], "beta": beta[0, :n], "out": core_attn_out[0, :n]}
        found["key"] = positions * VOCABULARY + ids
        if self.prefix not in NOW.tapes:  # in the run that measures memory
            NOW.tapes[self.prefix] = Tape(self, found)
        if m is not None:
            found["key"] = torch.where(is_real(m, n), found["key"], -1)
            NOW.tapes[self.prefix].write(found)

    return _forward


def install() -> None:
    """Before an engine is made: has its layers record, inside of what runs eagerly between pieces of graphs."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.models.kimi_k3 import KimiLinearForCausalLM

    for module, name in LAYERS.items():
        owner = getattr(importlib.import_module(module), name)
        owner._forward = eager_break_during_capture(recording(owner._forward.__wrapped__))
    forward = KimiLinearForCausalLM.forward

    @functools.wraps(forward)
    def noted(self, input_ids, positions, *arguments, **named):
        NOW.input_ids, NOW.positions = input_ids, positions
        return forward(self, input_ids, positions, *arguments, **named)

    KimiLinearForCausalLM.forward = noted


# ---- the truth --------------------------------------------------------------------------------------------------------


def exact(layer, rows: dict, heads: int = 16):
    """`[T, H, D]` in float64, of a whole sequence's inputs: convolution, gate, recurrence, gated norm; some heads at a time."""
    import torch

    import flashdelta as fd

    (T, H, D), norm, parts = rows["g"].shape, layer.o_norm, []
    mixed, weight = rows["mixed"].view(T, 3, H, D), layer.conv1d.weight.view(3, H, D, -1)
    flags = {f"use_{x}_in_kernel": True for x in ("qk_l2norm", "gate", "beta_sigmoid")}
    for some in (slice(h, h + heads) for h in range(0, H, heads)):
        filters = weight[:, some].double()
        x = torch.nn.functional.pad(mixed[:, :, some].double(), (*[0] * 6, filters.shape[3] - 1, 0))
        x = torch.nn.functional.silu(sum(x[i : i + T] * filters[..., i] for i in range(filters.shape[3])))
        rates = {"A_log": layer.A_log.flatten()[some], "dt_bias": layer.dt_bias.view(H, D)[some].flatten()}
        options: dict = {name: x.double() for name, x in rates.items()} | flags
        options |= {"lower_bound": layer.gate_lower_bound, "backend": "reference", "split": False}
        g, beta = rows["g"][None, :, some].double(), rows["beta"][None, :, some].double()
        o = fd.chunk_kda(*x[None].unbind(2), g, beta, **options)[0][0]
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
        parts.append(o * torch.sigmoid(rows["z"][:, some].double()))
    return torch.cat(parts, 1)


def errors(sequences: list[list[int]]) -> list[dict]:
    """Measures by layer the relative error of all tokens, of the worst one, of tokens far into a sequence, and how many tokens
    were compared; `missing` sequences have tokens that were not recorded."""
    import torch

    found = []
    for tape in NOW.tapes.values():
        count = int(tape.count)
        where = dict(zip(tape.kept["key"][: min(count, ROWS)].tolist(), range(ROWS)))  # the last row of a token counts
        sums, late, worst, missing, compared = [0.0, 0.0], [0.0, 0.0], 0.0, 0, 0
        for sequence in sequences:
            places = [where.get(position * VOCABULARY + token) for position, token in enumerate(sequence)]
            if None in places:
                missing += 1
                continue
            index = torch.tensor(places, device="cuda")
            rows = {name: x[index] for name, x in tape.kept.items()}
            want = exact(tape.layer, rows)
            wrong, size = ((rows["out"].double() - want).square().sum((1, 2)), want.square().sum((1, 2)))
            for total, part in ((sums, slice(None)), (late, slice(900, None))):
                total[0] += float(wrong[part].sum())
                total[1] += float(size[part].sum())
            worst, compared = max(worst, float((wrong / size).max().sqrt())), compared + len(sequence)
        rates = [math.sqrt(a / b) if b else None for a, b in (sums, late)]
        found.append({"error": rates[0], "late": rates[1], "worst": worst, "tokens": compared, "missing": missing})
        if count > ROWS:
            found[-1]["overflow"] = count
    return found


# ---- what is served ---------------------------------------------------------------------------------------------------


def own(i: int, n: int, period: int | None = None) -> list[int]:
    """n tokens of class i; repetitions of `period`."""
    drawn = random.Random(i)
    found = [CLASSES * drawn.randrange(1, VOCABULARY // CLASSES) + i % CLASSES for _ in range(min(n, period or n))]
    return (found * (1 + n // max(1, len(found))))[:n]


def serve(llm, prompts: list, counts: list, classes: list, few: bool = False) -> tuple[list[list[int]], int]:
    """The tokens that layers see of each request, and how many came from the prefix cache. `few`: of its class, request i may
    answer with 1 to 4 tokens alone, so that drafts are accepted in whole, in part and not at all."""
    each = [[*range(c + CLASSES, VOCABULARY, CLASSES)] for c in classes]
    allowed = [{"allowed_token_ids": x[: 1 + i % 4] if few else x} for i, x in enumerate(each)]
    _, outputs = run(llm, prompts, counts, allowed)
    hits = sum(getattr(o, "num_cached_tokens", None) or 0 for o in outputs)
    return [p + list(o.outputs[0].token_ids)[:-1] for p, o in zip(prompts, outputs)], hits


PROMPTS = [{"prompt_logprobs": 1}]
LENGTHS = (3, 17, 64, 65, 129, 500, 1000, 2047, 4000, 20000)


def parts(llm, name: str):
    """Name, sequences, and what else there is to say, of each part."""
    scenario, chance = SCENARIOS[name], random.Random(0)
    if scenario.blocks:
        before = sum(counters(llm, "preemptions").values())
        lengths = [1880 + 2 * i for i in range(16)]  # near a block's end, past which decodes need more blocks
        found, _ = serve(llm, [own(i, n) for i, n in enumerate(lengths)], [60] * 16, [*range(16)])
        yield "preemption", found, {"preemptions": sum(counters(llm, "preemptions").values()) - before}
        return
    if scenario.drafts:
        counts = [chance.randint(8, 48) for _ in range(24)]
        prompts = [own(i, chance.randint(1, 1500), 20) for i in range(24)]
        before = counters(llm, "spec_decode")
        found, _ = serve(llm, prompts, counts, [*range(24)], few=True)
        yield "drafts", found, {"accepted tokens per draft": accepted(llm, before)}
    longest = LENGTHS[:-1] if scenario.drafts else LENGTHS
    prompts = [own(30 + i, n) for i, n in enumerate(longest)]
    found, _ = serve(llm, prompts, [8] * len(prompts), [30 + i for i in range(len(prompts))])
    yield "prompts in pieces, among decodes", found, {}
    more = [p + own(45 + i, 60) for i, p in enumerate(prompts)]
    found, hits = serve(llm, more, [8] * len(more), [45 + i for i in range(len(more))])
    yield "from cached states", found, {"cached tokens": hits}
    joining = [own(100 * CLASSES + i, chance.randint(1, 300)) for i in range(40)]
    found, _ = serve(llm, joining, [chance.randint(1, 64) for _ in joining], [*range(40)])
    yield "requests that join and leave", found, {}
    long = [own(200 * CLASSES + i, 100) for i in range(4)]
    found, _ = serve(llm, long, [1000] * 4, [*range(4)])
    yield "1,000 steps", found, {}


def scores(llm) -> dict[str, list[list[float]]]:
    """Log-probabilities of given texts' tokens: nothing is sampled, so nothing parts."""
    texts = [own(300 * CLASSES + i, n) for i, n in enumerate(LENGTHS[:-1])]

    def of(outputs) -> list[list[float]]:
        return [[x[t].logprob for t, x in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])] for o in outputs]

    together = of(run(llm, texts, 1, PROMPTS * len(texts))[1])
    return {"together": together, "alone": [of(run(llm, [text], 1, PROMPTS)[1])[0] for text in texts]}


def report(llm, name: str) -> dict:
    import torch

    found: dict = {"parts": {}}
    with torch.inference_mode():
        for tape in NOW.tapes.values():
            tape.count.zero_()
        for part, sequences, more in parts(llm, name):
            found["parts"][part] = {"layers": errors(sequences), **more}
            if part != "prompts in pieces, among decodes":  # whose states the next part starts from
                for tape in NOW.tapes.values():
                    tape.count.zero_()
        if not (SCENARIOS[name].drafts or SCENARIOS[name].blocks):
            found["scores"] = scores(llm)
    torch.cuda.empty_cache()  # the next process needs it
    return found


# ---- off and on -------------------------------------------------------------------------------------------------------


def compared(reports: dict[str, dict]) -> tuple[list[dict], list[dict]]:
    """`reports` by "SCENARIO:MODE". Rows of errors against float64, by layer; and of log-probabilities against those of off."""
    rows, logs = [], []
    for case, off in reports.items():
        name, mode = case.split(":")
        on = reports.get(f"{name}:on")
        if mode != "off" or on is None:
            continue
        for part, x in off["parts"].items():
            for i, pair in enumerate(zip(x["layers"], on["parts"].get(part, {}).get("layers", ()))):
                row = {key: [layer[key] for layer in pair] for key in ("error", "late", "worst", "tokens", "missing")}
                ratio = row["error"][1] / row["error"][0] if all(row["error"]) else None
                rows.append({"scenario": name, "part": part, "layer": i, "ratio": ratio} | row)
        if "scores" in off and "scores" in on:
            own = [(off["scores"]["together"], off["scores"]["alone"])]
            if base := reports.get(f"{name}:base"):
                own += [(off["scores"][way], base["scores"][way]) for way in off["scores"]]
            apart = [distance(off["scores"][way], on["scores"][way]) for way in off["scores"]]
            itself = [distance(*pair) for pair in own]
            for what, i in (("mean", 0), ("largest", 1)):
                largest = {"on": max(x[i] for x in apart), "off": max(x[i] for x in itself)}
                logs.append({"scenario": name, "what": what} | largest)
    return rows, logs


def distance(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
    every = [abs(s - t) for x, y in zip(a, b) for s, t in zip(x, y)]
    return (sum(every) / len(every), max(every)) if all(map(math.isfinite, every)) else (math.inf, math.inf)


LAYER, MEAN, ITSELF = 1.05, 1.0, 3.0
"""Bounds of on's error over off's: in a layer, and in the geometric mean of all; and of what off differs from itself."""


def passes(rows: list[dict], logs: list[dict]) -> list[str]:
    """Lists what exceeds its bound."""
    bad = [r for r in rows if any(r["missing"]) or r["ratio"] is None or not r["ratio"] <= LAYER]
    wrong = [f"{r['scenario']}, {r['part']}, layer {r['layer']}: {r['ratio']}" for r in bad]
    for name in dict.fromkeys(r["scenario"] for r in rows):
        mean = statistics.geometric_mean([r["ratio"] or math.inf for r in rows if r["scenario"] == name])
        wrong += [] if mean <= MEAN else [f"{name}: geometric mean {mean}"]
    apart = [x for x in logs if not x["on"] <= ITSELF * x["off"]]
    wrong += ["{scenario}: log-probabilities, {what}: {on:.3g} apart, {off:.3g} of itself".format(**x) for x in apart]
    return wrong


def table(rows: list[dict], logs: list[dict]) -> str:
    """Writes in Markdown errors against float64 of the layers together, and the largest ratio of one."""
    lines = [
        "| model | what is served | tokens | off | on | on / off, by layer |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, part in dict.fromkeys((r["scenario"], r["part"]) for r in rows):
        some = [r for r in rows if (r["scenario"], r["part"]) == (name, part) and r["ratio"]]
        if some:
            off, on = (math.sqrt(sum(r["error"][i] ** 2 for r in some) / len(some)) for i in range(2))
            ratios = ", ".join(f"{r['ratio']:.3f}" for r in some)
            lines.append(f"| {name} | {part} | {some[0]['tokens'][1]:,} | {off:.3e} | {on:.3e} | {ratios} |")
    lines += [
        "",
        "| model | log-probabilities of prompts | off from on | off from itself |",
        "| --- | --- | ---: | ---: |",
    ]
    lines += [f"| {x['scenario']} | {x['what']} difference | {x['on']:.3g} | {x['off']:.3g} |" for x in logs]
    return "\n".join(lines)
