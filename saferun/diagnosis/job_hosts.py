"""Which rank is on which host, and what that is called. Pure.

On one host everything is that host's; of several each has its own process numbers, its own kernel log and its own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from saferun.diagnosis.gpu_errors import GpuOwners
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.job_evidence import Evidence, HostView, OomKill
from saferun.model import RankEnd
from saferun.text.wording import ranks_text

_SHOWN_HOSTS = 4
# 10.0.0.2:29500, [10.0.0.2]:40123, [::ffff:10.0.0.2]:55768, (10.0.0.2, 29500)
_ADDRESS = LazyPattern(r"\[([0-9a-fA-F:.%]{2,60})\]|(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.]*\d)")
_V4_IN_V6 = "::ffff:"


class Hosts:
    """The hosts of an evidence.

    Args:
        evidence: ``hosts`` is empty where there is one.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.all = evidence.hosts
        self.are_several = len(evidence.hosts) > 1
        # One of several that judges alone knows its own ranks only.
        self.is_one = not self.are_several and evidence.world_size <= len(evidence.ranks)
        self._of_rank = {rank: host for host in evidence.hosts for rank in host.ranks}
        by_address: dict[str, list[HostView]] = {}
        for host in evidence.hosts:
            for address in dict.fromkeys(host.addresses):
                by_address.setdefault(_plain(address), []).append(host)
        self._by_address = by_address
        self._gpu_owners: dict[int, GpuOwners] = {}
        self._neighbours: dict[int, list[tuple[int, int]]] = {}
        for end in evidence.ends:
            self._neighbours.setdefault(self._number(end.rank), []).append((end.pid, end.rank))

    def of(self, rank: int) -> HostView | None:
        """The host of a rank; None where it is not known, or there is only one."""
        return self._of_rank.get(rank)

    def label(self, rank: int) -> str:
        """The name of a rank's host."""
        host = self._of_rank.get(rank)
        return host.label if host is not None else self._evidence.host

    # ----------------------------------------------------------------------------------------------- what is one host's

    def kernel_lines(self, rank: int) -> tuple[str, ...]:
        """The lines of the kernel log of a rank's host."""
        host = self._of_rank.get(rank)
        return host.kernel_lines if host is not None else self._evidence.kernel_lines

    def oom(self, rank: int) -> OomKill | None:
        """What the OOM killer did on a rank's host."""
        host = self._of_rank.get(rank)
        return host.oom if host is not None else self._evidence.oom

    def supervisor_pids(self, rank: int) -> tuple[int, ...]:
        """The saferun processes of a rank's host."""
        host = self._of_rank.get(rank)
        return host.supervisor_pids if host is not None else (self._evidence.supervisor_pid,)

    def gpu_owners(self, rank: int) -> GpuOwners:
        """Which GPU of a rank's host is whose."""
        number = self._number(rank)
        if number not in self._gpu_owners:
            capture = self._evidence.capture
            known = [(one.rank, one.pid) for one in capture.processes]
            known += [(one.rank, one.pid) for one in self._evidence.ends]
            processes = [(owner, pid) for owner, pid in known if self._number(owner) == number]
            gpus = [gpu for gpu in capture.gpus if self._number(gpu.rank) == number]
            self._gpu_owners[number] = GpuOwners(processes, gpus)
        return self._gpu_owners[number]

    def neighbours(self, rank: int) -> Sequence[tuple[int, int]]:
        """Pids and ranks of those that ended on a rank's host, itself among them."""
        return self._neighbours.get(self._number(rank), ())

    def _number(self, rank: int) -> int:
        host = self._of_rank.get(rank)
        return host.host if host is not None else -1

    # ---------------------------------------------------------------------------------------------------------- names

    def who(self, end: RankEnd) -> str:
        """``rank 5 (node2, local rank 1, pid 4711)``."""
        return f"rank {end.rank} ({self.label(end.rank)}, local rank {end.local_rank}, pid {end.pid})"

    def names(self, ranks: Sequence[int], all_ranks: int = 0) -> str:
        """Ranks with their hosts: ``rank 5 (node2)``, ``all ranks of node2``, ``ranks 0-5 (node1, node2)``.

        Args:
            ranks: the ranks.
            all_ranks: how many there are where that is known better than by the hosts.
        """
        count = all_ranks or sum(len(host.ranks) for host in self.all)
        if len(ranks) > 1 and len(ranks) == count:
            return "all ranks" if self.are_several else f"all ranks of {self._evidence.host}"
        if not self.are_several:
            return f"{ranks_text(ranks)} ({self._evidence.host})"
        theirs = self.of_ranks(ranks)
        if len(theirs) == 1 and len(ranks) > 1 and set(theirs[0].ranks) <= set(ranks):
            return f"all ranks of {theirs[0].label} ({ranks_text(ranks)})"
        return f"{ranks_text(ranks)} ({hosts_text(theirs)})" if theirs else ranks_text(ranks)

    def of_ranks(self, ranks: Iterable[int]) -> list[HostView]:
        """The hosts of some ranks, each once."""
        found = {host.host: host for rank in ranks if (host := self._of_rank.get(rank)) is not None}
        return [host for _, host in sorted(found.items())]

    # ------------------------------------------------------------------------------------------------------ addresses

    def at_address(self, address: str) -> HostView | None:
        """The host of an address; None where none has it, or several have."""
        found = self._by_address.get(_plain(address), [])
        return found[0] if len(found) == 1 else None

    def is_shared(self, address: str) -> bool:
        """Whether an address means another host on every host: 127.0.1.1, a bridge of containers."""
        plain = _plain(address)
        return plain.startswith("127.") or plain == "::1" or len(self._by_address.get(plain, ())) > 1

    def located(self, text: str) -> str:
        """A text with the host's name after each address: ``a connection to 10.0.0.2:29500 [node2]``."""
        if not self._by_address:
            return text
        for address in dict.fromkeys(addresses_in(text)):
            host = self.at_address(address)
            if host is not None and host.label not in text:
                match = re.search(rf"\[?{re.escape(address)}\]?(?::\d{{1,5}})?", text)
                if match is not None:
                    text = f"{text[: match.end()]} [{host.label}]{text[match.end() :]}"
        return text


def addresses_in(text: str) -> list[str]:
    """The numeric addresses in a text, as they stand there."""
    found = []
    for match in _ADDRESS.finditer(text[:2000]):
        address = match[1] or match[2]
        if "." in address or address.count(":") > 1:
            found.append(address)
    return found


def hosts_text(hosts: Sequence[HostView]) -> str:
    """``node2``; ``node1, node2``; ``node1, node2, node3, … (200 hosts)``."""
    labels = [host.label for host in hosts]
    if len(labels) <= _SHOWN_HOSTS:
        return ", ".join(labels)
    return f"{', '.join(labels[: _SHOWN_HOSTS - 1])}, … ({len(labels)} hosts)"


def _plain(address: str) -> str:
    """An address without brackets, zone and the form that IPv4 has within IPv6."""
    plain = address.strip("[]").partition("%")[0].lower()
    return plain.removeprefix(_V4_IN_V6) if "." in plain else plain
