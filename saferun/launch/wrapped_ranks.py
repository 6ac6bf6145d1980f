"""Ranks that run under a tool: which process is the script's, how it ended, and what follows if the tool ends first.

The child that saferun started is the tool. The script's process is found by its command line, which the examiner reads
(reading it may block). Until it is found, and where it is not, the tool's process stands for the rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from saferun.captures.examiner import Answer
from saferun.errors import suppress
from saferun.launch.rank import Script
from saferun.linux.children import Child
from saferun.linux.children import exit_status as status_from
from saferun.linux.helper import PartBase
from saferun.linux.pidfd import exit_status, open_pidfd
from saferun.linux.procfs import children_of, read_stat, zombie_status
from saferun.linux.small_files import read_bytes
from saferun.model import ExitStatus

if TYPE_CHECKING:
    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import Rank
    from saferun.launch.rank_group import RankGroup

_FIRST_QUERY_S = 0.2
_LONGEST_PAUSE_S = 15.0
_BUDGET_S = 5.0
# How often the end of a script is polled for that has no descriptor.
_POLL_S = 0.2
_LARGEST_BYTES = 1 << 16
_MOST_PROCESSES = 1000


class WrappedRanks(PartBase):
    """Finds the processes of the scripts of an attempt's wrapped ranks, and judges how they end."""

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._group: RankGroup | None = None
        self._commands: dict[int, tuple[str, list[str]]] = {}  # by tool's pid: its name, the script's command line
        self._pause_s = _FIRST_QUERY_S
        self._query: Answer | None = None
        self._query_at: float | None = None
        self._poll_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return min((at for at in (self._query_at, self._poll_at) if at is not None), default=None)

    def begin(self, group: RankGroup) -> None:
        """The ranks of an attempt have been forked."""
        self.close()
        self._group = group
        self._commands = group.wrapped_commands()
        self._pause_s = _FIRST_QUERY_S
        self._query_at = time.monotonic() + self._pause_s if self._commands else None

    def tick(self, now: float) -> None:
        """Look for scripts that have not been found, and for the end of others, where that is due."""
        if self._poll_at is not None and self._poll_at <= now:
            self._poll(now)
        if self._query_at is None or self._query_at > now:
            return
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._query_at = now + self._pause_s + _BUDGET_S
        asked = [[rank.child.pid, self._commands[rank.child.pid][1]] for rank in self._missing()]
        if not asked:
            self._query_at = None
            return
        self._end_query()
        with suppress(OSError):
            self._query = Answer(
                self._context.examiner,
                self._context.guarded_poller,
                "wrapped",
                asked,
                _BUDGET_S,
                self._on_answer,
                limit_bytes=_LARGEST_BYTES,
                is_urgent=False,
            )

    def close(self) -> None:
        """The attempt is over."""
        self._query_at = self._poll_at = None
        self._end_query()
        for rank in self._group.ranks if self._group is not None else ():
            self._unwatch(rank.wrapped)
        self._group = None

    def status_of(self, rank: Rank, status: ExitStatus) -> ExitStatus:
        """How the script ended, if that is known, else how the tool did. ``status``: the tool's."""
        script = rank.wrapped
        if script is None:
            return status
        self._unwatch(script)
        return exit_status(script.child.pidfd) or script.status or status

    def adopts(self, rank: Rank, status: ExitStatus) -> bool:
        """Whether the script lives on without its tool, as a child of saferun's, which is the rank from now on."""
        script = rank.wrapped
        # What its descriptor tells is not about another process that has been given the same number.
        if script is None or exit_status(script.child.pidfd) is not None:
            return False
        stat = read_stat(script.child.pid)
        if stat is None or stat.start_ticks != script.ticks or stat.ppid != os.getpid():
            return False
        self._unwatch(script)
        if SIGKILL not in rank.signals and not script.ended_at:  # else it is only dying more slowly
            name = self._name(rank)
            self._context.report(
                f"{name} around rank {rank.assignment.rank} has ended ({status.description}); "
                "the rank goes on without it"
            )
        return True

    def tools_at_work(self) -> tuple[int, ...]:
        """The local ranks whose scripts have ended, while their tools have not."""
        group = self._group
        ranks = group.by_pid.values() if group is not None else ()
        return tuple(
            rank.assignment.local_rank for rank in ranks if rank.wrapped is not None and not rank.wrapped.lives
        )

    # ----------------------------------------------------------------------------------------------------------------

    def _missing(self) -> list[Rank]:
        """Ranks without a script; a tool may start one again."""
        group = self._group
        if group is None or group.is_closed:
            return []
        ranks = [rank for rank in group.by_pid.values() if rank.child.pid in self._commands]
        return [rank for rank in ranks if rank.wrapped is None or rank.wrapped.ended_at]

    def _name(self, rank: Rank) -> str:
        return self._commands.get(rank.child.pid, ("its tool", []))[0]

    def _unwatch(self, script: Script | None) -> None:
        if script is not None and script.child.pidfd >= 0:
            self._context.guarded_poller.unwatch(script.child.pidfd)

    def _end_query(self) -> None:
        if self._query is not None:
            self._query.close()
            self._query = None

    def _on_answer(self, answer: bytes) -> None:
        self._query = None
        with suppress(ValueError, TypeError):
            self._take(json.loads(answer))
        if self._query_at is not None:
            self._query_at = time.monotonic() + self._pause_s

    def _take(self, found: Any) -> None:  # noqa: ANN401 - JSON
        for tool_pid, pid, ticks in found:
            rank = self._group.by_pid.get(tool_pid) if self._group is not None else None
            if rank is None or rank not in self._missing() or not isinstance(pid, int) or pid <= 0:
                continue
            if pid == tool_pid:
                del self._commands[tool_pid]  # the tool has become the script, as numactl does
            else:
                self._take_script(rank, pid, ticks)

    def _take_script(self, rank: Rank, pid: int, ticks: int) -> None:
        child = Child(pid, open_pidfd(pid))
        stat = read_stat(pid)
        if stat is None or stat.start_ticks != ticks:
            if child.pidfd >= 0:
                os.close(child.pidfd)  # the script has ended meanwhile
            return
        if rank.wrapped is not None and rank.wrapped.child.pidfd >= 0:
            os.close(rank.wrapped.child.pidfd)
        script = rank.wrapped = Script(child, ticks)
        if child.pidfd >= 0:
            self._context.guarded_poller.watch(child.pidfd, partial(self._on_end, rank, script))
        else:
            self._poll_at = time.monotonic() + _POLL_S
        self._context.investigation.hangs.rank_found(rank.assignment.local_rank)
        self._context.log.note("ScriptFound")

    def _on_end(self, rank: Rank, script: Script) -> None:
        """A script has ended. Its tool may go on for long: only then the rank has ended, and as its script did."""
        self._unwatch(script)
        script.ended_at, script.ended_time, script.signals = time.monotonic(), time.time(), frozenset(rank.signals)
        wait_status = zombie_status(script.child.pid, script.ticks)
        script.status = status_from(wait_status) if wait_status is not None else None
        self._context.investigation.hangs.rank_ended(rank.assignment.local_rank)
        self._context.log.note("ScriptEnded")
        self._pause_s = _FIRST_QUERY_S
        self._query_at = time.monotonic() + self._pause_s

    def _poll(self, now: float) -> None:
        """Poll for the end of scripts that have no descriptor, as on old kernels."""
        ranks = self._group.by_pid.values() if self._group is not None else ()
        found = [(rank, rank.wrapped) for rank in ranks if rank.wrapped is not None]
        polled = [(rank, script) for rank, script in found if script.child.pidfd < 0 and not script.ended_at]
        self._poll_at = now + _POLL_S if polled else None
        for rank, script in polled:
            if not script.lives:
                self._on_end(rank, script)


def find_scripts(asked: Sequence[Any]) -> None:
    """In a process of the examiner's: write which process below each tool has the script's command line."""
    found = []
    for tool_pid, argv in asked:
        waiting, seen = [int(tool_pid)], 0
        while waiting and seen < _MOST_PROCESSES:
            pid = waiting.pop(0)
            seen += 1
            stat = read_stat(pid)
            if stat is not None and _runs(pid, argv):
                found.append([tool_pid, pid, stat.start_ticks])
                break
            waiting += children_of(pid)
    os.write(1, json.dumps(found).encode())


def _runs(pid: int, argv: Sequence[str]) -> bool:
    """Whether a process has this command line, with whatever path of the program."""
    command = read_bytes(f"/proc/{pid}/cmdline").split(b"\0")[:-1]
    wanted = [os.fsencode(word) for word in argv]
    return command[1:] == wanted[1:] and bool(command) and os.path.basename(command[0]) == os.path.basename(wanted[0])
