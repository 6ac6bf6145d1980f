"""The index of times: what the writer process notes is what a reader finds, and nothing else can come out of it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from saferun.files.time_index import NO_CUT, Cut, IndexWriter
from saferun.files.time_index_reader import CutFile, Growth, IndexReader, NamedFile


class File:
    """A file that has grown."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self.cut = NO_CUT


def entries_of(content: bytes, *, piece_bytes: int = 1 << 20) -> list[Any]:
    """What a reader finds, whatever the pieces; what was appended as (milliseconds, stream, bytes)."""
    reader = IndexReader()
    found: list[Any] = []
    for start in range(0, len(content), piece_bytes):
        for entry in reader.feed(content[start : start + piece_bytes]):
            found += zip(*entry, strict=True) if isinstance(entry, Growth) else [entry]
    return found


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1 << 40)), min_size=1), st.integers(-5, 1 << 20)
        ),
        max_size=8,
    ),
    st.integers(1, 7),
)
def test_what_was_noted_is_found(batches: list[tuple[list[tuple[int, int]], int]], piece_bytes: int) -> None:
    """The bytes of each stream in their order, with times that never go back unless the clock does."""
    files: dict[int, Any] = {number: File(f"/run/host/attempt_0/rank_{number}/stdout.log") for number in range(6)}
    writer, content, now = IndexWriter("/run/host"), b"", 1_700_000_000_000
    wanted: list[tuple[int, int, int]] = []
    for pieces, later in batches:
        now += later
        for stream, count in pieces:
            files[stream].position += count
            if wanted and wanted[-1][:2] == (now, stream) and pieces[0] != (stream, count):
                wanted[-1] = (now, stream, wanted[-1][2] + count)
            else:
                wanted.append((now, stream, count))
        content += writer.entries(pieces, files, now)
    found = entries_of(content, piece_bytes=piece_bytes)
    got = [one for one in found if type(one) is tuple]
    assert merged(got) == merged(wanted)
    names = {one.stream: one.path for one in found if isinstance(one, NamedFile)}
    assert names == {stream: f"attempt_0/rank_{stream}/stdout.log" for _, stream, _ in wanted}


def merged(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours of one stream at one time together."""
    result: list[tuple[int, int, int]] = []
    for time, stream, count in pieces:
        if result and result[-1][:2] == (time, stream):
            result[-1] = (time, stream, result[-1][2] + count)
        else:
            result.append((time, stream, count))
    return result


def test_what_could_not_be_written_is_named_by_its_position() -> None:
    """A note may stand in the file, or bytes may be missing: nothing is claimed of them."""
    file: Any = File("/run/host/a")
    writer = IndexWriter("/run/host")
    file.position = 10
    content = writer.entries([(1, 10)], {1: file}, 1000)
    file.position = 17  # three of ten bytes are missing
    content += writer.entries([(1, 10)], {1: file}, 2000)
    file.position = 27
    content += writer.entries([(1, 10)], {1: file}, 3000)
    assert entries_of(content) == [
        NamedFile(1, 0, "a"),
        (1000, 1, 10),
        NamedFile(1, 17, "a"),
        (3000, 1, 10),
    ]


def test_a_stream_that_is_another_file_is_named_again() -> None:
    first, second = File("/run/host/a"), File("/elsewhere/b")
    writer = IndexWriter("/run/host")
    first.position = second.position = 4
    content = writer.entries([(1, 4)], {1: first}, 1000)
    writer.forget(1)
    content += writer.entries([(1, 4)], {1: second}, 1000)
    assert [one.path for one in entries_of(content) if isinstance(one, NamedFile)] == ["a", "/elsewhere/b"]


def test_what_was_left_out_is_noted() -> None:
    file: Any = File("/run/host/a")
    writer = IndexWriter("/run/host")
    file.position, file.cut = 100, Cut(20, 50, 7)
    assert CutFile(1, Cut(20, 50, 7)) in entries_of(writer.entries([(1, 100)], {1: file}, 1000))


def test_positions_are_found_in_a_file_that_lacks_some() -> None:
    cut = Cut(20, 50, 7)
    assert [cut.offset_in_file(position) for position in (0, 19, 20, 69, 70, 71)] == [0, 19, 20, 20, 27, 28]
    assert NO_CUT.offset_in_file(12345) == NO_CUT.position_at(12345) == 12345
    assert [cut.position_at(offset) for offset in (0, 19, 20, 26, 27, 28)] == [0, 19, 70, 70, 70, 71]


@given(st.binary(max_size=200), st.integers(1, 9))
def test_whatever_is_in_an_index_ends_in_bounded_work(content: bytes, piece_bytes: int) -> None:
    """Nothing is raised, and there is at most one entry for each three bytes."""
    assert len(entries_of(content, piece_bytes=piece_bytes)) <= len(content) // 3
    assert entries_of(b"\xff" * 100 + content) == []


def test_only_files_and_what_was_left_out_can_be_read() -> None:
    """What ``saferunctl logs`` reads ahead."""
    file: Any = File("/run/host/a")
    writer = IndexWriter("/run/host")
    file.position = 10
    content = writer.entries([(1, 10)], {1: file}, 1000)
    file.position, file.cut = 300, Cut(20, 50, 7)
    content += writer.entries([(1, 290)], {1: file}, 2000)
    assert list(IndexReader(has_growth=False).feed(content)) == [NamedFile(1, 0, "a"), CutFile(1, Cut(20, 50, 7))]
