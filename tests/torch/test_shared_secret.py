"""Jobs of two saferuns that share a secret by themselves, where they see the same directory of run directories."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from saferun.cluster.signed import is_signed
from tests.process.launching import Job, until
from tests.torch.several import hosts
from tests.torch.test_job_secret import WAIT, control_store_of, decide


def signed_by(runs: Path) -> list[tuple[str, str]]:
    """By which secret each host signs its messages, or why by none."""
    events = [json.loads(line) for path in sorted(runs.rglob("events.jsonl")) for line in path.read_text().splitlines()]
    return [(event["signed_by"], event["unsigned_reason"]) for event in events if event["event"] == "MessagesSigned"]


def private_in(runs: Path) -> list[str]:
    return [name for name in os.listdir(runs) if name.startswith(".private")] if runs.exists() else []


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--control-port", "same"), marks=pytest.mark.slow)], ids=["", "one port"]
)
def test_hosts_that_see_the_same_directory_sign_their_messages(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Without an option for it. What somebody else writes does nothing then, and nothing of the secret is left."""
    runs = tmp_path / "runs"
    with hosts(tmp_path, WAIT, "--run-dir", str(runs), *options) as jobs:
        for job in jobs:
            job.hear("ready")
        assert private_in(runs) == []
        store, _ = control_store_of(jobs[0])
        prefix = "saferun/own/" if options else ""
        recorded = store.get(f"{prefix}r0/host/1")
        assert is_signed(recorded)
        assert b"addresses" not in recorded
        for _ in range(3):
            decide(store, prefix)
        for job in jobs:
            until(lambda job=job: "not signed with the job secret" in job.err, "the warning")  # type: ignore[misc]
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]
    assert len(signed_by(runs)) == 2
    assert {by for by, _ in signed_by(runs)} <= {"file", "munge"}


def away_from_munge(i: int) -> dict[str, Any]:
    """Nothing of this machine's own munge: a host with a file system of its own."""
    del i
    hide = 'for d in /run/munge /var/run/munge; do test -d $d && mount -t tmpfs none $d; done; exec "$@"'
    return {"before": ["unshare", "--mount", "sh", "-c", hide, "sh"]}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide munge")


@pytest.mark.slow
@needs_root
def test_hosts_that_share_nothing_run_as_ever(tmp_path: Path) -> None:
    """Nothing is said of it on the console."""
    runs = [tmp_path / "runs0", tmp_path / "runs1"]
    with hosts(tmp_path, WAIT, each=lambda i: ("--run-dir", str(runs[i])), of_each=away_from_munge) as jobs:
        for job in jobs:
            job.hear("ready")
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]
        assert not any("sign" in job.err for job in jobs)
    assert signed_by(runs[0]) == [("", f"{os.uname().nodename.partition('.')[0]} did not take the secret")]
    ((by, why),) = signed_by(runs[1])
    assert (by, why) == ("", "the run directory: No such file or directory")
    assert private_in(runs[0]) == []


@pytest.mark.slow
@needs_root
def test_where_it_is_required_both_hosts_say_what_is_missing(tmp_path: Path) -> None:
    """With two lines and exit code 2."""
    options = ("--sign-messages", "required")
    with hosts(
        tmp_path, WAIT, *options, each=lambda i: ("--run-dir", str(tmp_path / f"runs{i}")), of_each=away_from_munge
    ) as jobs:
        assert [job.wait() for job in jobs] == [2, 2]
        for job in jobs:
            what, hint = job.err.splitlines()[-2:]
            assert "did not take it: the run directory: No such" in what
            assert hint.startswith("hint: ")


@needs_root
def test_what_a_killed_launch_had_offered_is_removed(tmp_path: Path) -> None:
    """It waits for the other host when it is killed, with all of its processes that a scheduler would kill."""
    runs = tmp_path / "runs"
    with hosts(tmp_path, WAIT, "--run-dir", str(runs), start=[0], sweeps=False, of_each=away_from_munge) as jobs:
        (job,) = jobs
        until(lambda: private_in(runs) != [], "the offer")
        kill(job)
        job.wait()
        until(lambda: private_in(runs) == [], "its removal")
        job.assert_nothing_left(60.0)


def kill(job: Job) -> None:
    os.kill(job.process.pid, signal.SIGKILL)
