"""Jobs of several saferuns on this machine, each standing for a host, or for a task of one host."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.process.launching import Job, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


# Ports that were handed out are held until this process ends: tests run side by side, and each is to have its own.
_held: list[socket.socket] = []


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections, which nobody listens on or will be given."""
    for port in range(21000, 32000):
        hold = socket.socket(socket.AF_UNIX)
        try:
            hold.bind(f"\0saferun-test-port-{port}")
        except OSError:
            hold.close()
            continue
        _held.append(hold)
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            with contextlib.suppress(OSError):
                probe.bind(("::", port))
                return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def hosts(
    folder: Path,
    program: str,
    *options: str,
    count: int = 2,
    start: Sequence[int] | None = None,
    nproc: int | None = 1,
    each: Callable[[int], Sequence[str]] = lambda _: (),
    environs: Callable[[int], Mapping[str, str]] = lambda _: {},
    place: bool = True,
    of_each: Callable[[int], Mapping[str, Any]] = lambda _: {},
    **more: Any,
) -> Iterator[list[Job]]:
    """A job of several hosts by plain options; host ``i`` is the i-th launch.

    Args:
        folder: an empty folder.
        program: what every rank runs.
        options: saferun's options on all hosts.
        count: how many hosts the job has.
        start: which of them are started; all of them unless given.
        nproc: how many ranks a host has; None leaves that to the options.
        each: options of one host.
        environs: changes of one host's environment.
        place: whether to give each its place by options.
        of_each: goes to ``running`` for one host.
        more: goes to ``running``.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        jobs = []
        for i in range(count) if start is None else start:
            own = ("--nnodes", str(count), "--node-rank", str(i)) if place else ()
            own = (*own, "--master-addr", "127.0.0.1", "--master-port", str(port)) if place else own
            jobs.append(
                stack.enter_context(
                    running(
                        folder / f"host{i}",
                        program,
                        *own,
                        *options,
                        *each(i),
                        nproc=nproc,
                        environ=environs(i),
                        **{**more, **of_each(i)},
                    )
                )
            )
        yield jobs
        for job in jobs:
            job.wait(60.0)
