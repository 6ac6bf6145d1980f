"""A run directory that is named again: each run keeps its files to itself, and none of a run that lives is moved."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files import earlier_run, run_files
from saferun.files.earlier_run import SetAside
from saferun.files.run_dir import RunDirectory
from saferun.linux.process_identity import ProcessIdentity
from tests.direct_files import DirectFiles
from tests.unit.described_runs import ELSEWHERE, GONE, HERE, make_run

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

END = {"time": 2.0, "exit_code": 0, "outcome": "succeeded", "headline": ""}


def write_record(
    path: Path,
    host: str,
    *,
    process: ProcessIdentity | None = ELSEWHERE,
    ended: bool = True,
    started_at: float = 1.0,
    **changes: object,
) -> None:
    """A run.json."""
    content = {
        "run_id": "old",
        "command": ["x"],
        "host": host,
        "process": process._asdict() if process is not None else None,
        "started_at": started_at,
        "directory": "",
        "end": END if ended else None,
        **changes,
    }
    path.write_text(json.dumps(content))


def write_host(top: Path, host: str, content: str = "old", *, leads: bool = False, ended: bool = True) -> None:
    """What a host has left of a run."""
    (top / host / "attempt_0" / "rank_0").mkdir(parents=True)
    (top / host / "events.jsonl").write_text(f"{content}\n")
    (top / host / "attempt_0" / "rank_0" / "stdout.log").write_text(content)
    write_record(top / "run.json" if leads else top / host / "run.json", host, ended=ended)


def set_aside(top: Path, host: str, *, leads: bool = False, hosts: Collection[str] = ()) -> earlier_run.SetAside:
    """Set aside as ``host`` does it at its start."""
    fd = os.open(top, os.O_RDONLY)
    try:
        return earlier_run.set_aside(fd, host, leads=leads, hosts=hosts)
    finally:
        os.close(fd)


def files_in(top: Path) -> set[str]:
    """All files, without those of earlier runs."""
    paths = (path.relative_to(top) for path in top.rglob("*") if path.is_file())
    return {str(path) for path in paths if not path.parts[0].startswith("earlier-")}


def earlier_files(top: Path) -> set[str]:
    """All files of earlier runs, without the names of their directories."""
    return {str(path.relative_to(one)) for one in top.glob("earlier-*") for path in one.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_first", [True, False], ids=["the follower first", "the leader first"])
def test_a_host_that_led_the_earlier_run_and_follows_now_sets_its_files_aside(
    tmp_path: Path, *, is_first: bool
) -> None:
    """Its record is at the top, or where the new leader has moved it already."""
    write_host(tmp_path, "node1", leads=True)
    write_host(tmp_path, "node2")
    before = files_in(tmp_path)
    for host in ("node1", "node2") if is_first else ("node2", "node1"):
        moved, unheard_s, _ = set_aside(tmp_path, host, leads=host == "node2", hosts=["node2", "node1"])
        assert moved
        assert unheard_s is None
    assert files_in(tmp_path) == set()
    assert earlier_files(tmp_path) == before


def test_what_a_host_led_once_says_nothing_about_its_files_of_a_later_run(tmp_path: Path) -> None:
    """They have no record yet: perhaps that run has just begun."""
    write_host(tmp_path, "node1", leads=True)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"])[0]
    (earlier,) = tmp_path.glob("earlier-*/node1")
    shutil.rmtree(earlier)
    earlier.mkdir()  # so that nothing but the rule keeps another directory from its place
    write_host(tmp_path, "node1", "new")
    (tmp_path / "node1" / "run.json").unlink()
    write_record(tmp_path / "run.json", "node2", process=HERE, ended=False)
    assert set_aside(tmp_path, "node1") == SetAside()
    assert (tmp_path / "node1" / "events.jsonl").read_text() == "new\n"


def test_a_host_that_led_the_earlier_run_and_still_does_keeps_its_files(tmp_path: Path) -> None:
    write_host(tmp_path, "node1", leads=True)
    write_record(tmp_path / "run.json", "node1", process=HERE, ended=False)
    before = files_in(tmp_path)
    assert set_aside(tmp_path, "node1") == SetAside(unheard_s=0)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("leader", ["node1", "node2"])
def test_hosts_of_the_earlier_run_that_this_one_lacks_leave_nothing(tmp_path: Path, leader: str) -> None:
    """Otherwise their ranks would pass for those of this run."""
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == leader)
    before = files_in(tmp_path)
    moved, unheard_s, left = set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node4"])
    assert moved
    assert (unheard_s, left) == (None, "")
    assert files_in(tmp_path) == set()
    assert earlier_files(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "is_moved"),
    [
        ({}, True),
        ({"slurm_job": "4712"}, False),
        ({"rendezvous_id": "another"}, False),
        ({"host": "node4"}, False),
        ({"end": {**END, "outcome": "?"}}, False),
    ],
    ids=["of that run", "of another job of Slurm", "of another rendezvous", "of another host", "malformed"],
)
def test_only_hosts_of_the_run_that_was_moved_follow_it(
    tmp_path: Path, changes: dict[str, object], *, is_moved: bool
) -> None:
    """Jobs beside each other, such as those of a job array, may have one directory."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    ids: dict[str, Any] = {"slurm_job": "4711", "rendezvous_id": "train"}
    write_record(tmp_path / "run.json", "node1", **ids)
    write_record(tmp_path / "node2" / "run.json", **{"host": "node2", **ids, **changes})
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node3"]).name
    assert (tmp_path / "node2").exists() == (not is_moved)


@pytest.mark.parametrize(("leader", "is_moved"), [("node1", True), ("node2", False)])
def test_a_job_of_one_host_moves_what_another_one_led_only_from_the_top(
    tmp_path: Path, leader: str, *, is_moved: bool
) -> None:
    """It may be a job beside it, which has just ended."""
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == leader)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]).name
    assert files_in(tmp_path) == (set() if is_moved else {name for name in files_in(tmp_path) if name[:5] != "node1"})
    assert (tmp_path / "node3").exists() == (not is_moved)


@pytest.mark.parametrize("leader", ["node1", "node2"])
def test_a_host_that_has_written_since_it_ended_is_of_a_run_that_has_begun(tmp_path: Path, leader: str) -> None:
    """With one saferun per rank nothing is moved, and run.json is that of the run before until it is replaced."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == leader)
    at = time.time() - 3600
    for path in tmp_path.rglob("run.json"):
        os.utime(path, (at, at))
    (tmp_path / "node2" / "events.task_1.jsonl").write_text("new\n")
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node3"]).name
    assert (tmp_path / "node2" / "events.task_1.jsonl").read_text() == "new\n"
    assert not (tmp_path / "node1").exists()


@pytest.mark.parametrize("ahead_s", [0.0, 1e6])
@pytest.mark.parametrize(
    ("process", "age_s", "is_moved"),
    [(ELSEWHERE, 400.0, True), (ELSEWHERE, 200.0, False), (GONE, 200.0, False), (HERE, 400.0, False)],
    ids=["silent", "perhaps alive", "gone, and perhaps another one has begun", "alive"],
)
def test_a_host_that_was_killed_is_over_once_it_is_silent_by_the_clock_of_the_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: ProcessIdentity,
    age_s: float,
    ahead_s: float,
    *,
    is_moved: bool,
) -> None:
    """The clock of the host that looks may be wrong."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    write_record(tmp_path / "node2" / "run.json", "node2", process=process, ended=False)
    at = time.time() - age_s
    for path in (tmp_path / "node2" / "events.jsonl", tmp_path / "node2"):
        os.utime(path, (at, at))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node3"]).name
    assert (tmp_path / "node2").exists() == (not is_moved)


def test_a_host_that_has_followed_a_later_run_than_it_led_keeps_that_one_s_files(tmp_path: Path) -> None:
    """The leader of the earlier run follows twice: the second time, its files outside are those of the first."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    at = time.time() - 3600
    os.utime(tmp_path / "run.json", (at, at))
    (tmp_path / "earlier-1").mkdir()
    (tmp_path / "run.json").rename(tmp_path / "earlier-1" / "run.json")
    write_record(tmp_path / "run.json", "node2", process=HERE, ended=False)
    before = files_in(tmp_path)
    name, unheard_s, left = set_aside(tmp_path, "node1")
    assert (name, left) == ("", "")
    assert unheard_s, "a line says that another run may write there"
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("process", [GONE, ELSEWHERE])
def test_a_host_that_led_and_was_killed_is_moved_once_it_is_silent(tmp_path: Path, process: ProcessIdentity) -> None:
    """Until then, what it has written may be of a run that has begun there."""
    write_host(tmp_path, "node1", leads=True)
    write_record(tmp_path / "run.json", "node1", process=process, ended=False)
    moved, unheard_s, _ = set_aside(tmp_path, "node1")
    assert moved == ""
    assert unheard_s, "a line says that another run may write there"
    at = time.time() - 400
    for path in (tmp_path / "node1" / "events.jsonl", tmp_path / "node1"):
        os.utime(path, (at, at))
    assert set_aside(tmp_path, "node1").name


def test_where_there_is_no_time_to_look_at_all_hosts_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    monkeypatch.setattr(earlier_run, "_OTHERS_S", 0)
    warnings = list[str]()
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=warnings.append, files=DirectFiles()
    )
    run_dir.join("", host="node1", is_part=False, hosts=("node1", "node3"))
    run_dir.open()
    run_dir.close()
    (earlier,) = tmp_path.glob("earlier-*")
    (warning,) = warnings
    moved = f"{tmp_path} had the files of an earlier run: they are in {earlier} now"
    left = f"some may still be in {tmp_path}: not all of its directories could be read within 1 s"
    assert warning == f"{moved}; {left}"
    assert "node2/events.jsonl" in files_in(tmp_path)


def test_any_number_of_hosts_set_their_files_aside_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few names are tried before one that no other host has."""
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-120000")
    made = list[str]()
    real = os.mkdir

    def mkdir(path: str, *arguments: int, **options: int) -> None:
        made.append(path)
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    hosts = [f"node{number}" for number in range(150)]
    for host in hosts:
        write_host(tmp_path, host)
    made.clear()
    assert all(set_aside(tmp_path, host).name for host in hosts)
    assert files_in(tmp_path) == set()
    assert len(made) < 5 * len(hosts)


def test_of_the_directories_of_earlier_runs_each_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host makes one at each start: a job of a thousand hosts would ask the file server for 7000 files."""
    write_host(tmp_path, "node1", leads=True)
    folders = [f"earlier-{number}" for number in range(50)]
    for folder in folders:
        (tmp_path / folder / "node2").mkdir(parents=True)
    asked, real = list[object](), os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        asked.append(path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    aside = set_aside(tmp_path, "node1", leads=True, hosts=["node1"])
    monkeypatch.undo()
    assert aside.name
    assert not [path for path in asked if str(path).partition("/")[0] in folders]


def test_only_what_is_an_ended_host_s_is_moved(tmp_path: Path) -> None:
    """Not a host of this run, one that lives or says nothing, another run below it, or what is the user's own."""
    for host in ("node1", "node2", "node3", "node4"):
        write_host(tmp_path, host, leads=host == "node1", ended=host != "node3")
    write_record(tmp_path / "node3" / "run.json", "node3", process=HERE, ended=False)
    write_host(tmp_path, "node5")
    (tmp_path / "node5" / "run.json").unlink()  # it has just begun
    (tmp_path / "inner").mkdir()
    write_host(tmp_path / "inner", "node1", leads=True)
    (tmp_path / "checkpoints").mkdir()
    write_record(tmp_path / "checkpoints" / "run.json", "checkpoints")
    (tmp_path / "link").symlink_to(tmp_path / "node4")
    left = {name for name in files_in(tmp_path) if not name.startswith(("node1/", "node4/", "run.json"))}
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node2"])[0]
    assert files_in(tmp_path) == left
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("outcome", ["left", "stopped"])
@pytest.mark.parametrize("leads", [False, True])
def test_of_a_job_that_goes_on_without_its_host_another_run_there_moves_nothing(
    tmp_path: Path, *, leads: bool, outcome: str
) -> None:
    """An elastic job: the host led it, and left, perhaps because of a signal; another one leads now."""
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == "node1")
    end = {**END, "outcome": outcome, "time": time.time() - 60}
    for host, path in (("node1", tmp_path), ("node3", tmp_path / "node3")):
        write_record(path / "run.json", host, end=end)
    if not leads:
        (tmp_path / "run.json").rename(tmp_path / "node1" / "run.json")
    write_record((tmp_path / "node2" if leads else tmp_path) / "run.json", "node2", process=HERE, ended=False)
    before = files_in(tmp_path)
    aside = set_aside(tmp_path, "node1", leads=leads, hosts=["node1", "node2"] if leads else ())
    assert aside == SetAside(unheard_s=0)
    assert files_in(tmp_path) == before


def test_a_run_below_the_directory_that_lives_holds_back_nothing_and_stays(tmp_path: Path) -> None:
    """An evaluation beside a training that was stopped: ``--run-dir exp`` and ``--run-dir exp/eval``."""
    write_host(tmp_path, "node1", leads=True)
    write_record(tmp_path / "run.json", "node1", end={**END, "outcome": "stopped", "time": time.time()})
    inner = make_run(tmp_path, "eval", process=HERE, end=None)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]).name
    assert (inner / "run.json").exists()


@pytest.mark.parametrize("leads", [False, True])
def test_a_job_that_was_stopped_because_a_host_died_is_set_aside(tmp_path: Path, *, leads: bool) -> None:
    """Its record has no end. The scheduler has stopped the others, and starts the job again two minutes later."""
    end, at = {**END, "outcome": "stopped", "time": time.time() - 120}, time.time() - 120
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == "node1")
        write_record((tmp_path / host if host != "node1" else tmp_path) / "run.json", host, end=end)
    write_record(tmp_path / "node3" / "run.json", "node3", ended=False)
    for path in tmp_path.rglob("*"):
        lost_s = 30 if "node3" in path.parts else 0
        os.utime(path, (at - lost_s, at - lost_s))
    host = "node1" if leads else "node2"
    assert set_aside(tmp_path, host, leads=leads, hosts=["node1", "node2"] if leads else ()).name
    assert not (tmp_path / host).exists()


@pytest.mark.parametrize("leads", [False, True])
def test_the_leader_alone_looks_at_all_hosts_and_moves_nothing_where_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, leads: bool
) -> None:
    """A host that has not been looked at may live; a thousand hosts that look at a thousand each stop a file server."""
    end, opened = {**END, "outcome": "left"}, list[object]()
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == "node1")
        write_record((tmp_path / host if host != "node1" else tmp_path) / "run.json", host, end=end)
    write_record(tmp_path / "node3" / "run.json", "node3", process=HERE, ended=False)
    before, real = files_in(tmp_path), os.open
    monkeypatch.setattr(earlier_run, "_OTHERS_S", 0)

    def open_noted(path: str, *rest: int, **more: int) -> int:
        opened.append(path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", open_noted)
    host = "node1" if leads else "node2"
    aside = set_aside(tmp_path, host, leads=leads, hosts=["node1", "node2"] if leads else ())
    assert "node3" not in opened
    if leads:
        assert aside == SetAside(left="not all of its directories could be read within 1 s")
        assert files_in(tmp_path) == before
    else:
        assert aside.name


@pytest.mark.parametrize("lives", [False, True])
def test_of_the_hosts_of_a_job_that_was_stopped_only_those_are_read_that_were_heard_of_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lives: bool
) -> None:
    """A requeue of Slurm ends all of them so: hundreds could not be read within the time there is."""
    end, at, real, read = {**END, "outcome": "stopped"}, time.time() - 200, run_files.living_records, list[str]()
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == "node1")
        write_record((tmp_path / host if host != "node1" else tmp_path) / "run.json", host, end=end)
    write_record(tmp_path / "node3" / "run.json", "node3", ended=not lives)
    for path in tmp_path.rglob("*"):
        os.utime(path, (at, at))
    os.utime(tmp_path / "node3" / "events.jsonl", (at + 155, at + 155))

    def living_records(fd: int, *, until: float) -> Any:
        open_real = os.open

        def open_noted(path: str, *rest: int, **options: int) -> int:
            read.append(path)
            return open_real(path, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_noted)
            return real(fd, until=until)

    monkeypatch.setattr(earlier_run, "living_records", living_records)
    aside = set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node2", "node3"])
    assert bool(aside.name) == (not lives)
    assert "node3" in read
    assert {"node1", "node2"}.isdisjoint(read)


@pytest.mark.parametrize("process", [HERE, GONE, ELSEWHERE], ids=["alive", "killed", "on another boot"])
@pytest.mark.parametrize("end", [None, "stopped", "left", "failed"])
@pytest.mark.parametrize("leads", [False, True])
def test_a_host_that_comes_to_a_job_which_has_run_moves_nothing_and_warns_of_nothing(
    tmp_path: Path, process: ProcessIdentity, end: str | None, *, leads: bool
) -> None:
    """However it ended, what is there may be that job's: a pod that was killed is started again, and joins it."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    left = {**END, "outcome": end, "time": time.time() - 60} if end is not None else None
    write_record(tmp_path / "run.json", "node1", process=process, end=left)
    write_record(tmp_path / "node2" / "run.json", "node2", ended=False)
    before, warnings = files_in(tmp_path), list[str]()
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=warnings.append, files=DirectFiles()
    )
    run_dir.join("", host="node1", is_part=not leads, hosts=("node1", "node2"), is_late=True)
    run_dir.open()
    run_dir.close()
    assert before <= files_in(tmp_path)
    assert not list(tmp_path.glob("earlier-*"))
    assert warnings == []


def test_a_record_names_the_directory_of_its_host_whatever_the_job_calls_it_later(tmp_path: Path) -> None:
    """Two hosts of one name have another one while both are there; a record of another name is another run's."""
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=print, files=DirectFiles()
    )
    run_dir.join("", host="node1.0", is_part=False)
    run_dir.open()
    run_dir.join("", host="node1", is_part=False)
    assert run_dir.host == "node1.0" == os.path.basename(run_dir.host_path or "")
    run_dir.close()


def test_the_first_meeting_says_whether_the_job_has_run_before(tmp_path: Path) -> None:
    """The directory may not have been made in the first attempt."""
    write_host(tmp_path, "node1", leads=True)
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=print, files=DirectFiles()
    )
    for is_late in (False, True):
        run_dir.join("", host="node1", is_part=False, is_late=is_late)
    run_dir.open()
    run_dir.close()
    assert list(tmp_path.glob("earlier-*/run.json"))


def test_a_host_that_left_a_job_which_has_ended_sets_its_files_aside(tmp_path: Path) -> None:
    """What lives there now has begun later: it is part of this run."""
    write_host(tmp_path, "node1", leads=True)
    record = json.loads((tmp_path / "run.json").read_text())
    left = {**END, "outcome": "left"}
    (tmp_path / "run.json").write_text(json.dumps({**record, "end": left}))
    write_host(tmp_path, "node2", "new")
    write_record(tmp_path / "node2" / "run.json", "node2", process=HERE, ended=False, started_at=3.0)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node2"])[0]
    assert {name.partition("/")[0] for name in files_in(tmp_path)} == {"node2"}


@pytest.mark.parametrize("step", ["_new_directory", "_is_over"])
def test_of_a_host_that_begins_anew_meanwhile_nothing_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another job on it, which has the same directory, sets its files aside itself."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    real = getattr(earlier_run, step)

    def begin_anew(*arguments: Any) -> Any:
        found = real(*arguments)
        if "node1" not in arguments:
            monkeypatch.undo()
            assert set_aside(tmp_path, "node2")[0]
            write_host(tmp_path, "node2", "new")
            write_record(tmp_path / "node2" / "run.json", "node2", process=HERE, ended=False)
        return found

    monkeypatch.setattr(earlier_run, step, begin_anew)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"])[0]
    assert (tmp_path / "node2" / "events.jsonl").read_text() == "new\n"


def test_where_the_hosts_of_this_run_are_not_known_those_of_the_earlier_one_stay(tmp_path: Path) -> None:
    """A launch may end before its hosts have met."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    assert set_aside(tmp_path, "node1", leads=True)[0]
    assert "node2/events.jsonl" in files_in(tmp_path)


@pytest.mark.parametrize(("others", "is_moved"), [((), True), (("node3",), True), (("fe80::1",), False), (None, False)])
def test_the_leader_knows_the_hosts_of_this_run_by_their_directories(
    tmp_path: Path, others: tuple[str, ...] | None, *, is_moved: bool
) -> None:
    """A host whose name is no file's has a directory of another name: it could be any of those that are here."""
    for host in ("node1", "node2", "node3"):
        write_host(tmp_path, host, leads=host == "node1")
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=print, files=DirectFiles()
    )
    run_dir.join("", host="node1", is_part=False, hosts=None if others is None else ("node1", *others))
    run_dir.open()
    run_dir.close()
    left = {path.parent.name for path in tmp_path.glob("node*/attempt_0")}
    assert left == ({"node3"} & set(others or ()) if is_moved else {"node2", "node3"})


@pytest.mark.parametrize(
    ("process", "age_s", "message"),
    [
        (HERE, 400.0, "another run writes to"),
        (ELSEWHERE, 12.0, "another run may still write to"),
        (ELSEWHERE, 400.0, "had the files of an earlier run"),
        (GONE, 12.0, "had the files of an earlier run"),
    ],
)
def test_whether_another_run_writes_to_the_directory_is_said_as_far_as_it_is_known(
    tmp_path: Path, process: ProcessIdentity, age_s: float, message: str
) -> None:
    """A pod that was killed and started again sees no process of the one before."""
    path, warnings = make_run(tmp_path, "out", process=process, end=None, age_s=age_s), list[str]()
    run_dir = RunDirectory(
        str(path), wanted=True, host="node1", run_id="0123456789abcdef", warn=warnings.append, files=DirectFiles()
    )
    run_dir.open()
    run_dir.close()
    (warning,) = warnings
    assert message in warning
    assert bool(re.search(r"its files changed \d+ s ago", warning)) == ("may still" in warning)


@pytest.mark.parametrize("step", ["has_ended", "_new_directory"])
def test_of_two_runs_that_begin_at_once_the_second_moves_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """What the second has read of the directory is not true any more."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node1")
    real = getattr(earlier_run, step)

    def begin(*arguments: Any) -> Any:
        monkeypatch.undo()
        assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]).name
        write_host(tmp_path, "node1", "new")
        (tmp_path / "node1" / "run.json").unlink()
        return real(*arguments)

    monkeypatch.setattr(earlier_run, step, begin)
    aside = set_aside(tmp_path, "node2", leads=True, hosts=["node2", "node3"])
    assert aside == SetAside(unheard_s=0)
    assert (tmp_path / "node1" / "events.jsonl").read_text() == "new\n"
    assert len(list(tmp_path.glob("earlier-*"))) == 1


def test_the_run_json_of_a_run_that_begins_meanwhile_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the one that was read, and is moved in its place."""
    write_host(tmp_path, "node1", leads=True)
    (tmp_path / "report.txt").write_text("new")
    real = earlier_run._new_directory

    def begin(fd: int) -> str:
        write_record(tmp_path / "run.json", "node2", process=HERE, ended=False)
        return real(fd)

    monkeypatch.setattr(earlier_run, "_new_directory", begin)
    before = files_in(tmp_path)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]) == SetAside(unheard_s=0)
    assert json.loads((tmp_path / "run.json").read_text())["host"] == "node2"
    assert files_in(tmp_path) == before
    assert not list(tmp_path.glob("earlier-*"))


def test_a_file_system_that_renames_by_a_copy_has_its_earlier_runs_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores do, and the copy has a time of its own."""
    write_host(tmp_path, "node1", leads=True)
    os.utime(tmp_path / "run.json", (3600, 3600))
    before, real = files_in(tmp_path), os.rename

    def rename(old: str, new: str, **directories: Any) -> None:
        real(old, new, **directories)
        os.utime(new, dir_fd=directories["dst_dir_fd"])

    monkeypatch.setattr(os, "rename", rename)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]).name
    assert earlier_files(tmp_path) == before


def test_a_run_json_that_cannot_be_read_where_it_was_moved_to_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it is, is not known then, and no other run is."""
    write_host(tmp_path, "node1", leads=True)
    before, real = files_in(tmp_path), run_files.read_run_record

    def read_run_record(fd: int, name: str = "run.json") -> Any:
        return None if name.startswith("earlier-") else real(fd, name)

    monkeypatch.setattr(earlier_run, "read_run_record", read_run_record)
    assert set_aside(tmp_path, "node1", leads=True, hosts=["node1"]) == SetAside(left="run.json: it cannot be read")
    assert files_in(tmp_path) == before
    assert not list(tmp_path.glob("earlier-*"))


@pytest.mark.parametrize("outcome", ["succeeded", None])
@pytest.mark.parametrize(("age_s", "is_moved"), [(400.0, True), (200.0, False)])
@pytest.mark.parametrize("follows", [False, True])
def test_what_a_host_writes_long_after_its_run_json_holds_it_back_for_five_minutes(
    tmp_path: Path, outcome: str | None, age_s: float, *, follows: bool, is_moved: bool
) -> None:
    """The page of a large job, and --on-event, take longer; then a line says why the files stay."""
    for host in ("node1", "node2"):
        write_host(tmp_path, host, leads=host == "node2" if follows else host == "node1", ended=outcome is not None)
    write_record(tmp_path / "run.json", "node2" if follows else "node1", process=GONE, ended=outcome is not None)
    at = time.time()
    for path, old_s in ((tmp_path, age_s + 60), (tmp_path / "node2", age_s + 60), (tmp_path / "node1", age_s + 60)):
        for one in (path / "run.json", path / "events.jsonl", path):
            if one.exists():
                os.utime(one, (at - old_s, at - old_s))
    os.utime(tmp_path / "node2" / "events.jsonl", (at - age_s, at - age_s))
    if follows:
        name, unheard_s, left = set_aside(tmp_path, "node2")
        assert (bool(name), unheard_s is None, left) == (is_moved, is_moved, "")
    else:
        name, unheard_s, left = set_aside(tmp_path, "node1", leads=True, hosts=["node1", "node3"])
        assert (bool(name), unheard_s, left) == (True, None, "" if is_moved else "node2 may not have ended")
    assert (tmp_path / "node2").exists() == (not is_moved)


def test_of_many_hosts_that_stay_the_line_names_some(tmp_path: Path) -> None:
    """Killed within the last minutes; those of other runs, and of the user, are not meant."""
    for number in range(7):
        write_host(tmp_path, f"node{number}", leads=number == 0, ended=number == 0)
    write_record(tmp_path / "node6" / "run.json", "node6", ended=False, rendezvous_id="another")
    (tmp_path / "checkpoints").mkdir()
    assert set_aside(tmp_path, "node0", leads=True, hosts=["node0", "node9"])[1:] == (
        None,
        "node1, node2, node3 and 2 more may not have ended",
    )


@pytest.mark.parametrize("stuck", [{"node1"}, {"node1", "run.json"}])
def test_what_the_file_system_does_not_move_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: set[str]
) -> None:
    """A mount point; a directory in which everybody may remove only their own files."""
    write_host(tmp_path, "node1", leads=True)
    real, warnings = os.rename, list[str]()

    def rename(name: str, *rest: Any, **options: Any) -> None:
        if name in stuck:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(name, *rest, **options)

    monkeypatch.setattr(os, "rename", rename)
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=warnings.append, files=DirectFiles()
    )
    run_dir.open()
    run_dir.close()
    (warning,) = warnings
    earlier = [path.name for path in tmp_path.glob("earlier-*")]
    assert len(earlier) == 2 - len(stuck)
    if earlier:
        moved = f"had the files of an earlier run: they are in {tmp_path / earlier[0]} now"
        assert warning == f"{tmp_path} {moved}; some may still be in {tmp_path}: node1: Device or resource busy"
    else:
        has = "has the files of an earlier run, which may be overwritten"
        assert warning == f"{tmp_path} {has}: run.json: Device or resource busy"


def test_what_cannot_be_moved_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the earlier run may be overwritten."""
    write_host(tmp_path, "node1", leads=True)

    def fail(*_: object) -> str:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(earlier_run, "_new_directory", fail)
    warnings = list[str]()
    run_dir = RunDirectory(
        str(tmp_path), wanted=True, host="node1", run_id="0123456789abcdef", warn=warnings.append, files=DirectFiles()
    )
    run_dir.open()
    run_dir.close()
    (warning,) = warnings
    assert warning.endswith("which may be overwritten: no directory can be made for them: Disk quota exceeded")
