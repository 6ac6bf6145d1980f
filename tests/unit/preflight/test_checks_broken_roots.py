"""Containers whose /proc, /sys and /dev are missing, empty or garbage: no check raises there, and none refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from saferun.linux.process_room import may_be_short_of_processes
from saferun.preflight.checks.all_checks import CHECKS
from tests.unit.preflight.host_roots import Root

FILES = (
    *("proc/self/limits", "proc/self/status", "proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo"),
    *("proc/cpuinfo", "proc/stat", "proc/net/if_inet6", "proc/driver/nvidia/version", "sys/class/net/eth0"),
    *("sys/class/infiniband/mlx5_0", "sys/devices/system/cpu/online", "sys/fs/cgroup/pids.max", "etc/nccl.conf"),
    *("proc/sys/kernel/random/boot_id", "proc/self/ns/net", "dev/kmsg"),
    *("dev/kfd", "sys/class/kfd/kfd/topology/nodes/1/properties"),
)
GARBAGE = {
    "bytes": b"\xff\x00\xfe garbage -1\n::::\n",
    "numbers": b"0::/../..\nMax processes 99999999999999999999 -5 x\nMemAvailable: x kB\n",
    "nothing": b"",
}


def root_of(kind: str, path: Path) -> Root:
    root = Root(path / kind)
    if kind == "folders":
        for name in FILES:
            (root.path / name).mkdir(parents=True)
    for name in FILES if kind in GARBAGE else ():
        root.write(name, GARBAGE[kind])
    return root


@pytest.mark.parametrize("vendor", ["none", "amd"])
@pytest.mark.parametrize("spans_hosts", [False, True])
@pytest.mark.parametrize("kind", ["missing", "folders", *GARBAGE])
def test_a_broken_root_stops_and_breaks_no_check(tmp_path: Path, kind: str, spans_hosts: bool, vendor: str) -> None:
    """What cannot be read is not known, and what is not known refuses nobody."""
    root = root_of(kind, tmp_path)
    environ = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    earlier = (("boot", "\0"), ("at_s", "1"), ("eth0 losses", "x"))
    context = root.context(environ, nproc=8, spans_hosts=spans_hosts, vendor=vendor, python="python3", earlier=earlier)
    context = context._replace(since=1.0, storage=("/proc/meminfo", "\0"))
    for check in CHECKS:
        assert check.check(context).verdict in {"ok", "skipped", "warn"}, check.name
    assert not may_be_short_of_processes(8, str(root.path))
