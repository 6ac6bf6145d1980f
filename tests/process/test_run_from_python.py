"""saferun.run: a launch from a program is a process of its own, and what comes back from it is this user's."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest

import saferun
from saferun.api import launch_process
from saferun.api.rank_function import open_private, read_private
from saferun.errors import SaferunError, UsageError
from tests.breadth import slow_but
from tests.process.launching import HELPERS_END_S, REPOSITORY, until
from tests.process.marks import pids_whose_environ_has

QUIET = ("--preflight", "off", "--lint", "off")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def script(source: str) -> str:
    Path("train.py").write_text(textwrap.dedent(source))
    return "train.py"


def of_rank(factor: int) -> int:
    return factor * int(os.environ["RANK"])


def with_lambda() -> Any:
    if os.environ["RANK"] == "0":
        return lambda: None
    time.sleep(0.5)
    Path("written.1").touch()
    return 1


def failing() -> None:
    raise ValueError("bad batch")


def test_a_script_ends_well() -> None:
    source = "import os, sys; print(sys.argv[1:], os.environ['EXTRA'], os.environ['WORLD_SIZE'])"
    result = saferun.run(script(source), nproc=2, args=["a", 3], env={"EXTRA": "x"}, options=QUIET, capture=True)
    assert result.ok
    assert result.check() is result
    assert result.rank_exit_codes == {0: 0, 1: 0}
    assert result.report is None
    assert result.stdout.count("['a', '3'] x 2") == 2
    assert result.run_dir is not None
    assert Path(result.run_dir, "run.json").exists()


def test_a_script_that_fails_comes_with_its_report() -> None:
    source = "import os; raise SystemExit(3 if os.environ['RANK'] == '1' else 0)"
    result = saferun.run(script(source), nproc=2, options=QUIET, capture=True)
    assert result.exit_code == 1
    assert result.rank_exit_codes[1] == 3
    assert result.report is not None
    assert result.report.failure is not None
    with pytest.raises(SaferunError, match="rank 1 "):
        result.check()


def test_a_launch_that_does_not_start_has_no_report() -> None:
    """``check`` raises with what saferun has printed, where that was captured."""
    result = saferun.run("train.py", options=["--no-such-option"], capture=True)
    assert (result.report, result.run_dir) == (None, None)
    with pytest.raises(SaferunError, match="unrecognized arguments: --no-such-option\nhint: ") as caught:
        result.check()
    assert caught.value.exit_code == 2
    with pytest.raises(SaferunError, match=r"there is no script nothere\.py\nhint: check the path"):
        saferun.run("nothere.py", capture=True).check()
    with pytest.raises(SaferunError, match="the launch ended with exit code 2\nhint: see its output"):
        saferun.run("nothere.py").check()


def test_a_launch_without_files_fails_with_what_it_has_printed() -> None:
    """The warnings before and after the failure are not why it has failed."""
    source = "import os\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\nimport time; time.sleep(60)"
    options = (*QUIET, "--run-dir", "none", "--metrics", "/nowhere/x")
    result = saferun.run(script(source), nproc=2, options=options, capture=True)
    assert result.report is None
    with pytest.raises(SaferunError, match=r"^saferun: rank 1 \([^\n]* failed first [^\n]*ValueError: bad batch"):
        result.check()


@pytest.fixture(name="children_ignored")
def _children_ignored() -> Iterator[None]:
    """The kernel reaps them then, and Python takes that for exit code 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


NO_FILES = ("--run-dir", "none")


@pytest.mark.usefixtures("children_ignored")
@pytest.mark.parametrize(
    ("code", "options", "env"),
    [
        (0, (), {}),
        (3, NO_FILES, {}),
        *slow_but(
            [
                (3, (), {}),
                (0, NO_FILES, {}),
                (0, ("--run-dir=none",), {}),
                (0, ("--run-dir", "/proc/none"), {}),
                (0, (), {"SAFERUN_RUN_DIR": "none"}),
                (3, ("--dry-run",), {}),
                (0, ("--no-such-option",), {}),
            ]
        ),
    ],
)
def test_a_program_that_ignores_its_children_learns_how_a_launch_ended(
    code: int, options: tuple[str, ...], env: dict[str, str]
) -> None:
    """Whatever files the launch has."""
    result = saferun.run(script(f"raise SystemExit({code})"), options=(*QUIET, *options), env=env, capture=True)
    expected = 2 if "--no-such-option" in options else 0 if "--dry-run" in options else int(code > 0)
    assert result.exit_code == expected
    if not options and not env:
        assert result.rank_exit_codes == {0: code}


@pytest.mark.usefixtures("children_ignored")
def test_where_children_are_ignored_a_function_returns_its_values_and_a_kill_is_none() -> None:
    options = (*QUIET, *NO_FILES)
    assert saferun.run(of_rank, nproc=2, args=(7,), options=options, capture=True).values == (0, 7)
    killed = script("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert saferun.run(killed, options=options, capture=True).exit_code == -signal.SIGKILL


@pytest.mark.parametrize("name", ["args", "options"])
def test_one_string_in_place_of_a_list_is_an_error(name: str) -> None:
    """Its letters would be the words: ``-`` is no option and no script, and a launch of nothing ends well."""
    with pytest.raises(UsageError, match=rf"{name} is one string\nhint: .*{name}=\['--lr', '1'\]"):
        saferun.run(script("pass"), **{name: "--lr 1"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "what", "hint"),
    [
        ({"A": 1}, "env: A=1: int is not a string", "env={'A': '1'}"),
        ({2: "b"}, "env: 2='b': int is not a string", "env={'2': 'b'}"),
        ({"A": None}, "env: A=None: NoneType is not a string", "env={'A': 'None'}"),
        (["A=1"], "env is not a dict: ['A=1']", "env={'NAME': 'value'}"),
    ],
)
def test_a_variable_that_is_no_string_is_an_error_of_two_lines(env: Any, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        saferun.run(script("pass"), env=env)
    first, second = str(caught.value).splitlines()
    assert first == f"saferun: saferun.run: {what}"
    assert second.endswith(hint)


def leaving() -> int:
    if os.environ["RANK"] == "0":
        sys.exit(0)
    return int(os.environ["RANK"])


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_value_keeps_its_place() -> None:
    assert saferun.run(leaving, nproc=3, options=QUIET, capture=True).values == (None, 1, 2)


def test_a_function_of_a_module_returns_a_value_for_each_rank() -> None:
    """By reference: the module is found where it is found here."""
    assert saferun.run(of_rank, nproc=3, args=(7,), options=QUIET, capture=True).values == (0, 7, 14)
    assert not list(Path().glob("saferun-call-*"))


@pytest.mark.slow
def test_a_function_that_raises_has_no_value_and_a_report() -> None:
    result = saferun.run(failing, options=QUIET, capture=True)
    assert result.values == ()
    assert result.report is not None
    assert result.report.failure is not None
    assert "ValueError: bad batch" in result.report.failure.headline


@pytest.mark.slow
def test_a_value_that_cannot_be_pickled_ends_no_other_rank() -> None:
    """Its rank has done its work, and another one may be writing its last file."""
    with pytest.raises(SaferunError, match=r"rank 0: what with_lambda returned cannot be pickled[^\n]*\nhint: return"):
        saferun.run(with_lambda, nproc=2, options=QUIET, capture=True)
    assert Path("written.1").exists()


def test_a_module_of_the_program_is_found_before_an_installed_one(tmp_path: Path) -> None:
    """In the ranks as in the program, whose directory is the first on its search path."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "pluggy.py").write_text("def evaluate(): return 'mine'\n")
    program = f"import pluggy, saferun; print(saferun.run(pluggy.evaluate, options={QUIET!r}).values)"
    (tmp_path / "scripts" / "main.py").write_text(program)
    (tmp_path / "signal.py").write_text("raise RuntimeError('not the one of Python')")
    command = [sys.executable, "scripts/main.py"]
    assert "('mine',)" in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("failure", slow_but(["latin-1", "raises", "closed"], "raises"))
def test_a_stream_of_the_caller_that_fails_costs_its_text_alone(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a log of another encoding, a notebook that was closed: the ranks go on."""
    source = "import pathlib, time\nprint('loss \\u2193', flush=True)\ntime.sleep(0.5)\npathlib.Path('done').touch()"

    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    stream: IO[str] = Full() if failure == "raises" else (tmp_path / "log").open("w", encoding="latin-1")
    if failure == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    with nullcontext() if failure == "latin-1" else pytest.warns(RuntimeWarning, match="cannot be written"):
        assert saferun.run(script(source), options=(*QUIET, "--prefix", "none")).ok
    assert Path("done").exists()
    if failure == "latin-1":
        stream.close()
        assert "loss \\u2193" in (tmp_path / "log").read_text("latin-1")


def test_a_character_that_comes_in_two_pieces_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_process, "_CHUNK_BYTES", 2)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert saferun.run(script("print('é█→')"), options=(*QUIET, "--prefix", "none")).ok
    assert stream.getvalue() == "é█→\n"


def test_a_program_within_a_step_launches_on_its_own_host() -> None:
    """Other tasks of the step may launch nothing, or something else."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "vm,other", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    source = "import os; print('size', os.environ['WORLD_SIZE'])"
    result = saferun.run(script(source), nproc=2, env=step, options=(*QUIET, "--start-timeout", "5"), capture=True)
    assert result.stdout.count("size 2") == 2


def test_a_function_that_ranks_cannot_import_is_an_error_of_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"cannot be imported by the ranks[^\n]*\nhint: [^\n]*cloudpickle"):
        saferun.run(lambda: 1, options=QUIET)
    assert not list(Path().glob("saferun-call-*"))


def test_with_cloudpickle_any_function_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that pickles a lambda as a function of a module that ranks can import."""
    Path("cloudpickle.py").write_text(
        "import pickle\nfrom operator import add\ndef dumps(call): return pickle.dumps((add, call[1]))\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    assert saferun.run(lambda _a, _b: None, args=(2, 3), options=QUIET, capture=True).values == (5,)
    sys.modules.pop("cloudpickle")


def test_results_of_other_users_and_links_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "real").write_bytes(b"x")
    (private / "link").symlink_to("real")
    os.mkfifo(private / "fifo")
    fd = open_private(str(private))
    try:
        assert read_private("real", fd) == b"x"
        for name in ("link", "fifo", "missing"):
            with pytest.raises(OSError, match=name):
                read_private(name, fd)
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(PermissionError):
            read_private("real", fd)
        with pytest.raises(PermissionError):
            open_private(str(private))
    finally:
        os.close(fd)
    monkeypatch.undo()
    private.chmod(0o750)
    with pytest.raises(PermissionError):
        open_private(str(private))


def test_output_goes_to_the_streams_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook, and in a test, these are not the descriptors 1 and 2."""
    assert saferun.run(script("print('hello')"), options=(*QUIET, "--prefix", "none")).stdout == ""
    assert capsys.readouterr().out == "hello\n"


def test_what_is_kept_of_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_process, "_KEPT_BYTES", 1 << 17)
    result = saferun.run(script("print('x' * (1 << 20)); print('end')"), options=QUIET, capture=True)
    assert len(result.stdout) <= 1 << 18
    assert result.stdout.endswith("end\n")


@pytest.mark.parametrize("directory", ["mine", "none"])
def test_the_run_directory_is_the_one_that_was_asked_for(directory: str) -> None:
    result = saferun.run(script("pass"), options=(*QUIET, "--run-dir", directory), capture=True)
    assert result.run_dir == (None if directory == "none" else str(Path("mine").resolve()))


@pytest.mark.parametrize("handling", ["SIG_DFL", "SIG_IGN"])
def test_ctrl_c_stops_the_launch_and_is_raised(handling: str, tmp_path: Path) -> None:
    """The ranks get SIGINT, as from a terminal; none of them lives on."""
    mark = f"MARK={os.urandom(8).hex()}"
    source = """
        import pathlib, signal, sys
        def stopped(*_):
            pathlib.Path("stopped").touch()
            sys.exit(0)
        signal.signal(signal.SIGINT, stopped)
        pathlib.Path("ready").touch()
        while True:
            signal.pause()
    """
    name, _, value = mark.partition("=")
    caller = f"""
        import json, saferun, signal
        signal.signal(signal.SIGCHLD, signal.{handling})
        try:
            saferun.run({script(source)!r}, options={QUIET!r}, env={{{name!r}: {value!r}}})
        except KeyboardInterrupt:
            print(json.dumps("interrupted"))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(caller)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    until((tmp_path / "ready").exists, "the rank")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1]) == "interrupted"
    assert (tmp_path / "stopped").exists()
    until(lambda: not pids_whose_environ_has(mark), "all have ended", timeout_s=HELPERS_END_S)


@pytest.mark.parametrize("handling", ["SIG_DFL", "SIG_IGN"])
def test_the_launch_ends_with_its_caller(handling: str, tmp_path: Path) -> None:
    """A notebook whose kernel is killed leaves no ranks."""
    mark = f"MARK={os.urandom(8).hex()}"
    name, _, value = mark.partition("=")
    path = script("import pathlib, signal; pathlib.Path('ready').touch(); signal.pause()")
    caller = f"import saferun, signal; signal.signal(signal.SIGCHLD, signal.{handling})\n"
    caller += f"saferun.run({path!r}, options={QUIET!r}, env={{{name!r}: {value!r}}})"
    process = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until((tmp_path / "ready").exists, "the rank")
    process.kill()
    process.wait()
    until(lambda: not pids_whose_environ_has(mark), "the end of the launch")
