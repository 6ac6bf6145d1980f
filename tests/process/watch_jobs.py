"""Ranks of a few lines without torch, a watch over them, and the loop that drives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saferun.captures.examiner import Examiner
from saferun.evidence.job_evidence import HangVerdict
from saferun.linux.poller import Poller
from saferun.linux.procfs import children_of
from saferun.watchdog.monitor import RankMonitor, WatchedRank
from tests.process.launching import DEADLINE_S
from tests.process.marks import numbers_in_use, pids_whose_environ_has

TIMEOUT_S = 2.0
SLEEPS = "while True: time.sleep(100)"

_PREAMBLE = """
import os, sys, time
def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until: pass
print("ready", flush=True)
"""


class Job:
    """Ranks, a watch over them, and the loop that drives it. Ranks are ended with it, and all that they started.

    One that is ``shared`` lends its loop and its examiner to others, and is closed after them.

    Attributes:
        ranks: their processes.
        verdicts: what was told so far.
        recovered_s: how long what was over has lasted.
        began, told_at: when the watch began and when the first verdict came, in monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        *programs: str,
        timeout_s: float = TIMEOUT_S,
        prefix: str = "",
        through: tuple[str, ...] = (),
        shared: Job | None = None,
        environ: dict[str, str] | None = None,
        store_port: int = 0,
    ) -> None:
        self.folder = folder
        self.poller: Poller = Poller() if shared is None else shared.poller
        self._is_alone = shared is None
        self.verdicts: list[HangVerdict] = []
        self.recovered_s: list[float] = []
        self.output_bytes = [0] * len(programs)
        self.mark = f"TEST_WATCH_RUN={folder}/{os.getpid()}/{time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        self._older = numbers_in_use()
        self.ranks = [
            subprocess.Popen(
                [
                    *through,
                    sys.executable,
                    "-S",
                    "-c",
                    _PREAMBLE + program,
                    str(folder / f"fifo{rank}"),
                    str(folder / "r"),
                ],
                stdout=subprocess.PIPE,
                env={**os.environ, **(environ or {}), name: value},
                start_new_session=True,
            )
            for rank, program in enumerate(programs)
        ]
        for process in self.ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        self.told_at = 0.0
        self.examiner: Examiner = self._new_examiner(name, value) if shared is None else shared.examiner
        self.watch = RankMonitor(
            timeout_s,
            self.poller,
            on_verdict=self._take_verdict,
            on_recovery=self.recovered_s.append,
            examiner=self.examiner,
            store_port=store_port,
        )
        self._prefix = str(folder / prefix) if prefix else ""
        self.began = 0.0

    def _new_examiner(self, name: str, value: str) -> Examiner:
        examiner = Examiner({**os.environ, name: value}, self.poller, warn=print)
        examiner.begin()
        while examiner.tools is None:
            self.poller.wait(DEADLINE_S)
        return examiner

    def begin(self) -> None:
        """Watch them from now on."""
        self.began = time.monotonic()
        self.watch.begin(
            self.began,
            [
                WatchedRank(
                    rank,
                    10 + rank,
                    process.pid,
                    lambda rank=rank: self.output_bytes[rank],  # type: ignore[misc]
                    self._prefix,
                    str(self.folder / f"beat{rank}"),
                )
                for rank, process in enumerate(self.ranks)
            ],
        )

    def _take_verdict(self, verdict: HangVerdict) -> None:
        self.told_at = self.told_at or time.monotonic()
        self.verdicts.append(verdict)

    def turn(self, *, capture: bool = True, wait_s: float = 0.05) -> None:
        """Once through the loop, waiting for so long at most."""
        now = time.monotonic()
        deadline = self.watch.deadline
        self.poller.wait(wait_s if deadline is None else min(max(deadline - now, 0.0), wait_s))
        now = time.monotonic()
        deadline = self.watch.deadline
        if deadline is None and capture:
            self.watch.resume(now)
        elif deadline is not None and deadline <= now:
            self.watch.tick(now)

    @property
    def looks(self) -> set[int]:
        """The processes that look at a suspect now."""
        return {child for pid in self.examiner.pids for child in children_of(pid)}

    def run(self, seconds: float) -> list[str]:
        """Watch for so long; the kinds of verdicts so far."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()
        return [verdict.kind for verdict in self.verdicts]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Watch until it is true."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_at, f"never happened: {what}"
            self.turn()

    def until_told(self) -> HangVerdict:
        """Watch until something is told."""
        self.until(lambda: self.verdicts, "a verdict")
        return self.verdicts[0]

    def close(self) -> None:
        self.watch.end()
        for process in self.ranks:
            # Each rank leads a group of its own, which holds all that it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if self._is_alone:
            self.examiner.close()
            for pid in self.examiner.pids:
                os.waitpid(pid, 0)
            self.poller.close()
        give_up_at = time.monotonic() + DEADLINE_S
        while left := pids_whose_environ_has(self.mark, self._older):
            assert time.monotonic() < give_up_at, f"left behind: {left}"
            time.sleep(0.005)


@contextlib.contextmanager
def watched(folder: Path, *programs: str, **arguments: Any) -> Iterator[Job]:
    job = Job(folder, *programs, **arguments)
    try:
        job.begin()
        yield job
    finally:
        job.close()
