"""The processes of this host, as saferunctl reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from saferun.ctl import live_stacks
from saferun.errors import UsageError

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
