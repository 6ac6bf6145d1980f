"""The order in which this process searches for modules."""

from __future__ import annotations

import os
import sys

import pytest

from saferun.linux import search_path

LIBRARY = os.path.dirname(os.__file__)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_the_directory_of_what_was_started_is_left_out(monkeypatch: pytest.MonkeyPatch, *, is_sorted: bool) -> None:
    """It is no place where the ranks find anything, wherever it stands once Python's modules come first."""
    monkeypatch.setattr(sys, "path", ["/started", "/theirs", LIBRARY, "/site-packages", "/started"])
    monkeypatch.setattr(search_path, "_first_entry", [])
    if is_sorted:
        search_path.search_pythons_own_first()
        assert sys.path == [LIBRARY, "/started", "/theirs", "/site-packages", "/started"]
    left = search_path.path_without_first()
    assert sorted(left) == sorted([LIBRARY, "/theirs", "/site-packages", "/started"])
    assert left.index("/theirs") < left.index("/started")


def test_a_path_that_has_changed_since_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/started", LIBRARY])
    monkeypatch.setattr(search_path, "_first_entry", [])
    search_path.search_pythons_own_first()
    sys.path.remove("/started")
    assert search_path.path_without_first() == [LIBRARY]
