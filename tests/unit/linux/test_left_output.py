"""The process that copies what comes out of the pipes of processes that are left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from saferun.linux.left_output import copy_left_output

# It ends as saferun does, and leaves the other process behind.
OWNER = """
import sys
from saferun.linux.left_output import copy_left_output
print(copy_left_output([(int(sys.argv[1]), 1, "")]), file=sys.stderr)
"""


def test_who_writes_to_saferun_does_not_wait_for_what_is_left() -> None:
    """``producer | saferun …``: the producer gets SIGPIPE as soon as saferun has ended."""
    held, kept = os.pipe()
    stdin, producer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(held)],
        pass_fds=[held],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as owner:
        os.close(held)
        os.close(stdin)
        assert owner.wait() == 0
        assert owner.stdout is not None
        assert owner.stderr is not None
        copier = int(owner.stderr.readline())
        try:
            assert is_broken_soon(producer)
            # And it goes on copying.
            os.write(kept, b"a line\n")
            assert owner.stdout.readline() == b"a line\n"
        finally:
            os.close(kept)
            if copier > 0 and b"left_output" in cmdline(copier):
                os.kill(copier, signal.SIGKILL)


def test_where_nobody_can_write_any_more_there_is_no_process() -> None:
    held, kept = os.pipe()
    os.close(kept)
    try:
        assert copy_left_output([(held, 1, "")]) == 0
        assert copy_left_output([]) == 0
    finally:
        os.close(held)


def is_broken_soon(fd: int) -> bool:
    """Whether nobody can read from a pipe any more, a moment from now."""
    give_up_at = time.monotonic() + 10.0
    while time.monotonic() < give_up_at:
        try:
            os.write(fd, b"x")
        except BrokenPipeError:
            return True
        time.sleep(0.01)
    return False


def cmdline(pid: int) -> bytes:
    """A process's command line; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
