"""What a launch would do, and where each setting comes from: for --dry-run and --show-config. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from saferun.config import LaunchConfig, Setting
from saferun.profiles import Resolution
from saferun.profiles.text import change_lines
from saferun.report.redaction import REDACTED, is_secret, redacted_arguments, redacted_text
from saferun.topology import rank_environ, single_host, substitute_local_rank


def config_lines(config: LaunchConfig) -> list[str]:
    """Every setting, its value and its origin, one a line."""
    rows = [(name, _shown(name, setting), _origin(setting)) for name, setting in config.settings.items()]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), 40)
    return [_printable(f"{name:<{name_width}}  {value:<{value_width}}  {origin}") for name, value, origin in rows]


def _shown(name: str, setting: Setting) -> str:
    value = setting.value
    if value is None or value in ("", (), []):
        return "-"
    if is_secret(name):
        return REDACTED
    if isinstance(value, list | tuple):
        return ",".join(redacted_arguments(map(str, value)))
    return redacted_text(str(value))


def _origin(setting: Setting) -> str:
    return f"{setting.origin} ({setting.place})" if setting.place else setting.origin


def plan_lines(config: LaunchConfig, resolution: Resolution, environ: Mapping[str, str], host: str) -> list[str]:
    """Ranks, placement, commands and changes to the environment of a launch that is not carried out.

    Args:
        config: the launch.
        resolution: what env profiles, --env and --unset come to.
        environ: what the ranks would inherit.
        host: name of this host.

    Raises:
        UsageError: options and environment contradict each other.
    """
    rendezvous = config.rendezvous
    address = rendezvous.master_addr or rendezvous.local_addr or "<this host>"
    placement = single_host(config.nproc_per_node, address, rendezvous.master_port or 0, rendezvous.run_id)
    port = rendezvous.master_port or "<a free port>"
    lines = [f"{config.nproc_per_node} ranks on 1 host; store at {address}:{port} ({rendezvous.backend})"]
    for place in placement.ranks:
        argv = [config.command.argv[0], *substitute_local_rank(config.command.argv[1:], place.local_rank)]
        shown = shlex.join(redacted_arguments(argv))
        lines.append(f"rank {place.rank} ({host}, local rank {place.local_rank}): {shown}")
    # Each, for what it may refuse.
    told, *_ = [rank_environ(config, placement, place, 0, environ) for place in placement.ranks]
    lines.append("environment of rank 0, as torchrun has it:")
    fixed = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    lines.extend(f"  {name}={fixed.get(name, value)}" for name, value in sorted(told.items()))
    changes = change_lines(resolution, is_secret=is_secret)
    if changes:
        lines.append(f"changes by env profiles ({', '.join(resolution.profiles)}) and options:")
        lines.extend(f"  {redacted_text(line)}" for line in changes)
    return [_printable(line) for line in lines]


def _printable(text: str) -> str:
    """One line that a terminal only prints: what is quoted in it comes from anywhere."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
