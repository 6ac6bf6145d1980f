"""A host's line to the control store during an attempt: its connections, whether they live, and why they broke.

A line has two connections: one on which somebody waits all the time, one for everything else. When one breaks, or the
store answers nothing for too long, the leader is knocked at: if it turns out that the way to it is there after all
(something in between has forgotten a connection), both are made anew; else the line is lost for good, and that is told
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from saferun.coordinator.knock import FROZEN, REACHED, Finding, knock
from saferun.coordinator.store_client import StoreBrokenError, StoreClient

_JOB_TIMEOUT_S = 2.0
# A process that was stopped itself may not blame others for the time.
_LONGEST_TICK_S = 2.0


class Line:
    """The line to the control store.

    Args:
        client: a connection to it.
        job: what its key ``job_key`` says.
        job_key: that key.
        leader: the leader's name, for words.
        addresses: all addresses of the leader, as far as they are known.
        host_timeout_s: for how long the store may answer nothing.
        start: starts whoever uses the line, each time that it is made (anew); they end when ``is_current`` says so.
        on_lost: told once why there is no line any more, and whether its other end may come again: the connection was
            closed, and yet somebody holds the port.
    """

    def __init__(
        self,
        client: StoreClient,
        job: str,
        job_key: str,
        leader: str,
        addresses: Sequence[str],
        host_timeout_s: float,
        *,
        start: Callable[[], None],
        on_lost: Callable[[Finding, bool], None],
    ) -> None:
        self.client = client
        self.watching = client
        self._job = job
        self._job_key = job_key
        self._leader = leader
        self._addresses = list(addresses)
        self._host_timeout_s = host_timeout_s
        self._start = start
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._repairing = False
        self._closed = False
        self._answers = -1
        self._silent_s = 0.0

    def open(self) -> None:
        """Make the connections and start those who use them."""
        try:
            self._make()
        except StoreBrokenError:
            threading.Thread(target=self.repair, args=(self.client,), daemon=True).start()

    def _make(self) -> None:
        client, watching = self.client.another(), self.client.another()
        with self._lock:
            self.client, self.watching = client, watching
            self._silent_s = 0.0
        self._start()

    def is_current(self, client: StoreClient) -> bool:
        """Whether a connection is still one of this line."""
        with self._lock:
            return not self._closed and (client is self.client or client is self.watching)

    @property
    def is_closed(self) -> bool:
        """Whether the line is lost, or nobody wants it any more."""
        with self._lock:
            return self._closed

    def close(self) -> None:
        """Whatever happens to the store from now on is nobody's business any more."""
        with self._lock:
            self._closed = True

    def tick(self, seconds: float) -> None:
        """Time has passed; looks whether the store has answered anything meanwhile."""
        with self._lock:
            answers = self.client.answers
            if answers != self._answers:
                self._answers = answers
                self._silent_s = 0.0
                return
            self._silent_s += min(seconds, _LONGEST_TICK_S)
            if self._silent_s < self._host_timeout_s or self._repairing or self._closed:
                return
        threading.Thread(target=self.repair, args=(self.client,), kwargs={"is_silent": True}, daemon=True).start()

    def repair(self, broken: StoreClient, *, is_silent: bool = False) -> None:
        """Find out about a connection that broke or fell silent, and make the line anew if that can be."""
        with self._lock:
            if self._closed or self._repairing or broken not in {self.client, self.watching}:
                return
            self._repairing = True
        try:
            finding = self._ask_leader(broken)
            if finding.why == REACHED:
                try:
                    self._make()
                    return
                except StoreBrokenError as error:
                    finding = Finding("unknown", f"the control store on {self._leader} breaks connections ({error})")
            with self._lock:
                was_closed, self._closed = self._closed, True
            if not was_closed:
                self._on_lost(finding, finding.why == FROZEN and not is_silent)
        finally:
            with self._lock:
                self._repairing = False

    def _ask_leader(self, broken: StoreClient) -> Finding:
        way, port = broken.address

        def answers(address: str) -> bool:
            try:
                client = StoreClient.connect(broken.store_class, (address, port))
                return client.get(self._job_key, _JOB_TIMEOUT_S) == self._job.encode()
            except StoreBrokenError:
                return False

        return knock(self._leader, self._addresses, port, way=way, answers=answers)
