"""Lines of ranks that are in order, or in one piece; and a line about memory."""

from __future__ import annotations

import os
import socket
import sys
import time

from saferun.api.script.rank_meeting import RanksMissingError, StoreMeeting
from saferun.errors import printable_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LONGEST_BYTES = 1 << 16
_LOCK_S = 1.0
_MIB = 1 << 20


def print_in_order(*values: object, group: ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
    """Print the text of each rank, in the order of the ranks: the first rank of the group prints all of it.

    Lines that each rank prints for itself pass through pipes of their own, and may change places there. All ranks of
    the group call it. Costs a message to the store from each rank, and the first one waits for all others.

    Args:
        values: as of ``print``; at most 64 KiB a rank.
        group: the group; None: all ranks. Without a process group it is ``print``.
        timeout_s: how long the first rank waits. Those that have not come by then are named instead.
    """
    text = " ".join(map(str, values))
    meeting = StoreMeeting("print_in_order", group, timeout_s)
    if len(meeting.ranks) == 1:
        print(printable_lines(text), flush=True)  # noqa: T201 - it is a print
        return
    meeting.leave(text.encode(errors="replace")[:_LONGEST_BYTES])
    if meeting.rank != meeting.ranks[0]:
        return
    missing: tuple[int, ...] = ()
    try:
        meeting.await_all()
    except RanksMissingError as error:
        missing = error.ranks
    lines = []
    for rank in meeting.ranks:
        printed = meeting.read(rank).decode(errors="replace") if rank not in missing else "(has not come)"
        lines += [f"rank {rank}: {line}" for line in printed.replace("\0", "").split("\n")]
    print(printable_lines("\n".join(lines)), flush=True)  # noqa: T201 - as above
    for rank in meeting.ranks:
        if rank not in missing:
            meeting.remove(rank)


def locked_print(*values: object) -> None:
    """Print in one piece, while no other rank of this host does: for launchers that mix the output of ranks.

    saferun itself never mixes lines. Costs some 20 µs, or the wait for the other ranks' prints, for 1 s at most; then
    it prints all the same.
    """
    text = " ".join(map(str, values)) + "\n"
    job = "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    with socket.socket(socket.AF_UNIX) as lock:
        until = time.monotonic() + _LOCK_S
        # A name that only one process can have, and that is free when that ends, however it ends.
        while time.monotonic() < until:
            try:
                lock.bind(f"\0saferun-print-{os.getuid()}-{job}"[:100])
                break
            except OSError:
                time.sleep(0.001)
        sys.stdout.write(text)
        sys.stdout.flush()


def memory_line() -> str:
    """The memory of this process and of its GPUs as one line, for instance for a print once an epoch.

    Costs some 50 µs: it reads /proc and counters of torch's allocator, and does not wait for a GPU.
    """
    sizes = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in {"VmRSS", "VmHWM"}:
                sizes[name] = int(value.split()[0]) * 1024
    parts = [f"host {_size(sizes.get('VmRSS', 0))} (peak {_size(sizes.get('VmHWM', 0))})"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            reserved = torch.cuda.memory_reserved(number)
            if reserved:
                used, peak = torch.cuda.memory_allocated(number), torch.cuda.max_memory_allocated(number)
                parts.append(f"cuda:{number} {_size(used)} (peak {_size(peak)}, reserved {_size(reserved)})")
    return "memory: " + ", ".join(parts)


def _size(count: float) -> str:
    return f"{count / _MIB:.0f} MiB" if count < 1024 * _MIB else f"{count / _MIB / 1024:.2f} GiB"
