"""The names of settings in one file: in a shared object's strings, or a Python source."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator

from saferun.env.lint.elf import string_ranges
from saferun.env.lint.families import COMPOSED_PREFIXES, FAMILIES, PREFIXES, family_of
from saferun.model import Value

_CHUNK_BYTES = 16 << 20
_OVERLAP_BYTES = 256  # longer than any name
_MAX_SOURCE_BYTES = 8 << 20
_MAX_STRINGS_BYTES = 512 << 20
_MAX_NAME_CHARS = 128
_FEW = 8  # the most names that are searched one by one; for more, the text is split first
_INLINED_CHARS = 16  # compilers that build a string in registers split it into pieces of this length
_MAX_PUT_TOGETHER = 1_000

# Three characters and more: half of a name may be short (UCX_TLS). What follows shows whether the string ends there.
_IN_BINARY = re.compile(rb"[A-Z][A-Z0-9_]{2,}\0?")
_IN_SOURCE = re.compile(rb"""[A-Z][A-Z0-9_]{3,}["']?""")
_FORMATTED = re.compile(rb"\{([A-Za-z_]+)\.upper\(\)\}(_[A-Z0-9_]+)")
_ASSIGNED = re.compile(rb"""^([A-Za-z_]+)\s*=\s*["']([a-z0-9_]+)["']""", re.MULTILINE)
_OPTION = re.compile(rb"""["']--([a-z][a-z0-9_-]+)["']""")
_NCCL_RELEASE = re.compile(rb"NCCL version (\d+\.\d+\.\d+)\+(?:cuda|hip)")

_PREFIX_BYTES = tuple(prefix.encode() for prefix in PREFIXES)
_SENTINELS = [(family.name, {name.encode() for name in family.sentinels}) for family in FAMILIES if family.sentinels]
_COMPOSED_BYTES = frozenset(prefix.encode() for prefix in COMPOSED_PREFIXES)
# Not the end of TORCH_NCCL_X or PYTORCH_X: users often omit a part of these.
_ENDING = re.compile(
    rb"(?<=[A-Z0-9_])(?<!\nTORCH_)(?<!\nPY)(?<!\nPYTORCH_)(?=((?:" + b"|".join(_PREFIX_BYTES) + rb")[A-Z0-9_]+))"
)
_QUOTES = (b'"', b"'")


class Held(Value):
    """The names found in files so far."""

    readers: set[str]
    mentions: set[str]
    fragments: set[str]
    open_prefixes: set[str]
    versions: set[str]
    families: set[str]  # those that a shared object reads, as its sentinels show


def nothing() -> Held:
    """Nothing yet."""
    return Held(set(), set(), set(), set(), set(), set())


def read_library(path: str, held: Held) -> None:
    """Add the names in a shared object.

    The strings are read, not mapped: truncating a mapped file would kill this process (SIGBUS).

    Raises:
        OSError: it cannot be read.
    """
    tokens: set[bytes] = set()
    for chunk in library_strings(path):
        tokens.update(_IN_BINARY.findall(chunk))
        if b"NCCL version " in chunk:
            held.versions.update(found.decode() for found in _NCCL_RELEASE.findall(chunk))
    ended = {token[:-1] for token in tokens if token.endswith(b"\0")}
    joins = bool(ended & _COMPOSED_BYTES)
    library = os.path.basename(path)
    for token in tokens:
        name = token.rstrip(b"\0")
        if name.startswith(_PREFIX_BYTES) and len(name) <= _MAX_NAME_CHARS:
            text = name.decode()
            if not token.endswith(b"\0"):
                held.mentions.add(text)
                if len(name) in {_INLINED_CHARS, 2 * _INLINED_CHARS} and name not in ended:
                    held.open_prefixes.add(text)
                continue
            if name.endswith(b"_") and name.count(b"_") > 1:
                held.open_prefixes.add(text)
            held.readers.add(text)
    # Linkers merge OMP_STACKSIZE into the end of GOMP_STACKSIZE.
    held.mentions.update(_endings(ended, library))
    held.families.update(name for name, sentinels in _SENTINELS if sentinels <= ended)
    if joins:
        held.fragments.update(name.decode() for name in ended if len(name) <= _MAX_NAME_CHARS)
    held.mentions.difference_update(held.readers)


def read_source(path: str, held: Held) -> None:
    """Add the names in a Python source: in quotes, in other text, and composed ones.

    Raises:
        OSError: it cannot be read.
    """
    source = source_text(path)
    for token in set(_IN_SOURCE.findall(source)):
        if not token.startswith(_PREFIX_BYTES) or len(token) > _MAX_NAME_CHARS:
            continue
        if token.endswith(_QUOTES):
            name = token[:-1].decode()
            held.readers.add(name)
            if name.endswith("_") and name.count("_") > 1 and name not in PREFIXES:
                held.open_prefixes.add(name)
        else:
            held.mentions.add(token.decode())
    if b".upper()}" in source:
        held.readers.update(_put_together(source))
    if b"argparse_util" in source:
        held.readers.update(_torchrun_variables(source))


def library_strings(path: str) -> Iterator[bytes]:
    """The strings of a shared object, in chunks that overlap by more than a name.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        ranges = string_ranges(fd, os.fstat(fd).st_size)
        if sum(size for _, size in ranges) > _MAX_STRINGS_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        for offset, size in ranges:
            at, end = offset, offset + size
            while at < end:
                chunk = os.pread(fd, min(_CHUNK_BYTES, end - at), at)
                if not chunk:
                    break  # the file was truncated meanwhile
                yield chunk
                at += len(chunk) if at + len(chunk) >= end else max(len(chunk) - _OVERLAP_BYTES, 1)
    finally:
        os.close(fd)


def source_text(path: str) -> bytes:
    """The bytes of a Python source, up to a limit.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, min(os.fstat(fd).st_size, _MAX_SOURCE_BYTES), 0)
    finally:
        os.close(fd)


def answer(names: Collection[str], text: bytes, *, is_library: bool) -> Iterator[tuple[str, int]]:
    """For each of the names in a text: 2 if it is a separate string, 1 if it is part of other text."""
    ends = (b"\0",) if is_library else _QUOTES
    if len(names) > _FEW:
        tokens = set((_IN_BINARY if is_library else _IN_SOURCE).findall(text))
        present = {token.rstrip(b"\0\"'") for token in tokens}
        names = [name for name in names if name.encode(errors="surrogateescape") in present]
    for name in names:
        wanted = name.encode(errors="surrogateescape")
        if wanted in text:
            yield name, 2 if any(wanted + end in text for end in ends) else 1


def _endings(names: Iterable[bytes], library: str) -> Iterator[str]:
    """Suffixes of names that the linker may have merged with shorter names of this library."""
    for found in _ENDING.finditer(b"\n" + b"\n".join(names)):
        name = found[1].decode()
        family = family_of(name)
        if family is not None and library.startswith(family.owners):
            yield name


def _put_together(source: bytes) -> Iterator[str]:
    # f"{PACKAGE.upper()}_HOME", with PACKAGE = "torch_this" in the same file.
    values = dict(_ASSIGNED.findall(source))
    for constant, ending in _FORMATTED.findall(source)[:_MAX_PUT_TOGETHER]:
        value = values.get(constant)
        if value is not None and value.upper().startswith(_PREFIX_BYTES):
            yield (value.upper() + ending).decode()


def _torchrun_variables(source: bytes) -> Iterator[str]:
    # torchrun's options as variables: PET_NNODES for --nnodes.
    for option in _OPTION.findall(source)[:_MAX_PUT_TOGETHER]:
        yield "PET_" + option.decode().upper().replace("-", "_")
