"""Run directories that belong to other users, or in which they have planted something."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from saferun.files import trees
from saferun.files.file_stream import APPENDED, FRESH, WHOLE
from saferun.files.operations import make_run_directory
from tests.breadth import slow_but
from tests.direct_files import DirectFiles
from tests.process.launching import running
from tests.process.planting import (
    content_of,
)
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root

pytestmark = needs_root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What is to be left alone."""
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "id_rsa").write_text("secret")
    (home / "thesis" / "chapter").write_text("one")
    return home


# --------------------------------------------------------------------------------------------------------------------
# What is written


def prepared(command: str) -> list[str]:
    """A command before saferun, in the directory of the job."""
    return ["sh", "-c", f'{command}; exec "$@"', "sh"]


HELLO = "import os\nprint('hello')\n"


@pytest.mark.parametrize("command", slow_but(["mkdir run", "mkdir -m 700 run", "mkdir -m 777 run"], "mkdir -m 777 run"))
def test_a_run_directory_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path, command: str) -> None:
    before = prepared(f"{command}; chown {SOMEBODY} run")
    with running(tmp_path, HELLO, "--run-dir", "run", before=before, store=False) as job:
        assert job.wait() == 2
        assert "hello" not in job.out
        assert job.err.splitlines() == [
            f"saferun: --run-dir run: it belongs to user {SOMEBODY}",
            "hint: pass another --run-dir, or --run-dir none to keep no files",
        ]
        assert os.listdir(tmp_path / "job" / "run") == []


def test_a_host_s_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """In a run directory that everyone may write to."""
    before = prepared(f"mkdir -m 777 run; mkdir run/$(hostname -s); chown {SOMEBODY} run/$(hostname -s)")
    with running(tmp_path, HELLO, "--run-dir", "run", before=before, store=False) as job:
        assert job.wait() == 2
        assert f"it belongs to user {SOMEBODY}" in job.err
        assert len(job.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"mkdir saferun-runs; chown {SOMEBODY} saferun-runs", f"it belongs to user {SOMEBODY}"),
        (f"mkdir mine; ln -s mine saferun-runs; chown -h {SOMEBODY} saferun-runs", f"it belongs to user {SOMEBODY}"),
        (f"mkdir theirs; chown {SOMEBODY} theirs; ln -s theirs saferun-runs", f"it belongs to user {SOMEBODY}"),
    ],
    ids=["a directory of theirs", "a link of theirs", "a link to a directory of theirs"],
)
def test_where_the_default_place_is_somebody_else_s_the_job_runs_without_files(
    tmp_path: Path, command: str, words: str
) -> None:
    """Torchrun would have run: two lines, and nothing is written there."""
    with running(tmp_path, HELLO, before=prepared(command), store=False) as job:
        assert job.wait() == 0
        assert job.out.count("hello") == 1
        what, hint = job.err.splitlines()
        assert what.startswith("saferun: no run directory: ")
        assert words in what
        assert hint.startswith("hint: pass --run-dir DIRECTORY")
        for name in ("saferun-runs", "mine", "theirs"):
            path = tmp_path / "job" / name
            assert not path.exists() or os.listdir(path) == []


def test_a_link_of_the_user_s_own_leads_to_where_runs_are_kept(tmp_path: Path) -> None:
    """To another disk, say."""
    with running(tmp_path, HELLO, before=prepared("mkdir elsewhere; ln -s elsewhere saferun-runs"), store=False) as job:
        assert job.wait() == 0
        assert not job.err
        assert (tmp_path / "job" / "elsewhere" / "latest" / "run.json").exists()


def test_what_a_launch_leaves_is_for_its_user_alone(tmp_path: Path) -> None:
    program = "import sys\nprint('hello')\nprint('oh', file=sys.stderr)\nsys.exit(3)\n"
    with running(tmp_path, program, nproc=2, before=prepared("umask 022"), store=False) as job:
        assert job.wait() != 0
        top = tmp_path / "job" / "saferun-runs"
        found = [top, *top.rglob("*")]
        names = {path.name for path in found}
        assert {"stdout.log", "stderr.log", "events.jsonl", "run.json", "report.json", "report.txt"} <= names
        assert names & {"report.html"} or "no report.html" in job.err
        open_to_others = [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]
        assert open_to_others == []


def test_a_run_directory_that_is_there_keeps_its_mode_and_files_in_it_are_private(tmp_path: Path) -> None:
    with running(
        tmp_path, HELLO, "--run-dir", "run", before=prepared("umask 022; mkdir -m 750 run"), store=False
    ) as job:
        assert job.wait() == 0
        top = tmp_path / "job" / "run"
        assert stat.S_IMODE(top.stat().st_mode) == 0o750
        assert [path for path in top.rglob("*") if path.stat().st_mode & 0o077] == []


def test_a_log_dir_is_as_readable_as_under_torchrun(tmp_path: Path) -> None:
    with running(tmp_path, HELLO, "--log-dir", "logs", "--redirects", "3", before=prepared("umask 022")) as job:
        assert job.wait() == 0
        (log,) = (tmp_path / "job" / "logs").rglob("stdout.log")
        assert stat.S_IMODE(log.stat().st_mode) == 0o644
        assert stat.S_IMODE(log.parents[2].stat().st_mode) == 0o700


def test_links_that_are_planted_in_a_run_directory_lead_nowhere(tmp_path: Path, home: Path) -> None:
    """One that everyone may write to, down to its last directory: the worst that can be."""
    (home / "bashrc").write_text("mine")
    before_all = content_of(home)
    with directory_for_all(0o755) as directory:
        run = directory / "run"
        folder = run / os.uname().nodename.split(".")[0] / "attempt_0" / "rank_0"
        folder.mkdir(parents=True)
        for path in (run, folder.parents[1], folder.parents[0], folder):
            path.chmod(0o777)

        def plant_links() -> None:
            os.symlink(home / "new", run / ".gitignore")
            for name in ("run.json", "report.json", "report.txt", "report.html", "latest"):
                os.symlink(home / "bashrc", run / name)
            for name in ("stdout.log", "stderr.log", "error.json"):
                os.symlink(home / "bashrc", folder / name)
            os.symlink(home / "new", folder.parents[1] / "events.jsonl")
            os.symlink(home, folder.parents[0] / "rank_1")

        as_user(plant_links)
        program = "from rank import *\nprint('hello')\ntell('said')\nawait_release('end')\nraise ValueError('no')"
        with running(tmp_path, program, "--run-dir", str(run), nproc=2, store=False) as job:
            job.hear("said", 2)
            job.release("end")
            assert job.wait() == 1
            assert job.out.count("hello") == 2
        assert content_of(home) == before_all
        assert "hello" in (folder / "stdout.log").read_text()
        assert not (folder / "stdout.log").is_symlink()
        assert not (run / "report.json").is_symlink()


def test_a_file_system_that_gives_all_files_one_owner_keeps_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is made there is at once somebody else's."""
    made, opened = os.mkdir, os.open
    top = tmp_path / "runs"

    def make(path: str, *arguments: int, **more: int) -> None:
        made(path, *arguments, **more)
        os.chown(path, SOMEBODY, -1, dir_fd=more.get("dir_fd"))

    def squash(path: str, flags: int, *arguments: int, **more: int) -> int:
        fd = opened(path, flags, *arguments, **more)
        if flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE:
            os.fchown(fd, SOMEBODY, -1)
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", make)
        patch.setattr(os, "open", squash)
        make_run_directory(str(top / "1"), str(top / "1" / "node3"), str(top), [".latest-1", "latest"])
        files = DirectFiles()
        for how in (FRESH, APPENDED, WHOLE):
            for content in (b"one", b"two"):
                stream = files.open(str(top / "1" / "node3" / f"file{how}"), how)
                stream.write(content)
                stream.close()
    found = [path.read_bytes() for path in sorted((top / "1" / "node3").iterdir())]
    assert found == [b"two", b"onetwo", b"two"]
    assert (top / "1" / "node3").stat().st_uid == SOMEBODY
    assert (top / "latest").resolve() == top / "1"


def test_the_root_directory_may_hold_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--run-dir .`` in a container's working directory."""
    monkeypatch.setattr(trees, "_trees", {"/": trees.Tree("/")})
    files = DirectFiles()
    stream = files.open(str(tmp_path / "node3" / "file"), FRESH)
    stream.write(b"x")
    stream.close()
    assert (tmp_path / "node3" / "file").read_bytes() == b"x"


def test_what_is_in_the_way_of_a_new_file_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    """A backup made of hard links keeps its content, and the file is written all the same."""
    top = tmp_path / "runs"
    make_run_directory(str(top / "1"), str(top / "1" / "node3"), str(top), [])
    path = top / "1" / "node3" / "stdout.log"
    path.write_text("old")
    os.link(path, tmp_path / "backup")
    said: list[str] = []
    files = DirectFiles()
    files.on_failed = lambda path, error, _: said.append(f"{Path(path).name}: {error.strerror}")
    for _ in range(2):
        stream = files.open(str(path), FRESH)
        stream.write(b"new")
        stream.close()
        assert path.read_text() == "new"
        path.unlink()
        os.mkfifo(path)
    assert (tmp_path / "backup").read_text() == "old"
    events = path.parent / "events.jsonl"
    events.symlink_to(tmp_path / "backup")
    stream = files.open(str(events), APPENDED)
    stream.write(b"new")
    stream.close()
    assert said == ["events.jsonl: Too many levels of symbolic links"]
    assert (tmp_path / "backup").read_text() == "old"
