"""What a host tells the one that leads about itself: its interfaces, versions, environment and names."""

from __future__ import annotations

import os
import socket
import time

from saferun.linux.netlink import read_nics
from saferun.linux.user_name import user_name
from saferun.preflight.checks.backend import known_backend
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import resolve
from saferun.preflight.checks.versions import describe_host
from saferun.preflight.default_nics import candidates, gloo_choice, nccl_choice
from saferun.preflight.results import HostInfo, Pairs

_NAMES_S = 1.0


def gather_host_info(context: CheckContext) -> HostInfo:
    """This host's info, but for what its checks found."""
    nics = read_nics(context.root)
    own = socket.gethostname()  # the whole of it, as gloo has it
    names = tuple(dict.fromkeys(filter(None, (own, context.master))))
    found = resolve(names, _NAMES_S)
    own_addresses = next((lookup.addresses for lookup in found if lookup.name == own), ())
    versions, script, environ = describe_host(context)
    return HostInfo(
        time=time.time(),
        nics=nics,
        gloo=gloo_choice(nics, context.environ, own_addresses).names,
        nccl=nccl_choice(nics, context.environ).names,
        probed=candidates(nics, context.environ, context.nics),
        versions=versions,
        script=script,
        environ=environ,
        names=tuple((lookup.name, *lookup.addresses) for lookup in found),
        backend=known_backend(context),
        launch=_describe_launch(context),
    )


def _describe_launch(context: CheckContext) -> Pairs:
    """Whose launch of what this is, where the hosts meet at the address of any job by default."""
    if not (context.has_default_address and context.script):
        return ()
    return (("user", user_name()), ("script", os.path.basename(context.script)))
