"""The process that a cluster lives and dies with: ``python -m tests.cluster.machines.keeper SPEC``.

It owns the network namespace with the two bridges, and is the parent of every host's PID 1. When it is killed, the
kernel kills those (PR_SET_PDEATHSIG), with them all processes of their pid namespaces, and then nobody holds the
namespaces, mounts, NICs and temporary file systems any more: nothing has to be tidied up.

SPEC is JSON: ``{"owner": [pid, start] | null, "hosts": n, "slurm": bool, "slurm_options": {}, "visible": [folders]}``.
A keeper with an owner ends when its stdin does. Requests and answers are JSON lines on stdin and stdout:
``{"boot": [index, ...]}`` (the first is implied: all hosts) -> ``{"pids": {index: pid}}`` or ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any, NamedTuple

from tests.cluster.machines import kernel, plan
from tests.cluster.machines.boot import Blueprint, be_host, run_ip

NAME = "cluster-keeper"
MODULE = "tests.cluster.machines.keeper"
# With Slurm a host may take as long as its daemons may; 64 of them share two cores.
_BOOT_DEADLINE_S = 60.0


class _Birth(NamedTuple):
    node: plan.NodePlan
    pid: int
    hear_fd: int
    say_fd: int


class Keeper:
    """The state of a keeper: which hosts there are, and who is their PID 1."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.nodes = [plan.node_plan(index) for index in range(spec["hosts"])]
        self.pids: dict[int, int] = {}
        self._booted: set[int] = set()
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", plan.SHARED, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
        os.mkdir(plan.HOME)
        self._blueprint = Blueprint(_files(self.nodes, spec), tuple(spec["visible"]), spec["slurm"])
        # The bridges carry frames, and take no part in what is said.
        with open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w", encoding="ascii") as file:
            file.write("1")
        run_ip(plan.bridge_commands())

    def boot(self, indices: list[int]) -> dict[int, int]:
        """Switch hosts on; what was on is switched off first. Returns the pids of their PID 1."""
        for index in indices:
            self._switch_off(index)
        # The cables of a host that has ended go with it; at some time.
        old = [f"link del {port}" for index in indices if index in self._booted for port in self.nodes[index].all_ports]
        if old:
            lines = "\n".join([*old, ""])
            subprocess.run(["ip", "-force", "-batch", "-"], input=lines, capture_output=True, text=True, check=False)
        self._booted.update(indices)
        births = [self._give_birth(self.nodes[index]) for index in indices]
        give_up_at = time.monotonic() + _BOOT_DEADLINE_S
        try:
            _hear_all(births, "unshared", give_up_at)
            run_ip([line for birth in births for line in plan.cable_commands(birth.node, birth.pid)])
            for birth in births:
                os.write(birth.say_fd, b"!")
            _hear_all(births, "ready", give_up_at)
        finally:
            for birth in births:
                os.close(birth.hear_fd)
                os.close(birth.say_fd)
        return {birth.node.number - 1: birth.pid for birth in births}

    def _give_birth(self, node: plan.NodePlan) -> _Birth:
        hear_fd, its_say_fd = os.pipe()
        its_hear_fd, say_fd = os.pipe()
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            kernel.die_with_parent(signal.SIGKILL)
            # Blocked, it waits for sigwait. What the host starts gets an empty mask again.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            low, high = sorted((its_say_fd, its_hear_fd))
            for first, last in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
                os.closerange(first, last)
            be_host(node, self._blueprint, its_say_fd, its_hear_fd)
        os.close(its_say_fd)
        os.close(its_hear_fd)
        # The kernel lets a process change its children's namespace only from its own.
        kernel.setns(self._own_pid_namespace, kernel.CLONE_NEWPID)
        self.pids[node.number - 1] = pid
        return _Birth(node, pid, hear_fd, say_fd)

    def _switch_off(self, index: int) -> None:
        if pid := self.pids.pop(index, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def serve(self, *, ends_with_stdin: bool) -> None:
        """Answer requests, and wait for hosts that have ended, until the owner is gone."""
        listening = True
        half = b""
        while listening or not ends_with_stdin:
            pidfds = {os.pidfd_open(pid): index for index, pid in self.pids.items()}
            ready, _, _ = select.select([*([0] if listening else []), *pidfds], [], [])
            for fd, index in pidfds.items():
                os.close(fd)
                if fd in ready:
                    self._switch_off(index)
            if 0 not in ready:
                continue
            chunk = os.read(0, 1 << 16)
            listening = bool(chunk)
            *lines, half = (half + chunk).split(b"\n")
            for line in lines:
                answer(self.boot, json.loads(line)["boot"])


def answer(boot: Any, indices: list[int]) -> None:
    """Do as asked, and say how it went."""
    try:
        told: dict[str, Any] = {"pids": boot(indices)}
    except OSError as error:
        told = {"error": str(error)}
    os.write(1, json.dumps(told).encode() + b"\n")


def _hear_all(births: list[_Birth], word: str, give_up_at: float) -> None:
    waiting = {birth.hear_fd: birth.node.name for birth in births}
    heard = dict.fromkeys(waiting, b"")
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, give_up_at - time.monotonic()))
        if not ready:
            raise TimeoutError(f"hosts that are not {word} after {_BOOT_DEADLINE_S:g} s: {', '.join(waiting.values())}")
        for fd in ready:
            chunk = os.read(fd, 1 << 16)
            heard[fd] += chunk
            if not chunk:
                raise ChildProcessError(f"{waiting[fd]} ended before it was {word}")
            if heard[fd].endswith(b"\n"):
                if heard[fd].decode(errors="replace").strip() != word:
                    raise ChildProcessError(heard[fd].decode(errors="replace").strip())
                del waiting[fd]


def _files(nodes: list[plan.NodePlan], spec: dict[str, Any]) -> dict[str, tuple[int, bytes]]:
    with open("/etc/passwd", encoding="utf-8") as file:
        files = plan.common_files(nodes, file.read())
    with tempfile.TemporaryDirectory(dir=plan.SHARED) as folder:
        key = f"{folder}/key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f", key], check=True)
        for suffix, mode in (("", 0o600), (".pub", 0o644)):
            with open(key + suffix, "rb") as read:
                files[f"/etc/ssh/cluster_key{suffix}"] = (mode, read.read())
    if spec["slurm"]:
        files["/etc/slurm/slurm.conf"] = (0o644, plan.slurm_conf(nodes, spec["slurm_options"]).encode())
        files["/etc/munge/munge.key"] = (0o400, b"".join(uuid.uuid4().bytes for _ in range(8)))
    return files


def main() -> None:
    """Set the cluster up, say so, and hold it."""
    spec = json.loads(sys.argv[1])
    kernel.set_name(NAME)
    owner = spec["owner"]
    if owner is not None:
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != owner[0]:
            return
    try:
        keeper = Keeper(spec)
    except (OSError, subprocess.CalledProcessError) as error:
        os.write(1, json.dumps({"error": str(error)}).encode() + b"\n")
        return
    answer(keeper.boot, list(range(spec["hosts"])))
    keeper.serve(ends_with_stdin=owner is not None)


if __name__ == "__main__":
    main()
