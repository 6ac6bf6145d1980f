"""The messages between the hosts of a job, decoded: every field typed and bounded, or the message is ignored. Pure.

A host speaks for itself, and the one that leads decides: the coordinator marks each entry of the job's log with the
host that wrote it, and what only the leader may send is taken from host 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from saferun.errors import printable
from saferun.model import Value
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit, line_of, list_of, number_of, seconds_of, text_of

__all__ = [
    "LONGEST_MESSAGE",
    "ChunkText",
    "DecisionMessage",
    "Ignored",
    "ReceivedAbort",
    "StopMessage",
    "abort_from",
    "chunk_from",
    "decision_from",
    "is_leaders",
    "is_sound",
    "judgement_from",
    "request_from",
    "task_of",
]

LONGEST_MESSAGE = 1000
# What a host answers at its ports whose coordinator is gone: this, the signal that ended it (0: none), a newline.
COORDINATOR_ENDED = b"saferun: the coordinator ended: "
MOST_LINES = 20
MOST_TASKS = 4096
MOST_HOSTS = 1 << 20
_MOST_RANKS = 1 << 31
_MOST_HANGS = 1 << 31
_LONGEST_REASON = 40
_MOST_SIGNALS = 64
_HIGHEST_EXIT_CODE = 255
_MOST_RESTARTS = 1 << 40
_LONGEST_WAIT_S = 30 * 86400.0
# A chunk is an object of a few values, one of which is a long text.
_DEEPEST_CHUNK = 4
_MOST_OF_A_CHUNK = 64
_LONGEST_CHUNK = 16 << 20
_LATEST_TIME = float(1 << 40)
_LEADERS = frozenset(
    {
        "asked",
        "asked_answer",
        "decision",
        "hang",
        "judgement",
        "notice",
        "preflight",
        "slow",
        "status",
        "table",
        "watch",
    }
)


Line = Annotated[str, line_of(LONGEST_MESSAGE)]


class ReceivedAbort(Value):
    """That an attempt ends on all hosts, as one of them reports. ``ranks``: that it blames."""

    reason: Annotated[str, line_of(_LONGEST_REASON)]
    text: Line
    label: Line
    host: Annotated[int, number_of(MOST_HOSTS)]
    task: Annotated[int, number_of(MOST_TASKS)]
    about: Line = ""
    signum: Annotated[int, number_of(_MOST_SIGNALS)] = 0
    ranks: Annotated[tuple[int, ...], list_of(Annotated[int, number_of(_MOST_RANKS)], MOST_LINES)] = ()
    lost_task: Annotated[int, number_of(MOST_TASKS)] | None = None
    hint: Line = ""


class DecisionMessage(Value):
    """What follows, on all hosts. ``next``: ``restart`` or ``finish``. ``replaced``: as in ``JobDecided``."""

    next: Annotated[str, line_of(_LONGEST_REASON)]
    exit_code: Annotated[int, number_of(_HIGHEST_EXIT_CODE)]
    wait_s: Annotated[float, seconds_of(_LONGEST_WAIT_S)]
    restarts: Annotated[int, number_of(_MOST_RESTARTS)]
    text: Annotated[tuple[str, ...], list_of(Line, MOST_LINES)] = ()
    excluded: Annotated[int, number_of(MOST_HOSTS, -1)] = -1
    replaced: Annotated[int, number_of(_MOST_RESTARTS)] = 0


class StopMessage(Value):
    """A user asked one of the hosts for the end of the job.

    ``at_once``: by SIGKILL. ``signum``: after a checkpoint, by which signal the ranks learn of it.
    """

    text: Line
    label: Line
    host: Annotated[int, number_of(MOST_HOSTS)]
    task: Annotated[int, number_of(MOST_TASKS)]
    at_once: bool = False
    signum: Annotated[int, number_of(_MOST_SIGNALS)] = 0


class HangJudgement(Value):
    """What the leader has found out about the job's hang of this number. ``text``: its headline, where there is one."""

    n: Annotated[int, number_of(_MOST_HANGS)]
    text: Line
    certain: bool


class ChunkText(Value):
    """A chunk of evidence as it was sent.

    ``time``: when, by that host's clock. ``behind_s``: how far that clock is behind the leader's; None: unknown there.
    """

    time: Annotated[float, seconds_of(_LATEST_TIME)]
    evidence: Annotated[str, text_of(_LONGEST_CHUNK)]
    moved: bool = False
    stopped: bool = False
    behind_s: Annotated[float, seconds_of(_LATEST_TIME, -_LATEST_TIME)] | None = None


def is_leaders(kind: object) -> bool:
    """Whether messages of this kind may come from host 0 only."""
    return kind in _LEADERS if isinstance(kind, str) else False


def abort_from(message: Mapping[str, Any]) -> ReceivedAbort:
    """What ended an attempt.

    Raises:
        One of ``MALFORMED``: it is no such message.
    """
    received: ReceivedAbort = fit(ReceivedAbort, message)
    return received._replace(about=received.about or received.label)


def judgement_from(message: Mapping[str, Any]) -> HangJudgement:
    """What the leader has found out about a hang.

    Raises:
        One of ``MALFORMED``: it is no such message.
    """
    judgement: HangJudgement = fit(HangJudgement, message)
    return judgement


def request_from(message: Mapping[str, Any]) -> StopMessage:
    """What a user asked another host for.

    Raises:
        One of ``MALFORMED``: it is no such message.
    """
    request: StopMessage = fit(StopMessage, message)
    return request


def decision_from(message: Mapping[str, Any]) -> DecisionMessage:
    """What the leader has decided.

    Raises:
        One of ``MALFORMED``: it is no such message, or another host's.
    """
    if message["host"] != 0:
        raise ValueError("a decision of a host that is not the leader")
    decision: DecisionMessage = fit(DecisionMessage, message)
    return decision


def chunk_from(content: object) -> ChunkText:
    """A chunk of evidence.

    Raises:
        One of ``MALFORMED``: it is none.
    """
    if not isinstance(content, str):
        raise TypeError("a text is wanted")
    found = loads(content, longest=_LONGEST_CHUNK, deepest=_DEEPEST_CHUNK, most=_MOST_OF_A_CHUNK)
    chunk: ChunkText = fit(ChunkText, found)
    return chunk


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


class KeptErrors:
    """Goes on after an error, as a context manager that is entered again and again; the first one is raised at last."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> None:
        """Keep what is raised from now on."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """What was raised is no more than kept."""
        if not isinstance(error, Exception):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        """Raise the first one that was kept, if there is any."""
        if self._first is not None:
            raise self._first


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
        so_far = "an invalid message" if self.count == 1 else f"{self.count} invalid messages so far"
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
