"""Who waits in a rendezvous whose own state says only how many: names, noted beside it in the same store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

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


class Arrivals:
    """The hosts that wait at this moment.

    Args:
        client: to the rendezvous' store.
        run_id: the job's.
        name: this host's.
    """

    def __init__(self, client: StoreClient, run_id: str, name: str) -> None:
        self._client = client
        self._prefix = f"saferun/{run_id}/"
        self._name = name[:_LONGEST_NAME]
        self._number: int | None = None

    def arrive(self) -> None:
        """This host waits from now on."""
        try:
            if self._number is None:
                self._number = self._client.add(f"{self._prefix}hosts", 1) - 1
            self._client.set(f"{self._prefix}here/{self._number}", self._name)
        except StoreBrokenError:
            # The rendezvous itself will report it.
            pass

    def depart(self) -> None:
        """It does not wait any more."""
        try:
            if self._number is not None:
                self._client.delete(f"{self._prefix}here/{self._number}")
        except StoreBrokenError:
            pass

    def names(self) -> list[str]:
        """Those who wait, this host included."""
        names: list[str] = []
        try:
            count = min(_MOST_HOSTS, self._client.add(f"{self._prefix}hosts", 0))
            for number in range(count):
                name = self._client.find(f"{self._prefix}here/{number}")
                if name is not None:
                    names.append(printable(name.decode(errors="replace")))
        except (StoreBrokenError, ValueError):
            pass
        return [name[:_LONGEST_NAME] for name in dict.fromkeys(names)]

    def note_end(self, note: EndNote) -> None:
        """Tell those who wait that a user has ended the job: their rendezvous is going to be closed."""
        try:
            self._client.set(f"{self._prefix}end", json.dumps(note._asdict()))
        except StoreBrokenError:
            pass

    def find_end(self) -> EndNote | None:
        """Who has ended the job; None: no user, as far as is known."""
        try:
            stored = self._client.find(f"{self._prefix}end", longest=_LONGEST_NOTE)
            return fit(EndNote, loads(stored, longest=_LONGEST_NOTE)) if stored is not None else None
        except (StoreBrokenError, *MALFORMED):
            return None

    def await_departures(self, timeout_s: float) -> None:
        """Return when no other host waits any more, or the time is over."""
        give_up_at = time.monotonic() + timeout_s
        while self._others_wait() and time.monotonic() < give_up_at:
            time.sleep(_PAUSE_S)

    def _others_wait(self) -> bool:
        try:
            count = min(_MOST_HOSTS, self._client.add(f"{self._prefix}hosts", 0))
            numbers = (number for number in range(count) if number != self._number)
            return any(self._client.check(f"{self._prefix}here/{number}") for number in numbers)
        except (StoreBrokenError, ValueError):
            return False


def waiting_text(names: Sequence[str], least: int, most: int, expected: Sequence[str]) -> str:
    """Who is missing, by name where the scheduler provides it, else who is there. Pure.

    Args:
        names: of those who wait.
        least: how many the job needs.
        most: how many it takes.
        expected: the names of all hosts, where they are known.
    """
    missing = [name for name in expected if name not in names]
    if missing and len(missing) + len(names) == len(expected):
        return f"{len(missing)} of {len(expected)} hosts: {_listed(missing)}"
    if len(names) >= least:
        return f"more hosts: {len(names)} of {most} {'is' if len(names) == 1 else 'are'} here ({_listed(names)})"
    wanted = f"{most}" if least == most else f"{least} to {most}"
    here = f"; here {'is' if len(names) == 1 else 'are'} {_listed(names)}" if names else ""
    return f"{least - len(names)} of {wanted} hosts{here}"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_SHOWN])
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    return ", ".join(shown)
