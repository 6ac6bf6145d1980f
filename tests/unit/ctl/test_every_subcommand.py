"""Every subcommand of saferunctl about every kind of run: an answer, or two lines that say why there is none."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from saferun.ctl import SUBCOMMANDS, main
from tests.unit.described_runs import GONE, HERE, make_run

if TYPE_CHECKING:
    from pathlib import Path

# Those that are not about one run of the list have tests of their own.
OTHERS = {"stacks", "core", "shim", "completion", "env", "doctor", "record", "attach", "debug", "health"}
ABOUT_ONE = {
    "status": ("status", "{run}"),
    "logs": ("logs", "{run}"),
    "stop": ("stop", "{run}"),
    "checkpoint": ("stop", "{run}", "--after-checkpoint"),
    "kill": ("kill", "{run}"),
    "restart": ("restart", "{run}"),
    "report": ("report", "{run}"),
    "story": ("story", "{run}"),
    "diff": ("diff", "{run}", "{run}"),
    "list": ("list", "--here"),
    "clean": ("clean", "--keep", "0"),
}
ABOUT_OTHERS = {
    "logs -f": ("logs", "-f", "{run}"),
    "logs --json": ("logs", "--json", "{run}"),
    "status -w": ("status", "-w", "1", "{run}"),
    "page": ("report", "--html", "{run}"),
    "trace": ("report", "--format", "perfetto", "{run}"),
    "stacks": ("stacks", "{run}"),
    "record": ("record", "--seconds", "1", "{run}"),
    "core": ("core", "{run}"),
}
REQUESTS = ("stop", "checkpoint", "kill", "restart")
STATES = ("succeeded", "failed", "stopped", "lost", "running", "unreadable", "empty")


def make(base: Path, state: str, hosts: int) -> Path:
    """A run in a state, with the files that each of its hosts leaves."""
    codes = {"succeeded": 0, "failed": 1, "stopped": 143}
    end = (codes[state], state) if state in codes else None
    process = HERE if state == "running" else GONE
    path = make_run(base, "20260101-000000-abcdef", process=process, end=end, headline="rank 0 failed")
    for number in range(2, hosts + 1):
        host = path / f"node{number}"
        shutil.copytree(path / "node1", host)
        content = json.loads((path / "run.json").read_text())
        (host / "run.json").write_text(json.dumps({**content, "host": host.name}))
    log = path / "node1" / "attempt_0" / "rank_0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    if state == "unreadable":
        for description in path.rglob("run.json"):
            description.write_text("{")
    if state == "empty":
        shutil.rmtree(path)
        path.mkdir()
    return path


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the runs, with no other runs of this user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "saferun-runs"


def test_the_table_has_every_verb() -> None:
    assert {subcommand.name for subcommand in SUBCOMMANDS} == {words[0] for words in ABOUT_ONE.values()} | OTHERS


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("subcommand", ABOUT_ONE)
def test_a_verb_answers_or_says_why_not(
    base: Path, capsys: pytest.CaptureFixture[str], subcommand: str, state: str, hosts: int
) -> None:
    path = make(base, state, hosts)
    words = [word.format(run=path) for word in ABOUT_ONE[subcommand]]
    code = main(words)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if subcommand in REQUESTS or code:
        assert code in {1, 2}, out
        what, hint = err.splitlines()
        assert what.startswith("saferun: ")
        assert hint.startswith("hint: ")
    else:
        # Without a file with the times of the lines, which these runs have not.
        assert err == "" or (subcommand == "logs" and err.startswith("saferunctl: the times of the output"))
        assert out or subcommand == "clean" or (subcommand == "list" and state == "empty")
    if subcommand in REQUESTS:
        said = {"lost": "killed, or its host is gone", "running": "control socket", "unreadable": "run.json"}
        assert said.get(state, "run.json" if state == "empty" else f"has ended: {state}") in err
    if subcommand == "clean":
        assert path.exists() == (state in {"running", "unreadable", "empty"}), "what may live is kept"
    if subcommand == "logs" and state != "empty":
        assert out.endswith("step 1\n")
    if subcommand in {"list", "status"} and state not in {"unreadable", "empty"}:
        assert state in out


@pytest.mark.parametrize("what", ["empty", "other files", "a file", "missing"])
@pytest.mark.parametrize(
    "subcommand", [subcommand for subcommand in ABOUT_ONE if subcommand not in {"list", "clean"}] + list(ABOUT_OTHERS)
)
def test_what_is_no_run_is_a_usage_error(
    base: Path, capsys: pytest.CaptureFixture[str], subcommand: str, what: str
) -> None:
    """Silence and exit code 0 would look like the answer about a run without output."""
    make(base, "succeeded", 1)
    path = base.parent / "place"
    if what == "a file":
        path.write_text("text")
    elif what != "missing":
        path.mkdir()
    if what == "other files":
        # Like those of a run, but without what each of them is made of.
        (path / "notes.txt").write_text("text")
        (path / "node1" / "attempt_0").mkdir(parents=True)
        (path / "saferun-runs").mkdir()
    assert main([word.format(run=path) for word in {**ABOUT_ONE, **ABOUT_OTHERS}[subcommand]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said, hint = err.splitlines()
    assert said.startswith("saferun: ")
    assert "place" in said
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("option", [("--signal", "USR2"), ("--timeout", "10min")])
def test_what_only_a_stop_after_a_checkpoint_has_does_not_pass_for_a_stop_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    """Whoever writes it means to save a checkpoint: the job must not be ended without one."""
    run = make(tmp_path, "running", 1)
    assert main(["stop", str(run), *option]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[0]) == ("", f"saferun: {option[0]} needs --after-checkpoint")
