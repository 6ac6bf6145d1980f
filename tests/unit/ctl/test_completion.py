"""The files of share/ are those of today's options, and shells understand them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from saferun.cli.options import OPTIONS
from saferun.ctl import SUBCOMMANDS
from saferun.ctl.completion import SHELLS, completion, shared_files
from saferun.ctl.man_pages import ctl_man_page, man_page

ROOT = Path(__file__).parents[3]
BASH = ROOT / "share/bash-completion/completions/saferun"


def test_the_files_are_current() -> None:
    """After a change to the options: ``python -m saferun.ctl.completion``."""
    for name, content in shared_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == content, name


def test_every_option_is_completed_in_every_shell() -> None:
    for shell in SHELLS:
        script = completion(shell)
        for option in OPTIONS:
            name = next(flag for flag in option.flags if flag.startswith("--")).removeprefix("--")
            assert name in script, (shell, name)
        assert all(subcommand.name in script for subcommand in SUBCOMMANDS)


def completed(*words: str, function: str = "_saferun") -> list[str]:
    """What bash offers for the last of these words."""
    script = f'source {BASH}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    command = ["bash", "--norc", "--noprofile", "-c", script, "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("saferun", "--nproc"), ["--nproc-per-node"]),
        (("saferun", "--nproc_"), ["--nproc_per_node"]),
        (("saferun", "--on-hang", "re"), ["report", "restart"]),
        (("saferun", "--on-hang", "=", "st"), ["stop"]),
        (("saferun", "--nproc-per-node", "2", "--on-han"), ["--on-hang"]),
        (("saferun", "--nproc-per-node", "--on-han"), []),
        (("saferun", "train.py", "--nproc"), []),
        (("saferun", "--standalone", "train.py", "--nproc"), []),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: list[str]) -> None:
    """Behind the script all words are the script's."""
    assert completed(*words) == offered


def test_bash_completes_verbs() -> None:
    assert completed("saferunctl", "sta", function="_saferunctl") == ["status", "stacks"]
    assert "--rank" in completed("saferunctl", "logs", "--", function="_saferunctl")


def test_a_real_bash_completes_when_tab_is_pressed() -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(fd, f"PS1=; source {BASH}; echo re''ady\n".encode())
        _read_until(fd, b"ready")
        os.write(fd, b"saferun --nproc\t")
        assert b"--nproc-per-node " in _read_until(fd, b"-per-node ")
    finally:
        os.close(fd)
        os.waitpid(pid, 0)


def _read_until(fd: int, wanted: bytes) -> bytes:
    text = b""
    while wanted not in text:
        assert select.select([fd], [], [], 60.0)[0], text
        text += os.read(fd, 1 << 16)
    return text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_scripts(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(completion(shell), encoding="utf-8")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)


def test_the_man_page_has_every_option() -> None:
    page = man_page()
    for option in OPTIONS:
        assert option.flags[0].replace("-", "\\-") in page
    groups = [line for line in page.splitlines() if line.startswith(".SH")]
    assert len(groups) == len(set(groups))


def test_the_man_page_of_saferunctl_has_every_verb_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every host the same."""
    monkeypatch.setenv("PYTHON_EXEC", "/of/one/host/python")
    monkeypatch.setenv("COLUMNS", "30")
    page = ctl_man_page()
    assert all(f'.SS "saferunctl {subcommand.name}"\n' in page for subcommand in SUBCOMMANDS)
    for words in (
        "\\fBsaferunctl logs\\fR [options] [RUN]",
        "\\fBsaferunctl stop\\fR [options] RUN",
        "\\fBsaferunctl debug\\fR [options] [RUN] \\-\\-rank RANK",
        "\\fBsaferunctl doctor\\fR [options] [options of saferun]",
        '.SS "saferunctl env lint"',
        "\\fB\\-\\-env\\fR \\fINAME=VALUE\\fR",
        "\\fB\\-w\\fR, \\fB\\-\\-watch\\fR \\fI[SECONDS]\\fR",
    ):
        assert words in page, words
    assert "/of/one/host" not in page
    assert "%(" not in page


@pytest.mark.parametrize("page", [man_page, ctl_man_page], ids=["saferun", "saferunctl"])
def test_a_man_page_has_nothing_that_man_stumbles_over(page: Callable[[], str], tmp_path: Path) -> None:
    text = page()
    assert text.isascii()
    assert not any(line.startswith(("'", "..")) for line in text.splitlines())
    if shutil.which("groff") is None:
        can_be_had = os.geteuid() == 0 and shutil.which("apt-get") is not None
        assert not (os.environ.get("CI") and can_be_had), "groff is not installed: `make test` installs it"
        pytest.skip("groff is not installed")
    path = tmp_path / "page.1"
    path.write_text(text, encoding="ascii")
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
