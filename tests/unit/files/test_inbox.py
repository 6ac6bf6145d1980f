"""Whole files that other processes hand to the writer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from saferun.captures.missing_files import missing_text
from saferun.files.file_server import FileServer
from saferun.files.hand_in import hand_in
from saferun.files.inbox import TOKEN_BYTES, TOKENS, Inbox, Outbox
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="inbox")
def _inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


def take_all(inbox: Inbox, server: FileServer) -> int:
    count = 0
    while server.take(inbox):
        count += 1
    return count


def test_a_file_is_written_as_it_was_handed_in(tmp_path: Path, inbox: Inbox) -> None:
    """Its directory is made, nobody else may read it, and nothing of it is left in memory."""
    before = open_descriptors()
    path = tmp_path / "hang_1" / "stacks.json"
    content = os.urandom(3 << 20)
    assert hand_in(inbox.outbox, str(path), content, 0.0)
    said: list[Any] = []
    assert take_all(inbox, FileServer(said.append)) == 1
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert said == []
    assert open_descriptors() == before
    assert inbox.waiting_bytes() == 0


def test_a_writer_that_dies_over_a_file_leaves_it_to_the_next_one(tmp_path: Path, inbox: Inbox) -> None:
    assert hand_in(inbox.outbox, str(tmp_path / "file"), b"content", 0.0)
    first = inbox.take(lambda *_: None)
    assert first is not None
    # It has not come to ``taken``.
    assert take_all(inbox, FileServer(lambda _: None)) == 1
    assert (tmp_path / "file").read_bytes() == b"content"


def test_what_finds_no_room_is_refused_and_takes_none(tmp_path: Path, inbox: Inbox) -> None:
    """There is room again as soon as the writer is back."""
    assert not hand_in(inbox.outbox, str(tmp_path / "a"), bytes(TOKENS * TOKEN_BYTES + 1), 0.0)
    assert hand_in(inbox.outbox, str(tmp_path / "b"), bytes((TOKENS - 1) * TOKEN_BYTES), 0.0)
    assert not hand_in(inbox.outbox, str(tmp_path / "c"), bytes(2 * TOKEN_BYTES), 0.0)
    assert hand_in(inbox.outbox, str(tmp_path / "d"), b"small", 0.0)
    assert not hand_in(inbox.outbox, str(tmp_path / "e"), b"small", 0.0)
    take_all(inbox, FileServer(lambda _: None))
    assert hand_in(inbox.outbox, str(tmp_path / "c"), bytes(2 * TOKEN_BYTES), 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_a_pipe_of_tokens_without_a_writer_is_not_read_for_ever(
    tmp_path: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end a read returns at once, with nothing: the file finds no room, however long it would wait for some."""
    reads: list[int] = []
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        reads.append(fd)
        assert len(reads) < 10, "it reads on"
        return read(fd, size)

    tokens_read, tokens_write = os.pipe()
    os.set_blocking(tokens_read, False)
    os.close(tokens_write)
    monkeypatch.setattr(os, "read", counted)
    assert not hand_in(Outbox(inbox.outbox.fd, tokens_read, -1), str(tmp_path / "file"), b"content", 3600.0)
    os.close(tokens_read)


def test_many_small_files_find_room_up_to_a_bound(tmp_path: Path, inbox: Inbox) -> None:
    """Enough for the processes of a host, while the writer does nothing."""
    handed = 0
    while handed < 2 * TOKENS and hand_in(inbox.outbox, str(tmp_path / f"{handed}"), b"x", 0.0):
        handed += 1
    assert 150 < handed <= TOKENS
    assert take_all(inbox, FileServer(lambda _: None)) == handed
    assert len(list(tmp_path.iterdir())) == handed


def test_a_file_that_cannot_be_written_is_tried_again(tmp_path: Path, inbox: Inbox) -> None:
    """And holds up none of the others."""
    directory = tmp_path / "place"
    directory.write_text("no directory")
    assert hand_in(inbox.outbox, str(directory / "a"), b"a", 0.0)
    assert hand_in(inbox.outbox, str(tmp_path / "b"), b"b", 0.0)
    said: list[Any] = []
    server = FileServer(said.append)
    take_all(inbox, server)
    assert (tmp_path / "b").read_bytes() == b"b"
    assert [message["failed"] for message in said] == [str(directory / "a")]
    assert server.retry_at is not None
    directory.unlink()
    server.retry(at_once=True)
    assert (directory / "a").read_bytes() == b"a"
    assert said[-1] == {"written": str(directory / "a"), "missing": 0}
    assert take_all(inbox, server) == 0
    assert inbox.waiting_bytes() == 0


def test_where_nobody_writes_that_is_known_at_once(tmp_path: Path) -> None:
    assert not hand_in(Outbox(-1, -1, -1), str(tmp_path / "a"), b"a", 60.0)
    inbox = Inbox()
    # What a process has that was forked before the writer was given up.
    inherited = Outbox(*map(os.dup, inbox.outbox.fds))
    inbox.close()
    assert not hand_in(inherited, str(tmp_path / "a"), b"a", 60.0)
    for fd in inherited.fds:
        os.close(fd)


def test_no_link_is_followed(tmp_path: Path, inbox: Inbox) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "link").symlink_to("other")
    assert hand_in(inbox.outbox, str(tmp_path / "link"), b"content", 0.0)
    take_all(inbox, FileServer(lambda _: None))
    assert (tmp_path / "other").read_text() == "other"
    assert (tmp_path / "link").read_text() == "content"


def test_what_a_directory_lacks_is_listed() -> None:
    assert missing_text((), ()) == ""
    text = missing_text(("rank_0.py_spy.json",), ("py_spy of rank 3",))
    assert text.splitlines() == [
        "no room in memory while the files could not be written: rank_0.py_spy.json",
        "captures timed out: py_spy of rank 3",
    ]
