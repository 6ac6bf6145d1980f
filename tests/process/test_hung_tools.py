"""Tools of a capture on a file system that does not answer: one that cannot be executed costs its own answer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from saferun.captures.tools import Steps, Tool, ToolEnd, run_steps
from tests.process.frozen import mirror, needs_mounts
from tests.process.launching import DEADLINE_S, running, until

if TYPE_CHECKING:
    from pathlib import Path

HANG = """
from rank import *
tell("ready")
await_release("hang")
def hold_still():
    stay()
hold_still()
"""


def ends_of(*tools: Tool, deadline_s: float = 60.0) -> list[ToolEnd]:
    """How tools end that are begun at the same time."""
    ends: dict[int, ToolEnd] = {}

    def steps(number: int, tool: Tool) -> Steps:
        ends[number] = yield tool

    work = (steps(number, tool) for number, tool in enumerate(tools))
    run_steps(work, at_once=len(tools), deadline=time.monotonic() + deadline_s)
    return [ends[number] for number in range(len(tools))]


@needs_mounts
def test_a_tool_that_cannot_be_executed_costs_itself_alone(tmp_path: Path) -> None:
    """The other one, begun after it, is not waited for either."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "tool"
    program.write_text("#!/bin/sh\necho told\n")
    program.chmod(0o755)
    with mirror(tmp_path, tmp_path / "bin") as system:
        # The keeper's root is this one with the mirror mounted in it.
        dead = str(system.inside(system.path / "tool"))
        (alive,) = ends_of(Tool((dead,), 60.0))
        assert alive.stdout == b"told\n"
        system.freeze()
        hung, well = ends_of(Tool((dead,), 1.0), Tool(("/bin/echo", "well"), 60.0))
        assert hung.was_killed
        assert not hung.is_started
        assert hung.is_stuck
        assert hung.failure.startswith("tool cannot be started: the file system at ")
        assert hung.failure.endswith(" does not answer")
        assert (well.stdout, well.failure) == (b"well\n", "")
        system.thaw()


def test_a_program_that_is_none_is_said(tmp_path: Path) -> None:
    """As before: it is known at once, and not for having taken too long."""
    broken = tmp_path / "broken"
    broken.write_bytes(b"")
    broken.chmod(0o755)
    missing, bad = ends_of(Tool((str(tmp_path / "none"),), 60.0), Tool((str(broken), "x"), 60.0))
    assert missing.failure == "none cannot be started: exec: No such file or directory"
    assert bad.failure == "broken cannot be started: exec: Exec format error"
    assert not missing.was_killed
    assert os.path.exists(broken)


@pytest.mark.slow
@needs_mounts
def test_a_tool_on_a_dead_file_system_costs_no_stacks(tmp_path: Path) -> None:
    """It is found while all is well, and cannot be executed when the hang is there."""
    (tmp_path / "bin").mkdir()
    for name in ("strace", "gdb"):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    options = ("--env-profile", "minimal", "--hang-timeout", "3", "--strace", "--on-hang", "stop")
    with mirror(tmp_path, tmp_path / "bin") as system:
        directories = [path for path in os.environ["PATH"].split(os.pathsep) if path]
        environ = {"PATH": os.pathsep.join([str(system.path), *directories])}
        with running(
            tmp_path / "run",
            HANG,
            *options,
            nproc=2,
            environ=environ,
            before=system.before(),
            store=False,
            sweeps=False,
        ) as job:
            job.hear("ready", 2)
            until(lambda: job.has_happened("ExaminerReady"), "the tools are found")
            until(lambda: job.has_happened("ModulesImported"), "the watch has begun")
            system.freeze()
            job.release("hang")
            assert job.wait(60) == 1
            told = (job.run_dir / "report.txt").read_text()
            system.thaw()
            # They have been killed, and notice it as soon as the file system answers.
            job.assert_nothing_left(DEADLINE_S)
        assert "hold_still  train.py" in job.err
        assert "not ready in time" not in job.err
        assert f"strace cannot be started: the file system at {system.path} does not answer" in told
