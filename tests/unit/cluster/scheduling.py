"""What tests of schedulers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.cluster.schedulers import Allocation, Surroundings, detect


def found(
    environ: Mapping[str, str],
    host: str = "node3",
    *,
    above: Sequence[Sequence[str]] = (),
    mapping: str | None = None,
    own: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    printed: Mapping[str, str] | None = None,
) -> Allocation:
    allocation = detect(around(environ, host, above=above, mapping=mapping, own=own, files=files, printed=printed))
    assert allocation is not None
    return allocation


def around(
    environ: Mapping[str, str],
    host: str = "node3",
    *,
    above: Sequence[Sequence[str]] = (),
    mapping: str | None = None,
    own: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    printed: Mapping[str, str] | None = None,
) -> Surroundings:
    return Surroundings(
        environ,
        host,
        (files or {}).get,
        lambda: above,
        lambda names: [name for name in names if name in own],
        lambda key: mapping if key == "PMI_process_mapping" else None,
        lambda argv: (printed or {}).get(" ".join(argv)),
    )


def place(allocation: Allocation) -> tuple[int | None, int | None, int, int]:
    """Node rank, hosts, local rank, processes of the host."""
    return allocation.node_rank, allocation.hosts, allocation.local_rank, allocation.tasks
