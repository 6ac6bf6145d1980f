"""From the fork of the ranks to their programs: a file system that does not answer, and programs that are none."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from errno import E2BIG, ENOENT, ENOEXEC
from pathlib import Path
from typing import Any, cast

import pytest

from saferun.launch import exec_wait
from saferun.launch.exec_wait import ExecWait
from saferun.linux.children import SpawnError, begin_spawn, spawn_error, spawn_unawaited
from saferun.linux.core_limits import why_no_cores
from saferun.linux.core_pattern import read_core_pattern
from saferun.linux.poller import Poller
from saferun.linux.program_start import ForkedRank, start_error
from saferun.supervisor.machine import Limits
from tests.breadth import slow_but
from tests.process.frozen import mirror, needs_mounts
from tests.process.launching import DEADLINE_S, REPOSITORY, SAFERUN, running, two_lines, until

# The first attempt fails when it may; the exec of the second one finds the file system frozen.
FAILS_ONCE = """
from rank import *
tell("ready")
await_release("fail")
sys.exit(1)
"""


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_launch_whose_ranks_are_read_from_a_frozen_file_system(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """exec(2) does not return, and no signal ends that: torchrun's agent waits in it forever."""
    source = tmp_path / "programs"
    source.mkdir()
    program = source / "program"
    program.write_text(f'#!/bin/sh\nexec "{SAFERUN[0]}" -u train.py\n')
    program.chmod(0o755)
    with mirror(tmp_path, source) as frozen:
        options = ["--preflight", "off", "--max-restarts", "1", "--shutdown-timeout", "1", "--no-python"]
        launcher = [*SAFERUN, *options]
        with running(
            tmp_path / "launch",
            FAILS_ONCE,
            nproc=2,
            launcher=launcher,
            before=frozen.before(tmp_path / "launch" / "job"),
            script=(str(tmp_path / "mirror" / "program"),),
            store=False,
            sweeps=False,
        ) as job:
            job.hear("ready", 2)
            frozen.freeze()
            try:
                job.release("fail")
                until(lambda: "has not been started for 5 s: exec of" in job.err, "it is said who waits")
                job.send(signum)
                assert job.wait() == 1
                assert "Traceback" not in job.err
            finally:
                frozen.thaw()
            job.assert_nothing_left(DEADLINE_S)


class Start:
    """A rank whose exec has not returned yet, as the loop sees it."""

    def __init__(self) -> None:
        self.report, self.answer = os.pipe()
        os.set_blocking(self.report, False)
        self.told: list[object] = []
        self.poller = Poller()
        self.start = ExecWait(
            self.poller,
            on_started=lambda: self.told.append("started"),
            on_failed=lambda error, running: self.told.append((error.what, running)),
            warn=self.told.append,
        )
        waiting = ForkedRank(0, 4, os.getpid(), self.report, ["/net/program"], {})
        self.start.begin([waiting, ForkedRank(1, 5, 1, -1, [], {})], None)

    def pass_time(self) -> None:
        assert self.start.deadline is not None
        self.start.tick(self.start.deadline)

    def close(self) -> None:
        self.start.close()
        self.poller.close()
        os.close(self.answer)


@pytest.fixture
def start() -> Iterator[Start]:
    start = Start()
    yield start
    start.close()


def test_a_rank_that_is_not_started_is_named_and_given_up_in_the_end(start: Start) -> None:
    """The loop goes on meanwhile: it is woken by the answer, or by time."""
    start.poller.wait(0.0)
    assert start.told == []
    assert start.start.waiting == {0}
    began = start.start.deadline
    assert began is not None
    for count, waited_s in enumerate((5, 30, 120, 300, 600, 1200)):
        start.pass_time()
        says = f"rank 4 has not been started for {waited_s} s: exec of /net/program has not returned"
        assert says in str(start.told[count])
    assert start.start.deadline == pytest.approx(began + 1795)
    start.pass_time()
    what, running_ranks = cast("tuple[str, tuple[int, ...]]", start.told[6])
    assert "rank 4 cannot be started: exec of /net/program has not returned" in what
    assert running_ranks == (0, 1)
    assert start.start.deadline is None


def test_the_supervisor_waits_for_the_start_longer_than_ranks_are_waited_for() -> None:
    """Else its own deadline would end the start that this one has patience with."""
    assert Limits().start_s > exec_wait._PATIENCE_S + exec_wait._OTHERS_S


def test_the_answer_is_taken_in_when_it_comes(start: Start) -> None:
    os.set_inheritable(start.answer, False)
    os.write(start.answer, f"{ENOENT} exec".encode())
    start.poller.wait(0.0)
    (told,) = start.told
    what, running_ranks = cast("tuple[str, tuple[int, ...]]", told)
    assert what == "rank 4 cannot be started: /net/program: exec: No such file or directory"
    assert running_ranks == (1,)
    assert start.start.take_failed(os.getpid())
    assert not start.start.take_failed(os.getpid())


def outcome(argv: list[str], environ: dict[str, str]) -> SpawnError:
    """What becomes of a program that cannot be started."""
    child, report = begin_spawn(argv, environ)
    os.set_blocking(report, True)
    error = spawn_error(report)
    os.waitpid(child.pid, 0)
    if child.pidfd >= 0:
        os.close(child.pidfd)
    assert error is not None
    return error


def test_an_environment_that_is_too_long_is_measured() -> None:
    environ = {"LONG": "x" * 200_000, "SHORT": "y"}
    error = outcome(["/bin/true"], environ)
    assert error.errno == E2BIG
    told = start_error(error, 3, ["/bin/true"], environ)
    assert told.what.startswith("rank 3 cannot be started: /bin/true: exec: Argument list too long")
    assert "too long: 200024 bytes" in told.what
    assert "the longest is LONG with 200006 bytes" in told.hint


def test_a_program_without_a_first_line_is_called_so(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("abc")
    program.chmod(0o755)
    error = outcome([str(program)], {})
    assert error.errno == ENOEXEC
    assert "no #! line" in start_error(error, 0, [str(program)], {}).hint


def test_a_program_that_is_missing_says_so() -> None:
    error = outcome(["/nonexistent/program"], {})
    assert (error.errno, error.where) == (ENOENT, "exec")


def test_nobody_waits_for_a_program_of_saferuns_own() -> None:
    """Where it cannot be started, its exit code says so."""
    child = spawn_unawaited(["/nonexistent/program"], {}, stdin=0, stdout=1, stderr=2)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 127
    if child.pidfd >= 0:
        os.close(child.pidfd)


@pytest.mark.parametrize("nproc", slow_but([1, 5], "5"))
def test_ranks_none_of_which_can_be_started_are_one_failure(tmp_path: Path, nproc: int) -> None:
    launcher = [*SAFERUN, "--no-python"]
    program = tmp_path / "program"
    program.write_text("abc")
    program.chmod(0o755)
    with running(tmp_path / "launch", "", nproc=nproc, launcher=launcher, script=(str(program),)) as job:
        assert job.wait() == 1
        what, _ = two_lines("\n".join(job.err.splitlines()[:2]))
        assert what.startswith("rank 0 cannot be started: ")
        assert job.err.count("cannot be started") == 1


# --------------------------------------------------------------------------------------------------- limits on cores

LIMIT = "import resource; print('limit', *resource.getrlimit(resource.RLIMIT_CORE), flush=True)"


def limit_of_a_rank(folder: Path, *options: str, **arguments: Any) -> str:
    with running(folder, LIMIT, *options, store=False, **arguments) as job:
        assert job.wait() == 0
        return job.out.rpartition("limit ")[2].strip()


@pytest.mark.skipif(not read_core_pattern().is_file, reason="cores go to a program")
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] != -1, reason="a hard limit on cores")
def test_a_container_that_wants_no_cores_gets_none_unless_asked_for(tmp_path: Path) -> None:
    """Torchrun would leave none, and a full pod is evicted."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    before = ["sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh"]
    assert limit_of_a_rank(tmp_path / "default", before=before, environ=pod) == "0 -1"
    asked = limit_of_a_rank(tmp_path / "asked", "--cores", "backtrace", before=before, environ=pod)
    assert asked == ("0 -1" if why_no_cores(str(tmp_path), 1, asked=True) else "-1 -1")


@pytest.mark.parametrize("how", slow_but(["command", "module"], "command"))
def test_a_script_that_is_run_by_its_path_searches_modules_where_torchrun_lets_it(tmp_path: Path, how: str) -> None:
    """A module beside the user's shell hides none of Python's own, unless Python puts that directory first."""
    command = tmp_path / "bin" / "saferun"
    command.parent.mkdir()
    command.write_text("from saferun.__main__ import main\nraise SystemExit(main())\n")
    launcher = [sys.executable, str(command)] if how == "command" else [sys.executable, "-m", "saferun"]
    script = "import csv, sys; print('first', sys.path[0], csv.__name__ if hasattr(csv, 'reader') else 'hidden')"
    with running(
        tmp_path / "run",
        script,
        "--run-path",
        launcher=launcher,
        environ={"PYTHONPATH": str(REPOSITORY)},
        before=["sh", "-c", 'echo "" >csv.py; exec "$@"', "sh"],
    ) as job:
        assert job.wait() == 0
        first, found = (command.parent, "csv") if how == "command" else (tmp_path / "run" / "job", "hidden")
        assert f"first {first} {found}\n" in job.out


def test_a_script_that_is_run_by_its_path_never_searches_modules_in_saferun(tmp_path: Path) -> None:
    """Also where the package is reached through a link, as in an editable installation or a shared folder."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "saferun").symlink_to(REPOSITORY / "saferun")
    (tmp_path / "linked" / "configs").symlink_to(REPOSITORY / "configs")
    with running(
        tmp_path / "run",
        "import sys; print('first', sys.path[0])",
        "--run-path",
        environ={"PYTHONPATH": str(tmp_path / "linked")},
    ) as job:
        assert job.wait() == 0
        assert f"first {tmp_path / 'run' / 'job'}\n" in job.out


def test_a_script_that_is_run_by_its_path_has_what_is_piped_into_its_first_descriptor(tmp_path: Path) -> None:
    """Torchrun's ranks of this kind have an empty ``sys.stdin``, and descriptor 0 as it was."""
    script = "import os, sys; print('read', repr(sys.stdin.read()), os.read(0, 9))"
    with running(tmp_path, script, "--run-path", before=["sh", "-c", 'echo data | "$@"', "sh"]) as job:
        assert job.wait() == 0
        assert "read '' b'data\\n'\n" in job.out


WITH_HELPER = """
from rank import *
import subprocess
def save(signum, frame):
    time.sleep(0.2)
    tell("saved" if helper.poll() is None else "lost")
    helper.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
helper = subprocess.Popen(["sleep", "60"])
tell("ready")
await_release("end")
"""


def test_of_ranks_that_are_run_by_their_path_the_helpers_live_while_they_save(tmp_path: Path) -> None:
    """Torchrun sends the signal to such a rank alone; those of another kind lead a group, which gets it."""
    with running(tmp_path, WITH_HELPER, "--run-path") as job:
        job.hear("ready")
        job.send(signal.SIGTERM)
        job.hear("saved")
        job.wait()


@pytest.mark.slow
def test_ranks_that_are_run_by_their_path_get_the_options_of_the_interpreter(tmp_path: Path) -> None:
    """As under torchrun; but not those that would keep Python from the environment or from ``site``."""
    script = """
import sys
flags = sys.flags
print("flags", flags.optimize, flags.no_user_site, flags.safe_path, flags.no_site, sys.warnoptions, sys._xoptions)
"""
    options = ["-OO", "-s", "-P", "-Werror::ResourceWarning", "-X", "utf8"]
    launcher = [sys.executable, *options, "-m", "saferun"]
    with running(tmp_path, script, "--run-path", launcher=launcher) as job:
        assert job.wait() == 0
        assert "flags 2 1 True 0 ['error::ResourceWarning'] {'utf8': True}\n" in job.out


def in_removed_directory(tmp_path: Path, argv: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a directory that was removed."""
    (tmp_path / "gone").mkdir()
    return subprocess.run(
        ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone"), *argv],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_launcher_with_a_relative_name_starts_where_the_working_directory_was_removed(tmp_path: Path) -> None:
    """As under torchrun. Such a name is that of ``python -c``, too."""
    script = tmp_path / "train.py"
    script.write_text("print('here')")
    launcher = [sys.executable, "-c", "from saferun.__main__ import main; main()", "--nproc-per-node", "1"]
    places = {"PYTHONPATH": str(REPOSITORY), "SAFERUN_RUN_DIR": str(tmp_path / "runs")}
    done = in_removed_directory(tmp_path, [*launcher, str(script)], **places)
    assert done.returncode == 0, done.stderr
    assert "here" in done.stdout


def test_a_script_is_run_by_its_path_where_the_working_directory_was_removed(tmp_path: Path) -> None:
    """Some builds of torch cannot be imported there, so that a stand-in has to do."""
    script, errors = tmp_path / "train.py", tmp_path / "torch/distributed/elastic/multiprocessing/errors.py"
    script.write_text("import sys; print('first', repr(sys.path[0]))")
    errors.parent.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    errors.write_text("def record(run):\n    return run\n")
    argv = [sys.executable, str(REPOSITORY / "saferun" / "coordinator" / "run_path.py"), "", str(script)]
    done = in_removed_directory(tmp_path, argv, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "first ''\n"), done.stderr
