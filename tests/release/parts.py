"""What a release measures on a GPU, most telling first, each part in a call of its own of at most ten minutes."""

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


def words(command: str) -> tuple[str, ...]:
    return tuple(command.split())


def bench(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "flashdelta", "bench", name, *arguments, "--json", "{out}/{name}.json")


def rows(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--rows", text))


RANDOM, SLOW = rows(", random gates"), rows(", slow gates")
HOPPER = ("--backend", "hopper", "--repeats", "40")

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
        "fuzz",
        words(
            "-m tests.fuzz --device cuda --jobs {jobs} --seconds {limit} --seed {seed} --json {out}/{name}-{seed}.json"
        ),
        LONGEST,
        "fuzz-<gpu>.json",
        "random and mutated calls, a new seed each time",
        least=180,
        again=True,
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
        "layer-quick",
        bench("layer", "--quick"),
        LONGEST,
        "layer-<gpu>.json",
        "a decoding step of the layer, few rows",
        ("fla",),
    ),
    Part("layer", bench("layer"), LONGEST, "layer-<gpu>.json", "steps, training, single kernels", ("fla",), 180),
    Part(
        "fused-steps",
        words("benchmarks/fused_steps.py --chosen --out {out}/{name}.json"),
        180,
        "tuning/fused_steps-<gpu>.json",
        "a step of the layer in one launch, by either backend",
    ),
    Part(
        "ranks",
        bench("cp", *rows("x 2")),
        LONGEST,
        "cp-<gpu>.json",
        "sequences over two GPUs, beside FLA's",
        ("fla",),
        180,
        gpus=2,
    ),
    Part(
        "cp",
        bench("cp", *rows("fwd+bwd H4")),
        300,
        "cp-<gpu>.json",
        "gradients of long sequences over few heads, split on one GPU",
        ("fla",),
    ),
    Part(
        "shards",
        bench("shards"),
        LONGEST,
        "shards-<gpu>.json",
        "shards of shipped models beside cuDNN",
        ("cudnn",),
        180,
    ),
    Part("prefill", bench("prefill", *HOPPER), LONGEST, "prefill-hopper-<gpu>.json", "README.md's rows", ("fla",), 180),
    *(
        Part(
            f"prefill-{name}",
            bench("prefill", *HOPPER, *gates),
            LONGEST,
            "prefill-hopper-<gpu>.json",
            f"the same with {name} gates, beside cuDNN",
            ("fla", "cudnn"),
            180,
        )
        for name, gates in (("slow", SLOW), ("random", RANDOM))
    ),
    Part("train", bench("train"), LONGEST, "train-<gpu>.json", "README.md's row", ("fla",), 120),
    Part(
        "train-gates",
        bench("train", *RANDOM, *SLOW),
        LONGEST,
        "train-<gpu>.json",
        "the same with random and with slow gates, beside cuDNN",
        ("fla", "cudnn"),
        120,
    ),
    Part(
        "split", bench("split", *HOPPER, *rows("128K H8")), 300, "split-hopper-<gpu>.json", "README.md's row", ("fla",)
    ),
    Part("decode", bench("decode", *rows("N128 H32 bf16")), 300, "decode-<gpu>.json", "README.md's row", ("fla",)),
    Part(
        "models",
        bench("models"),
        LONGEST,
        "models-<gpu>.json",
        "layers of FLA and Hugging Face, integration on and off",
        ("fla", "transformers"),
        180,
    ),
    Part(
        "engines",
        bench("engines"),
        LONGEST,
        "engines-<gpu>.json",
        "layers of vLLM and SGLang beside the engines' own kernels",
        ("FLASHDELTA_ENGINES",),
        180,
    ),
    Part("startup", bench("startup"), 300, "startup-<gpu>.json", "the first calls of a fresh process"),
)
