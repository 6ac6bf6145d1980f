"""Samples of the progress of processes from /proc, as cheap as possible.

Only files are read that wait for nothing: neither for the lock on a process's memory map (``cmdline``, ``environ``,
``maps`` and ``smaps`` do) nor for the process itself; before Linux 5.7 ``io`` waits for its exec, and is left out where
it may be in one. A process that has not run since its last sample costs a
system call or two, one that has run five files, about 10 µs each.

Source: proc(5), clock_getcpuclockid(3), and fs/proc/array.c, fs/proc/base.c and kernel/sched/stats.h of Linux for which
of the numbers are of one thread and which of all.
"""

from __future__ import annotations

import os
import time

from saferun.linux.procfs import children_of, may_wait_for_exec
from saferun.linux.small_files import has_own_processes, read_link
from saferun.watchdog.samples import ProcessSample

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_FORKED_NO_EXEC = 0x40  # PF_FORKNOEXEC in include/linux/sched.h
_BUSY_THREADS_SHARE = 0.03
# A family of more processes is judged by those that were found first.
_FAMILY_LIMIT = 2048


def newest_pid() -> int:
    """The number that was given to a process or thread last; while it stays the same, no process has been started.

    0 where it is unknown. Source: proc(5), /proc/loadavg.
    """
    try:
        return int(_read("/proc/loadavg").split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


class ProcessReader:
    """Reads one process again and again."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_python = _is_python(pid)
        self._last: ProcessSample | None = None
        self._last_at = 0.0
        self._threads: dict[str, int] = {}
        self._io_before: tuple[int, int] | None = (0, 0)  # what is no progress; None: what is read next
        self._has_schedstat = True

    def read(self, *, closely: bool) -> ProcessSample | None:
        """The process now; None where it is gone, or has ended and waits to be reaped.

        Args:
            closely: whether to read more: whether it is being debugged or dumps its core, how busy its threads are, and
                its state even if it has not run since it was read last.
        """
        pid = self.pid
        if not has_own_processes():
            return None
        try:
            cpu_ns = time.clock_gettime_ns((~pid << 3) | 2)
            if not closely and self._last is not None and self._last.cpu_ns == cpu_ns:
                return self._last
            sample = self._read_all(cpu_ns, closely=closely)
        except (OSError, ValueError, IndexError):
            self._last = None
            return None
        self._last = sample
        return sample

    def _read_all(self, cpu_ns: int, *, closely: bool) -> ProcessSample | None:
        pid, last = self.pid, self._last
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        elapsed_s, self._last_at = now - self._last_at, now
        content = _read(f"/proc/{pid}/task/{pid}/stat")
        # The name stands in parentheses and may itself hold spaces and parentheses.
        name_end = content.rindex(b")")
        fields = content[name_end + 2 :].split()
        state = fields[0].decode()
        if state in "ZX" and int(fields[17]) <= 1:
            # (Where only the main thread has ended, the others may still be at work.)
            return None
        start_ticks = int(fields[19])
        traced, core_dumping, switches = _read_status(pid) if closely else (False, False, 0)
        if last is not None and last.cpu_ns == cpu_ns and last.start_ticks == start_ticks:
            # It has not run: all the rest is as it was.
            return last._replace(
                state=state, age_s=last.age_s + elapsed_s, busy_thread_ns=0, traced=traced, core_dumping=core_dumping
            )
        if last is not None and last.start_ticks != start_ticks:
            last = None
        may_block = may_wait_for_exec(pid, state)
        if may_block:
            state = "D"  # also where it waits for a file system in another one
        main_io_bytes, io_bytes = self._count_io(last, may_block=may_block)
        main_run_ns, main_wait_ns, main_wakes = self._read_main(fields, switches)
        busy_thread_ns = -1
        if closely and last is not None:
            others_ns = (cpu_ns - last.cpu_ns) - (main_run_ns - last.main_run_ns)
            busy_thread_ns = self._read_threads(others_ns, elapsed_s)
        return ProcessSample(
            pid=pid,
            start_ticks=start_ticks,
            age_s=now - start_ticks * _TICK_NS / 1e9,
            forked=bool(int(fields[6]) & _FORKED_NO_EXEC),
            comm=content[content.index(b"(") + 1 : name_end].decode(errors="replace"),
            state=state,
            main_run_ns=main_run_ns,
            main_wait_ns=main_wait_ns,
            main_wakes=main_wakes,
            main_io_bytes=main_io_bytes,
            major_faults=int(fields[9]),
            minor_faults=int(fields[7]),
            cpu_ns=cpu_ns,
            io_bytes=io_bytes,
            children_cpu_ns=(int(fields[13]) + int(fields[14])) * _TICK_NS,
            busy_thread_ns=busy_thread_ns,
            traced=traced,
            core_dumping=core_dumping,
        )

    def _count_io(self, last: ProcessSample | None, *, may_block: bool) -> tuple[int, int]:
        """What its main thread has read and written, and what all its threads have.

        Where that may not be read, it is what it was at the last sample. Where there was none, it is counted from the
        next one on: all that came before would look as if it had been read and written since.
        """
        if may_block:
            if last is None:
                self._io_before = None
            return (last.main_io_bytes, last.io_bytes) if last is not None else (0, 0)
        read = _read_io(f"/proc/{self.pid}/task/{self.pid}/io"), _read_io(f"/proc/{self.pid}/io")
        if last is None:
            self._io_before = 0, 0
        before = self._io_before = self._io_before or read
        return read[0] - before[0], read[1] - before[1]

    def _read_main(self, fields: list[bytes], switches: int) -> tuple[int, int, int]:
        """Run time and waiting time of the main thread, and how often it was put on a processor."""
        if self._has_schedstat:
            try:
                ran, waited, wakes = map(int, _read(f"/proc/{self.pid}/schedstat").split())
            except FileNotFoundError:
                ran = waited = wakes = 0
            if wakes:
                return ran, waited, wakes
            # Kernels without CONFIG_SCHED_INFO count in ticks of 10 ms.
            self._has_schedstat = False
        if not switches:
            switches = _read_status(self.pid)[2]
        return (int(fields[11]) + int(fields[12])) * _TICK_NS, 0, switches

    def _read_threads(self, others_ns: int, elapsed_s: float) -> int:
        """How long the busiest of the other threads ran; -1 where that is not known yet."""
        if others_ns < elapsed_s * 1e9 * _BUSY_THREADS_SHARE:
            self._threads = {}
            return max(0, others_ns)
        if not self._has_schedstat:
            return -1
        before, self._threads = self._threads, {}
        busiest_ns = 0
        main = str(self.pid)
        for tid in os.listdir(f"/proc/{self.pid}/task"):
            if tid != main:
                try:
                    ran_ns = int(_read(f"/proc/{self.pid}/task/{tid}/schedstat").split()[0])
                except (OSError, IndexError):
                    continue
                self._threads[tid] = ran_ns
                busiest_ns = max(busiest_ns, ran_ns - before.get(tid, 0))
        return busiest_ns if before else -1


class FamilyReader:
    """Reads a rank and all its descendants.

    Attributes:
        is_wrapper: whether the rank is no Python and runs none.
    """

    def __init__(self, pid: int) -> None:
        self._rank = ProcessReader(pid)
        self._others: dict[int, ProcessReader] = {}
        self._principal = self._rank
        self._newest_pid = -1
        self._walked_at = float("-inf")

    @property
    def is_wrapper(self) -> bool:
        """Whether the rank is no Python and runs none, as far as was seen."""
        return not self._principal.is_python

    def read(self, *, read_descendants: bool) -> tuple[ProcessSample, tuple[ProcessSample, ...] | None] | None:
        """The process that does the rank's work, and all others; None where the rank is gone.

        Args:
            read_descendants: whether the others are wanted; if not, there is None in their place.
        """
        principal = self._principal.read(closely=True)
        if principal is None and self._principal is not self._rank:
            self._principal = self._rank
            self._walked_at = float("-inf")
            principal = self._rank.read(closely=True)
        if principal is None:
            return None
        if not read_descendants:
            return principal, None
        others = [self._rank, *self._others.values()] if self._principal is not self._rank else self._others.values()
        samples = []
        for reader in list(others):
            if reader is not self._principal:
                sample = reader.read(closely=False)
                if sample is None:
                    self._others.pop(reader.pid, None)
                else:
                    samples.append(sample)
        return principal, tuple(samples)

    def walk(self, at: float, newest: int, at_least_every_s: float) -> None:
        """Look for new descendants, unless none can have been started.

        Args:
            at: monotonic seconds.
            newest: see :func:`newest_pid`.
            at_least_every_s: look for them after so long in any case.
        """
        if newest and newest == self._newest_pid and at - self._walked_at < at_least_every_s:
            return
        self._newest_pid, self._walked_at = newest, at
        found: dict[int, ProcessReader] = {}
        waiting = [self._rank.pid]
        for pid in waiting:
            for child in sorted(children_of(pid)):
                if child not in found and len(found) < _FAMILY_LIMIT:
                    found[child] = self._others.get(child) or ProcessReader(child)
                    waiting.append(child)
        self._others = found
        self._rank.is_python = self._rank.is_python or _is_python(self._rank.pid)
        self._choose_principal()

    def _choose_principal(self) -> None:
        """The rank itself, or the topmost Python that it runs: ``saferun --no-python ./run.sh``."""
        self._principal = self._rank
        if self._rank.is_python:
            return
        for reader in self._others.values():
            sample = reader.read(closely=False) if reader.is_python else None
            if sample is not None and not sample.forked:
                self._principal = reader
                return


def _read_status(pid: int) -> tuple[bool, bool, int]:
    """Whether it is being debugged, whether it dumps its core, and how often it gave up its processor by itself."""
    content = _read(f"/proc/{pid}/status")
    switches = _number_in(content, b"voluntary_ctxt_switches")
    return _number_in(content, b"TracerPid") != 0, _number_in(content, b"CoreDumping") != 0, switches


def _number_in(status: bytes, name: bytes) -> int:
    """A number in /proc/PID/status, without parsing the fifty lines that are not wanted; 0 where there is none."""
    _, found, rest = status.partition(b"\n" + name + b":\t")
    return int(rest.partition(b"\n")[0]) if found else 0


def _read_io(path: str) -> int:
    """Bytes read and written; 0 where they may not be seen."""
    try:
        content = _read(path)
    except OSError:
        return 0
    # rchar, wchar, syscr, syscw, read_bytes, write_bytes, cancelled_write_bytes.
    values = content.split()[1::2]
    return int(values[0]) + int(values[1]) + int(values[4]) + int(values[5])


def _is_python(pid: int) -> bool:
    return os.path.basename(read_link(f"/proc/{pid}/exe")).startswith(("python", "pypy"))


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)
