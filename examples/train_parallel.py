"""Trains a small KDA model on packed texts that lie over the ranks of a process group.

    torchrun --nproc-per-node 2 examples/train_parallel.py                       # gloo, or NCCL where there are GPUs
    torchrun --nproc-per-node 1 examples/train_parallel.py --losses one.json
    torchrun --nproc-per-node 2 examples/train_parallel.py --compare one.json

Without torchrun it runs as one rank.

Every step packs paragraphs into one row of `--tokens` characters, which the ranks share equally: paragraphs are cut wherever a
rank's tokens end. `--losses` writes the loss of every step, and `--compare` holds them against such a file's: the number of
ranks changes no more than rounding does. It fails if one differs by more than `--tolerance`, or the file has not as many; the
exit code of torchrun is 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from train_tiny_lm import paragraphs

import flashdelta as fd
from flashdelta.nn.lm import VOCABULARY, encode
from flashdelta.parallel import ContextParallel, context_parallel, halo

WIDTH, HEADS, K, LAYERS, TAPS = 64, 2, 32, 2, 4

TOKENS = 840
"""Which any number of ranks up to 8 can share, for their losses to compare; of more it is rounded up."""


class Block(nn.Module):
    """Short convolution and KDA, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * K, bias=False)
        self.filters = nn.Parameter(0.5 * torch.randn(3 * HEADS * K, TAPS))
        self.gate, self.beta = nn.Linear(WIDTH, HEADS * K), nn.Linear(WIDTH, HEADS)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS, K))
        self.out = nn.Linear(HEADS * K, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        y = self.norm(x)
        qkv = self.qkv(y)
        # only the first sequence goes on from the rank before
        before = halo(qkv, context, TAPS - 1).mT
        sequences = context.cu_seqlens.numel() - 1
        state = torch.cat([before, before.new_zeros(sequences - 1, *before.shape[1:])])
        qkv, _ = fd.short_convolution(qkv, self.filters, initial_state=state, cu_seqlens=context.cu_seqlens)
        q, k, v = (part.unflatten(2, (HEADS, K)) for part in qkv.chunk(3, dim=2))
        g, beta = self.gate(y).unflatten(2, (HEADS, K)), self.beta(y)
        gate = {"use_gate_in_kernel": True, "lower_bound": -5.0, "A_log": self.A_log, "dt_bias": self.dt_bias}
        logits = {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "chunk_size": 32}
        o, _ = fd.chunk_kda(q, k, v, g, beta, cp_context=context, **gate, **logits)
        x = x + self.out(o.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, context)
        return self.head(self.norm(x))


def packed(texts: list[Tensor], tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`tokens + 1` characters of random texts one after another, and the texts' offsets among the first `tokens`."""
    offsets, row = [0], []
    while offsets[-1] < tokens:
        row.append(texts[int(torch.randint(len(texts), (), generator=generator))])
        offsets.append(offsets[-1] + len(row[-1]))
    row.append(texts[0])
    return torch.cat(row)[: tokens + 1], torch.tensor([*offsets[:-1], tokens])


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if arguments.tokens is None:
        arguments.tokens = -(-TOKENS // ranks) * ranks
    if arguments.tokens % ranks:
        sys.exit(f"--tokens must be a multiple of the {ranks} ranks; got {arguments.tokens}")
    own = slice(rank * arguments.tokens // ranks, (rank + 1) * arguments.tokens // ranks)
    texts = [encode(text + "\n") for name in sorted(topics) for text in paragraphs(topics[name])]
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    losses = []
    for step in range(arguments.steps):
        row, offsets = packed(texts, arguments.tokens, generator)
        context = context_parallel(offsets.to(device), group=group, cu_seqlens_cpu=offsets, conv_size=TAPS)
        inputs, targets = row[:-1][own][None].to(device), row[1:][own].to(device)
        loss = F.cross_entropy(model(inputs, context)[0], targets, reduction="sum") / arguments.tokens
        optimizer.zero_grad()
        loss.backward()
        # each rank has the share of its tokens in the loss and in the gradients
        total = loss.detach()
        for x in itertools.chain([total], (parameter.grad for parameter in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        losses.append(total.item())
        if rank == 0 and (step % 10 == 9 or step == 0):
            print(f"step {step + 1:4}  {losses[-1]:.4f} nats per character", flush=True)
    return losses


def losses_of(file: Path, steps: int) -> list[float]:
    """Losses that `--losses` wrote.

    Raises:
        ValueError: there is no such file, or it has the losses of other steps.
    """
    try:
        losses = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--compare must be a file of --losses; got {file}, which can't be read ({error})") from None
    if not isinstance(losses, list) or not all(isinstance(x, float) for x in losses):
        raise ValueError(f"--compare must be a file of --losses; got {file} without a list of losses")
    if len(losses) != steps:
        raise ValueError(f"--compare must be of the {steps} steps that --steps says; got {file} of {len(losses)} steps")
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--tokens", type=int, help=f"of all ranks (default: {TOKENS}, rounded up to a multiple of the ranks)"
    )
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, help="where to write the loss of every step")
    parser.add_argument("--compare", type=Path, help="a file of --losses")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="of a loss beside that file's (default: 0.01)")
    arguments = parser.parse_args()
    if arguments.tokens is not None and arguments.tokens < 1:
        parser.error(f"--tokens must be at least 1; got {arguments.tokens}")
    if arguments.losses is not None and not arguments.losses.absolute().parent.is_dir():
        parser.error(f"--losses must be a file in a folder that is there; got {arguments.losses}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        print(f"one rank; for 2: torchrun --nproc-per-node 2 {sys.argv[0]}", file=sys.stderr)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, others = dist.get_rank(), None
    if rank == 0 and arguments.compare is not None:
        try:
            others = losses_of(arguments.compare, arguments.steps)
        except ValueError as error:
            parser.error(str(error))
    losses = train(arguments, device)
    dist.destroy_process_group()
    if rank > 0:
        return 0
    if arguments.losses is not None:
        arguments.losses.write_text(json.dumps(losses))
    if others is None:
        return 0
    worst = max((abs(a - b) for a, b in zip(losses, others)), default=0.0)
    print(f"losses differ from {arguments.compare} by {worst:.1e} at most")
    return int(not worst <= arguments.tolerance)  # nor is a NaN within it


if __name__ == "__main__":
    sys.exit(main())
