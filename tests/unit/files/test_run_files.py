"""What a run directory says of its run; nothing in it is trusted."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files.run_files import living_records, may_live, open_run, read_run_record, read_state, size_bytes
from tests.unit.described_runs import ELSEWHERE, GONE, HERE, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from saferun.files.run_files import RunState
    from saferun.linux.process_identity import ProcessIdentity

NAME = "20260101-120000-abcdef"
DAY_S = 86400.0


def state_of(path: Path) -> RunState:
    """The state of a run."""
    fd = open_run(str(path))
    try:
        return read_state(fd)
    finally:
        os.close(fd)


def lives(path: Path) -> bool:
    """Whether it may still live."""
    fd = open_run(str(path))
    try:
        return may_live(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "stopped", "left"])
def test_a_run_that_has_ended_is_what_it_ended_as(tmp_path: Path, outcome: str) -> None:
    path = make_run(tmp_path, NAME, end=(1, outcome), headline="rank 3: KeyError")
    assert (state_of(path).name, state_of(path).headline) == (outcome, "rank 3: KeyError")
    assert not lives(path)


@pytest.mark.parametrize(
    ("process", "age_s", "name", "may"),
    [
        (HERE, 30 * DAY_S, "running", True),
        (GONE, 1.0, "lost", False),
        (ELSEWHERE, 1.0, "running", True),
        (ELSEWHERE, 3600.0, "lost", True),
        (ELSEWHERE, 10 * DAY_S, "lost", True),
        (ELSEWHERE, 15 * DAY_S, "lost", False),
        (None, 3600.0, "lost", True),
    ],
    ids=["here", "killed here", "on another host", "silent for an hour", "for ten days", "for two weeks", "unknown"],
)
def test_a_run_without_an_end_is_judged_by_its_process(
    tmp_path: Path, process: ProcessIdentity | None, age_s: float, name: str, *, may: bool
) -> None:
    """On this host by the process; elsewhere by the files' times, and for a deletion two weeks are waited."""
    path = make_run(tmp_path, NAME, process=process or GONE, end=None, age_s=age_s)
    if process is None:
        content = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**content, "process": None}))
    assert (state_of(path).name, lives(path)) == (name, may)


def test_another_host_of_the_job_may_outlive_the_leader(tmp_path: Path) -> None:
    """Its directory is not removed under it."""
    path = make_run(tmp_path, NAME)
    (path / "node2").mkdir()
    part: dict[str, object] = {
        "command": [],
        "run_id": "x",
        "host": "wrong/name",
        "process": ELSEWHERE._asdict(),
        "end": None,
    }
    (path / "node2" / "run.json").write_text(json.dumps({**part, "host": "node2"}))
    assert state_of(path).name == "succeeded"
    assert lives(path)


@pytest.mark.parametrize(
    ("outcome", "process", "name"),
    [("left", HERE, "running"), ("stopped", HERE, "running"), ("left", GONE, "left"), ("stopped", GONE, "stopped")],
)
def test_a_run_whose_leader_has_left_lives_while_another_host_does(
    tmp_path: Path, outcome: str, process: ProcessIdentity, name: str
) -> None:
    """Another host leads the job then, whose record has stood below its name from the start; or all were stopped."""
    path = make_run(tmp_path, NAME, end=(0, outcome))
    part = json.loads((path / "run.json").read_text())
    (path / "node2").mkdir()
    other = {**part, "host": "node2", "process": process._asdict(), "end": None}
    (path / "node2" / "run.json").write_text(json.dumps(other))
    assert state_of(path).name == name


@pytest.mark.parametrize(
    ("outcome", "stopped_s", "heard_s", "name"),
    [
        ("stopped", 120, 140, "stopped"),
        ("stopped", 165, 135, "stopped"),
        ("stopped", 165, 125, "running"),
        ("stopped", 96, 62, "running"),
        ("stopped", 120, 60, "running"),
        ("stopped", 80, 140, "running"),
        ("left", 120, 140, "running"),
    ],
    ids=[
        "silent since",
        "killed with it",
        "a beat may be missed",
        "its next beat is not seen yet",
        "heard since",
        "it is too early",
        "the leader left",
    ],
)
def test_a_host_that_is_silent_since_its_leader_was_stopped_has_ended(
    tmp_path: Path, outcome: str, stopped_s: float, heard_s: float, name: str
) -> None:
    """A host dies, and the scheduler stops the others. One that goes on is heard of every minute."""
    path = make_run(tmp_path, NAME, end=(143, outcome), age_s=stopped_s)
    part = json.loads((path / "run.json").read_text())
    (path / "node2").mkdir()
    elsewhere = {**part, "host": "node2", "process": ELSEWHERE._asdict(), "end": None}
    (path / "node2" / "run.json").write_text(json.dumps(elsewhere))
    (path / "node2" / "events.jsonl").touch()
    at = time.time() - heard_s
    for changed in (path / "node2" / "events.jsonl", path / "node2"):
        os.utime(changed, (at, at))
    assert state_of(path).name == name


def test_the_file_server_is_asked_when_a_host_was_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``stat`` knows of a file of another host on NFS may be a minute old."""
    path = make_run(tmp_path, NAME, process=ELSEWHERE, end=None, age_s=3600)
    (path / "node1" / "events.jsonl").touch()
    at, real = time.time() - 3600, os.stat
    os.utime(path / "node1", (at, at))

    def remembered(*arguments: Any, **options: Any) -> os.stat_result:
        found = real(*arguments, **options)
        return os.stat_result((*found[:7], at, at, at))

    monkeypatch.setattr(os, "stat", remembered)
    assert state_of(path).name == "running"


@pytest.mark.parametrize("end", [(143, "stopped"), None])
def test_a_run_below_another_one_is_no_host_of_it(tmp_path: Path, end: tuple[int, str] | None) -> None:
    """An evaluation beside the training that has ended: ``--run-dir exp`` and ``--run-dir exp/eval``."""
    path = make_run(tmp_path, NAME, end=end)
    make_run(path, "eval", process=HERE, end=None)
    fd = open_run(str(path))
    assert living_records(fd) == []
    assert read_state(fd).name == ("lost" if end is None else "stopped")
    (path / "run.json").unlink()
    assert read_state(fd).name == "unknown"
    os.close(fd)
    assert lives(path)  # what is below it is not deleted


def test_a_directory_that_cannot_be_looked_at_hides_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle on NFS; the run would be removed while a host uses it."""
    path = make_run(tmp_path, NAME)
    for host in ("node0", "node2"):
        (path / host).mkdir()
    record = json.loads((path / "run.json").read_text())
    living = {**record, "host": "node2", "process": ELSEWHERE._asdict(), "end": None}
    (path / "node2" / "run.json").write_text(json.dumps(living))
    real = os.scandir

    class Stale:
        name = "node0"

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            del follow_symlinks
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    @contextmanager
    def scandir(fd: int) -> Iterator[Any]:
        with real(fd) as entries:
            found = {entry.name: entry for entry in entries}
        stale = [Stale()] if found.pop("node0", None) else []
        yield iter([*stale, *found.values()])

    monkeypatch.setattr(os, "scandir", scandir)
    assert lives(path)


def test_a_hang_that_goes_on_is_the_state(tmp_path: Path) -> None:
    path = make_run(tmp_path, NAME, process=HERE, end=None)
    hang = {"kind": "hang", "outcome": "continued", "headline": "rank 1 \x1b[2J waits"}
    (path / "report.json").write_text(json.dumps({"run": {"outcome": "running"}, "incidents": [hang]}))
    assert (state_of(path).name, state_of(path).headline) == ("hung", "rank 1 \\x1b[2J waits")
    (path / "report.json").write_text(
        json.dumps({"run": {"outcome": "running"}, "incidents": [{**hang, "outcome": "recovered"}]})
    )
    assert state_of(path).name == "running"


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "3", "{}", "[" * 100_000),
        '{"run_id": 3, "command": []}',
        '{"run_id": "x", "command": [3]}',
        '{"run_id": "x", "command": [], "host": "../.."}',
        '{"run_id": "x", "command": [], "process": {"pid": -1}}',
        '{"run_id": "x", "command": [], "end": {"outcome": "fine"}}',
        '{"run_id": "x", "command": [], "started_at": 1e999}',
    ],
)
def test_a_description_that_is_none_is_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    fd = open_run(str(tmp_path))
    assert read_run_record(fd) is None
    assert read_state(fd).name == "unknown"
    assert may_live(fd)
    os.close(fd)


def test_what_is_planted_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """Neither a link, nor a FIFO, at which a reader would wait."""
    path = make_run(tmp_path, NAME)
    os.rename(path / "run.json", tmp_path / "elsewhere.json")
    (path / "run.json").symlink_to(tmp_path / "elsewhere.json")
    assert state_of(path).name == "unknown"
    (path / "run.json").unlink()
    os.mkfifo(path / "run.json")
    assert state_of(path).name == "unknown"


def test_the_size_is_that_of_all_files_and_of_no_others(tmp_path: Path) -> None:
    """A link adds nothing; what cannot be counted in time is said."""
    path = make_run(tmp_path, NAME)
    before = size_of(path)
    (path / "node1" / "log").write_bytes(bytes(100_000))
    big = tmp_path / "big"
    big.write_bytes(bytes(1 << 20))
    (path / "link").symlink_to(big)
    assert 100_000 <= size_of(path) - before < 1 << 18
    fd = open_run(str(path))
    assert size_bytes(fd, time.monotonic() - 1.0)[1] is False
    os.close(fd)


def size_of(path: Path) -> int:
    """The size of a run directory."""
    fd = open_run(str(path))
    size, is_all = size_bytes(fd, time.monotonic() + 60.0)
    os.close(fd)
    assert is_all
    return size
