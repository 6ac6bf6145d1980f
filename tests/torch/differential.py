"""The same job under torchrun and under saferun, and what the ranks and the user see of it.

``launch`` runs one case under one launcher and returns an ``Observation``: a flat mapping from what was looked at
(``rank 0 attempt 0: environment: RANK``) to what was seen. ``differences`` compares two of them. Both launchers work in
the same folder, one after the other, so that paths need no normalising; ``observation.py`` replaces by its name what is
random by nature, and only where it has the right form.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.torch.observation import Observation, observe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LAUNCHERS = {"torchrun": "torch.distributed.run", "saferun": "saferun"}
# A launch that lasts longer is ended with its whole tree. None takes a tenth of it on a quiet machine.
TIMEOUT_S = 60.0
# How long the processes of an ended launch may take to be gone.
SETTLE_S = 3.0
TERMINAL_SIZE = (40, 100)


class Allowed(NamedTuple):
    """Something that may differ. ``path`` is a pattern that a whole path of an observation has to match."""

    path: str
    reason: str


class Case(NamedTuple):
    """One command line and its surroundings. ``@job@`` stands for the scratch folder, ``@port@`` for a free port.

    Args:
        name: the test's name.
        options: options of the launcher.
        nodes: options of one launcher alone; there are as many launchers, started together, as entries.
        program: the script, module or executable.
        arguments: arguments of the script.
        env: added to the environment of the launcher.
        does: what the probe does, by ``"rank@attempt"``, ``"rank"`` or ``"*"``; see ``probe.py``.
        ranks: how many ranks write a record in the first attempt.
        attempts: how many attempts torchrun makes.
        exit_code: what torchrun ends with. Where it does not, the case is not the case its name says.
        sends: signals to the launcher, sent one by one once all ranks of the first attempt are ready.
        sends_when_listening: send them once something listens at ``@port@``.
        setup: Python that runs in the launcher's process before the launcher.
        stdin: what the launcher's stdin, a pipe, holds; where empty, stdin is ``/dev/null``.
        terminal: the launcher leads a session on a terminal; ``stdin`` is typed there once all ranks are ready.
        lines: compare the console's whole lines, prefixes included, and not only what the ranks wrote.
        events: compare the events that ``--event-log-handler console`` prints.
        allowed: differences that are meant, besides those of every case.
    """

    name: str
    options: tuple[str, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ((),)
    program: str = "@job@/probe.py"
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    does: Mapping[str, list[str]] = {}
    ranks: int = 1
    attempts: int = 1
    exit_code: int = 0
    sends: tuple[signal.Signals, ...] = ()
    sends_when_listening: bool = False
    setup: str = ""
    stdin: str = ""
    terminal: bool = False
    lines: bool = False
    events: bool = False
    allowed: tuple[Allowed, ...] = ()


# What may differ in every case.
ALLOWED = (
    Allowed(
        r"rank \d+ attempt \d+: environment: SAFERUN_\w+",
        "saferun marks the processes of a run, to find what is left of it, and tells the ranks of its own files",
    ),
)


def differences(reference: Observation, subject: Observation, allowed: Sequence[Allowed]) -> list[str]:
    """What was seen otherwise, one line each, besides what is allowed."""
    # A rank or an event that is missing is one difference, and not one for each of its fields.
    missing = {of_whom(path) for path in reference} - {of_whom(path) for path in subject} - {""}
    found = [f"{who}: not there" for who in sorted(missing)]
    for path in sorted(reference.keys() | subject.keys()):
        expected, seen = reference.get(path, "(nothing)"), subject.get(path, "(nothing)")
        meant = any(re.fullmatch(exception.path, path) for exception in allowed)
        if expected != seen and of_whom(path) not in missing and not meant:
            found.append(f"{path}: torchrun {expected!r}, here {seen!r}")
    return found


def of_whom(path: str) -> str:
    """The rank or the event that a path is about; empty for all else."""
    who = path.partition(":")[0]
    return who if who.startswith("rank ") or " event " in who else ""


def launch(case: Case, launcher: str, folder: Path, port: int) -> Observation:
    """Run ``case`` under ``launcher`` and return what was seen.

    Args:
        case: what to run.
        launcher: a key of ``LAUNCHERS``.
        folder: scratch; the job runs in ``folder/job``, which is emptied first.
        port: what ``@port@`` stands for.

    Raises:
        TimeoutError: the launch did not get as far as it should within ``TIMEOUT_S``. Its processes are gone.
    """
    job = folder / "job"
    shutil.rmtree(job, ignore_errors=True)
    make_job_folder(job)
    env = environment(case, job, port)
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.ExitStack() as stack:
        ready = os.open(job / "ready", os.O_RDWR)
        stack.callback(os.close, ready)
        started: list[Process] = []
        stack.callback(end, started, job)
        for node, own_options in enumerate(case.nodes):
            words = command(case, LAUNCHERS[launcher], own_options, job, port)
            start = start_on_terminal if case.terminal else start_on_files
            started.append(start(words, env, job, node, case.stdin))
        try:
            if case.sends_when_listening:
                wait_until_listening(port, started[0], deadline)
            elif case.sends or case.terminal:
                wait_until_ready(ready, case.ranks, started[0], deadline)
            if case.terminal:
                wait_until_shown(job / "console_0.terminal", case.ranks, started[0], deadline)
            for process in started:
                process.type(case.stdin)
            for signum in case.sends:
                started[0].popen.send_signal(signum)
            exit_codes = [process.wait(deadline) for process in started]
        except TimeoutError as error:
            raise TimeoutError(f"{launcher}: {error}; its console:\n{read_consoles(job)}") from None
        left = wait_until_gone(job)
    seen = observe(job, port, {process.popen.pid for process in started}, lines=case.lines, events=case.events)
    seen["exit codes"] = exit_codes
    # torchrun is known to leave both; whatever it leaves, the replacement leaves nothing.
    seen["processes left behind"] = [] if launcher == "torchrun" else left
    seen["temporary files left behind"] = [] if launcher == "torchrun" else sorted(os.listdir(job / "tmp"))
    return seen


def launch_alone(case: Case, folder: Path, port: int) -> Observation:
    """What the probe of ``case`` sees where no launcher is in between, by field: what this machine has it see.

    Empty where the case's ranks write no record.
    """
    if not case.ranks:
        return {}
    job = folder / "job"
    shutil.rmtree(job, ignore_errors=True)
    make_job_folder(job)
    python = [] if "--no-python" in case.options else [sys.executable, "-u", *(["-m"] if "-m" in case.options else [])]
    words = [*python, *(filled(word, job, port) for word in (case.program, *case.arguments))]
    start = start_on_terminal if case.terminal else start_on_files
    env = environment(case, job, port) | {"PROBE_ALONE": "1"}
    process = start(set_up(case, words), env, job, 0, case.stdin)
    try:
        process.wait(time.monotonic() + TIMEOUT_S)
    finally:
        end([process], job)
    seen = observe(job, port, {os.getpid()}, lines=False, events=False)
    who = next((path for path in map(of_whom, seen) if path), "")
    assert who, f"the probe wrote no record; its console:\n{read_consoles(job)}"
    return {path.removeprefix(f"{who}: "): value for path, value in seen.items() if of_whom(path) == who}


def make_job_folder(job: Path) -> None:
    """Lay out what the cases name: the probe as script, module, package and executable, and folders for results."""
    for name in ("work/package", "records", "tmp", "home"):
        (job / name).mkdir(parents=True)
    for name in ("probe.py", "a $probe.py", "work/relative.py", "work/package/entry.py", "work/package/__main__.py"):
        shutil.copy(HERE / "probe.py", job / name)
    (job / "work/package/__init__.py").touch()
    (job / "probe.sh").write_text('#!/bin/sh\nexec "$PROBE_PYTHON" "$PROBE_JOB/probe.py" "$0" "$@"\n')
    (job / "probe.sh").chmod(0o755)
    os.mkfifo(job / "ready")


def environment(case: Case, job: Path, port: int) -> dict[str, str]:
    """The launcher's environment: the same wherever the tests run, but for where programs and libraries are."""
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {
        "HOME": str(job / "home"),
        "TMPDIR": str(job / "tmp"),
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "PYTHONPATH": str(REPOSITORY),
        "PROBE_JOB": str(job),
        "PROBE_PYTHON": sys.executable,
        "PROBE_DOES": json.dumps(case.does),
        # What saferun adds to torchrun's environment of its own accord has tests of its own.
        "SAFERUN_ENV_PROFILE": "none",
        "SAFERUN_LINT": "off",
        # Ranks may leave a core otherwise: their limit is another one, on purpose.
        "SAFERUN_CORES": "off",
    }
    env |= {name: filled(value, job, port) for name, value in case.env.items()}
    return env


def command(case: Case, module: str, own_options: tuple[str, ...], job: Path, port: int) -> list[str]:
    """The command line of one launcher."""
    words = [*case.options, *own_options, case.program, *case.arguments]
    return set_up(case, [sys.executable, "-m", module, *(filled(word, job, port) for word in words)])


def set_up(case: Case, run: list[str]) -> list[str]:
    """A command line that does what the case does before a launcher, and then runs ``run``."""
    setup = case.setup
    if case.terminal:
        setup += "\nimport fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    if setup:
        run = [sys.executable, "-c", f"import os, sys\n{setup}\nos.execv(sys.argv[1], sys.argv[1:])", *run]
    return run


def filled(word: str, job: Path, port: int) -> str:
    """A word of a case with its places filled."""
    return word.replace("@job@", str(job)).replace("@port@", str(port))


class Process:
    """A launcher that runs."""

    def __init__(
        self, popen: subprocess.Popen[bytes], master: int | None = None, reader: threading.Thread | None = None
    ) -> None:
        self.popen = popen
        self._master = master
        self._reader = reader

    def type(self, text: str) -> None:
        """Type ``text`` on the launcher's terminal, where it has one."""
        if self._master is not None:
            os.write(self._master, text.encode())

    def wait(self, deadline: float) -> int:
        """Return the exit code, or minus the signal's number."""
        try:
            return self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {TIMEOUT_S:.0f} s") from None

    def close(self) -> None:
        """Reap the process and close the terminal. Its processes have to be gone."""
        self.popen.wait()
        if self._reader is not None:
            self._reader.join()
        if self._master is not None:
            os.close(self._master)


def start_on_files(words: list[str], env: dict[str, str], job: Path, node: int, stdin: str) -> Process:
    """Start a launcher whose output goes to files and whose stdin is a pipe or nothing."""
    with contextlib.ExitStack() as stack:
        stdout = stack.enter_context((job / f"console_{node}.stdout").open("wb"))
        stderr = stack.enter_context((job / f"console_{node}.stderr").open("wb"))
        source = subprocess.DEVNULL
        if stdin:
            source, sink = os.pipe()
            stack.callback(os.close, source)
            os.write(sink, stdin.encode())
            os.close(sink)
        return Process(
            subprocess.Popen(
                words, env=env, cwd=job / "work", stdin=source, stdout=stdout, stderr=stderr, start_new_session=True
            )
        )


def start_on_terminal(words: list[str], env: dict[str, str], job: Path, node: int, _stdin: str) -> Process:
    """Start a launcher that leads a session on a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *TERMINAL_SIZE, 0, 0))
    popen = subprocess.Popen(
        words, env=env, cwd=job / "work", stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    reader = threading.Thread(target=keep, args=(master, job / f"console_{node}.terminal"))
    reader.start()
    return Process(popen, master, reader)


def keep(master: int, path: Path) -> None:
    """Write all that appears on a terminal to a file, until nobody holds its other side."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(os.read(master, 65536))
            except OSError:  # EIO: the last process closed the terminal
                return


def wait_until_ready(ready: int, ranks: int, launcher: Process, deadline: float) -> None:
    """Return once ``ranks`` probes have said that they are ready, or the launcher has ended without them."""
    said = b""
    while said.count(b"\n") < ranks and launcher.popen.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {said.count(bytes([10]))} of {ranks} ranks became ready")
        if select.select([ready], [], [], 0.1)[0]:
            said += os.read(ready, 4096)


def wait_until_shown(terminal: Path, ranks: int, launcher: Process, deadline: float) -> None:
    """Return once the last words of the probes are there: at Ctrl-C the kernel drops what has not been read.

    Source: isig() in drivers/tty/n_tty.c.
    """
    while terminal.read_bytes().count(b" stderr pear;") < ranks and launcher.popen.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks' words do not appear on the terminal")
        time.sleep(0.01)


def wait_until_listening(port: int, launcher: Process, deadline: float) -> None:
    """Return once something listens at ``port``, or the launcher has ended.

    Asking the kernel, unlike a connection, disturbs nobody.
    """
    listening = re.compile(rf":{port:04X} \S+ 0A ")
    while not any(listening.search(Path("/proc/net", name).read_text()) for name in ("tcp", "tcp6")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listened on port {port}")
        if launcher.popen.poll() is not None:
            return
        time.sleep(0.02)


def processes_of(job: Path) -> dict[int, str]:
    """Command lines, by pid, of the processes started for the job, by whomever they were adopted since."""
    mark = f"PROBE_JOB={job}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        # A process may end while it is looked at; those of other users are none of ours.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
    return found


def wait_until_gone(job: Path) -> list[str]:
    """The command lines of what is still there ``SETTLE_S`` after the launch ended."""
    deadline = time.monotonic() + SETTLE_S
    while (left := processes_of(job)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left.values())


def end(started: list[Process], job: Path) -> None:
    """Kill what is left of a launch, whatever it is, and reap the launchers."""
    while left := processes_of(job):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.popen.poll()
    for process in started:
        process.close()


def read_consoles(job: Path) -> str:
    """All that the launchers wrote, for a message."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(job.glob("console_*")))
