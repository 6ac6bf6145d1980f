"""Checks of single values: each returns what is wrong, to follow the variable's name in a message, or ""."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from saferun.env.lint.known_names import HostFacts
from saferun.env.profiles.quoting import nearest

_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})")
_MAX_ITEMS = 256
_PLACEHOLDER = re.compile(r"%[a-zA-Z]|\{[a-z_]+\}")

Check = Callable[[str, HostFacts], str]


def one_of(*keywords: str, ignore_case: bool = True, numbers: bool = False) -> Check:
    """One of these keywords; ``numbers``: or any whole number."""
    known = {word.upper() for word in keywords} if ignore_case else set(keywords)

    def check(value: str, _host: HostFacts) -> str:
        word = value.upper() if ignore_case else value
        if word in known or (numbers and _NUMBER.fullmatch(value)):
            return ""
        return f"is not one of {', '.join(keywords)}"

    return check


def list_of(*keywords: str) -> Check:
    """A comma-separated list of these keywords, optionally after ``^``."""
    known = frozenset(keywords)

    def check(value: str, _host: HostFacts) -> str:
        wrong = [word for word in _items(value.removeprefix("^")) if word.upper() not in known]
        return f"names {_quoted(wrong)}, which {_is_are(wrong)} none of {', '.join(keywords)}" if wrong else ""

    return check


def whole_number(
    low: int | None = None, high: int | None = None, *, signed: bool = False, several: bool = False
) -> Check:
    """A whole number (decimal or 0x…), optionally bounded; ``several``: or a comma-separated list of them."""

    def check(value: str, _host: HostFacts) -> str:
        for item in _items(value) if several else [value.strip()]:
            if not _NUMBER.fullmatch(item) or (item.startswith("-") and not signed and low is not None and low >= 0):
                return "is not a number" if not _NUMBER.fullmatch(item) else f"is below {low}"
            number = int(item, 16 if "x" in item.lower() else 10)
            if (low is not None and number < low) or (high is not None and number > high):
                return f"is not between {low} and {high}" if high is not None else f"is below {low}"
        return "" if value.strip() else "is empty"

    return check


def nccl_interfaces(value: str, host: HostFacts) -> str:
    """Interfaces in NCCL's syntax: ``eth`` (a prefix), ``=eth0`` (exact), ``^docker`` (all but)."""
    return _prefixes(_without_ports(value), host.interfaces, "interface")


def hca_list(value: str, host: HostFacts) -> str:
    """InfiniBand devices in NCCL's syntax: like interfaces, each optionally followed by ``:port`` and more."""
    return _prefixes(_without_ports(value), host.ib_devices, "InfiniBand device")


def _without_ports(value: str) -> str:
    """Of each item what is before a colon: NCCL reads the rest as a port, of interfaces too."""
    return ",".join(item.partition(":")[0] for item in value[:4096].split(","))


def exact_interfaces(value: str, host: HostFacts) -> str:
    """A comma-separated list of exact names of interfaces, for gloo."""
    names = _items(value)
    if any(name.startswith(("^", "=")) for name in names):
        return "has a ^ or =, which only NCCL understands"
    if host.interfaces is None:
        return ""
    missing = [name for name in names if name not in host.interfaces]
    if not missing:
        return ""
    noun = "an interface" if len(missing) == 1 else "interfaces"
    return f"names {noun} this host lacks: {_quoted(missing)} ({_there(missing, host.interfaces)})"


def gpu_list(value: str, host: HostFacts) -> str:
    """GPUs by index or UUID, which the host must have."""
    items = [item.strip() for item in value[:8192].split(",")][:_MAX_ITEMS]
    if len(items) == 1 and items[0].lower() in {"", "-1", "none", "void", "nodevfiles"}:
        return ""  # hides all of them, on purpose
    seen: set[str] = set()
    for item in items:
        if item in seen:
            return f"names GPU {item} twice"
        seen.add(item)
        if item.isdecimal() and len(item) < 10:  # noqa: PLR2004 - no host has that many
            if host.gpu_count is not None and int(item) >= host.gpu_count:
                return f"names GPU {item}, but this host has {host.gpu_count or 'none'}"
        elif not item.startswith(("GPU-", "MIG-")):
            return f"names {_quoted([item])}, which is neither an index nor a UUID" if item else "has an empty item"
    return ""


def path_of_file(value: str, host: HostFacts) -> str:
    """A file that must exist."""
    if value.startswith("~"):
        return "starts with ~, which is not expanded"
    fact = host.paths.get(value)
    if fact is None or (fact.exists and not fact.is_directory):
        return ""
    return "is a directory, not a file" if fact.exists else "names a file that is not there"


def path_to_make(value: str, host: HostFacts) -> str:
    """A file or directory that exists, or can be made."""
    if value.startswith("~"):
        return "starts with ~, which is not expanded"
    fact = host.paths.get(checkable_path(value))
    return "names a path that cannot be made or written to" if fact is not None and not fact.may_be_made else ""


def directory_to_read(value: str, host: HostFacts) -> str:
    """A directory that is there, even if it cannot be written to, or can be made. Its reader expands a leading ~."""
    fact = host.paths.get(checkable_path(value))
    if value.startswith("~") or fact is None or fact.is_directory:
        return ""
    return "is a file, not a directory" if fact.exists else path_to_make(value, host)


def prefix_of_files(value: str, host: HostFacts) -> str:
    """A prefix of file names, in a directory that must exist."""
    fact = host.paths.get(value.rpartition("/")[0] or ("/" if value.startswith("/") else "."))
    if fact is None or (fact.is_directory and fact.may_be_made):
        return ""
    return "is in a directory that is not there" if not fact.exists else "is in a directory that cannot be written to"


def checkable_path(value: str) -> str:
    """The part of a path up to the first name with a placeholder in it (``%h``, ``{rank}``)."""
    found = _PLACEHOLDER.search(value)
    return value if found is None else value[: found.start()].rpartition("/")[0] or "."


def _prefixes(value: str, existing: frozenset[str] | None, noun: str) -> str:
    if existing is None:
        return ""
    text, excluded = (value[1:], True) if value.startswith("^") else (value, False)
    text, exact = (text[1:], True) if text.startswith("=") else (text, False)
    if excluded:
        return ""  # excluding missing ones does no harm
    missing = [
        name for name in _items(text) if not (name in existing if exact else any(e.startswith(name) for e in existing))
    ]
    if not missing or len(missing) < len(_items(text)):
        return ""  # one existing device is enough; the others may be those of other hosts
    how = "" if exact else " starting with"
    return f"this host has no {noun}{how} {_quoted(missing)} ({_there(missing, existing)})"


def _items(value: str) -> list[str]:
    return [item for item in (part.strip() for part in value[:4096].split(",")) if item][:_MAX_ITEMS]


def _quoted(keywords: Iterable[str]) -> str:
    listed = list(keywords)
    text = ", ".join("".join(char if char.isprintable() else "?" for char in word[:40]) for word in listed[:4])
    return text + (" …" if len(listed) > 4 else "")  # noqa: PLR2004 - more do not fit on a line


def _is_are(keywords: list[str]) -> str:
    return "is" if len(keywords) == 1 else "are"


def _there(missing: list[str], existing: frozenset[str]) -> str:
    for name in missing[:4]:
        near = nearest(name[:40], sorted(existing)[:_MAX_ITEMS])
        if near is not None:
            return f"did you mean {near}?"
    return f"it has {_quoted(sorted(existing))}" if existing else "it has none"
