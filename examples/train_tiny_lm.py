"""Trains the character language model that `flashdelta demo` runs, on text that ships with Python.

    python examples/train_tiny_lm.py                     # the shipped weights' settings
    python examples/train_tiny_lm.py --steps 200 --out /tmp/model.safetensors
    python examples/train_tiny_lm.py --device cuda --text my_book.txt
    python examples/train_tiny_lm.py --losses run.json --compare examples/tiny_lm_losses.json --plot run.png

On a GPU activations are bfloat16 (autocast) and parameters float32. `--losses` writes the loss of every step, `--compare` holds
the last held-out loss against such a file's (exit code 1 if it is more than 1 % above), and `--plot` draws both.

The text is the prose of `pydoc_data.topics` (the Python language reference, about a quarter of a million characters)
and whatever `--text` adds. Every 20th paragraph is held out; the validation loss is measured on those.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from flashdelta.backends import NAMES
from flashdelta.nn import KdaLanguageModel, LanguageModelConfig, save_model
from flashdelta.nn.lm import VOCABULARY, decode, encode

ASSET = Path(__file__).parents[1] / "src/flashdelta/tools/cli/assets/tiny_lm.safetensors"
CONFIG = LanguageModelConfig(hidden_size=160, num_layers=3, num_heads=2, num_v_heads=2, head_v_dim=64, mlp_size=384)
PROMPT = "The value of an expression is "
HELD_OUT_EVERY = 20
SETTINGS = ("steps", "batch", "length", "rate", "seed", "backend", "device")
"""Options that a record names."""

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\t": " "})


def paragraphs(text: str) -> list[str]:
    """The prose of `text`, a paragraph a line: no headings, code, grammar or tables; only the model's characters."""
    found = []
    for block in re.split(r"\n\s*\n", text.translate(ASCII)):
        joined = re.sub(r"^\* |(?<!\*)\*(?!\*)", "", " ".join(block.split()))
        letters = sum(c.isalpha() or c == " " for c in joined)
        is_sentence = re.match(r"[A-Z\"']", joined) and re.search(r"[.:!?)\"']$", joined)
        if is_sentence and len(joined) >= 60 and letters >= 0.85 * len(joined) and set(joined) <= set(VOCABULARY):
            found.append(joined)
    return found


def corpus(extra: list[Path]) -> tuple[Tensor, Tensor]:
    """Tokens to train on and tokens held out. Paragraphs that occur twice count once, so none is in both."""
    texts = [topics[name] for name in sorted(topics)] + [path.read_text(encoding="utf-8") for path in extra]
    unique = list(dict.fromkeys(p for text in texts for p in paragraphs(text)))
    held_out = unique[::HELD_OUT_EVERY]
    train = [p for i, p in enumerate(unique) if i % HELD_OUT_EVERY]
    return encode("\n".join(train)), encode("\n".join(held_out))


def batches(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """`[batch, length + 1]` random windows."""
    start = torch.randint(len(tokens) - length, (batch,), generator=generator)
    return tokens[start[:, None] + torch.arange(length + 1)]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats per character of the next-token prediction over `windows [B, length + 1]`. Logits are the model's first result."""
    logits = model(windows[:, :-1])[0]
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, batch: int, length: int) -> float:
    """The loss over all held-out text, in windows that meet end to end."""
    count = (len(tokens) - 1) // length
    windows = tokens[: count * length + 1].unfold(0, length + 1, length).to(model.device)
    losses = [loss_of(model, part) * len(part) for part in windows.split(batch)]
    return float(sum(losses)) / count


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW; weight decay only where a matrix multiplies. An axis of one does not count: some models keep a rate a head so."""
    matrices = [p for p in model.parameters() if p.squeeze().dim() >= 2]
    others = [p for p in model.parameters() if p.squeeze().dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.97))


def schedule(steps: int, warmup: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a fiftieth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(steps - warmup, 1)
        return 0.02 + 0.49 * (1 + math.cos(math.pi * done))

    return factor


@dataclass
class Record:
    """Losses in nats per character: of every step, and held out by the step after which they were taken. `text` is how many
    characters there are to train on, and held out. `seconds` is how long the steps after the first took."""

    console: Console
    text: tuple[int, int]
    start: float = field(default_factory=time.monotonic)
    train: list[Tensor] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    shown: int = 0
    seconds: float = 0.0

    def line(self, held_out: float) -> None:
        """Prints the mean of the steps since the line before."""
        if not self.held_out:
            self.console.print(f"{'step':>6} {'train':>7} {'held out':>9} {'seconds':>8}")
        step = len(self.train)
        mean = float(torch.stack(self.train[self.shown :]).mean())
        self.held_out[step], self.shown = held_out, step
        self.console.print(f"{step:>6} {mean:>7.3f} {held_out:>9.3f} {time.monotonic() - self.start:>8.0f}")

    def speed(self, options: argparse.Namespace) -> float:
        """Characters a second, of all steps but the first."""
        return (len(self.train) - 1) * options.batch * options.length / self.seconds

    def as_json(self, options: argparse.Namespace, settings: Sequence[str] = SETTINGS) -> dict:
        return {
            "settings": {name: getattr(options, name) for name in settings},
            "on": device_name(options.device),
            "text": list(self.text),
            "held_out": {str(step): round(loss, 5) for step, loss in self.held_out.items()},
            "train": [round(float(loss), 5) for loss in torch.stack(self.train).tolist()],
        }


TOLERANCE = 0.01
"""How far the last held-out loss may be above the reference's."""


def compare(found: dict, reference: dict) -> tuple[bool, str]:
    """Whether the last held-out loss is at most 1 % above the reference's, and what to say about it.

    Raises:
        ValueError: the runs are not comparable.
    """
    if found["text"] != reference["text"]:
        raise ValueError(f"--compare must be of a run on {found['text']} characters; got one on {reference['text']}")
    if found["held_out"].keys() != reference["held_out"].keys():
        raise ValueError("--compare must be of a run with the same --steps and --every; got one with other evaluations")
    ours, theirs = (list(run["held_out"].values())[-1] for run in (found, reference))
    off = ours / theirs - 1
    return off <= TOLERANCE, f"held out {ours:.4f}, reference {theirs:.4f}: {off:+.2%}"


def smooth(losses: list[float], width: int = 20) -> Tensor:
    """Means of `width` steps in a row."""
    return torch.tensor(losses).unfold(0, width, 1).mean(1)


def plot(found: dict, reference: dict | None, path: Path, title: str = "") -> None:
    """Training and held-out losses against the step, over the wider lines of the reference: both show where they meet."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    for run, color, width in ((reference, "silver", 5), (found, "C0", 1.5)):
        if run is None:
            continue
        name = f"{run['settings']['backend']}, {run['on']}"
        if len(run["train"]) >= 20:
            means = smooth(run["train"])
            label = f"{name}: training, means of 20 steps"
            axes.plot(range(20, 20 + len(means)), means, color=color, linewidth=width, label=label)
        steps, losses = [int(step) for step in run["held_out"]], list(run["held_out"].values())
        look = {"color": color, "linewidth": width, "markersize": 4 + 2 * width}
        axes.plot(steps, losses, "o:", **look, label=f"{name}: held out")
    axes.set(xlabel="step", ylabel="nats per character", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"


def now(device: str) -> float:
    """The time at which the device is done with what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


Save = Callable[[], None]


def fit(model: nn.Module, options: argparse.Namespace, console: Console, save: Save | None = None) -> Record:
    """Trains on random windows of the text. Saves at every evaluation, so that an interrupted run leaves a usable file."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens, held_out = corpus(options.text)
    if options.length >= min(len(tokens), len(held_out)):
        raise ValueError(f"--length must be less than the {len(held_out)} characters held out; got {options.length}")
    size = sum(p.numel() for p in model.parameters())
    console.print(f"{len(tokens):,} characters, {len(held_out):,} held out; {size:,} parameters")
    optimizer = optimizer_of(model, options.rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(options.steps, options.warmup))
    kind = torch.device(options.device).type
    half = torch.autocast(kind, torch.bfloat16, enabled=options.autocast)
    record = Record(console, (len(tokens), len(held_out)))
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(1, options.steps + 1):
            windows = batches(tokens, options.batch, options.length, generator).to(options.device)
            with half:
                loss = loss_of(model, windows)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            record.train.append(loss.detach())
            progress.advance(task)
            if step == 1:
                begin = now(options.device)  # kernels are compiled
            if step % options.every == 0 or step == options.steps:
                record.seconds += now(options.device) - begin
                with half:
                    record.line(validation_loss(model, held_out, options.batch, options.length))
                if save is not None:
                    save()
                begin = now(options.device)
    return record


def train(options: argparse.Namespace, console: Console) -> tuple[KdaLanguageModel, Record]:
    torch.manual_seed(options.seed)
    # chunks of 32: the reference's work and memory grow with the square of the chunk
    model = KdaLanguageModel(CONFIG, chunk_size=32, backend=options.backend).to(options.device)
    return model, fit(model, options, console, lambda: save_model(model, options.out))


def count(text: str) -> int:
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {found}")
    return found


def parser_of(description: str) -> argparse.ArgumentParser:
    """With the options of `fit` and of `report`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=count, default=1400)
    parser.add_argument("--batch", type=count, default=6, help="sequences a step")
    parser.add_argument("--length", type=count, default=192, help="characters a sequence")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=count, default=100, help="steps up to the peak")
    parser.add_argument("--every", type=count, default=100, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, action="append", default=[], help="another text file (repeatable)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--autocast", action=argparse.BooleanOptionalAction, help="activations in bfloat16 (default: on a GPU)"
    )
    parser.add_argument("--losses", type=Path, help="write the losses to this JSON file")
    parser.add_argument("--compare", type=Path, help="such a file of the run to compare with")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device must be one that PyTorch finds; got {options.device}")
    if options.compare is not None and not options.compare.is_file():
        parser.error(f"--compare must be a file; got {options.compare}")
    if options.autocast is None:
        options.autocast = on_gpu
    return options


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSET)
    parser.add_argument("--backend", choices=NAMES, default="auto")
    return parsed(parser, arguments)


def report(losses: dict, options: argparse.Namespace, console: Console, title: str) -> int:
    """Writes the losses, draws them and compares them, as the options say. The exit code: 1 if they are worse."""
    reference = json.loads(options.compare.read_text()) if options.compare else None
    if options.losses is not None:
        options.losses.write_text(json.dumps(losses) + "\n")
    if options.plot is not None:
        plot(losses, reference, options.plot, title)
    if reference is None:
        return 0
    close, said = compare(losses, reference)
    console.print(said)
    return 0 if close else 1


def main() -> None:
    options, console = parse(), Console(highlight=False)
    model, record = train(options, console)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    prompt = encode(PROMPT)[None].to(options.device)
    continuation = model.eval().generate(prompt, 300, temperature=0.5, generator=generator)
    console.print(f"\n{PROMPT}{decode(continuation[0])}", markup=False)
    console.print(f"\nsaved {options.out} ({options.out.stat().st_size / 2**20:.2f} MiB)")
    sys.exit(report(record.as_json(options), options, console, "Training the demo's model"))


if __name__ == "__main__":
    main()
