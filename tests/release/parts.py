"""What a release measures on a GPU, most telling first, each part in a call of its own, most of a few minutes: what a call that
ends early leaves undone is a whole part."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 580
"""Seconds of a part: calls of ten minutes are what shared GPUs are lent for."""


@dataclass(frozen=True)
class Part:
    """`command`: words to Python. In them `{out}` stands for the folder, `{name}`, `{limit}` and `{seed}` for the part's own,
    `{jobs}` for that many processes. `limit`: seconds. `results`: where `tests.release.record` puts what it writes. `needs`:
    modules, and variables of the environment in capitals. `least`: seconds below which it is not begun. `gpus`: how many it
    wants, 0 for all; if not one, it runs alone."""

    name: str
    command: tuple[str, ...]
    limit: int
    results: str
    why: str
    needs: tuple[str, ...] = ()
    least: int = 60
    gpus: int = 1
    again: bool = False
    """Whether it may run although it has passed: with another seed it is another one."""
    resumes: bool = False
    """Whether it goes on where it ended."""


def words(command: str) -> tuple[str, ...]:
    return tuple(command.split())


def bench(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "flashdelta", "bench", name, *arguments, "--json", "{out}/{name}.json")


def rows(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--rows", text))


RANDOM, SLOW = rows(", random gates"), rows(", slow gates")
HOPPER = ("--backend", "hopper", "--repeats", "40")
STEP, FORWARD = "fwd+bwd", "fwd"


EACH = (8, 32, 128)
"""Thousands of tokens of a rank."""


def of_ranks(ranks: int, heads: int, thousands: tuple[int, ...], *passes: str, kind: str = "") -> tuple[str, ...]:
    return rows(*(f"{each} H{heads} {T}K x {ranks}{kind}" for each in passes for T in thousands))


def over(ranks: int) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """What is measured on any number of GPUs."""
    found = {
        "gradients-h32": ("gradients", of_ranks(ranks, 32, EACH, STEP)),
        "h32": ("sequences", of_ranks(ranks, 32, EACH, FORWARD)),
        "gradients-h64": ("gradients", of_ranks(ranks, 64, EACH, STEP)),
        "h64": ("sequences", of_ranks(ranks, 64, EACH, FORWARD)),
        "packed": ("sequences that borders cut", of_ranks(ranks, 32, (8, 32), STEP, FORWARD, kind=" packed")),
    }
    prefix = "" if ranks == 2 else f"{ranks}-"
    return {f"{prefix}{name}": (ranks, what, some) for name, (what, some) in found.items()}


RANKS = {
    **over(2),
    "million": (2, "a million tokens", of_ranks(2, 32, (512,), STEP, FORWARD)),
    "gradients-h8": (2, "gradients of few heads", of_ranks(2, 8, EACH, STEP)),
    "h8": (2, "few heads", of_ranks(2, 8, EACH, FORWARD)),
    **over(4),
    "4-million": (4, "a million tokens", of_ranks(4, 32, (256,), STEP, FORWARD)),
    **over(8),
}
"""Of `bench cp`, by how many GPUs; a million tokens over eight are 128K a rank. FLA tunes its kernels anew for each number of
heads."""

LAYER = {
    "h32": rows("H32 fp32", "H32 bf16"),
    "h12": rows("H12"),
    "h96": rows("H96"),
    "rest": rows("train", "convolution", "norm"),
}
"""Of `bench layer`: FLA tunes its convolution anew in each row."""

PARTS = (
    Part(
        "tests",
        words(
            "-m pytest -q -m gpu tests/gpu -n {jobs} --maxschedchunk 1 -p tests.release.log --run-log {out}/{name}.jsonl"
        ),
        LONGEST,
        "tests-<gpu>.json",
        "kernels against float64, graphs, sanitizers; called again it runs what has not passed",
        ("xdist", "filelock"),
        gpus=0,
        resumes=True,
    ),
    Part(
        "prefill",
        bench("prefill", *HOPPER),
        LONGEST,
        "prefill-hopper-<gpu>.json",
        "README.md's rows",
        ("fla",),
        120,
    ),
    Part(
        "tutorial",
        words(
            "-m pytest -q -m gpu tests/gpu/test_docs.py -k tutorials_ways -p tests.release.log --run-log {out}/tests.jsonl"
        ),
        300,
        "tests-<gpu>.json",
        "which of the tutorial's kernels is faster: the test that the first part skips, in the same log",
    ),
    *(
        Part(
            f"ranks-{name}",
            bench("cp", *some),
            480,
            "cp-<gpu>.json",
            f"{what} over {ranks} GPUs, beside FLA's",
            ("fla",),
            gpus=ranks,
        )
        for name, (ranks, what, some) in RANKS.items()
    ),
    Part("ranks-layers", bench("cp", *rows("layers")), 300, "cp-<gpu>.json", "stacks of layers over 2 GPUs", gpus=2),
    Part(
        "fuzz",
        words(
            "-m tests.fuzz --device cuda --jobs {jobs} --seconds {limit} --seed {seed} --json {out}/{name}-{seed}.json"
        ),
        140,
        "fuzz-<gpu>.json",
        "random and mutated calls, a new seed each time",
        least=80,
        again=True,
    ),
    Part(
        "verify",
        bench("decode", *rows("verify")),
        LONGEST,
        "decode-<gpu>.json",
        "rounds of drafts: verify and commit by replay",
        ("fla",),
    ),
    Part(
        "half-steps",
        words("benchmarks/half_steps.py --out {out}/{name}.json"),
        240,
        "tuning/half_steps-<gpu>.json",
        "from how many heads on steps of 32 tokens pay",
    ),
    Part(
        "trials",
        words("benchmarks/trials.py --out {out}/{name}.json"),
        240,
        "tuning/trials-<gpu>.json",
        "what segments on trial bring where gates forget, and cost elsewhere",
    ),
    Part(
        "fused-steps",
        words("benchmarks/fused_steps.py --chosen --out {out}/{name}.json"),
        180,
        "tuning/fused_steps-<gpu>.json",
        "a step of the layer in one launch, by either backend",
    ),
    *(
        Part(
            f"layer-{name}",
            bench("layer", *some),
            LONGEST,
            "layer-<gpu>.json",
            "steps, training, single kernels of the layer",
            ("fla",),
            100,
        )
        for name, some in LAYER.items()
    ),
    *(
        Part(
            f"models-{name.lower()}",
            bench("models", *rows(name)),
            LONGEST,
            "models-<gpu>.json",
            f"layers of {whose}, integration on and off",
            ("fla", "transformers"),
            100,
        )
        for name, whose in (("FLA", "FLA"), ("HF", "Hugging Face"))
    ),
    Part(
        "engines",
        bench("engines"),
        LONGEST,
        "engines-<gpu>.json",
        "layers of vLLM and SGLang beside the engines' own kernels",
        ("FLASHDELTA_ENGINES",),
        100,
    ),
    Part(
        "shards",
        bench("shards"),
        LONGEST,
        "shards-<gpu>.json",
        "shards of shipped models beside cuDNN",
        ("cudnn",),
    ),
    *(
        Part(
            f"{table}-{name}",
            bench(table, *HOPPER, *gates),
            LONGEST,
            f"{table}-hopper-<gpu>.json",
            f"the same with {name} gates, beside cuDNN",
            ("fla", "cudnn"),
            100,
        )
        for table in ("prefill", "split")
        for name, gates in (("slow", SLOW), ("random", RANDOM))
    ),
    Part("train", bench("train"), LONGEST, "train-<gpu>.json", "README.md's row", ("fla",), 100),
    Part(
        "train-gates",
        bench("train", *RANDOM, *SLOW),
        LONGEST,
        "train-<gpu>.json",
        "the same with random and with slow gates, beside cuDNN",
        ("fla", "cudnn"),
        100,
    ),
    Part(
        "cp",
        bench("cp", *rows(f"{STEP} H4")),
        480,
        "cp-<gpu>.json",
        "gradients of long sequences over few heads, split on one GPU",
        ("fla",),
    ),
    Part(
        "split", bench("split", *HOPPER, *rows("128K H8")), 300, "split-hopper-<gpu>.json", "README.md's row", ("fla",)
    ),
    Part("decode", bench("decode", *rows("N128 H32 bf16")), 300, "decode-<gpu>.json", "README.md's row", ("fla",)),
    Part("startup", bench("startup"), 300, "startup-<gpu>.json", "the first calls of a fresh process"),
)
