"""A job over the hosts of a cluster to which something happens: when which saferun said what, and how it all ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.jobs import Job, by_hand, ranks_on
from tests.cluster.machines.host import command_line
from tests.cluster.machines.process import DEADLINE_S
from tests.process.launching import is_coordinator

if TYPE_CHECKING:
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# Short enough for a test, long enough for a machine whose processors have other things to do.
HANG_TIMEOUT_S, HOST_TIMEOUT_S = 4.0, 4.0
# How long a host may take to find out by connecting that another one is not there: the kernel needs 3.1 s for that.
KNOCK_S = 6.0
# That a supervisor was killed is said by what watches over it.
_SENTENCE = re.compile(r"^saferun: (?!the supervisor on \S+ was killed)", re.MULTILINE)
_LOOK_AGAIN_S = 0.02

# Ranks without torch that go on step by step, none without the others. Their port is the job's and the attempt's own,
# and none of those that the kernel gives to connections.
STEPS = """
port = 10000 + int(os.environ["MASTER_PORT"]) % 10000 + ATTEMPT
if RANK == 0:
    listener = socket.create_server(("", port))
    peers = [listener.accept()[0] for _ in range(WORLD - 1)]
else:
    give_up_at = time.monotonic() + 60
    while True:
        try:
            peers = [socket.create_connection((os.environ["MASTER_ADDR"], port))]
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)


def hear(peer):
    if not peer.recv(1):
        raise ConnectionResetError("the other end has closed the connection")


for step in range(1 << 30):
    for peer in peers if RANK == 0 else ():
        hear(peer)
    for peer in peers:
        peer.sendall(b".")
    for peer in peers if RANK > 0 else ():
        hear(peer)
    if step == 3:
        tell("steps")
    time.sleep(0.05)
"""

# The same with gloo.
GLOO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1000)
for step in range(1 << 30):
    dist.all_reduce(ones)
    if step == 3:
        tell("steps")
    time.sleep(0.02)
"""

# The same until the test releases "end"; what a rank does between two steps can be seen.
GLOO_UNTIL_RELEASED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(300, 300)
step = 0
while True:
    over = torch.tensor([float(RANK == 0 and os.path.exists(f"{FOLDER}/release.end"))])
    dist.all_reduce(over)
    if over.item():
        break
    for _ in range(20):
        ones = torch.tanh(ones @ ones)
    step += 1
    if step == 3:
        tell("steps")
    time.sleep(0.02)
# What gloo's threads still hold may abort a process whose interpreter ends, and is nothing that is looked at here.
dist.barrier()
getattr(os, "_exit")(0)
"""


class FaultedJob:
    """One saferun per host, started by hand.

    Args:
        cluster: where.
        folder: an empty folder that all hosts share.
        program: what the ranks run.
        options: saferun's, on all hosts.
        hosts: where it is started, in the order of node ranks; on all unless given.
        timeouts: whether hosts and hangs are given up after a few seconds.
        more: as for ``jobs.by_hand``.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        program: str,
        *options: object,
        hosts: Sequence[Host] | None = None,
        **more: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.hosts = list(cluster.hosts if hosts is None else hosts)
        self.run_dir = folder / "run"
        limits = ("--host-timeout", HOST_TIMEOUT_S, "--hang-timeout", HANG_TIMEOUT_S)
        words = [str(word) for word in ("--run-dir", self.run_dir, *limits, *options)]
        self.fault_at = time.monotonic()
        self.job: Job = by_hand(cluster, folder, program, *words, hosts=self.hosts, **more)
        self.of = {host.name: process for host, process in zip(self.hosts, self.job.processes, strict=True)}
        self._seen: dict[str, int] = dict.fromkeys(self.of, 0)

    # ------------------------------------------------------------------------------------------------- before the fault

    def await_steps(self, attempt: int = 0) -> None:
        """Wait until every rank has done some steps."""
        self.job.hear("steps", len(self.hosts), attempt=attempt)

    def rank(self, host: Host) -> int:
        """Pid of the rank on a host."""
        (pid,) = ranks_on(host)
        return pid

    def saferun(self, host: Host) -> int:
        """Pid of a host's saferun."""
        return self.of[host.name].pid

    def coordinator(self, host: Host) -> int:
        """Pid of a host's coordinator."""
        (pid,) = filter(is_coordinator, host.pids(r"coordinator/__main__\.py"))
        return pid

    def now(self) -> None:
        """The fault happens now: seconds count from here, and what was said before is left out of ``said``."""
        self._seen = {name: len(process.err) for name, process in self.of.items()}
        self.fault_at = time.monotonic()

    # ---------------------------------------------------------------------------------------------------- after it

    def said(self, host: Host) -> str:
        """What a host's saferun has said since the fault, without the output of its ranks."""
        lines = self.of[host.name].err[self._seen[host.name] :].splitlines()
        return "\n".join(line for line in lines if not line.startswith("["))

    def wait_said(self, host: Host, pattern: str) -> None:
        """Wait until a host's saferun says it; how many seconds after the fault that is, is printed (pytest -rP)."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.said(host)):
            assert time.monotonic() < give_up_at, self.story(f"{host.name} does not say {pattern!r}")
            time.sleep(_LOOK_AGAIN_S)
        print(f"{pattern!r} after {time.monotonic() - self.fault_at:.1f} s")

    def end(self, *hosts: Host) -> dict[str, int]:
        """Wait until the saferuns of these hosts, by default of all, have ended; returns their exit codes, by host.

        How many seconds after the fault the first of them said anything, and all were gone, is printed (pytest -rP).
        """
        return end_all({"": self}, *hosts)[""]

    def incident(self, host: Host | None = None) -> dict[str, Any] | None:
        """The last incident of the report: of the whole job, or the one that a host has kept for itself."""
        path = (self.run_dir if host is None else self.run_dir / host.name) / "report.json"
        if not path.exists():
            return None
        incidents: list[dict[str, Any]] = json.loads(path.read_text())["incidents"]
        return incidents[-1]

    def lost_hosts(self) -> dict[str, str]:
        """Hosts that the last incident of the job calls lost, with the reason."""
        incident = self.incident() or {"hosts": []}
        return {host["name"]: host["lost_reason"] for host in incident["hosts"] if host["lost_reason"]}

    def assert_nothing_left(self, timeout_s: float = DEADLINE_S) -> None:
        """Neither a process of the job nor a private folder of it is on any host that is on."""
        on = [host for host in self.hosts if host.is_on]

        give_up_at = time.monotonic() + timeout_s
        while left := [found for host in on for found in _traces(host)]:
            assert time.monotonic() < give_up_at, self.story(f"is left: {left}")
            time.sleep(_LOOK_AGAIN_S)

    def story(self, what: str) -> str:
        """A message for a failed assertion, with all consoles."""
        return self.job.story(what)


def end_all(jobs: Mapping[str, FaultedJob], *hosts: Host) -> dict[str, dict[str, int]]:
    """The same of several jobs that run at once."""
    give_up_at = time.monotonic() + DEADLINE_S
    first_s: dict[str, float] = {}
    codes: dict[str, dict[str, int]] = {}
    while len(codes) < len(jobs):
        for name, job in jobs.items():
            chosen = hosts or tuple(job.hosts)
            seconds = time.monotonic() - job.fault_at
            over = all(job.of[host.name].poll() is not None for host in chosen)
            if name not in first_s and any(_SENTENCE.search(job.said(host)) for host in chosen):
                first_s[name] = seconds
            if over and name not in codes:
                codes[name] = {host.name: job.of[host.name].returncode for host in chosen}
                print(f"{name}: first word after {first_s.get(name, -1):.1f} s, end after {seconds:.1f} s")
            assert over or time.monotonic() < give_up_at, job.story(f"{name} does not end")
        time.sleep(_LOOK_AGAIN_S)
    return codes


def _traces(host: Host) -> list[str]:
    processes = [f"{host.name} {pid} {command_line(pid)}" for pid in host.pids(r"saferun|program\.py")]
    return processes + [f"{host.name} {path}" for path in host.path("/tmp").glob("saferun*")]
