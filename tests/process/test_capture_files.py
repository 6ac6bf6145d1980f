"""Files of a capture, also on a file system that does not answer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from saferun.captures import capture_files
from saferun.captures.capture_files import CaptureFiles, files_of_this_process
from tests.process.launching import until


def test_a_file_is_written_where_it_is_said_to_be(tmp_path: Path) -> None:
    """Its directory is made if need be, and nobody else reads it."""
    path = str(tmp_path / "capture" / "stacks.txt")
    assert CaptureFiles(time.monotonic() + 60).write(path, b"content") == path
    assert Path(path).read_bytes() == b"content"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    """Also not those that come after it."""
    files = CaptureFiles(time.monotonic() + 60)
    assert not files.write(str(tmp_path), b"a directory")
    path = str(tmp_path / "b")
    assert files.write(path, b"b") == path


def test_a_file_system_that_does_not_answer_costs_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the capture's time a part is left, whatever is still to be written."""
    deadline = time.monotonic() + 3.0
    files = CaptureFiles(deadline)
    silent = str(tmp_path / "silent")
    answers = threading.Event()
    write = capture_files._write

    def hang(path: str, content: bytes) -> None:
        if path == silent:
            answers.wait()
        write(path, content)

    monkeypatch.setattr(capture_files, "_write", hang)
    for number in range(50):
        assert not files.write(silent if number == 0 else str(tmp_path / str(number)), b"content")
    assert files._patience_s == 0.0
    # The file system wakes up: what was written meanwhile is there in the end.
    answers.set()
    until((tmp_path / "49").exists, "all is written")
    assert Path(silent).read_bytes() == b"content"


def test_each_process_has_its_own_files() -> None:
    """A fork does not wait for a thread that only its parent has."""
    deadline = time.monotonic() + 60
    ours = files_of_this_process(deadline)
    assert files_of_this_process(deadline) is ours
    pid = os.fork()
    if pid == 0:
        os._exit(files_of_this_process(deadline) is ours)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
