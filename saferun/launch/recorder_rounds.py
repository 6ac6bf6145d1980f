"""Compares ranks that use GPUs by their Flight Recorders, where the user has asked for it (``--slow-dumps``).

Every so often the examiner of each host asks its ranks, one after the other. All hosts do that at the same times of
their clocks. Where ranks do not answer it is given up for good after the second time, with one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saferun.launch.attempt_record import InvestigationContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.captures.examiner import Answer
    from saferun.model import JsonObject
    from saferun.watchdog.monitor import WatchedRank

_MOST_FAILURES = 2
_RANK_S = 4.0
_LONGEST_BUDGET_S = 30.0
_LONGEST_ANSWER = 1 << 20


class RecorderRounds:
    """The rounds of one attempt on this host.

    Args:
        context: of the launch.
        interval_s: between two rounds.
        on_rows: takes the rows of a round, as ``captures.recorder_waits`` has them; some at least.
    """

    def __init__(
        self, context: InvestigationContext, interval_s: float, on_rows: Callable[[list[list[int]]], None]
    ) -> None:
        self._context = context
        self._interval_s = interval_s
        self._on_rows = on_rows
        self._targets: list[tuple[int, int, str]] = []
        self._round: Answer | None = None
        self._failures = 0
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""

    def begin(self, now: float, ranks: Sequence[WatchedRank]) -> None:
        """Ask these ranks, first after an interval."""
        self._targets = [(rank.rank, rank.pid, rank.hook_prefix) for rank in ranks]
        if not all(prefix for _, _, prefix in self._targets):
            self._give_up("the hook is not in them")
            return
        self.resume(now)

    def tick(self, now: float) -> None:
        """Begin a round, where it is time."""
        if self.deadline is None or now < self.deadline:
            return
        self._schedule(now)
        if self._round is None:  # an examiner that does not answer is not asked again
            self._ask()

    def pause(self) -> None:
        """The job hangs or fails, or a rank has ended: no rank is asked, and what was asked does not count."""
        self.deadline = None
        if self._round is not None:
            self._round.close()
            self._round = None

    def resume(self, now: float) -> None:
        """The job goes on."""
        if self._targets:
            self._schedule(now)

    def end(self) -> None:
        """No rank is asked any more."""
        self._targets = []
        self.pause()

    def _schedule(self, now: float) -> None:
        """At the next full interval of the host's clock, but one that is not near."""
        left_s = self._interval_s - time.time() % self._interval_s
        self.deadline = now + left_s + (self._interval_s if left_s < self._interval_s / 2 else 0.0)

    def _ask(self) -> None:
        from saferun.captures.examiner import Answer

        launch = self._context.launch
        budget_s = min(_RANK_S * len(self._targets), _LONGEST_BUDGET_S)
        try:
            self._round = Answer(
                launch.examiner,
                self._context.launch.guarded_poller,
                "recorders",
                self._targets,
                budget_s,
                self._take,
                limit_bytes=_LONGEST_ANSWER,
                is_urgent=False,
            )
        except OSError:
            self._fail("there is no examiner")

    def _take(self, content: bytes) -> None:
        from saferun.text.decoding import MALFORMED, display_text, loads

        self._round = None
        try:
            found: JsonObject = loads(content)
            rows, failure, is_final = (
                list(found["rows"]),
                display_text(found["failure"], 200),
                found["is_final"] is True,
            )
        except MALFORMED:
            rows, failure, is_final = [], "the examiner has not answered in time", False
        if failure:
            self._fail(failure, is_final=is_final)
        elif rows:
            self._failures = 0
            self._on_rows(rows)

    def _fail(self, why: str, *, is_final: bool = False) -> None:
        self._failures += 1
        if is_final or self._failures >= _MOST_FAILURES:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.end()
        self._context.print_lines([f"saferun: ranks are not compared by their Flight Recorders: {why}"])
