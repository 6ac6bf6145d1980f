"""run.json of launches that never were, and run directories with it."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from saferun.linux.process_identity import ProcessIdentity, own_identity
from saferun.report.run_json import LaunchEnd, run_description, shown_environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from saferun.config import LaunchConfig

# A process of an earlier boot.
ELSEWHERE = ProcessIdentity(4711, 12345, "another-boot", "pid:[1]")
GONE = own_identity()._replace(start_ticks=1)
HERE = own_identity()


def described_run(
    config: LaunchConfig, end: LaunchEnd | None = None, *, cwd: str = "/x", environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The content of run.json."""
    return run_description(
        config,
        cwd=cwd,
        run_id="ab",
        host="node1",
        hostname="node1.example",
        process=HERE,
        started_at=1_700_000_000.0,
        directory="",
        python_version="3.11.7",
        torch_version=None,
        environment=shown_environment(environ) if environ is not None else None,
        end=end,
    )


def make_run(
    base: Path,
    name: str,
    *,
    process: ProcessIdentity = GONE,
    end: tuple[int, str] | None = (0, "succeeded"),
    headline: str = "",
    age_s: float = 3600.0,
    **changes: object,
) -> Path:
    """A run directory as saferun leaves it.

    Args:
        base: where it is.
        name: its name; the run's id begins with the last part of it.
        process: its saferun.
        end: exit code and outcome; None: it has not ended.
        headline: of its last incident.
        age_s: for how long nothing has changed.
        changes: of what run.json says.
    """
    path = base / name
    host = path / "node1"
    host.mkdir(parents=True)
    at = time.time() - age_s
    content = {
        "command": ["train.py"],
        "run_id": f"{name[16:]}{'0' * 16}"[:16],
        "host": "node1",
        "process": process._asdict(),
        "started_at": at,
        "directory": name,
        "end": {"time": at, "exit_code": end[0], "outcome": end[1], "headline": headline} if end is not None else None,
        **changes,
    }
    (path / "run.json").write_text(json.dumps(content))
    (host / "events.jsonl").write_text("{}\n")
    for changed in (host / "events.jsonl", host, path / "run.json", path):
        os.utime(changed, (at, at))
    return path
