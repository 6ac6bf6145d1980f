"""Garbage is not collected while saferun starts, and is in everything that lasts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from saferun.linux.children import fork

START = """
import gc, sys
import saferun.__main__
assert not gc.isenabled()
import saferun.launch.host_launch
from saferun.supervisor.actions import Finish

class HostLaunch:
    def __init__(self, *arguments, **named):
        pass

    def run(self):
        print(gc.isenabled(), gc.get_freeze_count() > 0)
        return Finish(0)

saferun.launch.host_launch.HostLaunch = HostLaunch
sys.argv = ["saferun", "--run-dir", "none", "--preflight", "off", "--no-python", "true"]
saferun.__main__.main()
"""


def test_the_loop_has_its_garbage_collected() -> None:
    """But for what it begins with, all of which stays to the end."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_so_has_a_process_that_is_forked_before_it() -> None:
    """The writer and the reaper live as long as the launch."""
    read_end, write_end = os.pipe()

    def tell() -> None:
        os.write(write_end, bytes([gc.isenabled()]))

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        pid = fork(tell)
    finally:
        if was_enabled:
            gc.enable()
    os.close(write_end)
    assert os.read(read_end, 10) == b"\1"
    os.close(read_end)
    os.waitpid(pid, 0)
