"""The state of a process from /proc: a snapshot that never blocks, and the full state for the files.

Source: proc(5).
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from saferun.captures.other_ends import OtherEnds
from saferun.captures.scene import Process, Scene
from saferun.captures.waiting import Ends, list_fds
from saferun.evidence.job_evidence import ProcessSnapshot
from saferun.evidence.wait_evidence import EPHEMERAL_FROM, JobPorts, ThreadWait
from saferun.linux.procfs import children_of, read_stat, thread_ids
from saferun.linux.small_files import read_line, read_pairs, read_text
from saferun.linux.syscalls import SystemCall, before_restart, read_syscall
from saferun.model import JsonObject
from saferun.text.redaction import redacted_arguments

FAMILY_LIMIT = 256
"""How many processes of a rank, with itself, are captured."""
_SHOWN_THREADS_LIMIT = 256
_SHOWN_FDS_LIMIT = 128
_COMMAND_LIMIT = 200
_DESCENDANTS_LIMIT = 64
_COMMAND_WAIT_S = 0.25
_ARGUMENT_LIMIT = 4096
# One process must not take the time of all others.
_OTHER_ENDS_S = 1.0


# -------------------------------------------------------------------------------------------------------- the snapshot


def read_snapshot(rank: int, pid: int, *, is_rank: bool, ends: Ends | None = None) -> ProcessSnapshot:
    """A snapshot of one process. Never blocks; a process that has exited has the state ``?``.

    The command line is left empty: reading it takes the lock of the process's address space, which a process that hangs
    in the kernel may hold.
    """
    status = read_pairs(f"/proc/{pid}/status")
    wchan = read_text(f"/proc/{pid}/wchan").rstrip("\n")
    wchan = "" if wchan == "0" else wchan  # it runs, or that may not be read
    call = before_restart(read_syscall(pid), wchan)
    stat = read_stat(pid)
    is_readable = bool(call or wchan or read_text(f"/proc/{pid}/io"))
    return ProcessSnapshot(
        rank=rank,
        pid=pid,
        ppid=stat.ppid if stat is not None else 0,
        is_rank=is_rank,
        name=status.get("Name", ""),
        command="",
        state=status.get("State", "?")[:1],
        wchan=wchan,
        syscall=call.name if call is not None else "",
        threads=_number(status, "Threads"),
        tracer_pid=_number(status, "TracerPid"),
        core_dumping=_number(status, "CoreDumping") == 1,
        rss_bytes=_number(status, "VmRSS") * 1024,
        waits_on=(ends or Ends()).quick(pid, call, wchan) if call is not None or wchan else "",
        cpu_s=stat.cpu_s if stat is not None else 0.0,
        unreadable=stat is not None and not is_readable,
    )


def read_thread_states(pid: int) -> dict[int, str]:
    """The state of every thread of a process, by thread id; empty if it has exited."""
    return {tid: stat.state for tid in thread_ids(pid) if (stat := read_stat(f"{pid}/task/{tid}")) is not None}


def tree_snapshots(rank: int, pid: int, limit: int, ends: Ends) -> list[ProcessSnapshot]:
    """Snapshots of a rank and its living descendants, parents first."""
    found = [read_snapshot(rank, pid, is_rank=True, ends=ends)]
    waiting = [pid]
    seen = {pid}
    while waiting and len(found) < limit:
        for child in children_of(waiting.pop(0)):
            if child in seen:
                continue
            seen.add(child)
            snapshot = read_snapshot(rank, child, is_rank=False, ends=ends)
            if snapshot.state not in "?ZX":
                found.append(snapshot)
                waiting.append(child)
    return found[:limit]


# ------------------------------------------------------------------------------------------------------ the full state


def capture_process_state(scene: Scene) -> None:
    """Write the full state of every process, and emit the snapshots again with what takes longer to find out."""
    ends = Ends((process.rank, process.pid, process.snapshot.name) for process in scene.processes)
    other_ends = OtherEnds(ends)
    ranks = [process for process in scene.processes if process.is_rank]
    others = [process for process in scene.processes if not process.is_rank]
    for process in (*ranks, *others[:_DESCENDANTS_LIMIT]):
        started_at = time.monotonic()
        scene.begin("process_state", process.key)
        if not scene.left_s:
            continue
        snapshot = read_snapshot(process.rank, process.pid, is_rank=process.is_rank, ends=ends)
        if snapshot.state == "?":
            scene.note("process_state", process.key, started_at, failure="the process is gone")
            continue
        call = before_restart(read_syscall(process.pid), snapshot.wchan)
        state = _full_state(process.pid, call, ends)
        # What may block on the process comes last.
        is_readable = "D" not in read_thread_states(process.pid).values()
        if is_readable:
            snapshot = snapshot._replace(waits_on=ends.deep(process.pid, call, snapshot.wchan) or snapshot.waits_on)
        waits = _other_ends(scene, process, other_ends, is_readable=is_readable)
        snapshot = snapshot._replace(command=_read_command(process.pid))
        # The first snapshot was taken before any tool touched the process: its state and kernel function are kept.
        first = process.snapshot
        merged = first._replace(command=snapshot.command, waits_on=_better(first, snapshot), waits=waits)
        scene.emit("snapshot", merged)
        state = {"rank": process.rank, "is_rank": process.is_rank, "command": snapshot.command} | state
        state["waits_on"] = merged.waits_on
        path = scene.write_json("process_state", state, process)
        scene.note("process_state", process.key, started_at, path=path)
    # (Later than the rest: what tools do to the processes does not change it.)
    _emit_ports(scene, ends)


def _other_ends(scene: Scene, process: Process, ends: OtherEnds, *, is_readable: bool) -> tuple[ThreadWait, ...]:
    """The waits of its threads; where they cannot be found out, all the rest is there without them."""
    try:
        deadline = time.monotonic() + min(_OTHER_ENDS_S, scene.left_s)
        return ends.of_process(process.pid, is_readable=is_readable, deadline=deadline)
    except Exception as error:
        scene.note("other_ends", process.key, time.monotonic(), failure=repr(error))
        return ()


def _emit_ports(scene: Scene, ends: Ends) -> None:
    """Which ports are the job's, for ranks of other hosts that are connected to them."""
    ranks = tuple(sorted({process.rank for process in scene.processes if process.is_rank}))
    try:
        ports, has_all = ends.ports()
    except Exception as error:
        scene.note("ports", (-1, 0), time.monotonic(), failure=repr(error))
        return
    families = Counter(process.rank for process in scene.processes)
    is_whole = has_all and max(families.values(), default=0) < FAMILY_LIMIT
    first = read_line("/proc/sys/net/ipv4/ip_local_port_range").partition("\t")[0]
    kernels_from = int(first) if first.isdigit() else EPHEMERAL_FROM
    scene.emit("ports", JobPorts(ranks, ports, is_whole, kernels_from))


def _better(first: ProcessSnapshot, second: ProcessSnapshot) -> str:
    same = first.syscall == second.syscall and first.wchan == second.wchan
    return second.waits_on if same and second.waits_on else first.waits_on


def _full_state(pid: int, call: SystemCall | None, ends: Ends) -> JsonObject:
    status = read_pairs(f"/proc/{pid}/status")
    fds = list_fds(pid)
    return {
        "pid": pid,
        "name": status.get("Name", ""),
        "state": status.get("State", "?"),
        "wchan": read_text(f"/proc/{pid}/wchan").rstrip("\n"),
        "syscall": {"name": call.name, "arguments": [hex(value) for value in call.arguments]} if call else None,
        "kernel_stack": read_text(f"/proc/{pid}/stack").rstrip("\n").splitlines(),
        "oom_score": read_text(f"/proc/{pid}/oom_score").rstrip("\n"),
        "oom_score_adj": read_text(f"/proc/{pid}/oom_score_adj").rstrip("\n"),
        "cgroup": read_text(f"/proc/{pid}/cgroup").rstrip("\n").splitlines(),
        "status": status,
        "io": read_pairs(f"/proc/{pid}/io"),
        "limits": read_text(f"/proc/{pid}/limits").rstrip("\n").splitlines(),
        "open_files": len(fds),
        "descriptors": {str(fd): ends.describe(pid, fd, holders=True) for fd in fds[:_SHOWN_FDS_LIMIT]},
        "threads": [_thread_state(pid, tid, state) for tid, state in _shown_threads(pid)],
    }


def _shown_threads(pid: int) -> list[tuple[int, str]]:
    """The main thread and, of many others, those that do not just sleep."""
    states = read_thread_states(pid)
    telling = sorted(states, key=lambda tid: (tid != pid, states[tid] in {"S", "I"}, tid))
    return sorted((tid, states[tid]) for tid in telling[:_SHOWN_THREADS_LIMIT])


def _thread_state(pid: int, tid: int, state: str) -> JsonObject:
    wchan = read_text(f"/proc/{pid}/task/{tid}/wchan").rstrip("\n")
    call = before_restart(read_syscall(pid, tid), wchan)
    return {
        "tid": tid,
        "name": read_text(f"/proc/{pid}/task/{tid}/comm").rstrip("\n"),
        "state": state,
        "wchan": wchan,
        "syscall": call.name if call is not None else "",
    }


# ---------------------------------------------------------------------------------------------------------- the command


def _read_command(pid: int) -> str:
    """The command line, shortened, without secrets; empty if it cannot be read within a quarter of a second."""
    found: list[str] = []

    def read() -> None:
        found.append(read_text(f"/proc/{pid}/cmdline").rstrip("\n"))

    # A thread that blocks in the kernel on another process's lock can only be left behind.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_COMMAND_WAIT_S)
    return command_text(found[0].split("\0")) if found else ""


def command_text(arguments: list[str]) -> str:
    """A command line as one short line, without secrets."""
    shown = redacted_arguments(argument[:_ARGUMENT_LIMIT] for argument in arguments)
    text = " ".join(filter(None, shown))
    return text if len(text) <= _COMMAND_LIMIT else f"{text[: _COMMAND_LIMIT - 1]}…"


# -------------------------------------------------------------------------------------------------------- reading /proc


def _number(pairs: dict[str, str], name: str) -> int:
    fields = pairs.get(name, "").split()
    return int(fields[0]) if fields and fields[0].isdigit() else 0
