"""``--run-dir none``: saferunctl finds such a run while it lives, and nothing is left of it afterwards."""

from __future__ import annotations

import json
import os
import signal
import stat
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.process.control_clients import saferunctl
from tests.process.launching import END_AS_TOLD, STAY, Job, customized, in_saferun, kill, running, two_lines, until

QUIET = ("--run-dir", "none", "--preflight", "off")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """The place for records in these tests: nothing else is in it."""
    path = tmp_path / "runtime"
    path.mkdir(0o700)
    return path


def launched(folder: Path, runtime: Path, program: str, *options: str, **arguments: Any) -> Any:
    """A launch whose record is in ``runtime``, as saferunctl knows from its environment."""
    environ = {"XDG_RUNTIME_DIR": str(runtime), **arguments.pop("environ", {})}
    return running(folder, program, *QUIET, *options, environ=environ, **{"store": False, **arguments})


def records(runtime: Path) -> list[Path]:
    """The records that are there: others may vanish meanwhile."""
    found = [Path(folder) / name for folder, _below, names in os.walk(runtime / "saferun") for name in names]
    return sorted(path for path in found if fnmatch(path.name, "run*.json"))


def listed(job: Job, *arguments: str) -> list[dict[str, Any]]:
    """What ``saferunctl list`` shows of this test: launches of other tests may live at the same time."""
    own = job.environ["XDG_RUNTIME_DIR"]
    return [run for run in all_listed(job, *arguments) if Path(run["path"]).is_relative_to(own)]


def all_listed(job: Job, *arguments: str) -> list[dict[str, Any]]:
    """What ``saferunctl list`` shows."""
    runs = json.loads(saferunctl(job, "list", "--json", *arguments).stdout)["runs"]
    assert isinstance(runs, list)
    return runs


def test_it_is_found_by_its_id_asked_and_ended(folder: Path, runtime: Path) -> None:
    """Each verb; and afterwards nothing is left."""
    with launched(folder, runtime, STAY, nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: records(runtime), "the record")
        (run,) = listed(job)
        assert run["state"] == "running"
        assert not listed(job, "--here")
        for word in (run["run_id"], run["run_id"][:6], Path(run["path"]).name, run["path"], "latest"):
            status = json.loads(saferunctl(job, "status", word, "--json").stdout)
            assert len(status["live"]["hosts"][0]["ranks"]) == 2
        assert "attempt 1" in saferunctl(job, "restart", run["run_id"]).stdout
        job.hear("ready", 2)
        without = saferunctl(job, "logs", run["run_id"])
        assert (without.returncode, without.stdout) == (2, "")
        assert two_lines(without.stderr)[0].endswith("is a run with --run-dir none: its output is in no file")
        done = saferunctl(job, "stop", run["run_id"][:8])
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1].endswith("it has ended: stopped, exit code 143")
        assert job.wait() == 143
        assert not (runtime / "saferun").exists()
        assert listed(job) == []
        gone = saferunctl(job, "stop", run["run_id"])
        assert gone.returncode == 2
        assert two_lines(gone.stderr)[0].endswith(f"there is no run {run['run_id']}")


def test_kill_says_how_it_ended_too(folder: Path, runtime: Path) -> None:
    with launched(folder, runtime, END_AS_TOLD, arguments=("stubborn",)) as job:
        job.hear("ready")
        (record,) = until(lambda: records(runtime), "the record")
        answer = json.loads(saferunctl(job, "kill", str(record.parent), "--json").stdout)
        assert (answer["asked"], answer["state"], answer["exit_code"]) == ("kill", "stopped", 137)
        assert job.wait() == 137


def test_nobody_else_can_read_it(folder: Path, runtime: Path) -> None:
    with launched(folder, runtime, STAY) as job:
        job.hear("ready")
        (record,) = until(lambda: records(runtime), "the record")
        for directory in record.parents[:2]:
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        assert saferunctl(job, "kill", str(record.parent)).returncode == 0
        job.wait()


def test_what_a_launch_that_was_killed_has_left_is_removed_by_the_next_one(folder: Path, runtime: Path) -> None:
    """Meanwhile the run is lost. That of a launch that lives stays."""
    with launched(folder, runtime, STAY) as first:
        first.hear("ready")
        (left,) = until(lambda: records(runtime), "the record")
        kill(first.process.pid, signal.SIGKILL)
        first.wait()
        assert [run["state"] for run in listed(first)] == ["lost"]
        with launched(folder.with_name("second"), runtime, STAY) as second:
            second.hear("ready")
            until(lambda: records(runtime) and left not in records(runtime), "it is removed")
            with launched(folder.with_name("third"), runtime, STAY) as third:
                third.hear("ready")
                until(lambda: len(records(runtime)) == 2, "both are there")
                for job in (second, third):
                    job.send(signal.SIGTERM)
                    job.wait()
    assert not (runtime / "saferun").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["missing", "a file", "open to all", "a link"])
def test_it_is_elsewhere_where_there_is_no_private_directory(folder: Path, runtime: Path, place: str) -> None:
    if place == "missing":
        runtime.rmdir()
    elif place == "a file":
        (runtime / "saferun").touch()
    elif place == "open to all":
        (runtime / "saferun").mkdir()
        (runtime / "saferun").chmod(0o777)
    elif place == "a link":
        (runtime / "saferun").symlink_to(folder)
    with launched(folder, runtime, STAY) as job:
        job.hear("ready")
        pid = job.process.pid
        found = until(lambda: [run for run in all_listed(job) if run_pid(run) == pid], "it is found")
        assert not Path(found[0]["path"]).is_relative_to(runtime)
        assert saferunctl(job, "kill", found[0]["run_id"]).returncode == 0
        assert job.wait() == 137
        assert not Path(found[0]["path"]).exists()


def run_pid(run: dict[str, Any]) -> int:
    """The pid of a run's saferun; 0: it is gone."""
    try:
        return int(json.loads((Path(run["path"]) / "run.json").read_text())["process"]["pid"])
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("code", slow_but(["0", "3"], "3"))
def test_without_a_place_for_it_nothing_else_is_missing(folder: Path, code: str) -> None:
    """It is a convenience, as the index of runs is."""
    folder.mkdir()
    source = "import saferun.files.live_records as r; r.record_directories = lambda _: ['/proc/x', '/dev/null/y']"
    with running(
        folder, END_AS_TOLD, *QUIET, arguments=(code,), environ=customized(folder, in_saferun(source)), store=False
    ) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == (1 if code == "3" else 0)
        assert "run.json" not in job.err


@pytest.mark.slow
def test_very_long_paths_keep_no_run_from_being_asked(folder: Path) -> None:
    """The path of a Unix socket may have 107 bytes: those of the run directory and of TMPDIR may have more."""
    deep = folder.joinpath(*["a-directory-with-a-long-name"] * 8)
    deep.mkdir(parents=True)
    options = ("--preflight", "off", "--run-dir", str(deep / "run"))
    with running(folder / "launch", STAY, *options, environ={"TMPDIR": str(deep)}, store=False) as job:
        job.hear("ready")
        run = deep / "run"
        path = str(until(lambda: read(run / "run.json").get("control_socket"), "the control socket"))
        assert len(os.fsencode(path)) < 108
        assert json.loads(saferunctl(job, "status", str(run), "--json").stdout)["live"]["hosts"]
        assert "exit code 143" in saferunctl(job, "stop", str(run)).stdout
        assert job.wait() == 143


def read(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty: there is none yet."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("options", [("-r", "3"), pytest.param(("-t", "1"), marks=pytest.mark.slow)])
def test_logs_that_the_user_wants_stay_where_torchrun_s_would(
    folder: Path, runtime: Path, options: tuple[str, ...]
) -> None:
    """In a temporary directory, whose name is in one line."""
    with launched(folder, runtime, "print('a line of the rank')", *options, sweeps=False) as job:
        assert job.wait() == 0
        (log,) = (folder / "tmp").rglob("stdout.log")
        assert log.read_text() == "a line of the rank\n"
        base = next(path for path in log.parents if path.parent == folder / "tmp")
        assert f"the log files of the ranks are in {base}; they stay there" in " ".join(job.err.split())
        assert base.stat().st_mode & 0o077 == 0


def test_without_such_options_nothing_stays(folder: Path, runtime: Path) -> None:
    with launched(folder, runtime, "print('a line of the rank')") as job:
        assert job.wait() == 0
        assert "log files" not in job.err
