"""A process to look at, and what the capture process finds there."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saferun.captures.wire import CaptureReader, CaptureRequest, CaptureTarget
from saferun.evidence.job_evidence import StackDump
from tests.process.launching import state_of, until
from tests.process.one_capture import encode_request

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "def step(): print('ready', flush=True); time.sleep(1000)\nstep()"
BUDGET_S = 20.0
_CAP_SYS_PTRACE, _PR_CAPBSET_DROP, _PR_SET_DUMPABLE = 19, 24, 4
UNDUMPABLE = f"ctypes.CDLL(None).prctl({_PR_SET_DUMPABLE}, 0, 0, 0, 0)\n"


def without_ptrace() -> None:
    """Take root's right to trace everybody from a child; others have none."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0)


@contextmanager
def python(source: str, *arguments: str, prepare: Callable[[], None] | None = None) -> Iterator[int]:
    """A Python process that has said that it is ready, and then waits for something."""
    with subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, os, signal, socket, sys, threading, time\n{source}", *arguments],
        stdout=subprocess.PIPE,
        preexec_fn=prepare,  # noqa: PLW1509 - there is one thread here
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            until(lambda: state_of(process.pid) in {"S", "D"}, "it waits")
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def capture(
    *targets: CaptureTarget, program: str = "", prepare: Callable[[], None] | None = None, **fields: Any
) -> CaptureReader:
    """What the capture process finds."""
    request = CaptureRequest(targets, budget_s=fields.pop("budget_s", BUDGET_S), since=time.time(), **fields)
    done = subprocess.run(
        [sys.executable, *(["-c", program] if program else ["-m", "tests.process.one_capture"])],
        input=encode_request(request),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=prepare,
        check=True,
    )
    reader = CaptureReader()
    reader.feed(done.stdout)
    assert reader.is_done
    return reader


def functions(dump: StackDump) -> list[str]:
    return [frame.function for frame in dump.threads[0].frames]
