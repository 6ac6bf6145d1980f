"""What a launch would do, and where each setting comes from: for --dry-run and --show-config. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from saferun.cluster.schedulers.host_list import compress_hosts
from saferun.config import DEFAULT_PREFIX, DEFAULT_SHUTDOWN_TIMEOUT_S, KEEP_NO_FILES, LaunchConfig, Setting
from saferun.env.profiles import Resolution
from saferun.env.profiles.profile_text import change_lines
from saferun.errors import printable
from saferun.launch.rank_argv import rank_argv
from saferun.model import Placement, RankAssignment
from saferun.supervisor.topology import rank_environ, single_host
from saferun.text.redaction import REDACTED, redacted_arguments, redacted_text
from saferun.text.secret_names import is_secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.wrapping import Wrapper


def config_lines(config: LaunchConfig) -> list[str]:
    """Every setting, its value and its origin, one a line."""
    defaults = _where_none_is_given(config)
    rows = [
        (name.replace("_", "-"), _shown(name, setting, defaults), _origin(setting))
        for name, setting in config.settings.items()
    ]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), 40)
    return [printable(f"{name:<{name_width}}  {value:<{value_width}}  {origin}") for name, value, origin in rows]


def _where_none_is_given(config: LaunchConfig) -> dict[str, str]:
    """What holds where an option is left out, of those whose default is not a value."""
    output = config.output
    return {
        "run_dir": "saferun-runs/<time>-<id>" if output.keep_files else KEEP_NO_FILES,
        "prefix": DEFAULT_PREFIX if output.legacy_template is None else "-",
        "shutdown_timeout": str(DEFAULT_SHUTDOWN_TIMEOUT_S),
        "nic": "<each library chooses>",
    }


def _shown(name: str, setting: Setting, defaults: Mapping[str, str]) -> str:
    value = setting.value
    if setting.origin == "default" and name in defaults:
        return defaults[name]
    if value is None or value in ("", (), []):
        return "-"
    if is_secret(name):
        return REDACTED
    if isinstance(value, list | tuple):
        return ",".join(redacted_arguments(map(str, value)))
    return redacted_text(str(value))


def _origin(setting: Setting) -> str:
    return f"{setting.origin} ({setting.location})" if setting.location else setting.origin


def plan_lines(
    config: LaunchConfig,
    resolution: Resolution,
    environ: Mapping[str, str],
    host: str,
    wrappers: Sequence[Sequence[Wrapper]] = (),
    notes: Sequence[str] = (),
) -> list[str]:
    """Ranks, placement, commands and changes to the environment of a launch that is not carried out.

    Args:
        config: the launch.
        resolution: what env profiles, --env and --unset come to.
        environ: what the ranks would inherit.
        host: name of this host.
        wrappers: the tools that each rank would run under; empty: none.
        notes: what there is to say about them.

    Raises:
        UsageError: options and environment contradict each other.
    """
    placement, address, port = planned_placement(config)
    lines = [*_hosts_lines(config, address, port), *notes]
    for assignment, tools in zip(placement.ranks, wrappers or ((),) * len(placement.ranks), strict=True):
        shown = shlex.join(redacted_arguments(rank_argv(config.command, assignment.local_rank, tools)))
        lines.append(f"rank {assignment.rank} ({host}, local rank {assignment.local_rank}): {shown}")
    # Each, for what it may refuse.
    first, *_ = [rank_environ(config, placement, assignment, environ) for assignment in placement.ranks]
    lines.append(f"environment of rank {placement.ranks[0].rank}, as torchrun has it:")
    fixed = {"MASTER_ADDR": address, "MASTER_PORT": port}
    lines.extend(f"  {name}={fixed.get(name, value)}" for name, value in sorted(first.items()))
    changes = change_lines(resolution, is_secret=is_secret, has_run_dir=config.output.keep_files)
    if changes:
        lines.append(f"changes by env profiles ({', '.join(resolution.profiles)}) and options:")
        lines.extend(f"  {redacted_text(line)}" for line in changes)
    return [printable(line) for line in lines]


def planned_placement(config: LaunchConfig) -> tuple[Placement, str, str]:
    """Where the ranks of this process would be, as far as that is known before the hosts meet; the store's address."""
    rendezvous, hosts, task = config.rendezvous, config.hosts, config.hosts.task
    address = rendezvous.master_addr or rendezvous.local_addr or "<this host>"
    single = single_host(config.nproc_per_node, address, rendezvous.master_port or 0, rendezvous.run_id)
    port = str(rendezvous.master_port or "<a free port>")
    if not hosts.spans_hosts:
        return single, address, port
    if rendezvous.ports:
        port = " or ".join(str(number) for number in rendezvous.ports[:1])
        port = port if len(rendezvous.ports) == 1 else f"<{port} or another of {len(rendezvous.ports)}>"
    if rendezvous.backend != "static":
        address, port = "<a host>", "<a free port>"
    local_world_size = task.local_world_size if task is not None else config.nproc_per_node
    first_local = task.local_rank if task is not None else 0
    first = (hosts.node_rank or 0) * local_world_size + first_local
    world_size = local_world_size * hosts.most
    assignments = (RankAssignment(first_local + i, first + i, first + i) for i in range(config.nproc_per_node))
    return (
        single._replace(
            group_rank=hosts.node_rank or 0,
            group_world_size=hosts.most,
            world_size=world_size,
            role_world_size=world_size,
            ranks=tuple(assignments),
            local_world_size=local_world_size,
        ),
        address,
        port,
    )


def _hosts_lines(config: LaunchConfig, address: str, port: str) -> list[str]:
    rendezvous, hosts, task = config.rendezvous, config.hosts, config.hosts.task
    if not hosts.spans_hosts:
        return [f"{config.nproc_per_node} ranks on 1 host; store at {address}:{port} ({rendezvous.backend})"]
    shown = str(hosts.most) if hosts.least == hosts.most else f"{hosts.least} to {hosts.most}"
    names = f" ({compress_hosts(hosts.names)})" if hosts.names else ""
    here = f"{config.nproc_per_node} ranks on this host"
    if task is not None:
        here = f"local rank {task.local_rank} of {task.local_world_size} on this host"
    where = f"store at {address}:{port} ({rendezvous.backend})"
    if rendezvous.backend != "static":
        where = f"hosts meet {f'at {rendezvous.endpoint} ' if rendezvous.endpoint else ''}({rendezvous.backend})"
    lines = [f"{shown} host{'s' if hosts.most > 1 else ''}{names}; {here}; {where}"]
    source = f", from {hosts.detected}" if hosts.detected else ""
    if hosts.node_rank is None:
        lines.append(f"the rendezvous decides which host this is{source}; ranks are shown as on host 0")
    else:
        lines.append(f"this is host {hosts.node_rank}{source}")
    lines.extend(f"  {line}" for line in hosts.found)
    if config.secret_file:
        lines.append(f"messages between hosts are signed with the secret in {config.secret_file}")
    elif config.shares_secret:
        condition = "where they" if config.sign_messages == "auto" else "and there is no job unless they"
        lines.append(f"messages between hosts are signed, {condition} can share a secret")
    if hosts.most > 1:
        lines.append("ranks are numbered as if all hosts had as many")
    return lines
