"""The socket at which the tasks of one job on one host find each other, in a private directory of the user.

All tasks search the same directories in the same order, whatever their TMPDIR. In a directory that all users share,
another user can take the name first; then one with a random name is made, which the tasks find by its owner. Without
any directory the socket has an abstract name, which begins with a zero byte and needs no file system. Another user can
take such a name too, and so both sides ask the kernel for the peer's user.

Source: unix(7), abstract, SO_PEERCRED.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

from saferun.errors import SaferunError, suppress
from saferun.linux.bare_socket import MSG_DONTWAIT, MSG_NOSIGNAL, Socket, accept_connection
from saferun.linux.json_lines import JsonLines
from saferun.linux.ownership import NotOursError, open_directory, owner_text
from saferun.linux.poller import Poller
from saferun.linux.procfs import read_stat
from saferun.model import JsonObject, Value

_BACKLOG = 4096
_LONGEST_PATH_BYTES = 107
# Source: unix(7), SO_PEERCRED: pid, uid, gid of the other process.
_CREDENTIALS = struct.Struct("=iII")
_HINT = "set XDG_RUNTIME_DIR, for all tasks, to a directory that only you have access to"


class TaskSockets:
    """The possible sockets of a job's tasks.

    Args:
        key: the same for all tasks of the job on this host, and for no other job.
    """

    def __init__(self, key: str) -> None:
        import hashlib

        self._name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
        self._own = f"saferun-{os.getuid()}"
        self.squatted: list[str] = []
        """Messages about names that another user has taken, from ``listen``."""

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket at the first usable path, and that path. A socket that a killed job left is replaced.

        Raises:
            SaferunError: another process listens there, or no path is usable.
        """
        self.squatted.clear()
        for base in _bases():
            if not (directory := self._made(base)):
                continue
            path = f"{directory}/{self._name}.sock"
            try:
                if len(os.fsencode(path)) <= _LONGEST_PATH_BYTES:
                    return self._listen(base, path), path
            except OSError:
                pass
            with suppress(OSError):
                os.rmdir(directory)  # unless other jobs of this user have sockets there
        path = f"\0{self._own}-{self._name}"
        try:
            return _listen(path), path
        except OSError as error:
            raise SaferunError(f"no place where the tasks of this job meet: {error.strerror}", _HINT) from None

    def refuse(self, listener: Socket, path: str) -> None:
        """Take no more tasks at the socket that ``listen`` has made, also where another process has inherited it."""
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        self.remove(path)

    def remove(self, path: str) -> None:
        """Remove the socket that ``listen`` has made, and its directory, unless that has other sockets."""
        with suppress(OSError, ValueError):  # an abstract name is no file
            os.unlink(path)
            os.rmdir(os.path.dirname(path))

    def paths(self) -> Iterator[str]:
        """The paths where it may listen, the best one first."""
        for base in _bases():
            try:
                _check(f"{base}/{self._own}")
            except NotOursError:
                yield from (f"{directory}/{self._name}.sock" for directory in self._others(base))
            except OSError:
                continue
            else:
                yield f"{base}/{self._own}/{self._name}.sock"
        yield f"\0{self._own}-{self._name}"

    def _listen(self, base: str, path: str) -> socket.socket:
        try:
            return _listen(path)
        except FileNotFoundError:
            self._made(base)  # another job of this user has ended meanwhile, and removed it
            return _listen(path)

    def _made(self, base: str) -> str:
        """This user's directory in ``base``, made if needed; empty: there is none."""
        first = f"{base}/{self._own}"
        with suppress(OSError):
            os.mkdir(first, 0o700)
        try:
            _check(first)
        except NotOursError as error:
            self.squatted.append(f"{first}: {error.strerror}; the tasks of this job meet elsewhere")
        except OSError:
            return ""
        else:
            return first
        if not (found := next(self._others(base), "")):
            with suppress(OSError):
                os.mkdir(f"{first}-{os.urandom(6).hex()}", 0o700)
                found = next(self._others(base), "")
        return found

    def _others(self, base: str) -> Iterator[str]:
        """Further directories of this user, checked: any user can make one with such a name."""
        names: list[str] = []
        prefix = f"{self._own}-"
        with suppress(OSError), os.scandir(base) as entries:
            # Checked without opening them: another user may have made very many.
            names += (entry.name for entry in entries if entry.name.startswith(prefix) and _is_owned(entry))
        for name in sorted(names):
            with suppress(OSError):
                _check(f"{base}/{name}")
                yield f"{base}/{name}"


def _is_owned(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _bases() -> list[str]:
    directories = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}", "/tmp", "/dev/shm", "/var/tmp")  # noqa: S108
    return list(dict.fromkeys(directory for directory in directories if directory and directory.startswith("/")))


def _check(directory: str) -> None:
    """Check that a directory is this user's own.

    Raises:
        NotOursError: it is not.
        OSError: there is none, or it is not usable.
    """
    try:
        os.close(open_directory(directory, private=True))
    except NotOursError:
        raise
    except OSError as error:
        owner = os.lstat(directory).st_uid
        if owner != os.geteuid():
            raise NotOursError(f"it belongs to {owner_text(owner)}", directory) from None
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise NotOursError("it is not a directory", directory) from None
        raise
    if not os.access(directory, os.W_OK):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), directory)


def _listen(path: str) -> socket.socket:
    """Make a listening Unix socket.

    Raises:
        SaferunError: another process listens there.
        OSError: it cannot be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Permissions before bind: afterwards the path might lead to another file.
        os.fchmod(listener.fileno(), 0o600)
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _check_free(path)
            with suppress(OSError, ValueError):
                os.unlink(path)
            listener.bind(path)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _check_free(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a process that accepts no connections must not block this one
        failure = probe.connect_ex(path)
        if failure not in {0, errno.EAGAIN}:
            return
        # With a full queue the peer's user is unknown, but only this user listens in a private directory.
        is_ours = peer_of(probe) == os.getuid() if not failure else not path.startswith("\0")
        who = owner_text(peer_of(probe)) if not failure else "a process that accepts no connections"
    if not is_ours:
        shown = path.replace("\0", "@")
        raise SaferunError(f"no place where the tasks of this job meet: {who} has taken {shown}", _HINT)
    raise SaferunError(
        "two processes of this job claim to be local rank 0 of this host",
        "start each task of the job once, or pass --scheduler none to use the command-line options only",
    )


class HeadConnection(Value):
    """A connection to the coordinator of another process, and the pid of that process; 0: of another PID namespace."""

    lines: JsonLines
    pid: int


def connect_to_task(path: str, poller: Poller | None = None) -> HeadConnection | None:
    """The connection to a coordinator that another process of this user owns; None: there is none yet.

    Args:
        path: its Unix socket.
        poller: the loop's, if there is one.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(5.0)
        connection.connect(path)
        pid, owner, _ = _credentials(connection)
    except OSError:
        connection.close()
        return None
    # Any user can take an abstract name. And the coordinator of a killed process listens until it has been killed, too.
    if owner != os.getuid() or has_ended(pid):
        connection.close()
        return None
    return HeadConnection(JsonLines(connection, poller), pid)


def answer_tasks(listener: Socket, answer: JsonObject, most: int = _BACKLOG, wait_s: float = 0.0) -> None:
    """Answer tasks that have connected and that no coordinator has accepted, and close their connections.

    Args:
        listener: where they have connected; no other process needs to wait there any more.
        answer: what each of them reads.
        most: how many there can be.
        wait_s: how long those are waited for that have yet to connect.
    """
    line = json.dumps(answer).encode() + b"\n"
    give_up_at = time.monotonic() + wait_s
    poll = select.poll()  # `select` takes no descriptor beyond 1023
    poll.register(listener.fileno(), select.POLLIN)
    listener.setblocking(False)
    for _ in range(_BACKLOG):  # another user's processes may connect again and again, where the name is abstract
        ready = poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000) if most > 0 else []
        if not ready:
            return
        try:
            connection = accept_connection(listener)
        except BlockingIOError:
            if ready[0][1] & select.POLLHUP or time.monotonic() >= give_up_at:
                return  # it takes no more tasks
            continue  # that one has gone, or the coordinator has it
        except OSError:
            return
        with suppress(OSError):
            if peer_of(connection) == os.getuid():
                connection.send(line, MSG_DONTWAIT | MSG_NOSIGNAL)
                most -= 1
        connection.close()


def has_ended(pid: int) -> bool:
    """Whether a process is known to have ended; a zombie has.

    Args:
        pid: of a ``HeadConnection``.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    stat = read_stat(pid)
    return stat is not None and stat.state in {"Z", "X"}


def peer_of(connection: Socket) -> int:
    """The user of the process at the other end of a Unix socket connection.

    Raises:
        OSError: the kernel cannot be asked.
    """
    owner: int = _credentials(connection)[1]
    return owner


def _credentials(connection: Socket) -> tuple[int, int, int]:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(content)
    return pid, uid, gid
