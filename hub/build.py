"""Builds flashdelta as a kernel for the Hugging Face hub: `python hub/build.py FOLDER` (docs/integrations.md).

The layout is that of `kernels`: `build/<variant>/` is a package of relative imports with a `metadata.json`. Its operators get a
namespace of this version, so that several versions, and an installed flashdelta, run in one process.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "flashdelta"
LEFT_OUT = (
    "tools",
    "testing",
    "__main__.py",
    "__pycache__",
    "*.pyc",
    "_fla.py",
    "_transformers.py",
    "_vllm.py",
    "_sglang.py",
)
LEFT_OUT += ("fla.py", "vllm.py", "sglang.py", "engine.py")
VARIANT = "torch-universal"
HUB_VERSION = 1
"""Rises with what breaks callers, as the hub counts."""

OPERATORS = re.compile(r"\b(flashdelta|kda_prefill)(?=::)|(?<=torch\.ops\.)(flashdelta|kda_prefill)\b")


def build(folder: Path, version: str | None = None) -> Path:
    """Writes the kernel to `folder`, which must be new or one of an earlier build; returns that. `version`: the package's by
    default."""
    if not (folder / "build" / VARIANT / "metadata.json").is_file() and folder.is_dir() and any(folder.iterdir()):
        sys.exit(f"{folder} must be new, empty, or of an earlier build: its build/, README.md and LICENSE are replaced")
    version = version or re.search(r'__version__ = "(.*)"', (PACKAGE / "__init__.py").read_text())[1]
    suffix = re.sub(r"\W", "_", version)
    target = folder / "build" / VARIANT
    shutil.rmtree(folder / "build", ignore_errors=True)
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for file in target.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(OPERATORS.sub(lambda found: f"{found[0]}_{suffix}", text), encoding="utf-8")
    shutil.copy(HERE / "layers.py", target)
    with (target / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nfrom . import layers  # noqa: E402, F401\n")
    name = {"id": f"flashdelta_{suffix}", "name": "flashdelta", "version": HUB_VERSION, "license": "MIT"}
    backend = {"python-depends": [], "backend": {"type": "cuda", "archs": ["8.0", "8.9", "9.0", "10.0", "12.0"]}}
    (target / "metadata.json").write_text(json.dumps(name | backend, indent=2) + "\n", encoding="utf-8")
    shutil.copy(HERE.parent / "LICENSE", folder)
    (folder / "README.md").write_text(CARD.format(version=version), encoding="utf-8")
    return folder


CARD = """---
library_name: kernels
license: mit
---

# flashdelta {version}

GPU kernels for Kimi Delta Attention. Layers: `chunk_kimi_delta_attention`, `recurrent_kimi_delta_attention`,
`causal_conv1d_fn`.
"""

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(build(Path(sys.argv[1])))
