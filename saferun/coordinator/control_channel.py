"""A host's channel to the control store during an attempt: its connections, whether they live, and why they broke.

A channel has two connections: one on which a thread waits all the time, one for everything else. When one breaks, or
the store answers nothing for too long, the leader is probed, at every address that it has published. Where its store
answers at any of them, both connections are made again there. Where saferun is not running there any more, or does not
answer although connections are accepted, the channel is lost. Where nothing answers at all, it is not known here
whether that host is dead or only the route to it: that is reported, and the search goes on until the channel is closed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from saferun.cluster.silence import CUT, ENDED, FROZEN, GONE, REACHED, UNKNOWN
from saferun.coordinator.liveness_probe import SilenceReason, how_it_ended, probe_host
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient

_JOB_TIMEOUT_S = 2.0
# Parts of the host timeout: when a store that does not answer is first checked, and how often it is searched for.
_EARLY_SHARE = 1 / 3
_SEARCH_SHARE = 1 / 6
_LEAST_SEARCH_S = 0.5
# A channel that breaks each time that it is used is not made more often.
_LEAST_PAUSE_S = 1.0
# Of each address, so many questions may wait for the answer of a process that does not run: each has a thread and a
# connection, until that process runs again.
_MOST_UNANSWERED = 4
# A process that was stopped itself may not blame others for the time.
_LONGEST_TICK_S = 2.0


class ControlChannel:
    """The channel to the control store.

    Args:
        client: a connection to it.
        job: what its key ``job_key`` says.
        job_key: that key.
        leader: the leader's name, for messages.
        addresses: all addresses of the leader, as far as they are known.
        probe_after_s: for how long the store may answer nothing.
        start: starts whoever uses the channel, each time that it is made (again); they end when ``is_current`` says so.
        on_lost: takes once why there is no channel any more, and whether its other end may come again: the connection
            was closed, and yet a process holds the port.
        on_late: called when the store has not answered for a while.
        on_searching: takes, each time that it changes, why there is no channel for the time being.
        on_moved: takes the address that the channel led to and the one that it leads to now; equal: it is there again.
    """

    def __init__(
        self,
        client: StoreClient,
        job: str,
        job_key: str,
        leader: str,
        addresses: Sequence[str],
        probe_after_s: float,
        *,
        start: Callable[[], None],
        on_lost: Callable[[SilenceReason, bool], None],
        on_late: Callable[[], None] = lambda: None,
        on_searching: Callable[[SilenceReason], None] = lambda _: None,
        on_moved: Callable[[str, str], None] = lambda _was, _is: None,
    ) -> None:
        self.client = client
        self.watching = client
        self._job = job
        self._job_key = job_key
        self._leader = leader
        self._addresses = list(dict.fromkeys([client.address[0], *addresses]))
        self._probe_after_s = probe_after_s
        self._start = start
        self._on_lost = on_lost
        self._on_late = on_late
        self._on_searching = on_searching
        self._on_moved = on_moved
        self._lock = threading.Lock()
        self._woken = threading.Condition()
        self._repairing = False
        self._broken: StoreClient | None = None  # broke while another thread was already repairing the channel
        self._has_no_threads = False  # no thread could be started for those who use it
        self._made_at = -_LEAST_PAUSE_S  # when it was made again last
        self._early = False  # the store was checked since it answered last
        self._closed = False
        self._answers = -1
        self._silent_s = 0.0
        self._unanswered: Counter[str] = Counter()  # questions, by address

    def open(self) -> None:
        """Make the connections and start those who use them."""
        try:
            self._make()
        except StoreBrokenError:
            self._has_no_threads = True
            self.open_again()

    def open_again(self) -> None:
        """Make what could not be made for want of threads, in the background; if that fails as well, call it again."""
        with self._lock:
            if not self._has_no_threads or self._repairing or self._closed:
                return
            client = self.client
        with suppress(RuntimeError):
            threading.Thread(target=self.repair, args=(client,), daemon=True).start()

    def _make(self, client: StoreClient | None = None) -> None:
        first = self.client if client is None else client
        client, watching = first.another(), first.another()
        with self._lock:
            self.client, self.watching = client, watching
            self._silent_s = 0.0
            self._broken = None
        try:
            self._start()
        except RuntimeError as error:
            # Those that were started end when the channel is made again.
            self._has_no_threads = True
            raise StoreBrokenError(str(error)) from error
        self._has_no_threads = False

    def is_current(self, client: StoreClient) -> bool:
        """Whether a connection is still one of this channel."""
        with self._lock:
            return not self._closed and (client is self.client or client is self.watching)

    def wait_while_current(self, client: StoreClient, timeout_s: float) -> bool:
        """Wait so long, or until the channel is closed; whether the connection is one of this channel then."""
        with self._woken:
            self._woken.wait_for(lambda: self.is_closed, timeout_s)
        return self.is_current(client)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is lost, or was closed."""
        with self._lock:
            return self._closed

    def close(self) -> None:
        """Whatever happens to the store from now on is ignored."""
        with self._lock:
            self._closed = True
        with self._woken:
            self._woken.notify_all()

    def tick(self, elapsed_s: float) -> None:
        """Time has passed; looks whether the store has answered anything meanwhile."""
        self.open_again()
        with self._lock:
            answers = self.client.answers
            if answers != self._answers:
                self._answers = answers
                self._silent_s = 0.0
                self._early = False
                return
            self._silent_s += min(elapsed_s, _LONGEST_TICK_S)
            if self._repairing or self._closed:
                return
            is_early = self._silent_s < self._probe_after_s
            if is_early and (self._early or self._silent_s < self._probe_after_s * _EARLY_SHARE):
                return
            self._early = True
            client = self.client
        if is_early:
            self._on_late()
        try:
            threading.Thread(
                target=self.repair, args=(client,), kwargs={"is_silent": True, "is_early": is_early}, daemon=True
            ).start()
        except RuntimeError:
            # No thread can be started now; another tick follows.
            with self._lock:
                self._early = False

    def repair(self, broken: StoreClient, *, is_silent: bool = False, is_early: bool = False) -> None:
        """Find out about a connection that broke or fell silent, and make the channel again if that can be.

        Args:
            broken: the connection.
            is_silent: it is there, and nothing is answered.
            is_early: that has not lasted long: the channel is made only if its route is cut and there is another one.
        """
        with self._lock:
            if self._closed or broken not in {self.client, self.watching}:
                return
            if self._repairing:
                # That thread may only be checking; the one that used this connection has ended.
                self._broken = self._broken if is_silent else broken
                return
            self._repairing = True
        try:
            self._mend(broken, is_silent=is_silent, is_early=is_early)
        finally:
            with self._lock:
                self._repairing = False
                another, self._broken = self._broken, None
        if another is not None:
            self.repair(another)

    def _mend(self, broken: StoreClient, *, is_silent: bool, is_early: bool) -> None:
        with self._woken:
            pause_s = self._made_at + _LEAST_PAUSE_S - time.monotonic()
            if pause_s > 0 and self._woken.wait_for(lambda: self.is_closed, pause_s):
                return
        address, port = broken.address
        # A silent connection is open, so the coordinator at its other end has not ended.
        ended = how_it_ended(self._leader, [address, *self._addresses], port) if not is_silent else None
        finding = ended or self._ask_leader(broken)
        if is_early and finding.why != CUT:
            return
        if self._reconnect(finding, address) or is_early or self._has_no_threads:
            return
        if finding.why in {GONE, ENDED} or (finding.why == FROZEN and not is_silent):
            # What held the store has ended; where a process holds its port still, there may be another one.
            self._lose(finding, may_come_again=finding.why != GONE)
        else:
            self._search(finding, broken)

    def _reconnect(self, finding: SilenceReason, address: str) -> bool:
        """Make the channel again where the store answers; whether it is there now.

        Args:
            finding: of a probe of the leader.
            address: the one that was used before; the channel has moved if the store answers at another one.
        """
        if finding.why not in {REACHED, CUT} or not finding.address:
            return False
        try:
            found = (finding.address, self.client.address[1])
            self._make(StoreClient.connect(self.client.store_class, found, signer=self.client.signer))
        except StoreBrokenError:
            return False
        self._made_at = time.monotonic()
        if finding.address != address:
            self._on_moved(address, finding.address)
        return True

    def _lose(self, finding: SilenceReason, *, may_come_again: bool) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._on_lost(finding, may_come_again)

    def _search(self, finding: SilenceReason, broken: StoreClient) -> None:
        """Try all addresses again and again, until there is a channel or it is closed."""
        address = broken.address[0]
        pause_s = max(_LEAST_SEARCH_S, self._probe_after_s * _SEARCH_SHARE)
        reported = ""
        while True:
            if finding.why != reported:
                reported = finding.why
                if reported == REACHED:
                    finding = SilenceReason(UNKNOWN, f"the control store on {self._leader} breaks connections")
                self._on_searching(finding)
            with self._woken:
                if self._woken.wait_for(lambda: self.is_closed, pause_s):
                    return
            finding = self._ask_leader(broken)
            if self._reconnect(finding, address):
                if finding.address == address:
                    self._on_moved(address, address)
                return

    def _ask_leader(self, broken: StoreClient) -> SilenceReason:
        used, port = broken.address

        def answers(address: str) -> bool:
            with self._lock:
                if self._unanswered[address] >= _MOST_UNANSWERED:
                    return False
                self._unanswered[address] += 1
            try:
                client = StoreClient.connect(broken.store_class, (address, port), dialled=True, signer=broken.signer)
                return client.get(self._job_key, _JOB_TIMEOUT_S, forged=FORGED) == self._job.encode()
            except StoreBrokenError:
                return False
            finally:
                with self._lock:
                    self._unanswered[address] -= 1

        return probe_host(self._leader, self._addresses, port, address=used, answers=answers)
