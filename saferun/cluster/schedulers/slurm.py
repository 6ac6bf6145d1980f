"""Slurm: what srun tells each task of a step."""

from __future__ import annotations

from saferun.cluster.schedulers.allocation import MOST_LISTED, MOST_STEPS, Allocation, Surroundings, number
from saferun.cluster.schedulers.host_list import expand_counts, expand_hosts

# Batch scripts, interactive shells and the like have step ids at the upper end of 32 bits (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def slurm(surroundings: Surroundings) -> Allocation | None:
    """The place of a task in its step.

    A batch script, and a shell that ``salloc`` opened, is no task of a step: it is alone on its host, whatever the job
    has been given. The variables of the step count, as those of the job stay what they were in steps on fewer hosts;
    in a heterogeneous step they tell of all its components together.

    See https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
    """
    environ = surroundings.environ
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID", most=MOST_STEPS)
    if not job or step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    names = slurm_names(environ.get("SLURM_STEP_NODELIST", ""))
    tasks_by_host = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = number(environ, "SLURM_STEP_NUM_NODES", most=MOST_LISTED) or len(names) or None
    node_rank = number(environ, "SLURM_NODEID")
    local_rank = number(environ, "SLURM_LOCALID")
    if hosts is None or node_rank is None or local_rank is None or node_rank >= hosts:
        return None
    if len(names) != hosts:
        names = ()
    if len(tasks_by_host) != hosts:
        tasks_by_host = ()
    tasks = tasks_by_host[node_rank] if tasks_by_host else _tasks_here(environ.get("SLURM_GTIDS", ""))
    if local_rank >= tasks:
        return None
    return Allocation(
        source=f"Slurm step {job}.{step}",
        key=f"slurm-{job}-{step}",
        hosts=hosts,
        hosts_from=f"SLURM_STEP_NUM_NODES={hosts}",
        node_rank=node_rank,
        node_rank_from=f"SLURM_NODEID={node_rank}",
        names=names,
        local_rank=local_rank,
        tasks=tasks,
        tasks_from=f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')}",
        tasks_by_host=tasks_by_host,
        master_addr=names[0] if names else None,
        master_from="the first of SLURM_STEP_NODELIST",
    )


def slurm_job(surroundings: Surroundings) -> int:
    """How many hosts a job has whose batch script, or shell, this process runs in; 0: in none, or in a step."""
    environ = surroundings.environ
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID", most=MOST_STEPS)
    if step is not None and step < _FIRST_SPECIAL_STEP:
        return 0
    return number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", most=MOST_LISTED) or 0


def slurm_names(text: str) -> tuple[str, ...]:
    """The hosts of a list of Slurm's; none where it is no such list."""
    try:
        return expand_hosts(text)
    except ValueError:
        return ()


def _counts(text: str) -> tuple[int, ...]:
    try:
        return expand_counts(text)
    except ValueError:
        return ()


def _tasks_here(gtids: str) -> int:
    return len([tid for tid in gtids.split(",") if tid.strip()]) or 1
