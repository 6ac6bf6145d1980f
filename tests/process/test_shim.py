"""saferunctl shim: a torchrun that is saferun, for tools that call it by its name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.ctl import main
from tests.process.launching import REPOSITORY

ENVIRON = {"PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SAFERUN_LINT": "off"}


def torchrun(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["torchrun", *arguments],
        cwd=directory.parent,
        env={**os.environ, **ENVIRON, "PATH": f"{directory}:{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_tool_that_calls_torchrun_gets_saferun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tool's arguments, and the exit code and the environment of the ranks as they are."""
    directory = tmp_path / "with a blank"
    assert main(["shim", str(directory)]) == 0
    assert f"export PATH='{directory}':\"$PATH\"" in capsys.readouterr().out
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE']); sys.exit(int(sys.argv[1]))")
    options = ("--nproc_per_node=2", "--master_port=0", "--preflight", "off")
    done = torchrun(directory, *options, str(script), "0", "a b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['0', 'a b'] 2") == 2
    assert torchrun(directory, *options, str(script), "3").returncode == 1


@pytest.mark.parametrize("shell", ["/bin/sh", "bash"])
def test_what_it_prints_keeps_search_paths_with_blanks_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    """Some shells split what is not quoted also after ``export``."""
    assert main(["shim", str(tmp_path)]) == 0
    lines = capsys.readouterr().out
    before = "/bin:/x y/bin:/z*"
    for python in (before, ""):
        done = subprocess.run(
            [shell, "-c", f'{lines}printf "%s\\n" "$PATH" "$PYTHONPATH"'],
            env={"PATH": before, "PYTHONPATH": python},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        kept = f":{python}" if python else ""
        assert done.stdout.splitlines() == [f"{tmp_path}:{before}", f"{tmp_path}/python{kept}"]


def test_it_is_written_again_but_never_over_another_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shim", str(tmp_path)]) == 0
    assert main(["shim", str(tmp_path)]) == 0
    (tmp_path / "torchrun").write_text("#!/bin/sh\n# the real one\n")
    assert main(["shim", str(tmp_path)]) == 2
    what, hint = capsys.readouterr().err.splitlines()
    assert "not one of saferunctl's" in what
    assert hint == "hint: name another directory, or overwrite it with --force"
    assert "the real one" in (tmp_path / "torchrun").read_text()
    assert main(["shim", str(tmp_path), "--force"]) == 0
    assert sys.executable in (tmp_path / "torchrun").read_text()


def test_a_directory_that_cannot_be_made_is_an_error_of_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shim", "/proc/nowhere"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_directory_that_a_search_path_cannot_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colon would split it in two."""
    (tmp_path / "c:d").mkdir()
    for directory in (tmp_path / "a:b", tmp_path / "c:d" / "bin"):
        assert main(["shim", str(directory)]) == 2
        what, hint = capsys.readouterr().err.splitlines()
        assert what.startswith(f"saferun: {directory}: ")
        assert hint == "hint: name another directory"
        assert not directory.exists()
    monkeypatch.chdir(tmp_path / "c:d")
    assert main(["shim", "bin"]) == 2


def test_the_command_for_scripts_that_need_their_local_rank_as_an_argument(tmp_path: Path) -> None:
    """As the documents have it: the deepspeed launcher gives scripts this argument."""
    page = (REPOSITORY / "docs" / "programs.md").read_text(encoding="utf-8")
    (command,) = (line for line in page.splitlines() if line.startswith("saferun ") and "--local_rank=" in line)
    # One write, which those of the other rank do not mix with.
    (tmp_path / "train.py").write_text(
        "import os, sys; os.write(1, f'{sys.argv[1:]} {os.environ[\"LOCAL_RANK\"]}\\n'.encode())"
    )
    words = [word.replace("exec python ", f"exec {shlex.quote(sys.executable)} ") for word in shlex.split(command)[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "saferun", "--prefix", "none", "--run-dir", "none", *words],
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"['--local_rank={number}', '--config', 'ds.json'] {number}" for number in (0, 1)
    ]
