"""The middle of a large file is left out, and its beginning and its end stay as they are."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from saferun.files.sinks import Budget, Sink
from saferun.files.time_index import NO_CUT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KEEP = 1000


def refuse(*_arguments: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@given(pieces=st.lists(st.binary(min_size=1, max_size=700), min_size=1, max_size=20), in_lines=st.booleans())
def test_what_is_kept_is_the_beginning_and_the_end(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], *, in_lines: bool
) -> None:
    """Whatever is written, in whatever pieces; the mark says how much is missing between them."""
    path = tmp_path_factory.mktemp("kept") / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *_arguments: None)
    sink.keep_bytes = KEEP
    whole = b""
    for piece in pieces:
        text = re.sub(rb"[\n\[]", b".", piece) + (b"\n" if in_lines else b"")
        sink.write([memoryview(text)])
        whole += text
        kept = path.read_bytes()
        assert sink.position == len(whole)
        assert sink.size_bytes == len(kept) <= KEEP + 100
        if len(whole) <= KEEP:
            assert kept == whole
            continue
        found = re.search(rb"\n?\[saferun: ([0-9]+) bytes of this stream are left out here: --keep-output\]\n", kept)
        assert found is not None
        head, tail, missing = kept[: sink.cut.kept_bytes], kept[found.end() :], int(found[1])
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head) + len(tail) + missing == len(whole)
        assert sink.cut == (len(head), missing, len(kept) - len(head) - len(tail))
        assert not in_lines or head.endswith(b"\n") or b"\n" not in whole[: KEEP // 2]
    sink.close()


def test_a_file_that_cannot_be_cut_grows_on(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is said; nothing is lost."""
    path = tmp_path_factory.mktemp("kept") / "stdout.log"
    failures: list[object] = []
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *arguments: failures.append(arguments))
    sink.keep_bytes = KEEP

    monkeypatch.setattr("saferun.files.sinks.leave_out_middle", refuse)
    for _ in range(5):
        sink.write([memoryview(b"x" * KEEP)])
    assert path.read_bytes() == b"x" * KEEP * 5
    assert len(failures) == 1


def test_a_file_that_was_removed_is_emptied_once_it_is_too_large(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes room on the disk, and nobody can find it."""
    monkeypatch.setattr("saferun.files.removed_file._CHECK_S", 0.0)
    path = tmp_path_factory.mktemp("kept") / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *_arguments: None)
    sink.keep_bytes = KEEP
    sink.write([memoryview(b"x")])
    with path.open("rb") as removed:
        path.unlink()
        path.parent.rmdir()
        for _ in range(20):
            sink.write([memoryview(b"x" * KEEP)])
            assert os.fstat(removed.fileno()).st_size <= 2 * KEEP
    sink.close()


def test_of_a_file_that_others_truncate_the_newest_output_stays(tmp_path: Path) -> None:
    """Logrotate with copytruncate: nothing is where it was, and what is cut is counted from the real size."""
    path = tmp_path / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *_arguments: None)
    sink.keep_bytes = KEEP
    number = 0

    def write(size_bytes: int) -> None:
        nonlocal number
        for _ in range(size_bytes // 10):
            sink.write([memoryview(b"%09d\n" % number)])
            number += 1

    def tail(count: int) -> bytes:
        return b"".join(b"%09d\n" % one for one in range(number - count, number))

    for before, truncated_to, after in ((900, 0, 200), (2000, 300, 900), (0, 0, 400), (1500, 600, 150)):
        write(before)
        os.truncate(path, truncated_to)
        kept = path.read_bytes()
        write(after)
        content = path.read_bytes()
        # Where it has not been too large since, nothing of it is missing; in any case the newest lines are there.
        if truncated_to + after <= KEEP:
            assert content == kept + tail(after // 10)
        assert content.endswith(tail(15))
        assert b"\0" not in content
    write(5000)
    assert sink.size_bytes == path.stat().st_size <= KEEP + 100
    assert path.read_bytes().endswith(tail(20))
    sink.close()


def test_a_file_that_has_been_truncated_while_it_could_not_be_written_has_had_nothing_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *_arguments: None)
    sink.keep_bytes = KEEP
    for _ in range(200):
        sink.write([memoryview(b"x" * 9 + b"\n")])
    assert sink.cut.left_out_bytes
    with monkeypatch.context() as broken:
        broken.setattr("saferun.files.sinks.os.writev", refuse)
        sink.write([memoryview(b"y\n")])
    os.truncate(path, 10)
    sink.retry(0.0, at_once=True)
    assert path.read_bytes() == b"x" * 9 + b"\ny\n"
    assert (sink.position, sink.size_bytes, sink.cut) == (12, 12, NO_CUT)
    sink.close()


def test_what_another_program_appends_is_counted_as_any_other_output(tmp_path: Path) -> None:
    """The file stays within its limit, and its mark says how much is missing of all that was written to it."""
    path = tmp_path / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=lambda *_arguments: None)
    sink.keep_bytes = KEEP
    for _ in range(300):
        sink.write([memoryview(b"x" * 9 + b"\n")])
        with path.open("ab") as others:
            others.write(b"y" * 9 + b"\n")
    sink.write([memoryview(b"the end\n")])
    content = path.read_bytes()
    found = re.search(rb"\[saferun: ([0-9]+) bytes of this stream are left out here: --keep-output\]\n", content)
    assert found is not None
    assert len(content) <= KEEP + 120
    assert content.count(b"[saferun:") == 1
    assert int(found[1]) + len(content) - len(found[0]) == 600 * 10 + len(b"the end\n")
    sink.close()
