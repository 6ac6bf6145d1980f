"""The members of trials on this host: ``python -P …/coordinator/trial_server.py SOCKET_FD``.

Started by the supervisor for ``saferunctl doctor --collective``. It imports torch once and forks one child for each
member of this host in a trial. The supervisor sends JSON lines, each with ``op``:

* ``trial {number, backend, deadline_s, interface, compute_s, store: [address, port], sizes_bytes, pretend: {local rank:
  what}, groups: [{prefix, world_size, is_local, members: [[local rank, rank], …]}]}``: run it; the previous one ends.
  A group that is ``is_local`` has all its members here, and its store as well, on loopback.
* ``goodbye``: end, as when the socket is closed.

It answers ``ready {torch, threads, cuda}`` once, or ``broken {message}``; then ``step {number, local_rank, step}``
whenever a member gets somewhere, ``outcome {number, local_rank, kind, message, where}`` for each, and ``done {number}``
when no process of the trial is left. Members die with this process, and this process with the supervisor
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saferun.coordinator.trial_member import MemberOrder
    from saferun.text.framing import MessageBuffer

_READ_BYTES = 1 << 16
_REQUEST_BYTES_AT_MOST = 16 << 20
_REPORT_BYTES_AT_MOST = 1 << 16
_OUTPUT_BYTES_KEPT = 8 << 10
_LONGEST_MESSAGE = 400
# How long the members of a group get when one of them on this host has failed: they may have a reason of their own.
_GRACE_S = 3.0
# How long the kernel gets to end a killed member.
_DEATH_S = 5.0
_BACKLOG = 256
_SINGLE_THREAD_S = 1.0
# A supervisor that takes nothing for so long is stopped, and no other process ends the members then.
_SUPERVISOR_S = 60.0


class _Member:
    """A member's process, and what is known of it."""

    def __init__(self, order: MemberOrder, group: int, pid: int, report_fd: int, output_fd: int) -> None:
        self.order = order
        self.group = group
        self.pid = pid
        self.report_fd = report_fd
        self.output_fd = output_fd
        self.kind = ""
        self.message = ""
        self.where = "starting"
        self.output = b""
        self._report = _buffer(_REPORT_BYTES_AT_MOST)

    def read_report(self) -> list[dict[str, Any]] | None:
        """What it has reported; None: it has ended."""
        chunk = _read(self.report_fd)
        if chunk is None:
            return []
        # A member that is about to crash may write anything.
        return self._report.feed(chunk) if chunk else None

    def read_output(self) -> bool:
        """Keep the end of what it wrote to stdout and stderr. False: there will be no more."""
        chunk = _read(self.output_fd)
        self.output = (self.output + (chunk or b""))[-_OUTPUT_BYTES_KEPT:]
        return chunk != b""

    def last_line(self) -> str:
        """What libraries complained of last: NCCL's warning where there is one."""
        lines = [line.strip() for line in self.output.decode(errors="replace").splitlines() if line.strip()]
        warnings = [line for line in lines if "NCCL WARN" in line]
        return (warnings or lines or [""])[-1][-_LONGEST_MESSAGE:]

    def close(self) -> None:
        for fd in (self.report_fd, self.output_fd):
            os.close(fd)


def _buffer(longest_bytes: int) -> MessageBuffer:
    from saferun.text.framing import MessageBuffer  # where main has put the package on the path

    return MessageBuffer(longest_bytes)


def _read(fd: int) -> bytes | None:
    """What there is; empty: the other end is closed; None: nothing yet."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None


class _Running:
    """A trial that is going on."""

    def __init__(self, number: int, give_up_at: float) -> None:
        self.number = number
        self.give_up_at = give_up_at
        self.members: list[_Member] = []
        self.group_ends_at: dict[int, float] = {}
        self.given_up: set[int] = set()
        self.store_pid = -1

    @property
    def pids(self) -> list[int]:
        """All processes of it that have not been reaped."""
        return [pid for pid in (self.store_pid, *(member.pid for member in self.members)) if pid > 0]


class TrialServer:
    """Answers the supervisor.

    Args:
        connection: to it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._requests = _buffer(_REQUEST_BYTES_AT_MOST)
        self._poll = select.poll()
        self._running: _Running | None = None
        self._undead: list[int] = []
        self._is_over = False

    def serve(self) -> None:
        """Until goodbye, or until the supervisor is gone. No member is left then."""
        self._poll.register(self._connection.fileno(), select.POLLIN)
        try:
            while not self._is_over:
                for fd, _ in self._poll.poll(self._timeout_ms()):
                    self._on_readable(fd)
                self._on_time()
        finally:
            if self._running is not None:
                self._kill(self._running.pids)

    def send(self, op: str, **fields: object) -> None:
        """Say something to the supervisor; without one that listens, all is over."""
        try:
            self._connection.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
        except OSError:
            self._is_over = True

    def _timeout_ms(self) -> float | None:
        if self._running is None:
            return None
        ends_at = min([self._running.give_up_at, *self._running.group_ends_at.values()])
        return max(0.0, (ends_at - time.monotonic()) * 1000 + 1)

    def _on_readable(self, fd: int) -> None:
        if fd == self._connection.fileno():
            self._read_requests()
            return
        members = self._running.members if self._running is not None else []
        for member in members:
            if fd == member.output_fd and not member.read_output():
                self._poll.unregister(fd)
            if fd == member.report_fd:
                self._read_report(member)

    def _read_requests(self) -> None:
        try:
            chunk = self._connection.recv(_READ_BYTES)
        except OSError:
            chunk = b""
        requests = self._requests.feed(chunk) if chunk else None
        if requests is None:
            self._is_over = True
            return
        for request in requests:
            if request["op"] == "goodbye":
                self._is_over = True
            elif request["op"] == "trial":
                self._end("another trial was asked for")
                self._start(request)

    # --------------------------------------------------------------------------------------------------------- a trial

    def _start(self, request: dict[str, Any]) -> None:
        running = self._running = _Running(int(request["number"]), time.monotonic() + float(request["deadline_s"]))
        theirs = request["store"]
        ours = self._fork_store(running) if any(group["is_local"] for group in request["groups"]) else theirs
        for number, group in enumerate(request["groups"]):
            for local_rank, rank in group["members"]:
                address = ours if group["is_local"] else theirs
                self._fork(running, number, self._order(running, request, group, local_rank, rank, address))
        self._check_done()

    def _fork_store(self, running: _Running) -> tuple[str, int]:
        """A store for the groups of this host, which is reached over loopback. Connections wait until it is served."""
        from saferun.coordinator.trial_member import keep_store

        server_pid = os.getpid()
        with _listen_on_loopback() as listener:
            address, port = listener.getsockname()[:2]
            with suppress(OSError):
                # Without it, the members report that they were refused.
                running.store_pid = os.fork()
                if running.store_pid == 0:
                    keep_store(listener.fileno(), server_pid)
        return address, port

    def _order(
        self,
        running: _Running,
        request: dict[str, Any],
        group: dict[str, Any],
        local_rank: int,
        rank: int,
        store: tuple[str, int],
    ) -> MemberOrder:
        from saferun.coordinator.trial_member import MemberOrder

        return MemberOrder(
            local_rank=local_rank,
            rank=rank,
            world_size=group["world_size"],
            backend=request["backend"],
            interface=request["interface"],
            store_address=store[0],
            store_port=store[1],
            prefix=group["prefix"],
            sizes_bytes=tuple(request["sizes_bytes"]),
            give_up_at=running.give_up_at,
            pretend=request["pretend"].get(str(local_rank), ""),
            compute_s=float(request.get("compute_s", 0.0)),
        )

    def _fork(self, running: _Running, group: int, order: MemberOrder) -> None:
        from saferun.coordinator.trial_member import run

        report_read, report_write = os.pipe()
        output_read, output_write = os.pipe()
        server_pid = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                run(order, server_pid, report_write, output_write)
        except OSError as error:
            os.close(report_read)
            os.close(output_read)
            message = f"no process can be started: {error.strerror}"
            self._report(running, order.local_rank, "error", message, "starting")
            return
        finally:
            os.close(report_write)
            os.close(output_write)
        running.members.append(_Member(order, group, pid, report_read, output_read))
        for fd in (report_read, output_read):
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def _read_report(self, member: _Member) -> None:
        reports = member.read_report()
        running = self._running
        if running is None:
            return
        if reports is None:
            self._poll.unregister(member.report_fd)
            if not member.kind:
                self._finish(running, member, "error", self._how_it_ended(member))
                self._check_done()
            return
        for line in reports:
            if "step" in line:
                member.where = str(line["step"])
                fields = {"number": running.number, "local_rank": member.order.local_rank, "step": member.where}
                self.send("step", **fields)
            elif not member.kind:
                self._finish(running, member, str(line.get("kind")), str(line.get("message", "")))
        self._check_done()

    def _how_it_ended(self, member: _Member) -> str:
        # The end of the report came from its exit.
        _, status = os.waitpid(member.pid, 0)
        member.pid = -1
        member.read_output()
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{how}: {line}" if (line := member.last_line()) else how

    def _finish(self, running: _Running, member: _Member, kind: str, message: str) -> None:
        member.kind, member.message = kind, message
        if kind != "ok":
            if member.order.backend == "nccl" and (line := member.last_line()) and line not in message:
                message = f"{message}; {line}" if message else line
            if member.group not in running.group_ends_at and member.group not in running.given_up:
                running.group_ends_at[member.group] = time.monotonic() + _GRACE_S
        self._report(running, member.order.local_rank, kind, message, "" if kind == "ok" else member.where)

    def _report(self, running: _Running, local_rank: int, kind: str, message: str, where: str) -> None:
        self.send("outcome", number=running.number, local_rank=local_rank, kind=kind, message=message, where=where)

    def _on_time(self) -> None:
        running = self._running
        if running is None:
            return
        now = time.monotonic()
        if now >= running.give_up_at:
            self._end("")
            return
        for group, ends_at in list(running.group_ends_at.items()):
            if now < ends_at:
                continue
            del running.group_ends_at[group]
            running.given_up.add(group)
            for member in running.members:
                if member.group == group and not member.kind:
                    self._finish(running, member, "timeout", "")
        self._check_done()

    def _check_done(self) -> None:
        if self._running is not None and all(member.kind for member in self._running.members):
            self._end("")

    def _end(self, why: str) -> None:
        """The end of the trial, for whoever is not done as well."""
        running, self._running = self._running, None
        if running is None:
            return
        for member in running.members:
            if not member.kind:
                self._finish(running, member, "timeout", why)
        self._kill(running.pids)
        for member in running.members:
            for fd in (member.report_fd, member.output_fd):
                with suppress(KeyError):
                    self._poll.unregister(fd)
            member.close()
        self.send("done", number=running.number)

    def _kill(self, pids: list[int]) -> None:
        """End processes, and wait for that: they hold GPUs and ports that the next trial wants."""
        self._undead += pids
        for pid in self._undead:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        give_up_at = time.monotonic() + _DEATH_S
        while self._undead:
            self._undead = [pid for pid in self._undead if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if not self._undead or time.monotonic() > give_up_at:
                break
            time.sleep(0.005)


def _listen_on_loopback() -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    except OSError:
        return socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=_BACKLOG)


def _signal_name(signum: int) -> str:
    from saferun.model import signal_name

    return signal_name(signum)


def _count_threads() -> int:
    """This process' threads, once those that end by themselves after the import have had the time to."""
    give_up_at = time.monotonic() + _SINGLE_THREAD_S
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return count


def main() -> None:
    """Import torch and serve."""
    # The package, wherever it lies, without putting the current directory on the path.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # There is next to nothing to compute, and a process forks safely as long as it has one thread.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Where the name service is broken, its patience would be taken for the network's.
    os.environ["RES_OPTIONS"] = f"{os.environ.get('RES_OPTIONS', '')} timeout:1 attempts:2".strip()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.settimeout(_SUPERVISOR_S)
    server = TrialServer(connection)
    try:
        import torch

        import saferun.coordinator.trial_member  # noqa: F401 - with all that it imports, before anything is forked
    except Exception as error:
        server.send(
            "broken", message=f"torch cannot be imported: {str(error) or type(error).__name__}"[:_LONGEST_MESSAGE]
        )
        return
    server.send("ready", torch=str(torch.__version__), threads=_count_threads(), cuda=torch.cuda.is_initialized())
    server.serve()


if __name__ == "__main__":
    main()
