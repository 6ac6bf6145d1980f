"""Real gloo jobs with a hang timeout far below the time that a rank waits for something outside the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.launching import Job, customized, in_saferun
from tests.torch.outside_jobs import BEGIN, DEADLOCKS, END, OF_BOTH, QUIET_S, TIMEOUT_S, WAITS, outside
from tests.torch.watching import await_failure, incidents, watched

OPTIONS = ("--hang-timeout", str(TIMEOUT_S), "--on-hang", "stop")
# In these something moves now and then, and no moment has to be quiet for so long.
MAY_SHOW_NONE = frozenset({"bursts", "a trickle"})


def of_rank_0(program: str) -> str:
    return "if RANK == 0:\n" + "\n".join(f"    {line}" for line in program.strip().splitlines()) + "\n"


@contextlib.contextmanager
def stopped_at_hangs(folder: Path, program: str, *options: str) -> Iterator[Job]:
    script = folder / "train.py"
    script.write_text(BEGIN + program + END)
    with outside(folder / "outside") as found:
        arguments = (str(found.port), str(found.folder), str(QUIET_S))
        with watched(folder / "run", script, *arguments, nproc=2, options=(*OPTIONS, *options)) as job:
            yield job


@pytest.mark.slow
@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_waits_for_something_outside_the_job_is_never_stopped(tmp_path: Path, what: str) -> None:
    """A timeout that is too short for a job must not cost the job."""
    with stopped_at_hangs(tmp_path, of_rank_0(WAITS[what])) as job:
        assert job.wait(180) == 0, job.err[-4000:]
        assert job.out.count("well") == 2
        hangs = incidents(job, "hang")
        assert [hang for hang in hangs if hang["verdict"]["certain"]] == []
        if what not in MAY_SHOW_NONE:
            assert hangs, "the timeout has passed"
            assert "the job may hang: " in job.err
            # Where the machine is slow, another quiet moment may come first.
            findings = [line for hang in hangs for line in hang["findings"]]
            assert any("something outside the job" in line for line in findings), hangs


@pytest.mark.slow
@pytest.mark.parametrize("what", [*DEADLOCKS, *OF_BOTH])
def test_what_cannot_end_by_itself_is_stopped_at_once(tmp_path: Path, what: str) -> None:
    """Each of these used to be certain after the timeout, and is."""
    program = OF_BOTH[what] if what in OF_BOTH else of_rank_0(DEADLOCKS[what])
    with stopped_at_hangs(tmp_path, program) as job:
        await_failure(job)
        assert job.process.returncode == 1, job.err[-4000:]
        assert [hang["verdict"]["certain"] for hang in incidents(job, "hang")] == [True], job.err[-4000:]


@pytest.mark.slow
def test_a_wait_that_lasts_longer_than_its_own_timeout_is_certain(tmp_path: Path) -> None:
    """First it is suspected; when the longer time has passed it is captured again, and the job is stopped."""
    with stopped_at_hangs(tmp_path, of_rank_0("time.sleep(1000)"), "--external-wait-timeout", "11") as job:
        await_failure(job)
        assert job.process.returncode == 1, job.err[-4000:]
        hangs = incidents(job, "hang")
        certain = [hang["verdict"]["certain"] for hang in hangs]
        assert certain == [False] * (len(hangs) - 1) + [True], job.err[-4000:]
        assert len(hangs) > 1
        assert hangs[-1]["verdict"]["stalled_s"] >= 11
        assert "stopping all ranks (--on-hang stop)" in job.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [("saferun.diagnosis.external_waits", "external_ranks"), ("saferun.captures.other_ends", "_call_of")],
)
def test_where_the_wait_cannot_be_looked_at_nothing_else_is_lost(tmp_path: Path, module: str, name: str) -> None:
    """Then a hang is as certain as by its samples; where only the other end is unknown, the stacks are enough."""
    script = tmp_path / "train.py"
    script.write_text(BEGIN + of_rank_0("time.sleep(1000)") + END)
    broken = f"import {module} as module\n    def fail(*_, **__): raise RuntimeError('no')\n    module.{name} = fail"
    options = (*OPTIONS, "--external-wait-timeout", "11")
    environ = customized(tmp_path, in_saferun(broken))
    arguments = ("0", str(tmp_path), "0")
    with watched(tmp_path / "run", script, *arguments, nproc=2, options=options, environ=environ) as job:
        await_failure(job)
        assert job.process.returncode == 1
        hangs = incidents(job, "hang")
        assert hangs[0]["verdict"]["certain"] is (name == "external_ranks"), job.err[-4000:]
        assert hangs[0]["cause"]["class"] == "hang_sleep"
