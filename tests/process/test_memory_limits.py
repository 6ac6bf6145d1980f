"""What ranks have written is read with little memory, and whoever reads it is ended before they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from saferun.captures import core_reading, py_spy_json, pystack_core, stacks
from saferun.captures.capture_processes import run_request
from saferun.captures.core_reading import CoreJob, CoreReading
from saferun.captures.tools import Steps, Tool, ToolEnd, run_steps
from saferun.captures.wire import CaptureRequest, CaptureTarget
from saferun.linux import core_notes
from saferun.linux.core_notes import CoreError, read_core_notes
from tests.unit.linux.test_core_files import make_core


def short_of_memory(*_arguments: object, **_named: object) -> NoReturn:
    raise MemoryError


def test_memory_is_limited_for_a_moment() -> None:
    program = (
        "from saferun.linux.memory_limit import limited_memory\n"
        "try:\n"
        "    with limited_memory(64 << 20):\n"
        "        bytes(128 << 20)\n"
        "except MemoryError:\n"
        "    print('bounded', len(bytes(128 << 20)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"bounded {128 << 20}\n"


def test_a_tool_takes_no_more_memory_than_it_is_given() -> None:
    """A core may be made so that whoever reads it takes all there is."""
    ends: list[ToolEnd] = []

    def steps() -> Steps:
        program = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])"
        tool = Tool((sys.executable, "-c", program), 60.0)
        ends.append((yield tool))
        ends.append((yield tool._replace(memory_bytes=8 << 30)))

    run_steps([steps()], at_once=1, deadline=time.monotonic() + 120)
    free, limited = (int(end.stdout) for end in ends)
    assert free == -1
    # Beside what it had as a fork of this process.
    own = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert 8 << 30 <= limited <= (8 << 30) + own + (64 << 20)


def test_what_looks_at_ranks_is_ended_before_them_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, which asks for this number; tools inherit it."""
    program = "#!/bin/sh\ncat /proc/self/oom_score_adj >&2\nexit 1\n"
    (tmp_path / "py-spy").write_text(program)
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda name: str(tmp_path / name))
    monkeypatch.setattr(stacks, "has_module", lambda _name: False)
    said = bytearray()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        request = CaptureRequest((CaptureTarget(0, child.pid, ""),), directory="", budget_s=20.0)
        run_request(request, said.extend, time.monotonic())
    finally:
        child.communicate(b"\n")
    assert b'"1000"' in said


def test_a_core_whose_notes_take_too_much_memory_is_none_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core").write_bytes(make_core(4711))
    monkeypatch.setattr(core_notes, "_read_segments", short_of_memory)
    with pytest.raises(CoreError, match="too much memory"):
        read_core_notes(str(tmp_path / "core"))


def test_words_of_a_tool_that_take_too_much_memory_are_no_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core").write_bytes(make_core(4711))
    for module in (py_spy_json, pystack_core):
        monkeypatch.setattr(module, "loads", short_of_memory)
    monkeypatch.setattr(core_reading, "threads_from_gdb", short_of_memory)
    end = ToolEnd(0, b"[]", b"")
    assert stacks._threads_of(end, 4711) == ((), "what it says takes too much memory")
    fd = os.open(tmp_path / "core", os.O_RDONLY)
    job = CoreJob(fd, read_core_notes(fd))
    os.close(fd)
    readings = [CoreReading()]
    for steps in (
        core_reading._ask_pystack([job], readings, 0),
        core_reading._ask_others([job], readings, 0, gdb=False),
    ):
        next(steps)
        with contextlib.suppress(StopIteration):
            while True:
                steps.send(end)
        assert "pystack: what it says takes too much memory" in readings[0].failure
    assert "py-spy: what it says takes too much memory" in readings[0].failure
