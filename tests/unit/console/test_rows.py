"""What a stream draws with cursor movements: rows that change, and lines above them that do not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.console.rows import MOST_ROWS, Rows, moves_cursor, without_movements

WIDTH = 40
HIDE, SHOW, UP, ERASE_LINE = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[1A", b"\x1b[2K"
WORDS = st.text(alphabet="abc #%", max_size=WIDTH).map(str.rstrip)
FRAMES = st.lists(
    st.tuples(st.lists(WORDS, max_size=3), st.lists(WORDS, min_size=1, max_size=6)), min_size=1, max_size=6
)


def frame_again(height: int) -> bytes:
    """How rich goes back to the first row of what it has drawn."""
    return b"\r" + ERASE_LINE + (UP + ERASE_LINE) * (height - 1)


def text(rows: list[str]) -> bytes:
    return "\n".join(rows).encode()


@given(FRAMES, st.data())
def test_only_the_last_picture_is_left_and_lines_above_it_are_all_kept(
    frames: list[tuple[list[str], list[str]]], data: st.DataObject
) -> None:
    """Rich prints lines above its bars by drawing them where the bars were, and the bars once more below them."""
    written = HIDE
    height = 0
    printed: list[str] = []
    rows: list[str] = []
    for lines, drawn in frames:
        written += frame_again(height) if height else b""
        # A lower picture than before leaves its predecessor's rows empty: rich keeps the height.
        rows = drawn + [""] * max(0, height - len(drawn))
        written += text([*lines, *rows])
        printed += lines
        height = len(rows)
    written += b"\n" + SHOW
    shown = Rows(WIDTH)
    got = b""
    at = 0
    while at < len(written):
        size = data.draw(st.integers(1, 60))
        got += shown.feed(written[at : at + size])
        at += size
    got += shown.take()
    expected = [*printed, *rows]
    assert _stripped([line.decode() for line in got.split(b"\n")]) == _stripped(expected)


def _stripped(rows: list[str]) -> list[str]:
    while rows and not rows[-1]:
        rows = rows[:-1]
    return rows


def lines_and_rows(*chunks: bytes, width: int = WIDTH) -> tuple[bytes, list[bytes]]:
    shown = Rows(width)
    lines = b"".join(shown.feed(chunk) for chunk in chunks)
    return lines, shown.live


@pytest.mark.parametrize(
    ("written", "lines", "rows"),
    [
        (b"one\ntwo", b"one\n", [b"two"]),
        (b"\r\x1b[2Kafter", b"", [b"after"]),
        (b"abc\x1b[1Dx", b"", [b"abx"]),
        (b"abc\bx\b\by", b"", [b"ayx"]),
        (b"abcdef\r\x1b[3Cx\x1b[K", b"", [b"abcx"]),
        (b"abc\x1b[1K|", b"", [b"   |"]),
        (b"abcdef\r\x1b[2P", b"", [b"cdef"]),
        (b"abc\r\x1b[2@", b"", [b"  abc"]),
        (b"abcdef\r\x1b[2X", b"", [b"  cdef"]),
        (b"\x1b[1;31mred\x1b[0m plain", b"", [b"\x1b[1;31mred\x1b[0m plain"]),
        (b"\x1b[38;5;196mx\x1b[22;39my", b"", [b"\x1b[38;5;196mx\x1b[0my"]),
        (b"\x1b]0;title\x07text\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", b"", [b"textlink"]),
        (b"\x1b(Btext\x1b=\x1b>\x1b[6n", b"", [b"text"]),
        (b"a\tb\x07\x0e\x00c", b"", [b"a       bc"]),
        ("日本\r\x1b[2C語".encode(), b"", ["日語".encode()]),
        (b"\xffbroken\x1b[K", b"", [b"\xffbroken"]),
        (b"x\x1b[9999;9999Hy\x1b[2J\x1b[Hz", b"", [b"z"]),
    ],
)
def test_sequences_do_within_the_rows_what_a_terminal_does(written: bytes, lines: bytes, rows: list[bytes]) -> None:
    assert lines_and_rows(written) == (lines, rows)
    # Wherever it is cut.
    assert lines_and_rows(*(bytes([byte]) for byte in written)) == (lines, rows)


def test_a_line_wider_than_the_terminal_is_one_line_again_when_it_is_final() -> None:
    """Rows are what a cursor moves over; a line in a log is not cut at the width that a window happened to have."""
    assert lines_and_rows(b"\x1b[K" + b"x" * 25 + b"\nnext", width=10) == (b"x" * 25 + b"\n", [b"next"])


def test_rows_above_the_first_one_cannot_be_reached() -> None:
    """They are lines, perhaps of another rank, and have scrolled away: what is drawn there gets rows of its own."""
    shown = Rows(WIDTH)
    assert shown.feed(b"first bar\nsecond bar") == b"first bar\n"
    assert shown.feed(b"\x1b[Afirst bar again\x1b[B\rsecond bar again") == b""
    assert shown.live == [b"          first bar again", b"second bar again"]


def test_rows_are_lines_again_when_nothing_moves_up_any_more() -> None:
    shown = Rows(WIDTH)
    shown.feed(b"\n\x1b[A")
    kept = shown.feed(b"".join(b"line %d\n" % i for i in range(40)))
    assert kept.count(b"\n") == 40
    assert shown.is_plain


PIECES = [
    *(b"\x1b[", b"A", b"99", b"\n", b"x", b";", b"H", b"\x1b[99A", b"\x1bM", b"\x1bE", b"\x1bc", b"\x1b7", b"\x1b8"),
    *(b"?25l", b"\x1b#8", b"\x1b]", b"\x07", b"\t", b"\r", b"\x0b", b"\xc2", b"\x84", b"\x9b", b"\xe2", b"\xff"),
]


@given(st.binary(max_size=400) | st.lists(st.sampled_from(PIECES)).map(b"".join))
@example(b"\x1bM" + b"x" * (WIDTH - 1) + b"\xc2\x0b\x9b\n")  # the same at the end of a row
@example(b"\x1bM\xc2\x0b\x9bA")  # two bytes that are a control character as soon as what is between them has gone
def test_no_bytes_at_all_break_it(written: bytes) -> None:
    """A rank may print a picture, a core or noise."""
    shown = Rows(WIDTH)
    lines = shown.feed(written)
    assert len(shown.live) <= MOST_ROWS
    for row in (*shown.live, *lines.split(b"\n")):
        assert not moves_cursor(row, is_terminal=True)
    shown.take()
    assert shown.live == []


def test_output_without_movements_is_not_looked_at() -> None:
    """Colours, line ends, bars of one row."""
    for plain in (b"text \x1b[1;38;5;3mcolour\x1b[0m\r\n", b"\r 50%\t\a", "ü".encode()):
        assert not moves_cursor(plain, is_terminal=True)
    for moving in (b"\x1b[A", b"\x1b[2K", b"\x1b[?25l", b"\x1b[12;3H"):
        assert moves_cursor(moving, is_terminal=False)
        assert moves_cursor(moving, is_terminal=True)
    # A pipe or a file gets bytes as they are.
    assert not moves_cursor(b"\x08\x00\x1b", is_terminal=False)


def test_too_much_is_not_drawn_but_its_text_is_kept() -> None:
    assert without_movements(b"\x1b[2Ka\x1b[1mb\x1b[0m\x1b]0;t\x07c\x1b[Ad") == b"a\x1b[1mb\x1b[0mcd"


def test_a_program_that_takes_the_whole_screen_leaves_its_last_picture_below_what_was_there() -> None:
    r"""Curses once wrote "post" over the first row of its own frame, and left a screenful of blank rows."""
    shown = Rows(WIDTH)
    got = shown.feed(b"prompt> ")
    got += shown.feed(b"\x1b[?1049h\x1b[H\x1b[2J\x1b[2;3Hpicture\x1b[4d4\x1b[20;1H")
    assert shown.live[1:] == [b"  picture", b"", b"         4"]
    got += shown.feed(b"\x1b[?1049lafter\n")
    assert _stripped([line.decode() for line in (got + shown.take()).split(b"\n")]) == [
        *("prompt>", "", "  picture", "", "         4", "after")
    ]


def test_line_drawing_characters_are_drawn() -> None:
    shown = Rows(WIDTH)
    shown.feed(b"\x1b(0lqk\x1b(Bx\x1b)0\x0ex\x0fq\x1b[3bq")
    assert shown.live == ["┌─┐x│qqqqq".encode()]


def test_rows_are_inserted_and_removed_within_the_picture() -> None:
    shown = Rows(WIDTH)
    shown.feed(b"\x1b[Ha\nb\nc\x1b[2;1H\x1b[1Lnew\x1b[1;1H\x1b[1M")
    assert shown.live == [b"new", b"b", b"c"]
