"""A job of up to 16,384 hosts, simulated: seconds, messages, bytes and processor time of the leader and of the others.

python benchmarks/fleet.py [--quick] [--only start,rest,rank,hosts,leader,network] [--rounds 1]

The real code of supervisor, job and coordinator runs (tests/fleet), on a virtual network of 50 µs and 10 Gbit/s, with a
store that takes 20 µs for an operation, as torch's does. Seconds are virtual. Processor time is real, of the leader's
coordinator and supervisor, without that of the store, which is 20 µs for each of its operations.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from measure import REPOSITORY, parse_options, progress, say, say_machine

sys.path.insert(0, str(REPOSITORY))

from tests.fleet.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOSTS = (16, 64, 256, 1024, 4096, 16384)
QUICK_HOSTS = (16, 64, 256)
REST_S = 60.0
INFO_BYTES = 3000  # of a host with eight GPUs and ten interfaces
SETTLE_S = 90.0
LIMIT_S = 600.0
HEAD = (
    "phase",
    "hosts",
    "seconds",
    "leader: messages",
    "MB",
    "store operations",
    "processor s",
    "connections",
    "another: messages",
    "kB",
)


class Counts(NamedTuple):
    """What there has been so far: of the leader, and of the host that has had most."""

    messages: int
    size_bytes: int
    operations: int
    processor_s: float
    most_messages: int
    most_bytes: int


def counts(fleet: Fleet) -> Counts:
    """What there has been so far."""
    leader = fleet.leader
    others = [host for host in fleet.hosts if host is not leader]
    return Counts(
        leader.sent + leader.received,
        leader.sent_bytes + leader.received_bytes,
        fleet.network.operations,
        leader.processor_s,
        max(host.sent + host.received for host in others),
        max(host.sent_bytes + host.received_bytes for host in others),
    )


def lines(count: int, only: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The rows of so many hosts."""

    def fail_one(fleet: Fleet) -> float:
        fleet.fail(count // 2)
        return fleet.await_end(LIMIT_S)

    def lose_some(fleet: Fleet) -> float:
        fleet.power_off(*range(1, 1 + max(1, count // 100)))
        return fleet.await_end(LIMIT_S)

    def kill_leader(fleet: Fleet) -> float:
        fleet.kill(0)
        return fleet.await_end(LIMIT_S)

    def divide(fleet: Fleet) -> float:
        """The ranks' own network is cut as well, so that they stop."""
        fleet.stopped_at = fleet.simulation.now
        fleet.network.divide(set(range(count // 2, count)))
        return fleet.await_end(LIMIT_S)

    ways = {
        "rank": ("a rank fails", fail_one),
        "hosts": ("1 % of the hosts are off", lose_some),
        "leader": ("the leader is killed", kill_leader),
        "network": ("half of the hosts are cut off", divide),
    }
    with_start = {"start", "rest"} & set(only)
    for way in [name for name in ways if name in only] or ["rank"]:
        fleet = Fleet(count, seed=1, info_bytes=INFO_BYTES)
        with fleet.running():
            began = time.monotonic()
            phases: list[tuple[str, Callable[[Fleet], float], bool]] = [
                ("start, until all ranks run", lambda fleet: fleet.await_running(LIMIT_S), "start" in with_start),
                ("", lambda fleet: fleet.run(SETTLE_S), False),
                ("at rest, a minute", lambda fleet: fleet.run(REST_S), "rest" in with_start),
                (*ways[way], way in only),
            ]
            for name, do, is_shown in phases:
                before = counts(fleet)
                seconds = do(fleet)
                after = counts(fleet)
                change = Counts._make(b - a for a, b in zip(before, after, strict=True))
                if is_shown:
                    yield (
                        name,
                        f"{count:,}",
                        f"{seconds:.2f}",
                        f"{change.messages:,}",
                        f"{change.size_bytes / 1e6:.2f}",
                        f"{change.operations:,}",
                        f"{change.processor_s:.2f}",
                        f"{fleet.leader.most_connections:,}",
                        f"{change.most_messages:,}",
                        f"{change.most_bytes / 1e3:.1f}",
                    )
            progress(f"{count} hosts, {way}: {time.monotonic() - began:.0f} s")
        with_start = set()
        del fleet
        gc.collect()


def main() -> None:
    """Measure, and print a table."""
    options = parse_options(__doc__ or "", ("saferun",), ("start", "rest", "rank", "hosts", "leader", "network"))
    say_machine("fleet", options)
    gc.disable()  # a collection goes through the objects of all hosts, and its time would be that of one of them
    say_rows([row for count in (QUICK_HOSTS if options.quick else HOSTS) for row in lines(count, options.only)])


def say_rows(rows: list[tuple[str, ...]]) -> None:
    """Print the table."""
    phases = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: phases.index(row[0]))
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    for row in (HEAD, *rows):
        say(
            "  ".join(
                cell.rjust(wide) if i else cell.ljust(wide)
                for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
            )
        )


if __name__ == "__main__":
    main()
