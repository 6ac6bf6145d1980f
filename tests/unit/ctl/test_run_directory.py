"""Which run a word of the command line means, the same for all subcommands, and the list of runs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from saferun import ctl
from saferun.ctl import list_runs
from saferun.ctl.run_directory import find_run
from saferun.errors import UsageError
from saferun.files import live_records
from saferun.files.run_files import read_state
from tests.unit.described_runs import HERE, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from saferun.files.run_files import RunState

OLD, NEW, OTHER = "20260101-120000-abcdef", "20260102-120000-abc123", "20260103-120000-fedcba"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in the current directory, and one of the index elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Those that live on this machine without files do not count.
    monkeypatch.setattr(live_records, "record_directories", lambda _environ: [])
    make_run(tmp_path / "saferun-runs", OLD)
    (tmp_path / "saferun-runs" / "latest").symlink_to(make_run(tmp_path / "saferun-runs", NEW).name)
    index = tmp_path / "state" / "saferun" / "runs"
    index.mkdir(parents=True)
    other = make_run(tmp_path / "elsewhere", OTHER)
    (index / "20260103-120000-fedcba9876543210").symlink_to(other)
    (index / "20260101-120000-abcdef0000000000").symlink_to(tmp_path / "saferun-runs" / OLD)
    (index / "20260104-120000-0000000000000000").symlink_to(tmp_path / "removed")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("latest", NEW),
        (OLD, OLD),
        (f"saferun-runs/{OLD}", OLD),
        ("saferun-runs/latest", NEW),
        ("20260102", NEW),
        ("abcd", OLD),
        ("abcdef00000", OLD),
        ("fedcba98765", OTHER),
        ("20260103", OTHER),
    ],
)
def test_a_run_is_found_by_path_name_id_and_beginning(here: Path, word: str, name: str) -> None:
    assert here.is_dir()
    assert find_run(word).name == name


@pytest.mark.parametrize("word", ["", "nothing", "2027", "../x"])
def test_a_word_that_means_no_run_says_what_to_do(here: Path, word: str) -> None:
    assert here.is_dir()
    with pytest.raises(UsageError) as error:
        find_run(word)
    assert "saferunctl list" in error.value.hint


def test_a_word_that_means_several_runs_names_them_unless_one_lives(here: Path) -> None:
    with pytest.raises(UsageError, match="several runs") as error:
        find_run("abc")
    assert OLD in error.value.what
    assert NEW in error.value.what
    make_run(here / "saferun-runs", "20250102-120000-abc999", process=HERE, end=None)
    assert find_run("abc").name == "20250102-120000-abc999"


def test_the_latest_run_is_one_that_lives_if_there_is_one(here: Path) -> None:
    """Here first; whoever asks what goes on wants one that lives elsewhere, too."""
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20250101-120000-aaaaaa", process=HERE, end=None)
    (index / "20250101-120000-aaaaaa0000000000").symlink_to(other)
    assert find_run("latest").name == NEW
    assert find_run("latest", living_first=True) == other
    own = make_run(here / "saferun-runs", "20250102-120000-bbbbbb", process=HERE, end=None)
    assert find_run("latest") == find_run("latest", living_first=True) == own


def test_the_index_serves_where_there_are_no_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert find_run("latest").name == OTHER
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "no state"))
    with pytest.raises(UsageError, match="there is no saferun-runs/latest here"):
        find_run("latest")


def test_an_entry_that_leads_to_another_users_directory_is_passed_over(here: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(here / "elsewhere" / OTHER, 1, -1)
    with pytest.raises(UsageError):
        find_run("fedcba")


def test_a_verb_that_ends_a_job_takes_no_latest_run_of_another_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one here that lives; without one the newest, whose end is the refusal."""
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20260105-120000-aaaaaa", process=HERE, end=None)
    (index / "20260105-120000-aaaaaa0000000000").symlink_to(other)
    assert find_run("latest", living_first=True) == other
    assert find_run("latest", ends=True).name == NEW
    own = make_run(here / "saferun-runs", "20250102-120000-bbbbbb", process=HERE, end=None)
    assert find_run("latest", ends=True) == own
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert find_run("latest") == other
    with pytest.raises(UsageError, match="there is no saferun-runs/latest here"):
        find_run("latest", ends=True)


@pytest.mark.parametrize("subcommand", ["stop", "kill", "restart"])
def test_what_ends_a_job_chooses_none(here: Path, capsys: pytest.CaptureFixture[str], subcommand: str) -> None:
    """Neither elsewhere, nor because it is the only one of several that lives."""
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20260105-120000-aaaaaa", process=HERE, end=None)
    (index / "20260105-120000-aaaaaa0000000000").symlink_to(other)
    assert ctl.main([subcommand, "2"]) == 2
    assert "2 may be several runs" in capsys.readouterr().err
    assert ctl.main([subcommand, "latest"]) == 1
    assert f"{NEW} has ended: succeeded" in capsys.readouterr().err


def test_a_run_is_found_by_its_whole_id_without_the_index(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that cannot be written, its name has the first digits alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "no state"))
    for word in ("abc1230000000000", "abc1230"):
        assert find_run(word).name == NEW
    for word in ("abc1231", "abc1230000000001", "abc12300000000000"):
        with pytest.raises(UsageError, match="there is no run"):
            find_run(word)


@pytest.mark.parametrize("content", ["", "{}", '{"model": "mine"}', "no JSON"])
def test_a_directory_called_latest_that_is_no_run_hides_none(here: Path, content: str) -> None:
    """Checkpoints are called so. A run directory of that name is meant."""
    (here / "latest").mkdir()
    if content:
        (here / "latest" / "run.json").write_text(content)
    assert find_run("latest").name == find_run("latest", living_first=True).name == NEW
    assert find_run("latest", ends=True).name == NEW
    (here / "latest").rename(here / "checkpoint")
    (here / "latest").symlink_to(make_run(here / "out", OTHER))
    assert find_run("latest").name == OTHER


@pytest.mark.parametrize("subcommand", ["report", "story"])
def test_what_shows_an_end_takes_a_run_of_this_directory(
    here: Path, capsys: pytest.CaptureFixture[str], subcommand: str
) -> None:
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20260105-120000-aaaaaa", process=HERE, end=None)
    (index / "20260105-120000-aaaaaa0000000000").symlink_to(other)
    assert ctl.main([subcommand]) == 2
    assert f"in saferun-runs/{NEW}" in capsys.readouterr().err


def test_logs_are_of_a_run_here_and_say_so_otherwise(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lines of another job look like those that were expected."""
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20260105-120000-aaaaaa", process=HERE, end=None)
    (index / "20260105-120000-aaaaaa0000000000").symlink_to(other)
    for run, text in ((here / "saferun-runs" / NEW, "ours"), (other, "theirs")):
        log = run / "node1" / "attempt_0" / "rank_0" / "stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"{text}\n")
    assert ctl.main(["logs", "--prefix", "none"]) == 0
    out, err = capfd.readouterr()
    assert (out, "the output of" in err) == ("ours\n", False)
    (here / "linked").mkdir()
    (here / "linked" / "saferun-runs").symlink_to(here / "saferun-runs")
    monkeypatch.chdir(here / "linked")
    assert ctl.main(["logs", "--prefix", "none"]) == 0
    out, err = capfd.readouterr()
    assert (out, "the output of" in err) == ("ours\n", False)
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert ctl.main(["logs", "--prefix", "none"]) == 0
    out, err = capfd.readouterr()
    assert out == "theirs\n"
    assert f"saferunctl: the output of ../elsewhere/{other.name}, a run of another directory" in err
    assert ctl.main(["logs", "--prefix", "none", "20260105"]) == 0
    assert "the output of" not in capfd.readouterr().err


@pytest.mark.parametrize("subcommand", ["attach", "debug_rank"])
def test_a_terminal_goes_to_a_running_job_wherever_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, subcommand: str
) -> None:
    """Runs that have ended in this directory have no ranks to go to."""
    index = here / "state" / "saferun" / "runs"
    other = make_run(here / "elsewhere", "20260105-120000-aaaaaa", process=HERE, end=None)
    (index / "20260105-120000-aaaaaa0000000000").symlink_to(other)
    module = importlib.import_module(f"saferun.ctl.{subcommand}")
    asked: list[Path] = []

    def find_rank(directory: Path, *_: object) -> None:
        asked.append(directory)
        raise UsageError("", "")

    monkeypatch.setattr(module, "find_rank", find_rank)
    monkeypatch.setattr(os, "isatty", lambda _: True)
    with pytest.raises(UsageError):
        module.run(argparse.Namespace(run_dir="latest", rank="0"))
    assert asked == [other]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a link of another user")
def test_a_link_of_another_user_does_not_choose_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read through it, and ends no job through it."""
    link = here / "saferun-runs" / "latest"
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert find_run("latest").name == NEW
    with pytest.raises(UsageError, match="link of another user"):
        find_run("saferun-runs/latest", ends=True)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(UsageError, match="saferun-runs/latest leads through a link of another user"):
        find_run("latest")


def test_a_file_system_that_does_not_answer_matters_to_its_own_runs_only(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index has runs of all directories."""
    index = here / "state" / "saferun" / "runs"
    (index / "20260106-120000-dead567890123456").symlink_to("/dead/saferun-runs/20260106-120000-dead56")
    (index / "20260107-120000-cafe567890123456").symlink_to("/dead/named")
    realpath, stat = os.path.realpath, os.stat

    def answering(path: Any) -> Any:
        assert not str(path).startswith("/dead"), "it waits"
        return path

    monkeypatch.setattr(os.path, "realpath", lambda path, **options: realpath(answering(path), **options))
    monkeypatch.setattr(os, "stat", lambda path, **options: stat(answering(path), **options))
    for ends in (True, False):
        assert find_run("latest", ends=ends).name == NEW
        assert find_run("20260102", ends=ends).name == NEW
        assert find_run("fedcba98", ends=ends).name == OTHER
    own = make_run(here / "saferun-runs", "20250102-120000-bbbbbb", process=HERE, end=None)
    assert find_run("latest", living_first=True) == own
    assert ctl.main(["list", "--here"]) == 0
    assert NEW in capsys.readouterr().out
    with pytest.raises(AssertionError, match="it waits"):
        find_run("dead")


def test_a_run_of_a_directory_that_is_a_link_has_the_name_behind_it(here: Path) -> None:
    index = here / "state" / "saferun" / "runs"
    (here / "out").symlink_to(make_run(here / "elsewhere", "trained", directory=""))
    (index / "20260106-120000-0123456789abcdef").symlink_to(here / "out")
    assert find_run("trai").name == find_run("0123456").name == "trained"


@pytest.mark.parametrize("subcommand", ["stacks", "record"])
def test_processes_of_several_runs_are_not_chosen(
    here: Path, capsys: pytest.CaptureFixture[str], subcommand: str
) -> None:
    """The word may mean these; that it means no process is not all that is known of it."""
    for name in (OLD[:9] + "130000-aaaaaa", OLD[:9] + "140000-bbbbbb"):
        make_run(here / "saferun-runs", name, process=HERE, end=None)
    assert ctl.main([subcommand, OLD[:8]]) == 2
    error = capsys.readouterr().err
    assert f"{OLD[:8]} may be several runs: " in error
    assert "hint: give more of the name or id" in error


@pytest.fixture
def nowhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current directory that has been removed."""
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    yield
    os.chdir(here)


@pytest.mark.usefixtures("nowhere")
def test_runs_of_the_index_are_found_where_the_current_directory_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["list"]) == 0
    assert OTHER in capsys.readouterr().out
    assert ctl.main(["status"]) == 0
    assert ": succeeded " in capsys.readouterr().out


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("words", [("shim", "x"), ("clean", "--keep", "1", "x"), ("core", "x"), ("status", ".")])
def test_a_relative_path_there_is_a_usage_error(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert ctl.main(list(words)) == 2
    assert capsys.readouterr().err.startswith("saferun: the current directory is gone\nhint: ")


# ---------------------------------------------------------------------------------------------------------------- list


def test_a_negative_number_of_runs_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["list", "-n", "-1"]) == 2
    assert capsys.readouterr().err == "saferun: -n -1 is negative\nhint: use 0 for all runs\n"


def test_the_list_has_one_line_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State, age, size, directory, and what went wrong or else the command."""
    make_run(here / "saferun-runs", "20260104-120000-aaaaaa", end=(1, "failed"), headline="rank 1: \x1b[2JKeyError")
    assert ctl.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["failed", "succeeded", "succeeded", "succeeded"]
    assert lines[0].endswith("saferun-runs/20260104-120000-aaaaaa  rank 1: \\x1b[2JKeyError")
    assert lines[2].endswith(f"saferun-runs/{NEW}  saferun train.py")
    assert " 60 min " in lines[0]


def test_the_list_can_be_restricted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "saferun-runs", "20250104-120000-aaaaaa", process=HERE, end=None)
    assert ctl.main(["list", "--running", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["runs"]
    assert (only["state"], only["path"]) == ("running", str(here / "saferun-runs" / "20250104-120000-aaaaaa"))
    assert ctl.main(["list", "--here", "-n", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the newest 2 of 3 (all: -n 0)"


def test_the_newest_are_those_that_began_last(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also beside runs whose directories the user named."""
    index = here / "state" / "saferun" / "runs"
    for number in range(3):
        named = make_run(here / "named", f"baseline{number}", directory="")
        (index / f"20250101-12000{number}-{number:016x}").symlink_to(named)
    assert ctl.main(["list", "-n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name in line for name, line in zip((OTHER, NEW, OLD), lines, strict=False)] == [True, True, True]
    assert lines[-1] == "the newest 3 of 6 (all: -n 0)"


def test_running_ones_that_are_left_out_are_not_counted_as_all(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "saferun-runs", "20250104-120000-aaaaaa", process=HERE, end=None)
    assert ctl.main(["list", "--running", "-n", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    make_run(here / "saferun-runs", "20250105-120000-aaaaaa", process=HERE, end=None)
    assert ctl.main(["list", "--running", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["the newest 1 (all: -n 0)"]


def test_the_list_is_there_before_further_runs_are_read(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be on a file system that does not answer."""
    living = make_run(here / "saferun-runs", "20270104-120000-aaaaaa", process=HERE, end=None)
    seen = list[str]()

    def state_of_living(fd: int, now: float) -> RunState:
        if os.path.samestat(os.fstat(fd), living.stat()):
            return read_state(fd, now)
        seen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(list_runs, "read_state", state_of_living)
    with pytest.raises(KeyboardInterrupt):
        list_runs.run(argparse.Namespace(n=1, here=False, running=True, json=False))
    (first,) = seen
    assert living.name in first


def test_without_runs_the_list_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ctl.main(["list"]) == 0
    assert capsys.readouterr().out == "no runs\n"


# ---------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("subcommand", ["", *(subcommand.name for subcommand in ctl.SUBCOMMANDS)])
def test_help_loads_nothing_that_is_slow_to_import(subcommand: str) -> None:
    """It answers at once; a subcommand imports what it needs when it runs."""
    program = (
        "import sys\nfrom saferun import ctl\ntry: ctl.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('loaded:', *sorted({name.split('.')[0] for name in sys.modules}), *sys.modules, file=sys.stderr)"
    )
    words = [subcommand, "--help"] if subcommand else ["--help"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert "usage: saferunctl" in done.stdout
    loaded = set(done.stderr.split("loaded:")[1].split())
    slow = {
        "torch",
        "psutil",
        "yaml",
        "socket",
        "subprocess",
        "asyncio",
        "hashlib",
        "saferun.launch",
        "saferun.preflight",
    }
    assert not loaded & slow, loaded & slow
