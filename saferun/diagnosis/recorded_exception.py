"""What the failure record of a rank, or its error file, says of the exception that ended it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.job_evidence import Frame, RankOutput
from saferun.model import Value

# How a line about the locals of a frame begins (``text/failure_record.py``).
_LOCATION = LazyPattern(r"locals of [^ ]{0,80} \(([^:]{1,255}):(\d{1,9})\): ")
# So much of a message is the same wherever it stands.
_COMPARED = 200


class RecordedException(Value):
    """The exception that ended a rank.

    Attributes:
        locations: frames of it: the file, without its directory, and the line.
        message: what it says, as ``KeyError: 'labels'``; empty: not known.
        is_known: whether there was one at all, whatever is known of it.
    """

    locations: tuple[tuple[str, int], ...] = ()
    message: str = ""
    is_known: bool = False

    def is_of(self, frames: Sequence[Frame], message: Sequence[str]) -> bool:
        """Whether a traceback with these frames and this message is its own.

        Args:
            frames: of the traceback.
            message: the lines of its message.
        """
        shown = {(frame.file.rpartition("/")[2], frame.line) for frame in frames}
        if self.locations and shown.issuperset(self.locations):
            return True
        return bool(self.message and message) and _without_module(message[0]) == _without_module(self.message)


def recorded_exception(output: RankOutput | None) -> RecordedException:
    """What a rank has recorded."""
    if output is None:
        return RecordedException()
    found = (_LOCATION.match(line) for line in output.failure)
    locations = tuple((match[1], int(match[2])) for match in found if match is not None)
    is_known = bool(output.failure or output.error_message)
    return RecordedException(locations, output.error_message.partition("\n")[0], is_known)


def _without_module(line: str) -> str:
    """Python prints the module of an exception's class, torch leaves it out."""
    kind, colon, text = line[: 2 * _COMPARED].partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{text}"[:_COMPARED].rstrip(": ")
