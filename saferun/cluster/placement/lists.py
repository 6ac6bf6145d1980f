"""``--hosts`` and ``--hostfile``, and which of the hosts this one is."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saferun.cluster.schedulers.host_list import (
    ListedHost,
    compress_hosts,
    expand_hosts,
    matching_names,
    parse_host_file,
)
from saferun.config import Setting
from saferun.errors import UsageError
from saferun.linux.names import DEADLINE_S, own_names, unanswered_text

if TYPE_CHECKING:
    from saferun.cluster.schedulers import Allocation

_MOST_BYTES = 16 << 20


def listed_hosts(values: Any) -> Sequence[ListedHost]:  # noqa: ANN401 - argparse's namespace
    """The hosts that the options name, in order of node rank."""
    if not values.hosts and not values.hostfile:
        return ()
    if values.hosts and values.hostfile:
        raise UsageError("--hosts and --hostfile both name the hosts of the job", "leave one of them out")
    if values.hostfile:
        return parse_host_file(_read_host_file(values.hostfile), values.hostfile)
    try:
        names = expand_hosts(values.hosts)
    except ValueError as error:
        raise UsageError(f"--hosts {values.hosts}: {error}", "write them as node[1-4,7],gpu1") from None
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"--hosts {values.hosts} names {twice[0]} twice", "name each host once")
    if not names:
        raise UsageError(f"--hosts {values.hosts} names no host", "write them as node[1-4,7],gpu1")
    return [ListedHost(name, None) for name in names]


def _read_host_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}", "check the path") from None
    except ValueError:
        raise UsageError(f"--hostfile {path} is not text in UTF-8", "check the path") from None


def own_index(
    names: Sequence[str],
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    allocation: Allocation | None,
) -> int | None:
    """Which of the names is this host's; None: another source says so."""
    host = socket.gethostname()
    found, unanswered = list(matching_names(names, host)), ""
    if not found:
        own, unanswered = own_names([_bare(name) for name in names])
        found = [i for i, name in enumerate(names) if _bare(name) in own]
    if len(found) == 1:
        return found[0]
    if settings["node_rank"].origin != "default" or (allocation is not None and allocation.node_rank is not None):
        return None
    option = "--hostfile" if values.hostfile else "--hosts"
    shown = ", ".join(names[i] for i in found) if found else _some(names)
    if found:
        raise UsageError(
            f"{option}: {shown} are all this host (named {host})", "name each host once, or pass --node-rank"
        )
    if unanswered:
        raise UsageError(
            f"{option}: none of {shown} is this host (named {host}) by name, and"
            f" {unanswered_text(unanswered, DEADLINE_S)}",
            "use the names that `hostname` prints on each host, or pass --node-rank",
        )
    raise UsageError(
        f"{option}: none of {shown} is this host (named {host}), by name or by address",
        "use the names that `hostname` prints on each host, or pass --node-rank",
    )


def _bare(name: str) -> str:
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _some(names: Sequence[str]) -> str:
    text = compress_hosts(names)
    return text if len(text) <= 200 else f"{text[:200]}..."  # noqa: PLR2004 - a line or two
