"""What a rank that has a terminal for itself may write to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console.harmless import HarmlessText


@pytest.mark.parametrize(
    "passed",
    [
        b"(Pdb) ",
        "größer ✓".encode(),
        b"a\bb\tc\ad\r\n",
        b"\x1b[1;31mred\x1b[0m",
        b"\x1b[A\x1b[2C\x1b[K\x1b[3P\x1b[@\x1b[H\x1b[2J",
        b"\x1b[?2004h(Pdb) \x1b[?2004l",
        b"\x1b[?25l\x1b[?25h\x1b[?1h\x1b=",
    ],
)
def test_text_and_what_line_editors_write_passes(passed: bytes) -> None:
    assert HarmlessText().feed(passed) == passed


@pytest.mark.parametrize(
    "dropped",
    [
        b"\x1b]0;title\x07",
        b"\x1b]52;c;aGk=\x1b\\",
        b"\x1bP+q544e\x1b\\",
        b"\x1b_command\x1b\\",
        b"\x1b[6n",
        b"\x1b[c",
        b"\x1b[>c",
        b"\x1b[21t",
        b"\x1b[?1049h",
        b"\x1b[?1000h",
        b"\x1b[5i",
        b"\x1b[>4;2m",
        b"\x1bc",
        b"\x05",
        b"\x0e",
        b"\x7f",
        b"\x00",
        b"\xc2\x9b",
        b"\x1b#8",
    ],
)
def test_what_a_terminal_answers_or_keeps_does_not_pass(dropped: bytes) -> None:
    """The answer would be as if the user had typed it."""
    assert HarmlessText().feed(b"a" + dropped + b"b") == b"ab"


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_where_the_bytes_are_cut_does_not_matter(content: bytes, cuts: list[int]) -> None:
    whole = HarmlessText().feed(content + b"\n\n")
    text, pieces, at = HarmlessText(), [], 0
    for cut in [*sorted(cuts), len(content) + 2]:
        pieces.append(text.feed((content + b"\n\n")[at:cut]))
        at = max(at, cut)
    assert b"".join(pieces) == whole


@given(st.lists(st.sampled_from([b"\x1b", b"[", b"]", b"6", b"n", b"c", b"\x07", b"\\", b"?", b"h", b"x", b"\n"])))
def test_nothing_is_made_of_what_is_left(pieces: list[bytes]) -> None:
    """What remains when one sequence is taken out must not be another one."""
    once = HarmlessText().feed(b"".join(pieces))
    assert HarmlessText().feed(once + b"\n\n") in {once + b"\n\n", once + b"\n\n"}
