"""A small character language model made of Kimi Delta Attention.

    x      = embedding[token]
    x      = x + KDA(rmsnorm(x));  x = x + MLP(rmsnorm(x))              for every layer
    logits = rmsnorm(x) embedding^T

Trained by `examples/train_tiny_lm.py`; run by `flashdelta demo`.
"""

import json
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..problem.arguments import check_float, check_int, check_tensor, find_device, positive
from ..problem.errors import mistyped, rule, wrong
from .attention import KdaCache, KdaPool, KimiDeltaAttention

VOCABULARY = "\n" + " " + string.digits + string.ascii_letters + string.punctuation
"""Every character the model reads and writes; a token is an index into this string."""

_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}
_CONFIG_KEY = "flashdelta.language_model"

SAVED = "a file that save_model wrote"

Caches = tuple[KdaCache, ...]
"""One `KdaCache` per layer."""

Pools = tuple[KdaPool, ...]
"""One `KdaPool` per layer."""


def encode(text: str, name: str = "text") -> Tensor:
    """The tokens of `text`, `[len(text)]` int64; a refusal calls it `name`.

    Raises:
        ValueError: a character outside `VOCABULARY`.
    """
    unknown = sorted(set(text) - _TOKENS.keys())
    rule(name, not unknown, "printable ASCII characters and newlines", repr("".join(unknown)))
    return torch.tensor([_TOKENS[character] for character in text], dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """The text of `tokens`, `[T]` int64."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """The shape of a `KdaLanguageModel`; heads and dimensions as in `KimiDeltaAttention`, `mlp_size` of the MLP."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_v_heads: int = 4
    head_dim: int = 32
    head_v_dim: int = 32
    conv_size: int = 4
    gate_rank: int = 32
    mlp_size: int = 320
    norm_eps: float = 1e-5


class SwiGLU(nn.Module):
    """`(silu(x Wgate) * x Wup) Wdown`."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, 2 * mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP, each behind an RMSNorm and added to the stream."""

    def __init__(self, config: LanguageModelConfig, *, chunk_size: int, backend: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        own = {name: size for name, size in vars(config).items() if name not in ("num_layers", "mlp_size")}
        self.attention = KimiDeltaAttention(**own, chunk_size=chunk_size, backend=backend)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor, cache: KdaCache | None, **options: Any) -> tuple[Tensor, KdaCache | None]:
        mixed, cache = self.attention(self.attention_norm(x), cache, **options)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class KdaLanguageModel(nn.Module):
    """A causal language model over `VOCABULARY`: `num_layers` blocks of attention and MLP, input and output tied.

    Args:
        config: the model's shape.
        chunk_size: tokens per chunk of the attention, 32 or 64.
        backend: what `flashdelta.chunk_kda` takes: `"auto"` or a backend's name.

    Raises:
        ValueError, TypeError: as `KimiDeltaAttention`.
    """

    def __init__(self, config: LanguageModelConfig, *, chunk_size: int = 64, backend: str = "auto") -> None:
        super().__init__()
        if not isinstance(config, LanguageModelConfig):
            raise mistyped("config", config, "a LanguageModelConfig")
        for name in ("hidden_size", "num_layers", "mlp_size"):  # the layers check the others
            positive(name, getattr(config, name))
        self.config = config
        self.embedding = nn.Embedding(len(VOCABULARY), config.hidden_size)
        blocks = (Block(config, chunk_size=chunk_size, backend=backend) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        # the residual stream stays near unit size at any depth: what is added to it starts small
        nn.init.normal_(self.embedding.weight, std=config.hidden_size**-0.5)
        for block in self.blocks:
            for output in (block.attention.o_proj, block.mlp.down_proj):
                output.weight.data.mul_((2 * config.num_layers) ** -0.5)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def make_pools(self, slots: int) -> Pools:
        """Pools of so many slots for all layers, states in float32 (float64 of a float64 model)."""
        dtype = torch.promote_types(torch.float32, self.embedding.weight.dtype)
        return tuple(block.attention.make_pool(slots, state_dtype=dtype) for block in self.blocks)

    def forward(
        self,
        tokens: Tensor,
        caches: Caches | None = None,
        *,
        return_caches: bool = False,
        pools: Pools | None = None,
        slots: Tensor | None = None,
        has_initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Caches | None]:
        """Scores every next token.

        Args:
            tokens: `[B, T]` int64 or int32, `T >= 1`.
            caches: of the tokens before these, from an earlier call; None at the start of the text.
            return_caches: also return the caches after the last token.
            pools: instead of caches: texts go on from their slots, as in `KimiDeltaAttention.forward`.
            slots: `[B]` int32 or int64, with `pools`: each text's slot, null below 0.
            has_initial_state: `[B]` bool, with `pools`: where False the text starts anew in its slot.

        Returns:
            `(logits [B, T, len(VOCABULARY)], caches or None)`, the logits in the model's dtype.

        Raises:
            ValueError, TypeError: `tokens` that are none, or not one cache or pool per layer.
        """
        check_tensor("tokens", tokens)
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be of dtype int32 or int64; got {tokens.dtype}")
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise wrong("tokens", f"shape {list(tokens.shape)}", "[B, T] with T >= 1")
        if tokens.device.type == "cpu" and tokens.numel() > 0 and not torch.compiler.is_compiling():
            most = len(VOCABULARY) - 1
            for token in (int(tokens.min()), int(tokens.max())):
                rule("tokens", 0 <= token <= most, f"from 0 to {most}", token)
        for name, given in (("caches", caches), ("pools", pools)):
            count = len(self.blocks) if given is None else len(given)
            rule(name, count == len(self.blocks), f"one per layer = {len(self.blocks)}", count)
        x = self.embedding(tokens)
        after = []
        nothing = [None] * len(self.blocks)
        options = {"return_cache": return_caches, "slots": slots, "has_initial_state": has_initial_state}
        for block, cache, pool in zip(self.blocks, caches or nothing, pools or nothing):
            x, cache = block(x, cache, pool=pool, **options)
            after.append(cache)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits, tuple(after) if return_caches else None

    @torch.no_grad()
    def steps(
        self, logits: Tensor, caches: Caches, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Writes on, one token per step, without end.

        Args:
            logits: `[B, len(VOCABULARY)]` after the last token so far.
            caches: after the same token.
            temperature: 0 takes the likeliest token; above, samples from `softmax(logits / temperature)`.
            generator: of the sampling, on the model's device.

        Yields:
            `(token [B], logits [B, len(VOCABULARY)] after it)`.

        Raises:
            ValueError: a negative temperature.
        """
        check_float("temperature", temperature)
        rule("temperature", temperature is not None and temperature >= 0, "at least 0", temperature)
        while True:
            token = sample(logits, temperature, generator)
            out, caches = self(token[:, None], caches, return_caches=True)
            logits = out[:, -1]
            yield token, logits

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, tokens: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continues every prompt `[B, T]` by `tokens` tokens: the continuation, `[B, tokens]`. Else as `steps`."""
        check_int("tokens", tokens)
        rule("tokens", tokens >= 0, "at least 0", tokens)
        if tokens == 0:
            return prompt.new_empty(prompt.shape[0], 0)
        logits, caches = self(prompt, return_caches=True)
        steps = self.steps(logits[:, -1], caches, temperature=temperature, generator=generator)
        return torch.stack([token for (token, _), _ in zip(steps, range(tokens))], dim=1)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """A token `[B]` for every row of `logits [B, len(VOCABULARY)]`."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits.float() / temperature, dim=-1), 1, generator=generator)[:, 0]


def save_model(model: KdaLanguageModel, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes weights (in `dtype`; `A_log` and `dt_bias` in float32) and shape to one safetensors file.

    Raises:
        ValueError: a dtype that is not of floats, or a file that can't be written.
    """
    from safetensors import SafetensorError  # an optional dependency: the layer itself needs only torch
    from safetensors.torch import save_file

    rule("dtype", isinstance(dtype, torch.dtype) and dtype.is_floating_point, "a dtype of floats", dtype)
    kept = {name: x if name.endswith(("A_log", "dt_bias")) else x.to(dtype) for name, x in model.state_dict().items()}
    weights = {name: x.detach().cpu().contiguous() for name, x in kept.items()}
    try:
        save_file(weights, str(path), metadata={_CONFIG_KEY: json.dumps(asdict(model.config))})
    except SafetensorError as error:
        raise wrong("path", f"{str(path)!r} ({error})", "a file that can be written") from error


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk_size: int = 64,
    backend: str = "auto",
) -> KdaLanguageModel:
    """Reads a model that `save_model` wrote, computing in `dtype`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that holds no such model.
    """
    from safetensors import SafetensorError, safe_open

    device = find_device(device)
    rule("dtype", isinstance(dtype, torch.dtype) and dtype.is_floating_point, "a dtype of floats", dtype)
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must be {SAVED}; got {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise wrong("path", f"{str(path)!r}, which is no safetensors file ({error})", SAVED) from error
    model = KdaLanguageModel(_read_config(path, metadata), chunk_size=chunk_size, backend=backend)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise wrong("path", f"{str(path)!r} with weights of another shape ({error})", SAVED) from error
    return model.to(device=device, dtype=dtype).eval()


def _read_config(path: str | Path, metadata: dict[str, str]) -> LanguageModelConfig:
    rule("path", _CONFIG_KEY in metadata, SAVED, f"{str(path)!r} without a model's shape")
    values = json.loads(metadata[_CONFIG_KEY])
    names = {f.name for f in fields(LanguageModelConfig)}
    wanted = f"a model with the fields {sorted(names)}"
    rule("path", values.keys() == names, wanted, f"one with the fields {sorted(values)}")
    return LanguageModelConfig(**values)
