"""Trains Hugging Face's Kimi-Linear on the text of `train_tiny_lm.py`, with flashdelta under its KDA layers or without.

    python examples/train_kimi_linear.py --no-flashdelta --losses off.json
    python examples/train_kimi_linear.py --compare off.json --plot both.png
    python examples/train_kimi_linear.py --real --device cuda

The model is `transformers.KimiLinearForCausalLM`, unchanged: with FLA installed it takes `chunk_kda` from there, and importing
`flashdelta.integrations.fla` lets flashdelta run FLA's calls. Without the integration they run on FLA's own kernels, or on
transformers' PyTorch code where there is no GPU for those. The other options are those of `train_tiny_lm.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import torch
from rich.console import Console
from train_tiny_lm import Record, count, fit, parsed, parser_of, report

import flashdelta as fd
from flashdelta.integrations import status
from flashdelta.nn.lm import VOCABULARY

if TYPE_CHECKING:  # its import takes seconds
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

SMALL = {
    **{"hidden_size": 128, "intermediate_size": 320, "linear_num_heads": 2, "linear_head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
REAL = {"num_local_experts": 16}
"""The rest is the configuration's default, that of Kimi-Linear-48B. It has 256 experts, of which a token takes 8 as here."""

DEFAULTS = {
    False: {"steps": 250, "batch": 4, "length": 128, "rate": 4e-3, "warmup": 30, "every": 50},
    True: {"steps": 200, "batch": 4, "length": 1024, "rate": 4e-4, "warmup": 30, "every": 50},
}
"""By `--real`."""

SAME = ("steps", "batch", "length", "rate", "warmup", "every", "real", "layers")
"""Settings that two runs must share to be compared."""

FULL_EVERY = 4
"""Every fourth layer is full attention, the others KDA: the published model's order."""


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument(
        "--flashdelta", action=argparse.BooleanOptionalAction, default=True, help="flashdelta runs FLA's calls"
    )
    parser.add_argument("--real", action="store_true", help="the widths of Kimi-Linear-48B")
    parser.add_argument("--layers", type=count, default=4, help="every fourth is full attention")
    parser.set_defaults(**DEFAULTS[False])
    if parser.parse_known_args(arguments)[0].real:
        parser.set_defaults(**DEFAULTS[True])
    options = parsed(parser, arguments)
    for package in ("transformers", "fla") if options.flashdelta else ("transformers",):
        if not installed(package):
            parser.error(f"{package} is not installed: pip install transformers flash-linear-attention")
    if options.compare is not None:
        theirs = json.loads(options.compare.read_text())["settings"]
        other = [name for name in SAME if theirs.get(name) != getattr(options, name)]
        if other:
            parser.error(f"--compare must be of a run with the same {', '.join(other)}; got {options.compare}")
    return options


# ---- the model ------------------------------------------------------------------------------------------------------------


def config_of(options: argparse.Namespace) -> KimiLinearConfig:
    from transformers import KimiLinearConfig

    kinds = ["linear_attention"] * (FULL_EVERY - 1) + ["full_attention"]
    return KimiLinearConfig(
        **(REAL if options.real else SMALL),
        vocab_size=len(VOCABULARY),
        num_hidden_layers=options.layers,
        # the default has no full attention in four layers: it begins at the fifth
        layer_types=[kinds[i % FULL_EVERY] for i in range(options.layers)],
        # tokens are characters, and none is special
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        use_cache=False,
        # the default, torch's grouped product, knows no autocast and would multiply in float32
        experts_implementation="eager",
    )


def model_of(options: argparse.Namespace) -> KimiLinearForCausalLM:
    from transformers import KimiLinearForCausalLM

    torch.manual_seed(options.seed)
    return KimiLinearForCausalLM(config_of(options)).to(options.device)


# ---- what runs its KDA ----------------------------------------------------------------------------------------------------


def implementation(options: argparse.Namespace) -> str:
    if options.flashdelta:
        return "flashdelta"
    on_gpu = torch.device(options.device).type == "cuda"
    return "FLA" if on_gpu and installed("fla") else "PyTorch"


@contextmanager
def running(name: str) -> Iterator[None]:
    """KDA on this implementation, while the context lasts."""
    if name == "flashdelta":
        from flashdelta.integrations import fla

        fla.enable()
        try:
            yield
        finally:
            fla.disable()
    elif name == "PyTorch":
        from transformers.models.kimi_linear import modeling_kimi_linear as file

        # FLA runs nothing on a CPU by itself, but where it is installed the file's decorator took its function for good, and no
        # option leaves it out. Hiding FLA from imports (None in `sys.modules`) would do, too, but then the process couldn't
        # turn the integration on either.
        with mock.patch.object(file, "chunk_kimi_delta_attention", inspect.unwrap(file.chunk_kimi_delta_attention)):
            yield
    else:
        yield


@contextmanager
def heard(console: Console) -> Iterator[None]:
    """Prints FLA's log of what takes its calls: a line for each answer, at the first call."""
    logger, handler = logging.getLogger("fla.backends"), logging.Handler(logging.INFO)
    handler.emit = lambda record: console.print(record.getMessage(), markup=False, soft_wrap=True)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def support(options: argparse.Namespace) -> fd.Support:
    """Whether flashdelta can run a KDA layer's call, and by which backend. Shapes and types are the model's."""
    config = config_of(options)
    shape = (options.batch, options.length, config.linear_num_heads, config.linear_head_dim)
    dtype = torch.bfloat16 if options.autocast else torch.float32
    x = torch.empty(shape, device=options.device, dtype=dtype, requires_grad=True)
    g = torch.empty(shape, device=options.device)
    return fd.supports(fd.chunk_kda, x, x, x, g, x[..., 0], use_qk_l2norm_in_kernel=True)


def announce(options: argparse.Namespace, console: Console) -> None:
    """Says what runs, as the integration and flashdelta answer."""
    found = status("fla")
    said = [f"integration with FLA: {found.state} ({found.reason})", f"KDA by {options.backend}"]
    if options.flashdelta:
        if found.state != "active":
            sys.exit(f"{said[0]}; --no-flashdelta trains without it")
        ok, backend, reason = support(options)
        if not ok:
            sys.exit(f"flashdelta leaves this model to FLA: {reason}; --no-flashdelta trains so")
        said[1] += f", {backend} backend"
    console.print(*said, sep="\n", markup=False, soft_wrap=True)


def train(options: argparse.Namespace, console: Console) -> tuple[KimiLinearForCausalLM, Record]:
    options.backend = implementation(options)
    with running(options.backend), heard(console):
        announce(options, console)
        model = model_of(options)
        return model, fit(model, options, console)


def main() -> None:
    options, console = parse(), Console(highlight=False)
    _, record = train(options, console)
    console.print(f"{record.speed(options):,.0f} characters a second")
    losses = record.as_json(options, (*SAME, "seed", "autocast", "device", "backend"))
    sys.exit(report(losses, options, console, "Training Kimi-Linear"))


if __name__ == "__main__":
    main()
