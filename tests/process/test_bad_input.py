"""What cannot work is refused at once, in two lines, with nothing begun."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, Job, running, two_lines, without

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = "from rank import *\ntell('ran')"


class Bad(NamedTuple):
    """A command line that cannot work.

    ``names``: what the first line has to name. ``script`` stands for ``train.py`` on the command line.
    """

    options: tuple[str, ...]
    names: str
    script: tuple[str, ...] = ("train.py",)
    environ: Mapping[str, str] = {}
    exit_code: int = 2


BAD = {
    "script missing": Bad((), "nowhere.py", ("nowhere.py",)),
    "script missing in a directory": Bad((), "no/where.py", ("no/where.py",)),
    "script is a path through a file": Bad((), "train.py/x", ("train.py/x",)),
    "no script": Bad((), "script", ()),
    "script with a line break": Bad((), r"a\nb.py", ("a\nb.py",)),
    "script with an escape sequence": Bad((), r"\x1b[31mx.py", ("\x1b[31mx.py",)),
    "script name is too long": Bad((), "xxx", ("x" * 5000,)),
    "program missing": Bad(("--no-python",), "nosuchprogram", ("nosuchprogram",)),
    "program not executable": Bad(("--no-python",), "./train.py", ("./train.py",)),
    "program is a directory": Bad(("--no-python",), "/tmp", ("/tmp",)),
    "run-path missing": Bad(("--run-path",), "nowhere.py", ("nowhere.py",)),
    "python missing": Bad((), "/no/python", environ={"PYTHON_EXEC": "/no/python"}),
    "nproc 0": Bad(("--nproc-per-node", "0"), "--nproc-per-node 0"),
    "nproc -1": Bad(("--nproc-per-node", "-1"), "--nproc-per-node -1"),
    "nproc banana": Bad(("--nproc-per-node", "banana"), "banana"),
    "nproc too large": Bad(("--nproc-per-node", "99999999"), "99999999"),
    "nproc larger than any number": Bad(("--nproc-per-node", "9" * 5000), "999"),
    "nproc empty": Bad(("--nproc-per-node", ""), "nproc"),
    "nproc with a fraction": Bad(("--nproc-per-node", "1.5"), "1.5"),
    "nproc by environment": Bad(("--role", "r"), "banana", environ={"PET_NPROC_PER_NODE": "banana"}),
    "module and no-python": Bad(("--module", "--no-python"), "--module"),
    "prefix with an unknown field": Bad(("--prefix", "{node} "), "--prefix"),
    "prefix unbalanced": Bad(("--prefix", "{rank "), "--prefix"),
    "prefix with a position": Bad(("--prefix", "{} "), "--prefix"),
    "prefix with a bad format": Bad(("--prefix", "{rank:zz}"), "--prefix"),
    "redirects word": Bad(("--redirects", "x"), "--redirects x"),
    "redirects 4": Bad(("--redirects", "4"), "--redirects 4"),
    "redirects half": Bad(("--redirects", "0:1,1"), "--redirects 0:1,1"),
    "tee negative": Bad(("--tee", "0:-1"), "--tee 0:-1"),
    "local ranks filter": Bad(("--local-ranks-filter", "0,x"), "--local-ranks-filter 0,x"),
    "hosts that are others": Bad(("--hosts", "203.0.113.[1-3]"), "203.0.113.1"),
    "hosts with an open bracket": Bad(("--hosts", "node[1-3"), "--hosts node[1-3"),
    "hosts of a missing file": Bad(("--hostfile", "nowhere"), "nowhere"),
    "a scheduler that is not there": Bad(("--scheduler", "slurm"), "--scheduler slurm"),
    "start timeout 0": Bad(("--start-timeout", "0"), "--start-timeout 0"),
    "host timeout negative": Bad(("--host-timeout", "-1"), "--host-timeout -1"),
    "several hosts on a port of the kernel's": Bad(("--nnodes", "2", "--master-port", "0"), "--master-port 0"),
    "nnodes 2:1": Bad(("--nnodes", "2:1"), "--nnodes 2:1"),
    "nnodes 0": Bad(("--nnodes", "0"), "--nnodes 0"),
    "nnodes x": Bad(("--nnodes", "x"), "--nnodes x"),
    "nnodes 1:1:1": Bad(("--nnodes", "1:1:1"), "--nnodes 1:1:1"),
    "node rank 1": Bad(("--node-rank", "1", "--master-port", "29511"), "--node-rank 1"),
    "endpoint with a bad port": Bad(("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:banana"), "banana"),
    "endpoint without a port": Bad(("--rdzv-endpoint", "127.0.0.1"), "--rdzv-endpoint"),
    "backend unknown": Bad(("--rdzv-backend", "pigeons"), "pigeons"),
    "etcd nowhere": Bad(("--rdzv-backend", "etcd"), "etcd"),
    "rdzv-conf": Bad(("--rdzv-conf", "a"), "--rdzv-conf"),
    "master port too large": Bad(("--master-port", "99999"), "99999"),
    "master port negative": Bad(("--master-port", "-5"), "-5"),
    "master port banana": Bad(("--master-port", "banana"), "banana"),
    "max restarts negative": Bad(("--max-restarts", "-1"), "--max-restarts -1"),
    "max restarts word": Bad(("--max-restarts", "many"), "many"),
    "shutdown timeout negative": Bad(("--shutdown-timeout", "-1"), "--shutdown-timeout -1"),
    "shutdown timeout by environment": Bad(
        (), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}
    ),
    "option unknown": Bad(("--no-such-option",), "--no-such-option"),
    "option ambiguous": Bad(("--nproc", "2"), "--nproc"),
    "option without value": Bad((), "run-dir", ("--run-dir",)),
    "pty": Bad(("--pty", "maybe"), "maybe"),
    "color": Bad(("--color", "blue"), "blue"),
    "start method": Bad(("--start-method", "teleport"), "teleport"),
    "log dir is a file": Bad(("--log-dir", "train.py"), "--log-dir train.py"),
    "log dir below a file": Bad(("--log-dir", "train.py/logs"), "train.py/logs", exit_code=1),
    "log dir in no file system": Bad(("--log-dir", "/proc/logs"), "/proc/logs", exit_code=1),
    "standalone is no number": Bad((), "PET_STANDALONE=yes", environ={"PET_STANDALONE": "yes"}, exit_code=1),
    "too few virtual GPUs": Bad(
        ("--virtual-local-rank", "--nproc-per-node", "2"), "--virtual-local-rank", environ={"CUDA_VISIBLE_DEVICES": "0"}
    ),
}


def assert_refused(job: Job, exit_code: int, names: str) -> None:
    """Two lines that name what is wrong, the exit code, and nothing begun."""
    assert job.wait() == exit_code, job.err
    what, hint = two_lines(job.err)
    assert names in what
    assert hint
    assert job.out == ""
    assert not job.said("ran")
    if exit_code == 2 or not job.run_dir.exists():
        assert not (job.folder / "job" / "saferun-runs").exists()
    else:
        # The launch had begun when the environment refused: what it left is whole.
        assert (job.run_dir / "run.json").exists()
        assert job.events()[-1]["state"] == "done"


@pytest.mark.parametrize("name", slow_but(BAD, *list(BAD)[::4]))
def test_bad_input_is_refused_in_two_lines(tmp_path: Path, name: str) -> None:
    bad = BAD[name]
    with running(tmp_path, PROGRAM, *bad.options, script=bad.script, environ=bad.environ, nproc=None) as job:
        assert_refused(job, bad.exit_code, bad.names)


def test_a_script_without_permission_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, PROGRAM, nproc=2, before=[*in_shell("chmod 000 train.py"), *without([1, 2])]) as job:
        assert_refused(job, 2, "train.py")
        (tmp_path / "job" / "train.py").chmod(stat.S_IRUSR | stat.S_IWUSR)


def in_shell(command: str) -> list[str]:
    """A command before saferun."""
    return ["sh", "-c", f'{command}; exec "$@"', "sh"]


def test_a_log_dir_without_permission_is_refused(tmp_path: Path) -> None:
    before = [*in_shell("mkdir locked && chmod 500 locked"), *without([1, 2])]
    with running(tmp_path, PROGRAM, "--log-dir", "locked/logs", before=before) as job:
        assert_refused(job, 1, "locked/logs")


def test_a_log_dir_that_nobody_can_make_is_not_a_lack_of_room(tmp_path: Path) -> None:
    with running(tmp_path, PROGRAM, "--log-dir", "/proc/logs", nproc=None) as job:
        assert_refused(job, 1, "/proc/logs")
        assert two_lines(job.err)[1] == "pass a --log-dir that can be written"


def test_a_script_that_is_a_named_pipe_is_read_by_its_rank_alone(tmp_path: Path) -> None:
    """`saferun <(generate)`-like uses: whoever opens a pipe just to look takes what was meant for the rank."""
    feeder = "mkfifo pipe.py && (echo 'print(6 * 7)' >pipe.py) &"
    with running(
        tmp_path, PROGRAM, script=("pipe.py",), before=in_shell(f"{feeder} while ! test -p pipe.py; do :; done")
    ) as job:
        assert job.wait() == 0
        assert "] 42\n" in job.out


def test_a_script_from_stdin_is_started_as_python_starts_it(tmp_path: Path) -> None:
    """`saferun - <train.py` works with torchrun, which hands the dash to Python."""
    source = tmp_path / "source.py"
    source.write_text("print(6 * 7)")
    with source.open() as stdin, running(tmp_path / "run", PROGRAM, script=("-",), stdin=stdin) as job:
        assert job.wait() == 0
        assert "] 42\n" in job.out


def test_a_current_directory_that_is_gone_is_no_crash(tmp_path: Path) -> None:
    """A shell left over from a directory that was deleted meanwhile."""
    before = in_shell('mkdir gone && cd gone && rmdir "$PWD"')
    with running(tmp_path, PROGRAM, before=before, script=(str(tmp_path / "job" / "train.py"),)) as job:
        assert job.wait() in {0, 1, 2}
        assert "Traceback" not in job.err


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_questions_are_answered_on_stdout_and_begin_nothing(tmp_path: Path, option: str) -> None:
    with running(tmp_path, PROGRAM, option) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert "saferun" in job.out
        assert not (tmp_path / "job" / "saferun-runs").exists()


@pytest.mark.parametrize("limit", [8, 10, 12])
def test_too_few_descriptors_for_saferun_itself_are_said_in_two_lines(tmp_path: Path, limit: int) -> None:
    """Not by a traceback; there is nothing that could be done with so few."""
    before = ("prlimit", f"--nofile={limit}:{limit}", "--")
    with running(tmp_path, PROGRAM, nproc=4, before=before, sweeps=False) as job:
        assert job.wait() == 1
        # What it had forked by then ends because saferun has ended.
        job.assert_nothing_left(DEADLINE_S)
        assert "saferun: cannot go on: Too many open files\nhint: raise the limit" in job.err
        assert "Traceback" not in job.err


# What torchrun's parser refuses leaves no error file, and what its main function raises does.
@pytest.mark.parametrize(("options", "is_written"), [(("--nproc-per-node", "banana"), True), (("--bogus",), False)])
def test_the_program_that_starts_saferun_finds_the_refusal_in_its_error_file(
    tmp_path: Path, options: tuple[str, ...], *, is_written: bool
) -> None:
    """As under torchrun: a platform shows this file to its users."""
    path = tmp_path / "error.json"
    path.write_text("of an earlier launch")
    with running(tmp_path, PROGRAM, *options, environ={"TORCHELASTIC_ERROR_FILE": str(path)}, nproc=None) as job:
        assert job.wait() == 2
    if is_written:
        assert json.loads(path.read_text())["message"]["message"] == job.err.splitlines()[0].removeprefix("saferun: ")
    else:
        assert path.read_text() == "of an earlier launch"


def test_an_error_file_that_cannot_be_written_is_one_more_line(tmp_path: Path) -> None:
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "nowhere" / "error.json")}
    with running(tmp_path, PROGRAM, "--nproc-per-node", "0", environ=environ, nproc=None) as job:
        assert job.wait() == 2
    assert job.err.endswith("/nowhere/error.json: No such file or directory\n")
