"""The machine code of every kernel is as recorded, on the installed and the oldest Triton; so are all launches."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashdelta.kernels.hopper.decode import DECODE_AT_ONCE
from flashdelta.kernels.shared.products import rounded_product, summand
from flashdelta.ops.decode import recurrent_kda
from flashdelta.program import launch as program
from flashdelta.program.launch import Launch
from flashdelta.program.workspace import in_slots
from flashdelta.runtime.call import check
from flashdelta.tools.compile import only_launches

from ..full import FULL
from ..support.decoding import BY_NAME, make_step
from ..support.inputs import tensors_of
from . import hot, launches, records
from .costs import Costs, compile_launch, compiled, late_operands, machine_code
from .records import DEVICE_SHARED_BYTES, Entry
from .toolchains import ROOT, toolchains
from .variants import ARCHITECTURES, BUILD, fingerprint, unequal_sums

pytestmark = pytest.mark.long

SAMPLE, MOST = 1, 24
"""Entries that are compiled though their fingerprint is recorded, others at every commit, of one Triton. Few, as they take 5
to 20 seconds each and add up over commits, and only a record written by hand or by a broken tool can be wrong here; `make
compile-all` compiles all. At most so many of the ones that are not recorded: the test fails anyway."""


TOOLCHAINS = toolchains()


def drawn(toolchain: str, recorded: dict[Entry, Costs]) -> set[Entry]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    draw = random.Random(commit)
    return {*draw.sample(sorted(recorded), SAMPLE)} if toolchain == draw.choice([*TOOLCHAINS]) or FULL else set()


@pytest.mark.slow
@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_machine_code_is_as_recorded(toolchain: str, tmp_path: Path):
    """Compiles what is not recorded as the source has it, and a sample of the rest, from nothing. Where the record is known to
    hold the sources' fingerprints, only those of the sample are made anew."""
    own = TOOLCHAINS[toolchain]
    version = own.triton()
    if toolchain == "oldest":
        assert version == "3.6.0"
    if version not in records.recorded_tritons():
        pytest.skip(f"Triton {version} is not recorded, only {', '.join(records.recorded_tritons())}")
    recorded = records.read(version)
    sample, cache, compiled = drawn(toolchain, recorded), {"TRITON_CACHE_DIR": str(tmp_path)}, {}
    if records.holds_sources(version) and not FULL:
        if not sample:
            pytest.skip("another Triton's sample is compiled at this commit")
        listed = own.listed(sample, cache)
        assert sorted(listed.names) == sorted(entry.name for entry in recorded)
        assert {*listed.files} <= {*records.source_files()}, "records.SOURCES lacks what fingerprints depend on"
        named = {entry.name for entry in sample}
        entries, compiled = listed.entries, listed.costs
        recorded = {entry: recorded[entry] for entry in recorded if entry.name in named}
    else:
        entries = own.entries()
    comparison = records.compare(entries, recorded)
    keys = {entry.key for entry in sample}
    wanted = [*comparison.new[:MOST], *sorted(entry for entry in comparison.same if entry.key in keys)]
    wanted = [entry for entry in wanted if entry not in compiled or compiled[entry] != comparison.before.get(entry)]
    compiled |= own.compile(entries, wanted, environment=cache, expected=comparison.before)
    wrong = records.violations(comparison, compiled)
    assert not wrong, "if this is meant: make record, then read what make gate lists\n" + "\n".join(wrong)


def test_launches_are_as_recorded():
    wrong = launches.differences(launches.parse(launches.FILE.read_text()), launches.traced())
    assert not wrong, "if this is meant: python -m tests.compile launches\n" + "\n".join(wrong)


def test_page_shows_what_is_recorded():
    assert hot.PAGE.read_text() == hot.page()


# ---- what is recorded ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", records.recorded_tritons())
def test_records_have_no_fault(version: str):
    assert not records.all_faults(records.read(version))


def kernels_of(backend: str) -> set[str]:
    folders = {"triton", "stages"} if backend == "triton" else {backend}
    files = [path for path in (ROOT / "src" / "flashdelta" / "kernels").rglob("*.py") if folders & {*path.parts}]
    return {name for path in files for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("version", records.recorded_tritons())
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_is_recorded_for_every_gpu(arch: int, version: str):
    found = {
        backend: {
            e.kernel for e in records.read(version) if e.arch == arch and e.variant.startswith("hopper ") == hopper
        }
        for backend, hopper in (("triton", False), ("hopper", True))
    }
    assert found["triton"] == kernels_of("triton") and bool(found["hopper"]) == (arch == 90)
    # Hopper's calls launch portable kernels, too
    assert kernels_of("hopper") <= found["hopper"] <= kernels_of("hopper") | kernels_of("triton") or arch != 90


@pytest.mark.parametrize("version", records.recorded_tritons())
def test_as_many_ctas_of_hoppers_decode_fit_as_it_counts_on(version: str):
    """An SM has 65,536 registers, which a warp gets 8 per thread at a time, and 228 KB of shared memory, of which 1 KB goes
    with each CTA."""
    found = records.read(version)
    decode = [c for e, c in found.items() if e.kernel == "decode_kernel" and e.variant.startswith("hopper ")]
    by_registers = min(65_536 // (32 * 8 * -(-costs.registers // 8)) for costs in decode)
    by_memory = min(228 * 1024 // (costs.shared_bytes + 1024) for costs in decode)
    assert min(by_registers, by_memory) == DECODE_AT_ONCE


# ---- the gate fails when it must -----------------------------------------------------------------------------------------

COSTS = Costs(128, 0, 1000, 4, 0, 800, "5a55")
ENTRY = Entry(90, "v", "k_kernel", "f1")
OTHER = Entry(90, "w", "k_kernel", "f2")


CHANGED, RENAMED = replace(ENTRY, fingerprint="f3"), replace(ENTRY, kernel="renamed_kernel")
MORE, LATE = replace(COSTS, registers=130), replace(COSTS, late_operands=1)
LARGE = replace(COSTS, shared_bytes=DEVICE_SHARED_BYTES[90] + 1)
WRITTEN_LATE = "1 operands of asynchronous MMAs are written late, at most 0"
TOO_LARGE = f"{LARGE.shared_bytes} bytes of shared memory, sm_90 has {DEVICE_SHARED_BYTES[90]}"
STALE = "sm_90 k_kernel: v: stale, its source changed since the record: "


def violations(entries: list[Entry], recorded: dict[Entry, Costs], compiled: dict[Entry, Costs]) -> list[str]:
    return records.violations(records.compare(entries, recorded), compiled)


@pytest.mark.parametrize(
    ("entries", "recorded", "compiled", "said"),
    [
        ([ENTRY, OTHER], {ENTRY: COSTS, OTHER: COSTS}, {ENTRY: COSTS}, []),
        ([RENAMED], {ENTRY: COSTS}, {RENAMED: COSTS}, []),
        ([ENTRY], {ENTRY: COSTS}, {ENTRY: MORE}, [f"{ENTRY}: the record is wrong: registers 128 -> 130"]),
        ([CHANGED], {ENTRY: COSTS}, {CHANGED: COSTS}, [STALE + "the same machine code"]),
        ([CHANGED], {ENTRY: COSTS}, {CHANGED: MORE}, [STALE + "registers 128 -> 130"]),
        ([CHANGED], {ENTRY: COSTS}, {}, [STALE + "not compiled"]),
        ([ENTRY, OTHER], {ENTRY: COSTS}, {OTHER: COSTS}, ["sm_90 k_kernel: w: not recorded"]),
        ([ENTRY], {ENTRY: COSTS, OTHER: COSTS}, {}, ["sm_90 k_kernel: w: recorded, but no longer made"]),
        ([ENTRY], {ENTRY: LATE}, {ENTRY: LATE}, [f"{ENTRY}: {WRITTEN_LATE}"]),
        ([ENTRY], {ENTRY: LARGE}, {ENTRY: LARGE}, [f"{ENTRY}: {TOO_LARGE}"]),
    ],
)
def test_the_gate_fails_when_it_must(entries: list, recorded: dict, compiled: dict, said: list[str]):
    assert violations(entries, recorded, compiled) == said


@pytest.mark.parametrize("changed", ["source", "record", "nothing"])
def test_a_changed_source_or_record_is_noticed(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"FOLDER": tmp_path, "ROOT": tmp_path, "SOURCES": ("source",)}.items():
        monkeypatch.setattr(records, name, value)
    kernel = tmp_path / "source" / "kernel.py"
    kernel.parent.mkdir()
    kernel.write_text("as it was")
    records.write({ENTRY: COSTS}, "3.6.0")
    assert not records.holds_sources("3.6.0")
    records.write_sources(records.sources(), "3.6.0")
    if changed == "source":
        kernel.write_text("as it is")
    elif changed == "record":
        records.write({replace(ENTRY, arch=80): COSTS}, "3.6.0")
    assert records.holds_sources("3.6.0") == (changed == "nothing")


# ---- sums of lanes' products ---------------------------------------------------------------------------------------------


@triton.jit
def squares_kernel(x, out, SIZE: tl.constexpr, KIND: tl.constexpr):
    row = tl.load(x + tl.arange(0, SIZE))
    if KIND == "plain":
        squares = row * row
    elif KIND == "rounded":
        squares = rounded_product(row, row)
    else:
        squares = summand(row, row)
    tl.store(out, tl.sum(squares))


@pytest.mark.parametrize(("size", "kind", "unequal"), [(32, "plain", 1), (32, "rounded", 0), (32, "", 0), (128, "", 0)])
def test_lanes_hold_equal_sums_of_rounded_products(size: int, kind: str, unequal: int):
    launch = replace(sample_launch(squares_kernel), num_warps=1, constants={"SIZE": size, "KIND": kind})
    launch = replace(launch, arguments=launch.arguments[:2])
    assert unequal_sums(compiled(launch, 90).asm["ptx"]) == unequal


@pytest.mark.parametrize("K", [32, 64])
def test_lanes_hold_equal_sums_where_states_are_not_aligned(K: int):
    """Their elements lie along the lanes one by one, V first along K."""
    call = make_step(replace(BY_NAME["odd_pitch"], K=K, v_first=True), torch.bfloat16)
    call = {name: on_meta_as_it_lies(x) for name, x in call.items()}
    (launch,) = only_launches(BUILD["triton"](*check(recurrent_kda, **call), 90))
    assert unequal_sums(compiled(launch, 90).asm["ptx"]) == 0


def on_meta_as_it_lies(x: object) -> object:
    """Without memory, but as far from an aligned address as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    before = x.data_ptr() % 256 // x.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return torch.empty(before + extent, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), before)


# ---- fingerprints --------------------------------------------------------------------------------------------------------


@triton.jit
def add_one(x, HOW_MUCH: tl.constexpr):
    return x + HOW_MUCH


@triton.jit
def plain_kernel(x, out, n, SIZE: tl.constexpr):
    """A kernel as it was."""
    places = tl.arange(0, SIZE)
    tl.store(out + places, add_one(tl.load(x + places, mask=places < n), 1.0), mask=places < n)


@triton.jit
def plus_one(value, BY: tl.constexpr):
    return value + BY


@triton.jit
def renamed_kernel(source, target, count, SIZE: tl.constexpr):
    # other names, another place, another comment
    at = tl.arange(0, SIZE)

    tl.store(target + at, plus_one(tl.load(source + at, mask=at < count), 1.0), mask=at < count)


@triton.jit
def changed_kernel(x, out, n, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, add_one(tl.load(x + places, mask=places < n), 2.0), mask=places < n)


def sample_launch(kernel: object = plain_kernel, dtype: torch.dtype = torch.float32, **changes: object) -> Launch:
    x = torch.empty(64, dtype=dtype, device="meta")
    return replace(Launch(kernel, 1, (x, torch.empty_like(x), 60), {"SIZE": 64}, num_warps=4), **changes)


def test_one_changed_instruction_fails_the_gate():
    """From source to verdict, on one kernel."""

    def found(launch: Launch) -> dict[Entry, Costs]:
        return {Entry(90, "v", "kernel", fingerprint(launch, 90)): compile_launch(launch, 90)}

    before, after, renamed = (found(sample_launch(k)) for k in (plain_kernel, changed_kernel, renamed_kernel))
    assert violations([*renamed], before, renamed) == [] and records.changes(before, renamed) == []
    (said,) = violations([*after], before, after)
    assert said.startswith("sm_90 kernel: v: stale, its source changed since the record: sass ")
    (said,) = records.changes(before, after)
    assert said.startswith("sm_90 kernel: v: sass ")


OTHER_GPU = 99
"""A device whose caches nobody has."""


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_a_plan_compiles_the_same(offset: int, monkeypatch: pytest.MonkeyPatch):
    """Compiles in Triton's own way, from tensors in slots, once; alignment is that of the call's tensors."""
    gpu = SimpleNamespace(
        get_current_device=lambda: OTHER_GPU,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(program, "current_device", lambda: OTHER_GPU)
    t = in_slots(tensors_of(q=torch.zeros(1025)[offset:][:1024], k=torch.zeros(1024)))
    ours, recorded = (sample_launch(arguments=(x, t.k, 1024), constants={"SIZE": 1024}) for x in (t.q, t.k))
    monkeypatch.setattr(driver, "_active", gpu)
    kernels = [ours.compiled(), ours.compiled()]
    assert kernels[0] is kernels[1]
    found, want = (machine_code(x.asm["cubin"]) for x in (kernels[0], compiled(recorded, 90)))
    assert (found == want) == (offset == 0)


# ---- reading machine code ------------------------------------------------------------------------------------------------

PRODUCT = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0 ;"
FENCE, WAIT = "/*0000*/ WARPGROUP.ARRIVE ;", "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((FENCE, PRODUCT, "/*0020*/ MOV R58, 0x3f803f80 ;", WAIT), 1),
        ((FENCE, PRODUCT, "/*0020*/ @!P0 LDS.128 R56, [R4] ;", WAIT), 4),
        ((FENCE, "/*0008*/ MOV R57, RZ ;", PRODUCT, WAIT), 1),
        (("/*0000*/ MOV R57, RZ ;", FENCE, PRODUCT, WAIT, "/*0040*/ MOV R58, RZ ;"), 0),
        ((FENCE, PRODUCT, "/*0020*/ STS [R58], R59 ;", "/*0024*/ MOV R60, RZ ;", WAIT), 0),
        ((FENCE, PRODUCT.replace("R56", "gdesc[UR4]"), "/*0020*/ MOV R58, RZ ;", WAIT), 0),
    ],
    ids=["under way", "wide", "after the fence", "in time", "read", "in shared memory"],
)
def test_operands_that_are_written_late_are_counted(lines: tuple[str, ...], found: int):
    assert late_operands("\n".join(lines)) == found
