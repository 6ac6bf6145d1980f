"""Cores whose names lead to other files by the time at which they are read, moved or deleted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import cores
from saferun.captures.core_reading import CoreJob, CoreReading, read_cores
from saferun.captures.wire import CoreRequest, DeadProcess
from saferun.ctl import main as saferunctl
from saferun.evidence.job_evidence import CoreDump
from saferun.linux.core_files import CoreFile, delete_core, find_cores, move_core, open_core
from saferun.linux.core_notes import CoreError, read_core_notes
from saferun.linux.core_pattern import CorePattern
from tests.breadth import slow_but
from tests.process.core_steps import PATTERN, Crew, examined, functions
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root
from tests.process.test_core_tools import limits
from tests.process.test_cores import crew
from tests.process.watching import ROUNDS, Attacker, rounds_until
from tests.unit.linux.test_core_files import make_core

__all__ = ["crew", "limits"]

leaves_cores = pytest.mark.skipif(not PATTERN.is_relative, reason=f"no cores in the directory: {PATTERN.description()}")
HERE = CorePattern("core.%e", uses_pid=False)


@pytest.fixture(name="directory")
def _directory() -> Iterator[Path]:
    with directory_for_all(0o777) as directory:
        yield directory


def look_of(crew: Crew, **wanted: Any) -> CoreDump:
    dead = DeadProcess(0, crew.pids[0], signal.SIGSEGV, str(crew.directory))
    request = CoreRequest((dead,), directory=str(crew.files), since=crew.began, budget_s=60.0)._replace(**wanted)
    [look] = examined(request)
    return look


@leaves_cores
@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("tool", slow_but(["pystack", "gdb"], "pystack"))
def test_tools_read_the_core_that_was_found_whatever_has_its_name_by_then(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """Whose it is was asked before; they believe what is in it."""
    crew.start("step")
    crew.crash()
    [name] = crew.cores()
    if tool == "gdb":
        monkeypatch.setitem(sys.modules, "pystack", None)

    def exchange(jobs: list[CoreJob], *arguments: Any, **named: Any) -> list[CoreReading]:
        os.rename(crew.directory / name, crew.directory / "away")
        (crew.directory / name).write_bytes(make_core(4711))
        return read_cores(jobs, *arguments, **named)

    monkeypatch.setattr(cores, "read_cores", exchange)
    look = look_of(crew)
    assert "step" in functions(look)
    assert tool in look.tool
    # Neither is deleted: the one is no core of the run, and the other one's name is not known.
    assert look.kept
    assert (crew.directory / name).exists()
    assert (crew.directory / "away").exists()


@leaves_cores
@pytest.mark.usefixtures("limits")
def test_a_core_that_was_exchanged_before_it_was_opened_is_not_read(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.start("step")
    crew.crash()
    [name] = crew.cores()
    readings = cores._readings

    def exchange(*arguments: Any, **named: Any) -> list[CoreReading]:
        (crew.directory / "other").write_bytes(make_core(crew.pids[0]))
        os.replace(crew.directory / "other", crew.directory / name)
        return readings(*arguments, **named)

    monkeypatch.setattr(cores, "_readings", exchange)
    look = look_of(crew, mode="keep")
    assert look.failure == "the file was replaced"
    assert look.threads == ()
    assert (crew.directory / name).exists()


@needs_root
@leaves_cores
@pytest.mark.usefixtures("limits")
def test_a_core_that_is_named_may_be_anybodys(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    """Root looks at the core of a user, or a colleague at another one's."""
    crew.start("step")
    crew.crash()
    [name] = crew.cores()
    os.chown(crew.directory / name, SOMEBODY, SOMEBODY)
    assert saferunctl(["core", str(crew.directory / name)]) == 0
    assert "read_nothing" in capsys.readouterr().out


def test_a_core_is_moved_only_where_it_is_the_one_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "core.a").write_bytes(make_core(4711))
    (tmp_path / "diary").write_text("mine")
    [core] = find_cores(HERE, [str(tmp_path)], time.time() - 1000)
    rename = os.rename

    def exchange(source: str, target: str, **named: int) -> None:
        if source == core.path:
            rename(core.path, tmp_path / "away")
            rename(tmp_path / "diary", core.path)
        rename(source, target, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", exchange)
        assert move_core(core, str(tmp_path / "run" / "rank_0.core")) == core.path
    assert os.listdir(tmp_path / "run") == []
    assert (tmp_path / "core.a").read_text() == "mine"
    assert move_core(core._replace(path=str(tmp_path / "away")), str(tmp_path / "run" / "rank_0.core")) == str(
        tmp_path / "run" / "rank_0.core"
    )


# ------------------------------------------------------------------------------------------------------------ the race


def exchange_cores(attacker: Attacker, directory: Path, theirs: Path, mine: Path) -> None:
    """As soon as somebody opens the core: another one, a link to a file of the victim's, and nothing."""
    attacker.watch(directory)
    attacker.is_ready()
    for turn in range(30):
        attacker.wait()
        if not attacker.goes_on:
            return
        try:
            os.rename(directory / "core.a", directory / f"away.{turn}")
            if turn % 2:
                os.symlink(mine, directory / "core.a")
            else:
                os.link(theirs, directory / "core.a")
        except OSError:
            continue


@needs_root
@ROUNDS
def test_of_cores_that_are_exchanged_nobody_elses_is_read_moved_or_deleted(
    directory: Path, tmp_path: Path, rounds: int
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(make_core(1))
    (tmp_path / "run").mkdir()
    theirs = directory / "theirs"
    as_user(lambda: theirs.write_bytes(make_core(666)))
    swapped: list[int] = []
    for number in rounds_until(rounds, swapped):
        folder = directory / str(number)
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "core.a").write_bytes(make_core(4711))
        with Attacker(partial(exchange_cores, directory=folder, theirs=theirs, mine=mine)):
            target = tmp_path / "run" / f"{number}.core"
            for core in find_cores(HERE, [str(folder)], time.time() - 1000):
                assert core.notes is not None
                assert core.notes.pid == 4711
                assert pid_of(core) in {4711, 0}
                path = move_core(core, str(target))
                delete_core(core._replace(path=path))
        if any(path.name.startswith("away") for path in folder.iterdir()):
            swapped.append(number)
        assert not target.exists() or read_core_notes(str(target)).pid == 4711
        assert read_core_notes(str(mine)).pid == 1
        assert theirs.exists()


def pid_of(core: CoreFile) -> int:
    try:
        fd = open_core(core)
    except CoreError:
        return 0
    with open(fd, "rb"):
        return read_core_notes(fd).pid
