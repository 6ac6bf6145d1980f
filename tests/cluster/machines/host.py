"""A host of a cluster, seen from the tests: its processes and its files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.machines import plan
from tests.cluster.machines.process import DEADLINE_S, Process


class Machine:
    """A host that is on.

    Pids are the machine's, on which all of this runs, unless called *inner*: that is what the host's own processes
    know, and what they print. Inner pids repeat over the hosts.

    Args:
        node: its name and addresses.
        pid: pid of its PID 1.
        bridges_pid: the process in whose network namespace the other ends of its cables are.
        environ: environment of what is started in it.

    ``wrapping`` is put before every command: a program that becomes it.
    """

    def __init__(
        self,
        node: plan.NodePlan,
        pid: int,
        bridges_pid: int,
        environ: Mapping[str, str],
    ) -> None:
        self.node = node
        self.index = node.number - 1
        self.name = node.name
        self.management, self.data = self.addresses = (node.management, node.data)
        self.environ = dict(environ)
        self.wrapping: tuple[str, ...] = ()
        self.pid = pid
        self._bridges_pid = bridges_pid
        self.started: list[Process] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.management} {self.data} pid {self.pid}>"

    # ----------------------------------------------------------------------------------------------------- commands

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = plan.SHARED,
        **more: Any,
    ) -> Process:
        """Start a command as root.

        Args:
            command: program and arguments.
            env: changes of ``environ``.
            cwd: a folder inside of the host.
            more: as for Popen.
        """
        words = [os.fspath(word) for word in (*self.wrapping, *command)]
        process = Process(self.pid, words, cwd=os.fspath(cwd), env={**self.environ, **(env or {})}, **more)
        self.started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = plan.SHARED,
        stdin: str = "",
        timeout_s: float = DEADLINE_S,
        check: bool = False,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            AssertionError: it takes longer; or, with ``check``, it fails.
        """
        if stdin:
            more["stdin"] = subprocess.PIPE
        process = self.popen(command, env=env, cwd=cwd, **more)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin.encode())
                process.stdin.close()
        code = process.finish(timeout_s)
        assert not check or code == 0, process.story(f"ended with {code}")
        done = subprocess.CompletedProcess(process.args, code, process.out, process.err)
        process.end()
        return done

    # ---------------------------------------------------------------------------------------------------- processes

    @property
    def is_on(self) -> bool:
        """Whether its PID 1 lives."""
        return is_alive(self.pid)

    def pids(self, pattern: str = "") -> list[int]:
        """Pids of living processes whose command line holds a regular expression, PID 1 excepted, oldest first."""
        expression = re.compile(pattern)
        namespace = pid_namespace(self.pid)
        found = [
            (start_of(pid), pid)
            for pid in all_pids()
            if pid != self.pid
            and namespace
            and pid_namespace(pid) == namespace
            and is_alive(pid)
            and expression.search(command_line(pid))
        ]
        return [pid for _, pid in sorted(found)]

    def outer_pid(self, inner: int) -> int:
        """The machine's pid of a process that the host knows as ``inner``; 0 where there is none."""
        return next((pid for pid in self.pids() if inner_pid(pid) == inner), 0)

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one of its processes; no error where it is gone.

        Raises:
            ValueError: it is not a process of this host.
        """
        namespace = pid_namespace(pid)
        if namespace and namespace != pid_namespace(self.pid):
            raise ValueError(f"{pid} is no process of {self.name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def end_started(self) -> None:
        """End what tests have started in it and not yet ended."""
        for process in self.started:
            process.end()
        self.started.clear()

    def freeze(self, pids: Sequence[int]) -> None:
        """Stop processes (SIGSTOP)."""
        for pid in pids:
            self.kill(pid, signal.SIGSTOP)

    def thaw(self, pids: Sequence[int]) -> None:
        """Let stopped processes go on (SIGCONT)."""
        for pid in pids:
            self.kill(pid, signal.SIGCONT)

    # -------------------------------------------------------------------------------------------------------- files

    def path(self, inside: str) -> Path:
        """Where a file of the host is to be found from outside."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    # ------------------------------------------------------------------------------------------------------ network

    def in_network(self, *command: str, stdin: str = "") -> str:
        """Run a tool of the machine in the host's network namespace, and return its output."""
        return in_network_of(self.pid, *command, stdin=stdin)

    def at_bridges(self, *command: str) -> str:
        """Run a tool of the machine in the namespace of the bridges, and return its output."""
        return in_network_of(self._bridges_pid, *command)


def in_network_of(pid: int, *command: str, stdin: str = "") -> str:
    """Run a tool of the machine in a process's network namespace, and return its output.

    Raises:
        AssertionError: it failed.
    """
    enter = ("nsenter", f"--target={pid}", "--net", "--")
    done = subprocess.run([*enter, *command], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.strip() or done.returncode}"
    return done.stdout


# --------------------------------------------------------------------------------------------------------------- /proc


def all_pids() -> list[int]:
    """Every pid of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def state_of(pid: int) -> str:
    """The state letter of a process; empty where there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return state_of(pid) not in {"", "Z", "X"}


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 where there is none."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def start_of(pid: int) -> int:
    """When a process was started, in ticks since the machine's start: it tells two apart that had the same pid."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def command_line(pid: int) -> str:
    """Program and arguments of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def pid_namespace(pid: int) -> str:
    """The pid namespace of a process; empty where it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def inner_pid(pid: int) -> int:
    """The pid that a process has in its own host; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^NSpid:.*?(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
