"""The sections of a shared object that hold its strings."""

from __future__ import annotations

import os
import struct

_HEADER_BYTES = 64
_SECTION_BYTES = 64
_MAX_SECTIONS = 10_000
_MAX_NAMES_BYTES = 1 << 20
_PROGBITS, _ALLOCATED, _EXECUTABLE = 1, 0x2, 0x4
_LITTLE_64_BIT = b"\x7fELF\x02\x01"
_STRING_SECTIONS = (b".rodata", b".data")  # .data.rel.ro and .rodata.cst16 start so too


def string_ranges(fd: int, size_bytes: int) -> list[tuple[int, int]]:
    """The sections with constant strings: ``(offset, size)`` in bytes, all within the file.

    In a shared object these are its read-only and its initialised data: one part in twenty of a large library. Code,
    symbols, debugging information and GPU kernels hold none, and make up the rest. Of a file that is no 64-bit
    little-endian shared object, or one whose headers make no sense, it is the whole.

    Args:
        fd: the file, open for reading.
        size_bytes: its size.

    Source: elf(5)
    """
    whole = [(0, size_bytes)]
    header = os.pread(fd, _HEADER_BYTES, 0)
    if len(header) < _HEADER_BYTES or not header.startswith(_LITTLE_64_BIT):
        return whole
    (table_offset,) = struct.unpack_from("<Q", header, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", header, 0x3A)
    if entry_size != _SECTION_BYTES or not 0 < count <= _MAX_SECTIONS or names_index >= count:
        return whole
    if table_offset + entry_size * count > size_bytes:
        return whole
    table = os.pread(fd, entry_size * count, table_offset)
    if len(table) < entry_size * count:
        return whole  # it was truncated meanwhile
    sections = [struct.unpack_from("<IIQQQQIIQQ", table, index * entry_size) for index in range(count)]
    names_at, names_size = sections[names_index][4:6]
    if names_at + names_size > size_bytes or names_size > _MAX_NAMES_BYTES:
        return whole
    names = os.pread(fd, names_size, names_at)
    ranges = []
    for name_at, kind, flags, _address, offset, size, *_rest in sections:
        name = names[name_at : names.find(b"\0", name_at)]
        wanted = kind == _PROGBITS and flags & _ALLOCATED and not flags & _EXECUTABLE
        if wanted and name.startswith(_STRING_SECTIONS) and offset < size_bytes:
            ranges.append((offset, min(size, size_bytes - offset)))
    return ranges or whole
