"""What a check is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from saferun.model import Value
from saferun.preflight.results import CheckResult


class CheckContext(Value):
    """The launch that is to be checked, as far as it is known on this host before the hosts have met.

    Attributes:
        nproc: ranks on this host, of all its tasks.
        environ: the environment that the ranks will have.
        together: whether there are, or may be, other hosts.
        hosts: the names of all hosts where they are known, in order of node rank; else empty.
        node_rank: this host's; -1: unknown.
        master: the name or address that the others look for; empty: none (one host).
        ports: where the master may be found; the first free one is taken. Empty: the kernel chooses.
        bound: ports that this saferun has bound itself by now.
        serves: whether the master is this host.
        nics: what --nic named; ("auto",) where saferun is to choose.
        run_dir: the run directory; empty: no files are kept.
        script: the training script; empty: there is none.
        script_args: its arguments.
        python: the interpreter that runs the ranks; empty: they are no Python.
        vendor: ``nvidia``, ``amd`` or ``none``: whose GPUs the ranks use.
        attempt: from 0.
        old_pids: ranks of the attempt before, whose GPU memory may not have been given back yet.
        root: where /proc and /sys are looked for, with a trailing slash; tests have others.
    """

    nproc: int = 1
    environ: Mapping[str, str] = {}
    together: bool = False
    hosts: tuple[str, ...] = ()
    node_rank: int = 0
    master: str = ""
    ports: tuple[int, ...] = ()
    bound: tuple[int, ...] = ()
    serves: bool = True
    nics: tuple[str, ...] = ()
    run_dir: str = ""
    script: str = ""
    script_args: tuple[str, ...] = ()
    python: str = ""
    vendor: str = "none"
    attempt: int = 0
    old_pids: tuple[int, ...] = ()
    root: str = "/"

    def path(self, *parts: str) -> str:
        """A path below ``root``: ``context.path("proc", "meminfo")``."""
        return os.path.join(self.root, *parts)


class Check(Value):
    """One check: its name, what does it, and how long it may take."""

    name: str
    check: Callable[[CheckContext], CheckResult]
    deadline_s: float = 1.0
