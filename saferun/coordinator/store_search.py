"""The search for a store behind another host's ports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from saferun.coordinator.dial import NAME_S, UNKNOWN_NAME, UNREACHABLE, dial, shown, unanswered_text
from saferun.coordinator.store_client import StoreBrokenError, StoreClient

if TYPE_CHECKING:
    from saferun.cluster.signed import Signer

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class StoreSearch:
    """The search for a store that may be behind one of several ports of a host, some of which may be someone else's.

    A thread for each port: torch's client waits for the handshake of whatever accepts its connection, without end, and
    one silent listener must not hold up the others.

    Args:
        store_class: torch's TCPStore.
        host: name or address.
        ports: the candidates.
        accept: checks a store that answers, and returns None for the right one, else why it is not (a subject
            is put before them). Called in several threads.
        signer: goes with the connection.
    """

    def __init__(
        self,
        store_class: Any,  # noqa: ANN401 - torch may be there in part only
        host: str,
        ports: Sequence[int],
        accept: Callable[[StoreClient], str | None],
        signer: Signer | None = None,
    ) -> None:
        self._store_class = store_class
        self._host = host
        self._accept = accept
        self._signer = signer
        self._changed = threading.Condition()
        self._messages: dict[int, str] = {}
        self._kind = ""  # of what happened last
        self._foreign_since: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}  # since when a name server has been asked
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
            return self._found

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
                return unanswered_text(self._host, asked_s)
            return "; ".join(self._messages[port] for port in self._ports if port in self._messages) or (
                f"{shown(self._host, self._ports[0])} has not been reached yet"
            )

    @property
    def knows_no_name(self) -> bool:
        """Whether the host's name cannot be resolved."""
        with self._changed:
            return self._kind == UNKNOWN_NAME or self._asked_for_s() > NAME_S

    @property
    def leads_nowhere(self) -> bool:
        """Whether it is known that nothing leads there, as opposed to a host where saferun has not been started yet."""
        with self._changed:
            return self._kind in {UNKNOWN_NAME, UNREACHABLE} or self._asked_for_s() > NAME_S

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
            message, client, foreign = self._try_store(port)
            with self._changed:
                if client is not None and self._found is None:
                    self._found = client
                if message is not None:
                    self._messages[port] = message
                    self._has_failed = True
                if foreign:
                    self._foreign_since.setdefault(port, time.monotonic())
                else:
                    self._foreign_since.pop(port, None)
                self._changed.notify_all()
                # A condition rather than a sleep: the end of the search wakes it.
                if self._changed.wait_for(lambda: self._over or self._found is not None, pause_s):
                    return
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    def _try_store(self, port: int) -> tuple[str | None, StoreClient | None, bool]:
        """Words why not, or the store; and whether the port is known to be someone else's."""
        with self._changed:
            self._asked_at[port] = time.monotonic()

        def on_resolved() -> None:
            with self._changed:
                self._asked_at.pop(port, None)

        connection, kind, message = dial(self._host, port, on_resolved=on_resolved)
        with self._changed:
            self._kind = kind
        if connection is None:
            return message, None, False
        connection.close()
        where = shown(self._host, port)
        with self._changed:
            # True while the next call blocks, and reported if that takes long.
            self._messages[port] = f"something listens on {where} and does not answer as a store"
        try:
            client = StoreClient.connect(self._store_class, (self._host, port), dialled=True, signer=self._signer)
            objection = self._accept(client)
        except StoreBrokenError as error:
            return f"something listens on {where} and does not answer as a store ({error})", None, False
        if objection is not None:
            return f"{where} {objection}", None, True
        return None, client, False
