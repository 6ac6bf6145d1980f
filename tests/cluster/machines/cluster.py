"""A cluster of real hosts on one machine, as a context manager; ``__init__.py`` shows the whole picture."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.cluster.machines import plan
from tests.cluster.machines.faults import Host
from tests.cluster.machines.host import all_pids, command_line, is_alive, parent_of, start_of
from tests.cluster.machines.keeper import MODULE, NAME

REPOSITORY = Path(__file__).resolve().parents[3]
_DEADLINE_S = 90.0
_END_DEADLINE_S = 10.0
_LOOK_AGAIN_S = 0.01
# All network namespaces share one table of neighbours; a full mesh of 64 hosts on two networks needs 8064 entries.
_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
_FEW_HOSTS = 16
# Added to what was there before: so a raised limit tells by itself what to put back, after a crash too.
_RAISED_BY = 100_000


class Cluster:
    """Hosts on two networks. Made by ``start``.

    Attributes:
        hosts: node1 is ``hosts[0]``.
        environ: the environment of what is started: the tests' Python is first on PATH, saferun can be imported.
        keeper_pid: the process whose end is the cluster's end.
    """

    def __init__(self, keeper_pid: int, pids: Mapping[int, int], *, slurm: bool) -> None:
        self.keeper_pid = keeper_pid
        self.slurm = slurm
        self.environ = launch_environ()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._stderr_fd = -1
        self._unread = b""
        self.hosts: list[Host] = []
        self._take_in(pids)
        self._own_processes: dict[int, int] = {}

    @classmethod
    def start(
        cls,
        hosts: int = 4,
        *,
        slurm: bool = False,
        visible: Sequence[str | os.PathLike[str]] = (),
        slurm_options: Mapping[str, str | int] | None = None,
        owned: bool = True,
        owner: tuple[int, int] | None = None,
    ) -> Cluster:
        """Set up a cluster, after what dead tests have left behind was ended.

        Args:
            hosts: how many.
            slurm: start Slurm on them, node1 being the controller.
            visible: folders that have to be seen on every host though they lie in /tmp, /run, /dev/shm or /var/log.
                The repository and the tests' Python always are.
            slurm_options: lines for slurm.conf.
            owned: the cluster ends with this process.
            owner: pid and start of the owner, where it is not this process.

        Raises:
            RuntimeError: it cannot be set up; the message says why.
        """
        assert 1 <= hosts <= plan.MOST_HOSTS
        end_stale()
        _raise_neighbour_limit(hosts)
        spec = {
            "owner": (owner or (os.getpid(), start_of(os.getpid()))) if owned else None,
            "hosts": hosts,
            "slurm": slurm,
            "slurm_options": {name: str(value) for name, value in (slurm_options or {}).items()},
            "visible": visible_folders(visible),
        }
        stderr_fd = os.memfd_create("keeper")
        # -S: site packages are none of the keeper's, and it should be small: every host is a copy of it.
        keeper = subprocess.Popen(
            [sys.executable, "-S", "-m", MODULE, json.dumps(spec)],
            stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr_fd,
            bufsize=0,
            cwd=REPOSITORY,
            env={"PATH": launch_environ()["PATH"], "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        cluster = cls(keeper.pid, {}, slurm=slurm)
        cluster._keeper = keeper
        cluster._stderr_fd = stderr_fd
        try:
            cluster._take_in(cluster._answer())
            if slurm:
                cluster.await_slurm()
        except BaseException:
            cluster.close()
            raise
        cluster._own_processes = {pid: start_of(pid) for host in cluster.hosts for pid in host.pids()}
        return cluster

    @classmethod
    def attach(cls, keeper_pid: int) -> Cluster:
        """The cluster of a keeper that another process has started. Leaving it leaves it up."""
        spec = spec_of(keeper_pid)
        assert spec is not None, f"{keeper_pid} is no keeper"
        named = {_name_of(pid): pid for pid in all_pids() if parent_of(pid) == keeper_pid}
        nodes = (plan.node_plan(index) for index in range(spec["hosts"]))
        return cls(keeper_pid, {n.number - 1: named[n.name] for n in nodes if n.name in named}, slurm=spec["slurm"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def close(self) -> None:
        """End everything that runs in it, and the cluster itself. Nothing of it is left when this returns."""
        for host in self.hosts:
            host.end_started()
            host.unslow()
        if self._keeper is None:
            return
        end_keeper(self._keeper.pid)
        self._keeper.wait()
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                stream.close()
        os.close(self._stderr_fd)
        self._keeper = None
        _restore_neighbour_limit()

    # -------------------------------------------------------------------------------------------------------- hosts

    @property
    def shared(self) -> Path:
        """Where the folder that all hosts share, /srv inside, is to be found from outside."""
        return Path(f"/proc/{self.keeper_pid}/root{plan.SHARED}")

    def power_on(self, *hosts: Host) -> None:
        """Switch hosts on, from a clean state; those that are on are switched off first. Their objects live on."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        for host in hosts:
            if host.is_on:
                host.power_off()
        self._keeper.stdin.write(json.dumps({"boot": [host.index for host in hosts]}).encode() + b"\n")
        self._take_in(self._answer())
        if self.slurm:
            self.await_slurm()

    def heal(self) -> None:
        """Undo every fault: hosts that are off are switched on, networks, firewalls, names and all are as at first."""
        if off := [host for host in self.hosts if not host.is_on]:
            self.power_on(*off)
        for host in self.hosts:
            host.unfirewall()
            host.unslow()
            host.unthrottle()
            host.mend_names()
            host.cure()
            for nic in (plan.MANAGEMENT_NIC, plan.DATA_NIC):
                host.heal(nic)

    def strays(self) -> list[str]:
        """What runs besides the hosts' own daemons: ``node2 4711: command line``."""
        return [
            f"{host.name} {pid}: {command_line(pid)}"
            for host in self.hosts
            for pid in host.pids()
            if self._own_processes.get(pid) != start_of(pid)
        ]

    def is_pristine(self, timeout_s: float = 1.0) -> bool:
        """Whether it is as it was at first: no fault was done to it, its daemons run, and nothing else does."""
        if any(host.faults for host in self.hosts):
            return False
        for host in self.hosts:
            host.end_started()
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if any(start_of(pid) != start for pid, start in self._own_processes.items()):
                return False
            if not self.strays() and (not self.slurm or self._idle_in_slurm() == len(self.hosts)):
                return True
            # Each look is many processes looked at, and one of Slurm's started.
            time.sleep(5 * _LOOK_AGAIN_S)
        return False

    # -------------------------------------------------------------------------------------------------------- Slurm

    def await_slurm(self, hosts: int | None = None, timeout_s: float = 60.0) -> None:
        """Wait until so many hosts, by default all, are idle in Slurm.

        Raises:
            RuntimeError: it does not happen.
        """
        wanted = len(self.hosts) if hosts is None else hosts
        give_up_at = time.monotonic() + timeout_s
        while self._idle_in_slurm() < wanted:
            if time.monotonic() > give_up_at:
                said = self.hosts[0].run(["sinfo", "-N", "-l"], stderr=subprocess.STDOUT).stdout
                raise RuntimeError(f"Slurm has not {wanted} idle hosts after {timeout_s:g} s: {said}")
            time.sleep(5 * _LOOK_AGAIN_S)

    def _idle_in_slurm(self) -> int:
        done = self.hosts[0].run(["sinfo", "--noheader", "--states=idle", "--format=%D %T"])
        # With an asterisk a host does not answer.
        return sum(int(count) for count in re.findall(r"^(\d+) idle$", done.stdout, re.MULTILINE))

    # ------------------------------------------------------------------------------------------------------- keeper

    def _take_in(self, pids: Mapping[int, int]) -> None:
        old = {host.index: host for host in self.hosts}
        for index, pid in sorted(pids.items()):
            if index in old:
                old[index].pid = pid
            else:
                self.hosts.append(Host(plan.node_plan(index), pid, self.keeper_pid, self.environ))
        for host in self.hosts:
            host.hosts_file = plan.hosts_file([other.node for other in self.hosts])

    def _answer(self) -> dict[int, int]:
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        give_up_at = time.monotonic() + _DEADLINE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._keeper.stdout], [], [], max(0.0, give_up_at - time.monotonic()))
            chunk = os.read(self._keeper.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                said = os.pread(self._stderr_fd, 1 << 16, 0).decode(errors="replace")
                raise RuntimeError(f"no cluster: the keeper {'ended' if ready else 'does not answer'}: {said[-3000:]}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise RuntimeError(f"no cluster: {told['error']}")
        return {int(index): pid for index, pid in told["pids"].items()}


# --------------------------------------------------------------------------------------------------- what is started


def launch_environ() -> dict[str, str]:
    """The environment of what is started in a host."""
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:{system}",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": plan.HOME,
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
    }


def visible_folders(more: Sequence[str | os.PathLike[str]] = ()) -> list[str]:
    """What every host has to see, wherever it lies."""
    paths = {str(REPOSITORY), sys.prefix, sys.base_prefix, *(os.path.realpath(path) for path in more)}
    return sorted(paths)


# ---------------------------------------------------------------------------------------------------- what was left


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def spec_of(pid: int) -> dict[str, Any] | None:
    """What a process keeps, if it is a keeper."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return None
    if MODULE.encode() not in words[:-1] or not is_alive(pid):
        return None
    # Every host is a fork of a keeper, under a name of its own.
    if _name_of(pid) != NAME:
        return None
    with contextlib.suppress(ValueError):
        spec: dict[str, Any] = json.loads(words[-1])
        return spec
    return None


def keepers() -> dict[int, dict[str, Any]]:
    """Pid and spec of every keeper of this machine."""
    found = {pid: spec_of(pid) for pid in all_pids()}
    return {pid: spec for pid, spec in found.items() if spec is not None}


def end_keeper(pid: int) -> None:
    """End a cluster by its keeper, and return when its hosts are gone."""
    hosts = [child for child in all_pids() if parent_of(child) == pid]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    give_up_at = time.monotonic() + _END_DEADLINE_S
    # A host that still has somebody else's child in it, who has not waited for it, is dead all the same.
    while any(is_alive(host) for host in hosts) and time.monotonic() < give_up_at:
        time.sleep(_LOOK_AGAIN_S)


def end_stale() -> list[int]:
    """End clusters whose owner is dead, and put back what they had changed on the machine. Returns their keepers."""
    ended = []
    for pid, spec in keepers().items():
        if spec["owner"] is not None and start_of(spec["owner"][0]) != spec["owner"][1]:
            end_keeper(pid)
            ended.append(pid)
    _restore_neighbour_limit()
    return ended


def _raise_neighbour_limit(hosts: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        limit = int(_NEIGHBOURS.read_text())
        if hosts > _FEW_HOSTS and limit < _RAISED_BY:
            _NEIGHBOURS.write_text(str(limit + _RAISED_BY))


def _restore_neighbour_limit() -> None:
    if any(spec["hosts"] > _FEW_HOSTS for spec in keepers().values()):
        return
    with contextlib.suppress(OSError, ValueError):
        if (limit := int(_NEIGHBOURS.read_text())) >= _RAISED_BY:
            _NEIGHBOURS.write_text(str(limit - _RAISED_BY))
