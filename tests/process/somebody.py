"""A second user of this machine, who plants files and looks around. It takes root to become another user."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOMEBODY = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@contextlib.contextmanager
def directory_for_all(mode: int) -> Iterator[Path]:
    """A directory that every user can reach: pytest's own are closed for others, anew at each start of it."""
    directory = Path(tempfile.mkdtemp(prefix="saferun-test-", dir="/tmp"))
    try:
        directory.chmod(mode)
        yield directory
    finally:
        shutil.rmtree(directory)


def as_user(function: Callable[[], object], uid: int = SOMEBODY) -> str:
    """What a function returns, as text, in a process of another user without privileges or further groups.

    The function must not import anything: the other user may not read this installation. What it raises fails the test.
    """
    read_end, write_end = os.pipe()
    pid = start_as_user(function, uid, write_end)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, said
    return said


def start_as_user(function: Callable[[], object], uid: int = SOMEBODY, answer_fd: int = 2) -> int:
    """The process that does it, which says what it has to say to a descriptor."""
    pid = os.fork()
    if pid != 0:
        return pid
    failed = 0
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(0o022)
        said = str(function() or "")
    except BaseException:
        failed, said = 1, traceback.format_exc()
    os.write(answer_fd, said.encode(errors="backslashreplace"))
    os._exit(failed)
