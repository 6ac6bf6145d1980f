"""Tools of a capture on a file system that does not answer: one that cannot be executed costs its own answer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from saferun.captures.tools import Steps, Tool, ToolEnd, run_steps
from tests.process.frozen import mirror, needs_mounts

if TYPE_CHECKING:
    from pathlib import Path


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
