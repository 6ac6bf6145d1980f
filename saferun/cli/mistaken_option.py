"""Which host of which job this is, where one option is wrong: the other hosts would wait for it.

It is found only where the wrong option does not matter for that. In doubt nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

from saferun.cli.argument_parser import parse_tolerantly
from saferun.cli.command_line import fill_in
from saferun.cli.options import OPTIONS
from saferun.cluster.placement import find_place
from saferun.config import HostsConfig, JobMembership, RendezvousConfig, Setting
from saferun.errors import UsageError, suppress

# Options that say which host of which job this is, and how the others are reached.
_OF_PLACE = frozenset(
    """nnodes node_rank master_addr master_port standalone rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_addr
    scheduler hosts hostfile spares control_port job_secret_file sign_messages""".split()
)
_KNOWN = frozenset(option.dest for option in OPTIONS)
_FLAGS_OF_PLACE = frozenset(flag for option in OPTIONS if option.dest in _OF_PLACE for flag in option.flags)

OnMembership = Callable[[JobMembership], None]


def find_by_command_line(arguments: Sequence[str], environ: Mapping[str, str], on_membership: OnMembership) -> None:
    """Find the membership of a host whose command line is refused. Never raises, and prints nothing.

    Args:
        arguments: the command line, without the program.
        environ: the environment.
        on_membership: takes it, where it is found.
    """
    with suppress(Exception), redirect_stderr(StringIO()):
        values, wrong = parse_tolerantly(arguments, environ)
        mistakes: list[tuple[str, UsageError]] = []
        settings, _ = fill_in(values, environ, mistakes)
        _find(values, settings, environ, [*wrong, *(dest for dest, _ in mistakes)], on_membership)


def find_by_settings(
    values: SimpleNamespace,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    mistakes: Sequence[tuple[str, UsageError]],
    on_membership: OnMembership,
) -> None:
    """The same for a host with a wrong variable or settings file: what ``fill_in`` has found out.

    Args:
        values: of all options.
        settings: where they come from.
        environ: the environment.
        mistakes: what is wrong.
        on_membership: takes the membership, where it is found.
    """
    with suppress(Exception), redirect_stderr(StringIO()):
        _find(values, settings, environ, [dest for dest, _ in mistakes], on_membership)


def _find(
    values: SimpleNamespace,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    wrong: Sequence[str],
    on_membership: OnMembership,
) -> None:
    if len(wrong) != 1 or values.show_config or values.dry_run or wrong[0] in _OF_PLACE:
        return
    # A word that is no option may be a misspelled one; a file that cannot be read may hold any.
    may_be_any = wrong[0] == "config" or wrong[0] not in _KNOWN
    # Its value may have been taken for the script.
    if may_be_any and any(word.partition("=")[0] in _FLAGS_OF_PLACE for word in values.training_script_args):
        return

    def take(hosts: HostsConfig, rendezvous: RendezvousConfig) -> None:
        if not may_be_any or hosts.detected or _is_written(settings):
            on_membership(JobMembership(hosts, rendezvous, values.job_secret_file))

    if not values.nproc_per_node.isdecimal():
        values.nproc_per_node = "-"  # torch is not asked
    find_place(values, settings, environ, on_place=take)


def _is_written(settings: Mapping[str, Setting]) -> bool:
    """Whether the user has written which host of how many this is, and where they meet, down to the port."""

    def has(dest: str) -> bool:
        return settings[dest].origin in {"flag", "environment"}

    is_numbered = has("nnodes") and has("node_rank")
    return (is_numbered or has("hosts") or has("hostfile")) and (has("master_port") or has("rdzv_endpoint"))
