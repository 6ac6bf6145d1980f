"""What saferun waits for, as a line at the bottom of a terminal that changes in place. Pure."""

from __future__ import annotations

from saferun.model import Value

_MINUTE_S, _HOUR_S = 60, 3600
_LEAST_COLUMNS = 20


class StatusLine(Value):
    """What is going on.

    Attributes:
        text: says it.
        since: since when, in monotonic seconds: the line counts up; 0: it does not.
        until: until when: the line counts down, and is removed then; 0: it does not.
    """

    text: str
    since: float = 0.0
    until: float = 0.0


def status_rows(statuses: dict[str, StatusLine], now: float, columns: int) -> list[bytes]:
    """The rows; those that are over are removed from the dictionary.

    Args:
        statuses: by what they are about.
        now: monotonic seconds.
        columns: the width of the terminal.
    """
    for key in [key for key, status in statuses.items() if 0 < status.until <= now]:
        del statuses[key]
    return [_row(status, now, max(columns, _LEAST_COLUMNS)) for status in statuses.values()]


def _row(status: StatusLine, now: float, columns: int) -> bytes:
    time = ""
    if status.until:
        time = f" ({_clock(status.until - now + 0.999)} left)"
    elif status.since:
        time = f" ({_clock(now - status.since)})"
    head, room = f"saferun: {status.text}", columns - 1 - len(time)
    text = head if len(head) <= room else head[: room - 1] + "…"
    return (text + time).encode(errors="backslashreplace")


def _clock(seconds: float) -> str:
    whole = max(int(seconds), 0)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S:02d} s"
    return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S:02d} min"
