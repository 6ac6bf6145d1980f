"""What a check is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.model import Value
from saferun.preflight.results import CheckResult, Pairs


class CheckContext(Value):
    """The launch that is to be checked, as far as it is known on this host before the hosts have met.

    Attributes:
        nproc: ranks on this host, of all its tasks.
        environ: the environment that the ranks will have.
        spans_hosts: whether there are, or may be, other hosts.
        hosts: the names of all hosts where they are known, in order of node rank; else empty.
        host_count: how many hosts there may be.
        node_rank: this host's; -1: unknown.
        master: the name or address that the others look for; empty: none (one host).
        ports: where the master may be found; the first free one is taken. Empty: the kernel chooses.
        port_source: where their numbers come from, one of the constants of ``text.master_port``.
        bound: ports that this saferun has bound itself by now.
        serves: whether the master is this host.
        nics: what --nic named; ("auto",) where saferun is to choose.
        run_dir: the run directory; empty: no files are kept.
        script: the training script; empty: there is none.
        script_args: its arguments.
        python: the interpreter that runs the ranks; empty: they are no Python.
        is_wrapped: whether a tool (--wrap) starts any of the ranks.
        vendor: ``nvidia``, ``amd`` or ``none``: whose GPUs the ranks use.
        attempt: from 0.
        old_pids: ranks of the previous attempt, whose GPU memory may not have been given back yet.
        only: whether nothing but the checks is to be done.
        has_default_address: whether the hosts meet at the port that every job has which names neither port nor id.
        storage: paths beside those that are known that have to answer.
        earlier: the counters of the interfaces at an earlier look; none: there was none.
        since: when that was, in seconds since the epoch; 0.0: there was none.
        health: ``quick``, ``full`` with a real computation, or ``off``.
        gpus: how many GPUs the host has to have; -1: that is not known.
        beside: whether the ranks are running meanwhile.
        is_of_host: whether only the host's health is of interest, and no launch.
        root: where /proc and /sys are looked for, with a trailing slash; tests have others.
    """

    nproc: int = 1
    environ: Mapping[str, str] = {}
    spans_hosts: bool = False
    hosts: tuple[str, ...] = ()
    host_count: int = 1
    node_rank: int = 0
    master: str = ""
    ports: tuple[int, ...] = ()
    port_source: str = "needless"
    bound: tuple[int, ...] = ()
    serves: bool = True
    nics: tuple[str, ...] = ()
    run_dir: str = ""
    script: str = ""
    script_args: tuple[str, ...] = ()
    python: str = ""
    is_wrapped: bool = False
    vendor: str = "none"
    attempt: int = 0
    old_pids: tuple[int, ...] = ()
    only: bool = False
    has_default_address: bool = False
    storage: tuple[str, ...] = ()
    earlier: Pairs = ()
    since: float = 0.0
    health: str = "quick"
    gpus: int = -1
    beside: bool = False
    is_of_host: bool = False
    root: str = "/"

    def path(self, *parts: str) -> str:
        """A path below ``root``: ``context.path("proc", "meminfo")``."""
        return os.path.join(self.root, *parts)


def context_of(
    config: LaunchConfig,
    environ: Mapping[str, str],
    *,
    bound: Sequence[int],
    attempt: int,
    old_pids: Sequence[int],
    is_endpoint_here: bool = False,
) -> CheckContext:
    """What the checks of a launch are given. What only files tell the check process finds out by itself.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        bound: ports that this process has bound.
        attempt: from 0.
        old_pids: the ranks of the previous attempt.
        is_endpoint_here: whether the endpoint of torch's rendezvous is this host, where several hosts meet there.
    """
    hosts, rendezvous = config.hosts, config.rendezvous
    task = hosts.task
    argv = config.command.argv
    python = os.path.basename(argv[0]) if argv else ""
    is_only = config.checks.preflight == "only"
    is_python = (
        (is_only and not argv) or config.command.run_path or python.startswith("python") or "PYTHON_EXEC" in environ
    )
    master = rendezvous.master_addr or (hosts.names[0] if hosts.names else "")
    serves = not hosts.spans_hosts or hosts.node_rank == 0
    if hosts.spans_hosts and rendezvous.backend != "static":
        master = rendezvous.address[0] if rendezvous.address is not None else ""
        serves = is_endpoint_here
    return CheckContext(
        nproc=task.local_world_size if task is not None else config.nproc_per_node,
        environ=environ,
        spans_hosts=hosts.started > 1,
        hosts=hosts.names,
        host_count=max(hosts.most, len(hosts.names), 1),
        node_rank=-1 if hosts.node_rank is None else hosts.node_rank,
        master=master if hosts.started > 1 else "",
        ports=rendezvous.ports or ((rendezvous.master_port,) if rendezvous.master_port else ()),
        port_source=rendezvous.port_source,
        bound=tuple(bound),
        serves=serves,
        nics=config.checks.nics,
        run_dir=(config.output.run_dir or os.curdir) if config.output.keep_files else "",
        script=config.command.name if is_python else "",
        script_args=argv[argv.index(config.command.name) + 1 :] if config.command.name in argv else (),
        python=_python_of(argv, is_only=is_only) if is_python and not config.command.run_path else "",
        is_wrapped=bool(config.wraps),
        vendor=config.environ.vendor,
        attempt=attempt,
        old_pids=tuple(old_pids),
        only=is_only,
        has_default_address=hosts.spans_hosts and rendezvous.has_default_address,
        storage=config.checks.health_paths,
        health=config.checks.health,
    )


def _python_of(argv: Sequence[str], *, is_only: bool) -> str:
    """The ranks' interpreter: without a script that of a launch from here."""
    return argv[0] if argv else sys.executable if is_only else ""


class Check(Value):
    """One check: its name, what does it, and how long it may take.

    ``is_last``: it begins when all others are over, which would take what it does for another program.
    """

    name: str
    check: Callable[[CheckContext], CheckResult]
    deadline_s: float = 1.0
    is_last: bool = False
