"""Why the hosts of a job do not meet."""

from __future__ import annotations

from saferun.config import LaunchConfig
from saferun.errors import EXIT_USAGE
from saferun.model import JsonObject, Value


class MeetingFailure(Value):
    """Why the hosts do not meet.

    Attributes:
        what: what has happened.
        hint: what to do.
        exit_code: of this launch, if no other attempt follows.
        is_published: whether other hosts know it.
        is_incomplete: whether hosts, or processes of this one, are missing.
        class_name: of the failure; empty: none.
    """

    what: str
    hint: str
    exit_code: int = 1
    is_published: bool = False
    is_incomplete: bool = False
    class_name: str = ""


def read_meeting_failure(message: JsonObject, config: LaunchConfig) -> MeetingFailure:
    """Read the coordinator's ``join_failed``. Older releases do not say whether hosts are missing, or one is gone."""
    exit_code = EXIT_USAGE if message.get("usage") is True else 0 if message.get("needless") is True else 1
    return MeetingFailure(
        str(message["what"]),
        str(message["hint"]),
        exit_code,
        message.get("published") is True,
        message.get("incomplete") is True,
        "host_lost" if message.get("gone") is True and config.meets_again else "",
    )
