"""The source distribution holds all that its users build and test with; the wheel, the package and the command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
FILES = ("LICENSE", "MANIFEST.in", "Makefile", "README.md", "conftest.py", "mkdocs.yml", "pyproject.toml", "setup.py")
HABITS = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", ".gitignore", ".pre-commit-config.yaml")
FOLDERS = (".ci", ".github", "benchmarks", "docs", "examples", "hub", "src", "tests")
MADE = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build", "dist", ".*")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(what: str, tree: Path, out: Path) -> Path:
    """Builds in `tree` as pip would, but with the setuptools that is here: it needs no network."""
    subprocess.run([sys.executable, "-c", BUILD, f"build_{what}", str(out)], cwd=tree, check=True, capture_output=True)
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files, as building leaves some of its own beside them."""
    found = tmp_path_factory.mktemp("tree")
    for name in FILES + HABITS:
        shutil.copy(ROOT / name, found)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, found / name, ignore=MADE)
    return found


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as file:
        file.extractall(out, filter="data")
    (found,) = out.iterdir()
    return found


def files(folder: Path) -> set[str]:
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if not any(part.endswith(".egg-info") for part in path.parts)}


def test_the_source_distribution_is_the_repository(tree: Path, unpacked: Path):
    assert files(unpacked) - {"PKG-INFO", "setup.cfg"} == files(tree)
    if (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert set(tracked.splitlines()) <= files(tree)


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_made_of_the_source_distribution(tree: Path, wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info" not in name}
        entry, about = (
            next(file.read(name).decode() for name in file.namelist() if name.endswith(end))
            for end in ("entry_points.txt", "METADATA")
        )
    assert names == {name.removeprefix("src/") for name in files(tree) if name.startswith("src/")}
    assert "flashdelta = flashdelta_command:main" in entry
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\nflashdelta = flashdelta.integrations.{name}:enable" in entry
    address = re.findall(r"Project-URL: Repository, (.*)", about)[0]
    assert f"({address}/blob/HEAD/CONTRIBUTING.md" in about and not re.search(r"\]\((?!https?:)", about)
    assert f"repository-code: {address}\n" in (tree / "CITATION.cff").read_text()


ALL = """if True:
    import importlib.util, sys, torch, flashdelta as fd
    from flashdelta_command import main
    sys.modules |= dict.fromkeys(("transformers", "fla"))  # which doctor would import, for seconds
    q, beta = torch.ones(1, 70, 2, 32), torch.ones(1, 70, 2)
    assert fd.chunk_kda(q, q, q, -q, beta, use_qk_l2norm_in_kernel=True)[0].isfinite().all()
    print(fd.__file__, *map(importlib.util.find_spec, ("tests", "benchmarks")))
    for command in sys.argv[1:]:
        sys.argv[1:] = command.split()
        try:
            main()
        except SystemExit as end:
            assert not end.code, command
"""
EXPORT = "export --out out --arch=sm_90 --op=decode_bf16 --size=64,64,32 --gate=none"
COMMANDS = ("doctor --device cpu", "verify --quick --device cpu", "demo --device cpu --tokens 5", EXPORT)


def test_the_installed_distribution_alone_runs(wheel: Path, tmp_path: Path):
    """Nothing else of this repository is there: neither its tests nor its benchmarks."""
    found = tmp_path / "environment"
    venv.create(found)
    (site,) = found.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "pip", f"--python={found / 'bin' / 'python'}", "install", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-compile", "--ignore-installed", wheel]
    subprocess.run(command, check=True, capture_output=True)
    variables = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "PYTHONPATH")}

    def run(program: str, *words: str) -> str:
        command = [found / "bin" / program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where, *others = run("python", "-c", ALL, *COMMANDS).splitlines()[0].split()
    assert Path(where).is_relative_to(found) and others == ["None", "None"]
    assert "doctor" in run("flashdelta", "--help")
    assert (tmp_path / "out" / "flashdelta.h").exists()
