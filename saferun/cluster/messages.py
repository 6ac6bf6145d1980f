"""The messages between the hosts of a job, decoded: every field typed and bounded, or the message is ignored. Pure.

A host speaks for itself, and the one that leads decides: the coordinator marks each entry of the job's log with the
host that wrote it, and what only the leader may send is taken from host 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saferun.errors import printable
from saferun.model import Value
from saferun.text.decoding import MALFORMED, display_text, loads, measure, number

__all__ = [
    "LONGEST_MESSAGE",
    "ChunkText",
    "Decision",
    "Heard",
    "Ignored",
    "abort_from",
    "chunk_from",
    "decision_from",
    "is_leaders",
    "is_sound",
    "task_of",
]

LONGEST_MESSAGE = 1000
MOST_LINES = 20
MOST_TASKS = 4096
MOST_HOSTS = 1 << 20
_MOST_RANKS = 1 << 31
_LONGEST_REASON = 40
_MOST_SIGNALS = 64
_HIGHEST_EXIT_CODE = 255
_MOST_RESTARTS = 1 << 40
_LONGEST_WAIT_S = 30 * 86400.0
# A chunk is an object of a few values, one of which is a long text.
_DEEPEST_PIECE = 4
_MOST_OF_A_PIECE = 64
_LONGEST_PIECE = 16 << 20
_LATEST_TIME = float(1 << 40)
_LEADERS = frozenset({"decision", "hang", "notice", "preflight", "watch"})


class Heard(Value):
    """That an attempt ends on all hosts, as one of them reports. ``ranks``: that it blames."""

    reason: str
    message: str
    label: str
    about: str
    host: int
    task: int
    signum: int
    ranks: tuple[int, ...]
    lost_task: int | None


class Decision(Value):
    """What follows, on all hosts."""

    restarts_job: bool
    exit_code: int
    wait_s: float
    restarts: int
    messages: tuple[str, ...]
    excluded: int


class ChunkText(Value):
    """A chunk of evidence as it was sent. ``time``: when, by that host's clock."""

    time: float
    moved: bool
    stopped: bool
    evidence: str


def is_leaders(kind: object) -> bool:
    """Whether messages of this kind may come from host 0 only."""
    return kind in _LEADERS if isinstance(kind, str) else False


def abort_from(message: Mapping[str, Any]) -> Heard:
    """What ended an attempt.

    Raises:
        One of ``MALFORMED``: it is no such message.
    """
    ranks = message.get("ranks") or ()
    lost = message.get("lost_task")
    label = display_text(message["label"], LONGEST_MESSAGE)
    return Heard(
        display_text(message["reason"], _LONGEST_REASON),
        display_text(message["text"], LONGEST_MESSAGE),
        label,
        display_text(message.get("about") or label, LONGEST_MESSAGE),
        number(message["host"], 0, MOST_HOSTS),
        number(message["task"], 0, MOST_TASKS),
        number(message.get("signum") or 0, 0, _MOST_SIGNALS),
        tuple(number(rank, 0, _MOST_RANKS) for rank in ranks[:MOST_LINES]),
        None if lost is None else number(lost, 0, MOST_TASKS),
    )


def decision_from(message: Mapping[str, Any]) -> Decision:
    """What the leader has decided.

    Raises:
        One of ``MALFORMED``: it is no such message, or another host's.
    """
    if message["host"] != 0:
        raise ValueError("another host than the one that leads has decided")
    lines = message.get("text") or []
    if not isinstance(lines, list):
        raise TypeError("a list is wanted")
    return Decision(
        message["next"] == "restart",
        number(message["exit_code"], 0, _HIGHEST_EXIT_CODE),
        measure(message["wait_s"], 0.0, _LONGEST_WAIT_S),
        number(message["restarts"], 0, _MOST_RESTARTS),
        tuple(display_text(line, LONGEST_MESSAGE) for line in lines[:MOST_LINES]),
        number(message.get("excluded", -1), -1, MOST_HOSTS),
    )


def chunk_from(content: object) -> ChunkText:
    """A chunk of evidence.

    Raises:
        One of ``MALFORMED``: it is none.
    """
    if not isinstance(content, str):
        raise TypeError("a text is wanted")
    found = loads(content, longest=_LONGEST_PIECE, deepest=_DEEPEST_PIECE, most=_MOST_OF_A_PIECE)
    evidence = found["evidence"]
    if not isinstance(evidence, str):
        raise TypeError("a text is wanted")
    return ChunkText(
        measure(found["t"], 0.0, _LATEST_TIME), found.get("moved") is True, found.get("stopped") is True, evidence
    )


def task_of(key: object) -> tuple[int, int]:
    """The host and the task of a key like ``3/0``.

    Raises:
        ValueError: it is none.
    """
    host, slash, task = key.partition("/") if isinstance(key, str) else ("", "", "")
    if not (slash and all(part.isascii() and part.isdecimal() and len(part) < 8 for part in (host, task))):  # noqa: PLR2004
        raise ValueError("no host and task")
    return int(host), int(task)


def is_sound(message: Mapping[str, Any]) -> bool:
    """Whether a message of the job's log can be read, where there may be one of its kind only."""
    try:
        match message.get("kind"):
            case "abort":
                abort_from(message)
            case "decision":
                decision_from(message)
    except MALFORMED:
        return False
    return True


class Ignored:
    """Messages that made no sense: they are counted, and end nothing.

    Args:
        warn: takes a line about them, at the first, the tenth, the hundredth and so on.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warn_at = 1
        self.count = 0

    def add(self, what: object, error: BaseException) -> None:
        """One more.

        Args:
            what: which kind of message it was.
            error: why it was ignored.
        """
        if not self._is_due(1):
            return
        so_far = "a message that makes no sense" if self.count == 1 else f"{self.count} such messages so far"
        why = printable(f"{what}: {type(error).__name__}: {error}"[:LONGEST_MESSAGE])
        self._warn(f"ignored {so_far} ({why})")

    def add_unsigned(self, key: str, count: int) -> None:
        """More that are not signed with the job secret.

        Args:
            key: where the last of them was found.
            count: how many.
        """
        if self._is_due(count):
            so_far = "one" if self.count == 1 else f"{self.count} so far"
            self._warn(f"ignored messages that are not signed with the job secret ({so_far}, the last in {key})")

    def _is_due(self, more: int) -> bool:
        """Count, and return whether that is to be reported."""
        self.count += more
        if self.count < self._warn_at:
            return False
        while self._warn_at <= self.count:
            self._warn_at *= 10
        return True
