"""What every capture gets, and how it reports its results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from saferun.captures.capture_files import files_of_this_process
from saferun.captures.wire import Begun, CaptureRequest
from saferun.evidence.job_evidence import CaptureNote, ProcessSnapshot
from saferun.model import JsonObject, Value
from saferun.text.json_redaction import redacted_json_text
from saferun.text.redaction import redacted_json, redacted_text

Emit = Callable[[str, Any], None]

UNPTRACEABLE_STATES = frozenset("TtD")
"""States in which a process does not respond to ptrace: a tracer blocks as long as the state lasts."""


class Process(Value):
    """A rank, or a descendant of one. ``snapshot`` was taken before any tool touched it."""

    rank: int
    pid: int
    is_rank: bool
    hook_prefix: str
    snapshot: ProcessSnapshot

    @property
    def key(self) -> tuple[int, int]:
        """Rank and pid as a :class:`CaptureNote` has them."""
        return self.rank, self.pid


class Scene(Value):
    """What to capture.

    ``processes`` begins with the ranks. ``deadline`` is in monotonic seconds. ``emit`` takes a kind of ``wire`` and its
    value.
    """

    request: CaptureRequest
    processes: tuple[Process, ...]
    deadline: float
    emit: Emit

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def begin(self, capture: str, key: tuple[int, int] = (-1, 0)) -> None:
        """Report that a capture has begun, so that it can be named if it does not end."""
        self.emit("begun", Begun(capture, *key))

    def note(self, capture: str, key: tuple[int, int], started_at: float, *, path: str = "", failure: str = "") -> None:
        """Report how a capture ended. ``started_at`` is in monotonic seconds."""
        elapsed_s = round(time.monotonic() - started_at, 3)
        self.emit("note", CaptureNote(capture, *key, path, elapsed_s, one_line(failure)))

    def write(self, capture: str, content: bytes, extension: str, process: Process | None = None) -> str:
        """Write a capture's file, or have the writer write it.

        Secrets are redacted: tools quote command lines, arguments of functions and data on sockets, and names of
        functions and files may hold secrets.

        Args:
            capture: its name.
            content: a tool's output; if JSON, valid JSON.
            extension: "json" or "txt".
            process: the process; None: the host.

        Returns:
            Its path; empty without a directory, or if it will not be written, which is then emitted.
        """
        if not self.request.directory:
            return ""
        text = content.decode(errors="surrogateescape")
        try:
            text = redacted_json_text(text) if extension == "json" else redacted_text(text)
        except (ValueError, RecursionError) as error:
            text = json.dumps({"missing": f"it cannot be shown without secrets: {error}"}) + "\n"
        return self._write(capture, text, extension, process)

    def write_json(self, capture: str, content: JsonObject, process: Process | None = None) -> str:
        """As :meth:`write`, for saferun's own JSON."""
        if not self.request.directory:
            return ""
        return self._write(capture, json.dumps(redacted_json(content), indent=1) + "\n", "json", process)

    def _write(self, capture: str, text: str, extension: str, process: Process | None) -> str:
        name = f"{capture}.{extension}"
        if process is not None:
            name = f"rank_{process.rank}.{'' if process.is_rank else f'pid_{process.pid}.'}{name}"
        content = text.encode(errors="surrogateescape")
        path = os.path.join(self.request.directory, name)
        if not files_of_this_process(self.deadline).write(path, content):
            self.emit("unwritten", name)
            return ""
        return path


def one_line(text: str, limit: int = 300) -> str:
    """A text as one line of bounded length."""
    return " ".join(text[: 4 * limit].split())[:limit]
