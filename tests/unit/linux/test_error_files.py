"""Error files: a rank may write what it likes, and saferun goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.files.operations import write_error
from saferun.linux.error_files import (
    RecordedError,
    copy_root_cause,
    read_error_file,
    was_written_since,
    write_launcher_error,
)

RECORD: dict[str, Any] = {
    "message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"}}
}


def read(path: Path, content: str | bytes) -> RecordedError | None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_error_file(str(path))


def test_what_at_record_writes_is_read(tmp_path: Path) -> None:
    """Message and time."""
    assert read(tmp_path / "e", json.dumps(RECORD)) == RecordedError("ValueError: no", 1.7e9, RECORD)


def test_what_a_signal_handler_writes_is_read(tmp_path: Path) -> None:
    """Torch's other form: the message is a text."""
    content = {"message": "killed", "timestamp": 1700000001}
    assert read(tmp_path / "e", json.dumps(content)) == RecordedError("killed", 1700000001.0, content)
    assert read(tmp_path / "e", '{"message": "killed"}') == RecordedError("killed", 0.0, {"message": "killed"})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "7",
        '"text"',
        "[]",
        '["message"]',
        "{}",
        '{"message": {}}',
        '{"message": {"message": "x"}}',
        '{"message": {"message": "x", "extraInfo": null}}',
        '{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}',
        '{"message": {"message": "x", "extraInfo": {"timestamp": [1]}}}',
        '{"message": "x", "timestamp": {}}',
        '{"message": "x", "timestamp": null}',
        '{"message": "x", "timestamp": 1' + "0" * 400 + "}",
        '{"message": {"message": "x", "extraInfo": {"timestamp": -1' + "0" * 400 + "}}}",
        '{"message": "x", "timestamp": 1' + "0" * 5000 + "}",
        "[" * 100_000,
        '{"message": ' * 50_000,
        b"\xff\xfe\x00",
        b"\x00" * 100,
    ],
    ids=lambda content: repr(content[:40]),
)
def test_what_makes_no_sense_is_left_alone(content: str | bytes, tmp_path: Path) -> None:
    """No content ends the supervisor."""
    assert read(tmp_path / "e", content) is None


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["message", "extraInfo", "timestamp", "x"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_read_or_left_alone_and_can_be_handed_on(tmp_path: Path, content: Any) -> None:
    """The launcher's own error file is made from it."""
    recorded = read(tmp_path / "e", json.dumps(content))
    if recorded is not None:
        assert isinstance(recorded.message, str)
        assert isinstance(recorded.time, float)
        copy_root_cause(recorded, 3, str(tmp_path / "copy"))
        assert (tmp_path / "copy").stat().st_size > 0


def test_a_message_of_any_text_comes_through(tmp_path: Path) -> None:
    """Also halves of characters, which JSON can hold and UTF-8 cannot."""
    recorded = read(tmp_path / "e", r'{"message": "a\ud800\u0000\u001b[31m"}')
    assert recorded is not None
    assert recorded.message == "a\ud800\x00\x1b[31m"
    copy_root_cause(recorded, 1, str(tmp_path / "copy"))


def test_an_endless_file_is_read_in_part() -> None:
    """A link to /dev/zero is nobody's memory."""
    assert read_error_file("/dev/zero") is None


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """A wait inside would otherwise last forever."""

    class TooLongError(Exception):
        pass

    def give_up(_signum: int, _frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_fifo_in_place_of_the_file_holds_nobody_up(tmp_path: Path) -> None:
    """Opening one waits for a writer that never comes, and the whole launch with it."""
    os.mkfifo(tmp_path / "e")
    with _no_longer_than(0.5):
        assert read_error_file(str(tmp_path / "e")) is None


@pytest.mark.parametrize("name", ["missing", ".", "missing/below"])
def test_a_file_that_cannot_be_read_is_none(name: str, tmp_path: Path) -> None:
    """Most ranks write none."""
    assert read_error_file(str(tmp_path / name)) is None


def test_the_root_cause_gets_the_exit_code(tmp_path: Path) -> None:
    """Only the launcher knows it; everything else stays as it was."""
    path = tmp_path / "copy"
    path.write_text("old")
    copy_root_cause(RecordedError("ValueError: no", 1.7e9, RECORD), -11, str(path))
    written = json.loads(path.read_text())
    assert written["message"].pop("errorCode") == -11
    assert written == RECORD
    assert "errorCode" not in RECORD["message"]
    copy_root_cause(RecordedError("ValueError: no", 1.7e9, RECORD), 0, str(path))
    assert json.loads(path.read_text()) == RECORD


def test_an_error_of_the_launcher_has_the_same_form(tmp_path: Path) -> None:
    """Whoever started saferun reads one kind of file."""
    path = tmp_path / "own"
    write_launcher_error("port 29500 is in use", str(path))
    recorded = read_error_file(str(path))
    assert recorded is not None
    assert recorded.message == "port 29500 is in use"
    assert recorded.time > 1.7e9


def test_an_error_file_that_cannot_be_written_is_the_callers_concern(tmp_path: Path) -> None:
    """A warning there, not a crash here."""
    with pytest.raises(OSError, match="missing"):
        write_launcher_error("x", str(tmp_path / "missing" / "e"))


@pytest.mark.parametrize(
    ("content", "written_s_ago", "is_left"), [("{}", 5.0, True), ("{}", 15.0, False), ("", 5.0, False)]
)
def test_what_another_launcher_of_the_job_has_written_is_left(
    content: str, written_s_ago: float, *, is_left: bool, tmp_path: Path
) -> None:
    """Hosts, and several saferuns of a host, may have one file in common: what a rank has recorded says more."""
    path, now = tmp_path / "own", time.time()
    path.write_text(content)
    os.utime(path, (now, now - written_s_ago))
    write_error(str(path), "rank 7 failed first", "", 0, now - 10.0)
    assert (path.read_text() == content) is is_left
    write_error(str(path), "rank 7 failed first", "", 0)
    assert "rank 7 failed first" in path.read_text()


def test_a_file_that_is_not_there_was_not_written() -> None:
    """Nor was one in a directory that cannot be read."""
    assert not was_written_since("/proc/self/nothing", 1.0)
