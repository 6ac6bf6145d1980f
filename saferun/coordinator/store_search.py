"""The search for a store behind another host's ports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from saferun.coordinator.dial import NAME_S, REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE, dial, shown, unanswered_text
from saferun.coordinator.host_probe import HostProbe, ProbedHost
from saferun.coordinator.prefix_store import torchs_own
from saferun.coordinator.search_text import FOREIGN, NO_STORE, PortResult, addresses_in, search_hint, search_text
from saferun.coordinator.store_client import StoreBrokenError, StoreClient

if TYPE_CHECKING:
    from saferun.cluster.signed import Signer

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
# When a host is probed whose ports are silent: one packet that was lost costs a second.
_PROBE_AFTER_S = 1.5
# When silence and refusals are reported: by then three packets would have to be lost, or a host to come that late.
_LATE_S = 4.5
_LONGEST_HOSTS_FILE = 1 << 20
# After so long a server that answers, but not as torch's known releases do, is asked by torch's own client.
_DOUBT_S = 10.0


class StoreSearch:
    """The search for a store that may be behind one of several ports of a host, some of which may be someone else's.

    A thread for each port: a client waits for the handshake of whatever accepts its connection, without end, and one
    silent listener must not hold up the others.

    Args:
        store_class: torch's TCPStore, or ``StoreConnection``.
        host: name or address.
        ports: the candidates.
        accept: checks a store that answers, and returns None for the right one, else why it is not (a subject
            is put before them). Called in several threads.
        signer: goes with the connection.
        here: the name of this host, where what is said is read beside what others say; such a search finds out whether
            the host is up.
    """

    def __init__(
        self,
        store_class: Any,  # noqa: ANN401 - torch may be there in part only
        host: str,
        ports: Sequence[int],
        accept: Callable[[StoreClient], str | None],
        signer: Signer | None = None,
        *,
        here: str = "",
    ) -> None:
        self._store_class = store_class
        self._host = host
        self._accept = accept
        self._signer = signer
        self._changed = threading.Condition()
        self._results: dict[int, PortResult] = {}
        self._here = here
        self._host_probe = HostProbe(host, ports) if here else None
        self._probed: ProbedHost | None = None
        self._began_at = time.monotonic()
        self._foreign_since: dict[int, float] = {}
        self._accepted: set[int] = set()  # that have accepted a connection, and have yet to answer as a store
        self._asked_at: dict[int, float] = {}  # since when a name server has been asked
        self._doubted_at: float | None = None
        self._found: StoreClient | None = None
        self._over = False
        self._has_failed = False
        self._ports = tuple(ports)
        for port in self._ports:
            threading.Thread(target=self._try_port, args=(port,), daemon=True).start()

    def wait(self, timeout_s: float, *, or_failure: bool = False) -> StoreClient | None:
        """The store, waited for; None when it is not found in time. To be asked again, or to be ended.

        Args:
            timeout_s: how long.
            or_failure: no longer than until a port has been tried in vain.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None or (or_failure and self._has_failed), timeout_s)
            found = self._found
            kinds = self._kinds()
        if found is None and self._host_probe is not None and kinds <= {SILENT, UNREACHABLE}:
            now = time.monotonic()
            if now - self._began_at > _PROBE_AFTER_S:
                self._probed = self._host_probe.result(now)
        return found

    def _kinds(self) -> set[str]:
        return {result.kind for result in self._results.values()}

    @property
    def is_accepted(self) -> bool:
        """Whether a port has accepted a connection, and has yet to answer: its host may be about to serve a store."""
        with self._changed:
            return bool(self._accepted)

    @property
    def has_failed(self) -> bool:
        """Whether a port has been tried in vain."""
        with self._changed:
            return self._has_failed

    def message(self) -> str:
        """Why it has not been found so far."""
        with self._changed:
            asked_s = self._asked_for_s()
            if asked_s > NAME_S:
                return unanswered_text(self._host, asked_s, self._here)
            return search_text(self._host, self._ports, self._known(), self._here, self._probed) or (
                f"{shown(self._host, self._ports[0])} has not been reached yet"
            )

    def hint(self, source: str) -> str:
        """What to do about it; ``source``: where the numbers of the ports come from, as in ``text.master_port``."""
        try:
            with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
                in_file = addresses_in(file.read(_LONGEST_HOSTS_FILE), self._host)
        except OSError:
            in_file = {}
        with self._changed:
            known = {} if self._asked_for_s() > NAME_S else self._known()
            return search_hint(
                self._host, self._ports, known, self._here, self._probed, source=source, hosts_file=in_file
            )

    def _known(self) -> dict[int, PortResult]:
        """The results so far, with those of ports that have been silent for long, and are waited for still."""
        known = dict(self._results)
        if not self._asked_at and self._probed is not None and self._is_late():
            address = next(iter(self._probed.addresses), self._host)
            subject = self._host if address == self._host else f"{self._host} ({address})"
            for port in self._ports:
                where = subject.replace(self._host, shown(self._host, port), 1)
                known.setdefault(port, PortResult(SILENT, f"{where} does not answer {self._here}"))
        return known

    def _is_late(self) -> bool:
        return time.monotonic() - self._began_at > _LATE_S

    @property
    def is_in_vain(self) -> bool:
        """Whether nothing leads there, or has for so long that whoever waits is to know of it."""
        with self._changed:
            if self._asked_for_s() > NAME_S:
                return True
            kinds = {result.kind for result in self._known().values()}
            nowhere = kinds and kinds <= {UNKNOWN_NAME, UNREACHABLE}
            return bool(nowhere or (kinds and self._is_late() and kinds <= {UNREACHABLE, SILENT, REFUSED}))

    def _asked_for_s(self) -> float:
        return time.monotonic() - min(self._asked_at.values(), default=time.monotonic())

    def foreign_for_s(self) -> float:
        """For how long every port has been known to belong to others; 0: one may still become the right one."""
        with self._changed:
            if len(self._foreign_since) < len(self._ports):
                return 0.0
            return time.monotonic() - max(self._foreign_since.values())

    def end(self) -> None:
        """Give up; threads that wait for a handshake end with the process."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _try_port(self, port: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            result, client = self._try_store(port)
            with self._changed:
                if client is not None and self._found is None:
                    self._found = client
                if result is not None:
                    self._results[port] = result
                    self._has_failed = True
                if result is not None and result.kind == FOREIGN:
                    self._foreign_since.setdefault(port, time.monotonic())
                else:
                    self._foreign_since.pop(port, None)
                self._changed.notify_all()
                # A condition rather than a sleep: the end of the search wakes it.
                if self._changed.wait_for(lambda: self._over or self._found is not None, pause_s):
                    return
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    def _try_store(self, port: int) -> tuple[PortResult | None, StoreClient | None]:
        """Why not, or the store."""
        with self._changed:
            self._asked_at[port] = time.monotonic()

        def on_resolved() -> None:
            with self._changed:
                self._asked_at.pop(port, None)

        connection, kind, message = dial(self._host, port, here=self._here, on_resolved=on_resolved)
        if connection is None:
            return PortResult(kind, message), None
        where = shown(self._host, port)
        # With the address: the name may lead to another host than the master.
        silent = f"something listens on {message.partition(' accepts')[0] or where} and does not answer as a store"
        with self._changed:
            # True while the next call blocks, and reported if that takes long.
            self._results[port] = PortResult(NO_STORE, silent)
            self._accepted.add(port)
        try:
            address = self._host, port
            client = StoreClient.connect(self._store_class, address, connection=connection, signer=self._signer)
            objection = self._accept(client)
        except StoreBrokenError as error:
            self._doubt()
            return PortResult(NO_STORE, f"{silent} ({error})"), None
        finally:
            with self._changed:
                self._accepted.discard(port)
        if objection is not None:
            return PortResult(FOREIGN, f"{where} {objection}"), None
        return None, client

    def _doubt(self) -> None:
        """What answers may be the store of a torch that speaks otherwise, for which only its own client will do."""
        now = time.monotonic()
        with self._changed:
            self._doubted_at = self._doubted_at or now
            is_due = now - self._doubted_at > _DOUBT_S and getattr(self._store_class, "takes_connection", False)
        if is_due:
            with suppress(Exception):  # there is no torch that can be imported
                self._store_class = torchs_own(self._store_class)
