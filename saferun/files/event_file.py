"""events.jsonl: one line per event of a launch."""

from __future__ import annotations

import json

from saferun.files.file_stream import FileStream
from saferun.model import JsonObject


class EventFile:
    """Events of a launch, kept in memory until it is known whether there is a file for them."""

    def __init__(self) -> None:
        self._kept: list[JsonObject] | None = []
        self._file: FileStream | None = None

    def begin(self, file: FileStream | None) -> None:
        """Write what has been kept, and from now on each event at once; without a file: keep none."""
        kept, self._kept = self._kept or [], None
        self._file = file
        for event in kept:
            self.write(event)

    def write(self, event: JsonObject) -> None:
        """Append one line, without secrets."""
        if self._kept is not None:
            self._kept.append(event)
        elif self._file is not None:
            from saferun.text.redaction import redacted_json

            self._file.write(json.dumps(redacted_json(event), default=str).encode() + b"\n")

    def close(self) -> None:
        """Close the file. Events that come later are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None
