"""Processes that crash, and their cores, for tests."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saferun.captures.cores import examine_cores
from saferun.captures.wire import CaptureReader, CoreRequest, DeadProcess, encode
from saferun.evidence.job_evidence import CoreDump
from saferun.linux.children import Child, exit_status, spawn
from saferun.linux.core_limits import RankPreparation, plan_preparation, prepare_rank
from saferun.linux.core_pattern import read_core_pattern
from saferun.linux.core_saving import CoreSaver
from saferun.linux.poller import Poller
from saferun.model import ExitStatus
from tests.process.launching import DEADLINE_S, REPOSITORY
from tests.process.one_capture import encode_request

PATTERN = read_core_pattern()

CRASH = """
import ctypes, os, sys, threading, time

def read_nothing():
    ctypes.string_at(16)

def step():
    read_nothing()

def stand_by():
    time.sleep(100)

def give_up():
    os.abort()

def in_thread():
    threading.Thread(target=step).start()
    stand_by()

def in_child():
    import subprocess
    null = subprocess.DEVNULL
    subprocess.run([sys.executable, "-c", open(sys.argv[0]).read(), "step"], stdin=null, stdout=null)
    sys.exit(1)

print("ready", flush=True)
sys.stdin.read()
globals()[sys.argv[-1]]()
"""


class CoreWatch(CoreSaver):
    """Saves the cores of this process's children, in this process's loop."""

    def __init__(self, directory: str, poller: Poller) -> None:
        super().__init__(directory, os.getpid())
        self.is_watching = self.fd >= 0
        if self.is_watching:
            poller.watch(self.fd, self.handle_events)


class Crew:
    """Processes that wait at their standard input, and crash as soon as it is closed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.began = time.time()
        self.script = directory / "crash.py"
        self.script.write_text(CRASH)
        self.files = directory / "files"
        self.files.mkdir()
        self.pids: list[int] = []
        self.told: list[str] = []  # what was said while cores were read
        self.ends: dict[int, ExitStatus] = {}
        self._children: list[Child] = []
        self._read_end, self._write_end = os.pipe()
        os.set_inheritable(self._write_end, False)

    def start(
        self,
        *how: str,
        program: Sequence[str] = (),
        cwd: Path | None = None,
        preparation: RankPreparation | None = None,
        limit: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process for each way to crash, and return when all of them wait."""
        where = cwd or self.directory
        plan = preparation or plan_preparation(str(where), 1, cores=True, tracer_pid=os.getpid())
        # What a rank may come to need is asked of the disk elsewhere; these are small.
        plan = plan._replace(raise_core_limit=limit is None, core_directory="")

        def prepare() -> None:
            os.chdir(where)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
            prepare_rank(plan)

        for word in how:
            said_read, said_write = os.pipe()
            null = os.open(os.devnull, os.O_WRONLY)
            argv = [*(program or (sys.executable, str(self.script))), word]
            variables = {**os.environ, **(environ or {})}
            child = spawn(argv, variables, stdin=self._read_end, stdout=said_write, stderr=null, prepare=prepare)
            self._children.append(child)
            self.pids.append(child.pid)
            os.close(said_write)
            os.close(null)
            with open(said_read, "rb") as said:
                assert said.readline() == b"ready\n"

    def crash(self) -> None:
        """Let them all crash, and wait for their ends. The loop of a supervisor watches for cores meanwhile."""
        poller = Poller()
        watch = CoreWatch(str(self.directory), poller)
        os.close(self._write_end)
        self._write_end = -1
        until = time.monotonic() + DEADLINE_S
        while len(self.ends) < len(self.pids):
            assert time.monotonic() < until, "they live"
            poller.wait(0.01)
            self._reap(os.WNOHANG)
        watch.close()
        poller.close()

    def _reap(self, options: int) -> None:
        for child in self._children:
            if child.pid not in self.ends:
                pid, status = os.waitpid(child.pid, options)
                if pid:
                    self.ends[pid] = exit_status(status)

    def close(self) -> None:
        """End what still lives."""
        for child in self._children:
            if child.pid not in self.ends:
                os.kill(child.pid, signal.SIGKILL)
        self._reap(0)
        for fd in (self._read_end, self._write_end, *(child.pidfd for child in self._children)):
            if fd >= 0:
                os.close(fd)

    def examine(
        self, *, hard_limit: int | None = None, soft_limit: int = 0, cwd: Path | None = None, **wanted: Any
    ) -> list[CoreDump]:
        """What the capture process says of their cores; the rank of a process is its place in the crew.

        Args:
            hard_limit: the limit on cores with which it starts; None: that of the tests.
            soft_limit: the same of the soft one, where there is no hard one here.
            cwd: where the ranks were started; None: the directory of the crew.
            wanted: more of the request.
        """
        dead = tuple(
            DeadProcess(rank, pid, self.ends[pid].signum or 0, str(cwd or self.directory))
            for rank, pid in enumerate(self.pids)
        )
        request = CoreRequest(dead, directory=str(self.files), since=self.began, budget_s=60.0)._replace(**wanted)

        def limit() -> None:
            soft, hard = soft_limit, resource.getrlimit(resource.RLIMIT_CORE)[1]
            if hard_limit is not None:
                soft = hard = hard_limit
            resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))

        done = subprocess.run(
            [sys.executable, "-m", "tests.process.one_capture"],
            input=encode_request(request),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            cwd=self.directory,
            preexec_fn=limit,
            timeout=DEADLINE_S * 3,
            check=True,
        )
        reader = CaptureReader()
        told: list[str] = []
        reader.on_cores_found = lambda found: told.append(found.message)
        reader.feed(done.stdout)
        assert reader.is_done, done.stderr
        self.told = told
        return list(reader.cores)

    def cores(self) -> list[str]:
        """What lies about in the directory under a core's name."""
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("core"))


def examined(request: CoreRequest) -> list[CoreDump]:
    """What is made of cores in this process."""
    reader = CaptureReader()
    for found in examine_cores(request):
        if isinstance(found, CoreDump):
            reader.feed(encode("core", found))
    return list(reader.cores)


def functions(look: CoreDump) -> list[str]:
    return [frame.function for frame in look.threads[0].frames]
