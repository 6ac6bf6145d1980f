"""An environment -> the place of this process in its job, as a scheduler or MPI provides it. Pure.

One function a launcher, in the order in which they may be trusted: ``mpirun`` within a Slurm job leaves Slurm's
variables about, which then tell of ``mpirun``'s own daemons.
"""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.schedulers.allocation import Allocation, Surroundings
from saferun.cluster.schedulers.kubernetes import kubernetes
from saferun.cluster.schedulers.mpi import open_mpi, process_manager
from saferun.cluster.schedulers.queues import lsf, pbs
from saferun.cluster.schedulers.slurm import slurm

__all__ = ["BY_NAME", "DETECTORS", "Allocation", "Surroundings", "detect"]

Detector = Callable[[Surroundings], Allocation | None]

DETECTORS: tuple[Detector, ...] = (open_mpi, process_manager, slurm, lsf, kubernetes)

# By the values of --scheduler. PBS tells the first host of a job the same as a process that it started on it: only who
# asks for it gets it.
BY_NAME: dict[str, Detector] = {
    "slurm": slurm,
    "openmpi": open_mpi,
    "pmi": process_manager,
    "kubernetes": kubernetes,
    "lsf": lsf,
    "pbs": pbs,
}


def detect(surroundings: Surroundings) -> Allocation | None:
    """What the first launcher that is recognised tells about this process; None where there is none."""
    for detector in DETECTORS:
        allocation = detector(surroundings)
        if allocation is not None:
            return allocation
    return None
