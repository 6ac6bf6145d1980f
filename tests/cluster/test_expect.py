"""A long phase of a rank (``saferun.expect``) on another host than the one that judges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.jobs import Way, assert_nothing_left, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.jobs import Job
    from tests.cluster.machines.cluster import Cluster

HANGS = r"saferun: the job (?:may hang|hangs)"
# SECONDS comes before it. Rank 3 is on the second host; a thread looks for the release, as the main thread is quiet.
PHASE = """
import threading
import saferun

def quiet_until(name):
    over = threading.Event()
    threading.Thread(target=lambda: (await_release(name), over.set()), daemon=True).start()
    over.wait()

tell("ready")
if RANK == 3:
    began = time.monotonic()
    with saferun.expect(SECONDS, "saving the checkpoint"):
        threading.Thread(target=lambda: (time.sleep(LONG), tell("long")), daemon=True).start()
        quiet_until("saved")
    tell("saved")
quiet_until("end")
"""


def in_phase(cluster: Cluster, folder: Path, seconds: float) -> Job:
    """Two hosts with two ranks each, of which rank 3 is in a phase that is expected to last so long."""
    program = f"SECONDS, LONG = {seconds}, 10\n{PHASE}"
    options = ("--hang-timeout", "3", "--external-wait-timeout", "0", "--preflight", "off")
    return start(cluster, Way("by_hand"), folder, program, *options, hosts=cluster.hosts[:2])


def hangs_of(job: Job) -> list[dict[str, Any]]:
    return [one for report in job.reports for one in report["incidents"] if one["kind"] == "hang"]


@pytest.mark.slow
def test_a_phase_on_another_host_is_no_hang_while_it_lasts(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing moves for three times the hang timeout. When it has ended, and nothing moves, that is a hang."""
    job = in_phase(cluster, tmp_path, 600)
    job.hear("long", 1)
    assert not job.saferun_said(HANGS), job.story("the phase is taken for a hang")
    job.release("saved")
    job.hear("saved", 1)
    job.until(lambda: job.saferun_said(HANGS), "what comes after the phase is a hang")
    job.until(lambda: hangs_of(job), "the report has it")
    assert hangs_of(job)[0]["verdict"]["overdue"] == "", job.story("the phase is blamed, which has ended")
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_phase_on_another_host_that_lasts_longer_than_expected_is_a_hang(cluster: Cluster, tmp_path: Path) -> None:
    """It is reported by its name, and only reported: the job goes on."""
    job = in_phase(cluster, tmp_path, 6)
    job.until(lambda: job.saferun_said(HANGS), "the hang is reported")
    job.until(lambda: hangs_of(job), "the report has it")
    overdue = hangs_of(job)[0]["verdict"]["overdue"]
    assert "rank 3" in overdue, job.story(overdue)
    assert "'saving the checkpoint' longer than the expected 6.0 s" in overdue, job.story(overdue)
    job.release("saved")
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    assert_nothing_left(cluster)
