"""``--wrap host:NAME:...`` in a job of several hosts whose names are known when they have met."""

from __future__ import annotations

from pathlib import Path

from tests.process.launching import END_AS_TOLD
from tests.torch.several import hosts


def test_a_host_that_the_job_does_not_have_is_named_once_when_the_hosts_have_met(tmp_path: Path) -> None:
    """By the leader alone, and the job goes on: the host may have a name that others do not know."""
    options = ("--preflight", "off", "--wrap", "host:typo:nice")
    with hosts(tmp_path, END_AS_TOLD, *options, arguments=("0", "0")) as jobs:
        for job in jobs:
            job.hear("ready")
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]
        line = "--wrap: no rank runs under nice: typo is none of the hosts "
        assert [job.err.count(line) for job in jobs] == [1, 0], jobs[0].err
