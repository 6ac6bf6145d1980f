"""A network interface of a host. Pure."""

from __future__ import annotations

from saferun.model import Value


class Nic(Value):
    """A network interface of a host.

    Attributes:
        name: ``eth0``.
        addresses: without prefix lengths, IPv4 first.
        networks: the same with prefix lengths, in the same order: ``10.0.0.1/24``.
        is_up: administratively up and with a carrier.
        mtu: in bytes.
        kind: ``loopback``, ``ethernet``, ``infiniband``, ``bridge``, ``bond``, ``vlan``, ``tunnel``, ``virtual``.
        speed_bits_s: as the driver reports it; 0: unknown.
        labels: other names under which libraries find its IPv4 addresses: ``eth0:1``, or its name before a rename.
        rdma: its RDMA devices, with their ports: ``mlx5_0:1``.
    """

    name: str
    addresses: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    is_up: bool = True
    mtu: int = 1500
    kind: str = "ethernet"
    speed_bits_s: int = 0
    labels: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
