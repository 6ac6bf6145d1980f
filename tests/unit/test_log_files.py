"""torchrun's options about streams, and the files that they lead to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from saferun.host.log_files import LogDirectory
from saferun.host.run_dir import RunDirectory
from tests.unit.samples import logs_of, second_host


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"), wanted=True, host="node3", run_id="ab", warn=print)


def test_without_options_everything_goes_to_the_console(tmp_path: Path, run_dir: RunDirectory) -> None:
    """And error files to the run directory, by rank."""
    destinations = LogDirectory(logs_of(), run_dir).destinations(second_host(), 0)
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
        destinations = logs.destinations(second_host(), attempt)
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


def test_two_launches_with_one_log_dir_stay_apart(tmp_path: Path, run_dir: RunDirectory) -> None:
    """The random part is for that."""
    for _ in range(2):
        LogDirectory(logs_of(str(tmp_path / "logs")), run_dir).destinations(second_host(), 0)
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
    destinations = LogDirectory(logs_of(redirects=redirects, tee=tee), run_dir).destinations(second_host(), 0)
    for i in (0, 1):
        assert bool(destinations.stdouts[i]) == ("o" in files[i])
        assert bool(destinations.stderrs[i]) == ("e" in files[i])
        assert (i in destinations.tee_stdouts) == ("o" in teed[i])
        assert (i in destinations.tee_stderrs) == ("e" in teed[i])
    run_dir.close()


def test_ranks_that_are_filtered_out_do_not_reach_the_console(run_dir: RunDirectory) -> None:
    """Neither directly nor teed; what goes to files goes there still."""
    logs = LogDirectory(logs_of(redirects=(0, 1), tee=(2, 2), shown=frozenset({0})), run_dir)
    destinations = logs.destinations(second_host(), 0)
    assert destinations.stdouts[0] == ""
    assert destinations.stdouts[1].endswith("stdout.log")
    assert destinations.stderrs[1].endswith("stderr.log")
    assert destinations.tee_stderrs == {0}
    plain = LogDirectory(logs_of(shown=frozenset({0})), run_dir).destinations(second_host(), 1)
    assert plain.stdouts == plain.stderrs == ("", os.devnull)
    run_dir.close()


def test_a_log_dir_of_dev_null_keeps_nothing(run_dir: RunDirectory) -> None:
    """Torchrun's way to say: no files."""
    destinations = LogDirectory(logs_of(os.devnull, redirects=(3, 3)), run_dir).destinations(second_host(), 0)
    assert destinations.stdouts == destinations.error_files == ("", "")
    assert destinations.filtered_stdout == os.devnull
    run_dir.close()


def test_errors_of_a_run_before_are_not_shown(run_dir: RunDirectory) -> None:
    """A run directory may be used again."""
    old = Path(run_dir.rank_path(0, 3)) / "error.json"
    old.write_text("{}")
    LogDirectory(logs_of(), run_dir).destinations(second_host(), 0)
    assert not old.exists()
    run_dir.close()


def test_a_log_dir_that_cannot_be_made_is_an_error(tmp_path: Path, run_dir: RunDirectory) -> None:
    """The user has asked for these files."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        LogDirectory(logs_of(str(tmp_path / "file" / "logs")), run_dir).destinations(second_host(), 0)
    run_dir.close()


def test_without_a_run_directory_error_files_are_temporary() -> None:
    """``--run-dir none``."""
    run_dir = RunDirectory(None, wanted=False, host="node3", run_id=os.urandom(8).hex(), warn=print)
    destinations = LogDirectory(logs_of(), run_dir).destinations(second_host(), 0)
    assert all(os.path.isdir(os.path.dirname(path)) for path in destinations.error_files)
    run_dir.close()
    assert not any(os.path.exists(os.path.dirname(path)) for path in destinations.error_files)
