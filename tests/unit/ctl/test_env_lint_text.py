"""What ``saferunctl env lint`` says of its search."""

from __future__ import annotations

import pytest

from saferun.ctl.env_answers import searched_lines
from saferun.env.lint.known_names import KnownNames

LIBRARIES = ("libnccl.so.2", "liba.so")
UNSEARCHED = "no library or package was searched"
FOUND = KnownNames(
    {}, {}, {}, (), {"NCCL": ("libnccl.so.2",), "UCX": ()}, ("libnccl.so.2", "liba.so"), ("x 1",), {}, ()
)
LOST = tuple(f"lib{i}.so" for i in range(7))


@pytest.mark.parametrize(
    ("known", "lines"),
    [
        (
            FOUND,
            ["searched: 2 libraries and 1 Python package, among them those that read the variables of NCCL"],
        ),
        (
            FOUND._replace(owners={}, unsearched=LOST),
            [
                "searched: 2 libraries and 1 Python package",
                "not found or not searched: lib0.so, lib1.so, lib2.so, lib3.so, lib4.so and 2 more (--all)",
            ],
        ),
        (
            FOUND._replace(libraries=(), modules=(), owners={}),
            [UNSEARCHED],
        ),
    ],
)
def test_what_was_searched_is_a_line_and_not_a_list_of_files(known: KnownNames, lines: list[str]) -> None:
    """An all-clear is worth as much as the search behind it, and nobody reads the names of forty files."""
    assert searched_lines(known, everything=False, has_found=True) == lines


def test_an_all_clear_says_on_what_it_is_based() -> None:
    """Not that nothing was searched: where no variable is set there is nothing to look for."""
    none = FOUND._replace(libraries=(), modules=(), owners={})
    assert searched_lines(FOUND, everything=False)[0] == "no problems found"
    assert searched_lines(none, everything=False) == ["no problems found: no variable is set that the lint checks"]


def test_whoever_asks_for_everything_gets_the_names() -> None:
    """What could not be searched among them."""
    lines = searched_lines(FOUND._replace(unsearched=LOST), everything=True, has_found=True)
    assert lines[1] == f"not found or not searched: {', '.join(LOST)}"
    assert lines[2:] == ["  libnccl.so.2, liba.so, x 1"]
