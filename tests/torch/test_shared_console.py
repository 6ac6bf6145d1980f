"""Where all hosts write to one console, one of them speaks for all."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.process.launching import Job, customized, in_saferun, until
from tests.process.reading import Pipe
from tests.torch.several import hosts
from tests.unit.recorded_launchers import slurm_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.process.reading import Reader

COUNT = 3
FAILING = """
from rank import *
tell("ready")
await_release("go")
if RANK == 1:
    raise ValueError("bad batch")
await_release("end")
"""
HANGING = """
from rank import *
tell("ready")
await_release("go")
"""


def step(node: int) -> Mapping[str, str]:
    told = slurm_step(node, node, 0, nodes="node[1-3]", hosts=COUNT, tasks=COUNT, tasks_by_host="1(x3)")
    return {**told, "SAFERUN_SCHEDULER": "slurm"}  # also where the tests are started over ssh, or in tmux


@contextmanager
def on_one_console(folder: Path, program: str, *options: str) -> Iterator[tuple[list[Job], Reader]]:
    """A step of Slurm's, whose srun copies what all tasks print."""
    with Pipe() as pipe:
        streams = {"stdout": pipe.write_end, "stderr": pipe.write_end}
        with hosts(folder, program, *options, count=COUNT, environs=step, of_each=lambda _: streams) as jobs:
            pipe.close_write_end()
            reader = pipe.reader()
            for job in jobs:
                job.hear("ready")
            yield jobs, reader


def own_lines(text: bytes) -> list[str]:
    """What was printed, without the lines of ranks."""
    return [line for line in text.decode().splitlines() if not line.startswith("[")]


def hang_until(jobs: Sequence[Job], condition: Callable[[], object], what: str) -> None:
    """Let the ranks hang until a condition is true, and then end well."""
    for job in jobs:
        job.hear("ready")
    until(condition, what)
    for job in jobs:
        job.release("go")
    assert [job.wait() for job in jobs] == [0] * len(jobs)


def test_a_failure_is_reported_once_a_job(tmp_path: Path) -> None:
    """64 hosts once printed 190 lines about one exception."""
    with on_one_console(tmp_path, FAILING) as (jobs, reader):
        for job in jobs:
            job.release("go")
        assert [job.wait() for job in jobs] == [1] * COUNT
        lines = own_lines(reader.all())
    assert sum("ValueError: bad batch" in line for line in lines if line.startswith("saferun: rank 1")) == 1, lines
    assert sum(line.startswith("  files: ") for line in lines) == 1
    assert sum(line.startswith(("saferun: ", "hint: ")) for line in lines) <= 3, lines


@pytest.mark.slow
def test_an_order_to_all_hosts_is_reported_once(tmp_path: Path) -> None:
    with on_one_console(tmp_path, HANGING) as (jobs, reader):
        for job in jobs:
            job.send(signal.SIGTERM)
        assert [job.wait() for job in jobs] == [1] * COUNT
        lines = own_lines(reader.all())
    # None where the leader has heard of another host's signal before it got its own: that host leaves the words to it.
    assert sum(line.startswith("saferun: SIGTERM") for line in lines) <= 1, lines
    assert lines.count(f"saferun: stopped by the scheduler (SIGTERM to all {COUNT} hosts)") == 1, lines


@pytest.mark.slow
def test_a_hang_is_reported_once_a_job(tmp_path: Path) -> None:
    with on_one_console(
        tmp_path, HANGING, "--hang-timeout", "2", "--external-wait-timeout", "0", "--env-profile", "minimal"
    ) as (jobs, reader):
        until(lambda: b"saferun: job left running" in reader.so_far(), "it is reported")
        for job in jobs:
            job.release("go")
        assert [job.wait() for job in jobs] == [0] * COUNT
        lines = own_lines(reader.all())
    assert not any("has the report" in line for line in lines), lines


@pytest.mark.parametrize(
    ("wait_s", "told"),
    slow_but([("1200", "saferun: the job may hang: "), ("0", "saferun: the job hangs: ")], "1200"),
    ids=["suspected", "certain"],
)
def test_hosts_with_consoles_of_their_own_word_a_hang_as_the_leader_does(
    tmp_path: Path, wait_s: str, told: str
) -> None:
    """Only the leader knows that a rank of another host waits for something outside the job."""
    options = ("--hang-timeout", "2", "--external-wait-timeout", wait_s, "--env-profile", "minimal")
    with hosts(tmp_path, HANGING, *options, count=2) as jobs:
        hang_until(jobs, lambda: "has the report" in jobs[1].err, "it is said")
    lines = own_lines(jobs[1].err.encode())
    (line,) = [line for line in lines if "has the report" in line]
    assert line.startswith(told), lines
    assert not any("no rank on any host" in line for line in lines), lines
    (own,) = jobs[1].run_dir.glob("*/report.json")
    hang = json.loads(own.read_text())["incidents"][0]
    assert hang["verdict"]["certain"] is (wait_s == "0")
    assert hang["headline"].startswith(told.removeprefix("saferun: "))


@pytest.mark.slow
def test_where_the_leader_says_nothing_of_a_hang_the_other_hosts_keep_theirs(tmp_path: Path) -> None:
    """Its message may get lost, or it may have none."""
    breaking = "from saferun.cluster.job_sender import JobSender\n    JobSender.broadcast_judgement = None"
    options = ("--hang-timeout", "2", "--env-profile", "minimal")
    with hosts(
        tmp_path,
        HANGING,
        *options,
        environs=lambda host: customized(tmp_path, in_saferun(breaking)) if not host else {},
    ) as jobs:
        hang_until(jobs, lambda: "job left running" in jobs[0].err, "it is reported")
    assert "has the report" not in jobs[1].err
    (own,) = jobs[1].run_dir.glob("*/report.json")
    assert json.loads(own.read_text())["incidents"][0]["kind"] == "hang"


@pytest.mark.slow
def test_hosts_with_files_of_their_own_all_say_it(tmp_path: Path) -> None:
    """``srun --output=%N.log``."""
    with hosts(tmp_path, FAILING, count=COUNT, environs=step) as jobs:
        for job in jobs:
            job.hear("ready")
        for job in jobs:
            job.release("go")
        assert [job.wait() for job in jobs] == [1] * COUNT
        for job in jobs:
            assert any(line.startswith("saferun: rank 1") for line in own_lines(job.err.encode())), job.err


@pytest.mark.slow
def test_hosts_that_are_said_to_have_consoles_of_their_own_all_say_it(tmp_path: Path) -> None:
    """``srun sh -c 'saferun ... | tee $SLURMD_NODENAME.log'`` cannot be told from a console that all share."""
    with on_one_console(tmp_path, FAILING, "--console", "own") as (jobs, reader):
        for job in jobs:
            job.release("go")
        assert [job.wait() for job in jobs] == [1] * COUNT
        lines = own_lines(reader.all())
    assert sum("ValueError: bad batch" in line for line in lines if line.startswith("saferun: rank 1")) == COUNT


@pytest.mark.slow
def test_a_hang_whose_first_report_has_passed_by_a_host_is_told_there_by_the_next(tmp_path: Path) -> None:
    """A suspected one is captured again, and each host tells it once."""
    breaking = (
        "from saferun.cluster.job_sender import JobSender\n"
        "    send = JobSender.broadcast_judgement\n"
        "    JobSender.broadcast_judgement = lambda own, n, *more, **named: n > 1 and send(own, n, *more, **named)"
    )
    options = ("--hang-timeout", "2", "--env-profile", "minimal")
    with hosts(
        tmp_path,
        HANGING,
        *options,
        count=2,
        environs=lambda host: customized(tmp_path, in_saferun(breaking)) if not host else {},
    ) as jobs:
        hang_until(jobs, lambda: jobs[0].err.count("the job may still hang") > 1, "it is reported again")
    assert jobs[1].err.count("has the report") == 1, jobs[1].err


@pytest.mark.slow
def test_a_hang_that_comes_together_with_the_next_one_keeps_its_number(tmp_path: Path) -> None:
    """On a host that was stopped for a while: its evidence and its report are of the hang that it captures."""
    breaking = (
        "from saferun.cluster.rank_reports import RankReports\n"
        "    take = RankReports._take_hang\n"
        "    def take_two(own, entry):\n"
        "        take(own, entry)\n"
        "        take(own, {**entry, 'n': entry['n'] + 1})\n"
        "    RankReports._BY_KIND['hang'] = take_two"
    )
    options = ("--hang-timeout", "2", "--env-profile", "minimal")
    with hosts(
        tmp_path,
        HANGING,
        *options,
        count=2,
        environs=lambda host: customized(tmp_path, in_saferun(breaking)) if host else {},
    ) as jobs:
        hang_until(jobs, lambda: "has the report" in jobs[1].err, "it is said")
    (report,) = jobs[0].run_dir.glob("report.json")
    incidents = json.loads(report.read_text())["incidents"]
    assert len(incidents[0]["hosts"]) == 2
