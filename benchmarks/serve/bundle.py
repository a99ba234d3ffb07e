"""Makes a folder of about 40 MB with which a Hopper machine without a network serves with vLLM 0.33.0.

    python benchmarks/serve/bundle.py OUT [WHEELS]     # WHEELS keeps 350 MB of downloads; 3 to 4 minutes on 2 cores

vLLM's compiled parts use PyTorch's stable ABI. Of their machine code only that for sm_90 is kept: the rest becomes zeros in
place, so that offsets stay as they are, and zeros compress to nothing.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VLLM = "vllm==0.33.0"
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
SLIM = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/_flashkda_C.abi3.so", FA3)
COPY = ("vllm/cumem_allocator.abi3.so", "vllm/fs_io_C.abi3.so", "vllm/spinloop.abi3.so")
"""Libraries that serving a bfloat16 model on sm_90 loads."""

DROP = (".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".js", ".css", "/vllm-rs")
MAGIC, ARCH, ELF = 0xBA55ED50, 90, 2


def fatbins(data: bytes) -> Iterator[tuple[int, int, int, list]]:
    """Each fatbin of the `.nv_fatbin` sections: position, start and end of its body, and its entries: kind, architecture,
    position, size."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if data[at : data.index(b"\0", at)] != b".nv_fatbin":
            continue
        position = offset
        while position + 16 <= offset + length:
            magic, _, header, body = struct.unpack_from("<IHHQ", data, position)
            if magic != MAGIC:
                position += 8
                continue
            start, stop = position + header, position + header + body
            entries, p = [], start
            while p < stop:
                kind, _, head, padded = struct.unpack_from("<HHIQ", data, p)
                entries.append((kind, *struct.unpack_from("<I", data, p + 28), p, head + padded))
                p += head + padded
            yield position, start, stop, entries
            position = stop


def slim(original: bytes) -> bytes:
    """A library with the machine code of sm_90 alone."""
    data, found = bytearray(original), [*fatbins(original)]
    others = [e for *_, entries in found for e in entries if e[0] == ELF and e[1] != ARCH]
    small = min(others, key=lambda e: e[3], default=None)
    for position, start, stop, entries in found:
        keep = [e for e in entries if e[:2] == (ELF, ARCH)]
        if not keep:  # the runtime wants no empty fatbin: a small one that no sm_90 loads
            keep = [small] if small and small[3] <= stop - start else entries
        body = b"".join(original[p : p + size] for *_, p, size in keep)
        struct.pack_into("<Q", data, position + 8, len(body))
        data[start:stop] = body + bytes(stop - start - len(body))
    return bytes(data)


def download(work: Path, wheels: Path) -> None:
    """vLLM's wheel, and what it needs besides the machine's packages, unpacked in `work/deps`."""
    target = "--no-deps --only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none"
    names = [f"manylinux_2_{n}" for n in range(34, 4, -1)] + ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    options = [*target.split(), *(f"--platform={name}_x86_64" for name in names)]
    needed = ["-r", str(Path(__file__).with_name("requirements.txt"))]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", *options, "-d", str(wheels), VLLM, *needed], check=True)
    local = ["--no-index", "--find-links", str(wheels), "--no-compile", "--target", str(work / "deps")]
    subprocess.run([*pip, "install", "-q", *options, *local, *needed], check=True)


def pack(out: Path, piece: str, root: Path, names: list[str]) -> str:
    """Packs sorted and without times and owners: the same wheels make the same pieces."""
    plain = {"mtime": 0, "uid": 0, "gid": 0, "uname": "", "gname": ""}
    target = out / f"{piece}.tar.xz"
    with lzma.open(target, "wb", preset=9) as f, tarfile.open(fileobj=f, mode="w") as tar:
        for name in sorted(names):
            tar.add(root / name, name, recursive=False, filter=lambda info: info.replace(**plain, deep=False))
    return f"{target}: {len(names)} files, {target.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", type=Path, nargs="?", help="keeps the downloads")
    to, wheels = vars(parser.parse_args()).values()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        to.mkdir(parents=True, exist_ok=True)
        kept = wheels or work / "wheels"
        download(work, kept)
        pieces: dict[str, list[str]] = {"py": [], "c": [], "fa3": []}
        with zipfile.ZipFile(next(kept.glob("vllm-*.whl"))) as z:
            for name in (x for x in z.namelist() if not x.endswith("/")):
                piece = "fa3" if name == FA3 else "c" if name in SLIM + COPY else "py"
                if piece != "py" or not name.endswith(DROP):
                    pieces[piece].append(name)
                    path = Path(z.extract(name, work / "site"))
                    if name in SLIM:
                        path.write_bytes(slim(path.read_bytes()))
        deps = [str(x.relative_to(work / "deps")) for x in (work / "deps").rglob("*") if x.is_file()]
        jobs = [(to, piece, work / "site", names) for piece, names in pieces.items()]
        jobs.append((to, "deps", work / "deps", deps))
        with ThreadPoolExecutor(2) as pool:  # lzma lets go of the interpreter
            for line in pool.map(lambda job: pack(*job), jobs):
                print(line, flush=True)
        shutil.copy(Path(__file__).with_name("setup.sh"), to)


if __name__ == "__main__":
    main()
