"""--on-event: the command gets what happens, and whatever becomes of it, the launch ends as it would without it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.launch.event_commands import CommandLimits, serve
from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper
from saferun.linux.poller import Poller
from tests.breadth import slow_but
from tests.process.launching import END_AS_TOLD, STAY, Job, read_stat, running, two_lines, until

QUIET = ("--preflight", "off")
RECORD = "import os, sys; open('events', 'a').write(sys.stdin.read()); print(os.environ['SAFERUN_EVENT'])"
FIELDS = {
    *("schema", "kind", "run_id", "run_dir", "host", "attempt", "time", "headline", "hint", "ranks", "exit_code"),
    *("outcome", "report"),
}


def python(source: str) -> tuple[str, str]:
    """The option with a Python program as the command."""
    return "--on-event", f"{shlex.quote(sys.executable)} -c {shlex.quote(source)}"


def events_of(job: Job) -> list[dict[str, Any]]:
    path = job.folder / "job" / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_the_command_gets_every_failure_every_restart_and_the_end(folder: Path) -> None:
    """In the order of time, with the report written before, and without secrets."""
    options = (*python(RECORD), *QUIET, "--max-restarts", "1")
    source = """
from rank import *
raise ValueError("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 is refused")
"""
    with running(folder, source, *options, store=False) as job:
        assert job.wait() == 1
        events = events_of(job)
        assert sorted(event["kind"] for event in events) == ["end", "failure", "failure", "restart"]
        assert all(set(event) == FIELDS for event in events)
        by_kind = {event["kind"]: event for event in events}
        failure, end, restart = by_kind["failure"], by_kind["end"], by_kind["restart"]
        assert failure["ranks"] == [0]
        assert failure["exit_code"] == 1
        assert "ValueError" in failure["headline"]
        assert Path(failure["report"]).samefile(job.run_dir / "report.json")
        assert "hf_abc" not in (folder / "job" / "events").read_text()
        assert (end["exit_code"], end["outcome"]) == (1, "failed")
        assert restart["attempt"] == 0
        in_order = sorted(events, key=lambda event: event["time"])
        assert [event["kind"] for event in in_order] == ["failure", "restart", "failure", "end"]
        assert "restart\n" in (job.run_dir / "on_event.log").read_text()


def test_a_job_that_succeeds_has_one_event_and_no_report(folder: Path) -> None:
    with running(folder, "pass", *python(RECORD), *QUIET, store=False) as job:
        assert job.wait() == 0
        (event,) = events_of(job)
        assert (event["kind"], event["outcome"], event["exit_code"], event["report"]) == ("end", "succeeded", 0, None)
        assert "--on-event" not in job.err


@pytest.mark.slow
def test_a_hang_that_passes_is_two_events(folder: Path) -> None:
    source = """
from rank import *
tell("ready")
await_release("work")
end = time.monotonic() + 3
while time.monotonic() < end:
    print("step", flush=True)
    time.sleep(0.05)
"""
    with running(folder, source, *python(RECORD), *QUIET, "--hang-timeout", "1", store=False) as job:
        job.hear("ready")
        until(lambda: any(event["kind"] == "hang" for event in events_of(job)), "the event of the hang")
        job.release("work")
        assert job.wait() == 0
        assert [event["kind"] for event in events_of(job)][-2:] == ["recovery", "end"]


BAD = {
    "is missing": "/nowhere/notify",
    "is a directory": "/",
    "fails": "sh -c 'exit 7'",
    "kills itself": "sh -c 'kill -9 $$'",
    "kills its parent": "sh -c 'kill -9 $PPID'",
    "reads nothing": "true",
    "closes everything": "sh -c 'exec <&- >&- 2>&-; exit 0'",
    "prints without end": "yes",
    "sleeps": "sleep 1000",
    "ignores SIGTERM": "sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1; done'",
    "leaves a process": "sh -c 'sleep 1000 & exit 0'",
    "leaves a daemon": "sh -c 'setsid sleep 1000 & exit 0'",
    "stops itself": "sh -c 'kill -STOP $$'",
}


@pytest.mark.parametrize(
    ("command", "code"),
    slow_but(
        [pytest.param(command, code, id=f"{how}-{code}") for how, command in BAD.items() for code in ("0", "3")],
        *("is missing-3", "ignores SIGTERM-0"),
    ),
)
def test_a_bad_command_changes_neither_the_end_nor_the_exit_code(folder: Path, command: str, code: str) -> None:
    """There is at most one line for each way in which it fails, and nothing is left of it."""
    with running(folder, END_AS_TOLD, "--on-event", command, *QUIET, arguments=(code,), store=False) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == (1 if code == "3" else 0)
        lines = [line for line in job.err.splitlines() if "--on-event" in line]
        assert len(lines) <= 2, lines
        assert (job.run_dir / "report.json").exists() is (code == "3")
        assert sum(path.stat().st_size for path in job.run_dir.glob("on_event.log")) < 1 << 17


@pytest.mark.slow
def test_a_user_in_a_hurry_does_not_wait_for_the_command(folder: Path) -> None:
    """A second signal ends the wait; the exit code is that of the launch."""
    command = "import os, time; open('begun', 'w'); time.sleep(1000)"
    with running(folder, END_AS_TOLD, *python(command), *QUIET, arguments=("3",), store=False) as job:
        job.hear("ready")
        job.release("end")
        until((folder / "job" / "begun").exists, "the command")
        job.send(signal.SIGTERM)
        assert job.wait() == 1


def test_nothing_is_left_of_the_command_where_saferun_is_killed(folder: Path) -> None:
    command = "import os, time; open('begun', 'w').write(str(os.getpid())); time.sleep(1000)"
    with running(folder, STAY, *python(command), *QUIET, "--hang-timeout", "1", store=False) as job:
        job.hear("ready")
        pid = int(until(lambda: (p := folder / "job" / "begun").exists() and p.read_text(), "the command"))
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        until(lambda: read_stat(pid) is None, "its end")


@pytest.mark.parametrize("command", ["notify 'x", "  "])
def test_a_command_that_is_none_is_refused(folder: Path, command: str) -> None:
    with running(folder, "pass", "--on-event", command, store=False) as job:
        assert job.wait() == 2
        assert "--on-event" in two_lines(job.err)[0]


# ------------------------------------------------------------------------------------------ the process that runs them


class Commands:
    """The process that runs commands, with a loop that listens to it."""

    def __init__(self, *argv: str, **limits: Any) -> None:
        self.poller = Poller()
        self.answers: list[dict[str, Any]] = []

        def begin(connection: Socket) -> None:
            serve(connection, argv, dict(os.environ), CommandLimits(**limits))

        self.helper = Helper("sr-events", begin)
        self.helper.attach(self.poller, self.answers.append, lambda: None)

    def send(self, count: int) -> None:
        for number in range(count):
            self.helper.send({"number": number, "event": {"kind": "end", "number": number}})

    def await_answers(self, count: int) -> list[dict[str, Any]]:
        def listened() -> bool:
            self.poller.wait(0.05)
            return len(self.answers) >= count

        until(listened, f"{count} answers")
        return self.answers


@pytest.fixture
def made() -> Iterator[list[Commands]]:
    made: list[Commands] = []
    yield made
    for commands in made:
        pids = commands.helper.pids
        commands.helper.kill()
        for pid in pids:
            os.waitpid(pid, 0)
        commands.poller.close()


def test_a_command_that_takes_too_long_is_killed_with_its_session(made: list[Commands], tmp_path: Path) -> None:
    """Also what ignores SIGTERM, and what it has started."""
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 1000 & echo $! $$ > {pids}; wait; sleep 1000"
    made.append(Commands("sh", "-c", script, run_s=2.0, term_s=0.2))
    made[0].send(1)
    (answer,) = made[0].await_answers(1)
    assert answer["is_late"]
    assert answer["returncode"] == -signal.SIGKILL
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: read_stat(pid) is None, "its end")  # type: ignore[misc]


def test_only_so_many_run_at_a_time_and_all_get_their_turn(made: list[Commands], tmp_path: Path) -> None:
    """Each notes how many there are besides itself."""
    source = f"""
import os, sys, time
os.chdir({str(tmp_path)!r})
open(f"run.{{os.getpid()}}", "w").close()
time.sleep(0.05)
print(len([name for name in os.listdir() if name.startswith("run.")]))
os.unlink(f"run.{{os.getpid()}}")
"""
    made.append(Commands(sys.executable, "-S", "-c", source, at_once=2))
    made[0].send(7)
    answers = made[0].await_answers(7)
    assert sorted(answer["number"] for answer in answers) == list(range(7))
    assert {int(answer["output"]) for answer in answers} <= {1, 2}


def test_the_signals_of_a_command_are_those_of_a_program(made: list[Commands]) -> None:
    """The process that runs it ignores what is meant for the job; what it starts must not inherit that."""
    source = "import signal; print([s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN])"
    made.append(Commands(sys.executable, "-S", "-c", source))
    made[0].send(1)
    (answer,) = made[0].await_answers(1)
    assert answer["output"].strip() == "['SIGPIPE', 'SIGXFSZ']"


def test_the_beginning_of_a_flood_is_kept_and_the_rest_is_counted(made: list[Commands]) -> None:
    made.append(Commands("sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x"))
    made[0].send(1)
    (answer,) = made[0].await_answers(1)
    assert set(answer["output"]) == {"x"}
    assert len(answer["output"]) + answer["dropped_bytes"] == 1000000
    assert len(answer["output"]) < 1 << 16
