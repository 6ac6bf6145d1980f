"""Where the tasks of one job on one host meet: a socket in a directory of the user's own.

All tasks look in the same places in the same order, whatever TMPDIR each of them was given. In a directory that all
users share anybody can take a name before; then one is made whose name cannot be known before, and the tasks find it
by its owner. Where no directory can be had at all it is an abstract name, which begins with a zero byte and needs no
file system. Anybody can take such a name, too, and so both sides ask the kernel for the other one's user.

Source: unix(7), abstract, SO_PEERCRED.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from saferun.errors import SaferunError, suppress
from saferun.linux.ownership import NotOursError, open_directory, owner_words

_BACKLOG = 4096
_LONGEST_PATH_BYTES = 107
# Source: unix(7), SO_PEERCRED: pid, uid, gid of the other process.
_CREDENTIALS = struct.Struct("=3i")
_HINT = "set XDG_RUNTIME_DIR, for all tasks, to a directory that only you have access to"


class TaskSockets:
    """The sockets at which the tasks of a job may meet.

    Args:
        key: the same for all tasks of the job on this host, and for no other job.
    """

    def __init__(self, key: str) -> None:
        import hashlib

        self._name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
        self._own = f"saferun-{os.getuid()}"
        self.squatted: list[str] = []
        """Names that somebody else has taken, and who that is, in words: what ``listen`` has met."""

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket at the first place that can be had, and its path. What a killed job left is replaced.

        Raises:
            SaferunError: another process listens there, or none can.
        """
        self.squatted.clear()
        for base in _bases():
            directory = self._made(base)
            path = f"{directory}/{self._name}.sock"
            if not directory or len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
                continue
            with suppress(OSError):
                return _listen(path), path
        path = f"\0{self._own}-{self._name}"
        try:
            return _listen(path), path
        except OSError as error:
            raise SaferunError(f"no place where the tasks of this job meet: {error.strerror}", _HINT) from None

    def paths(self) -> Iterator[str]:
        """Where it may listen, the best place first."""
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

    def _made(self, base: str) -> str:
        """This user's directory in a place, made if need be; empty: there is none."""
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
        """Further directories of this user's. Anybody can make one whose name says so."""
        names: list[str] = []
        prefix = f"{self._own}-"
        with suppress(OSError), os.scandir(base) as entries:
            # Asked of each without opening it: there may be as many as somebody likes to make.
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
    places = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}", "/tmp", "/dev/shm", "/var/tmp")  # noqa: S108
    return list(dict.fromkeys(place for place in places if place and place.startswith("/")))


def _check(directory: str) -> None:
    """Whether a directory is this user's own.

    Raises:
        NotOursError: it is not.
        OSError: there is none, or none that can be used.
    """
    try:
        os.close(open_directory(directory, private=True))
    except NotOursError:
        raise
    except OSError as error:
        owner = os.lstat(directory).st_uid
        if owner != os.geteuid():
            raise NotOursError(f"it belongs to {owner_words(owner)}", directory) from None
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise NotOursError("it is no directory", directory) from None
        raise
    if not os.access(directory, os.W_OK):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), directory)


def _listen(path: str) -> socket.socket:
    """A listening Unix socket.

    Raises:
        SaferunError: another process listens there.
        OSError: there can be none there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The name gets its permissions from here: by its path, it might be another file's by then.
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
        probe.setblocking(False)  # a stranger who takes no connections keeps nobody waiting
        failure = probe.connect_ex(path)
        if failure not in {0, errno.EAGAIN}:
            return
        # Of one whose queue is full the user cannot be asked; only this user listens in a private directory.
        is_ours = peer_of(probe) == os.getuid() if not failure else not path.startswith("\0")
        who = owner_words(peer_of(probe)) if not failure else "a process that takes no connections"
    if not is_ours:
        shown = path.replace("\0", "@")
        raise SaferunError(f"no place where the tasks of this job meet: {who} has taken {shown}", _HINT)
    raise SaferunError(
        "two processes of this job say that they are local rank 0 of this host",
        "start each task of the job once; pass --scheduler none to look at options only",
    )


def peer_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket.

    Raises:
        OSError: it cannot be asked.
    """
    owner: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return owner
