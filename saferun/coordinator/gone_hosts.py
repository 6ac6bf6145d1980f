"""Whether hosts that came to a rendezvous early have ended since, as their records and their ports tell."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from saferun.cluster.silence import GONE, UNREACHABLE
from saferun.coordinator.assignments import HostRecord
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.liveness_probe import probe_host

# So many hosts are probed at once, and for so long: one that does not answer at all takes 9.5 s.
_MOST_PROBED = 128
_PROBE_S = 10.0


def gone_of(records: Mapping[int, HostRecord], own: HostRecord) -> list[int]:
    """The hosts of these records that have certainly ended, as far as that can be found out in time."""
    waiting = deque(records.items())
    gone: list[int] = []

    def probe() -> None:
        while time.monotonic() < give_up_at:
            try:
                host, record = waiting.popleft()
            except IndexError:
                return
            with suppress(Exception):
                if is_gone(record, own):
                    gone.append(host)

    give_up_at = time.monotonic() + _PROBE_S
    threads: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be started: those that there are probe the others
        for _ in range(min(len(waiting), _MOST_PROBED)):
            thread = threading.Thread(target=probe, daemon=True)
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, give_up_at - time.monotonic()))
    return list(gone)


def is_gone(record: HostRecord, own: HostRecord) -> bool:
    """Whether the process that wrote a record has certainly ended.

    So it has if it belonged to the supervisor of this one, or to a host of the same name that nothing leads to any
    more: a pod that was made again.
    """
    is_namesake = record.name == own.name
    if is_namesake and _supervisors(record) and _supervisors(record) == _supervisors(own):
        return True
    addresses = addresses_elsewhere(record.addresses, own.addresses) or list(record.addresses)
    why = probe_host(record.name, addresses, record.port, address=None, is_answer_enough=True).why
    return why == GONE or (is_namesake and why == UNREACHABLE)


def _supervisors(record: HostRecord) -> tuple[object, ...]:
    """What the processes of one supervisor have in common; empty: unknown."""
    pids = [task.pid for task in record.tasks if task.pid > 0]
    return (pids, record.port, record.addresses) if pids and record.port and record.addresses else ()
