"""The source distribution holds all that its users build and test with; the wheel, the package and the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = ("LICENSE", "MANIFEST.in", "Makefile", "README.md", "conftest.py", "mkdocs.yml", "pyproject.toml")
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
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", tree, out)) as file:
        file.extractall(out, filter="data")
    (found,) = (path for path in out.iterdir() if path.is_dir())
    return found


def files(folder: Path) -> set[str]:
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if not any(part.endswith(".egg-info") for part in path.parts)}


def test_the_source_distribution_is_the_repository(tree: Path, unpacked: Path):
    assert files(unpacked) - {"PKG-INFO", "setup.cfg"} == files(tree)
    if (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert set(tracked.splitlines()) <= files(tree)


def test_tests_of_the_source_distribution_run(unpacked: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_architecture.py"]
    environment = {"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_made_of_the_source_distribution(tree: Path, wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info" not in name}
        (entry,) = (file.read(name).decode() for name in file.namelist() if name.endswith("entry_points.txt"))
    assert names == {name.removeprefix("src/") for name in files(tree) if name.startswith("src/")}
    assert "flashdelta = flashdelta_command:main" in entry
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\nflashdelta = flashdelta.integrations.{name}:enable" in entry


COMMANDS = (
    "doctor --device cpu",
    "verify --quick --device cpu",
    "demo --device cpu --tokens 5",
    "export --out out --arch=sm_90 --op=decode_bf16 --size=64,64,32 --gate=none",
)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, beside what it depends on."""
    found = tmp_path_factory.mktemp("site")
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={found}")
    subprocess.run([sys.executable, *install, wheel], check=True, capture_output=True)
    return found


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_the_installed_wheel_alone_runs(line: str, site: Path, tmp_path: Path):
    """Of this repository nothing else is there: neither its tests nor its benchmarks."""
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"} | {"PYTHONPATH": str(site)}
    where = "import importlib.util as i, flashdelta; "
    where += "print(flashdelta.__file__, i.find_spec('tests'), i.find_spec('benchmarks'))"
    for command in ([sys.executable, "-c", where], [str(site / "bin" / "flashdelta"), *line.split()]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "-c" not in command or done.stdout == f"{site / 'flashdelta' / '__init__.py'} None None\n"
    assert line[:6] != "export" or (tmp_path / "out" / "flashdelta.h").exists()
