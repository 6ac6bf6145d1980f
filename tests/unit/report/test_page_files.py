"""Reading a run directory for its page: bounded, and nothing outside of it, whoever has written there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from saferun.report.page import run_reading
from saferun.report.page.contents import LONGEST_FILE
from saferun.report.page.run_reading import read_run
from tests.process.somebody import SOMEBODY, needs_root
from tests.unit.report.page_samples import event, hang_events, hang_run


def test_a_run_directory_is_read_by_its_name_or_by_a_link_to_it(tmp_path: Path) -> None:
    """``latest`` is one."""
    hang_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    files = read_run(str(tmp_path / "latest"))
    assert files.name == "run"
    assert files.report is not None
    assert files.report.incidents[0].culprits == {3}
    assert files.preflight is not None
    assert files.run is not None
    assert [host.host for host in files.hosts] == ["node1"]
    assert files.tails[0].rank == 3  # the cause comes first
    assert len(files.tails) == 8
    assert files.notes == ()


def test_links_below_it_are_not_followed(tmp_path: Path) -> None:
    """Whoever may write there could have the page show any file of whoever makes it."""
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"schema": "x", "run": {"run_id": "STOLEN"}}))
    folder = hang_run(tmp_path / "run")
    for name in ("report.json", "run.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    stderr = folder / "node1" / "attempt_0" / "rank_3" / "stderr.log"
    stderr.unlink()
    stderr.symlink_to(secret)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "events.jsonl").write_text(json.dumps(event("RanksStarted", 1.0)))
    (folder / "node2").symlink_to(elsewhere)
    files = read_run(str(folder))
    assert files.report is None
    assert files.run is None
    assert [host.host for host in files.hosts] == ["node1"]
    assert not [tail for tail in files.tails if tail.rank == 3]
    assert any("report.json" in note for note in files.notes)


@needs_root
def test_a_page_that_root_makes_of_a_user_s_run_shows_no_file_of_root_s(tmp_path: Path) -> None:
    """The page is that user's, who may exchange a directory in the run for one of root's while it is read."""
    folder = hang_run(tmp_path / "run")
    assert read_run(str(folder)).owner == os.geteuid()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    os.chown(folder / "node1" / "attempt_0" / "rank_3" / "stderr.log", 0, 0)
    files = read_run(str(folder))
    assert files.owner == SOMEBODY
    assert not [tail for tail in files.tails if tail.rank == 3 and tail.stream == "stderr"]
    assert files.tails
    assert "stderr.log is not a file of this run" in files.notes


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = hang_run(tmp_path / "run")
    (folder / "report.json").unlink()
    os.mkfifo(folder / "report.json")
    files = read_run(str(folder))
    assert files.report is None
    assert files.notes == ("report.json is not a file of this run",)


def test_large_files_are_read_in_part_or_not_at_all(tmp_path: Path) -> None:
    folder = hang_run(tmp_path / "run")
    (folder / "report.json").write_bytes(b" " * (LONGEST_FILE + 1))
    lines = hang_events(range(8), 8)
    filler = (json.dumps(event("Nothing", 5.0, text="x" * 1000)) + "\n") * 9000
    text = "".join(json.dumps(line) + "\n" for line in lines[:4]) + filler
    (folder / "node1" / "events.jsonl").write_text(text + "".join(json.dumps(line) + "\n" for line in lines[4:]))
    (folder / "node1" / "attempt_0" / "rank_0" / "stderr.log").write_bytes(b"x\n" * (1 << 20))
    files = read_run(str(folder))
    assert files.report is None
    assert files.notes == ("report.json is too large",)
    names = {one.event for one in files.hosts[0].events}
    assert {"HostsJoined", "HangSuspected", "RankExited"} <= names
    first = next(tail for tail in files.tails if tail.rank == 0)
    assert len(first.content) <= 96 << 10
    assert first.omitted_bytes == (2 << 20) - len(first.content)


def test_after_some_time_no_further_file_is_opened(tmp_path: Path) -> None:
    """A network file system may take long for each of thousands."""
    files = read_run(str(hang_run(tmp_path / "run")), patience_s=-1.0)
    assert files.report is not None
    assert files.hosts == ()
    assert files.tails == ()
    late = ("events", "output", "captures of GPUs")
    assert files.notes == tuple(f"not all {what} could be read in time" for what in late)


def test_events_of_several_processes_of_a_host_are_one_sequence(tmp_path: Path) -> None:
    folder = hang_run(tmp_path / "run")
    (folder / "node1" / "events.task_1.jsonl").write_text(json.dumps(event("SignalReceived", 2.0, signum=15)) + "\n")
    times = [one.time for one in read_run(str(folder)).hosts[0].events]
    assert times == sorted(times)
    assert "SignalReceived" in {one.event for one in read_run(str(folder)).hosts[0].events}


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nothing"):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            read_run(str(tmp_path / name))
    assert run_reading.read_run(str(tmp_path)).report is None
