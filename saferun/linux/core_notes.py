"""The process that a core file is of, from its ELF header and notes.

The memory in it is not read, except for the top of the stack if a signal handler hid why the process died, and the
environment, to compare it. Cores may be truncated, larger than memory, or garbage: everything is bounded and checked.

Sources: elf(5), core(5), sigaction(2); Linux, fs/binfmt_elf.c, include/linux/elfcore.h.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator

from saferun.linux.memory_limit import limited_memory
from saferun.linux.ownership import open_named, open_ours
from saferun.model import Value

_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56
_MOST_PROGRAM_HEADERS = 1 << 20
_TYPE_CORE = 4
_LOAD, _NOTE = 1, 4
_IN_SECTION_ZERO = 0xFFFF  # PN_XNUM: there are more program headers than the field can count
_PRSTATUS, _PRPSINFO, _AUXV = 1, 3, 6
_SIGINFO, _FILE = 0x53494749, 0x46494C45
_SIGINFO_BYTES = 128
_PROGRAM_HEADERS_AT = 3  # AT_PHDR
_EXECUTABLE_NAME_AT = 31  # AT_EXECFN
# At most so much of what is below that name is searched for the environment.
_ENVIRON_BYTES = 1 << 20
# The notes about the process come first; one for each thread follows.
_FIRST_NOTES_BYTES = 1 << 13
_NOTES_BYTES = 16 << 20
_MOST_THREADS = 4096
# The offset of the registers in a thread's note, and the index of the stack pointer (x86-64).
_REGISTERS_AT, _STACK_POINTER = 112, 19
_STACK_BYTES = 1 << 16
# What the kernel saves for a signal handler (x86-64): ``ucontext``, followed by siginfo if the handler asked for it.
_CONTEXT_BYTES, _CONTEXT_FLAGS = 304, frozenset({2, 3, 6, 7})
_CODE_SEGMENT_AT, _USER_CODE = 184, 0x33
_TRAP_AT, _PAGE_FAULT = 200, 14
_SI_KERNEL = 0x80
# SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV: the kernel gives the address.
_WITH_ADDRESS = frozenset({4, 5, 7, 8, 11})


class CoreError(Exception):
    """A file is not a readable core; the message is a short reason."""


class CoreNotes(Value):
    """The process of a core, and why it died.

    Attributes:
        pid: the process, in its own pid namespace.
        ppid: its parent at that time.
        sid: its session.
        name: its ``comm``.
        command: its command line as far as the kernel keeps it (79 bytes).
        signum: the signal that ended it.
        sender_pid: the process that sent it; 0: the kernel, the process itself, or unknown.
        address: the faulting address as text; empty if the signal has none.
        tids: its threads, beginning with the one that crashed; only that one if not ``whole``.
        executable: the program's path; empty if unknown.
        size_bytes: the actual size.
        full_bytes: the size of the complete core.
    """

    pid: int
    ppid: int
    sid: int
    name: str
    command: str
    signum: int
    sender_pid: int
    address: str
    tids: tuple[int, ...]
    executable: str
    size_bytes: int
    full_bytes: int

    @property
    def is_cut_off(self) -> bool:
        """Whether it is truncated: by a full disk, a limit, or because the dump is not finished."""
        return self.size_bytes < self.full_bytes


def read_core_notes(core: str | int, *, whole: bool = True) -> CoreNotes:
    """Read the process of a core, with little memory, whatever the file holds.

    Args:
        core: the file's path, or a descriptor. A symbolic link is not followed, and a FIFO does not block.
        whole: False reads only the process, its session and its parent: a few kilobytes.

    Raises:
        CoreError: it is not a core, or cannot be read.
    """
    fd = open_regular(core) if isinstance(core, str) else core
    try:
        with limited_memory():
            return _read_notes(fd, os.fstat(fd).st_size, whole=whole)
    except OSError as error:
        raise CoreError(error.strerror or str(error)) from None
    except (struct.error, IndexError, OverflowError):
        raise CoreError("its ELF notes make no sense") from None
    except MemoryError:
        raise CoreError("its ELF notes take too much memory") from None
    finally:
        if isinstance(core, str):
            os.close(fd)


def open_regular(path: str, *, named: bool = False) -> int:
    """Open a regular file of this user or root for reading: no link, no FIFO, no device.

    Another user could have forged its content to attack the tools that read it.

    Args:
        path: the file.
        named: whether the user named it: then any owner will do.

    Raises:
        CoreError: it is anything else, or cannot be opened.
    """
    try:
        if named:
            return open_named(path)
        return open_ours(path, os.O_RDONLY, or_root=True, mapped=True)
    except OSError as error:
        raise CoreError(error.strerror or str(error)) from None


def is_core(path: str) -> bool:
    """Whether a file begins like a core."""
    try:
        fd = open_regular(path)
    except CoreError:
        return False
    try:
        header = os.pread(fd, 18, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return header[:4] == b"\x7fELF" and header[16:18] in {b"\4\0", b"\0\4"}


def was_started_with(fd: int, entry: str) -> bool:
    """Whether the environment that the program of a core was started with has an entry, ``NAME=value``.

    Numbers of processes come again, and are others in another pid namespace. False if that is unknown.

    Args:
        fd: the core.
        entry: not empty.

    Source: Linux, fs/exec.c and fs/binfmt_elf.c: the file's name is above the environment, at the top of the stack.
    """
    try:
        with limited_memory():
            segments = _read_segments(fd)
            above = _executable_name_at(fd, segments)
            for segment in segments:
                within = above - segment.address
                if segment.kind == _LOAD and 0 < within < segment.file_bytes:
                    size_bytes = min(within, _ENVIRON_BYTES)
                    strings = os.pread(fd, size_bytes, segment.offset + within - size_bytes)
                    return b"\0" + os.fsencode(entry) + b"\0" in strings
    except (CoreError, OSError, struct.error, OverflowError, MemoryError):
        pass
    return False


def _executable_name_at(fd: int, segments: list[_Segment]) -> int:
    for segment in segments:
        if segment.kind == _NOTE:
            for kind, content in _notes(os.pread(fd, min(segment.file_bytes, _FIRST_NOTES_BYTES), segment.offset)):
                if kind == _AUXV:
                    return _auxiliary_value(content, _EXECUTABLE_NAME_AT)
    return 0


class _Segment(Value):
    kind: int
    offset: int
    address: int
    file_bytes: int


def _read_notes(fd: int, size_bytes: int, *, whole: bool) -> CoreNotes:
    segments = _read_segments(fd)
    found: dict[int, bytes] = {}
    tids: list[int] = []
    left = _NOTES_BYTES if whole else _FIRST_NOTES_BYTES
    for segment in segments:
        if segment.kind != _NOTE:
            continue
        block = os.pread(fd, min(segment.file_bytes, left), segment.offset)
        left -= len(block)
        for kind, content in _notes(block):
            found.setdefault(kind, content)
            if kind == _PRSTATUS and len(tids) < _MOST_THREADS:
                tids.append(struct.unpack_from("<i", content, 32)[0])
    if _PRSTATUS not in found or _PRPSINFO not in found:
        raise CoreError("cut off before its notes" if size_bytes <= _HEADER_BYTES * 64 else "no notes about a process")
    pid, ppid, _pgrp, sid = struct.unpack_from("<4i", found[_PRPSINFO], 24)
    signum, sender_pid, address = _why(fd, pid, found, segments if whole else [])
    return CoreNotes(
        pid,
        ppid,
        sid,
        _text(found[_PRPSINFO][40:56]),
        _text(found[_PRPSINFO][56:136]).strip(),
        signum,
        sender_pid,
        address,
        tuple(tids),
        _executable(found.get(_AUXV, b""), found.get(_FILE, b"")) if whole else "",
        size_bytes,
        max((segment.offset + segment.file_bytes for segment in segments), default=0),
    )


def _read_segments(fd: int) -> list[_Segment]:
    header = os.pread(fd, _HEADER_BYTES, 0)
    if not header:
        raise CoreError("empty")
    if header[:4] != b"\x7fELF"[: len(header)]:
        raise CoreError("no ELF file")
    if len(header) < _HEADER_BYTES:
        raise CoreError("cut off within its header")
    if header[4:6] != b"\2\1":
        raise CoreError("of a 32-bit or big-endian machine")
    if struct.unpack_from("<H", header, 16)[0] != _TYPE_CORE:
        raise CoreError("an ELF file, but no core")
    (table_at,) = struct.unpack_from("<Q", header, 0x20)
    (sections_at,) = struct.unpack_from("<Q", header, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", header, 0x36)
    if count == _IN_SECTION_ZERO:
        (count,) = struct.unpack("<I", os.pread(fd, 4, sections_at + 0x2C))
    if entry_bytes != _PROGRAM_HEADER_BYTES or not 0 < count <= _MOST_PROGRAM_HEADERS:
        raise CoreError("its ELF header makes no sense")
    table = os.pread(fd, entry_bytes * count, table_at)
    if len(table) < entry_bytes * count:
        raise CoreError("cut off within its header")
    return [
        _Segment(kind, offset, address, file_bytes)
        for kind, _flags, offset, address, _physical, file_bytes, _bytes, _align in struct.iter_unpack(
            "<IIQQQQQQ", table
        )
    ]


def _notes(block: bytes) -> Iterator[tuple[int, bytes]]:
    """The complete notes of a segment."""
    at = 0
    while at + 12 <= len(block):
        name_bytes, content_bytes, kind = struct.unpack_from("<III", block, at)
        content_at = at + 12 + (name_bytes + 3 & ~3)
        if content_at + content_bytes > len(block):
            return
        if block[at + 12 : at + 16] == b"CORE":
            yield kind, block[content_at : content_at + content_bytes]
        at = content_at + (content_bytes + 3 & ~3)


def _why(fd: int, pid: int, found: dict[int, bytes], segments: list[_Segment]) -> tuple[int, int, str]:
    """Signal, sender and address."""
    (signum,) = struct.unpack_from("<h", found[_PRSTATUS], 12)
    info = found.get(_SIGINFO, b"")
    if len(info) < _SIGINFO_BYTES:
        return signum, 0, ""
    signum, _errno, code = struct.unpack_from("<3i", info)
    (sender_pid,) = struct.unpack_from("<i", info, 16)
    if code <= 0 and sender_pid == pid:
        # A handler, such as faulthandler's, raises the signal again when it is done, and the core only has that one.
        # The original signal is saved on the handler's stack.
        context = _saved_context(fd, found[_PRSTATUS], segments)
        behind = context[_CONTEXT_BYTES:]
        if behind[:4] == info[:4]:
            info = behind
            (code,) = struct.unpack_from("<i", info, 8)
            (sender_pid,) = struct.unpack_from("<i", info, 16)
        elif context and signum in _WITH_ADDRESS:
            trap, _mask, address = struct.unpack_from("<3Q", context, _TRAP_AT)
            return signum, 0, hex(address) if trap == _PAGE_FAULT else ""
    if code <= 0:
        return signum, sender_pid if sender_pid != pid else 0, ""
    if signum not in _WITH_ADDRESS or code == _SI_KERNEL:
        return signum, 0, ""
    return signum, 0, hex(struct.unpack_from("<Q", info, 16)[0])


def _saved_context(fd: int, prstatus: bytes, segments: list[_Segment]) -> bytes:
    """The context that the kernel saved for the innermost signal handler of the crashed thread.

    A ``ucontext`` and the bytes after it; empty if there is none, or on other machines than x86-64.

    Source: Linux, arch/x86/include/uapi/asm/sigcontext.h, arch/x86/include/asm/sigframe.h.
    """
    if os.uname().machine != "x86_64" or len(prstatus) < _REGISTERS_AT + 8 * (_STACK_POINTER + 1):
        return b""
    (pointer,) = struct.unpack_from("<Q", prstatus, _REGISTERS_AT + 8 * _STACK_POINTER)
    stack = _read_memory(fd, pointer & ~7, _STACK_BYTES, segments)
    for at in range(0, len(stack) - _CONTEXT_BYTES - _SIGINFO_BYTES, 8):
        # Three bits of flags, no next context, and the code segment of user space.
        if stack[at] in _CONTEXT_FLAGS and not any(stack[at + 1 : at + 16]):
            (code_segment,) = struct.unpack_from("<H", stack, at + _CODE_SEGMENT_AT)
            if code_segment == _USER_CODE:
                return stack[at : at + _CONTEXT_BYTES + _SIGINFO_BYTES]
    return b""


def _read_memory(fd: int, address: int, size_bytes: int, segments: list[_Segment]) -> bytes:
    for segment in segments:
        within = address - segment.address
        if segment.kind == _LOAD and 0 <= within < segment.file_bytes:
            return os.pread(fd, min(size_bytes, segment.file_bytes - within), segment.offset + within)
    return b""


def _executable(auxv: bytes, files: bytes) -> str:
    """The path of the file whose program headers the auxiliary vector points to: the program itself.

    The first mapping may be the dynamic loader's.
    """
    headers_at = _auxiliary_value(auxv, _PROGRAM_HEADERS_AT)
    if len(files) < 16:  # noqa: PLR2004 - two numbers
        return ""
    (count,) = struct.unpack_from("<Q", files)
    if count > len(files) // 24:
        return ""
    names = files[16 + 24 * count :].split(b"\0")
    for index in range(count):
        start, end = struct.unpack_from("<QQ", files, 16 + 24 * index)
        if start <= headers_at < end and index < len(names):
            return os.fsdecode(names[index])
    return ""


def _auxiliary_value(auxv: bytes, wanted: int) -> int:
    for kind, value in struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]):
        if kind == wanted:
            return int(value)
    return 0


def _text(raw: bytes) -> str:
    text = raw.split(b"\0", 1)[0].decode(sys.getfilesystemencoding(), errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text)
