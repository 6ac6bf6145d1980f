"""What ranks that failed have left in files: torch's error file and the failure record. The writer reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from saferun.files.file_stream import WriterAnswer
from saferun.files.run_dir import RunDirectory
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.launch.rank import Rank

_HEARTBEAT = ".heartbeat"
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_LINE = 1000


class LeftFiles:
    """The files of the ranks of one attempt.

    Args:
        run_dir: of the launch.
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir
        self._unread = 0
        self._on_read: Callable[[], None] | None = None

    def read(self, rank: Rank, attempt: int, error_path: str, heartbeat: str) -> None:
        """Have those of a rank read, which ``recorded``, ``failure`` and ``traceback`` of the rank hold then.

        Args:
            rank: it has failed.
            attempt: in this attempt.
            error_path: its error file; empty: it has none.
            heartbeat: its heartbeat file, beside which its hook writes the failure record; empty: there is none.
        """
        if error_path:
            self._ask("read_error", [error_path], lambda found: setattr(rank, "recorded", found))
        if heartbeat.endswith(_HEARTBEAT):
            folder = self._run_dir.rank_path(attempt, rank.assignment.rank)
            target = os.path.join(folder, "failure.json") if folder is not None else ""
            source = f"{heartbeat[: -len(_HEARTBEAT)]}.failure"
            end: list[object] = []
            if rank.end is not None:
                printed = last_exception(rank.last_lines(is_stderr=True))
                end = [rank.pid, rank.end.status.code, rank.end.time, printed]

            def take(found: JsonObject | None) -> None:
                found = found or {}
                rank.uncaught_time = found.get("uncaught_time", 0.0)
                rank.failure, rank.traceback = tuple(found.get("lines", ())), tuple(found.get("traceback", ()))

            self._ask("take_failure_record", [source, target, *end], take)

    def _ask(self, name: str, arguments: list[object], take: Callable[[Any], None]) -> None:
        def on_answer(answer: WriterAnswer | None) -> None:
            self._unread -= 1
            take(answer.value if answer is not None else None)
            if self._on_read is not None and not self._unread:
                on_read, self._on_read = self._on_read, None
                on_read()

        self._unread += 1
        self._run_dir.files.ask(name, arguments, on_answer)

    def when_read(self, call: Callable[[], None]) -> None:
        """Call when all of them have been read, or have not come in time."""
        if self._unread:
            self._on_read = call
        else:
            call()


def last_exception(lines: Sequence[str]) -> list[object]:
    """The exception of the last traceback in a rank's output.

    Returns:
        Its type, and the file and the line of its innermost frame; empty: there is none, or it is not as Python prints
        it.
    """
    lines = list(map(_without_colors, lines))
    start = next((at for at in range(len(lines) - 1, -1, -1) if _TRACEBACK in lines[at]), None)
    if start is None:
        return []
    # Torch puts the rank before each line.
    prefix = lines[start].partition(_TRACEBACK)[0]
    location: list[object] = []
    for printed in lines[start + 1 :]:
        if not printed.startswith(prefix):
            return []
        line = printed[len(prefix) :]
        if not line.startswith(" "):
            kind = line.partition(":")[0].strip()
            return [kind, *location] if location and kind else []
        if line.startswith('  File "'):
            file, _, rest = line[len('  File "') :].partition('", line ')
            number = rest.partition(",")[0].strip()
            location = [file, int(number)] if number.isascii() and number.isdigit() else []
    return []


def _without_colors(line: str) -> str:
    first, *colored = line[:_LONGEST_LINE].split("\x1b[")
    return first + "".join(part.partition("m")[2] for part in colored)
