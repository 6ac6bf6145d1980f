"""The environment lint beside a job: a process of its own, whose findings become lines of saferun's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from saferun.config import EnvironConfig
from saferun.host.children import Child, SpawnError, spawn
from saferun.host.poller import Poller
from saferun.model import ExitStatus

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from saferun.lint.__main__ import main; sys.exit(main(sys.argv[2:]))"
)
_LARGEST_BYTES = 4 << 20
_MOST_LINES = 8


class Lint:
    """The lint of one launch: a while after the ranks have been started, once.

    Args:
        poller: the loop's.
        say: takes lines.
    """

    def __init__(self, poller: Poller, say: Callable[[str], None]) -> None:
        self.deadline: float | None = None
        self._poller = poller
        self._say = say
        self._begin: Callable[[], LintRun] | None = None
        self._run: LintRun | None = None

    def begin_at(self, at: float, environ: Mapping[str, str], python: str, script: str) -> None:
        """Look at the environment of a rank then, unless the ranks are done before. Arguments: see LintRun."""
        self.deadline = at
        self._begin = lambda: LintRun(environ, python, script, self._poller, self._say)

    def cancel(self) -> None:
        """The ranks are done: what has not begun will not."""
        self.deadline = None

    def tick(self, now: float) -> None:
        """Begin, where that is due."""
        if self.deadline is not None and self.deadline <= now and self._begin is not None:
            self.deadline = None
            self._run = self._begin()

    @property
    def pids(self) -> set[int]:
        """The lint's process, while it runs."""
        return {self._run.pid} if self._run is not None and self._run.pid is not None else set()

    def on_exit(self, pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the lint."""
        if self._run is None or pid != self._run.pid:
            return False
        self._run.on_exit()
        return True

    def close(self) -> None:
        """End it."""
        self.deadline = None
        if self._run is not None:
            self._run.close()


class LintRun:
    """One run of the lint. Whatever goes wrong with it is worth no word: the job does not depend on it.

    Args:
        environ: the environment of a rank.
        python: the interpreter of the ranks.
        script: the training script.
        poller: the loop's.
        say: takes lines.
    """

    def __init__(
        self, environ: Mapping[str, str], python: str, script: str, poller: Poller, say: Callable[[str], None]
    ) -> None:
        self.child: Child | None = None
        self._poller = poller
        self._say = say
        self._answer = b""
        read_end, write_end = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        argv = [sys.executable, "-P", "-c", _PROGRAM, _ROOT, python, script]
        try:
            self.child = spawn(argv, environ, stdin=null, stdout=write_end, stderr=null)
        except SpawnError:
            os.close(read_end)
            return
        finally:
            os.close(write_end)
            os.close(null)
        os.set_blocking(read_end, False)
        self._fd = read_end
        poller.watch(read_end, self._on_readable)

    @property
    def pid(self) -> int | None:
        """The lint's process, while it runs."""
        return self.child.pid if self.child is not None else None

    def on_exit(self) -> None:
        """The process has been reaped."""
        if self.child is not None and self.child.pidfd >= 0:
            os.close(self.child.pidfd)
        self.child = None

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGKILL)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._answer += chunk
        if chunk and len(self._answer) <= _LARGEST_BYTES:
            return
        self._poller.unwatch(self._fd)
        os.close(self._fd)
        self._tell()

    def _tell(self) -> None:
        from saferun.lint.findings import Finding, one_line

        try:
            findings = [Finding(**fields) for fields in json.loads(self._answer)["findings"]]
        except (ValueError, KeyError, TypeError):
            return
        lines = [one_line(finding) for finding in findings if finding.at_launch]
        for line in lines[:_MOST_LINES]:
            self._say(f"saferun: {line}")
        if len(lines) > _MOST_LINES:
            self._say(f"saferun: {len(lines) - _MOST_LINES} more: saferunctl env lint")


# How names of variables begin that software of ours reads; the lint itself knows more, and more exactly.
_PREFIXES = (
    *("TORCH", "PYTORCH", "NCCL", "RCCL", "GLOO", "CUDA", "CUBLAS", "CUDNN", "HIP", "HSA", "AMD", "ROC", "MIOPEN"),
    *("UCX", "UCC", "OMPI", "FI_", "OMP", "KMP", "GOMP", "MKL", "XLA", "TRITON", "NVIDIA", "INDUCTOR"),
)


def worth_a_look(environ: Mapping[str, str], config: EnvironConfig) -> bool:
    """Whether the user set anything that looks like a knob. What env profiles set is known to be one."""
    return any(name.startswith(_PREFIXES) for name in (*environ, *(name for name, _ in config.env)))
