"""All checks of a host by itself. For a new one see "A new preflight check" in CONTRIBUTING.md."""

from __future__ import annotations

from saferun.preflight.checks.clock import check_clock
from saferun.preflight.checks.context import Check, CheckContext
from saferun.preflight.checks.cpus import check_cpus
from saferun.preflight.checks.disk import check_disk
from saferun.preflight.checks.fabric import check_fabric
from saferun.preflight.checks.gpus import DRIVER_TIMEOUT_S, check_gpus
from saferun.preflight.checks.interfaces import check_interfaces
from saferun.preflight.checks.limits import check_cores, check_locked_memory, check_open_files, check_processes
from saferun.preflight.checks.master import ANSWER_TIMEOUT_S, check_master
from saferun.preflight.checks.memory import check_memory
from saferun.preflight.checks.name_resolution import DEADLINE_S, check_names
from saferun.preflight.checks.nic_errors import check_nic_errors
from saferun.preflight.checks.platform import check_platform
from saferun.preflight.checks.ports import check_ports
from saferun.preflight.checks.rdma import check_rdma
from saferun.preflight.checks.recent_kernel import check_kernel_log
from saferun.preflight.checks.shared_memory import check_shared_memory
from saferun.preflight.checks.stack_tools import check_ptrace, check_tools
from saferun.preflight.checks.storage import PATIENCE_S, check_storage
from saferun.preflight.checks.versions import check_versions

_MARGIN_S = 1.0  # for a host that is busy starting a job
# A network file system that hangs holds whatever reads it.
_DISK_DEADLINE_S = 2.0
# Python's packages may lie on one, too.
_FILES_DEADLINE_S = 3.0
# As long as the ranks of several hosts wait for GPUs: nothing that is found there ends a launch. A driver that has to
# initialise each of them takes longer, and the ranks have to wait for it again.
_GPUS_AWAITED_S = 6.0

CHECKS: tuple[Check, ...] = (
    Check("names", check_names, DEADLINE_S + _MARGIN_S),
    Check("ports", check_ports),
    Check("interfaces", check_interfaces, DEADLINE_S + _MARGIN_S),
    Check("fabric", check_fabric),
    Check("rdma", check_rdma),
    Check("master", check_master, DEADLINE_S + ANSWER_TIMEOUT_S + _MARGIN_S),
    Check("open_files", check_open_files),
    Check("processes", check_processes),
    Check("locked_memory", check_locked_memory),
    Check("cores", check_cores),
    Check("shared_memory", check_shared_memory),
    Check("disk", check_disk, _DISK_DEADLINE_S),
    Check("memory", check_memory),
    Check("cpus", check_cpus),
    Check("clock", check_clock),
    Check("gpus", check_gpus, DRIVER_TIMEOUT_S + 1.0),
    Check("platform", check_platform),
    Check("versions", check_versions, _FILES_DEADLINE_S),
    Check("nic_errors", check_nic_errors, _MARGIN_S + 1.0),
    Check("kernel_log", check_kernel_log, _MARGIN_S + 1.0),
    Check("storage", check_storage, PATIENCE_S + _MARGIN_S),
)
"""In the order in which they are shown."""

_OF_HEALTH = frozenset(
    {"clock", "disk", "fabric", "gpus", "kernel_log", "memory", "nic_errors", "shared_memory", "storage"}
)
_ONLY_OF_HEALTH = frozenset({"kernel_log", "nic_errors", "storage"})
OF_HEALTH: tuple[Check, ...] = tuple(check for check in CHECKS if check.name in _OF_HEALTH)
"""What shows whether a host is fit for a job of any kind."""

WITHOUT_A_LAUNCH: tuple[Check, ...] = (
    *CHECKS,
    Check("ptrace", check_ptrace),
    Check("tools", check_tools, _FILES_DEADLINE_S),
)
"""With what matters to who looks at a host, and not to a launch."""


def checks_for(context: CheckContext) -> tuple[Check, ...]:
    """The checks that are wanted."""
    wanted = OF_HEALTH if context.is_of_host else WITHOUT_A_LAUNCH if context.only else CHECKS
    # A later attempt waits for memory that the ranks before it have not given back.
    if wanted is CHECKS and context.spans_hosts and not context.attempt and context.health != "full":
        wanted = tuple(one._replace(deadline_s=_GPUS_AWAITED_S) if one.name == "gpus" else one for one in CHECKS)
    if context.health == "off":
        return tuple(check for check in wanted if check.name not in _ONLY_OF_HEALTH)
    if context.health != "full":
        return wanted
    from saferun.preflight.checks.compute import DEADLINE_S, check_compute

    return (*wanted, Check("compute", check_compute, DEADLINE_S, is_last=True))
