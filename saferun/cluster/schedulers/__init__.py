"""An environment -> the place of this process in its job, as a scheduler or MPI provides it. Pure.

One function a launcher, in the order in which they may be trusted: ``mpirun`` within a Slurm job leaves Slurm's
variables about, which then tell of ``mpirun``'s own daemons, and a cloud's container may have any of them within.
"""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.schedulers.allocation import Allocation, Ancestry, Surroundings, started_by
from saferun.cluster.schedulers.clouds import aws_batch, ray_train, sagemaker
from saferun.cluster.schedulers.kubernetes import kubernetes
from saferun.cluster.schedulers.mpi import mpirun_rsh, open_mpi, process_manager
from saferun.cluster.schedulers.queues import flux, htcondor, lsf, lsf_job, pbs, pbs_job
from saferun.cluster.schedulers.slurm import slurm, slurm_job

__all__ = ["BY_NAME", "DETECTORS", "Allocation", "Ancestry", "Surroundings", "detect", "started_by", "unused_hosts"]

Detector = Callable[[Surroundings], Allocation | None]

DETECTORS: tuple[Detector, ...] = (
    *(open_mpi, process_manager, mpirun_rsh, flux, slurm, lsf, htcondor),
    *(kubernetes, sagemaker, aws_batch, ray_train),
)

# By the values of --scheduler. PBS tells the first host of a job the same as a process that it started on it: only who
# asks for it gets it.
BY_NAME: dict[str, Detector] = {
    "slurm": slurm,
    "openmpi": open_mpi,
    "pmi": process_manager,
    "mvapich": mpirun_rsh,
    "kubernetes": kubernetes,
    "lsf": lsf,
    "pbs": pbs,
    "flux": flux,
    "htcondor": htcondor,
    "sagemaker": sagemaker,
    "batch": aws_batch,
    "ray": ray_train,
}


_NAMES = {detector: name for name, detector in BY_NAME.items()}


def detect(surroundings: Surroundings) -> Allocation | None:
    """What the first launcher that is recognised tells about this process; None where there is none."""
    for detector in DETECTORS:
        allocation = detector(surroundings)
        if allocation is not None:
            return allocation._replace(scheduler=_NAMES[detector])
    return None


# How many hosts a job has in whose batch script this process may run, and what starts a process on each.
_JOBS: tuple[tuple[Callable[[Surroundings], int], str], ...] = (
    (slurm_job, "srun"),
    (lsf_job, "blaunch -z or mpirun"),
    (pbs_job, "mpirun or pbsdsh"),
)


def unused_hosts(surroundings: Surroundings) -> tuple[int, str]:
    """How many hosts were given to the job in whose batch script this process runs, and what would start it on all."""
    for count, starter in _JOBS:
        hosts = count(surroundings)
        if hosts:
            return hosts, starter
    return 0, ""
