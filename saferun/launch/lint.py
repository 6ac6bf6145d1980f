"""The environment lint beside a job: the examiner has a process make it, and its findings become lines of saferun's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

from saferun.captures.client import Examiner
from saferun.config import EnvironConfig
from saferun.errors import printable
from saferun.linux.helper import WithoutHelper
from saferun.linux.poller import Poller

# The first look at an installation takes a second or so where it is on a disk, and longer where it is far away.
_BUDGET_S = 60.0
_LARGEST_BYTES = 4 << 20
_MOST_LINES = 8


class Lint(WithoutHelper):
    """The lint of one launch: a while after the ranks have been started, once.

    Args:
        examiner: who has a process make it.
        poller: the loop's.
        say: takes lines.
    """

    def __init__(self, examiner: Examiner, poller: Poller, say: Callable[[str], None]) -> None:
        self.deadline: float | None = None
        self._examiner = examiner
        self._poller = poller
        self._say = say
        self._begin: Callable[[], LintRun] | None = None
        self._run: LintRun | None = None

    def begin_at(self, at: float, environ: Mapping[str, str], python: str, script: str) -> None:
        """Look at the environment of a rank then, unless the ranks are done before. Arguments: see LintRun."""
        self.deadline = at
        self._begin = lambda: LintRun(
            environ, python, script, examiner=self._examiner, poller=self._poller, say=self._say
        )

    def cancel(self) -> None:
        """The ranks are done: what has not begun will not."""
        self.deadline = None

    def tick(self, now: float) -> None:
        """Begin, where that is due."""
        if self.deadline is not None and self.deadline <= now and self._begin is not None:
            self.deadline = None
            self._run = self._begin()

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
        examiner: who has a process make it.
        poller: the loop's.
        say: takes lines.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        python: str,
        script: str,
        *,
        examiner: Examiner,
        poller: Poller,
        say: Callable[[str], None],
    ) -> None:
        self._examiner = examiner
        self._poller = poller
        self._say = say
        self._answer = b""
        self._fd = -1
        value = {"environ": dict(environ), "python": python, "script": script}
        try:
            self._number, self._fd = examiner.ask("lint", value, _BUDGET_S)
        except OSError:
            return
        poller.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._examiner.end(self._number)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._answer += chunk
        if chunk and len(self._answer) <= _LARGEST_BYTES:
            return
        self.close()
        self._tell()

    def _tell(self) -> None:
        try:
            from saferun.env.lint.findings import Finding, one_line

            findings = [Finding(**fields) for fields in json.loads(self._answer)["findings"]]
        except (ImportError, ValueError, KeyError, TypeError):
            return
        lines = [one_line(finding) for finding in findings if finding.at_launch]
        for line in lines[:_MOST_LINES]:
            self._say(f"saferun: {printable(line)}")
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
