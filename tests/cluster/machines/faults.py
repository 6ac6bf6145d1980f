"""What can go wrong with a host's networks, ports and power, done to it on purpose; and the way back."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from tests.cluster.machines import plan
from tests.cluster.machines.ailments import AilingMachine
from tests.cluster.machines.host import Machine
from tests.cluster.machines.process import DEADLINE_S, Process

# A process that holds a port. It answers nobody, so that its port is in use and who connects waits forever; or it
# gives everybody the same answer.
_OCCUPY = """
import signal, socket, sys
listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
if socket.has_dualstack_ipv6():
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("", int(sys.argv[1])))
listener.listen(64)
print("occupied", flush=True)
while not sys.argv[2]:
    signal.pause()
import threading
def serve(connection):
    try:
        if connection.recv(1 << 16):
            connection.sendall(sys.argv[2].encode())
        connection.close()
    except OSError:
        pass
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
_VERDICTS = {
    "drop": "drop",
    "reject": "reject with tcp reset",
    "prohibit": "reject with icmpx type admin-prohibited",
}
# Names of nftables tables are the host's own. A firewall lets a host talk to itself.
_TABLE = "inet faults"
_NEW_TABLE = f"""
add table {_TABLE}
add chain {_TABLE} incoming {{ type filter hook input priority 0; policy accept; }}
add chain {_TABLE} outgoing {{ type filter hook output priority 0; policy accept; }}
"""

RELAY = "tests.cluster.machines.relay"
_OFFLOADS_OFF = ("tx", "off", "tso", "off", "gso", "off", "gro", "off")
_OFFLOADS_ON = tuple("on" if word == "off" else word for word in _OFFLOADS_OFF)

_LOOK_AGAIN_S = 0.005

Ports = int | tuple[int, int]


class Host(AilingMachine):
    """A host, and what can be done to it. Every fault is noted in ``faults``."""

    _relays: Mapping[str, subprocess.Popen[bytes]] = MappingProxyType({})
    _throttled: frozenset[str] = frozenset()

    # ----------------------------------------------------------------------------------------------------- its NICs

    def _port(self, nic: str) -> str:
        """The other end of a NIC's cable."""
        return dict(zip((plan.MANAGEMENT_NIC, plan.DATA_NIC), self.node.ports, strict=True))[nic]

    def _bridge_port(self, nic: str) -> str:
        """What of a NIC is part of the bridge: the cable's other end, or what a relay carries it on to."""
        return f"s{self._port(nic)}" if nic in self._relays else self._port(nic)

    def cut(self, nic: str, how: Literal["network", "cable", "down"] = "network") -> None:
        """Cut a NIC off.

        Args:
            nic: ``eth0`` (management) or ``eth1`` (data).
            how: ``network``: the way beyond the first switch is gone; the host's link stays up, and nobody tells it.
                ``cable``: it is unplugged (no carrier). ``down``: as ``ip link set down`` on the host: others get no
                answer, itself "Network is unreachable" at once.
        """
        self._note(f"cut {nic} ({how})")
        if how == "network":
            self.at_bridges("ip", "link", "set", self._bridge_port(nic), "nomaster")
        elif how == "cable":
            self.at_bridges("ip", "link", "set", self._port(nic), "down")
        else:
            self.in_network("ip", "link", "set", nic, "down")

    def heal(self, nic: str) -> None:
        """Undo whatever ``cut`` did to a NIC."""
        bridge = "mgmt" if nic == plan.MANAGEMENT_NIC else "data"
        self.in_network("ip", "link", "set", nic, "up")
        self.at_bridges("ip", "link", "set", self._port(nic), "up")
        self.at_bridges("ip", "link", "set", self._bridge_port(nic), "master", bridge)

    def slow(self, nic: str, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Make a NIC slow and lossy.

        Args:
            nic: ``eth0`` or ``eth1``.
            delay_ms: what every frame takes longer, in both directions: a round trip takes twice that.
            loss: the part of all frames, from 0 to 1, that is lost.
        """
        self._relay(nic, f"slow {nic} {delay_ms:g} ms {loss:g}", f"{delay_ms:g}", f"{loss:g}")

    def swallow(self, nic: str, longest_bytes: int = 1000) -> None:
        """Let frames that are longer vanish on the way to and from a NIC; nobody is told that they are too long."""
        self._relay(nic, f"black hole {nic} {longest_bytes} bytes", "0", "0", str(longest_bytes))

    def _relay(self, nic: str, fault: str, *settings: str) -> None:
        self.unslow(nic)
        self._note(fault)
        port = self._port(nic)
        near, far = f"r{port}", f"s{port}"
        bridge = "mgmt" if nic == plan.MANAGEMENT_NIC else "data"
        self.at_bridges("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        self.in_network("ethtool", "-K", nic, *_OFFLOADS_OFF)
        self.at_bridges("ethtool", "-K", far, *_OFFLOADS_OFF)
        self.at_bridges("ip", "link", "set", near, "up")
        self.at_bridges("ip", "link", "set", port, "nomaster")
        self.at_bridges("ip", "link", "set", far, "master", bridge, "up")
        enter = ("nsenter", f"--target={self._bridges_pid}", "--net", "--")
        program = (sys.executable, "-S", "-m", RELAY, port, near, *settings)
        relay = subprocess.Popen([*enter, *program], stdout=subprocess.PIPE, cwd=self.environ["PYTHONPATH"])
        assert relay.stdout is not None
        self._relays = {**self._relays, nic: relay}
        assert relay.stdout.readline() == b"ready\n"

    def unslow(self, *nics: str) -> None:
        """Undo ``slow`` and ``swallow`` of these NICs; of all where none is named."""
        for nic in nics or tuple(self._relays):
            relay = self._relays.get(nic)
            if relay is None:
                continue
            self._relays = {name: other for name, other in self._relays.items() if name != nic}
            relay.kill()
            relay.communicate()
            self.at_bridges("ip", "link", "del", f"r{self._port(nic)}")
            if self.is_on:
                self.in_network("ethtool", "-K", nic, *_OFFLOADS_ON)
                self.heal(nic)

    def throttle(self, nic: str, bytes_s: int) -> None:
        """Let no more than so many bytes a second through a NIC, in both directions."""
        self._note(f"throttle {nic} {bytes_s} bytes/s")
        # Not less than what a timer of the kernel lets through at once, and than a segment that is cut later.
        limit = ("root", "tbf", "rate", f"{8 * bytes_s}bit", "burst", "128kb", "latency", "200ms")
        self.in_network("tc", "qdisc", "replace", "dev", nic, *limit)
        self.at_bridges("tc", "qdisc", "replace", "dev", self._port(nic), *limit)
        self._throttled |= {nic}

    def unthrottle(self) -> None:
        """Undo every ``throttle``."""
        for nic in self._throttled:
            self.in_network("tc", "qdisc", "del", "dev", nic, "root")
            self.at_bridges("tc", "qdisc", "del", "dev", self._port(nic), "root")
        self._throttled = frozenset()

    # -------------------------------------------------------------------------------------------------- the firewall

    def firewall(
        self,
        port: Ports | None = None,
        how: Literal["drop", "reject", "prohibit"] = "drop",
        *,
        peer: Machine | None = None,
        nic: str | None = None,
        new_only: bool = False,
    ) -> None:
        """Let no TCP segment in, on top of what is firewalled already; what the host sends to itself passes.

        Args:
            port: of this host; a pair is a range; None is all ports.
            how: ``drop``: silence. ``reject``: a reset, as where nobody listens. ``prohibit``: an ICMP error, which is
                "No route to host" for who connects.
            peer: only what comes from this host.
            nic: only what comes in here.
            new_only: connections that exist live on.
        """
        self._note(f"firewall {how} {port}")
        match = ["iif != lo"]
        if nic is not None:
            match.append(f"iifname {nic}")
        if new_only:
            match.append("tcp flags & (syn | ack) == syn")
        if isinstance(port, tuple):
            match.append(f"tcp dport {port[0]}-{port[1]}")
        else:
            match.append("meta l4proto tcp" if port is None else f"tcp dport {port}")
        for source in _sources(peer):
            rule = " ".join([*match[:1], source, *match[1:], _VERDICTS[how]])
            self._nft(f"add rule {_TABLE} incoming {rule}")

    def block_peer(self, other: Machine) -> None:
        """Let nothing pass between this host and another, in either direction, on both networks; silently."""
        self._note(f"block {other.name}")
        for source in _sources(other):
            self._nft(
                f"add rule {_TABLE} incoming {source} drop\n"
                f"add rule {_TABLE} outgoing {source.replace('saddr', 'daddr')} drop"
            )

    def deafen(self, other: Machine, nic: str) -> None:
        """Let nothing in that another host sends over a NIC. What this host sends arrives there."""
        self._note(f"deaf to {other.name} on {nic}")
        for source in _sources(other):
            self._nft(f"add rule {_TABLE} incoming iifname {nic} {source} drop")

    def unfirewall(self) -> None:
        """Undo every ``firewall``, ``block_peer`` and ``deafen`` of this host."""
        self._nft(f"flush table {_TABLE}")

    def _nft(self, lines: str) -> None:
        self.in_network("nft", "-f", "-", stdin=f"{_NEW_TABLE}\n{lines}\n")

    # -------------------------------------------------------------------------------------------------------- names

    def break_name(self, name: str, address: str | None) -> None:
        """Let this host resolve a name to an address that is wrong, or not at all (None)."""
        self._note(f"name {name}")
        path = self.path("/etc/hosts")
        kept = [line for line in path.read_text().splitlines() if name not in line.split()[1:]]
        path.write_text("\n".join([*([f"{address} {name}"] if address else []), *kept, ""]))

    def mend_names(self) -> None:
        """Undo every ``break_name`` of this host."""
        self.path("/etc/hosts").write_text(self.hosts_file)

    hosts_file = ""

    # -------------------------------------------------------------------------------------------- ports and power

    def occupy(self, port: int, *, answer: str = "") -> Process:
        """Start a process that listens on a port; returns when it does.

        Args:
            port: which.
            answer: what whoever says something gets back, before the connection is closed; else nobody gets anything.
        """
        self._note(f"occupy {port}")
        process = self.popen([sys.executable, "-S", "-c", _OCCUPY, str(port), answer])
        process.wait_for("^occupied$")
        return process

    def power_off(self) -> None:
        """Switch it off without a word: its NICs are silent before its processes can say good-bye."""
        self._note("power off")
        for port in self.node.ports:
            self.at_bridges("ip", "link", "set", port, "down")
        self.die()
        self.unslow()

    def die(self) -> None:
        """Kill all its processes at once, as a container's end does: the kernel closes their connections properly."""
        self._note("death")
        pidfd = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            give_up_at = time.monotonic() + DEADLINE_S
            while not select.select([pidfd], [], [], _LOOK_AGAIN_S)[0]:
                assert time.monotonic() < give_up_at, f"{self.name} cannot be switched off"
                # PID 1 ends when all others have been waited for, and these have no parent but the tests.
                for process in self.started:
                    process.poll()
        finally:
            os.close(pidfd)
        self._throttled = frozenset()
        self.forget()


def _sources(peer: Machine | None) -> list[str]:
    if peer is None:
        return [""]
    return [f"ip saddr {{ {', '.join(peer.addresses)} }}", f"ip6 saddr {peer.node.v6}"]
