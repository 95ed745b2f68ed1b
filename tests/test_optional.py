"""Libraries that an extra brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_lab.optional import MissingLibraryError, library


def test_a_missing_library_names_its_extra_and_a_broken_one_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Advice to install what is there already helps nobody."""
    assert library("json", "any").dumps([]) == "[]"
    with pytest.raises(MissingLibraryError, match=r"^no-such-thing is missing; pip install 'specdec-lab\[search\]'"):
        library("no_such_thing.part", "search")
    (tmp_path / "broken_thing.py").write_text("from json import nothing_of_the_kind")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingLibraryError, match=r"^broken-thing cannot be loaded \(cannot import name"):
        library("broken_thing", "search")
