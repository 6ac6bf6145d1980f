"""The process that holds the file systems of ``frozen.py``: it mounts one, freezes and thaws it as it is told.

Words come on its standard input, ``done`` goes out when they have been carried out; it ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import select
import stat
import struct
import subprocess
import sys
import time

# As in linux/fs.h.
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 1 << 18


def _mount(source: str, path: str, kind: str, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(path), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind}: {os.strerror(ctypes.get_errno())}")


def _keep_disk(path: str, image: str) -> None:
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    frozen = False
    print("done", flush=True)
    try:
        # Not sys.stdin: what it had read ahead would be lost to select.
        for command in iter(lambda: os.read(0, 64), b""):
            frozen = command == b"freeze\n"
            with contextlib.suppress(OSError):  # EINVAL, EBUSY: it is so already
                fcntl.ioctl(root, _FIFREEZE if frozen else _FITHAW, 0)
            print("done", flush=True)
    finally:
        if frozen:
            fcntl.ioctl(root, _FITHAW, 0)
        os.close(root)
        subprocess.run(["umount", "--lazy", path], check=False)


# Source: linux/fuse.h.
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _READLINK, _SYMLINK = 1, 2, 3, 4, 5, 6
_MKNOD, _MKDIR, _UNLINK, _RMDIR, _RENAME, _OPEN, _READ, _WRITE = 8, 9, 10, 11, 12, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 17, 18, 20, 25, 26, 27, 28, 29
_FSYNCDIR, _CREATE, _INTERRUPT, _DESTROY, _BATCH_FORGET, _RENAME2 = 30, 35, 36, 38, 42, 45
_WITHOUT_ANSWER = frozenset([_FORGET, _INTERRUPT, _DESTROY, _BATCH_FORGET])
_DONE = frozenset([_RELEASE, _RELEASEDIR, _FSYNC, _FSYNCDIR, _FLUSH])
# Where the name stands in requests for something new.
_MADE_FROM = {_SYMLINK: 0, _MKNOD: 16, _MKDIR: 8, _CREATE: 16}
_HEADER = struct.Struct("<IIQQIIII")
_ATTR_MODE, _ATTR_SIZE = 1, 8
_LARGEST_BYTES = 128 << 10
_SLOW_WRITE_S = 0.02  # for a page


class _Mirror:
    """Answers the kernel's requests. Source: fuse(4), linux/fuse.h."""

    def __init__(self, path: str, source: str) -> None:
        os.umask(0)  # it has been taken off already
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        self._paths = {1: source}
        self._numbers = {source: 1}
        self._free = itertools.count(2)
        self._waiting: list[bytes] = []
        self._frozen = False
        self._write_s = 0.0
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        _mount("mirror", path, "fuse", _MS_NOSUID | _MS_NODEV, options)

    def serve(self) -> None:
        """Until the standard input closes; then whoever waits gets an error."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._device, select.POLLIN)
        print("done", flush=True)
        while True:
            ready = dict(poll.poll())
            if 0 in ready:
                command = os.read(0, 64)
                if not command:
                    return
                self._frozen = command == b"freeze\n"
                self._write_s = _SLOW_WRITE_S if command == b"slow\n" else 0.0
                waiting, self._waiting = self._waiting, []
                for request in waiting:
                    self._take(request)
                print("done", flush=True)
            if self._device in ready:
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    self._take(os.read(self._device, 2 * _LARGEST_BYTES))

    def _take(self, request: bytes) -> None:
        if self._frozen:
            # It has been read, so that not even SIGKILL ends the wait.
            self._waiting.append(request)
            return
        _, operation, unique, node, *_ = _HEADER.unpack_from(request)
        if operation in _WITHOUT_ANSWER:
            return
        failure, answer = 0, b""
        try:
            answer = self._answer(operation, node, request[_HEADER.size :])
        except OSError as error:
            failure = error.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # it was interrupted
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), -failure, unique) + answer)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        path = self._paths[node] if node else ""
        if operation == _INIT:
            return struct.pack("<IIIIHHIIHHI", 7, 31, _LARGEST_BYTES, 1, 16, 12, _LARGEST_BYTES, 1, 0, 0, 0).ljust(
                64, b"\0"
            )
        if operation == _LOOKUP:
            return self._entry(os.path.join(path, _name(body)))
        if operation == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attributes(path)
        if operation == _READLINK:
            return os.fsencode(os.readlink(path))
        if operation in {_OPEN, _OPENDIR}:
            if operation == _OPEN and struct.unpack_from("<I", body)[0] & os.O_TRUNC:
                os.truncate(path, 0)
            return struct.pack("<QII", 0, 0, 0)
        if operation in _DONE:
            return b""
        if operation == _STATFS:
            return struct.pack("<QQQQQIIII", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0).ljust(
                80, b"\0"
            )
        if operation in {_READ, _READDIR}:
            _, offset, size = struct.unpack_from("<QQI", body)
            return _entries(path, offset, size) if operation == _READDIR else _content(path, offset, size)
        return self._change(operation, path, body)

    def _change(self, operation: int, path: str, body: bytes) -> bytes:
        """Requests that change something in the source."""
        if operation == _WRITE:
            time.sleep(self._write_s)
            _, offset, size = struct.unpack_from("<QQI", body)
            return struct.pack("<II", _write(path, body[40 : 40 + size], offset), 0)
        if operation == _SETATTR:
            valid, _, _, length = struct.unpack_from("<IIQQ", body)
            if valid & _ATTR_SIZE:
                os.truncate(path, length)
            if valid & _ATTR_MODE:
                os.chmod(path, stat.S_IMODE(struct.unpack_from("<I", body, 68)[0]))
            return struct.pack("<QII", 0, 0, 0) + _attributes(path)
        if operation in {_UNLINK, _RMDIR}:
            gone = os.path.join(path, _name(body))
            (os.unlink if operation == _UNLINK else os.rmdir)(gone)
            self._numbers.pop(gone, None)
            return b""
        if operation in {_RENAME, _RENAME2}:
            start = 8 if operation == _RENAME else 16
            old, new = body[start:].split(b"\0")[:2]
            folder = self._paths[struct.unpack_from("<Q", body)[0]]
            self._rename(os.path.join(path, os.fsdecode(old)), os.path.join(folder, os.fsdecode(new)))
            return b""
        return self._make(operation, path, body)

    def _make(self, operation: int, folder: str, body: bytes) -> bytes:
        """Requests for something new in a directory."""
        if operation not in _MADE_FROM:
            raise OSError(errno.ENOSYS, "")
        path = os.path.join(folder, _name(body[_MADE_FROM[operation] :]))
        first, second = struct.unpack_from("<II", body)
        if operation == _CREATE:
            os.close(os.open(path, (first & os.O_EXCL) | os.O_CREAT | os.O_WRONLY, stat.S_IMODE(second)))
            return self._entry(path) + struct.pack("<QII", 0, 0, 0)
        if operation == _MKNOD:
            os.mknod(path, first, second)
        elif operation == _MKDIR:
            os.mkdir(path, stat.S_IMODE(first))
        else:
            os.symlink(body.split(b"\0")[1], os.fsencode(path))
        return self._entry(path)

    def _entry(self, path: str) -> bytes:
        attributes = _attributes(path)
        if path not in self._numbers:
            self._numbers[path] = next(self._free)
        number = self._numbers[path]
        self._paths[number] = path
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + attributes

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new)
        for path in [path for path in self._numbers if path == old or path.startswith(f"{old}/")]:
            moved = new + path[len(old) :]
            self._numbers[moved] = number = self._numbers.pop(path)
            self._paths[number] = moved


def _name(body: bytes) -> str:
    return os.fsdecode(body.split(b"\0", 1)[0])


def _write(path: str, content: bytes, offset: int) -> int:
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.pwrite(fd, content, offset)
    finally:
        os.close(fd)


def _attributes(path: str) -> bytes:
    found = os.lstat(path)
    return struct.pack(
        "<6Q10I",
        found.st_ino,
        found.st_size,
        found.st_blocks,
        int(found.st_atime),
        int(found.st_mtime),
        int(found.st_ctime),
        *(found.st_atime_ns % 10**9, found.st_mtime_ns % 10**9, found.st_ctime_ns % 10**9),
        found.st_mode,
        *(found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0),
    )


def _content(path: str, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def _entries(path: str, offset: int, size: int) -> bytes:
    """What is in a directory, from the entry of this number on, as far as it fits."""
    answer = b""
    for number, name in enumerate([".", "..", *sorted(os.listdir(path))]):
        if number < offset:
            continue
        found = os.lstat(os.path.join(path, name))
        encoded = os.fsencode(name)
        head = struct.pack("<QQII", found.st_ino, number + 1, len(encoded), stat.S_IFMT(found.st_mode) >> 12)
        entry = (head + encoded).ljust(-(-(len(head) + len(encoded)) // 8) * 8, b"\0")
        if len(answer) + len(entry) > size:
            break
        answer += entry
    return answer


def _main(kind: str, path: str, source: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    if kind == "disk":
        _keep_disk(path, source)
    else:
        _Mirror(path, source).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
