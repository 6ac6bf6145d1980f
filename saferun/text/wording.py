"""How messages show ranks, hosts, sizes and durations. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DECIMALS_BELOW_S = 10.0
_MOST_HOSTS = 4
LONG_STEP = "it may be a long step; no action is taken"
"""What is said of ranks that compute for long at one place: it is suspected, and no more, that they hang."""

NOT_PYTHON = " is not a Python process"
"""How the failure of a dump ends whose process has no stacks of Python's."""

DIRECT = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
"""What Python prints between two exceptions, one of which is raised from the other, or while the other is handled."""


def rank_spans(ranks: Iterable[int]) -> tuple[list[str], int]:
    """Ranks in ascending order, consecutive ones as ``0-5``, and how many there are."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return [str(low) if low == high else f"{low}-{high}" for low, high in spans], len(ordered)


def ranks_text(ranks: Iterable[int], width: int = 90) -> str:
    """``rank 3``; ``ranks 0-2, 5``; ``ranks 0, 2, … (500)`` if all of them would be wider than ``width``."""
    spans, count = rank_spans(ranks)
    if count <= 1:
        return f"rank {spans[0]}" if spans else "no rank"
    text = ", ".join(spans)
    if len(text) > width:
        room = width - len(f", … ({count})")
        text = f"{text[: room + 2].rpartition(', ')[0] or spans[0]}, … ({count})"
    return f"ranks {text}"


def hosts_text(names: Iterable[str]) -> str:
    """``node1, node2``; ``node1, node2, node3 and 5 more hosts``."""
    hosts = list(names)
    if len(hosts) <= _MOST_HOSTS:
        return ", ".join(hosts)
    return f"{', '.join(hosts[: _MOST_HOSTS - 1])} and {len(hosts) - _MOST_HOSTS + 1} more hosts"


def size_text(size_bytes: float) -> str:
    """``1.5 GiB``, ``64 MiB``."""
    for unit, factor in _SIZES:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """``312 s``, ``4.2 s``."""
    return f"{seconds:.1f} s" if seconds < _DECIMALS_BELOW_S else f"{seconds:.0f} s"


def count_text(count: int, one: str, many: str = "") -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of an error's message, without what is beyond so many characters; empty: it has no message."""
    return (str(error).splitlines() or [""])[0][:most]
