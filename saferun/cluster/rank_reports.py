"""What the hosts of a job report of their ranks while these run: states, hangs, slow ranks, status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from saferun.cluster.job_sender import JobSender, StateReport
from saferun.cluster.messages import MOST_LINES, judgement_from
from saferun.cluster.report_listeners import ReportListeners
from saferun.model import ASKED_CHUNK, JsonObject
from saferun.text.decoding import number
from saferun.text.typed_json import fit_or, line_of, list_of

if TYPE_CHECKING:
    from saferun.cluster.join_messages import Peer
    from saferun.cluster.task_states import TaskStates
    from saferun.evidence.job_evidence import HangVerdict

_LONGEST_BESIDE = 160
_MOST_BESIDE = 5
_MOST_HANGS = 1 << 31
# Ranks of a verdict that are not next to each other take 20 bytes each, and an entry of the log may have 64 KiB.
_MOST_RUNS = 1200
_Beside = Annotated[tuple[str, ...], list_of(Annotated[str, line_of(_LONGEST_BESIDE)], _MOST_BESIDE)]


class RankReports(ReportListeners):
    """The reports of several hosts, with the interface of ``SoloRankReports``.

    Args:
        sender: sends messages to the other hosts.
        state: returns the state of this process's ranks in the current attempt.
    """

    def __init__(self, sender: JobSender, state: Callable[[], StateReport]) -> None:
        super().__init__()
        self._sender = sender
        self._state = state
        self.on_asked = self._hand_in_nothing

    # ----------------------------------------------------------------------------------------------------------------
    # To the leader

    def set_state(self, state: JsonObject) -> None:
        """How the ranks of this process do."""
        self._state().set(state)

    def share_waits(self, report: JsonObject) -> None:
        """How often the ranks of this process waited."""
        self._state().set_more("waits", report)

    def share_beside(self, found: JsonObject) -> None:
        """What is to be seen beside a slow rank of this process."""
        self._state().set_more("beside", found)

    def share_status(self, report: JsonObject) -> None:
        """What the ranks of this process do."""
        self._state().send_once("status", report)

    # ----------------------------------------------------------------------------------------------------------------
    # To all hosts, by the job's log

    def broadcast_hang(self, verdict: HangVerdict, number: int) -> None:
        """Every host is to capture."""
        from saferun.watchdog.job_verdicts import packed

        self._sender.broadcast("hang", verdict=packed(verdict, _MOST_RUNS), n=number)

    def broadcast_judgement(self, number: int, headline: str, *, certain: bool) -> None:
        """What the leader has found out about a hang, for the users of the other hosts."""
        self._sender.broadcast_judgement(number, headline, certain=certain)

    def broadcast_slow(self, ranks: Sequence[int]) -> None:
        """These ranks are slow; their host is to see why."""
        self._sender.broadcast("slow", ranks=list(ranks)[:MOST_LINES])

    def ask_for_status(self, number: int) -> None:
        """Every host is to report what its ranks do, with this number: the user wants to see it."""
        self._sender.broadcast("status", n=number)

    def ask_ranks(self, number: int, wanted: JsonObject) -> None:
        """Every host is to hand in its ranks' stacks, with this number: the user wants to see them."""
        self._sender.broadcast("asked", n=number, wanted=wanted)

    def ask_leader(self, wanted: JsonObject) -> None:
        """The leader is to share with all hosts what their ranks' stacks are, for a user who asked this one."""
        self._sender.broadcast("asked_elsewhere", wanted=wanted)

    def share_asked(self, wanted: JsonObject, answer: JsonObject) -> None:
        """The stacks of all hosts, for those that have asked the leader."""
        self._sender.broadcast("asked_answer", wanted=wanted, answer=answer)

    def ask_for_table(self) -> None:
        """The leader is to share with all hosts what they report, for a user who asked this one."""
        self._sender.broadcast("table_wanted")

    def share_table(self, table: object) -> None:
        """What all hosts report, for those that have asked the leader."""
        self._sender.broadcast("table", table=table)

    # ----------------------------------------------------------------------------------------------------------------
    # Heard

    def _hand_in_nothing(self, number: int, _wanted: object) -> None:
        """No part reads the ranks of this host for saferunctl, not yet or not here: the leader need not wait for it."""
        self._sender.share(f"{ASKED_CHUNK}{number}", "")

    def take(self, kind: str, entry: JsonObject) -> None:
        """An entry of the job's log that was broadcast here, by this host or another.

        Raises:
            One of ``MALFORMED``: it makes no sense.
        """
        self._BY_KIND[kind](self, entry)

    def _take_hang(self, entry: JsonObject) -> None:
        from saferun.watchdog.job_verdicts import verdict_from

        verdict = verdict_from(entry["verdict"])
        if verdict is not None:
            self.on_hang(verdict, number(entry["n"], 0, _MOST_HANGS))

    def _take_judgement(self, entry: JsonObject) -> None:
        found = judgement_from(entry)
        self.on_judgement(found.n, found.text, found.certain)

    def _take_slow(self, entry: JsonObject) -> None:
        self.on_slow([number(rank) for rank in entry["ranks"]])

    def _take_status(self, entry: JsonObject) -> None:
        self.on_status_wanted(number(entry["n"]))

    def _take_asked(self, entry: JsonObject) -> None:
        self.on_asked(number(entry["n"]), entry["wanted"])

    def _take_asked_elsewhere(self, entry: JsonObject) -> None:
        self.on_asked_elsewhere(entry["wanted"])

    def _take_asked_answer(self, entry: JsonObject) -> None:
        self.on_asked_answer(entry["wanted"], entry["answer"])

    def _take_table_wanted(self, _entry: JsonObject) -> None:
        self.on_table_wanted()

    def _take_table(self, entry: JsonObject) -> None:
        self.on_table(entry["table"])

    def take_state(self, key: str, peer: Peer, states: TaskStates, state: Mapping[str, Any]) -> None:
        """What a task's state has beside how its ranks do: it may have been sent before.

        Args:
            key: the task.
            peer: its host.
            states: knows what is new.
            state: as it came.
        """
        ranks = range(peer.base_rank, peer.base_rank + peer.ranks)
        if (waits := states.news(key, "waits", state)) is not None:
            self.on_waits(peer.label, ranks, waits.get("rows"))
        if (beside := states.news(key, "beside", state)) is not None:
            # The other hosts' states are read all the same.
            self.on_beside(ranks, fit_or(_Beside, beside.get("lines"), ()))
        if (status := states.news(key, "status", state)) is not None:
            self.on_status(key, peer.label, status)

    _BY_KIND: ClassVar[dict[str, Callable[[RankReports, JsonObject], None]]] = {
        "hang": _take_hang,
        "judgement": _take_judgement,
        "slow": _take_slow,
        "status": _take_status,
        "asked": _take_asked,
        "asked_elsewhere": _take_asked_elsewhere,
        "asked_answer": _take_asked_answer,
        "table_wanted": _take_table_wanted,
        "table": _take_table,
    }
    KINDS = frozenset(_BY_KIND)
    """The kinds of entries that ``take`` knows."""
