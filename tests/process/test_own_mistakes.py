"""A mistake in what only watches, captures or reports costs what it does, and never the job."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import (
    DEADLINE_S,
    END_AS_TOLD,
    HELPERS_END_S,
    customized,
    in_saferun,
    read_stat,
    running,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

# Its ranks stay until the mistake is reached, or for so long: some are reached at the end alone.
HEALTHY = """
import os, sys, time
print("it runs", flush=True)
reached, longest_s = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + longest_s
while not os.path.exists(reached) and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.4)
"""
# The first attempt fails, and its other rank is ended; the second succeeds.
RESTARTED = """
import os, sys, time
print("it runs", flush=True)
time.sleep(0.4)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    raise ValueError("wrong")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
"""
# Another process has to be ready before they are called.
LATE = {"EventLog.note", "EventLog.write_torch_version", "Investigation.imported"}
LATE |= {f"ControlPart.{name}" for name in ("deadline", "tick", "close")}
# What each of them takes is wanted at the ends of attempts, too.
MISTAKES = [
    ("launch.core_part", "CorePart", "prepare"),
    ("launch.investigation", "Investigation", "diagnose"),
    ("launch.event_log", "EventLog", "_write_run_json"),
    ("console.screen", "Screen", "tick"),
]
MORE_MISTAKES = [
    ("launch.investigation", "Investigation", "ranks_started"),
    ("launch.investigation", "Investigation", "attempt_ended"),
    ("launch.investigation", "Investigation", "attempt_begins"),
    ("launch.attempt_setup", "AttemptSetup", "_warn_of_missing_ranks"),
    ("launch.core_part", "CorePart", "pids"),
    ("launch.core_part", "CorePart", "on_exit"),
    ("launch.rank_hook", "RankHook", "environ"),
    ("launch.preflight_part", "PreflightPart", "_check"),
    ("launch.idle_imports", "IdleImports", "need"),
    ("launch.torchrun_events", "TorchrunEvents", "_send"),
    *(("launch.investigation", "Investigation", name) for name in ("report_failure", "imported", "tick", "deadline")),
    *(("launch.event_log", "EventLog", name) for name in ("describe", "finish", "note", "record", "plan_description")),
    *(("launch.event_log", "EventLog", name) for name in ("write_torch_version",)),
    *(("launch.event_log", "StoryFile", name) for name in ("deadline", "tick")),
    *(("captures.examiner", "Examiner", name) for name in ("begin_at", "begin", "ask", "tick", "pids", "_on_message")),
    *(("launch.hang_watch", "HangWatch", name) for name in ("begin", "tick", "rank_ended", "end", "deadline")),
    *(("launch.idle_imports", "IdleImports", name) for name in ("import_now", "seal", "tick", "_request", "_have")),
    *(("launch.incident_log", "IncidentLog", name) for name in ("add", "finish", "write", "last_headline")),
    *(("launch.lint_part", "LintPart", name) for name in ("begin_soon", "cancel", "tick")),
    *(("launch.orphaned_segments", "OrphanedSegments", name) for name in ("note", "sweep", "pids", "on_exit")),
    *(("launch.orphans", "Orphans", name) for name in ("sweep", "end", "tick")),
    ("launch.rank_processes", "RankProcesses", "scan"),
    *(("launch.page_part", "PagePart", name) for name in ("prepare", "request", "pids", "tick", "deadline")),
    *(("launch.passed_signals", "PassedSignals", name) for name in ("tick", "deadline")),
    *(("launch.preflight_part", "PreflightPart", name) for name in ("begin_beside", "_tick", "settle", "pids")),
    *(("launch.retry_waits", "RetryWaits", name) for name in ("tick", "_end", "_on_readable")),
    *(("launch.torchrun_events", "TorchrunEvents", name) for name in ("_forward", "_forward_own")),
    *(("launch.attempt_end", "AttemptEnd", name) for name in ("_draw_up_waits", "_write_end")),
    ("console.rank_stream", "RankStream", "last_lines"),
    *(("console.console_stream", "ConsoleStream", name) for name in ("feed", "show", "close")),
    *(("console.screen", "Screen", name) for name in ("deadline", "fold", "_fold")),
    *(("console.folding", "Folding", name) for name in ("wants", "tick", "notes", "deadline")),
    ("launch.failed_rank_files", "LeftFiles", "read"),
    *(("launch.control_part", "ControlPart", name) for name in ("deadline", "tick", "close")),
    *(("linux.core_watch", "CoreWatch", name) for name in ("begin_at", "tick", "pids", "on_exit")),
]


@pytest.mark.parametrize(
    ("module", "name", "member"),
    [
        *(pytest.param(*mistake, id=".".join(mistake[1:])) for mistake in MISTAKES),
        *(pytest.param(*mistake, id=".".join(mistake[1:]), marks=pytest.mark.slow) for mistake in MORE_MISTAKES),
    ],
)
def test_the_job_goes_on_without(tmp_path: Path, module: str, name: str, member: str) -> None:
    """Both where all is well, and where ranks fail and are restarted."""
    owner = getattr(importlib.import_module(f"saferun.{module}"), name)
    is_property = isinstance(inspect.getattr_static(owner, member), property)
    reached = tmp_path / "reached"
    planted = (
        f"from saferun.{module} import {name} as owner\n"
        "    def fail(*_, **__):\n"
        f"        open({str(reached)!r}, 'w').close()\n"
        "        raise RuntimeError('a mistake')\n"
        f"    owner.{member} = {'property(fail)' if is_property else 'fail'}"
    )
    environ = customized(tmp_path, in_saferun(planted))
    arguments = [str(reached), "60" if f"{name}.{member}" in LATE else "2"]
    # The version of torch is the coordinator's.
    store = member == "write_torch_version"
    with running(tmp_path / "healthy", HEALTHY, nproc=2, arguments=arguments, environ=environ, store=store) as job:
        assert job.wait(2 * DEADLINE_S) == 0, job.err
    with running(
        tmp_path / "restarted", RESTARTED, "--max_restarts", "1", nproc=2, environ=environ, store=store
    ) as job:
        assert job.wait(2 * DEADLINE_S) == 0, job.err
    assert reached.exists(), f"{name}.{member} is never called here"


# With a color on stderr, for which its last lines are read by a module that is not there.
COLORED = f"""
import os
os.write(2, b"\\x1b[31mred\\x1b[0m\\n")
{END_AS_TOLD}
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["ends", "is stopped"])
def test_a_rank_whose_last_lines_cannot_be_read_ends_and_is_stopped_as_any_other(
    tmp_path: Path, *, is_stopped: bool
) -> None:
    """Its end was lost, and it got neither SIGTERM nor SIGKILL."""
    environ = customized(tmp_path, in_saferun("sys.modules['saferun.console.rows'] = None"))
    how = "stay" if is_stopped else "3"
    with running(
        tmp_path / "job", COLORED, "--preflight", "off", nproc=2, arguments=(how, "stay"), environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        if is_stopped:
            job.send(signal.SIGTERM)
        job.release("end")
        assert job.wait() == 1, job.err
        assert ("stopped because of it: ranks 0-1" if is_stopped else "exit code 3") in job.err


def test_a_mistake_that_ends_saferun_leaves_no_process_below_its_ranks(tmp_path: Path) -> None:
    """The kernel ends the ranks with saferun, and the shell that is one had a training below it, which went on."""
    planted = (
        "from saferun.launch.rank_actions import RankActions as owner\n"
        "    def fail(*_, **__): raise RuntimeError('a mistake')\n"
        "    owner.signal = fail"
    )
    environ = customized(tmp_path, in_saferun(planted))
    script = ("bash", "-c", f"{sys.executable} train.py stay; exit 5")
    with running(
        tmp_path / "job", END_AS_TOLD, "--preflight", "off", "--no-python", environ=environ, store=False, script=script
    ) as job:
        (ready,) = job.hear("ready")
        job.release("end")
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "RuntimeError: a mistake" in job.err
        until(lambda: read_stat(ready.pid) is None, "the training ends", timeout_s=HELPERS_END_S)
