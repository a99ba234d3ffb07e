"""Random Kimi-Linear and Kimi-K3 layers in vLLM: a `config.json`, weights drawn by name, an engine."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import time
import zlib
from dataclasses import dataclass

VOCABULARY = 32768


@dataclass(frozen=True)
class Scenario:
    """`k3`: Kimi-K3's full-rank gate with its bound, which vLLM prefills with FlashKDA; else Kimi-Linear's. `drafts`: n-grams
    of so many tokens per sequence. `blocks`: of the cache, so few that requests are preempted."""

    k3: bool
    heads: int = 32
    drafts: int = 0
    blocks: int = 0


SCENARIOS = {
    "linear": Scenario(False),
    "k3": Scenario(True),
    "k3-24": Scenario(True, heads=24),  # a shard for which vLLM has a fused step of its own
    "draft": Scenario(False, drafts=3),
    "preempt": Scenario(True, blocks=72),
}
MODES = ("off", "on", "fused", "base", "on-base")
"""vLLM's own, with flashdelta, also with its fused step instead of vLLM's; `base` takes 512, not 8192 tokens per step."""


@dataclass(frozen=True)
class Sizes:
    layers: int = 16
    experts: int = 16  # 0: every layer is dense
    longest: int = 66560
    cache_gib: float = 8.0


def config(scenario: Scenario, sizes: Sizes) -> dict:
    """Kimi-Linear-48B-A3B's, of fewer layers and experts. Every fourth layer is MLA."""
    layers, experts, heads = sizes.layers, sizes.experts, scenario.heads
    full = [*range(4, layers + 1, 4)]
    linear = {"head_dim": 128, "num_heads": heads, "short_conv_kernel_size": 4, "full_attn_layers": full}
    linear["kda_layers"] = [i for i in range(1, layers + 1) if i not in full]
    if scenario.k3:
        linear |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    names = dict(architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", torch_dtype="bfloat16")
    text = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)
    text |= dict.fromkeys(("max_position_embeddings", "model_max_length"), 1 << 20)
    layer: dict = dict(hidden_size=2304, intermediate_size=9216, hidden_act="silu", rms_norm_eps=1e-5)
    layer |= dict(rope_theta=10000.0, num_hidden_layers=layers, num_nextn_predict_layers=0, linear_attn_config=linear)
    mla: dict = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=72)
    mla |= dict(q_lora_rank=1536 if scenario.k3 else None, mla_use_nope=True, mla_use_output_gate=scenario.k3)
    mla |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    moe: dict = dict(num_experts=experts or None, num_experts_per_token=min(8, experts) or None)
    moe["moe_intermediate_size"] = 1024
    moe |= dict.fromkeys(("num_expert_group", "topk_group", "first_k_dense_replace", "moe_layer_freq"), 1)
    moe |= dict(num_shared_experts=int(experts > 0), moe_router_activation_func="sigmoid", routed_scaling_factor=2.446)
    return names | text | layer | mla | moe | dict.fromkeys(("moe_renormalize", "use_grouped_topk"), True)


def draw(name: str, x) -> None:
    """Fills a weight, in the same way in every process and whatever the order."""
    import torch

    generator = torch.Generator(device=x.device).manual_seed(zlib.crc32(name.encode()) + 1)
    drawn = functools.partial(torch.rand, generator=generator, device=x.device, dtype=torch.float32)

    def uniform(low: float, high: float) -> None:
        if x.dim() > 1 and x.is_contiguous():
            for rows in x.view(x.shape[0], -1).split(4096 if x.dim() == 2 else 8):
                rows.copy_(drawn(rows.shape) * (high - low) + low)
        else:
            x.copy_(drawn(x.shape) * (high - low) + low)

    last = name.rsplit(".", 1)[-1]
    if not x.is_floating_point():
        return
    if "norm" in name:
        x.fill_(1.0)
    elif last == "A_log":  # as FLA draws them: decays of 0.001 to 0.1 times 1 to 16 per token
        uniform(1.0, 16.0)
        x.log_()
    elif last == "dt_bias":
        uniform(math.log(1e-3), math.log(1e-1))
        dt = x.exp()
        x.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif "bias" in last:
        x.zero_()
    elif "conv1d" in name or "embed_tokens" in name:
        uniform(*((-0.5, 0.5) if "conv1d" in name else (-1.7, 1.7)))
    else:
        bound = math.sqrt(3.0 / x.shape[-1]) * (4.0 if "lm_head" in name else 1.0)  # variance 1 / inputs
        uniform(-bound, bound)


def register() -> None:
    """Gives vLLM a loader `by_name`."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("by_name")
    class ByName(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model, model_config) -> None:
            for name, x in model.named_parameters():
                draw(name, x.data)
            for layer in model.modules():  # what its own loaders derive from checkpoints
                if getattr(layer, "in_proj_padding", 0):
                    layer.in_proj_qkvgfab.weight.data[-layer.in_proj_padding :].zero_()
                packed = getattr(layer, "decode_conv1d_weight", None)
                if packed is not None:
                    packed.copy_(layer.conv1d.weight.data.view(3, -1, layer.conv_size).transpose(1, 2))
                    layer.decode_norm_weight.copy_(layer.o_norm.weight.data)


def engine(scenario: Scenario, mode: str, sizes: Sizes, folder: str):
    """A `vllm.LLM` in this process. `cache_gib` of `sizes` is its cache; 0 has vLLM measure how much there is room for."""
    from vllm import LLM

    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config(scenario, sizes), f)
    given = dict(model=folder, skip_tokenizer_init=True, load_format="by_name", dtype="bfloat16", seed=0)
    given |= dict(max_model_len=sizes.longest, max_num_seqs=128, max_num_batched_tokens=512 if "base" in mode else 8192)
    given |= dict(enable_prefix_caching=True, enable_chunked_prefill=True, disable_log_stats=False)
    given |= dict(gpu_memory_utilization=0.1 if sizes.cache_gib else 0.9, jit_monitor_verbose=True)
    given["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
    if sizes.cache_gib:
        given["kv_cache_memory_bytes"] = int(sizes.cache_gib * 2**30)
    if scenario.blocks:
        given |= {"num_gpu_blocks_override": scenario.blocks, "max_num_seqs": 16}
    if scenario.drafts:
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        given["speculative_config"] = {"method": "ngram", "num_speculative_tokens": scenario.drafts, **lookup}
    return LLM(**given)


def tokens(seed: int, n: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(16, VOCABULARY) for _ in range(n)]


def repeated(seed: int, n: int, period: int = 20) -> list[int]:
    """Repetitions, of which n-grams make drafts."""
    return (tokens(seed, period) * (1 + n // period))[:n]


def run(llm, prompts: list, n, options: list[dict] | None = None) -> tuple[float, list]:
    """Seconds, and the outputs, of `n` greedy tokens after each prompt (a list: of each its own number, and `options`)."""
    import torch
    from vllm import SamplingParams

    counts = n if isinstance(n, list) else [n] * len(prompts)
    common = dict(temperature=0.0, ignore_eos=True, detokenize=False)
    each = options or [{}] * len(prompts)
    params = [SamplingParams(max_tokens=count, **common | own) for count, own in zip(counts, each)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, outputs


def counters(llm, *words: str) -> dict[str, float]:
    """vLLM's metrics whose names have one of the words."""
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {name.removeprefix("vllm:"): x for name, x in found.items() if any(word in name for word in words)}


def accepted(llm, before: dict[str, float]) -> float:
    """Accepted tokens per draft since the `counters` of "spec_decode" were `before`."""
    gained = {name: x - before.get(name, 0) for name, x in counters(llm, "spec_decode").items()}
    return gained["spec_decode_num_accepted_tokens"] / gained["spec_decode_num_drafts"]


def described(llm) -> dict:
    """Describes what is behind the numbers: date, commit, versions, options, and what flashdelta says of itself."""
    import torch
    import vllm

    from flashdelta.integrations import status
    from flashdelta.tools.environment import environment, versions

    found = llm.llm_engine.vllm_config
    return environment(torch.device("cuda")) | {
        "flashdelta": status("vllm").state,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions() | {"vllm": vllm.__version__},
        "cudagraph_mode": str(found.compilation_config.cudagraph_mode),
        "mamba_cache_mode": found.cache_config.mamba_cache_mode,
        "block_size": found.cache_config.block_size,
        "gpu_blocks": found.cache_config.num_gpu_blocks,
    }
