"""The start-up hook of the ranks: the variables that load it, and the files and sockets that it leaves for saferun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.linux.file_systems import is_in_memory
from saferun.linux.hook_copy import copied_hook
from saferun.linux.small_files import read_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.text.script_state import ScriptState

INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inject")
# Reads what scripts report; imported while the ranks run.
_STATE = "saferun.text.script_state"
# How long the examiner may take to copy the hook into memory.
_COPY_S = 60.0
# The longest path of a Unix socket, less what the hook appends.
_LONGEST_PREFIX = 107 - len(".4194304.sock")
_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_LONGEST_SCRIPT_BYTES = 1 << 20


class RankHook:
    """The hook of the ranks of a launch. If it is not wanted, the ranks only get a heartbeat file."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch
        self._is_wanted = launch.config.watch.inject
        self._has_own_path: bool | None = None
        self._directory = ""
        self._is_in_memory = False
        self._attempt = -1
        self._states: dict[int, ScriptState] = {}  # of this attempt's ranks, as last read
        self._in_phase_at: dict[int, float] = {}  # when each of them was last seen in a phase

    def environ(self, attempt: int, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that load the hook into a rank; empty where there is no directory for it.

        Args:
            attempt: the attempt's number.
            rank: the rank.
            environ: its environment so far.
        """
        prefix = self.prefix(attempt, rank)
        if not prefix:
            return {}
        variables = {"SAFERUN_HEARTBEAT_FILE": f"{prefix}.heartbeat"}
        path = environ.get("PYTHONPATH")
        if self._is_wanted and (path or not self._sets_python_path()):
            hook = (copied_hook(self._directory) if self._is_in_memory else "") or INJECT
            variables |= {"SAFERUN_HOOK": prefix, "PYTHONPATH": f"{hook}{os.pathsep}{path}" if path else hook}
            if not path:
                # For the hook to restore. In the list, an empty entry would mean the current directory.
                variables["SAFERUN_PYTHONPATH"] = "unset" if path is None else "empty"
            watching = self._launch.config.watch
            if watching.pdb:
                variables["SAFERUN_PDB"] = "1"
            # A page of a file on a disk may not be there when the rank writes to it.
            if watching.trace_calls and self._is_in_memory:
                what = "lines" if rank == watching.trace_lines else "calls"
                variables["SAFERUN_TRACE"] = "\n".join((what, *watching.trace_calls))
        return variables

    def _sets_python_path(self) -> bool:
        """Whether the ranks run a shell script that looks at PYTHONPATH: it has to see that there is none.

        ``${PYTHONPATH:-src}`` is an example. The hook takes its own entry out again in Python only.
        """
        if self._has_own_path is None:
            command = self._launch.config.command
            self._has_own_path = not command.run_path and _mentions_python_path(command.argv)
        return self._has_own_path

    @property
    def cost(self) -> str:
        """What the ranks' recording of calls costs, in one line; empty where they record none."""
        watching = self._launch.config.watch
        if not watching.trace_calls:
            return ""
        if not self._is_in_memory:
            return "--trace-calls: no calls are recorded, since there is no private directory in memory"
        what = (
            f"--trace-calls: each rank records its last calls of {', '.join(watching.trace_calls)} in 388 KiB of memory"
        )
        cost = f"{what}; a call costs about a microsecond"
        if sys.version_info < (3, 12):
            cost += ", and on Python 3.11 all Python code is slower, by a few per cent to several times"
        return f"{cost}; rank {watching.trace_lines} records lines, too" if watching.trace_lines >= 0 else cost

    def prefix(self, attempt: int, rank: int) -> str:
        """What the paths of a rank's hook begin with; empty where a socket's path would be too long."""
        if self._attempt != attempt:
            self._attempt = attempt
            self._states.clear()
            self._in_phase_at.clear()
            if not self._directory or self._is_in_memory:
                self._make_directory()
        prefix = os.path.join(self._directory, f"a{attempt}r{rank}") if self._directory else ""
        return prefix if len(os.fsencode(prefix)) <= _LONGEST_PREFIX else ""

    def memory_prefix(self, attempt: int, rank: int) -> str:
        """The same for the supervisor's own reads; empty where the directory is on a disk, which may not answer.

        Heartbeats and sequence numbers are unknown then. A capture may be lost, so it uses ``prefix``.
        """
        prefix = self.prefix(attempt, rank)
        return prefix if self._is_in_memory else ""

    @property
    def memory_directory(self) -> str:
        """The directory of the hook's files, if it is in memory; else empty. Nothing is accessed for this."""
        return self._directory if self._is_in_memory else ""

    def has_heartbeat(self, attempt: int, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has called ``saferun.heartbeat`` or ``saferun.step``."""
        ranks = tuple(ranks)
        prefixes = [self.memory_prefix(attempt, rank) for rank in ranks]
        if any(os.path.exists(f"{prefix}.heartbeat") for prefix in prefixes if prefix):
            return True
        states = (self.script_state(attempt, rank) for rank in ranks)
        return any(state.step >= 0 for state in states if state is not None)

    def script_state(self, attempt: int, rank: int) -> ScriptState | None:
        """What a rank's script has reported by ``saferun.step`` and ``saferun.expect``; None: nothing that is known.

        One small file in memory is read. While the rank writes it, this is what it said before.
        """
        prefix = self.memory_prefix(attempt, rank)
        if not prefix or _STATE not in sys.modules:
            return None
        from saferun.text.script_state import SIZE_BYTES, state_from

        content = read_at_once(f"{prefix}.progress", SIZE_BYTES)
        state = state_from(content) if content else None
        if state is not None:
            self._states[rank] = state
            if state.phase is not None:
                self._in_phase_at[rank] = time.monotonic()
        return self._states.get(rank)

    @property
    def states(self) -> Mapping[int, ScriptState]:
        """What the scripts of this attempt's ranks have reported, as it was read last."""
        return self._states

    def was_in_phase(self, attempt: int, rank: int, since: float) -> bool:
        """Whether it has been seen in a phase of ``saferun.expect`` since then, in monotonic seconds, or is in one."""
        self.script_state(attempt, rank)
        return self._in_phase_at.get(rank, 0.0) > since

    def copy_to_memory(self) -> None:
        """Have the hook copied for restarts. Until the copy is complete, ranks load the hook from saferun's files."""
        if self._is_wanted and self._is_in_memory:
            with suppress(OSError):
                _, fd = self._launch.examiner.ask("hook", [INJECT, self._directory], _COPY_S, is_urgent=False)
                os.close(fd)

    def _make_directory(self) -> None:
        try:
            # At each attempt: a cleaner of temporary directories may have deleted it.
            scratch = self._launch.run_dir.scratch
            self._directory = scratch.in_memory_path() if self._is_in_memory else scratch.socket_path()
            self._is_in_memory = is_in_memory(self._directory)
            self._forget_old()
        except OSError as error:
            self._directory = ""
            self._launch.warn(f"no private directory for the start-up hook: {error.filename}: {error.strerror}")

    def _forget_old(self) -> None:
        """Delete what ranks of earlier attempts have recorded, which has been reported."""
        if self._attempt > 0 and self._is_in_memory:
            for name in os.listdir(self._directory):
                if name.endswith((".calls", ".failure")) and not name.startswith(f"a{self._attempt}r"):
                    with suppress(OSError):
                        os.unlink(os.path.join(self._directory, name))


def _mentions_python_path(argv: Sequence[str]) -> bool:
    """Whether a command is a shell script that mentions PYTHONPATH, or a shell with one."""
    program, *rest = argv
    if os.path.basename(program) in _SHELLS:
        options = tuple(takewhile(lambda argument: argument.startswith("-"), rest))
        program = next(iter(rest[len(options) :]), "")
        if any("c" in option for option in options if not option.startswith("--")):
            return "PYTHONPATH" in program
    elif program == sys.executable or read_at_once(program, 2, follow=True) != b"#!":
        return False  # Python itself, as a rule: no more of a large program is read
    content = read_at_once(program, _LONGEST_SCRIPT_BYTES, follow=True) if program else b""
    return b"PYTHONPATH" in content and b"python" not in content.partition(b"\n")[0]
