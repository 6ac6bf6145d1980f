"""The processes of this host, as saferunctl reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from saferun.captures.wire import CaptureTarget
from saferun.ctl import live_stacks
from saferun.errors import UsageError
from saferun.evidence.job_evidence import Capture, StackDump, ThreadStack

if TYPE_CHECKING:
    from pathlib import Path


def test_the_environment_of_a_process_in_uninterruptible_sleep_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it may wait as long as that process, and no signal ends that."""
    stuck = os.getppid()
    read: list[int] = []

    def environ(self: psutil.Process) -> dict[str, str]:
        read.append(self.pid)
        return {"RANK": "3"}

    monkeypatch.setattr(psutil.Process, "environ", environ)
    monkeypatch.setattr(live_stacks, "waits_uninterruptibly", lambda pid: pid == stuck)
    found = live_stacks.read_processes()
    assert stuck not in read
    assert (found[stuck].rank, found[stuck].is_readable) == (-1, False)
    assert all(found[pid].rank == 3 for pid in read)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_run_json_that_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A FIFO would not end."""
    path = tmp_path / "run.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        live_stacks._run_id_of(str(tmp_path))


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_process_that_is_not_a_rank_is_called_none_also_where_it_has_no_stacks(has_ranks: bool) -> None:
    """A shell that started a Python program."""
    thread = ThreadStack("MainThread", 8, is_main=True, active=True, owns_gil=False, frames=())
    shell = StackDump(0, 7, is_rank=True, name="bash", tool="", threads=(), failure="bash is not a Python process")
    below = StackDump(0, 8, is_rank=False, name="python", tool="py-spy", threads=(thread,))
    asked = live_stacks.AskedProcesses("process 7 (bash)", (CaptureTarget(0, 7),), has_ranks=has_ranks)
    lines = live_stacks.picture(asked, Capture(stacks=(shell, below)))
    assert lines[0] == f"process 7 (bash): {'rank 0' if has_ranks else 'not a rank'}; 2 processes"
    assert f"  pid 7 (bash{', rank 0' if has_ranks else ''}): bash is not a Python process" in lines
    assert has_ranks or "rank 0" not in "\n".join(lines)
