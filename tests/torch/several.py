"""Jobs of several saferuns on this machine, each standing for a host, or for a task of one host."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ports import own_port
from tests.process.launching import Job, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


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
    port = own_port()
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
