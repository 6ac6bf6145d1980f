"""The ways in which people start one program on many hosts.

Each function starts the launcher on a host (node1 unless ``on`` says otherwise) and returns it as a ``Process``. The
command is the same on every host. ``env`` are variables that reach the command on every host, whatever the launcher
itself passes on.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.cluster.machines import plan
from tests.cluster.machines.cluster import Cluster
from tests.cluster.machines.faults import Host
from tests.cluster.machines.process import Process

Words = Sequence[str | os.PathLike[str]]


def srun(
    cluster: Cluster,
    command: Words,
    *,
    tasks_per_host: int = 1,
    hosts: Sequence[Host] | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = plan.SHARED,
    on: Host | None = None,
    **popen: Any,
) -> Process:
    """Slurm: one task per host, or as many as ranks. The environment and the working directory go along."""
    chosen = _chosen(cluster, hosts)
    words = (
        *("srun", f"--nodes={len(chosen)}", f"--ntasks-per-node={tasks_per_host}"),
        *(f"--nodelist={_list(chosen)}", *options, *command),
    )
    return _head(cluster, on).popen(words, env=env, cwd=cwd, **popen)


def mpirun(
    cluster: Cluster,
    command: Words,
    *,
    tasks_per_host: int = 1,
    hosts: Sequence[Host] | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = plan.SHARED,
    on: Host | None = None,
    program: str | None = None,
    **popen: Any,
) -> Process:
    """Open MPI over ssh, Debian's or another. It passes on nothing of the environment but what ``-x`` names."""
    chosen = _chosen(cluster, hosts)
    passed = {**{name: cluster.environ[name] for name in ("PATH", "PYTHONPATH")}, **(env or {})}
    debians = ("mpirun.openmpi", "--mca", "plm", "rsh", "--oversubscribe")
    words = (
        *((program,) if program is not None else debians),
        *("--allow-run-as-root", "-np", str(len(chosen) * tasks_per_host), "--map-by", f"ppr:{tasks_per_host}:node"),
        *("--host", ",".join(f"{host.name}:{tasks_per_host}" for host in chosen), "--bind-to", "none"),
        *(word for name in passed for word in ("-x", name)),
        *("--wdir", os.fspath(cwd), *options, *command),
    )
    return _head(cluster, on).popen(words, env=env, cwd=cwd, **popen)


def hydra(
    cluster: Cluster,
    command: Words,
    *,
    tasks_per_host: int = 1,
    hosts: Sequence[Host] | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = plan.SHARED,
    on: Host | None = None,
    program: str = "mpiexec.hydra",
    within: Words = (),
    **popen: Any,
) -> Process:
    """MPICH's mpiexec, or what descends from it, over ssh. The environment and the working directory go along.

    ``within``: what starts it in a job of a scheduler, whose hosts it then takes.
    """
    chosen = _chosen(cluster, hosts)
    where = () if within else ("-launcher", "ssh", "-hosts", ",".join(host.name for host in chosen))
    words = (
        *(*within, program, *where),
        *("-ppn", str(tasks_per_host), "-n", str(len(chosen) * tasks_per_host), *options, *command),
    )
    return _head(cluster, on).popen(words, env=env, cwd=cwd, **popen)


def pdsh(
    cluster: Cluster,
    command: Words | str,
    *,
    hosts: Sequence[Host] | None = None,
    options: Sequence[str] = ("-S",),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = plan.SHARED,
    on: Host | None = None,
    **popen: Any,
) -> Process:
    """Ssh to all hosts at once, by pdsh: one process per host. Nothing is passed on: the command line says it all.

    The command is words, or a line for the remote shell; pdsh puts the host's name for ``%h``, its number for ``%n``.
    ``-S`` among the options makes its exit code that of the worst.
    """
    chosen = _chosen(cluster, hosts)
    passed = {**{name: cluster.environ[name] for name in ("PATH", "PYTHONPATH")}, **(env or {})}
    line = command if isinstance(command, str) else shlex.join(os.fspath(word) for word in command)
    settings = shlex.join(f"{name}={value}" for name, value in passed.items())
    remote = f"cd {shlex.quote(os.fspath(cwd))} && exec env {settings} {line}"
    words = ("pdsh", "-R", "ssh", "-f", str(len(chosen)), "-w", _list(chosen), *options, remote)
    return _head(cluster, on).popen(words, cwd=cwd, **popen)


def by_hand(
    cluster: Cluster,
    command: Callable[[Host], Words] | Words,
    *,
    hosts: Sequence[Host] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = plan.SHARED,
    **popen: Any,
) -> list[Process]:
    """One process per host, in the order of the hosts; a function gives each host its own command."""
    return [
        host.popen(command(host) if callable(command) else command, env=env, cwd=cwd, **popen)
        for host in _chosen(cluster, hosts)
    ]


def _chosen(cluster: Cluster, hosts: Sequence[Host] | None) -> Sequence[Host]:
    return cluster.hosts if hosts is None else hosts


def _head(cluster: Cluster, on: Host | None) -> Host:
    return cluster.hosts[0] if on is None else on


def _list(hosts: Sequence[Host]) -> str:
    return ",".join(host.name for host in hosts)
