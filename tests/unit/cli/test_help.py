"""``--help``: what most launches need at once, and everything for who asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.cli.help import COMMON, help_text, terminal_width
from saferun.cli.options import OPTIONS

_SAFERUN = (sys.executable, "-m", "saferun")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_SAFERUN, *arguments], capture_output=True, text=True, check=False)


def test_the_common_options_are_options() -> None:
    """A name that is left over from an option would hide another one."""
    assert len(set(COMMON)) == len(COMMON)
    assert set(COMMON) < {option.dest for option in OPTIONS}


def test_the_first_level_shows_the_common_options_and_the_second_all() -> None:
    """Each with its long flag at the beginning of an entry."""
    for everything in (False, True):
        entries = [
            line.split("  ", 2)[1] for line in help_text(everything=everything).splitlines() if line[:3] == "  -"
        ]
        for option in OPTIONS:
            shown = any(option.name in entry.replace(",", "").split() for entry in entries)
            assert shown == (everything or option.dest in COMMON), option.name


def test_where_an_option_can_be_set_names_those_that_cannot() -> None:
    """SAFERUN_DRY_RUN=1 starts the job."""
    text = " ".join(help_text(everything=True, width=110).split())
    sentence = text[text.index("Except for") : text.index("SAFERUN_<NAME>")]
    assert all((option.name in sentence.replace(",", "").split()) == option.asks for option in OPTIONS)
    # Of one the variable has another name than the option.
    for option in OPTIONS:
        if option.variable != f"SAFERUN_{option.name.removeprefix('--').replace('-', '_').upper()}":
            assert f"The variable of {option.name} is {option.variable}." in text


@pytest.mark.parametrize("everything", [False, True])
def test_both_levels_name_saferunctl_and_the_defaults(everything: bool) -> None:
    """Who reads options in the middle of a hang needs to hear of what looks at the job."""
    text = " ".join(help_text(everything=everything).split())
    assert "saferunctl stacks" in text
    assert "--help-all" in text
    assert "(default: 300)" in text
    assert "(default: production)" in text


@pytest.mark.parametrize("width", [1, 50, 80, 110, 400])
def test_lines_fit_the_terminal(width: int) -> None:
    """Unless one word is longer than the line."""
    limit = max(50, min(width, 110))
    for line in help_text(everything=True, width=width).splitlines():
        assert len(line) <= limit or len(line.split()) <= 3 or line.startswith("Start "), line


def test_the_width_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells and batch systems set it; what makes no sense counts for nothing."""
    monkeypatch.setenv("COLUMNS", "97")
    assert terminal_width() == 97
    for nonsense in ("0", "-3", "many", ""):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert terminal_width() > 0


def test_help_is_printed_to_stdout_with_exit_code_0_wherever_it_stands() -> None:
    """Before a script, behind other options, abbreviated; as under torchrun."""
    first = _run("--help")
    assert first.returncode == 0
    assert first.stderr == ""
    assert first.stdout.startswith("usage: saferun")
    for arguments in (("-h",), ("--nnodes", "2", "--help"), ("--no-such-option", "--help", "train.py")):
        same = _run(*arguments)
        assert (same.returncode, same.stdout, same.stderr) == (0, first.stdout, "")
    full = _run("--help-all")
    assert (full.returncode, full.stderr) == (0, "")
    assert _run("--nnodes", "2", "--help-all").stdout == full.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """``saferun --help | head -1``."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run([*_SAFERUN, "--help-all"], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_imports_no_argparse_and_nothing_of_a_launch() -> None:
    """It is what people wait for most often."""
    code = (
        "import sys; sys.argv[1:] = ['--help']; from saferun.__main__ import main\n"
        "try: main()\n"
        "finally: print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    modules = set(done.stdout.splitlines()[-1].split())
    assert "saferun.cli.help" in modules
    assert not modules & {"argparse", "torch", "saferun.cli.main", "saferun.config", "saferun.launch"}
