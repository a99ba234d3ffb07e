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
RANKS = {
    "gradients-h32": ("gradients over two GPUs", [f"{STEP} H32 {T}K x 2" for T in (8, 32, 128)]),
    "h32": ("sequences over two GPUs", [f"{FORWARD} H32 {T}K x 2" for T in (8, 32, 128)]),
    "million": ("a million tokens over two GPUs", [f"{passes} H32 512K x 2" for passes in (STEP, FORWARD)]),
    "gradients-h64": ("gradients over two GPUs", [f"{STEP} H64 {T}K x 2" for T in (8, 32, 128)]),
    "h64": ("sequences over two GPUs", [f"{FORWARD} H64 {T}K x 2" for T in (8, 32, 128)]),
    "packed": (
        "sequences that the border cuts",
        [f"{passes} H32 {T}K x 2 packed" for passes in (STEP, FORWARD) for T in (8, 32)],
    ),
    "gradients-h8": ("gradients of few heads over two GPUs", [f"{STEP} H8 {T}K x 2" for T in (8, 32, 128)]),
    "h8": ("few heads over two GPUs", [f"{FORWARD} H8 {T}K x 2" for T in (8, 32, 128)]),
}
"""Of `bench cp`: FLA tunes its kernels anew for each number of heads."""

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
    *(
        Part(
            f"ranks-{name}", bench("cp", *rows(*some)), 480, "cp-<gpu>.json", f"{what}, beside FLA's", ("fla",), gpus=2
        )
        for name, (what, some) in RANKS.items()
    ),
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
            f"prefill-{name}",
            bench("prefill", *HOPPER, *gates),
            LONGEST,
            "prefill-hopper-<gpu>.json",
            f"the same with {name} gates, beside cuDNN",
            ("fla", "cudnn"),
            100,
        )
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
