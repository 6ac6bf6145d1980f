"""The environment lint beside a job: the examiner has a process run it, and its findings become messages."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.launch.rank import AttemptPlan
from saferun.linux.helper import PartBase

# It waits until the ranks are on their way; ranks that are done by then had no use for it.
_DELAY_S = 0.25
# The first scan of an installation takes a second or so where it is on a disk, and longer where it is far away.
_BUDGET_S = 60.0
_LARGEST_BYTES = 4 << 20
_MOST_LINES = 8


class LintPart(PartBase):
    """The lint of one launch: a while after the ranks have been started, once.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self.deadline: float | None = None
        self._context = context
        self._plan: AttemptPlan | None = None
        self._answer = b""
        self._number, self._fd = 0, -1

    def begin_soon(self, plan: AttemptPlan) -> None:
        """Lint the environment of these ranks, unless they are done before or there is nothing to lint."""
        if self._context.config.environ.lint and _may_find_something(self._context):
            self._plan = plan
            self.deadline = time.monotonic() + _DELAY_S

    def cancel(self) -> None:
        """The ranks are done: what has not begun will not."""
        self.deadline = None

    def tick(self, now: float) -> None:
        """Begin, where that is due."""
        if self.deadline is not None and self.deadline <= now and self._plan is not None:
            self.deadline = None
            self._begin(self._plan)

    def _begin(self, plan: AttemptPlan) -> None:
        users = {*self._context.environ, *(name for name, _ in self._context.config.environ.env)}
        environ = without_launchers_own(plan.environs[0], users)
        python = self._context.environ.get("PYTHON_EXEC", sys.executable)
        asked = {"environ": environ, "python": python, "script": str(self._context.config.command.name)}
        # Whatever goes wrong with it is not reported: the job does not depend on it.
        with suppress(OSError):
            self._number, self._fd = self._context.examiner.ask("lint", asked, _BUDGET_S)
            self._context.guarded_poller.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """End it, if it has not ended."""
        self.deadline = None
        if self._fd >= 0:
            self._context.guarded_poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._context.examiner.end(self._number)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._answer += chunk
        if chunk and len(self._answer) <= _LARGEST_BYTES:
            return
        self.close()
        self._report()

    def _report(self) -> None:
        try:
            from saferun.env.lint.findings import Finding, one_line

            findings = [Finding(**fields) for fields in json.loads(self._answer)["findings"]]
        except (ImportError, ValueError, KeyError, TypeError):
            return
        if self._context.another_host_prints:
            return  # it finds the same there
        lines = [one_line(finding) for finding in findings if finding.at_launch]
        for line in lines[:_MOST_LINES]:
            self._context.report(line)
        if len(lines) > _MOST_LINES:
            self._context.report(f"{len(lines) - _MOST_LINES} more: saferunctl env lint")


def without_launchers_own(environ: Mapping[str, str], users: Collection[str]) -> dict[str, str]:
    """The environment of a rank, as far as a user may want to change it.

    The hook is left out: the lint is no rank, and is not captured. So is what only the launcher sets: of its own
    variables an older torch may read less, and torchrun's default for errors of NCCL contradicts no setting.

    Args:
        environ: of the rank.
        users: the names that the user has set.
    """
    return {
        name: value
        for name, value in environ.items()
        if name != "SAFERUN_HOOK" and (name in users or not name.startswith(_OF_LAUNCHER))
    }


_OF_LAUNCHER = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
# How names of variables begin that software of ours reads; the lint itself knows more, and more exactly.
_PREFIXES = (
    *("TORCH", "PYTORCH", "NCCL", "RCCL", "GLOO", "CUDA", "CUBLAS", "CUDNN", "HIP", "HSA", "AMD", "ROC", "MIOPEN"),
    *("UCX", "UCC", "OMPI", "FI_", "OMP", "KMP", "GOMP", "MKL", "XLA", "TRITON", "NVIDIA", "INDUCTOR"),
)


def _may_find_something(context: LaunchContext) -> bool:
    """Whether the user set anything that looks like a knob. What env profiles set is known to be one."""
    return any(
        name.startswith(_PREFIXES) for name in (*context.environ, *(name for name, _ in context.config.environ.env))
    )
