"""torchrun's options about streams, and the files that they lead to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from saferun.files import log_files
from saferun.files.file_stream import OnAnswer
from saferun.files.log_files import LogDirectory
from saferun.files.run_dir import RunDirectory
from saferun.model import LogDestinations, Placement
from tests.direct_files import DirectFiles
from tests.unit.samples import logs_of, second_host


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"), wanted=True, host="node3", run_id="ab", warn=print, files=DirectFiles())


def destinations_of(logs: LogDirectory, placement: Placement, attempt: int) -> LogDestinations:
    """Where all goes.

    Raises:
        OSError: what the user asked for cannot be made.
    """
    found: list[LogDestinations | OSError] = []
    logs.destinations(placement, attempt, found.append)
    (answer,) = found
    if isinstance(answer, OSError):
        raise answer
    return answer


def test_without_options_everything_goes_to_the_console(tmp_path: Path, run_dir: RunDirectory) -> None:
    """And error files to the run directory, by rank."""
    destinations = destinations_of(LogDirectory(logs_of(), run_dir), second_host(), 0)
    assert destinations.stdouts == destinations.stderrs == ("", "")
    assert destinations.tee_stdouts == destinations.tee_stderrs == frozenset()
    base = tmp_path / "run" / "node3" / "attempt_0"
    assert destinations.error_files == (str(base / "rank_3" / "error.json"), str(base / "rank_4" / "error.json"))
    assert destinations.filtered_stdout == str(base / "filtered_stdout.log")
    assert destinations.filtered_stderr == str(base / "filtered_stderr.log")
    run_dir.close()


def test_log_dir_has_torchruns_layout(tmp_path: Path, run_dir: RunDirectory) -> None:
    """<log-dir>/<run id>_<random>/attempt_<N>/<local rank>/: the same random part for all attempts."""
    logs = LogDirectory(logs_of(str(tmp_path / "logs"), redirects=(3, 3)), run_dir)
    jobs = set()
    for attempt in (0, 1):
        destinations = destinations_of(logs, second_host(), attempt)
        for i in (0, 1):
            out = Path(destinations.stdouts[i])
            assert (out.name, out.parent.name, out.parent.parent.name) == ("stdout.log", str(i), f"attempt_{attempt}")
            assert Path(destinations.stderrs[i]) == out.parent / "stderr.log"
            assert Path(destinations.error_files[i]) == out.parent / "error.json"
            assert out.parent.is_dir()
            jobs.add(out.parents[2])
        assert Path(destinations.filtered_stdout).parent.name == f"attempt_{attempt}"
    (job,) = jobs
    assert job.parent == tmp_path / "logs"
    assert re.fullmatch(r"job7_[0-9a-z]{8}", job.name)
    run_dir.close()


@pytest.mark.parametrize("name", ["logs", "./logs", "../logs"])
def test_below_a_relative_log_dir_error_files_have_absolute_paths(
    tmp_path: Path, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A script that has changed its directory would lose its own exception. Shown paths stay as the user wrote them."""
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.chdir(job)
    destinations = destinations_of(LogDirectory(logs_of(name, redirects=(3, 3)), run_dir), second_host(), 0)
    for out, error in zip(destinations.stdouts, destinations.error_files, strict=True):
        assert out.startswith(f"{name}/")
        assert os.path.isabs(error)
        assert Path(error).parent.samefile(Path(out).parent)
    run_dir.close()


def test_a_relative_log_dir_works_as_far_as_it_can_where_the_current_directory_is_gone(
    tmp_path: Path, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its absolute path is not known then."""
    monkeypatch.setattr(log_files, "current_directory", lambda: "")
    monkeypatch.chdir(tmp_path)
    destinations = destinations_of(LogDirectory(logs_of("logs"), run_dir), second_host(), 0)
    assert all(path.startswith("logs/") for path in destinations.error_files)
    run_dir.close()


def test_two_launches_with_one_log_dir_stay_apart(tmp_path: Path, run_dir: RunDirectory) -> None:
    """The random part is for that."""
    for _ in range(2):
        destinations_of(LogDirectory(logs_of(str(tmp_path / "logs")), run_dir), second_host(), 0)
    assert len(list((tmp_path / "logs").iterdir())) == 2
    run_dir.close()


@pytest.mark.parametrize(
    ("redirects", "tee", "files", "teed"),
    [
        ((1, 0), (0, 0), ("o-", "--"), ("--", "--")),
        ((2, 3), (0, 0), ("-e", "oe"), ("--", "--")),
        ((0, 0), (3, 1), ("oe", "o-"), ("oe", "o-")),
        ((1, 2), (2, 1), ("oe", "oe"), ("-e", "o-")),
    ],
)
def test_redirects_and_tees(
    redirects: tuple[int, int],
    tee: tuple[int, int],
    files: tuple[str, str],
    teed: tuple[str, str],
    run_dir: RunDirectory,
) -> None:
    """Each stream of each rank by itself: ``o`` stdout, ``e`` stderr."""
    destinations = destinations_of(LogDirectory(logs_of(redirects=redirects, tee=tee), run_dir), second_host(), 0)
    for i in (0, 1):
        assert bool(destinations.stdouts[i]) == ("o" in files[i])
        assert bool(destinations.stderrs[i]) == ("e" in files[i])
        assert (i in destinations.tee_stdouts) == ("o" in teed[i])
        assert (i in destinations.tee_stderrs) == ("e" in teed[i])
    run_dir.close()


def test_ranks_that_are_filtered_out_do_not_reach_the_console(run_dir: RunDirectory) -> None:
    """Neither directly nor teed; what goes to files goes there still."""
    logs = LogDirectory(logs_of(redirects=(0, 1), tee=(2, 2), shown=frozenset({0})), run_dir)
    destinations = destinations_of(logs, second_host(), 0)
    assert destinations.stdouts[0] == ""
    assert destinations.stdouts[1].endswith("stdout.log")
    assert destinations.stderrs[1].endswith("stderr.log")
    assert destinations.tee_stderrs == {0}
    plain = destinations_of(LogDirectory(logs_of(shown=frozenset({0})), run_dir), second_host(), 1)
    assert plain.stdouts == plain.stderrs == ("", os.devnull)
    run_dir.close()


def test_a_log_dir_of_dev_null_keeps_nothing(run_dir: RunDirectory) -> None:
    """Torchrun's way to say: no files."""
    destinations = destinations_of(LogDirectory(logs_of(os.devnull, redirects=(3, 3)), run_dir), second_host(), 0)
    assert destinations.stdouts == destinations.error_files == ("", "")
    assert destinations.filtered_stdout == os.devnull
    run_dir.close()


def test_errors_of_a_run_before_are_not_shown(run_dir: RunDirectory) -> None:
    """A run directory may be used again."""
    run_dir.open()
    old = Path(run_dir.rank_path(0, 3) or "") / "error.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    destinations_of(LogDirectory(logs_of(), run_dir), second_host(), 0)
    assert not old.exists()
    run_dir.close()


def test_a_log_dir_that_cannot_be_made_is_an_error(tmp_path: Path, run_dir: RunDirectory) -> None:
    """The user has asked for these files."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        destinations_of(LogDirectory(logs_of(str(tmp_path / "file" / "logs")), run_dir), second_host(), 0)
    run_dir.close()


def test_without_a_run_directory_error_files_are_temporary() -> None:
    """``--run-dir none``."""
    run_dir = RunDirectory(
        None, wanted=False, host="node3", run_id=os.urandom(8).hex(), warn=print, files=DirectFiles()
    )
    destinations = destinations_of(LogDirectory(logs_of(), run_dir), second_host(), 0)
    assert all(os.path.isdir(os.path.dirname(path)) for path in destinations.error_files)
    run_dir.close()
    assert not any(os.path.exists(os.path.dirname(path)) for path in destinations.error_files)


def test_error_files_have_a_place_also_when_the_run_directory_has_no_room_left(tmp_path: Path) -> None:
    """A disk that has filled up must not stop a restart; here a file stands in the way."""
    warnings: list[str] = []
    run_dir = RunDirectory(
        str(tmp_path / "run"),
        wanted=True,
        host="node3",
        run_id=os.urandom(8).hex(),
        warn=warnings.append,
        files=DirectFiles(),
    )
    run_dir.open()
    (tmp_path / "run" / "node3" / "attempt_1").write_text("")
    destinations = destinations_of(LogDirectory(logs_of(), run_dir), second_host(), 1)
    assert all(os.path.isdir(os.path.dirname(path)) for path in destinations.error_files)
    run_dir.close()
    assert not any(os.path.exists(os.path.dirname(path)) for path in destinations.error_files)
    assert len(warnings) == 1


class Silent(DirectFiles):
    """A file system that does not answer."""

    def ask(self, name: str, arguments: list[object], on_answer: OnAnswer | None = None) -> None:
        if on_answer is not None and name != "remove_directories":
            on_answer(None)
        elif name == "remove_directories":
            super().ask(name, arguments, on_answer)


@pytest.mark.parametrize("log_dir", [None, "logs"])
def test_a_file_system_that_does_not_answer_keeps_no_rank_from_its_start(tmp_path: Path, log_dir: str | None) -> None:
    """Its files are named all the same: they follow when it answers. Error files are where ranks can write them."""
    run_dir = RunDirectory(
        str(tmp_path / "run"), wanted=True, host="node3", run_id=os.urandom(8).hex(), warn=pytest.fail, files=Silent()
    )
    base = str(tmp_path / log_dir) if log_dir else None
    destinations = destinations_of(LogDirectory(logs_of(base, redirects=(3, 3)), run_dir), second_host(), 0)
    assert destinations.stdouts[0].startswith(base or str(tmp_path / "run" / "node3"))
    assert all(os.path.isdir(os.path.dirname(path)) for path in destinations.error_files)
    assert not run_dir.keeps_all
    run_dir.close()
