"""A host from the inside: what its PID 1 does from its birth to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from tests.cluster.machines import kernel, plan

DEADLINE_S = 20.0
_LOOK_AGAIN_S = 0.003


class Blueprint(NamedTuple):
    """What the keeper wants of its hosts.

    Attributes:
        files: path -> mode and content, for every host.
        visible: folders of the machine that stay visible where a host has a folder of its own.
        slurm: start the daemons of Slurm.
    """

    files: Mapping[str, tuple[int, bytes]]
    visible: Sequence[str]
    slurm: bool


def be_host(node: plan.NodePlan, blueprint: Blueprint, say_fd: int, hear_fd: int) -> NoReturn:
    """Be PID 1 of a host. Says ``unshared``, waits for its NICs, says ``ready`` or what went wrong, and lives on."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
        kernel.set_name(node.name)
        os.write(say_fd, b"unshared\n")
        if not os.read(hear_fd, 1):
            os._exit(1)  # the keeper is gone
        _mount(blueprint.visible)
        _write_files(node, blueprint.files)
        socket.sethostname(node.name)
        _configure_network(node)
        os.chdir("/")
        _start_daemons(node, blueprint)
        os.write(say_fd, b"ready\n")
    except BaseException as error:
        os.write(say_fd, f"{node.name}: {type(error).__name__}: {error}\n".replace("\n", " | ").encode() + b"\n")
        os._exit(1)
    os.close(say_fd)
    os.close(hear_fd)
    while True:
        # As every init does: orphans that end are waited for.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait([signal.SIGCHLD])


# -------------------------------------------------------------------------------------------------------------- mounts


def _mount(visible: Sequence[str]) -> None:
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    # An open descriptor still leads to a folder that is covered by then.
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH)
    hidden = [path for path in visible if path.startswith(tuple(f"{folder}/" for folder in plan.OWN_FOLDERS))]
    kept = [(path, os.open(path, os.O_PATH)) for path in hidden]
    nosuid = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", nosuid)
    kernel.mount("sysfs", "/sys", "sysfs", nosuid)
    kernel.mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", flags=kernel.MS_BIND | kernel.MS_REC)
    for folder, mode in zip(plan.OWN_FOLDERS, ("0755", "1777", "1777", "0755"), strict=True):
        kernel.mount("tmpfs", folder, "tmpfs", nosuid, f"mode={mode}")
    for path, fd in kept:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb"):
                pass
        kernel.mount(f"/proc/self/fd/{fd}", path, flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
    os.close(cgroups)
    for folder in ("/run/etc/upper", "/run/etc/work", "/run/sshd", "/run/lock", "/run/munge", "/run/slurm"):
        os.makedirs(folder)
    layers = "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work"
    kernel.mount("overlay", "/etc", "overlay", options=layers)


def _write_files(node: plan.NodePlan, files: Mapping[str, tuple[int, bytes]]) -> None:
    own = {
        "/etc/hostname": (0o644, f"{node.name}\n".encode()),
        "/etc/machine-id": (0o444, f"{uuid.uuid4().hex}\n".encode()),
        "/run/boot_id": (0o444, f"{uuid.uuid4()}\n".encode()),
    }
    for path, (mode, content) in {**files, **own}.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # it may be a link that leads elsewhere
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    kernel.mount("/run/boot_id", "/proc/sys/kernel/random/boot_id", flags=kernel.MS_BIND)


# ------------------------------------------------------------------------------------------------- network and daemons


def _configure_network(node: plan.NodePlan) -> None:
    # Duplicate address detection would make an address wait; and one's own NIC that was down keeps its addresses.
    for name, value in (("accept_dad", "0"), ("dad_transmits", "0"), ("keep_addr_on_down", "1")):
        for scope in ("all", "default"):
            with open(f"/proc/sys/net/ipv6/conf/{scope}/{name}", "w", encoding="ascii") as file:
                file.write(value)
    run_ip(plan.address_commands(node))


def run_ip(lines: Sequence[str]) -> None:
    """Carry out lines of ``ip -batch`` in this process's network namespace."""
    text = "\n".join(lines) + "\n"
    done = subprocess.run(["ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip -batch: {done.stderr.strip()}")


def _start_daemons(node: plan.NodePlan, blueprint: Blueprint) -> None:
    _start("/usr/sbin/sshd", "-D", "-E", "/run/sshd/log")
    if blueprint.slurm:
        munge = (
            "--foreground",
            "--force",
            "--num-threads=2",
            "--log-file=/run/munge/log",
            "--seed-file=/run/munge/seed",
        )
        _start("/usr/sbin/munged", *munge)
        _await(lambda: os.path.exists("/run/munge/munge.socket.2"), "munged", "/run/munge/log")
        if node.number == 1:
            _start("/usr/sbin/slurmctld", "-D", "-i")
            _await(lambda: _listens(plan.SLURM_PORTS["SlurmctldPort"]), "slurmctld", "/run/slurm/slurmctld.log")
        # One that does not find its controller asks again a whole second later.
        # Where node1 is off, it will have to.
        with contextlib.suppress(TimeoutError):
            _await(_controller_answers, "slurmctld of node1", "", deadline_s=5.0)
        _start("/usr/sbin/slurmd", "-D")
        _await(lambda: _listens(plan.SLURM_PORTS["SlurmdPort"]), "slurmd", "/run/slurm/slurmd.log")
    _await(lambda: _listens(22), "sshd", "/run/sshd/log")


def _start(program: str, *arguments: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": plan.HOME}
    actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)]
    os.posix_spawn(program, [program, *arguments], environ, file_actions=actions, setsigmask=[], setsid=True)
    os.close(null)


def _await(condition: Callable[[], bool], daemon: str, log: str, deadline_s: float = DEADLINE_S) -> None:
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            with contextlib.suppress(OSError), open(log, encoding="utf-8", errors="replace") as file:
                raise TimeoutError(f"{daemon} does not come up: {file.read()[-1000:]}")
            raise TimeoutError(f"{daemon} does not come up and has written no log")
        time.sleep(_LOOK_AGAIN_S)


def _controller_answers() -> bool:
    address = (plan.node_plan(0).management, plan.SLURM_PORTS["SlurmctldPort"])
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0


def _listens(port: int) -> bool:
    """Whether some process of this host listens on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as file:
            for line in file:
                fields = line.split()
                if fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):
                    return True
    return False
