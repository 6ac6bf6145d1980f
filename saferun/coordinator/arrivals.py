"""Who waits in a rendezvous whose own state says only how many: names, noted beside it in the same store.

They are for messages only, so a store that does not answer is not waited for: the rendezvous goes on without them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from saferun.cluster.join_messages import EndNote
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.errors import printable
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit

_MOST_HOSTS = 4096
_LONGEST_NAME = 255
_MOST_SHOWN = 16
_LONGEST_NOTE = 16 << 10
_PAUSE_S = 0.1
# A firewall may forget a connection on which nothing is sent for minutes, without a word.
_LONGEST_IDLE_S = 30.0
# How long an answer is waited for. The names of thousands of hosts take the longest.
_WRITE_S = 2.0
_READ_S = 5.0
# Of this time: a request of many parts begins no other part after it, so that its last answer comes in time.
_BEGINS = 0.8
# So many requests may wait for an answer that does not come: each has a thread and a connection. Of those by which
# others learn what is right, one more of each may.
_MOST_UNANSWERED = 4
_DEPART: Final = "depart"
_NOTE_END: Final = "note end"
_FIND_END: Final = "find end"

_T = TypeVar("_T")


class Waiting(NamedTuple):
    """The names of hosts that wait. ``is_all``: of all that do; else others may be there."""

    names: list[str]
    is_all: bool


class _Unanswered(NamedTuple):
    """A request that waits for its answer."""

    thread: threading.Thread
    kind: str


class Arrivals:
    """The hosts that wait at this moment.

    Args:
        client: to the rendezvous' store. It is left to the rendezvous: others are made to the same place.
        run_id: the job's.
        name: this host's.
    """

    def __init__(self, client: StoreClient, run_id: str, name: str) -> None:
        self._first = client
        self._client: StoreClient | None = None
        self._used_at = -math.inf
        self._unanswered: list[_Unanswered] = []
        self._prefix = f"saferun/{run_id}/"
        self._name = name[:_LONGEST_NAME]
        self._lock = threading.Lock()
        self._number: int | None = None
        self._is_here = False

    def arrive(self) -> None:
        """This host waits from now on."""
        self._is_here = True
        self._ask(self._note, False, _WRITE_S)

    def depart(self) -> None:
        """It does not wait any more."""
        self._is_here = False
        if self._number is not None:
            self._ask(self._note, False, _WRITE_S, _DEPART)

    def _note(self, client: StoreClient, _: float) -> bool:
        """Note in the store whether this host is here: again, where that has changed before the store answered."""
        number = self._number
        if number is None:
            drawn = client.add(f"{self._prefix}hosts", 1) - 1
            with self._lock:
                number = self._number = drawn if self._number is None else self._number
        key = f"{self._prefix}here/{number}"
        while True:
            is_here = self._is_here
            if is_here:
                client.set(key, self._name)
                client.check(key)  # it is there as soon as this is answered
            else:
                client.delete(key)
            if is_here == self._is_here:
                return True

    def names(self) -> Waiting:
        """Those who wait, this host included."""
        return self._ask(self._read_names, Waiting([], is_all=False), _READ_S)

    def _read_names(self, client: StoreClient, give_up_at: float) -> Waiting:
        names: list[str] = []
        count = client.add(f"{self._prefix}hosts", 0)
        is_all = count <= _MOST_HOSTS
        for number in range(min(_MOST_HOSTS, count)):
            if time.monotonic() > give_up_at:
                is_all = False
                break
            name = client.find(f"{self._prefix}here/{number}")
            if name is not None:
                names.append(printable(name.decode(errors="replace")))
        return Waiting([name[:_LONGEST_NAME] for name in dict.fromkeys(names)], is_all)

    def store_answers(self) -> bool:
        """Whether the store in which this host has registered answers now, to a connection that is made for this."""
        number, self._used_at = self._number, -math.inf
        if number is None:
            return False
        return self._ask(lambda client, _: client.add(f"{self._prefix}hosts", 0) > number, False, _READ_S)

    def note_end(self, note: EndNote) -> None:
        """Tell those who wait that a user has ended the job: their rendezvous is going to be closed."""

        def note_end(client: StoreClient, _: float) -> bool:
            client.set(f"{self._prefix}end", json.dumps(note._asdict()))
            return client.check(f"{self._prefix}end")

        self._ask(note_end, False, _WRITE_S, _NOTE_END)

    def find_end(self) -> EndNote | None:
        """Who has ended the job; None: no user, as far as is known."""

        def find_end(client: StoreClient, _: float) -> EndNote | None:
            stored = client.find(f"{self._prefix}end", longest=_LONGEST_NOTE)
            return fit(EndNote, loads(stored, longest=_LONGEST_NOTE)) if stored is not None else None

        return self._ask(find_end, None, _READ_S, _FIND_END)

    def await_departures(self, timeout_s: float) -> None:
        """Return when no other host waits any more, or the time is over."""
        give_up_at = time.monotonic() + timeout_s
        while self._others_wait() and time.monotonic() < give_up_at:
            time.sleep(_PAUSE_S)

    def _others_wait(self) -> bool:
        def others_wait(client: StoreClient, give_up_at: float) -> bool:
            for number in range(min(_MOST_HOSTS, client.add(f"{self._prefix}hosts", 0))):
                if time.monotonic() > give_up_at:
                    return True  # as far as is known
                if number != self._number and client.check(f"{self._prefix}here/{number}"):
                    return True
            return False

        return self._ask(others_wait, False, _WRITE_S)

    def _ask(self, do: Callable[[StoreClient, float], _T], otherwise: _T, timeout_s: float, kind: str = "") -> _T:
        """The store's answer; ``otherwise`` where there is none in time, or one that makes no sense.

        Args:
            do: asks, and asks nothing more after a moment of the monotonic clock, so that only a call which is not
                answered lasts longer.
            otherwise: see above.
            timeout_s: how long an answer is waited for.
            kind: of a request that is made though many others wait for their answers, unless one of its kind does.
        """
        found: list[_T] = []
        give_up_at = time.monotonic() + _BEGINS * timeout_s

        def ask() -> None:
            with suppress(StoreBrokenError, ValueError, *MALFORMED):
                found.append(do(self._connected(), give_up_at))

        self._unanswered = [asked for asked in self._unanswered if asked.thread.is_alive()]
        is_full = len(self._unanswered) >= _MOST_UNANSWERED
        if is_full and (not kind or any(asked.kind == kind for asked in self._unanswered)):
            return otherwise
        with suppress(RuntimeError):  # no thread can be started now
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(timeout_s)
            if thread.is_alive():
                self._unanswered.append(_Unanswered(thread, kind))
        answers = found[:1]
        self._used_at = time.monotonic() if answers else -math.inf
        return answers[0] if answers else otherwise

    def _connected(self) -> StoreClient:
        if self._client is None or time.monotonic() - self._used_at > _LONGEST_IDLE_S:
            self._client = self._first.another()
        return self._client


def waiting_text(names: Sequence[str], least: int, most: int, expected: Sequence[str], *, is_all: bool = True) -> str:
    """Who is missing, by name where the scheduler provides it, else who is there. Pure.

    Args:
        names: of those who wait.
        least: how many the job needs.
        most: how many it takes.
        expected: the names of all hosts, where they are known.
        is_all: whether these are all who wait; else others may be there.
    """
    wanted = f"{most}" if least == most else f"{least} to {most}"
    if not is_all:
        come = f"{len(names)} of {wanted} {'has' if len(names) == 1 else 'have'} come ({_listed(names)})"
        return f"other hosts; at least {come}" if names else "other hosts"
    missing = [name for name in expected if name not in names]
    if missing and len(missing) + len(names) == len(expected):
        return f"{len(missing)} of {len(expected)} hosts: {_listed(missing)}"
    if len(names) >= least:
        return f"more hosts: {len(names)} of {most} {'is' if len(names) == 1 else 'are'} here ({_listed(names)})"
    here = f"; here {'is' if len(names) == 1 else 'are'} {_listed(names)}" if names else ""
    return f"{least - len(names)} of {wanted} hosts{here}"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_SHOWN])
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    return ", ".join(shown)
