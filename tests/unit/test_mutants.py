"""The recorded breaks of `make mutants` fit the code as it is, and there is one of every file of kernels."""

from __future__ import annotations

from ..mutants import MUTANTS, ROOT, describe

SOURCE = ROOT / "src" / "flashdelta"


def test_old_texts_stand_once_and_tests_are_there():
    lost = [describe(row) for row in MUTANTS if (SOURCE / row[0]).read_text().count(row[1]) != 1]
    lost += [x for _, _, _, *tests in MUTANTS for x in tests if not (ROOT / "tests" / x.partition("::")[0]).is_file()]
    assert not lost


def test_every_file_of_kernels_is_broken():
    kernels = [*(SOURCE / "kernels").glob("*/*.py")]
    kernels = [file for file in kernels if "_kernel(\n" in file.read_text()]
    assert len(kernels) > 20 and not {file.relative_to(SOURCE).as_posix() for file in kernels} - {
        row[0] for row in MUTANTS
    }
