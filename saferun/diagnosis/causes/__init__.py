"""What a rank failed of: rules, the special ones first. Pure.

A rule is a function of one failure, which gives the cause that it knows or None. To add one, write it in the file of
its family, put it into ``RULES`` where nothing more special comes after it, and record the messages of real
programs in ``tests/unit/diagnosis/recorded_failures/``.
"""

from __future__ import annotations

import enum

from saferun.diagnosis.causes import (
    accelerators,
    communication,
    containers,
    exhaustion,
    fabric,
    fatal_signals,
    gpu,
    imports,
    own_timer,
    python,
    rendezvous,
    schedulers,
    services,
    workers,
)
from saferun.diagnosis.causes.failure import Failure, Rule, cause
from saferun.evidence.diagnosis_values import Cause


class Role(enum.IntEnum):
    """How well a cause explains that a whole job failed. The lesser counts."""

    CULPRIT = 0
    """Something that a rank brings about alone."""
    TIMEOUT = 1
    """It waited for another rank, which did not fail but did not come either."""
    VICTIM = 2
    """It failed because another one had."""


RULES: tuple[Rule, ...] = (
    fatal_signals.sent_by_another_process,
    exhaustion.host_oom_kill,
    fatal_signals.scheduler_timeout,
    # Whatever stands before the last words.
    python.arguments_error,
    own_timer.own_timer,
    # By the message of an exception, Python's or C++'s.
    gpu.hardware_error,
    gpu.illegal_memory_access,
    gpu.side_assert,
    gpu.out_of_memory,
    accelerators.device_memory,
    gpu.missing_gpu,
    gpu.busy_gpu,
    communication.mismatched_collectives,
    communication.nccl_timeout,
    fabric.expert_timeout,
    rendezvous.port_in_use,
    rendezvous.name_failure,
    services.service_error,
    fabric.fabric_error,
    communication.victim,
    # Before the lack of memory: what RDMA cannot lock is none.
    fabric.rdma_system_error,
    communication.collective_timeout,
    exhaustion.data_loader_worker,
    workers.engine_worker,
    exhaustion.exhausted,
    gpu.error_in_nccl,
    communication.nccl_error,
    gpu.gpu_error,
    communication.watchdog_ended,
    accelerators.accelerator_error,
    rendezvous.store_failure,
    fabric.mpi_error,
    exhaustion.file_system_error,
    containers.container_error,
    schedulers.scheduler_error,
    workers.launched_process,
    # By how it ended.
    fatal_signals.killed_from_outside,
    exhaustion.shared_memory,
    imports.library_unusable,
    fatal_signals.crash,
    fatal_signals.abort,
    fatal_signals.broken_pipe,
    python.syntax_error,
    imports.import_error,
    python.usage_error,
    python.connection_lost,
    python.assertion_error,
    python.file_missing,
    python.permission_denied,
    imports.library_missing,
    python.by_errno_text,
    python.python_exception,
    python.python_exit,
)

_ROLES = {
    "nccl_timeout": Role.TIMEOUT,
    "collective_timeout": Role.TIMEOUT,
    "rendezvous_store_failure": Role.TIMEOUT,
    "connection_lost": Role.TIMEOUT,
    "fabric_error": Role.TIMEOUT,
    "store_lost": Role.VICTIM,
    "peer_lost": Role.VICTIM,
    "communicator_aborted": Role.VICTIM,
    "worker_stopped": Role.VICTIM,
    "broken_pipe": Role.VICTIM,
}


def cause_of(failure: Failure) -> Cause:
    """What a rank failed of; the class ``unknown`` where no rule knows."""
    for rule in RULES:
        found = rule(failure)
        if found is not None:
            return found
    message = failure.end.status.description
    return cause(failure, "unknown", message, "look at the rank's output in its files")


def role_of(found: Cause) -> Role:
    """Whether a cause can be that of the whole job."""
    return _ROLES.get(found.class_name, Role.CULPRIT)
