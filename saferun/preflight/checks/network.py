"""The checks of a host's network: names, ports, interfaces, fabrics, and the way to the master."""

from __future__ import annotations

from saferun.preflight.checks.context import Check
from saferun.preflight.checks.fabric import check_fabric
from saferun.preflight.checks.interfaces import check_interfaces
from saferun.preflight.checks.master import ANSWER_TIMEOUT_S, check_master
from saferun.preflight.checks.names import DEADLINE_S, check_names
from saferun.preflight.checks.ports import check_ports

_MARGIN_S = 1.0  # for a host that is busy starting a job

NET_CHECKS: tuple[Check, ...] = (
    Check("names", check_names, DEADLINE_S + _MARGIN_S),
    Check("ports", check_ports),
    Check("interfaces", check_interfaces, DEADLINE_S + _MARGIN_S),
    Check("fabric", check_fabric),
    Check("master", check_master, DEADLINE_S + ANSWER_TIMEOUT_S + _MARGIN_S),
)
"""All of them, in the order in which they are shown."""
