"""Real gloo jobs under saferun whose hangs and crashes are read from report.json."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.process.launching import REPOSITORY, Job, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

EXAMPLES = REPOSITORY / "examples"
# Importing torch in several ranks at once on a busy machine, and then the hang itself.
DEADLINE_S = 120.0


@contextlib.contextmanager
def watched(
    folder: Path,
    script: Path,
    *arguments: str,
    nproc: int = 2,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    **more: Any,
) -> Iterator[Job]:
    """A job that runs an example. ``more`` goes to ``running``.

    Its TMPDIR is a short one: the sockets of multiprocessing lie there, and their paths may have 107 bytes. What ranks
    that are ended leave in it is theirs; what saferun leaves is looked for.
    """
    temporary = tempfile.mkdtemp(prefix="watched-", dir="/tmp")
    try:
        with running(
            folder,
            "",
            "--env-profile",
            "minimal",
            *options,
            nproc=nproc,
            arguments=arguments,
            environ={"TMPDIR": temporary, **(environ or {})},
            script=(str(script),),
            **more,
        ) as job:
            yield job
        assert not list(Path(temporary).glob("saferun-*"))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def report_of(job: Job) -> dict[str, Any]:
    """The report as it is now; empty while there is none."""
    path = job.run_dir / "report.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return report


def incidents(job: Job, kind: str) -> list[dict[str, Any]]:
    """The incidents of one kind so far."""
    return [incident for incident in report_of(job).get("incidents", ()) if incident["kind"] == kind]


def await_hang(job: Job, number: int = 1) -> dict[str, Any]:
    """The n-th hang that the report tells of."""

    def found() -> list[dict[str, Any]]:
        has_ended = job.process.poll() is not None
        hangs = incidents(job, "hang")
        assert len(hangs) >= number or not has_ended, job.err[-4000:]
        return hangs if len(hangs) >= number else []

    return until(found, f"hang {number}:\n{job.err[-2000:]}", timeout_s=DEADLINE_S)[number - 1]


def await_failure(job: Job) -> dict[str, Any]:
    """The failure that ended the job."""
    job.wait(DEADLINE_S)
    failures = incidents(job, "failure")
    assert failures, job.err[-4000:]
    return failures[-1]


def stop(job: Job) -> None:
    """End a job that hangs, as its user does."""
    job.send(signal.SIGINT)
    job.wait(DEADLINE_S)


def blamed(incident: dict[str, Any]) -> tuple[str, list[int]]:
    """The class of the cause and the ranks that it names."""
    return incident["cause"]["class"], incident["cause"]["ranks"]
