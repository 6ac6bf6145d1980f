"""Events that came in a state for which the table of transitions lacks them, as ``events.jsonl`` notes them.

In the process of a test such an event raises (``Supervisor.is_strict``). A saferun that a test starts goes on, as it
does for a user; what it has noted is looked for when it has ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def assert_all_listed(folder: Path) -> None:
    """Assert that no launch whose files are anywhere below a folder has met such an event."""
    unlisted = [
        entry for path in folder.rglob("events.jsonl") for entry in events_of(path) if entry.get("remark") == "unlisted"
    ]
    assert not unlisted, f"the table of transitions lacks {unlisted}"


def events_of(path: Path) -> list[dict[str, Any]]:
    """What the file says has happened; a line that is not written to its end is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
