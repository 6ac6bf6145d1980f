"""saferunctl shim's start-up hook: Python runs saferun where it was to run torch's launcher, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.ctl import main
from tests.breadth import slow_but
from tests.process.launching import REPOSITORY
from tests.unit.recorded_launchers import slurm_step

FIXED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SAFERUN_LINT": "off", "SAFERUN_PREFLIGHT": "off"}
# Torch's launcher sets it too; saferun alone leaves a run directory.
TELL = """
import json, os, sys
print("told", json.dumps([sys.argv[1:], os.environ["LOCAL_RANK"], os.environ.get("PYTHONPATH")]))
sys.exit(int(os.environ.get("FAIL", "0")))
"""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """With a shim, and a script that says what it was given."""
    assert main(["shim", str(tmp_path / "bin")]) == 0
    capsys.readouterr()
    (tmp_path / "train.py").write_text(TELL)
    return tmp_path


def run(folder: Path, *words: str, path: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell that has the hook."""
    paths = ":".join((str(folder / "bin" / "python"), str(REPOSITORY), *path))
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **FIXED, "PYTHONPATH": paths, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def has_run(folder: Path) -> bool:
    """Whether it was saferun."""
    return (folder / "saferun-runs" / "latest").exists()


def told(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    """What the ranks say, by local rank."""
    lines = [line.partition("told ")[2] for line in done.stdout.splitlines() if "told " in line]
    return sorted((json.loads(line) for line in lines), key=lambda row: str(row[1]))


@pytest.mark.parametrize("how", slow_but(["-m", "-um", "-mtorch", "torchrun"], "-m"))
def test_the_launcher_is_saferun_for_who_runs_it_with_python(folder: Path, how: str) -> None:
    """By the module or by the environment's own torchrun; options of the interpreter stay."""
    words = {
        "-m": ("-X", "utf8", "-m", "torch.distributed.run"),
        "-um": ("-um", "torch.distributed.run"),
        "-mtorch": ("-mtorch.distributed.run",),
        "torchrun": (str(Path(sys.executable).parent / "torchrun"),),
    }[how]
    options = ("--nproc-per-node=2", "--master-port", "0", "train.py", "a b", "--more")
    done = run(folder, sys.executable, *words, *options)
    assert done.returncode == 0, done.stderr
    assert has_run(folder)
    wanted = [[["a b", "--more"], str(rank), str(REPOSITORY)] for rank in range(2)]
    assert told(done) == wanted, "the ranks have the hook's directory, or other arguments"
    assert run(folder, sys.executable, *words, *options, FAIL="3").returncode == 1


@pytest.mark.parametrize("how", slow_but(["-m", "the command", "the shim"], "the shim"))
def test_ranks_do_not_have_the_hook_whoever_starts_saferun(folder: Path, how: str) -> None:
    """What they start in turn is not changed either."""
    command = {
        "-m": (sys.executable, "-m", "saferun"),
        "the command": (str(Path(sys.executable).parent / "saferun"),),
        "the shim": (str(folder / "bin" / "torchrun"),),
    }[how]
    done = run(folder, *command, "--master-port", "0", "train.py")
    assert done.returncode == 0, done.stderr
    assert told(done) == [[[], "0", str(REPOSITORY)]]


@pytest.mark.slow
def test_torch_distributed_launch_gives_scripts_their_local_rank(folder: Path) -> None:
    """As torch has it: an argument, unless --use-env says otherwise."""
    options = ("--nproc-per-node=2", "--master-port=0", "--max-restarts", "1")
    words = (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", *options)
    done = run(folder, *words, "train.py", "x")
    assert done.returncode == 0, done.stderr
    assert has_run(folder)
    assert [row[0] for row in told(done)] == [["--local-rank=0", "x"], ["--local-rank=1", "x"]]
    settings = json.loads((folder / "saferun-runs" / "latest" / "run.json").read_text())["settings"]
    assert settings["max_restarts"]["value"] == 1
    assert [row[0] for row in told(run(folder, *words, "--use-env", "train.py", "x"))] == [["x"], ["x"]]


def test_a_sitecustomize_of_the_user_runs_as_without_the_hook(folder: Path) -> None:
    """In processes that have nothing to do with launchers, and with no trace of the hook."""
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("import sys; sys.own = sys.modules['sitecustomize'].__file__")
    code = "import sys; print(sys.own, [p for p in sys.path if p.endswith('bin/python')], sys.meta_path[0])"
    done = run(folder, sys.executable, "-c", code, path=(str(folder / "own"),))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split(" ", 2)[:2] == [str(folder / "own" / "sitecustomize.py"), "[]"]
    assert "LauncherWatcher" not in done.stdout
    done = run(folder, sys.executable, "-m", "torch.distributed.run", "--master-port=0", "train.py", path=("own",))
    assert (done.returncode, len(told(done))) == (0, 1)


@pytest.mark.slow
def test_without_saferun_in_this_python_torchs_launcher_runs(folder: Path) -> None:
    """For instance in another virtual environment."""
    hook = folder / "bin" / "python" / "sitecustomize.py"
    hook.write_text(hook.read_text().replace(f"PREFIX = {sys.prefix!r}", "PREFIX = '/another/environment'"))
    done = run(folder, sys.executable, "-m", "torch.distributed.run", "--help")
    assert done.returncode == 0
    assert "saferun" not in done.stdout


def test_a_hook_that_fails_leaves_torchs_launcher_with_one_line(folder: Path) -> None:
    """The first law: what saferun adds may fail only by being absent."""
    hook = folder / "bin" / "python" / "sitecustomize.py"
    text = hook.read_text()
    hook.write_text(text.replace("    os.execve(", "    raise OSError('planted')\n    os.execve("))
    done = run(folder, sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py")
    assert (done.returncode, len(told(done))) == (0, 1)
    assert done.stderr.count("saferun: cannot run instead of torch's launcher, which runs: OSError: planted\n") == 1
    assert not has_run(folder)
    hook.write_text(text.replace("def _act() -> None:", "def _act() -> None:\n    raise RuntimeError('planted')"))
    done = run(folder, sys.executable, "-c", "print('alive')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def tool_of(folder: Path, *lines: str) -> str:
    """A tool that calls the launcher, with some settings of its own."""
    (folder / "own").mkdir()
    tool = folder / "own" / "accelerate"
    begin = (
        "import sys, torch.distributed.run as launcher",
        "args = launcher.get_args_parser().parse_args(sys.argv[1:])",
    )
    tool.write_text("\n".join((*begin, *lines, "launcher.run(args)")))
    hook = folder / "bin" / "python" / "sitecustomize.py"
    hook.write_text(hook.read_text().replace('os.path.join(sys.prefix, "bin")', repr(str(folder / "own"))))
    return str(tool)


@pytest.mark.slow
def test_a_tool_that_has_one_host_keeps_it_under_a_scheduler(folder: Path) -> None:
    """``accelerate launch`` asks for machines by its own options: without them there is one, whoever started it."""
    step = slurm_step(0, 1, 1, nodes="node1", hosts=1, tasks=2, tasks_by_host="2", gtids="0,1")
    environ = {name: value for name, value in step.items() if name.startswith("SLURM")}
    done = run(folder, sys.executable, tool_of(folder), "--nproc-per-node", "2", "train.py", path=(), **environ)
    assert (done.returncode, [row[1] for row in told(done)]) == (0, ["0", "1"]), done.stderr
    assert has_run(folder)


@pytest.mark.slow
def test_what_no_command_line_says_is_left_to_torch(folder: Path) -> None:
    """A tool that calls the launcher with a setting of its own."""
    tool = tool_of(folder, "args.of_its_own = 1")
    done = run(folder, sys.executable, tool, "--standalone", "train.py")
    assert (done.returncode, len(told(done))) == (0, 1)
    assert "saferun: what torch's launcher is called with is no command line; torch's launcher runs" in done.stderr
    assert not has_run(folder)


def test_what_it_prints_is_read_by_a_shell(folder: Path) -> None:
    """With or without a PYTHONPATH of the user's; an empty entry there would be the working directory."""
    for before, after in (("", ""), ("/a:/b", ":/a:/b")):
        command = f'eval "$({sys.executable} -m saferun.ctl shim "$1")"; echo "$PATH|$PYTHONPATH"'
        environ = {**os.environ, "PYTHONPATH": before}
        if not before:
            environ.pop("PYTHONPATH")
        done = subprocess.run(
            ["sh", "-c", command, "sh", str(folder / "with a blank")],
            cwd=REPOSITORY,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        path, _, python = done.stdout.rstrip("\n").partition("|")
        assert path.startswith(f"{folder / 'with a blank'}:")
        assert python == f"{folder / 'with a blank' / 'python'}{after}"
