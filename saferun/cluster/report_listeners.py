"""Who hears what hosts report of their ranks, and the reports of a host that is alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.evidence.job_evidence import HangVerdict


class ReportListeners:
    """Who hears what; the newest subscriber of each kind gets all of it."""

    def __init__(self) -> None:
        self.on_states: Callable[[Mapping[str, JsonObject]], None] = lambda _states: None
        self.on_hang: Callable[[HangVerdict, int], None] = lambda _verdict, _number: None
        self.on_judgement: Callable[[int, str, bool], None] = lambda _number, _text, _certain: None
        self.on_waits: Callable[[str, range, object], None] = lambda _host, _ranks, _rows: None
        self.on_slow: Callable[[Sequence[int]], None] = lambda _ranks: None
        self.on_beside: Callable[[range, Sequence[str]], None] = lambda _ranks, _lines: None
        self.on_status_wanted: Callable[[int], None] = lambda _number: None
        self.on_status: Callable[[str, str, Mapping[str, Any]], None] = lambda _task, _host, _report: None
        self.on_table_wanted: Callable[[], None] = lambda: None
        self.on_table: Callable[[object], None] = lambda _table: None
        self.on_asked: Callable[[int, object], None] = lambda _number, _wanted: None
        self.on_asked_elsewhere: Callable[[object], None] = lambda _wanted: None
        self.on_asked_answer: Callable[[object, object], None] = lambda _wanted, _answer: None

    def subscribe(
        self, on_states: Callable[[Mapping[str, JsonObject]], None], on_hang: Callable[[HangVerdict, int], None]
    ) -> None:
        """Receive what concerns hangs.

        Args:
            on_states: takes the states of all saferuns, on the leader of several hosts.
            on_hang: takes the verdict and the number of a hang that all hosts are to capture.
        """
        self.on_states, self.on_hang = on_states, on_hang

    def subscribe_judgement(self, on_judgement: Callable[[int, str, bool], None]) -> None:
        """Receive what the leader has found out: takes the number of a hang, a headline, and whether it is certain."""
        self.on_judgement = on_judgement

    def subscribe_waits(
        self,
        on_report: Callable[[str, range, object], None],
        on_slow: Callable[[Sequence[int]], None],
        on_beside: Callable[[range, Sequence[str]], None],
    ) -> None:
        """Receive what concerns slow ranks.

        Args:
            on_report: takes the name of a host, empty for this one, its ranks, and a report, on the leader.
            on_slow: takes ranks that are slow, on every host.
            on_beside: takes the ranks of a host, and what is to be seen beside the slow ones, on the leader.
        """
        self.on_waits, self.on_slow, self.on_beside = on_report, on_slow, on_beside

    def subscribe_status(
        self, on_wanted: Callable[[int], None], on_report: Callable[[str, str, Mapping[str, Any]], None]
    ) -> None:
        """Receive what concerns ``saferunctl status``.

        Args:
            on_wanted: takes the number of a request, on every host.
            on_report: takes the task and the host that it is of, and a report, on the leader.
        """
        self.on_status_wanted, self.on_status = on_wanted, on_report

    def subscribe_table(self, on_wanted: Callable[[], None], on_table: Callable[[object], None]) -> None:
        """Receive what concerns ``saferunctl status`` on another host than the leader.

        Args:
            on_wanted: called on every host, when one of them wants to know what the leader knows of all.
            on_table: takes what the leader shares of that, on every host.
        """
        self.on_table_wanted, self.on_table = on_wanted, on_table

    def subscribe_asked(
        self,
        on_asked: Callable[[int, object], None],
        on_elsewhere: Callable[[object], None],
        on_answer: Callable[[object, object], None],
    ) -> None:
        """Receive what concerns ``saferunctl stacks`` and ``record``.

        Args:
            on_asked: takes the number of a request, and what is wanted of the ranks, as JSON; on every host.
            on_elsewhere: takes what is wanted, as JSON, on every host, when a user asks one that does not lead.
            on_answer: takes that, and the leader's answer to it, on every host.
        """
        self.on_asked, self.on_asked_elsewhere, self.on_asked_answer = on_asked, on_elsewhere, on_answer


class SoloRankReports(ReportListeners):
    """The reports of a host that is alone: it hears them itself. With the interface of ``RankReports``.

    Args:
        rank_count: how many ranks it has.
    """

    def __init__(self, rank_count: int) -> None:
        super().__init__()
        self._ranks = range(rank_count)

    def set_state(self, state: JsonObject) -> None:
        """There is no leader to report to."""

    def share_waits(self, report: JsonObject) -> None:
        """This host is to compare its ranks."""
        self.on_waits("", self._ranks, report["rows"])

    def share_beside(self, found: JsonObject) -> None:
        """This host is to report it."""
        self.on_beside(self._ranks, found["lines"])

    def share_status(self, report: JsonObject) -> None:
        """There is no leader to report to."""

    def ask_for_status(self, number: int) -> None:
        """There is no other host to ask."""

    def ask_ranks(self, number: int, wanted: JsonObject) -> None:
        """There is no other host to ask."""

    def ask_leader(self, wanted: JsonObject) -> None:
        """There is no other host to ask."""

    def share_asked(self, wanted: JsonObject, answer: JsonObject) -> None:
        """There is no other host to tell."""

    def ask_for_table(self) -> None:
        """There is no other host to ask."""

    def share_table(self, table: object) -> None:
        """There is no other host to tell."""

    def broadcast_hang(self, verdict: HangVerdict, number: int) -> None:
        """This host is to capture."""
        self.on_hang(verdict, number)

    def broadcast_judgement(self, number: int, headline: str, *, certain: bool) -> None:
        """There is no other host to tell."""

    def broadcast_slow(self, ranks: Sequence[int]) -> None:
        """This host is to see why."""
        self.on_slow(ranks)
