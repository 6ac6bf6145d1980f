"""From the ranks' chunks to the console: nothing lost, nothing joined, bars readable."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console.console_stream import ConsoleStream
from saferun.console.lines import LONGEST_LINE_BYTES, LineAssembler, newest_state, newest_states, prefixed
from saferun.console.rows import moves_cursor
from saferun.console.screen import Screen
from tests.unit.console.reader import Reader, console, drain, lines_of, prefix_of

# Bytes as ranks write them, line ends and NULs among them more often than chance would have it. Without bare \r.
PIECES = st.one_of(
    st.binary(max_size=12).map(lambda text: text.replace(b"\r", b"")),
    st.sampled_from([b"\n", b"\n\n", b"\r\n", b"\0", b"\xff\xfe", b"[0] ", b"loss 0.25\n", b"a" * 3000, "ü".encode()]),
)
# What moves a cursor is drawn, which test_drawn_console.py is about.
TEXTS = st.lists(PIECES, max_size=12).map(b"".join).filter(lambda text: not moves_cursor(text, is_terminal=False))


class Fed(NamedTuple):
    """A chunk of one stream."""

    stream: int
    chunk: bytes


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    """The text in chunks; a cut may fall anywhere, also within a character or a line end."""
    positions = sorted({position % (len(text) + 1) for position in cuts} | {0, len(text)})
    return [text[low:high] for low, high in pairwise(positions)]


@st.composite
def interleaved(draw: st.DrawFn, texts: st.SearchStrategy[bytes] = TEXTS) -> tuple[list[bytes], list[Fed]]:
    """Texts of several streams, and their chunks in the order in which they arrive."""
    whole = draw(st.lists(texts, min_size=1, max_size=5))
    waiting = [cut(text, draw(st.lists(st.integers(0, 1 << 16), max_size=6))) for text in whole]
    arrivals: list[Fed] = []
    while any(waiting):
        left = [i for i, chunks in enumerate(waiting) if chunks]
        stream = left[draw(st.integers(0, len(left) - 1))]
        arrivals.append(Fed(stream, waiting[stream].pop(0)))
    return whole, arrivals


def expected(text: bytes) -> bytes:
    return text if not text or text.endswith(b"\n") else text + b"\n"


# --------------------------------------------------------------------------------------------------------------------
# The assembler alone


@given(TEXTS, st.lists(st.integers(0, 1 << 16), max_size=8))
def test_whole_lines_come_out_as_they_went_in(text: bytes, cuts: list[int]) -> None:
    """However the bytes are split; what has no line end stays behind."""
    lines = LineAssembler()
    out = [lines.feed(chunk) for chunk in cut(text, cuts)]
    assert all(piece == b"" or piece.endswith(b"\n") for piece in out)
    assert b"".join(out) + lines.unfinished == text
    assert bool(lines) == (not text.endswith(b"\n") and text != b"")
    assert b"".join(out) + lines.take() == text
    assert not lines
    assert lines.unfinished == b""


@given(
    st.lists(st.sampled_from([b"1%", b"x", b"\r", b"\n", b"\n\n", b"\r\n"]), max_size=30),
    st.lists(st.integers(0, 1 << 16), max_size=8),
)
def test_lines_that_are_skipped_are_counted_and_the_rest_is_kept(parts: list[bytes], cuts: list[int]) -> None:
    """For a reader that is too slow; the next line may find room."""
    skipped, shown = LineAssembler(), LineAssembler()
    for chunk in cut(b"".join(parts), cuts):
        assert skipped.skip(chunk) == shown.feed(chunk).count(b"\n")
        assert skipped.unfinished == shown.unfinished
        assert skipped.overwrites_itself == shown.overwrites_itself


@given(
    st.lists(st.sampled_from([b"1%", b"x", b"\r", b"\n", b"\n\n", b"\r\n", b"y" * 50]), max_size=30),
    st.lists(st.integers(0, 1 << 16), max_size=8),
    st.sampled_from([b"", b"[0] ", b"p\\"]),
)
def test_lines_get_their_prefix_without_a_copy_as_they_do_with_one(
    parts: list[bytes], cuts: list[int], prefix: bytes
) -> None:
    """The pieces together are what the plain way makes of them."""
    quick, plain = LineAssembler(), LineAssembler()
    for chunk in cut(b"".join(parts), cuts):
        text = plain.feed(chunk)
        assert b"".join(quick.feed_prefixed(chunk, prefix)) == (prefixed(prefix, text) if text else b"")
        assert quick.unfinished == plain.unfinished
        assert quick.overwrites_itself == plain.overwrites_itself
        assert bool(quick) == bool(plain)


@pytest.mark.parametrize("chunk_bytes", [100, 65536, 3 << 20])
def test_a_line_without_end_goes_out_in_pieces(chunk_bytes: int) -> None:
    """A stream without line ends must not fill the memory."""
    text = bytes(range(97, 123)) * ((3 << 20) // 26)
    lines = LineAssembler()
    out = []
    for i in range(0, len(text), chunk_bytes):
        out.append(lines.feed(text[i : i + chunk_bytes]))
        assert sum(map(len, lines._pieces[-1:])) <= lines._size <= LONGEST_LINE_BYTES + chunk_bytes
    assert any(out)
    assert b"".join(out) + lines.take() == text


def test_a_bar_is_kept_in_bounded_memory() -> None:
    """A bar that never ends its line is drawn a million times in a week."""
    lines = LineAssembler()
    for i in range(20_000):
        assert lines.feed(b"\r%3d%%|%s" % (i % 100, b"#" * 40)) == b""
        assert len(lines.unfinished) <= 64
    assert sum(map(len, lines._pieces)) <= 64
    assert lines.take() == b" 99%|" + b"#" * 40


@pytest.mark.parametrize(
    ("chunks", "shown", "unfinished"),
    [
        ([b"\r 1%", b"\r 2%"], b"", b" 2%"),
        ([b" 1%\r", b" 2%\r"], b"", b" 2%"),
        ([b" 1%\r 2%\r 3%"], b"", b" 3%"),
        ([b"\r 1%\r100%\n"], b"100%\n", b""),
        ([b"\r 1%", b"\r100%", b"\n"], b"100%\n", b""),
        ([b"\r 1%", b"\n\r 2%"], b" 1%\n", b" 2%"),
        ([b"text\n\r 1%\n"], b"text\n 1%\n", b""),
        ([b"a\r\nb\r\n"], b"a\r\nb\r\n", b""),
        ([b"a\r", b"\nb\r", b"\n"], b"a\r\nb\r\n", b""),
        ([b"a\r\n\r 1%\r 2%\n"], b"a\r\n 2%\n", b""),
        ([b"\r\n"], b"\r\n", b""),
        ([b"\r"], b"", b""),
    ],
)
def test_of_a_line_that_overwrites_itself_the_newest_state_is_shown(
    chunks: list[bytes], shown: bytes, unfinished: bytes
) -> None:
    r"""It is what a person would see; a line that merely ends with \r\n keeps its end."""
    lines = LineAssembler()
    assert b"".join([lines.feed(chunk) for chunk in chunks]) == shown
    assert lines.unfinished == unfinished


@given(st.lists(st.sampled_from([b"1%", b"22%", b"\r", b"\n", b"\r\n", b"x"]), max_size=20), st.integers(0, 99))
def test_how_a_bar_is_split_into_chunks_does_not_matter(parts: list[bytes], seed: int) -> None:
    r"""The pipe cuts where it likes. Whether a finished bar's line ends with \r\n or \n is nobody's concern."""
    text = b"".join(parts)
    whole, split = LineAssembler(), LineAssembler()
    cuts = [seed * i for i in range(6)]
    pieces = b"".join([split.feed(chunk) for chunk in cut(text, cuts)])
    assert pieces.replace(b"\r\n", b"\n") == whole.feed(text).replace(b"\r\n", b"\n")
    assert split.take() == whole.take()


def test_newest_states_leave_other_lines_alone() -> None:
    """Only lines with a bar in them change."""
    assert newest_state(b"a\rb\r") == b"b"
    assert newest_states(b"x\na\rb\ny\r\n\n") == b"x\nb\ny\r\n\n"


@given(st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"")), min_size=1, max_size=5))
def test_every_line_gets_the_prefix_once(lines: list[bytes]) -> None:
    """Also empty ones."""
    text = b"\n".join(lines) + b"\n"
    assert prefixed(b"> ", text) == b"".join(b"> " + line + b"\n" for line in lines)
    assert prefixed(b"> ", text[:-1] + b"!") == prefixed(b"> ", text[:-1] + b"!\n")
    assert prefixed(b"", text) == text


# --------------------------------------------------------------------------------------------------------------------
# Onto a pipe


@given(interleaved(), st.lists(st.integers(1, 9000), min_size=1, max_size=6))
def test_every_byte_of_every_stream_arrives_in_whole_lines(
    case: tuple[list[bytes], list[Fed]], sips: list[int]
) -> None:
    """Through a pipe that is full most of the time and is read in sips of any size."""
    texts, arrivals = case
    with Reader.pipe() as reader, console(reader) as screen:
        streams = [ConsoleStream(screen.out, prefix_of(i)) for i in range(len(texts))]
        for turn, fed in enumerate(arrivals):
            streams[fed.stream].feed(fed.chunk, now=0.0)
            screen.flush()
            reader.take(sips[turn % len(sips)])
        for stream in streams:
            stream.close()
        turn = 0
        while not screen.is_empty:
            screen.flush()
            reader.take(sips[turn % len(sips)])
            turn += 1
        drain(screen, reader)
        assert lines_of(reader.taken, len(texts)) == [expected(text) for text in texts]


@given(interleaved())
def test_two_targets_keep_their_streams_apart(case: tuple[list[bytes], list[Fed]]) -> None:
    """Stdout and stderr in different places: each line where it belongs."""
    texts, arrivals = case
    with Reader.pipe() as out, Reader.pipe() as err, console(out, err) as screen:
        panes = [screen.err if i % 2 else screen.out for i in range(len(texts))]
        streams = [ConsoleStream(pane, prefix_of(i)) for i, pane in enumerate(panes)]
        for fed in arrivals:
            streams[fed.stream].feed(fed.chunk, now=0.0)
        for stream in streams:
            stream.close()
        drain(screen, out, err)
        shown = [lines_of(out.taken, len(texts)), lines_of(err.taken, len(texts))]
        for i, text in enumerate(texts):
            assert shown[i % 2][i] == expected(text)
            assert shown[1 - i % 2][i] == b""


@given(interleaved())
def test_every_byte_arrives_in_a_file(tmp_path: Path, case: tuple[list[bytes], list[Fed]]) -> None:
    """A regular file is always ready and is written to the end."""
    texts, arrivals = case
    path = tmp_path / "out"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        screen = Screen(fd, fd, skipping=True, where=str)
        streams = [ConsoleStream(screen.out, prefix_of(i)) for i in range(len(texts))]
        for fed in arrivals:
            streams[fed.stream].feed(fed.chunk, now=0.0)
        for stream in streams:
            stream.close()
        screen.flush()
        assert screen.is_empty
    finally:
        os.close(fd)
    assert lines_of(path.read_bytes(), len(texts)) == [expected(text) for text in texts]


@given(interleaved(), st.lists(st.booleans(), min_size=1, max_size=10))
def test_text_that_waits_for_its_end_is_shown_once(case: tuple[list[bytes], list[Fed]], ticks: list[bool]) -> None:
    """After a while on a pipe a prompt goes out as a line; no byte of it comes again with the rest."""
    texts, arrivals = case
    with Reader.pipe() as reader, console(reader) as screen:
        streams = [ConsoleStream(screen.out, prefix_of(i)) for i in range(len(texts))]
        now = 0.0
        last = dict.fromkeys(range(len(texts)), b"")
        for turn, fed in enumerate(arrivals):
            streams[fed.stream].feed(fed.chunk, now)
            last[fed.stream] = fed.chunk
            # A \r at the end of a chunk may be a bar's: until the next chunk nobody can tell.
            if ticks[turn % len(ticks)] and not any(chunk.endswith(b"\r") for chunk in last.values()):
                now += 1.0
                screen.tick(now)
            drain(screen, reader)
        for stream in streams:
            stream.close()
        drain(screen, reader)
        shown = lines_of(reader.taken, len(texts))
        assert [text.replace(b"\n", b"") for text in shown] == [text.replace(b"\n", b"") for text in texts]


def test_a_line_of_megabytes_is_one_line_on_a_pipe() -> None:
    """A program that reads it as JSON finds neither a line feed nor a prefix within it."""
    text = b"0123456789" * (500 << 10) + b"\n"
    with Reader.pipe(65536) as reader, console(reader) as screen:
        stream, other = ConsoleStream(screen.out, b"[0] "), ConsoleStream(screen.out, b"[1] ")
        for i in range(0, len(text), 200_000):
            stream.feed(text[i : i + 200_000], now=0.0)
            other.feed(b"beside it\n", now=0.0)
            screen.tick(0.9)
        drain(screen, reader)
        assert reader.taken.endswith(b"[0] " + text + b"[1] beside it\n")


def test_a_huge_line_arrives_whole_in_pieces() -> None:
    """Ten megabytes without a line end: every byte, each piece behind its prefix."""
    text = b"0123456789" * (1000 << 10)
    with Reader.pipe(65536) as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ")
        for i in range(0, len(text), 200_000):
            stream.feed(text[i : i + 200_000], now=0.0)
            screen.flush()
            reader.take(1 << 20)
        stream.feed(b"\n", now=0.0)
        stream.close()
        drain(screen, reader)
        lines = reader.taken.split(b"\n")
        assert all(line.startswith(b"[0] ") for line in lines[:-1])
        assert b"".join(line[4:] for line in lines) == text


def test_saferuns_own_words_never_land_within_a_line() -> None:
    """Stdout and stderr on one pipe share one queue."""
    with Reader.pipe() as reader, console(reader) as screen:
        assert screen.err is screen.out
        stream = ConsoleStream(screen.out, b"[0] ")
        stream.feed(b"half a li", now=0.0)
        screen.print_message("saferun: something")
        stream.feed(b"ne\n", now=0.0)
        drain(screen, reader)
        assert reader.taken == b"saferun: something\n[0] half a line\n"


@given(st.lists(st.sampled_from([b"half", b" and half", b"50%\r", b"\r", b"\n", b"one\ntwo"]), max_size=8))
def test_a_line_that_is_taken_back_and_fed_again_is_the_same(chunks: list[bytes]) -> None:
    plain, again = LineAssembler(), LineAssembler()
    for chunk in chunks:
        assert again.feed(again.take_back() + chunk) == plain.feed(chunk)
        assert again.unfinished == plain.unfinished
        assert again.overwrites_itself == plain.overwrites_itself


@pytest.mark.parametrize("is_whole", [True, False], ids=["at once", "line by line"])
def test_without_torchs_tag_a_line_keeps_its_indentation(*, is_whole: bool) -> None:
    """Line by line, all spaces behind the tag were removed: frames of a traceback stood at the margin."""
    lines = [b"Traceback (most recent call last):\n", b'  File "a.py", line 1, in f\n', b"    f()\n", b"Error\n"]
    tagged = [b"[rank0]: " + line for line in lines] + [b"[rank0]:\n"]
    with Reader.pipe() as reader, console(reader) as screen:
        stream = ConsoleStream(screen.out, b"[0] ", tag=b"[rank0]:")
        for chunk in [b"".join(tagged)] if is_whole else tagged:
            stream.feed(chunk, now=0.0)
        drain(screen, reader)
        assert reader.taken == b"".join(b"[0] " + line for line in [*lines, b"\n"])
