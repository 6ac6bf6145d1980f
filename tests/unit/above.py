"""What stands above a process, for tests."""

from __future__ import annotations

from collections.abc import Sequence


class Above:
    """The command lines above this process, as detection sees them."""

    lines: Sequence[Sequence[str]] = ()
