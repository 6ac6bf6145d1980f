"""From a diagnosis, or from failed checks, to what decides about another attempt. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from saferun.supervisor.policy.attempts import INCOMPARABLE, AttemptProgress, FailureFacts, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from saferun.evidence.diagnosis_values import Cause, Diagnosis
    from saferun.evidence.job_evidence import Evidence

__all__ = ["facts_from", "progress_of"]

_FROM_THE_SCRIPT = frozenset(
    {"mpi_error", "permission_denied", "process_limit", "python_exception", "python_exit", "remote_service_error"}
)
"""What a script brings about unless torch raised it within ``init_process_group``."""
_IN_INIT = "in init_process_group"
_FRAME = re.compile(r'\s{0,40}File "([^"]{1,600})", line \d{1,9}')
_MEETS_IN = "/torch/distributed/"
_MEETS_WITH = re.compile(
    r"(?:torch\.distributed\.|torch\._C\._distributed_c10d\.)?Dist(?:Network|Store|Backend)Error\b"
)
_VARYING = frozenset(
    {
        "accelerator_error",
        "collective_timeout",
        "container_error",
        "cuda_error",
        "cuda_illegal_memory_access",
        "cuda_out_of_memory",
        "data_loader_worker_killed",
        "device_side_assert",
        "disk_full",
        "file_missing",
        "file_system_error",
        "gpu_hardware_error",
        "hip_error",
        "hip_illegal_memory_access",
        "host_oom_kill",
        "host_out_of_memory",
        "import_error",
        "missing_gpu",
        "mpi_error",
        "name_unknown",
        "nccl_timeout",
        "network_interface",
        "permission_denied",
        "process_limit",
        "remote_service_error",
        "scheduler_error",
        "shared_memory_exhausted",
        "too_many_open_files",
        "unknown",
    }
)
"""Timeouts, GPUs, memory, input and output, networks: however alike two of them are, a third need not follow.

Files that are missing may come: an environment is being unpacked, a file system is mounted late.
"""
_OF_ARGUMENTS_ALONE = re.compile(
    r"unrecognized arguments|the following arguments are required|expected (?:one|at least one|\d{1,3}) argument"
    r"|invalid (?:int|float) value|ambiguous option|not allowed with argument|[Nn]o such option"
    r"|[Mm]issing (?:option|argument)"
)
"""What argparse and click say of a command line that no file makes right."""
_HANG = "hang_"
# The message of a cause that is read behind the name of a host.
_OF_A_HOST = ("its ", "it is ")
_MOST_NAMED = 4
_UNREAD = re.compile(r'  File "([^"]{1,600})", line \d{1,9}$')
_IO_ERRORS = frozenset(
    {
        *("BlockingIOError", "BrokenPipeError", "ChildProcessError", "ConnectionAbortedError", "ConnectionError"),
        *("ConnectionRefusedError", "ConnectionResetError", "EOFError", "EnvironmentError", "FileExistsError"),
        *("FileNotFoundError", "IOError", "InterruptedError", "IsADirectoryError", "NotADirectoryError", "OSError"),
        *("PermissionError", "ProcessLookupError", "TimeoutError"),
    }
)
"""OSError, what inherits from it, and the end of a file that should have been longer."""
_NETWORK = re.compile(
    r"Timeout|TimedOut|Connect|HTTP|URLError|Network|DistStoreError|SSLError|gaierror|RpcError|Unavailable|IOError"
    r"|^(?:requests|urllib3|aiohttp|httpx|botocore|boto3|s3fs|gcsfs|fsspec|google|azure|grpc|socket|ssl|http)\."
)
# Locked memory, file modes, and containers of one host that do not share /dev/shm.
_LASTS = re.compile(
    r"Cannot allocate memory|\bRC: 12\b|\berrno 12\b|\bshm_open failed ?: Permission denied"
    r"|\bshared memory segment .{0,160}(?:[Pp]ermission denied|No such file)"
)
_NETWORK_MESSAGES = re.compile(r"[Tt]imed? ?out|[Cc]onnection (?:reset|refused|closed|aborted)|Input/output error")


def facts_from(
    diagnosis: Diagnosis,
    *,
    restarting_allowed: bool = True,
    stop_reason: str = "",
    error_class: str = "",
    port_is_free: bool = False,
    progress: AttemptProgress | None = None,
    script: str = "",
) -> FailureFacts:
    """What of a diagnosis decides about another attempt.

    Args:
        diagnosis: of the failed attempt; ``start`` says how far its start had come.
        restarting_allowed: whether there may be another attempt at all.
        stop_reason: why not.
        error_class: the class of what saferun itself could not do, where no rank failed: ``store_lost`` where the
            store's process ended, that of a failed check. It counts where the diagnosis names no cause.
        port_is_free: whether another port may be taken for the store.
        progress: how far the attempt had come.
        script: the path of the ranks' script, as far as there is one.
    """
    cause = diagnosis.cause
    class_name = error_class or "unknown"
    message = diagnosis.headline
    if cause is not None:
        # What follows is for the report: the last line of a rank, say.
        class_name, message = cause.class_name, cause.message.partition("; ")[0]
        if message.startswith(_OF_A_HOST):
            message = f"{_hosts_of(diagnosis, cause.ranks)}{message}"
    is_inside = diagnosis.start == "inside"
    if is_inside and class_name in _FROM_THE_SCRIPT:
        is_inside = _was_raised_in_init(diagnosis)
    lasts = cause is not None and _lasts(cause)
    host, label = _host_of(diagnosis, cause.ranks if cause is not None else ())
    return FailureFacts(
        class_name,
        _fingerprint(diagnosis, class_name),
        is_start_over=diagnosis.start == "through" if diagnosis.start else None,
        in_init=is_inside,
        transient_override=False if lasts else None,
        of_start=_is_of_start(diagnosis, class_name, progress),
        host=host,
        host_label=label,
        restarting_allowed=restarting_allowed,
        stop_reason=stop_reason,
        message=message,
        port_is_free=port_is_free,
        progress=progress,
        may_differ=lasts or _may_differ(class_name, cause.proof if cause is not None else ""),
        unreadable=class_name == "syntax_error" and _is_unread(diagnosis, script, progress),
    )


def progress_of(evidence: Evidence, *, lived_s: float, window_s: float, has_sent_heartbeat: bool) -> AttemptProgress:
    """How far an attempt had come.

    Args:
        evidence: of the attempt.
        lived_s: from the start of its ranks to the end of the last one, in seconds.
        window_s: ``--start-window``.
        has_sent_heartbeat: whether a rank has called ``saferun.heartbeat``.
    """
    reached = [group.enqueued for one in evidence.capture.collectives for group in one.groups]
    return AttemptProgress(lived_s, lived_s < window_s, has_sent_heartbeat, max(reached, default=-1))


def _may_differ(class_name: str, proof: str) -> bool:
    """Whether a cause may be gone the next time. ``proof``: the last line of a traceback, where it is an exception."""
    if class_name in _VARYING or class_name.startswith(_HANG):
        return True
    if class_name == "usage_error":
        return _OF_ARGUMENTS_ALONE.search(proof) is None
    exception = proof.partition(":")[0].strip()
    return (
        exception.rpartition(".")[2] in _IO_ERRORS
        or _NETWORK.search(exception) is not None
        or _NETWORK_MESSAGES.search(proof) is not None
    )


def _lasts(cause: Cause) -> bool:
    """Whether a system error of NCCL's comes of a limit or the set-up of the host: seconds later it is the same.

    It does not end restarts: it may be mended meanwhile.
    """
    return cause.class_name == "nccl_system_error" and _LASTS.search(cause.proof) is not None


def _was_raised_in_init(diagnosis: Diagnosis) -> bool:
    """Whether the traceback of the rank that failed goes through ``init_process_group``."""
    ranks = {*(diagnosis.cause.ranks if diagnosis.cause is not None else ())}
    ranks |= {diagnosis.first_failure.rank} if diagnosis.first_failure is not None else set()
    printed = (line for text in diagnosis.tracebacks if ranks & {*text.ranks} for line in text.lines)
    return any(_IN_INIT in line for line in printed)


def _is_of_start(diagnosis: Diagnosis, class_name: str, progress: AttemptProgress | None) -> bool:
    """Whether it was the start of the job that failed, and not something that the script does by itself.

    A script may also look up a name, bind a port or read a file, and be one that must not run twice.
    """
    cause = diagnosis.cause
    if cause is None or not cause.ranks or class_name == "gpu_busy" or (progress is not None and not progress.lived_s):
        return True
    ranks = {*cause.ranks}
    text = next((text for text in diagnosis.tracebacks if ranks & {*text.ranks}), None)
    if text is None:
        return diagnosis.start == "inside"
    # Where it was raised: what is further up calls anything.
    files = [frame[1] for frame in map(_FRAME.match, text.lines) if frame is not None]
    return (bool(files) and _MEETS_IN in files[-1]) or _MEETS_WITH.match(cause.proof) is not None


def _is_unread(diagnosis: Diagnosis, script: str, progress: AttemptProgress | None) -> bool:
    """Whether Python could not read the script: it prints the location in that file, without the header of a traceback.

    A SyntaxError of anything that the script itself reads, imports or evaluates has that header.
    """
    name = script.rpartition("/")[2]
    has_begun = progress is None or progress.has_sent_heartbeat or not progress.in_window or progress.collectives >= 0
    if has_begun or diagnosis.start != "before" or not name or diagnosis.first_failure is None:
        return False
    rank = diagnosis.first_failure.rank
    first = next((text.lines[0] for text in diagnosis.tracebacks if rank in text.ranks and text.lines), "")
    location = _UNREAD.match(first)
    return location is not None and location[1].rpartition("/")[2] == name


def _fingerprint(diagnosis: Diagnosis, class_name: str) -> Fingerprint:
    if class_name in INCOMPARABLE:
        return Fingerprint(class_name)
    cause: Cause | None = diagnosis.cause
    if cause is None:
        # What saferun could not do: the rank that failed, if any, is a victim of that.
        return Fingerprint(class_name, (), _plain(diagnosis.headline) if diagnosis.first_failure is None else "")
    if class_name == "python_exit":
        # Neither a place nor a reason: what such a program wrote last is not why it ended.
        return Fingerprint(class_name, tuple(sorted(cause.ranks)), cause.location, bool(cause.location))
    return Fingerprint(
        class_name, tuple(sorted(cause.ranks)), cause.location or _plain(cause.proof), bool(cause.location)
    )


def _plain(text: str) -> str:
    """A message without its numbers: of ports, processes, times."""
    return "".join("#" if char.isdigit() else char for char in text[:400])


def _hosts_of(diagnosis: Diagnosis, ranks: Sequence[int]) -> str:
    """``node2, node3: `` where these hosts have the ranks, for a message about them that does not name them."""
    theirs = [host.label for host in diagnosis.hosts if {*host.ranks} & {*ranks}]
    if not theirs:
        return ""
    more = f" and {len(theirs) - _MOST_NAMED} more" if len(theirs) > _MOST_NAMED else ""
    return f"{', '.join(theirs[:_MOST_NAMED])}{more}: "


def _host_of(diagnosis: Diagnosis, ranks: Sequence[int]) -> tuple[int | None, str]:
    """The one host that has all the ranks."""
    if len(diagnosis.hosts) < 2 or not ranks:  # noqa: PLR2004 - alone it is no other host's fault
        return None, ""
    theirs = [host for host in diagnosis.hosts if {*host.ranks} & {*ranks}]
    return (theirs[0].host, theirs[0].label) if len(theirs) == 1 else (None, "")
