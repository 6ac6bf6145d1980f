"""The middle of a large file is left out, and its beginning and its end stay as they are."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from saferun.files.sinks import Budget, Sink

if TYPE_CHECKING:
    import pytest

KEEP = 1000


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

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

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
