"""What /proc tells about a process: a short look that never waits, and a full picture for the files.

Source: proc(5).
"""

from __future__ import annotations

import threading
import time

from saferun.captures.scene import Scene
from saferun.captures.waiting import Ends, list_fds
from saferun.evidence import ProcessSnapshot
from saferun.linux.procfs import children_of, read_stat
from saferun.linux.small_files import list_directory, read_pairs, read_text
from saferun.linux.syscalls import SystemCall, before_restart, read_syscall
from saferun.model import JsonObject
from saferun.text.redaction import redacted_arguments

_THREADS_LIMIT = 256
_SHOWN_FDS_LIMIT = 128
_COMMAND_LIMIT = 200
_DESCENDANTS_LIMIT = 64
_COMMAND_WAIT_S = 0.25
_ARGUMENT_LIMIT = 4096


# ------------------------------------------------------------------------------------------------------- the short look


def read_process_look(rank: int, pid: int, *, is_rank: bool, ends: Ends | None = None) -> ProcessSnapshot:
    """One process at a glance. Never waits for it; one that is gone has the state ``?``.

    The command line is left empty: reading it waits for the lock of the process's address space, which one that hangs
    in the kernel may hold.
    """
    status = read_pairs(f"/proc/{pid}/status")
    wchan = read_text(f"/proc/{pid}/wchan").rstrip("\n")
    wchan = "" if wchan == "0" else wchan
    call = before_restart(read_syscall(pid), wchan)
    stat = read_stat(pid)
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
    )


def read_thread_states(pid: int) -> dict[int, str]:
    """The state of every thread of a process, by thread number; empty where it is gone."""
    tids = list_directory(f"/proc/{pid}/task")[:_THREADS_LIMIT]
    return {int(tid): stat.state for tid in tids if (stat := read_stat(f"{pid}/task/{tid}")) is not None}


def family_of(rank: int, pid: int, limit: int, ends: Ends) -> list[ProcessSnapshot]:
    """A rank and its living descendants, parents first, at a glance."""
    looks = [read_process_look(rank, pid, is_rank=True, ends=ends)]
    waiting = [pid]
    seen = {pid}
    while waiting and len(looks) < limit:
        for child in children_of(waiting.pop(0)):
            if child in seen:
                continue
            seen.add(child)
            look = read_process_look(rank, child, is_rank=False, ends=ends)
            if look.state not in "?ZX":
                looks.append(look)
                waiting.append(child)
    return looks[:limit]


# ----------------------------------------------------------------------------------------------------- the full picture


def capture_process_state(scene: Scene) -> None:
    """Write the full picture of every process, and give the looks again with what takes longer to find out."""
    ends = Ends((process.rank, process.pid, process.look.name) for process in scene.processes)
    ranks = [process for process in scene.processes if process.is_rank]
    others = [process for process in scene.processes if not process.is_rank]
    for process in (*ranks, *others[:_DESCENDANTS_LIMIT]):
        started_at = time.monotonic()
        scene.begin("process_state", process.place)
        if not scene.left_s:
            continue
        look = read_process_look(process.rank, process.pid, is_rank=process.is_rank, ends=ends)
        if look.state == "?":
            scene.note("process_state", process.place, started_at, failure="the process is gone")
            continue
        call = before_restart(read_syscall(process.pid), look.wchan)
        picture = _picture_of(process.pid, call, ends)
        # Last what may wait for the process.
        if "D" not in read_thread_states(process.pid).values():
            look = look._replace(waits_on=ends.deep(process.pid, call, look.wchan) or look.waits_on)
        look = look._replace(command=_read_command(process.pid))
        # The first look is from before anything was done to the process: its state, its place in the kernel hold.
        first = process.look
        merged = first._replace(command=look.command, waits_on=_better(first, look))
        scene.emit("look", merged)
        picture = {"rank": process.rank, "is_rank": process.is_rank, "command": look.command} | picture
        picture["waits_on"] = merged.waits_on
        path = scene.write_json("process_state", picture, process)
        scene.note("process_state", process.place, started_at, path=path)


def _better(first: ProcessSnapshot, second: ProcessSnapshot) -> str:
    same = first.syscall == second.syscall and first.wchan == second.wchan
    return second.waits_on if same and second.waits_on else first.waits_on


def _picture_of(pid: int, call: SystemCall | None, ends: Ends) -> JsonObject:
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
        "descriptors": {str(fd): ends.words(pid, fd, holders=True) for fd in fds[:_SHOWN_FDS_LIMIT]},
        "threads": [_thread_picture(pid, tid, state) for tid, state in sorted(read_thread_states(pid).items())],
    }


def _thread_picture(pid: int, tid: int, state: str) -> JsonObject:
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
    """The command line, shortened, secrets left out; empty where it is not to be had within a quarter of a second."""
    found: list[str] = []

    def read() -> None:
        found.append(read_text(f"/proc/{pid}/cmdline").rstrip("\n"))

    # A thread that waits in the kernel for somebody else's lock can only be left behind.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_COMMAND_WAIT_S)
    return command_words(found[0].split("\0")) if found else ""


def command_words(arguments: list[str]) -> str:
    """A command line as one short line, without secrets."""
    shown = redacted_arguments(argument[:_ARGUMENT_LIMIT] for argument in arguments)
    words = " ".join(filter(None, shown))
    return words if len(words) <= _COMMAND_LIMIT else f"{words[: _COMMAND_LIMIT - 1]}…"


# -------------------------------------------------------------------------------------------------------- reading /proc


def _number(pairs: dict[str, str], name: str) -> int:
    words = pairs.get(name, "").split()
    return int(words[0]) if words and words[0].isdigit() else 0
