"""Ranks that draw on one terminal: neither another rank's lines nor a prefix is lost to a cursor movement."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console.console_stream import ConsoleStream
from saferun.console.rows import Rows
from tests.examples import examples
from tests.shown import Shown
from tests.unit.console.reader import Reader, console, drain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saferun.console.screen import Screen

COLUMNS, ROWS = 100, 40
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


class Ranks:
    """Some ranks on one terminal."""

    def __init__(self, count: int, reader: Reader, screen: Screen) -> None:
        self.reader = reader
        self.screen = screen
        self.streams = [ConsoleStream(screen.out, b"[%d] " % rank) for rank in range(count)]
        self.now = 0.0
        self._shown = Shown(COLUMNS, ROWS)

    def write(self, rank: int, text: bytes) -> None:
        self.streams[rank].feed(text, self.now)

    def wait(self) -> None:
        """Long enough for unfinished rows to appear."""
        self.now += 0.2
        self.screen.tick(self.now)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    @property
    def shown(self) -> Shown:
        drain(self.screen, self.reader)
        self._shown.feed(self.reader.taken)
        self.reader.taken = b""
        return self._shown


@contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    with Reader.terminal(ROWS, COLUMNS) as reader, console(reader) as screen:
        yield Ranks(count, reader, screen)


def bars(step: int, *, first: bool) -> bytes:
    """Three rows of rich.progress."""
    again = b"" if first else b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * 2
    return again + b"\n".join(b"task%d \x1b[35m%s\x1b[0m %3d%%" % (task, b"=" * 20, step) for task in range(3))


def test_nothing_is_drawn_on_a_shells_terminal_and_rows_come_back_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person types at the prompt is neither erased nor moved; a bar is a line now and then, as on a pipe."""
    background = [False]
    monkeypatch.setattr("saferun.linux.streams.is_in_background", lambda _fd: background[0])
    with ranks(2) as job:
        job.write(0, b"step 1/9")
        job.wait()
        assert job.shown.lines == ["[0] step 1/9"]
        background[0] = True
        os.write(job.reader.fd, b"\n[1]+ Stopped\n$ ls")
        for step in range(2, 6):
            job.write(0, b"\rstep %d/9" % step)
            job.now += 0.3
            job.screen.tick(job.now)
        assert not job.screen.set_status("meeting", "waiting for node1")
        job.write(1, b"a line\n")
        lines = ["[0] step 1/9", "[1]+ Stopped", "$ ls[0] step 2/9"]
        assert job.shown.lines == [*lines, "[1] a line"]
        background[0] = False
        assert job.screen.set_status("meeting", "waiting for node1")
        job.now += 1.0
        job.screen.tick(job.now)
        assert job.shown.lines[4:] == ["[0] step 5/9", "saferun: waiting for node1"]
        job.close()


def test_bars_of_several_rows_leave_the_lines_of_other_ranks_alone() -> None:
    with ranks(2) as job:
        job.write(0, HIDE)
        for step in range(20):
            job.write(0, bars(step, first=not step))
            job.write(1, b"IMPORTANT line %d\n" % step)
            job.wait()
        drawn = ["[0] task0 ==================== %3d%%", "[0] task1 ==================== %3d%%"]
        drawn.append("[0] task2 ==================== %3d%%")
        lines = [f"[1] IMPORTANT line {step}" for step in range(20)]
        assert job.shown.lines == [*lines, *(row % 19 for row in drawn)]
        job.write(0, b"\n" + SHOW)
        job.write(0, b"done\n")
        job.close()
        assert job.shown.lines == [*lines, *(row % 19 for row in drawn), "[0] done"]


def test_a_row_that_is_erased_keeps_its_prefix() -> None:
    with ranks(2) as job:
        for rank in range(2):
            job.write(rank, b"\r\x1b[2KTraining 83%")
        job.wait()
        assert job.shown.lines == ["[0] Training 83%", "[1] Training 83%"]


def test_nested_bars_stay_two_rows() -> None:
    """What tqdm writes for a bar within a bar."""
    with ranks(1) as job:
        job.write(0, b"\repochs 0/3")
        for epoch in range(3):
            for step in range(3):
                job.write(0, b"\n\r  steps %d/3\x1b[A" % step)
                job.wait()
            job.write(0, b"\repochs %d/3" % (epoch + 1))
            job.wait()
        # The first state of the outer bar was a line before the first movement told that it would change.
        assert job.shown.lines == ["[0] epochs 0/3", "[0] epochs 3/3", "[0]   steps 2/3"]


def test_the_cursor_stands_where_the_rank_has_put_it() -> None:
    """In a debugger's prompt, after an arrow key."""
    with ranks(1) as job:
        job.write(0, b"(Pdb) prit x\x1b[4D")
        job.wait()
        assert job.shown.lines == ["[0] (Pdb) prit x"]
        assert job.shown.cursor == len("[0] (Pdb) pri") - 1
        job.write(0, b"\x1b[1@n")
        job.wait()
        assert job.shown.lines == ["[0] (Pdb) prnit x"]


def test_more_rows_than_the_terminal_has_are_cut() -> None:
    with ranks(8) as job:
        for rank in range(8):
            job.write(rank, HIDE + b"\n".join(b"row %d" % row for row in range(12)))
        job.wait()
        shown = job.shown.lines
        assert len(shown) <= ROWS - 4
        assert {row[:3] for row in shown} == {f"[{rank}]" for rank in range(8)}
        job.write(0, b"\n" + SHOW)
        job.close()
        for rank in range(8):
            assert [row for row in job.shown.lines if row.startswith(f"[{rank}]")] == [
                f"[{rank}] row {row}" for row in range(12)
            ]


NOISE = st.lists(
    st.one_of(
        st.sampled_from(
            [b"\x1b[A", b"\x1b[5A", b"\x1b[2K", b"\x1b[H", b"\x1b[2J", b"\x1b[?1049h", b"\x1b[?1049l", b"\r"]
        ),
        st.sampled_from(
            [b"\x1b[999;999H", b"\x1bM", b"\x1b[3S", b"\x1b[5L", b"\x1bc", b"\x1b[1;5r", HIDE, SHOW, b"\x1b[u"]
        ),
        st.sampled_from([b"\n", b"noise", b"\x1b", b"[", b"\x08" * 9, b"\x0c", b"\x0b", "日本".encode(), b"x" * 150]),
        st.binary(max_size=8),
    ),
    max_size=30,
)


@examples(200)
@given(NOISE, st.integers(0, 5))
def test_whatever_a_rank_writes_the_lines_of_others_stay(noise: list[bytes], pause: int) -> None:
    with ranks(3) as job:
        for step, piece in enumerate(noise):
            job.write(0, piece)
            job.write(1, b"line %d\n" % step)
            if pause and not step % pause:
                job.wait()
        job.write(2, b"last\n")
        job.wait()
        job.close()
        lines = job.shown.lines
        assert [line for line in lines if line.startswith("[1]")] == [f"[1] line {step}" for step in range(len(noise))]
        assert lines.count("[2] last") == 1


def test_what_cannot_be_drawn_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are an extra: where they fail, output goes on as it would without them."""
    monkeypatch.setattr(Rows, "_write", lambda *_: 1 / 0)
    with ranks(2) as job:
        job.write(0, b"\x1b[Kfirst\n")
        job.write(1, b"second\n")
        job.wait()
        job.close()
        assert job.shown.lines == ["[0] first", "[1] second"]


@pytest.mark.parametrize("broken", ["live", "cursor", "is_plain"])
def test_a_model_that_fails_later_ends_nothing(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    with ranks(2) as job:
        job.write(0, b"\x1b[2Kbar\r")
        job.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Rows, broken, property(lambda _: 1 / 0))
            job.write(1, b"second\n")
            job.wait()
            job.write(0, b"\x1b[2Kbar 2\r")
            job.wait()
            job.wait()
        job.write(0, b"\nlast\n")
        job.close()
        lines = job.shown.lines
        assert [line for line in lines if line.startswith("[1]")] == ["[1] second"]
        assert [line for line in lines if "last" in line] == ["[0] last"]
        assert any("bar 2" in line for line in lines)


@pytest.mark.parametrize("broken", ["closed_row", "shown_width"])
def test_rows_that_cannot_be_drawn_are_lines(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    with ranks(2) as job:
        job.screen.set_status("hosts", "waiting for node2", since=time.monotonic())
        job.write(1, b"Continue? ")
        job.wait()
        monkeypatch.setattr(f"saferun.console.pane.{broken}", lambda *_: 1 / 0)
        job.write(0, b"first\n")
        for _ in range(10):
            job.wait()
        assert job.shown.lines == ["[0] first", "[1] Continue?"]
        job.write(0, b"second\n")
        job.close()
        assert job.shown.lines == ["[0] first", "[1] Continue?", "[0] second"]


def test_what_was_begun_is_not_lost_where_drawing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(1) as job:
        job.write(0, b"begun")
        monkeypatch.setattr(Rows, "feed", lambda *_: 1 / 0)
        job.write(0, b"\x1b[K, ended\n")
        job.close()
        assert job.shown.lines == ["[0] begun", "[0] , ended"]


def test_a_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: object) -> bytes:
        calls.append(1)
        raise RuntimeError

    monkeypatch.setattr(Rows, "feed", fail)
    with ranks(1) as job:
        for _ in range(5):
            job.write(0, b"\x1b[Kline\n")
        job.close()
        assert len(calls) == 1
        assert job.shown.lines == ["[0] line"] * 5


def test_a_line_of_more_rows_than_are_live_is_whole() -> None:
    text = b"%05d " * 1000 % tuple(range(1000))
    for size in (3_900, 6_000):
        with ranks(1) as job:
            job.write(0, text[:size])
            job.wait()
            job.write(0, b"\x1b[K\nnext\n")
            job.close()
            shown = " ".join(line.removeprefix("[0]") for line in job.shown.lines if line != "[0] next")
            assert shown.replace(" ", "") == text[:size].decode().replace(" ", "")


def test_a_flood_of_movements_becomes_lines() -> None:
    """To draw costs time, which the loop needs for other ranks."""
    with ranks(2) as job:
        job.write(0, b"".join(b"\x1b[2Kstep %d\r\x1b[A" % step for step in range(10_000)) + b"\n")
        job.write(1, b"still here\n")
        job.wait()
        job.close()
        lines = job.shown.lines
        assert "[1] still here" in lines
        assert "[0] step 9999" in lines


def test_without_a_terminal_a_bar_is_a_line_now_and_then() -> None:
    with Reader.pipe() as reader, console(reader) as screen:
        for pane in screen.panes:
            pane._bar_interval_s = 30.0
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(HIDE + bars(0, first=True), 0.0)
        for step in range(1, 100):
            screen.tick(float(step))
            stream.feed(bars(step, first=False), float(step))
        stream.feed(b"\n" + SHOW, 100.0)
        stream.close()
        drain(screen, reader)
        lines = reader.taken.decode().splitlines()
        assert not any("\x1b[2K" in line or "\x1b[1A" in line for line in lines)
        steps = [int(line.rstrip("%").split()[-1]) for line in lines if "task0" in line]
        assert steps == [0, 30, 60, 90, 99]
        assert os.linesep.join(lines).count("task2") == len(steps)


def test_there_are_never_more_live_rows_than_the_terminal_has() -> None:
    """What has scrolled away cannot be erased: each refresh once left a copy of the bars that did not fit."""
    with Reader.terminal(10, COLUMNS) as reader, console(reader) as screen:
        job = Ranks(14, reader, screen)
        shown = Shown(COLUMNS, 10)
        for step in range(5):
            for rank in range(14):
                job.write(rank, b"\rbar %d" % step)
            job.wait()
        drain(screen, reader)
        shown.feed(reader.taken)
        assert shown.lines == [f"[{rank}] bar 4" for rank in range(6)]
        job.close()


def test_what_is_typed_behind_a_prompt_wraps() -> None:
    """All of a long answer is to be seen while it is typed, not only its last character."""
    with ranks(1) as job:
        answer = b"0123456789" * 25
        job.write(0, b"name? " + answer)
        job.wait()
        assert "".join(line.removeprefix("[0] ") for line in job.shown.lines) == f"name? {answer.decode()}"
        job.write(0, b"\ndone\n")
        job.close()
        assert job.shown.lines[-1] == "[0] done"
        assert "".join(job.shown.lines[:-1]) == f"[0] name? {answer.decode()}"


def test_of_a_long_unfinished_line_the_newest_rows_are_drawn() -> None:
    """It was drawn in full with each line of any rank: a megabyte each time, and ranks waited for the terminal."""
    with ranks(2) as job:
        dots = b"".join(b"%04d." % number for number in range(5000))
        width = COLUMNS - len("[0] ")
        full = len(dots) // width * width
        newest = [f"[0] {dots[at : at + width].decode()}" for at in range(full - 7 * width, len(dots), width)]
        job.write(0, dots)
        job.wait()
        assert job.shown.lines == newest
        for _ in range(10):
            job.write(1, b"loss\n")
            assert job.screen.out.target.waiting_bytes < 2 * 8 * COLUMNS
            assert job.shown.lines[-8:] == newest
        job.write(0, b"end\n")
        job.close()
        assert job.shown.lines[:10] == ["[1] loss"] * 10
        assert "".join(job.shown.lines[10:]) == f"[0] {dots.decode()}end"


def test_of_a_growing_line_only_the_newest_row_changes() -> None:
    with ranks(1) as job:
        job.write(0, b"." * 3000)
        seen = []
        for _ in range(5):
            job.write(0, b"x")
            job.wait()
            seen.append(job.shown.lines)
        assert len({tuple(lines[:-1]) for lines in seen}) == 1
        assert [lines[-1].count("x") for lines in seen] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", ["ü", "日本", "✓ok", "🚀"])
@pytest.mark.parametrize("more", range(6))
def test_no_character_of_a_long_unfinished_line_is_cut(text: str, more: int) -> None:
    with ranks(1) as job:
        whole = "a" * more + text * 3000
        job.write(0, whole.encode())
        job.wait()
        lines = job.shown.lines
        shown = "".join(line.removeprefix("[0] ") for line in lines)
        assert 5 <= len(lines) <= 8
        assert whole.endswith(shown)


@pytest.mark.parametrize("more", range(8))
@pytest.mark.parametrize("begin", [b"\x1b[32m", b"\x1b[1m\x1b[0m\x1b[31m\x1b[0;32m", b"\x1b[31mred\n\x1b[32m"])
def test_a_long_unfinished_line_keeps_its_colour(begin: bytes, more: int) -> None:
    with ranks(1) as job:
        job.write(0, begin + b"." * (2800 + more))
        job.wait()
        assert {color for *_, color in job.shown.colored[-8:]} == {"green"}
        # However the cut is placed, none of a sequence is shown as text.
        job.write(0, b"\x1b[31m.\x1b[0m\x1b[34m" * 2000)
        job.wait()
        shown = job.shown
        assert {text.strip(".") for _, _, text, _ in shown.colored} <= {"", "red"}
        assert shown.is_plain


def test_a_colour_of_the_previous_line_is_that_of_a_long_unfinished_one() -> None:
    with ranks(1) as job:
        job.write(0, b"\x1b[32mgreen\n" + b"." * 5000)
        job.wait()
        assert {color for *_, color in job.shown.colored[-8:]} == {"green"}


def test_a_long_line_that_began_with_a_carriage_return_is_bounded_as_well() -> None:
    with ranks(2) as job:
        job.write(0, b"epoch 1\rstep 1\r" + b"." * 100_000)
        job.wait()
        assert job.screen.out.target.waiting_bytes < 2 * 8 * COLUMNS
        assert len(job.shown.lines) == 8
        job.write(0, b"\r" + "█".encode() * 200)
        job.wait()
        assert len(job.shown.lines) == 1


def test_where_the_prefix_takes_the_whole_width_a_long_unfinished_line_is_one_row() -> None:
    with Reader.terminal(ROWS, 4) as reader, console(reader) as screen:
        job = Ranks(1, reader, screen)
        job.write(0, b"." * 100_000 + b"x")
        job.wait()
        assert screen.out.target.waiting_bytes < 100
        shown = Shown(4, ROWS)
        drain(screen, reader)
        shown.feed(reader.taken)
        assert shown.lines == ["[0]x"]


def test_a_colour_that_a_rank_leaves_set_is_its_own() -> None:
    """It once coloured the lines of saferun, and the shell after the end."""
    with ranks(2) as job:
        job.write(0, b"\x1b[31mred\nstill red\n")
        job.write(1, b"other\n")
        job.write(0, b"no longer\x1b[0m\nplain\n\x1b[1;44munfinished")
        job.wait()
        job.write(1, b"beside it\n")
        job.close()
        assert job.shown.colored == [
            *(("[0] ", "default", "red", "red"), ("[0] ", "default", "still red", "red")),
            *(("[1] ", "default", "other", "default"), ("[0] ", "default", "no longer", "red")),
            *(("[0] ", "default", "plain", "default"), ("[1] ", "default", "beside it", "default")),
            ("[0] ", "default", "unfinished", "default"),
        ]
        assert job.shown.is_plain


def test_a_status_is_one_row_below_all_others_that_changes_in_place() -> None:
    with ranks(2) as job:
        job.write(0, b"\rbar 1")
        job.wait()
        assert job.screen.set_status("hang", "the job hangs", since=time.monotonic() - 65.5)
        assert job.shown.lines == ["[0] bar 1", "saferun: the job hangs (1 min 05 s)"]
        assert job.shown.cursor == len("[0] bar 1")
        job.write(1, b"a line\n")
        job.write(0, b"\rbar 2")
        job.wait()
        assert job.shown.lines == ["[1] a line", "[0] bar 2", "saferun: the job hangs (1 min 05 s)"]
        assert job.screen.deadline() is not None
        job.screen.set_status("hang", "x" * 200, since=time.monotonic() - 7200.5)
        assert job.shown.lines[-1] == f"{('saferun: ' + 'x' * 200)[: COLUMNS - 15]}… (2 h 00 min)"
        assert not job.screen.set_status("hang", None)
        assert job.shown.lines == ["[1] a line", "[0] bar 2"]
        job.write(0, b"\n")
        job.close()
        assert job.shown.lines == ["[1] a line", "[0] bar 2"]


def test_a_status_that_is_over_goes_by_itself() -> None:
    with ranks(1) as job:
        assert job.screen.set_status("retry", "starting again", until=time.monotonic() + 60)
        assert job.shown.lines == ["saferun: starting again (1 min 00 s left)"]
        job.screen.set_status("retry", "starting again", until=time.monotonic() - 1)
        job.screen.tick(time.monotonic() + 2)
        assert job.shown.lines == []
        job.write(0, b"line\n")
        assert job.shown.lines == ["[0] line"]


def test_a_status_is_gone_at_the_end() -> None:
    with ranks(1) as job:
        job.screen.set_status("hosts", "waiting for node2", since=time.monotonic())
        job.write(0, b"line\n")
        job.close()
        job.screen.release()
        job.screen.print_message("saferun: over")
        assert job.shown.lines == ["[0] line", "saferun: over"]


def test_a_status_that_fails_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[bytes]:
        raise RuntimeError

    monkeypatch.setattr("saferun.console.status_line.status_rows", fail)
    with ranks(1) as job:
        job.write(0, b"\rbar")
        job.wait()
        job.screen.set_status("hang", "the job hangs", since=1.0)
        job.write(0, b"\rbar 2")
        job.wait()
        assert job.shown.lines == ["[0] bar 2"]


def test_without_a_terminal_there_is_no_status() -> None:
    with Reader.pipe() as reader, console(reader) as screen:
        assert not screen.set_status("hang", "the job hangs", since=1.0)
        assert screen.deadline() is None
        drain(screen, reader)
        assert reader.taken == b""
