"""When ranks no longer wait for the writer of their files."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from saferun.files import writer_client
from saferun.files.file_stream import WHOLE
from saferun.files.writer_client import HeldUp, WriterClient, missing_text
from saferun.linux.poller import Poller

MIB = 1 << 20


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([0, 0], "the files have everything"),
        ([0, 1], "1 byte of 1 stream is missing in files, which note where"),
        ([0, 7], "7 bytes of 1 stream are missing in files, which note where"),
        ([3, 4, 0], "7 bytes of 2 streams are missing in files, which note where"),
    ],
)
def test_what_is_missing_in_files_is_counted(lost: list[int], words: str) -> None:
    assert missing_text(lost) == words


@pytest.mark.parametrize(
    ("bytes_a_second", "held_share", "seconds", "gives_up"),
    [
        (MIB // 2, 1.0, 4, True),
        (MIB // 2, 0.1, 29, False),  # the ranks hardly wait
        (MIB // 2, 0.1, 40, True),
        (2 * MIB, 1.0, 600, False),  # a burst on a disk that is worth waiting for
        (0, 1.0, 2, False),  # a pause is none
    ],
)
def test_ranks_wait_for_what_takes_something_worth(
    bytes_a_second: int, held_share: float, seconds: int, *, gives_up: bool
) -> None:
    held = HeldUp()
    now, written, found = 1000.0, 0, False
    held.begin(now, written)
    for step in range(seconds * 10):
        now, written = now + 0.1, written + bytes_a_second // 10
        held.note(now, is_held=step % 10 < held_share * 10)
        found = found or held.is_too_slow(now, written)
    assert found == gives_up


def test_a_slow_minute_is_forgotten_once_all_is_written() -> None:
    held = HeldUp()
    held.begin(0.0, 0)
    held.note(2.9, is_held=True)
    held.begin(3.0, 1000)
    held.note(5.9, is_held=True)
    assert not held.is_too_slow(5.9, 2000)
    held.note(6.1, is_held=True)
    assert held.is_too_slow(6.1, 2000)


def test_files_that_are_opened_and_closed_while_the_writer_hangs_run_out_and_hold_up_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job may train for days while the file system of its run directory is dead. One line says what it loses."""
    monkeypatch.setattr(writer_client, "STREAMS", 8)
    poller = Poller()
    lines: list[str] = []
    writer = WriterClient(lines.append, ring_bytes=4096)
    writer.attach(poller)
    (pid,) = writer.pids
    os.kill(pid, signal.SIGSTOP)
    for number in range(50):
        file = writer.open(str(tmp_path / f"{number}.json"), WHOLE)
        file.write(bytes(1000))
        file.close()
    os.kill(pid, signal.SIGCONT)
    assert lines == [
        f"{tmp_path}/7.json: 7 files wait for the file system; this one is lost, and so are others to come"
    ]
    give_up_at = time.monotonic() + 60
    while not (tmp_path / "after").exists():
        assert time.monotonic() < give_up_at
        writer.tick(time.monotonic())
        poller.wait(0.01)
        file = writer.open(str(tmp_path / "after"), WHOLE)
        file.write(b"x")
        file.close()
    writer.discard()
    assert writer._inbox is not None
    writer._inbox.close()
    poller.close()
    assert len((tmp_path / "0.json").read_bytes()) == 1000
    assert not (tmp_path / "49.json").exists()
