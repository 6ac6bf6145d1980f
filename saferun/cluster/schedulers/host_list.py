"""Lists of hosts as schedulers and people write them: ``node[1-4,7],gpu1``, ``2(x4)``, host files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.errors import UsageError
from saferun.model import Value

# More hosts, or ranks on one, than any machine has; a slip of the pen must not fill the memory.
_MOST_LISTED = 1 << 17
_MOST_TASKS = 1 << 16


def expand_hosts(text: str) -> tuple[str, ...]:
    """``node[1-4,7],gpu-a[01-12]b,x[0-1]y[0-1]`` -> all names, the last bracket counting fastest.

    Raises:
        ValueError: it is no such list; the message says what is wrong with it.

    See https://slurm.schedmd.com/scontrol.html#OPT_hostnames and hostlist(3).
    """
    names: list[str] = []
    for item in _split_outside_brackets(text):
        names.extend(_expand_item(item))
        if len(names) > _MOST_LISTED:
            raise ValueError(f"more than {_MOST_LISTED} hosts")
    return tuple(names)


def _split_outside_brackets(text: str) -> list[str]:
    items = [""]
    inside = False
    for char in text:
        if char == "[" and inside:
            raise ValueError("a bracket within brackets")
        if char == "]" and not inside:
            raise ValueError("a bracket that was not opened")
        if char in "[]":
            inside = char == "["
        if not inside and (char == "," or char.isspace()):
            items.append("")
        else:
            items[-1] += char
    if inside:
        raise ValueError("a bracket that is not closed")
    return [item for item in items if item]


def _expand_item(item: str) -> list[str]:
    if item.count("[") == 1 and ":" in item and not item.rpartition("[")[0]:
        return [item]  # [2001:db8::1]: an address, not a list of numbers
    names = [""]
    rest = item
    while rest:
        before, opened, rest = rest.partition("[")
        names = [name + before for name in names]
        if not opened:
            break
        ranges, _, rest = rest.partition("]")
        numbers = _expand_ranges(ranges)
        if len(names) * len(numbers) > _MOST_LISTED:
            raise ValueError(f"more than {_MOST_LISTED} hosts")
        names = [name + digits for name in names for digits in numbers]
    return names


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not dash:
            high = low
        if not (_is_number(low) and _is_number(high)) or int(low) > int(high):
            raise ValueError(f"{part!r} in brackets is neither N nor LOW-HIGH")
        if int(high) - int(low) >= _MOST_LISTED:
            raise ValueError(f"more than {_MOST_LISTED} hosts")
        numbers.extend(str(i).zfill(len(low)) for i in range(int(low), int(high) + 1))
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18  # noqa: PLR2004 - as many as fit into 64 bits


def expand_counts(text: str) -> tuple[int, ...]:
    """``2(x3),1`` -> (2, 2, 2, 1), as in SLURM_STEP_TASKS_PER_NODE.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        count, opened, times = part.strip().partition("(x")
        times = times.removesuffix(")") if opened else "1"
        is_one = _is_number(count) and _is_number(times) and int(count) <= _MOST_TASKS and int(times) <= _MOST_LISTED
        if not is_one:
            raise ValueError(f"{part!r} is neither N nor N(xTIMES)")
        counts.extend([int(count)] * int(times))
        if len(counts) > _MOST_LISTED:
            raise ValueError(f"more than {_MOST_LISTED} hosts")
    return tuple(counts)


def compress_hosts(names: Iterable[str]) -> str:
    """``node1, node2, node4`` -> ``node[1-2,4]``: the opposite of ``expand_hosts``, in the same order."""
    items: list[str] = []
    open_prefix: str | None = None  # of the item that the next name may join
    width = 0
    ranges: list[tuple[int, int]] = []

    def close() -> None:
        if open_prefix is None:
            return
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            items.append(f"{open_prefix}{ranges[0][0]:0{width}}")
            return
        shown = ",".join(
            f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}" for low, high in ranges
        )
        items.append(f"{open_prefix}[{shown}]")

    for name in names:
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        joinable = bool(prefix) and 0 < len(digits) < 10 and digits.isascii() and prefix[-1] not in ".:]"  # noqa: PLR2004
        if not joinable:
            close()
            open_prefix = None
            items.append(name)
            continue
        value = int(digits)
        # 9 and 10 may stand in one range, 09 and 9 may not.
        fits = open_prefix == prefix and (width == len(digits) or (width <= len(digits) and digits[0] != "0"))
        if fits and (width == len(digits) or not _padded(ranges[0][0], width)):
            low, high = ranges[-1]
            if value == high + 1:
                ranges[-1] = (low, value)
            else:
                ranges.append((value, value))
            continue
        close()
        open_prefix, width, ranges = prefix, len(digits), [(value, value)]
    close()
    return ",".join(items)


def _padded(value: int, width: int) -> bool:
    return len(str(value)) < width


class ListedHost(Value):
    """One host of a host file. ``slots``: how many ranks it is for; None: not said."""

    name: str
    slots: int | None


def parse_host_file(text: str, path: str) -> tuple[ListedHost, ...]:
    """The hosts of a host file: ``HOST``, ``HOST slots=8`` (Open MPI, DeepSpeed) or ``HOST:8`` (MPICH) a line.

    A host that is named in several lines, as in PBS_NODEFILE, has a rank for each. What else stands in a line
    (``max-slots=``, ``binding=``) is not for us.

    Raises:
        UsageError: a line that is none of these, or no host at all; with the file and line.
    """
    hosts: dict[str, int | None] = {}
    for count, raw in enumerate(text.splitlines(), 1):
        fields = raw.partition("#")[0].split()
        if not fields:
            continue
        try:
            for name, slots in _line(fields):
                if name not in hosts:
                    hosts[name] = slots
                else:
                    hosts[name] = (hosts[name] or 1) + (slots or 1)
        except ValueError as error:
            raise UsageError(
                f"{path}:{count}: {error}", "write HOST, HOST slots=N or HOST:N, one host a line"
            ) from None
        if len(hosts) > _MOST_LISTED:
            raise UsageError(f"{path}: more than {_MOST_LISTED} hosts", "check the file")
    if not hosts:
        raise UsageError(f"{path} names no host", "write HOST, HOST slots=N or HOST:N, one host a line")
    return tuple(ListedHost(name, slots) for name, slots in hosts.items())


def _line(fields: Sequence[str]) -> list[tuple[str, int | None]]:
    name, slots = _split_slots(fields[0])
    for word in fields[1:]:
        key, equals, value = word.partition("=")
        if equals and key.lower() in {"slots", "cpu", "count"}:
            if not _is_slots(value):
                raise ValueError(f"{word!r} is not a number of ranks")
            slots = int(value)
        elif not equals:
            raise ValueError(f"{word!r} after the host's name is not KEY=VALUE")
    return [(expanded, slots) for expanded in expand_hosts(name)]


def _split_slots(word: str) -> tuple[str, int | None]:
    """``host:8`` -> host and 8; an address of IPv6 has more colons."""
    host, colon, slots = word.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return word, None
    if not _is_slots(slots) or not host:
        raise ValueError(f"{word!r} is not HOST:N")
    return host, int(slots)


def _is_slots(text: str) -> bool:
    return _is_number(text) and 0 < int(text) <= _MOST_TASKS


def matching_names(names: Sequence[str], host: str) -> list[int]:
    """The places of the names that mean a host of this name: in full, else up to the first dot."""
    same = [i for i, name in enumerate(names) if name == host]
    if same:
        return same
    short = host.partition(".")[0]
    # Two full names that differ are two hosts.
    fitting = [(i, name) for i, name in enumerate(names) if "." not in name or "." not in host]
    return [i for i, name in fitting if name.partition(".")[0] == short]
