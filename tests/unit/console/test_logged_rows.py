"""Ranks that move the cursor although their console is a pipe or a file: each line is there, once, soon and whole."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.console import drawing
from saferun.console.console_stream import ConsoleStream
from saferun.console.log_rows import LogRows
from tests.unit.console.reader import Reader, console, drain

HIDE, SHOW, CLEAR, AGAIN, UP = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[H\x1b[2J", b"\r\x1b[2K", b"\x1b[1A\x1b[2K"
SOON_S = 2.0


def printed(*steps: tuple[float, bytes], prefix: bytes = b"[0] ") -> list[tuple[float, str]]:
    """What a rank's chunks become: when each line is printed, and the line. The rank ends after the last chunk."""
    with Reader.pipe(1 << 20) as reader, console(reader) as screen:
        screen.out._bar_interval_s = 30.0
        stream = ConsoleStream(screen.out, prefix)
        lines: list[tuple[float, str]] = []

        def look(now: float) -> None:
            drain(screen, reader)
            assert reader.taken == b"" or reader.taken.endswith(b"\n")
            for line in reader.taken.split(b"\n")[:-1]:
                assert line.startswith(prefix)
                lines.append((now, line.removeprefix(prefix).decode()))
            reader.taken = b""

        for now, chunk in steps:
            while (due := screen.deadline()) is not None and due <= now:
                screen.tick(due)
                look(due)
            stream.feed(chunk, now)
            look(now)
        stream.close()
        look(steps[-1][0])
        return lines


def test_lines_of_a_stream_that_hides_the_cursor_appear_once_and_soon() -> None:
    """A spinner hides it and logs go on: six of seven lines once waited for 30 s and then came twice."""
    lines = printed((0.0, HIDE), *((5.0 * i, b"INFO step %d\n" % i) for i in range(20)))
    assert [line for _, line in lines] == [f"INFO step {i}" for i in range(20)]
    assert all(at <= 5.0 * i + SOON_S for i, (at, _) in enumerate(lines))


PIECES = st.lists(
    st.tuples(st.sampled_from([HIDE, SHOW, CLEAR, b"line", b"line", b"bar"]), st.integers(0, 5)), max_size=40
)


@given(PIECES)
def test_every_line_that_ends_is_printed_once_in_order_and_soon(pieces: list[tuple[bytes, int]]) -> None:
    """Whatever a rank does to a screen that there is not."""
    steps: list[tuple[float, bytes]] = []
    written: list[tuple[float, str]] = []
    now = 0.0
    for number, (piece, pause) in enumerate(pieces):
        now += pause / 2
        text = piece
        if piece == b"line":
            text = AGAIN + b"line %d\n" % number
            written.append((now, f"line {number}"))
        elif piece == b"bar":
            text = AGAIN + b"bar %d" % number
        steps.append((now, text))
    steps.append((now + 2 * SOON_S, b""))
    lines = [(at, line) for at, line in printed(*steps) if line.startswith("line")]
    assert [line for _, line in lines] == [line for _, line in written]
    assert all(at <= begun + SOON_S for (at, _), (begun, _) in zip(lines, written, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=2, max_size=30),
    st.integers(1, 4),
)
def test_lines_above_a_picture_are_printed_once_and_in_order(frames: list[tuple[int, int]], height: int) -> None:
    """Rich prints them where its bars were and draws the bars once more below them."""
    steps: list[tuple[float, bytes]] = []
    now, number = 0.0, 0
    for step, (count, pause) in enumerate(frames):
        now += pause / 10
        lines = [b"line %d" % (number + i) for i in range(count)]
        number += count
        rows = [b"bar%d %d" % (row, step) for row in range(height)]
        steps.append((now, (HIDE if not step else AGAIN + UP * (height - 1)) + b"\n".join([*lines, *rows])))
    steps.append((now, b"\n" + SHOW))
    shown = [line for _, line in printed(*steps)]
    assert [line for line in shown if line.startswith("line")] == [f"line {i}" for i in range(number)]
    # A picture is printed now and then, and its last state always.
    assert shown[-1].startswith("bar")
    assert {f"bar{row} {len(frames) - 1}" for row in range(height)} <= set(shown)
    assert len(shown) - number <= height * (3 + now / 30)


def test_a_screen_that_is_cleared_for_each_line_leaves_all_of_them() -> None:
    """Of eight epochs a file once got two."""
    lines = printed(*((0.5 * i, CLEAR + b"epoch %d val_acc=0.5\n" % i) for i in range(8)))
    assert [line for _, line in lines] == [f"epoch {i} val_acc=0.5" for i in range(8)]


def test_a_bar_that_clears_the_screen_is_printed_now_and_then() -> None:
    lines = printed(*((0.5 * i, CLEAR + b"%d/200" % i) for i in range(201)))
    assert [line for _, line in lines][-1] == "200/200"
    assert len(lines) <= 6


def test_a_long_line_is_one_line() -> None:
    """JSON must stay JSON: it was cut at the width of a terminal that there is not, and lost blanks at the cuts."""
    for text in ("x " * 3001, "ä " * 3001, "x" * 30_000):
        assert [line for _, line in printed((0.0, HIDE + text.encode() + b"|\n"))] == [text + "|"]


def test_a_row_that_was_printed_before_its_end_is_not_printed_again() -> None:
    lines = printed((0.0, HIDE + b"Installing"), (9.0, b"\n"), (12.0, b"Installing\n"))
    assert [line for _, line in lines] == ["Installing", "Installing"]


def test_a_row_that_has_changed_meanwhile_is_printed_again() -> None:
    lines = printed((0.0, HIDE + b"first"), (9.0, AGAIN + b"second"), (40.0, AGAIN + b"first\n"))
    assert [line for _, line in lines] == ["first", "second", "first"]


def test_a_program_that_has_the_whole_screen_leaves_its_last_picture() -> None:
    """Curses goes home for each picture, and its line feeds end no lines."""
    rows = LogRows()
    lines = rows.feed(b"\x1b[?1049h" + b"".join(b"\x1b[H\x1b[2Jtitle %d\nrow" % i for i in range(9)))
    assert (lines + rows.feed(b"\x1b[?1049l") + rows.take()).split() == [b"title", b"8", b"row"]


def test_sequences_of_a_few_bytes_do_not_become_thousands_of_spaces() -> None:
    """The rows of a log are wide, and the loop has other things to do."""
    rows = LogRows()
    for sequence in (b"\x1b[9999Cx", b"\x1b[1;9999Hx", b"x\x1b[9999b", b"x\r\x1b[9999@"):
        assert max(map(len, rows.feed(AGAIN + sequence + b"\n").split(b"\n"))) <= 1002


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=60),
    st.lists(st.integers(1, 400), min_size=1, max_size=60),
    st.sampled_from([b"\x1b[K\n", b" \x1b[K\n", b"\x1b[0m\x1b[K\r\n", b"\x1b[?25l\x1b[?25h\n"]),
)
@example([1], [1, 1, 5, 13], b"\x1b[K\n")
@example([75, 2, 117, 1, 0, 0, 0], [121, 109, 97, 1], b"\x1b[0m\x1b[K\r\n")
@example([103], [12, 142], b" \x1b[K\n")
def test_lines_of_a_burst_stay_whole_wherever_reading_cuts_them(widths: list[int], cuts: list[int], end: bytes) -> None:
    """For most of it there is no time to draw, and each piece began with a line of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_MOST_DRAWN_BYTES", 300)
        texts = [f"{number} {'ä b ' * width}"[: width + 8].rstrip() + "|" for number, width in enumerate(widths)]
        written = HIDE + SHOW + b"".join(text.encode() + end for text in texts)
        steps: list[tuple[float, bytes]] = []
        at = 0
        for cut in cuts:
            steps.append((0.0, written[at : at + cut]))
            at += cut
        lines = printed(*steps, (0.0, written[at:]))
    # Sequences that show nothing may stay where reading cuts them.
    assert [re.sub(r"\x1b\[(0m|K|\?25[lh])", "", line).rstrip() for _, line in lines] == texts


def test_a_burst_of_lines_that_erase_their_rest_stays_whole() -> None:
    written = b"".join(b"%08d %s\x1b[K\n" % (number, b"y" * 80) for number in range(20_000))
    pieces = [written[at : at + (64 << 10)] for at in range(0, len(written), 64 << 10)]
    lines = printed(*((0.0, piece) for piece in pieces))
    assert [line for _, line in lines] == [f"{number:08} {'y' * 80}" for number in range(20_000)]


def test_in_a_burst_a_row_that_is_drawn_again_is_not_joined_to_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_MOST_DRAWN_BYTES", 0)
    lines = printed(*((0.0, AGAIN + b"step %d" % step) for step in range(5)), (0.0, b"\x1b[1A\x1b[Gend\n"))
    assert [line for _, line in lines] == ["", *(f"step {step}" for step in range(5)), "end"]


def test_a_line_without_end_in_a_burst_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_MOST_DRAWN_BYTES", 0)
    lines = printed((0.0, HIDE + b"a"), *((0.0, b"x" * 1000) for _ in range(200)))
    assert "".join(line for _, line in lines) == "a" + "x" * 200_000
    assert len(lines[0][1]) <= 67_000  # from then on it is plain text, which is not drawn
