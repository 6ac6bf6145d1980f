"""Free memory of the host, and what the control group leaves of it."""

from __future__ import annotations

from saferun.linux.small_files import read_pairs
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import MIB
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult, Pairs
from saferun.text.wording import count_text, size_text

# What a rank takes that imports torch and joins a process group, before it does anything: about 225 MB with a build for
# CPUs, several times that with one for CUDA.
_RANK_BYTES = 225 * MIB


def check_memory(context: CheckContext) -> CheckResult:
    """Whether there is memory enough for the ranks to start at all. What they load then is not known."""
    from saferun.linux.cgroups import memory_room_bytes

    counts = _meminfo(context)
    available = counts.get("MemAvailable")
    cgroup_room = memory_room_bytes(context.root)
    facts: Pairs = tuple(
        (name, str(counts[name])) for name in ("MemTotal", "MemAvailable", "SwapFree") if name in counts
    )
    rooms: list[tuple[int, str, str]] = []
    if available is not None:
        # Swap keeps a job alive, if slowly.
        rooms.append((available + counts.get("SwapFree", 0), "the host has", "see who uses it (`ps aux --sort -rss`)"))
    if cgroup_room is not None:
        facts = (*facts, ("cgroup_room", str(cgroup_room)))
        rooms.append(
            (cgroup_room, "the control group's limit leaves", "ask for more memory (srun --mem, docker --memory)")
        )
    if not rooms:
        return ok("free memory is not known", facts)
    room, whose, hint = min(rooms)
    message = f"{whose} {size_text(room)} of memory"
    needed = _RANK_BYTES * context.nproc
    if context.python and room < needed:
        message += f", and {count_text(context.nproc, 'rank')} that import torch need {size_text(needed)}"
        return warning(message, hint, facts, class_name="host_out_of_memory")
    return ok(message, facts)


def _meminfo(context: CheckContext) -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes. Source: proc_meminfo(5)."""
    sizes = {name: value.removesuffix(" kB") for name, value in read_pairs(context.path("proc/meminfo")).items()}
    return {name: int(size) * 1024 for name, size in sizes.items() if size.isdecimal()}
