"""Names, addresses and files of a cluster's hosts: plain values.

The management network is 10.77.0.0/16, the data network 10.78.0.0/16; node1 has 10.77.0.1 and 10.78.0.1. The name
``node1`` means the management address, ``node1-data`` the other, ``node1-v6`` the IPv6 address of the management NIC.
"""

from __future__ import annotations

from typing import NamedTuple

MANAGEMENT_NIC, DATA_NIC = "eth0", "eth1"
MOST_HOSTS = 250
# Shared by all hosts, and the home of the user.
SHARED, HOME = "/srv", "/srv/home"
# Everything of these is a host's own.
OWN_FOLDERS = ("/run", "/tmp", "/dev/shm", "/var/log")
SLURM_PORTS = {"SlurmctldPort": 6817, "SlurmdPort": 6818}

_SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/cluster_key
AuthorizedKeysFile /etc/ssh/cluster_key.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 200
PrintMotd no
PrintLastLog no
"""
_SSH_CONFIG = """\
Host *
  IdentityFile /etc/ssh/cluster_key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  GSSAPIAuthentication no
"""
# In the order of slurm.conf(5): what Slurm itself would take from the machine is said here.
_SLURM_CONF = {
    "ClusterName": "saferun",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "StateSaveLocation": "/run/slurm/slurmctld",
    "SlurmdSpoolDir": "/run/slurm/slurmd",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd.pid",
    "SlurmctldLogFile": "/run/slurm/slurmctld.log",
    "SlurmdLogFile": "/run/slurm/slurmd.log",
    "SlurmdParameters": "config_overrides",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "MpiDefault": "none",
    "SwitchType": "switch/none",
    "ReturnToService": "2",
    "SlurmctldTimeout": "120",
    "SlurmdTimeout": "300",
    "KillWait": "30",
}


class NodePlan(NamedTuple):
    """What a host is called.

    Attributes:
        number: from 1.
        name: what gethostname() says.
        management, data: IPv4 addresses. ``v6`` is the management NIC's, too.
    """

    number: int
    name: str
    management: str
    data: str
    v6: str

    @property
    def ports(self) -> tuple[str, str]:
        """The other ends of its two cables, in the namespace of the bridges."""
        return f"m{self.number}", f"d{self.number}"

    @property
    def all_ports(self) -> tuple[str, ...]:
        """These, and that of what pretends to be a container."""
        return (*self.ports, f"c{self.number}")


def node_plan(index: int) -> NodePlan:
    """The host of an index from 0."""
    number = index + 1
    return NodePlan(number, f"node{number}", f"10.77.0.{number}", f"10.78.0.{number}", f"fd00:77::{number:x}")


def bridge_commands() -> list[str]:
    """``ip -batch`` lines for the two networks."""
    # With STP and multicast snooping a port would be silent at first.
    settings = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    return ["link set lo up"] + [
        line for name in ("mgmt", "data") for line in (f"link add {name} {settings}", f"link set {name} up")
    ]


def cable_commands(node: NodePlan, pid: int) -> list[str]:
    """``ip -batch`` lines, for the namespace of the bridges, that give the host of a process its NICs."""
    number = node.number
    container = node.all_ports[-1]
    lines = []
    for port, bridge, nic, network in zip(
        node.ports, ("mgmt", "data"), (MANAGEMENT_NIC, DATA_NIC), (0x4D, 0x4E), strict=True
    ):
        # A host that was switched off comes back with the addresses that its peers still know.
        mac = f"02:00:0a:{network:02x}:{number >> 8:02x}:{number & 255:02x}"
        lines += [
            f"link add {port} type veth peer name {nic} address {mac} netns {pid}",
            f"link set {port} master {bridge} up",
        ]
    return [*lines, f"link add {container} type veth peer name vethctr netns {pid}", f"link set {container} up"]


def address_commands(node: NodePlan) -> list[str]:
    """``ip -batch`` lines inside a host. No default route: nothing leaves the two networks."""
    return [
        "link set lo up",
        f"addr add {node.management}/16 brd + dev {MANAGEMENT_NIC}",
        f"addr add {node.v6}/64 dev {MANAGEMENT_NIC} nodad",
        f"addr add {node.data}/16 brd + dev {DATA_NIC}",
        f"link set {MANAGEMENT_NIC} up",
        f"link set {DATA_NIC} up",
        # As a host looks that runs containers: a bridge that is up and has the same address everywhere.
        "link add docker0 type bridge forward_delay 0 mcast_snooping 0",
        "addr add 172.17.0.1/16 brd + dev docker0",
        "link set vethctr master docker0 up",
        "link set docker0 up",
    ]


def hosts_file(nodes: list[NodePlan]) -> str:
    """/etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 ip6-localhost"]
    for node in nodes:
        lines += [f"{node.management} {node.name}", f"{node.data} {node.name}-data", f"{node.v6} {node.name}-v6"]
    return "\n".join(lines) + "\n"


def passwd_file(machine: str) -> str:
    """The machine's /etc/passwd with another home for root: a shell starts there at every ssh."""
    lines = [line for line in machine.splitlines() if not line.startswith("root:")]
    return "\n".join([f"root:x:0:0:root:{HOME}:/bin/bash", *lines]) + "\n"


def slurm_conf(nodes: list[NodePlan], options: dict[str, str]) -> str:
    """slurm.conf: node1 is the controller; every host has more CPUs than it really has, so that tasks find room."""
    settings = {**_SLURM_CONF, "SlurmctldHost": nodes[0].name, **{k: str(v) for k, v in SLURM_PORTS.items()}, **options}
    names = f"node[1-{len(nodes)}]"
    return "\n".join(
        [
            *(f"{name}={value}" for name, value in settings.items()),
            f"NodeName={names} CPUs=64 RealMemory=100000 State=UNKNOWN",
            f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4 State=UP",
            "",
        ]
    )


def common_files(nodes: list[NodePlan], machine_passwd: str) -> dict[str, tuple[int, bytes]]:
    """Path -> mode and content of what is the same on all hosts, keys excepted."""
    texts = {
        "/etc/hosts": hosts_file(nodes),
        "/etc/passwd": passwd_file(machine_passwd),
        # A name that is not in /etc/hosts does not exist, and is not asked for elsewhere.
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\n",
        "/etc/resolv.conf": "",
        "/etc/ssh/sshd_config": _SSHD_CONFIG,
        "/etc/ssh/ssh_config": _SSH_CONFIG,
    }
    return {path: (0o644, text.encode()) for path, text in texts.items()}
