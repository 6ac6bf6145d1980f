"""What a host tells the one that leads about itself: its interfaces, versions, environment and names."""

from __future__ import annotations

import os
import socket
import time

from saferun.linux.netlink import read_nics
from saferun.linux.user_name import user_name
from saferun.preflight.checks.backend import GLOO, known_backend
from saferun.preflight.checks.common import with_nccl_conf
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import UNCERTAIN, Lookup, resolve
from saferun.preflight.checks.versions import describe_host
from saferun.preflight.default_nics import AUTO, GLOO_IFNAME, NCCL_IFNAME, candidates, gloo_choice, nccl_choice, routes
from saferun.preflight.results import HostInfo, Pairs

_NAMES_S = 1.0


def gather_host_info(context: CheckContext) -> HostInfo:
    """This host's info, but for what its checks found."""
    nics = read_nics(context.root)
    own = socket.gethostname()  # the whole of it, as gloo has it
    names = tuple(dict.fromkeys(filter(None, (own, context.master))))
    found = resolve(names, _NAMES_S)
    lookup = next((lookup for lookup in found if lookup.name == own), Lookup(own))
    settings = with_nccl_conf(context)
    environ = settings.environ
    gloo = gloo_choice(nics, environ, lookup.addresses)
    # Gloo waits longer for a name, and asks later: a name server that starts or is overloaded may answer by then.
    is_known = gloo.rule == GLOO_IFNAME or lookup.error not in UNCERTAIN
    is_unanswered = not is_known and lookup.error == "unanswered" and context.nics in {(), (AUTO,)}
    versions, script, relevant = describe_host(context)
    return HostInfo(
        time=time.time(),
        nics=nics,
        gloo=gloo.names if is_known else (),
        # NCCL waits for a home directory, and the user's file there wins over the system's.
        nccl=nccl_choice(nics, environ).names if settings.is_known(NCCL_IFNAME) else (),
        probed=candidates(nics, environ, context.nics),
        versions=versions,
        script=script,
        environ=relevant,
        names=tuple((one.name, *one.addresses) for one in found),
        backend=known_backend(context),
        launch=_describe_launch(context),
        unanswered=own if is_unanswered else "",
    )


def probe_routes(context: CheckContext, info: HostInfo) -> Pairs:
    """(interface, address) under which other hosts are to try this one: the addresses that the ranks would use.

    Args:
        context: the launch.
        info: this host's, as ``gather_host_info`` has it.
    """
    environ = with_nccl_conf(context).environ
    own = next((addresses for name, *addresses in info.names if name == socket.gethostname()), [])
    gloo, nccl = gloo_choice(info.nics, environ, own), nccl_choice(info.nics, environ)
    choices = (gloo,) if context.vendor == "none" else (gloo, nccl) if info.backend == GLOO else (nccl, gloo)
    return routes(info.nics, info.probed, choices)


def _describe_launch(context: CheckContext) -> Pairs:
    """Whose launch of what this is, where the hosts meet at the address of any job by default."""
    if not (context.has_default_address and context.script):
        return ()
    return (("user", user_name()), ("script", os.path.basename(context.script)))
