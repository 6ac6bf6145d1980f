"""The way to the host of a rank: found by the run directory, and gone by a step of the job or by ssh."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from saferun.ctl import other_host
from saferun.ctl.other_host import Destination, by_hand, command_line, destination, find_rank, go
from saferun.errors import UsageError

ELSEWHERE = {"pid": 7, "start_ticks": 1, "boot_id": "of another host", "pid_namespace": "pid:[1]"}


def run_of_two_hosts(folder: Path, **more: Any) -> Path:
    """A run directory that two hosts share; both live, as far as their files say."""
    for host, ranks in (("node1", (0, 1)), ("node2", (2, 3))):
        for rank in ranks:
            (folder / host / "attempt_0" / f"rank_{rank}").mkdir(parents=True)
        (folder / host / "events.jsonl").touch()
    for path, host in ((folder, "node1"), (folder / "node2", "node2")):
        record = {"run_id": "abc123", "command": [], "host": host, "process": ELSEWHERE, "control_socket": "/run/s"}
        (path / "run.json").write_text(json.dumps({**record, **more}))
    return folder


def test_a_login_node_finds_the_host_of_a_rank_by_the_files_of_the_newest_attempt(tmp_path: Path) -> None:
    """No saferun can be asked there. Ranks may have changed their hosts from one attempt to the next."""
    run = run_of_two_hosts(tmp_path, slurm_job="4711")
    assert destination(run, "3") == Destination("node2", str(run), "4711", is_elsewhere=True)
    (run / "node1" / "attempt_1" / "rank_3").mkdir(parents=True)
    assert find_rank(run, "3", "locate", "pid") == Destination("node1", str(run), "4711", is_elsewhere=True)
    with pytest.raises(UsageError, match="can be reached from here"):
        find_rank(run, "99", "locate", "pid")


def test_a_host_whose_files_are_not_here_knows_the_run_by_its_id(tmp_path: Path) -> None:
    """Its run directory is one of its own."""
    assert destination(run_of_two_hosts(tmp_path), "5", "node3") == Destination("node3", "abc123")


@pytest.mark.parametrize("job", ["4711; rm -rf /", "--uid=0", 4711, None])
def test_what_is_no_number_of_a_job_is_none(tmp_path: Path, job: object) -> None:
    """run.json may have been written by anything."""
    found = destination(run_of_two_hosts(tmp_path, slurm_job=job), "3")
    assert found is not None
    assert found.slurm_job == ""


def test_a_step_of_the_job_is_taken_where_there_is_one_and_ssh_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of many clusters let no one in by ssh but into the job itself."""
    monkeypatch.setattr(other_host, "find_tool", lambda name: f"/usr/bin/{name}")
    to = Destination("node2", "/runs/a b")
    step = command_line("debug", "3", to._replace(slurm_job="7"))
    assert step[:3] == ["/usr/bin/srun", "--jobid=7", "--overlap"]
    assert {"--nodelist=node2", "--pty"} <= set(step)
    assert step[-6:] == ["saferun.ctl", "debug", "/runs/a b", "--rank", "3", "--here"]
    by_ssh = command_line("debug", "3", to)
    assert by_ssh[:2] == ["/usr/bin/ssh", "-t"]
    assert by_ssh[-3:-1] == ["--", "node2"]
    assert shlex.split(by_ssh[-1])[-5:] == ["debug", "/runs/a b", "--rank", "3", "--here"]
    monkeypatch.setattr(other_host, "find_tool", lambda name: "/usr/bin/ssh" if name == "ssh" else "")
    assert command_line("debug", "3", to._replace(slurm_job="7"))[0] == "/usr/bin/ssh"


@pytest.mark.parametrize("host", ["-oProxyCommand=touch /tmp/x", "node2;reboot", "node 2", "", "ü"])
def test_a_name_that_is_none_of_a_host_is_given_to_no_program(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Other hosts say what they are called."""
    monkeypatch.setattr(other_host, "_run", lambda _: pytest.fail("a program was run"))
    with pytest.raises(UsageError, match="rank 3 runs on"):
        go("attach", "3", Destination(host, "/runs/a"), stays=False)


@pytest.mark.parametrize(
    ("tool", "code", "is_reported"), [("ssh", 255, True), ("srun", 1, True), ("ssh", 1, False), ("srun", 0, False)]
)
def test_a_way_that_fails_is_reported_with_the_command_to_type(
    monkeypatch: pytest.MonkeyPatch, tool: str, code: int, is_reported: bool
) -> None:
    """The exit code of the subcommand itself is passed on."""
    monkeypatch.setattr(other_host, "command_line", lambda *_: [f"/usr/bin/{tool}"])
    monkeypatch.setattr(other_host, "_run", lambda _: code)
    to = Destination("node2", "/runs/a")
    if not is_reported:
        assert go("attach", "3", to, stays=False) == code
        return
    with pytest.raises(UsageError) as caught:
        go("attach", "3", to, stays=False)
    assert "ssh -t node2 saferunctl attach /runs/a --rank 3" in caught.value.hint


def test_the_command_to_type_survives_two_shells() -> None:
    typed = shlex.split(by_hand("attach", "3", Destination("node2", "/runs/it's a b")))
    assert typed[:3] == ["ssh", "-t", "node2"]
    assert shlex.split(typed[3]) == ["saferunctl", "attach", "/runs/it's a b", "--rank", "3"]
