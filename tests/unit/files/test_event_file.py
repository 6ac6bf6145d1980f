"""Events are kept until there is a file for them."""

from __future__ import annotations

import json
from pathlib import Path

from saferun.files.event_file import EventFile
from saferun.files.file_stream import APPENDED
from tests.direct_files import DirectFiles


def test_events_from_before_there_is_a_file_come_first_in_it(tmp_path: Path) -> None:
    """The first ones come before the run directory is made, which may take long."""
    events, path = EventFile(), tmp_path / "events.jsonl"
    for number in (1, 2):
        events.write({"event": number})
    events.begin(DirectFiles().open(str(path), APPENDED))
    events.write({"event": 3, "path": tmp_path})
    events.close()
    events.write({"event": 4})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"event": 1}, {"event": 2}, {"event": 3, "path": str(tmp_path)}]


def test_where_there_is_to_be_no_file_no_event_is_kept() -> None:
    """A job of weeks has many."""
    events = EventFile()
    events.write({"event": 1})
    events.begin(None)
    events.write({"event": 2})
    assert not events._kept
    events.close()


def test_events_are_written_without_secrets(tmp_path: Path) -> None:
    events, path = EventFile(), tmp_path / "events.jsonl"
    events.begin(DirectFiles().open(str(path), APPENDED))
    events.write({"command": "train --token=S3CR3TVALUE"})
    events.close()
    assert "S3CR3TVALUE" not in path.read_text()
