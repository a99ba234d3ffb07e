"""Words of switches in the environment."""

from __future__ import annotations

import warnings

import pytest

from flashdelta.problem.switches import is_on

NAME = "FLASHDELTA_NO_SUCH_SWITCH"


@pytest.mark.parametrize("default", (False, True))
def test_words(default: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(NAME, raising=False)
    assert is_on(NAME, default) is default
    for word, wanted in {"": default, "0": False, "off": False, "No": False, "FALSE": False}.items():
        monkeypatch.setenv(NAME, word)
        assert is_on(NAME, default) is wanted
    for word in ("1", "on", "Yes", "TRUE", " true "):
        monkeypatch.setenv(NAME, word)
        assert is_on(NAME, default)


@pytest.mark.parametrize("default", (False, True))
def test_another_word_is_told_once(default: bool, monkeypatch: pytest.MonkeyPatch):
    word = f"maybe {default}"
    monkeypatch.setenv(NAME, word)
    with pytest.warns(UserWarning, match=f"{NAME}: got '{word}', wanted one of 1, true, .* no; it is {default:d}"):
        assert is_on(NAME, default) is default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_on(NAME, default) is default
