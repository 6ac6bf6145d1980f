"""Where the console's bytes go: readers that are slow, gone, or the same for both streams."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console import target as target_module
from saferun.console.console_stream import ConsoleStream
from saferun.console.rank_stream import LineFilter, RankStream
from saferun.console.screen import Screen
from saferun.console.target import MOST_WAITING_BYTES, Target
from saferun.files.file_stream import FRESH, LAZY
from tests.direct_files import DirectFiles
from tests.unit.console.reader import Reader
from tests.unit.console.terminal_model import Terminal

WHERE = "all of it is in /runs/1"
NOTE = re.compile(rb"saferun: this output is read too slowly: (\d+) lines skipped here; all of it is in /runs/1")
SMALL_BYTES = 2000


def read_all(target: Target, reader: Reader) -> bytes:
    while True:
        wrote = target.flush()
        took = reader.take(1 << 16)
        if target.is_empty and not took:
            return reader.taken
        assert wrote or took, "the target stands still"


def states_of(target: Target) -> tuple[str, ...]:
    """What stands in the way of the ranks, in words."""
    return tuple(word for word, holds in (("full", target.is_full), ("broken", target.is_broken)) if holds)


def close(target: Target, reader: Reader) -> None:
    if target.fd != reader.fd:
        os.close(target.fd)


# --------------------------------------------------------------------------------------------------------------------
# Slow readers


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(0, 3000)), max_size=60))
def test_a_slow_reader_gets_whole_lines_and_the_right_count_of_the_rest(steps: list[tuple[int, int, int]]) -> None:
    """Every line is either shown or counted, in order, whatever the reader does meanwhile."""
    with pytest.MonkeyPatch.context() as patch, Reader.pipe() as reader:
        patch.setattr(target_module, "MOST_WAITING_BYTES", SMALL_BYTES)
        patch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"")
        number = 0
        for width, lines, sip in steps:
            stream.feed(b"".join(b"%d %s\n" % (number + i, b"x" * width) for i in range(lines)), now=0.0)
            number += lines
            screen.flush()
            if sip:
                reader.take(sip)
        shown = read_all(screen.out.target, reader)
        close(screen.out.target, reader)
    assert shown == b"" or shown.endswith(b"\n")
    count = 0
    for line in shown.splitlines():
        if note := NOTE.fullmatch(line):
            assert int(note[1]) > 0
            count += int(note[1])
        else:
            assert re.fullmatch(rb"%d x*" % count, line)
            count += 1
    assert count == number


def test_memory_stays_bounded_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of output behind a stopped pager."""
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"")
        text = (b"x" * 99 + b"\n") * 1000
        for _ in range(200):
            stream.feed(text, now=0.0)
            screen.flush()
        assert sum(map(len, screen.out.target._waiting)) <= MOST_WAITING_BYTES + len(text)
        assert not stream.is_full  # the ranks go on
        shown = read_all(screen.out.target, reader)
        close(screen.out.target, reader)
    notes = NOTE.findall(shown)
    assert notes
    assert shown.count(b"\n") - len(notes) + sum(map(int, notes)) == 200_000


CHUNK = (b"x" * 99 + b"\n") * 2000


def fill(screen: Screen, stream: ConsoleStream) -> int:
    """What ranks write that wait when they are to wait. Returns how many chunks that is."""
    chunks = 0
    while not stream.is_full:
        stream.feed(CHUNK, now=0.0)
        screen.flush()
        chunks += 1
        assert chunks < 1000, "nothing makes the ranks wait"
    return chunks


def test_a_burst_of_any_size_reaches_a_reader_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """``saferun … | tee log``: every rank prints its model at once, and nothing is skipped."""
    most = 2 * len(CHUNK)
    monkeypatch.setattr(target_module, "MOST_WAITING_BYTES", most)
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"")
        chunks = 0
        for _ in range(50):
            chunks += fill(screen, stream)
            moment += 0.1
            screen.tick(moment)
            reader.take(1 << 18)
            screen.flush()
        assert sum(map(len, screen.out.target._waiting)) <= most + len(CHUNK)
        assert read_all(screen.out.target, reader) == CHUNK * chunks
        close(screen.out.target, reader)


@pytest.mark.parametrize("sip_bytes", [0, 4096])
def test_ranks_wait_for_a_slow_reader_until_it_is_known_to_be_slow(
    monkeypatch: pytest.MonkeyPatch, sip_bytes: int
) -> None:
    """A pager that has been stopped, or a line over a modem: two seconds once, and nothing for the rest of the run."""
    monkeypatch.setattr(target_module, "MOST_WAITING_BYTES", 2 * len(CHUNK))
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    with Reader.pipe() as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"")
        chunks = fill(screen, stream)
        waits = [0.0]
        for _ in range(200):
            due = screen.deadline()
            assert due is not None
            moment = min(moment + 0.1, due)
            reader.take(sip_bytes)
            screen.flush()
            screen.tick(moment)
            if stream.is_full:
                waits.append(moment)
            else:
                stream.feed(CHUNK, now=moment)
                chunks += 1
        assert max(waits) < target_module.JUDGED_AFTER_S
        shown = read_all(screen.out.target, reader)
        skipped = sum(map(int, NOTE.findall(shown)))
        assert skipped
        assert shown.count(CHUNK[:100]) + skipped == chunks * CHUNK.count(b"\n")
        # It has read everything: it is waited for again.
        assert fill(screen, stream) > 1
        assert not NOTE.search(read_all(screen.out.target, reader)[len(shown) :])
        close(screen.out.target, reader)


def test_however_much_came_at_once_ranks_do_not_wait_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipes of ranks that have ended are read to their end, and the next attempt writes, too."""
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=True, where=lambda: WHERE)
        target.put(b"x" * 3 * MOST_WAITING_BYTES + b"\n")
        target.flush()
        assert states_of(target) == ("full",)
        moment += target_module.JUDGED_AFTER_S
        assert states_of(target) == ()
        assert not target.has_room(100)
        close(target, reader)


def test_a_time_in_which_saferun_was_stopped_is_not_held_against_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, a frozen container, a machine that was suspended: there was nothing to read."""
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=True, where=lambda: WHERE)
        target.put(b"x" * 2 * MOST_WAITING_BYTES + b"\n")
        moment += 60.0
        assert states_of(target) == ("full",)
        assert target.has_room(100)
        moment += target_module.JUDGED_AFTER_S
        assert states_of(target) == ()
        close(target, reader)


def test_a_line_whose_end_was_not_read_for_want_of_room_is_not_cut() -> None:
    """There is room again, and its rest has not been read: the line is not shown as one without an end."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=False, where=lambda: WHERE)
        console = ConsoleStream(screen.out, b"[0] ")
        stream = RankStream(read_end, 0, is_stderr=False, files=(), console=console, line_filter=None)
        os.write(write_end, b"half of ")
        stream.read(0.0)
        stream.is_paused = True
        os.write(write_end, b"a line\n")
        screen.tick(60.0)
        stream.is_paused = False
        stream.read(60.0)
        assert read_all(screen.out.target, reader) == b"[0] half of a line\n"
        close(screen.out.target, reader)
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_has_become_fast_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tee`` to a disk that was busy for five seconds, while the ranks never stop writing."""
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    monkeypatch.setattr(target_module, "MOST_WAITING_BYTES", 2 * len(CHUNK))
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"")
        fill(screen, stream)
        for step in range(100):
            moment += 0.1
            screen.tick(moment)
            if step > 50:
                reader.take(1 << 18)
                screen.flush()
            for _ in range(10):
                if not stream.is_full:
                    stream.feed(CHUNK, now=moment)
                    screen.flush()
        assert screen.out.target.judged_at is not None  # it never had read all of it
        assert stream.is_full
        close(screen.out.target, reader)


def test_without_files_nothing_is_skipped_and_the_ranks_wait() -> None:
    """There is no other copy."""
    with Reader.pipe(65536) as reader:
        target = Target(reader.fd, skipping=False, where=str)
        text = b"y" * 65535 + b"\n"
        put = 0
        while not target.is_full:
            target.put(text)
            target.flush()
            put += 1
            assert put < 1000
        shown = read_all(target, reader)
        assert shown == text * put
        assert states_of(target) == ()
        close(target, reader)


def test_a_fast_reader_gets_everything_however_large_a_chunk_becomes() -> None:
    """A chunk of nothing but line ends grows by its prefixes; that is no reader's fault."""
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        prefix = b"[a-host-with-a-long-name:0] "
        count = MOST_WAITING_BYTES // len(prefix)
        ConsoleStream(screen.out, prefix).feed(b"\n" * count, now=0.0)
        assert read_all(screen.out.target, reader) == (prefix + b"\n") * count
        close(screen.out.target, reader)


def test_saferuns_own_words_are_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagnosis stands nowhere else; the lines of the ranks do."""
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe(1 << 20) as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        stream = ConsoleStream(screen.out, b"[0] ")
        for _ in range(100):
            stream.feed(b"z" * 99_999 + b"\n", now=0.0)
            screen.flush()
        screen.print_message("saferun: rank 0 failed first")
        shown = read_all(screen.err.target, reader)
        close(screen.out.target, reader)
    assert NOTE.search(shown)
    assert b"\nsaferun: rank 0 failed first\n" in shown


def test_skipping_on_a_terminal_spoils_no_line_that_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of bars at the bottom must be where the erasing believes them to be."""
    monkeypatch.setattr(target_module, "MOST_WAITING_BYTES", SMALL_BYTES)
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    terminal = Terminal(columns=100, rows=24)
    with Reader.terminal() as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        streams = [ConsoleStream(screen.out, b"[%d] " % i) for i in range(6)]
        streams[0].feed(b"\rbar", now=0.0)
        screen.tick(1.0)
        number = 0
        for turn in range(30):
            for _ in range(20):
                streams[5].feed(b"line %d\n" % number, now=2.0 + turn)
                number += 1
            if turn == 10:
                for stream in streams[1:5]:
                    stream.feed(b"\rbar", now=2.0 + turn)
            screen.tick(3.0 + turn)
            if turn % 10 == 9:
                read_all(screen.out.target, reader)
        for stream in streams:
            stream.close()
        terminal.feed(read_all(screen.out.target, reader))
        close(screen.out.target, reader)
    count = 0
    for line in terminal.lines[: -len(streams)]:
        if note := NOTE.fullmatch(line.encode()):
            count += int(note[1])
        elif line.startswith("[5]"):
            assert line == f"[5] line {count}"
            count += 1
        else:
            assert line.endswith("bar"), line


# --------------------------------------------------------------------------------------------------------------------
# Streams of which log files have a copy


def test_a_slow_reader_holds_up_only_streams_that_no_log_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run directory: with ``-t 0:3`` rank 0 goes on, and rank 1 waits, as both do under torchrun."""
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=False, where=lambda: WHERE)
        target.skips_teed = True
        while not target.is_full:
            target.put(b"x" * 65535 + b"\n")
            target.flush()
        target.judge()
        assert not target.is_full_for(is_teed=True)
        assert target.is_full
        assert not target.has_room(10, is_teed=True)
        target.skip(2)
        assert target.has_room(10)
        target.put(b"untouched\n")
        taken = read_all(target, reader)
        assert b"\nuntouched\n" in taken
        assert [int(count) for count in NOTE.findall(taken)] == [2]
        close(target, reader)


@pytest.mark.parametrize("end", [b"\n", b"\x1b[K\n", b"\x1b[K\r", b"\x1b[1A\n"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_memory_stays_bounded_whatever_a_stream_writes_that_a_log_file_has(
    monkeypatch: pytest.MonkeyPatch, end: bytes, *, is_terminal: bool
) -> None:
    """Without a run directory: what moves the cursor takes another way to the console, and all of it was queued."""
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    with Reader.terminal(24, 80) if is_terminal else Reader.pipe() as reader:
        screen = Screen(reader.fd, reader.fd, skipping=False, where=lambda: WHERE, bar_interval_s=0.1)
        target = screen.out.target
        target.is_terminal = is_terminal
        screen.allow_skipping(False, teed=True)
        stream = ConsoleStream(screen.out, b"[0] ", is_teed=True)
        text = (b"x" * 99 + end) * 1000
        for turn in range(120):
            stream.feed(text, now=turn / 10)
            screen.flush()
            screen.tick(turn / 10 + 0.1)
        assert target.waiting_bytes <= MOST_WAITING_BYTES + 2 * len(text)
        stream.close()
        close(target, reader)


def test_no_stream_is_skipped_while_its_log_file_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the console may be the only place for its lines."""
    monkeypatch.setattr(target_module, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe() as reader:
        screen = Screen(reader.fd, reader.fd, skipping=False, where=lambda: WHERE)
        target = screen.out.target
        for works in (True, False):
            screen.allow_skipping(False, teed=works)
            while not target.is_full:
                target.put(b"x" * 65535 + b"\n")
                target.flush()
            target.judge()
            assert target.is_full_for(is_teed=True) is not works
        close(target, reader)


# --------------------------------------------------------------------------------------------------------------------
# Readers that are gone


@pytest.mark.parametrize("skipping", [True, False])
def test_a_reader_that_goes_away_stops_nobody(*, skipping: bool) -> None:
    """``saferun … | head``: what is left goes nowhere, and the ranks go on."""
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=skipping, where=lambda: WHERE)
        target.put(b"one\n")
        target.flush()
        reader.go_away()
        target.put(b"two\n")
        target.flush()
        assert target.is_broken
        target.put(b"three\n")
        assert target.is_empty
        assert not target.flush()
        close(target, reader)


def test_a_reader_that_goes_away_while_the_ranks_wait_for_it_sets_them_free() -> None:
    """``saferun --run-dir none … | less``, and then q: ranks that were held back must go on."""
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=False, where=str)
        while not target.is_full:
            target.put(b"x" * 65535 + b"\n")
            target.flush()
        reader.go_away()
        target.flush()
        assert states_of(target) == ("broken",)
        close(target, reader)


def test_a_device_that_takes_nothing_is_given_up() -> None:
    """``> /dev/full``: ENOSPC forever. What it misses is counted, as for a file on a full disk."""
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        target = Target(fd, skipping=True, where=lambda: WHERE)
        target.put(b"one\n")
        target.flush()
        assert target.is_broken
        assert target.is_empty
        target.put(b"two\nthree\n")
        target.skip(4)
        assert target.is_empty
        assert not target.flush()
        assert target.refusal == "No space left on device"
        assert target.unread_text == f"7 lines are missing there; {WHERE}"
        if target.fd != fd:
            os.close(target.fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.ENOBUFS])
def test_a_pipe_for_which_there_is_no_memory_now_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A memory cgroup that is full charges for a pipe's pages, too: the console is not silent from then on."""
    moment = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    with Reader.pipe() as reader:
        target = Target(reader.fd, skipping=True, where=lambda: WHERE)

        def refuse(_fd: int, _blocks: object) -> int:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse)
            target.put(b"one\n")
            assert not target.flush()
        assert states_of(target) == ()
        assert target.retry_at is not None
        assert not target.waits_for_room  # there is room all the while, and the loop would turn without end
        assert not target.flush()
        moment = target.retry_at
        assert target.flush()
        assert reader.take(100) == b"one\n"
        close(target, reader)


def test_a_pipe_that_nobody_reads_any_more_is_found_out_on_the_first_write() -> None:
    """Its reader may be gone before saferun starts."""
    with Reader.pipe() as reader:
        reader.go_away()
        target = Target(reader.fd, skipping=True, where=lambda: WHERE)
        target.put(b"one\n")
        target.flush()
        assert target.is_broken
        close(target, reader)


# --------------------------------------------------------------------------------------------------------------------
# Descriptors


def test_the_descriptor_itself_stays_as_it_is() -> None:
    """O_NONBLOCK belongs to the open file: the shell, and whoever else writes there, would get EAGAIN."""
    for make in (Reader.pipe, Reader.terminal):
        with make() as reader:
            before = fcntl.fcntl(reader.fd, fcntl.F_GETFL)
            target = Target(reader.fd, skipping=True, where=lambda: WHERE)
            target.put(b"one\n")
            read_all(target, reader)
            assert fcntl.fcntl(reader.fd, fcntl.F_GETFL) == before
            assert not before & os.O_NONBLOCK
            close(target, reader)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the target's own copy lives as long as the process
def test_a_socket_is_written_without_waiting_and_left_blocking() -> None:
    """Some schedulers give a socket for stdout."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = Target(ours.fileno(), skipping=True, where=lambda: WHERE)
        target.put(b"x" * (4 << 20) + b"\n")
        target.flush()
        assert os.get_blocking(ours.fileno())
        theirs.setblocking(False)
        sips = 0
        got = 0
        while got < (4 << 20) + 1:
            got += len(theirs.recv(1 << 20))
            sips += 1
            target.flush()
        assert sips > 1
        assert target.is_empty


@pytest.mark.parametrize(
    ("make", "count"), [(Reader.pipe, 5000), (partial(Reader.terminal, raw=True), 50)], ids=["pipe", "terminal"]
)
def test_what_cannot_be_opened_again_is_written_with_care(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Reader], count: int
) -> None:
    """After ``su`` a pipe is another user's: small writes while there is room. A terminal may have no name, either.

    That one is written to without knowing how much room there is: here enough for all.
    """

    def refuse(*_: object) -> int:
        raise PermissionError

    with make() as reader:
        monkeypatch.setattr(target_module, "_is_own_terminal", os.isatty)
        monkeypatch.setattr(os, "open", refuse)
        target = Target(reader.fd, skipping=False, where=str)
        monkeypatch.undo()
        assert target.fd == reader.fd
        text = b"".join(b"line %d\n" % i for i in range(count))
        target.put(text)
        assert read_all(target, reader) == text


def test_one_file_behind_both_streams_has_one_queue(tmp_path: Path) -> None:
    """``2>&1``: a line of one must not land within a line of the other."""
    with Reader.pipe() as reader, Reader.pipe() as other:
        twin = os.dup(reader.fd)
        screen = Screen(reader.fd, twin, skipping=True, where=lambda: WHERE)
        assert screen.out is screen.err
        assert len(screen.panes) == 1
        apart = Screen(reader.fd, other.fd, skipping=True, where=lambda: WHERE)
        assert apart.out is not apart.err
        assert len(apart.panes) == 2
        for pane in (*screen.panes, *apart.panes):
            os.close(pane.target.fd)
        os.close(twin)
    path = tmp_path / "log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    first, second = os.open(path, flags), os.open(path, flags)
    assert len(Screen(first, second, skipping=True, where=lambda: WHERE).panes) == 1
    os.close(first)
    os.close(second)


def test_a_regular_file_is_never_waited_for(tmp_path: Path) -> None:
    """Epoll takes no regular files; they are always ready."""
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    target = Target(fd, skipping=True, where=lambda: WHERE)
    target.put(b"x" * (9 << 20) + b"\n")
    assert not target.waits_for_room
    os.close(fd)


# --------------------------------------------------------------------------------------------------------------------
# One rank's stream


def test_a_stream_goes_to_files_console_and_filter(tmp_path: Path) -> None:
    """Raw bytes in the files, lines on the console, matching lines in the filter file."""
    warnings: list[str] = []
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with Reader.pipe() as reader:
        screen = Screen(reader.fd, reader.fd, skipping=True, where=lambda: WHERE)
        files = DirectFiles()
        files.on_failed = lambda path, *_: warnings.append(path)
        sink = files.open(str(tmp_path / "filtered"), FRESH)
        stream = RankStream(
            read_end,
            0,
            is_stderr=True,
            files=tuple(files.open(str(tmp_path / name), LAZY) for name in "ab"),
            console=ConsoleStream(screen.out, b"[0] "),
            line_filter=LineFilter(sink, ("loss",), "[w0]:"),
        )
        assert stream.read(0.0) == -1
        text = b"loss 1\n\rbar\rloss of signal\nother\n\xff last"
        os.write(write_end, text)
        assert stream.read(0.0) == len(text)
        os.close(write_end)
        assert stream.read(0.0) == 0
        assert stream.bytes_read == len(text)
        assert stream.last_lines(2) == ("other", "� last")
        stream.close()
        shown = read_all(screen.out.target, reader)
        close(screen.out.target, reader)
    sink.close()
    assert shown == b"[0] loss 1\n[0] loss of signal\n[0] other\n[0] \xff last\n"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == text
    assert (tmp_path / "filtered").read_bytes() == b"[w0]:loss 1\n[w0]:loss of signal\n"
    assert not warnings


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    """The console goes on."""
    warnings: list[str] = []
    path = tmp_path / "stdout.log"
    path.symlink_to("/dev/full")
    files = DirectFiles()
    files.on_failed = lambda path, error, _: warnings.append(f"{path}: {error.strerror}")
    sink = files.open(str(path), FRESH)
    for _ in range(3):
        sink.write(b"one\n")
    sink.close()
    assert warnings == [f"{path}: No space left on device"]


def test_a_file_that_cannot_be_made_is_told_once(tmp_path: Path) -> None:
    """As a full disk."""
    warnings: list[str] = []
    (tmp_path / "file").touch()
    files = DirectFiles()
    files.on_failed = lambda path, *_: warnings.append(path)
    sink = files.open(str(tmp_path / "file" / "below"), FRESH)
    sink.write(b"one\n")
    sink.close()
    assert len(warnings) == 1


def test_the_last_lines_are_kept_in_bounded_memory() -> None:
    """However much a rank writes; blank lines do not count."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    stream = RankStream(read_end, 0, is_stderr=True, files=(), console=None, line_filter=None)
    for i in range(2000):
        os.write(write_end, b"line %d %s\n\n  \n" % (i, b"x" * 50))
        stream.read(0.0)
    assert len(stream._last) <= 16 << 10
    assert [line.split()[1] for line in stream.last_lines(3)] == ["1997", "1998", "1999"]
    os.close(write_end)
    stream.close()
