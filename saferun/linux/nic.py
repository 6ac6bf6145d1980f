"""A network interface of a host. Pure."""

from __future__ import annotations

from saferun.model import Value

# What containers, virtual machines and their networks leave on a host: they lead nowhere, or to the same address on
# every host.
_DECOYS = (
    *("docker", "podman", "cni", "veth", "virbr", "vnet", "vmnet", "vboxnet", "lxcbr", "lxdbr", "lxc", "incusbr"),
    *(
        "flannel",
        "cali",
        "vxlan.calico",
        "cilium",
        "weave",
        "antrea",
        "tunl",
        "kube-",
        "nodelocaldns",
        "ovn-",
        "genev_",
    ),
    *("ifb", "dummy", "sit", "ip6tnl", "ip6gre", "gre", "gretap", "erspan", "tmfifo_net"),
)
# They have the addresses of services: the same ones on every host, and each host answers at them itself.
_SERVICES = ("kube-ipvs", "nodelocaldns")
_DOCKER_NETWORK = "br-"  # and twelve hexadecimal digits; br-ex and its like are often the way out
_HEXADECIMAL = frozenset("0123456789abcdef")


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


def is_decoy(name: str) -> bool:
    """Whether an interface's name says that it leads to containers or virtual machines of the same host."""
    if name.startswith(_DOCKER_NETWORK):
        digits = name.removeprefix(_DOCKER_NETWORK)
        return len(digits) == 12 and _HEXADECIMAL.issuperset(digits)  # noqa: PLR2004 - as docker names its networks
    return name.startswith(_DECOYS)


def has_services(name: str) -> bool:
    """Whether an interface's name says that its addresses are those of services of a cluster, and not of this host."""
    return name.startswith(_SERVICES)
