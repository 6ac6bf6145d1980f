"""The queue between the loop and the process that writes a console that is a file."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console import console_file, target
from saferun.console.console_file import ByteQueue, ConsoleFile
from saferun.console.target import Target
from tests.descriptors import large_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@given(st.lists(st.tuples(st.lists(st.binary(max_size=9), max_size=4), st.integers(0, 9)), max_size=40))
def test_bytes_come_out_as_they_went_in(steps: list[tuple[list[bytes], int]]) -> None:
    """Round the end of the memory, in pieces of any size; what finds no room stays with who puts."""
    queue = ByteQueue(16)
    put, taken = b"", b""
    for blocks, most in steps:
        text = b"".join(blocks)
        waiting = len(queue)
        count = queue.put(blocks)
        assert count == min(len(text), 16 - waiting)
        put += text[:count]
        block = bytes(queue.peek(most))
        assert len(block) <= most
        assert block or not most or not len(queue)
        taken += block
        queue.drop(len(block))
    while len(queue):
        block = bytes(queue.peek(16))
        taken += block
        queue.drop(len(block))
    assert taken == put


def until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def flush_all(console: Target) -> None:
    def is_empty() -> bool:
        console.flush()
        return console.is_empty

    until(is_empty)


def test_more_than_the_queue_holds_comes_whole_and_is_never_skipped(tmp_path: Path) -> None:
    """A file that takes bytes is waited for, whoever has another copy."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    console = Target(fd, skipping=True, where=str, carries=True)
    text = b"".join(b"line %d\n" % number for number in range(100_000))
    for _ in range(30):
        while console.is_full:
            console.flush()
        assert console.has_room(len(text))
        console.put(text)
    flush_all(console)
    console.finish()
    until(lambda: console.is_finished)
    console.close()
    os.close(fd)
    assert path.read_bytes() == text * 30


def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    """What it had not written is in the memory that both share."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    file = ConsoleFile(fd)
    os.kill(file.pid, signal.SIGSTOP)
    assert file.write([b"one\n", b"two\n"]) == 8
    os.kill(file.pid, signal.SIGKILL)
    os.waitpid(file.pid, 0)
    assert file.keep_alive()
    until(lambda: not file.waiting_bytes)
    file.finish()
    until(lambda: not file.is_alive)
    file.close()
    os.close(fd)
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_process_that_is_killed_is_replaced_whatever_the_number_of_its_descriptor(tmp_path: Path) -> None:
    """Saferun may inherit a thousand descriptors."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with large_descriptors():
        file = ConsoleFile(fd)
        assert file.is_alive
        os.kill(file.pid, signal.SIGKILL)
        os.waitpid(file.pid, 0)
        until(lambda: not file.is_alive)
        assert file.keep_alive()
        file.close()
    os.close(fd)


def test_without_any_process_what_was_handed_over_is_written_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, before what comes later."""
    monkeypatch.setattr(console_file, "_MOST_PROCESSES", 1)
    monkeypatch.setattr(target, "_LONGEST_PAUSE_S", 0.002)
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    console = Target(fd, skipping=False, where=str, carries=True)
    file = console.file
    assert file is not None
    os.kill(file.pid, signal.SIGSTOP)
    text = b"".join(b"line %d\n" % number for number in range(300_000))
    console.put(text)
    console.flush()
    assert not console.is_empty
    os.kill(file.pid, signal.SIGKILL)
    os.waitpid(file.pid, 0)
    flush_all(console)
    assert console.file is None
    os.close(fd)
    assert path.read_bytes() == text


def test_a_file_that_is_as_large_as_it_may_be_is_given_up_at_the_end(tmp_path: Path) -> None:
    """A healthy job waited a minute for room that a limit never makes; until the end the file may be emptied."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        file = ConsoleFile(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write([bytes(5000)])
    until(lambda: file.waiting_bytes == 904)
    os.truncate(path, 0)
    until(lambda: not file.waiting_bytes)
    file.write([bytes(4000)])
    until(lambda: file.waiting_bytes == 808)
    assert file.is_alive
    file.finish()
    until(lambda: not file.is_alive)
    assert file.waiting_bytes == 808
    file.close()
    os.close(fd)
