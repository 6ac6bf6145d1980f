"""Lines that overwrite themselves, on pipes and terminals: readable, and no line lost for them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from saferun.console.console_stream import ConsoleStream
from saferun.console.lines import LineAssembler
from saferun.console.prefix import colored
from tests.examples import examples
from tests.unit.console.reader import Reader, console, drain, lines_of, prefix_of
from tests.unit.console.terminal_model import Terminal

# --------------------------------------------------------------------------------------------------------------------
# Bars on a pipe

SECOND = 1024


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 700)), min_size=1, max_size=80))
def test_a_bar_on_a_pipe_shows_at_most_one_line_a_second(updates: list[tuple[int, int]]) -> None:
    """A log with a line for every iteration helps nobody. The clock is the test's, in 1024ths of a second: exact."""
    with Reader.pipe(65536) as reader, console(reader) as screen:
        streams = [ConsoleStream(screen.out, prefix_of(i)) for i in range(3)]
        shown_at: list[list[int]] = [[], [], []]
        newest = [b"", b"", b""]
        now = 0

        def tick() -> None:
            screen.tick(now / SECOND)
            drain(screen, reader)
            for i, text in enumerate(lines_of(reader.taken, 3)):
                for line in text.splitlines():
                    assert line == newest[i], "an old state was shown"
                    shown_at[i].append(now)
            reader.taken = b""

        for count, (i, pause) in enumerate(updates):
            # The loop wakes at the screen's deadline, and not before.
            then = now + pause
            due = screen.deadline()
            while due is not None and int(due * SECOND) <= then:
                now = max(now, int(due * SECOND))
                tick()
                due = screen.deadline()
            now = then
            newest[i] = b"step %d" % count
            streams[i].feed(b"\r" + newest[i], now / SECOND)
            tick()
        for times in shown_at:
            assert all(later - earlier >= SECOND for earlier, later in pairwise(times))
        while (due := screen.deadline()) is not None:
            now = max(now, int(due * SECOND))
            tick()
        for i, stream in enumerate(streams):
            assert bool(shown_at[i]) == bool(newest[i]), "the last state was never shown"
            assert b"".join(stream.live) == newest[i]


def test_a_finished_bar_is_a_line() -> None:
    """Its last state stays, at once."""
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(b"\r 50%", now=0.0)
        stream.feed(b"\r100%\n", now=0.1)
        drain(screen, reader)
        assert reader.taken == b"[0] 100%\n"
        screen.tick(5.0)
        drain(screen, reader)
        assert reader.taken == b"[0] 100%\n"


def test_a_bar_of_a_rank_that_ends_is_shown_once_more() -> None:
    """How far it came is the interesting part of a crash."""
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(b"\r 50%\r 51%", now=0.0)
        stream.close()
        drain(screen, reader)
        assert reader.taken == b"[0]  51%\n"
        screen.tick(9.0)
        drain(screen, reader)
        assert reader.taken == b"[0]  51%\n"


def test_a_line_in_two_pieces_stays_one_whenever_others_were_looked_at() -> None:
    """A second after the first piece of an earlier line, this one has waited for a moment only."""
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(b"early", now=0.0)
        stream.feed(b" line\nnext", now=0.5)
        screen.tick(1.0)
        stream.feed(b" line\nname? ", now=1.1)
        screen.tick(1.5)
        drain(screen, reader)
        assert reader.taken == b"[0] early line\n[0] next line\n"
        screen.tick(2.1)
        drain(screen, reader)
        assert reader.taken == b"[0] early line\n[0] next line\n[0] name? \n"


def test_a_line_whose_rank_is_not_read_waits_for_its_end() -> None:
    """Where files or the console are slow its end may have been written long ago."""
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        held = [True]
        stream.is_held = lambda: held[0]
        stream.feed(b"half a", now=0.0)
        for now in (1.0, 2.0, 3.0):
            screen.tick(now)
        held.clear()
        held.append(False)
        stream.feed(b" line\nname? ", now=3.1)
        screen.tick(4.0)
        screen.tick(4.1)
        drain(screen, reader)
        assert reader.taken == b"[0] half a line\n[0] name? \n"


def test_a_prompt_after_lines_that_end_with_crlf_is_no_bar() -> None:
    r"""A program that ends its lines with \r\n does not overwrite anything; its words are shown once."""
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(b"hello\r\nname? ", now=0.0)
        screen.tick(1.0)
        stream.feed(b"thanks\r\n", now=2.0)
        drain(screen, reader)
        assert reader.taken == b"[0] hello\r\n[0] name? \n[0] thanks\r\n"


# --------------------------------------------------------------------------------------------------------------------
# Onto a terminal

LINES = st.sampled_from([b"one\n", b"two two\n", b"epoch 3\r\n", b"\n", b"a\nb\n", b"a longer line of text\n"])
BARS = st.sampled_from([b"\r 10%", b"\r 50%|#####     |", b"\r100%", b"\r100%\n", b"50%\r", b"\r" + b"#" * 90])
PROMPTS = st.sampled_from([b"wait", b" for ", b"it"])


class Shown(NamedTuple):
    """What one stream of a terminal test has written so far."""

    stream: ConsoleStream
    lines: LineAssembler


@examples(150)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(LINES, BARS, PROMPTS), st.integers(0, 3)), max_size=40),
    st.integers(12, 30),
    st.sampled_from([60, 80]),
    st.booleans(),
)
def test_on_a_terminal_lines_stay_and_bars_stand_below_them(
    steps: list[tuple[int, bytes, int]], rows: int, columns: int, colors: bool
) -> None:
    """Whatever bars do at the bottom, no line above is lost, repeated or broken."""
    terminal = Terminal(columns, rows)
    with Reader.terminal() as reader, console(reader) as screen:
        prefixes = [colored(f"[n:{i}] ", i) if colors else f"[n:{i}] " for i in range(5)]
        shown = [Shown(ConsoleStream(screen.out, prefix.encode()), LineAssembler()) for prefix in prefixes]
        expected_lines: list[str] = []

        def look() -> None:
            drain(screen, reader)
            terminal.feed(reader.taken)
            reader.taken = b""

        def note(i: int, text: bytes) -> None:
            # Not splitlines: it would split at every \r.
            for line in text.removesuffix(b"\n").split(b"\n"):
                visible = f"[n:{i}] {line.decode()}".rstrip()
                # A finished line that is wider than the terminal goes on in the next row.
                expected_lines.extend(visible[k : k + columns].rstrip() for k in range(0, len(visible), columns))

        now = 0.0
        for i, chunk, tenths in steps:
            shown[i].stream.feed(chunk, now)
            if text := shown[i].lines.feed(chunk):
                note(i, text)
            now += tenths / 10
            screen.tick(now)
            look()
            below = terminal.lines[len(expected_lines) :]
            assert terminal.lines[: len(expected_lines)] == expected_lines
            if screen.deadline() is None:
                bars = [(j, s.lines.unfinished.decode()) for j, s in enumerate(shown) if s.lines.unfinished]
                for line, (j, state) in zip(sorted(below), bars, strict=True):
                    visible = f"[n:{j}] {state}"
                    # A bar that is wider than the terminal is cut, and takes one row all the same.
                    assert line[: columns - 1] == visible.rstrip()[: columns - 1]
        for i, item in enumerate(shown):
            item.stream.close()
            if item.lines.unfinished:
                note(i, item.lines.take())
        look()
        assert terminal.lines == expected_lines
        assert terminal.wraps
        assert terminal.at_line_start


def test_more_bars_than_rows_do_not_cost_a_line() -> None:
    """A thousand ranks with a bar each, on a terminal of ten rows: some bars are not shown, every line is."""
    terminal = Terminal(columns=80, rows=10)
    with Reader.terminal() as reader, console(reader) as screen:
        streams = [ConsoleStream(screen.out, b"[%d] " % i) for i in range(40)]
        for i, stream in enumerate(streams):
            stream.feed(b"\r 1%", now=0.0)
            screen.print_message(f"line {i}")
            screen.tick(1.0 + i)
            drain(screen, reader)
        for stream in streams:
            stream.close()
        drain(screen, reader)
        terminal.feed(reader.taken)
        assert [line for line in terminal.lines if line.startswith("line")] == [f"line {i}" for i in range(40)]
        assert {f"[{i}]  1%" for i in range(40)} <= set(terminal.lines)
