"""Parts of torchrun that are torch's own and stay so: numa binding, logs specs, event handlers."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def prepare(message: dict[str, Any]) -> dict[str, Any]:
    """Everything about an attempt that only torch knows, or the reason why it cannot be had."""
    usage = True  # what goes wrong first is the user's to put right
    try:
        reply: dict[str, Any] = {"op": "prepared"}
        _check_event_handler(message["handler"])
        if message["logs"]:
            reply["logs"], reply["changes"] = log_destinations(message["logs"], message["environs"])
        usage = False
        if message["numa"]:
            reply["numactl"] = [numactl_prefix(message["numa"], gpu) for gpu in _gpus(message["local_ranks"])]
        if message["file_timer"]:
            reply["timer_file"] = start_file_timer(message["run_id"], message["local_ranks"][0])
    except Exception as error:
        return {"op": "failed", "what": f"{type(error).__name__}: {error}", "usage": usage}
    return reply


def _check_event_handler(name: str) -> None:
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        raise ValueError(f"there is no event handler {name!r}") from None


def start_file_timer(run_id: str, first_local_rank: int) -> str:
    """Serve ``torch.distributed.elastic.timer`` for the ranks of an attempt (TORCHELASTIC_ENABLE_FILE_TIMER=1).

    Args:
        run_id: the job's.
        first_local_rank: of the ranks: other processes of this host may serve the timers of others.

    Returns:
        The file, which the ranks find by TORCHELASTIC_TIMER_FILE.
    """
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

    stop_file_timer()
    path = os.environ.get("TORCHELASTIC_TIMER_FILE")
    if path and first_local_rank:
        path += f".{first_local_rank}"
    path = path or os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")
    server = FileTimerServer(file_path=path, run_id=run_id, max_interval=0.1, daemon=True, log_event=None)
    server.start()
    _TIMERS.append(server)
    return path


def stop_file_timer() -> None:
    """End the timer of the previous attempt."""
    while _TIMERS:
        _TIMERS.pop().stop()


_TIMERS: list[Any] = []


def _gpus(local_ranks: list[int]) -> list[int]:
    """The GPU of each rank: that of its local rank, as under torchrun.

    A scheduler may have given each process of a host GPUs of its own, which count from 0.
    """
    if local_ranks[0] > 0:
        import torch

        if torch.cuda.device_count() == len(local_ranks):
            return list(range(len(local_ranks)))
    return local_ranks


def numactl_prefix(mode: str, gpu: int) -> list[str]:
    """The command that binds a rank to the CPUs near its GPU.

    Raises:
        Exception: the binding is not possible; torch says why.
    """
    from torch.numa.binding import AffinityMode, NumaOptions, _maybe_wrap_command_args_with_numa_binding

    options = NumaOptions(affinity_mode=AffinityMode(mode))
    wrapped = _maybe_wrap_command_args_with_numa_binding(("rank",), gpu_index=gpu, numa_options=options)
    return list(wrapped[:-1])


def log_destinations(
    settings: dict[str, Any], environs: list[dict[str, str]]
) -> tuple[dict[str, Any], list[dict[str, str | None]]]:
    """Ask a ``torchrun.logs_specs`` entry point where the streams of an attempt go.

    Args:
        settings: of the entry point.
        environs: what torchrun hands to it, by local rank.

    Returns:
        Where they go, and of each rank the variables that the entry point has set, added or (None) deleted.

    Raises:
        ValueError: there is no such entry point.
    """
    from torch.distributed.elastic.multiprocessing import Std

    name = settings["name"]
    matching = metadata.entry_points(group="torchrun.logs_specs", name=name)
    if not matching:
        raise ValueError(f"there is no entry point {name!r} in the group torchrun.logs_specs")
    specs_class = next(iter(matching)).load()
    # An instance lives as long as the launch, as under torchrun: it may remember its directory between attempts.
    specs = _SPECS.get(name)
    if specs is None:
        specs = _SPECS[name] = specs_class(
            log_dir=settings["log_dir"],
            redirects=_as_torchrun_has_them(Std, settings["redirects"]),
            tee=_as_torchrun_has_them(Std, settings["tee"]),
            local_ranks_filter=set(settings["local_ranks_filter"]) or None,
        )
    by_rank = {i: dict(environ) for i, environ in enumerate(environs)}
    found = specs.reify(by_rank)
    count = len(environs)
    return {
        "stdouts": [_path(found.stdouts[i]) for i in range(count)],
        "stderrs": [_path(found.stderrs[i]) for i in range(count)],
        "tee_stdouts": sorted(found.tee_stdouts),
        "tee_stderrs": sorted(found.tee_stderrs),
        "error_files": [_path(found.error_files.get(i)) for i in range(count)],
        "filtered_stdout": _path(found.filtered_stdout),
        "filtered_stderr": _path(found.filtered_stderr),
    }, [changes_of(environs[i], by_rank[i]) for i in range(count)]


def _as_torchrun_has_them(std: Any, masks: Sequence[int]) -> Any:  # noqa: ANN401 - torch's enum
    """What ``Std.from_str`` makes of an option: one value for all ranks, or those of some."""
    if len(set(masks)) <= 1:
        return std(masks[0] if masks else 0)
    return {i: std(mask) for i, mask in enumerate(masks) if mask}


def _path(found: str | bytes | os.PathLike[str] | None) -> str:
    """A file as an entry point names it; empty: none, as for torch."""
    return os.fsdecode(found) if found else ""


def changes_of(before: dict[str, str], after: dict[Any, Any]) -> dict[str, str | None]:
    """The variables that a plugin has set, added or (None) deleted.

    Raises:
        TypeError: one is neither text, bytes nor a path: torchrun cannot start a rank with it either.
    """
    changed = {os.fsdecode(name): os.fsdecode(value) for name, value in after.items() if before.get(name) != value}
    return {**dict.fromkeys(before.keys() - after.keys()), **changed}


_SPECS: dict[str, Any] = {}


def record_event(message: dict[str, Any]) -> None:
    """Hand one of torchrun's events to the handler that the user named."""
    from torch.distributed.elastic.events import record
    from torch.distributed.elastic.events.api import Event, EventSource

    fields = {"hostname": socket.getfqdn(socket.gethostname()), **message["metadata"]}
    source = EventSource[message["source"]]
    record(Event(f"torchelastic.worker.status.{fields['state']}", source, metadata=fields), message["handler"])
