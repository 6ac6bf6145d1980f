"""Errors and lost carriers of network interfaces and RDMA ports, counted from one look to the next.

What a counter shows by itself may be years old. So each look is kept with its result, and the next one compares: that
of the previous attempt of the same launch, or of ``saferunctl health``, which sites run every few minutes.

Sources: Linux, Documentation/networking/statistics.rst and Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence

from saferun.linux.link_counters import LinkCounters, read_link_counters
from saferun.linux.netlink import read_nics
from saferun.linux.nic import Nic, is_decoy
from saferun.linux.small_files import list_directory, read_line
from saferun.model import Value
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.default_nics import address_to_reach
from saferun.preflight.results import CheckResult
from saferun.text.wording import count_text, duration_text

_MOST_NICS = 64
# Old looks show nothing of the next job.
_LONGEST_S = 24 * 3600.0
# One loss may be a maintenance of the switch, and two within a day two of them, or an administrator's work; links that
# are bad lose their carrier again and again: as often as this within so many seconds, and again in each further such
# time, up to as many as no maintenance takes.
_FLAPS, _FLAPPING_S, _MOST_FLAPS = 2, 300.0, 10
_MOST_MASTERS = 3  # a port, of a bond, of a bridge
_FEW_ERRORS = 100
_ERROR_SHARE = 1e-4  # of the packets
_BOOT, _NAMESPACE, _AT, _USED = "boot", "namespace", "at_s", "used"
# How many of each within an hour, or since a check that is less long ago, are no accident. Retransmissions
# (packet_seq_err …) come with congestion, too.
_RDMA = {
    "link_error_recovery": 2,
    "local_link_integrity_errors": 10,
    "symbol_error": 100,
    "port_rcv_errors": 100,
}


class NicErrors(Value):
    """What an interface has counted between two looks.

    Attributes:
        name: of the interface, or of the RDMA port.
        message: what, as a sentence that begins with the name.
        class_name: of the fault; empty: it is reported, and may be no fault.
    """

    name: str
    message: str
    class_name: str


def check_nic_errors(context: CheckContext) -> CheckResult:
    """What interfaces have counted since the previous look, where there was one."""
    now = _sample(context)
    facts = tuple(sorted(now.items()))
    seconds = seconds_between(dict(context.earlier), now)
    if seconds is None:
        return ok("the counters of the interfaces are noted, to be compared with later", facts)
    found = list(growth(dict(context.earlier), now, seconds))
    if not found:
        return ok(f"no interface has lost its carrier or counted many errors in the last {_text(seconds)}", facts)
    found.sort(key=lambda one: not one.class_name)
    hint = f"check the cable, the transceiver and the switch port: `ip -s link show {found[0].name}`"
    if ":" in found[0].name:
        hint = "check the cable, the transceiver and the switch port: `ibdiagnet`, `perfquery`"
    return warning("; ".join(one.message for one in found[:4]), hint, facts, class_name=found[0].class_name)


def _sample(context: CheckContext) -> dict[str, str]:
    """All counters now, by ``eth0 errors``; those that are 0 are left out, but for one of each interface."""
    found = {
        _BOOT: read_line(context.path("proc/sys/kernel/random/boot_id")),
        _NAMESPACE: _namespace(context),
        _AT: f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}",
    }
    links = read_link_counters()
    used = _used(links, read_nics(context.root))
    for link in [link for link in links if link.kind != "loopback" and not is_decoy(link.name)][:_MOST_NICS]:
        found[f"{link.name} losses"] = str(link.losses)
        found[f"{link.name} packets"] = str(link.packets)
        if link.errors:
            found[f"{link.name} errors"] = str(link.errors)
        if link.name in used:
            found[f"{link.name} {_USED}"] = "1"
    if list_directory(context.path("sys/class/infiniband")):
        from saferun.captures.rdma_errors import read_errors
        from saferun.preflight.checks.fabric import is_dead, read_ports

        found.update({f"{port.name} down": "1" for port in read_ports(context.root) if is_dead(port)})
        for port, counts in read_errors(context.root).items():
            found[f"{port} link_downed"] = str(counts.get("link_downed", 0))
            found.update({f"{port} {name}": str(count) for name, count in counts.items() if count})
    return found


def _used(links: Sequence[LinkCounters], nics: Sequence[Nic]) -> frozenset[str]:
    """The interfaces that jobs may use: with an address, an RDMA device, or a bond or bridge that has an address.

    Of a bridge's ports only hardware and bonds count: those of virtual machines come and go with them.
    """
    used = {nic.name for nic in nics if address_to_reach(nic) or nic.rdma}
    leading = {
        nic.name for nic in nics if nic.kind in {"bond", "bridge"} and address_to_reach(nic) and not is_decoy(nic.name)
    }
    masters = {link.name: link.master for link in links}
    for link in links:
        name = link.name if link.kind in {"ethernet", "infiniband", "bond"} else ""
        for _ in range(_MOST_MASTERS):
            name = masters.get(name, "")
            if name in leading:
                used.add(link.name)
    return frozenset(used)


def _namespace(context: CheckContext) -> str:
    """Whose interfaces are counted: an eth0 in a container is not that of the host."""
    try:
        return os.readlink(context.path("proc/self/ns/net"))[:64]
    except OSError:
        return ""


def seconds_between(earlier: Mapping[str, str], now: Mapping[str, str]) -> float | None:
    """How long ago the earlier look was; None: there was none since the boot and here, or it is too old."""
    try:
        seconds = float(now[_AT]) - float(earlier[_AT])
    except (KeyError, ValueError):
        return None
    is_same = all(earlier.get(name, "") == now[name] for name in (_BOOT, _NAMESPACE))
    is_usable = is_same and 0 <= seconds <= _LONGEST_S
    return seconds if is_usable else None


def growth(earlier: Mapping[str, str], now: Mapping[str, str], seconds: float) -> Iterator[NicErrors]:
    """What each interface has counted in between that is worth a word.

    An interface that has neither an address (or a bond or bridge with one) nor an RDMA device, at either look, carries
    no job's traffic: its host is not at fault. An address may be gone because its carrier is.

    Args:
        earlier: the earlier look.
        now: this one.
        seconds: how long that is.
    """

    def added(name: str) -> int:
        before, after = (_count(counts.get(name, "0")) for counts in (earlier, now))
        # A counter that has become smaller was reset.
        return after - before if after >= before else after

    for marker in now:
        name, _, counter = marker.rpartition(" ")
        if marker not in earlier or counter not in {"losses", "link_downed"}:
            continue
        is_used = counter == "link_downed" or any(f"{name} {_USED}" in counts for counts in (earlier, now))
        of_host = "network_interface" if is_used else ""
        losses = added(marker)
        if losses:
            is_down = f"{name} down" in now
            is_flapping = losses >= max(_FLAPS, min(_MOST_FLAPS, round(_FLAPS * seconds / _FLAPPING_S)))
            class_name = of_host if is_flapping or is_down else ""
            times = "once" if losses == 1 else f"{losses} times"
            what = f"has lost its carrier {times} in the last {_text(seconds)}{', and is down' if is_down else ''}"
            yield NicErrors(name, f"{name} {what}", class_name)
        if counter == "losses":
            errors, packets = added(f"{name} errors"), added(f"{name} packets")
            if errors >= _FEW_ERRORS and errors > packets * _ERROR_SHARE:
                what = f"{count_text(errors, 'error')} in {packets} packets"
                yield NicErrors(name, f"{name} has counted {what} in the last {_text(seconds)}", of_host)
            continue
        for kind, least in _RDMA.items():
            count = added(f"{name} {kind}")
            if count >= least * max(1.0, seconds / 3600):
                yield NicErrors(
                    name, f"{name} has counted {count} {kind} in the last {_text(seconds)}", "fabric_degraded"
                )


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0  # noqa: PLR2004 - digits of 2**64


def _text(seconds: float) -> str:
    return duration_text(seconds) if seconds < 7200 else f"{seconds / 3600:.0f} h"  # noqa: PLR2004
