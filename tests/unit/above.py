"""What stands above a process, for tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Above:
    """The processes above this one, as detection sees them (``Ancestry``)."""

    lines: Sequence[Sequence[str]] = ()
    at_terminal: Collection[int] = ()
    entered = False
    pids: Sequence[int] = ()
