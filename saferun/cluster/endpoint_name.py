"""Whether the endpoint of torch's rendezvous is this host. Its name may appear late, or the name service be slow."""

from __future__ import annotations

import time
from collections.abc import Callable

from saferun.config import RendezvousConfig
from saferun.linux.names import DEADLINE_S, OwnName, known_at_once
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject

_NAME_HINT = "look at --rdzv-endpoint, and at /etc/hosts and the name servers of this host"
# How often it is repeated that a name is still waited for.
_REPEAT_S = 30.0
_IS_TRUE = frozenset({"1", "true", "t", "yes", "y"})


class EndpointName:
    """The question whether the endpoint's name is this host's, and the wait for the answer.

    Args:
        rendezvous: where the hosts meet.
        poller: the loop's.
        on_late: called when the answer has come after ``find`` went on without it.
        on_waiting: takes the message that the name is still waited for, as the coordinator would send it.
        on_given_up: takes the message that joining has failed, after the time that the coordinator would wait.

    Attributes:
        is_here: whether the endpoint is this host, as far as is known.
        is_awaited: whether the coordinator cannot be started before that is known.
    """

    def __init__(
        self,
        rendezvous: RendezvousConfig,
        poller: Poller,
        *,
        on_late: Callable[[], None],
        on_waiting: Callable[[JsonObject], None],
        on_given_up: Callable[[JsonObject], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._poller = poller
        self._on_late = on_late
        self._on_waiting = on_waiting
        self._on_given_up = on_given_up
        self.is_here = False
        self.is_awaited = False
        self._question: OwnName | None = None
        self._on_found: Callable[[], None] | None = None
        self._repeat_at: float | None = None
        self._join_s = 0.0  # how long the hosts are waited for where there is no coordinator yet
        self._give_up_at: float | None = None

    def find(self, on_found: Callable[[], None]) -> None:
        """Find out whether the endpoint is this host.

        Args:
            on_found: called soon: where the name service has nothing to say, without an answer.
        """
        rendezvous = self._rendezvous
        conf = dict(rendezvous.conf)
        host = rendezvous.address[0] if rendezvous.address is not None else ""
        wanted = conf.get("is_host", "").lower()
        known: bool | None = False
        if rendezvous.backend != "static" and conf.get("store_type", "tcp") == "tcp":
            known = wanted in _IS_TRUE if wanted or not host else known_at_once(host)
        if known is not None:
            self.is_here = known
            on_found()
            return
        self._on_found = on_found
        self.is_awaited = rendezvous.backend == "c10d"
        self._question = OwnName(host, self._poller, self._on_answer, self._on_doubt)

    def _on_doubt(self) -> None:
        """There is no answer yet."""
        if self.is_awaited and self._question is not None:
            self._repeat_at = self._question.began_at + DEADLINE_S
        self._go_on()

    def _go_on(self) -> None:
        on_found, self._on_found = self._on_found, None
        if on_found is not None:
            on_found()

    def _on_answer(self, is_here: bool) -> None:  # noqa: FBT001 - by the question
        self.is_here = is_here
        self.is_awaited = False
        self._repeat_at = self._give_up_at = None
        if self._on_found is not None:
            self._go_on()
        else:
            self._on_late()

    def limit(self, join_s: float) -> None:
        """The hosts are to meet: the name is waited for no longer than they would be, from now on."""
        self._join_s = join_s
        self._give_up_at = time.monotonic() + join_s

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        question = self._question.deadline if self._question is not None else None
        moments = (question, self._repeat_at, self._give_up_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Say what is waited for, as the coordinator would; give up after the time that it would wait."""
        question = self._question
        if question is None:
            return
        question.tick(now)
        if not self.is_awaited:
            return
        if self._give_up_at is not None and self._give_up_at <= now:
            self._repeat_at = self._give_up_at = None
            what = f"{question.reason}, for {self._join_s:.0f} s" if question.is_unknown else question.reason
            self._on_given_up({"op": "join_failed", "what": what, "hint": _NAME_HINT})
        elif self._repeat_at is not None and self._repeat_at <= now:
            self._repeat_at = now + _REPEAT_S
            # Where the name service does not answer, the reason has the seconds.
            lasts = {"waited_s": round(now - question.began_at)} if question.is_unknown else {}
            self._on_waiting({"op": "waiting", "text": question.reason, **lasts})

    @property
    def pids(self) -> set[int]:
        """The process that asks for the name."""
        return self._question.pids if self._question is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was that process."""
        return self._question is not None and self._question.on_exit(pid, status)

    def close(self) -> None:
        """Stop asking, and wait for nothing."""
        self.is_awaited = False
        self._repeat_at = self._give_up_at = None
        if self._question is not None:
            self._question.close()
