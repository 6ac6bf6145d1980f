"""How many processors the ranks may use: affinity and the control group's quota, against how many ranks there are."""

from __future__ import annotations

from saferun.linux.small_files import read_pairs, read_text
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import list_of_numbers
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult
from saferun.text.wording import count_text

# A job that a scheduler started has the processors that it was granted, and one that forgot to ask has one.
_SCHEDULERS = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PBS_JOBID", "LSB_JOBID")


def check_cpus(context: CheckContext) -> CheckResult:
    """Whether every rank can have a processor of its own, where the host has as many.

    It is the grant that is judged, not the host: more ranks than the host has processors is the user's decision, all of
    eight ranks on one processor of sixty-four is a forgotten option.
    """
    from saferun.linux.cgroups import cpu_quota

    online = len(list_of_numbers(read_text(context.path("sys/devices/system/cpu/online"))))
    allowed = len(list_of_numbers(read_pairs(context.path("proc/self/status")).get("Cpus_allowed_list", "")))
    quota = cpu_quota(context.root)
    facts = (
        ("online", str(online)),
        ("allowed", str(allowed)),
        *((("quota", f"{quota:g}"),) if quota is not None else ()),
    )
    if not allowed or not online:
        return ok("the number of processors is not known", facts)
    message = f"the ranks may use {count_text(allowed, 'processor')} of {online}"
    # A quota is how containers are kept small; ranks that only launch kernels need a processor each.
    few_by_affinity = allowed < context.nproc <= online
    few_by_quota = quota is not None and quota < context.nproc <= online and context.vendor != "none"
    if few_by_affinity and (context.vendor != "none" or any(name in context.environ for name in _SCHEDULERS)):
        message = (
            f"{count_text(context.nproc, 'rank')} may use {count_text(allowed, 'processor')} of this host's {online}"
        )
        hint = (
            f"ask for more: srun --cpus-per-task={context.nproc} (or more), mpirun --bind-to none, docker --cpuset-cpus"
        )
        return warning(message, hint, facts)
    if few_by_quota:
        message = (
            f"the control group gives {context.nproc} ranks the time of {quota:g} of this host's {online} processors"
        )
        return warning(message, "raise the quota (docker --cpus, Kubernetes limits.cpu)", facts)
    if quota is not None:
        message += f", and of their time that of {quota:g}"
    return ok(message, facts)
