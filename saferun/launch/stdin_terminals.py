"""Which ranks have a terminal of their own as stdin; all others have saferun's stdin, as with torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from saferun.config import LaunchConfig
from saferun.linux.streams import terminal_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.rank_stream import RankStream
    from saferun.linux.keyboard import StdinTerminal


def is_asked_for(config: LaunchConfig, rank: int) -> bool:
    """Whether a rank shall have one also where saferun itself has no keyboard."""
    return config.output.attach in {"any", rank}


def open_stdin(
    config: LaunchConfig, rank: int, streams: Sequence[RankStream], warn: Callable[[str], None]
) -> tuple[StdinTerminal | None, int]:
    """A terminal for the stdin of a rank, if it is to have one, and the descriptor that is to be its stdin.

    Args:
        config: the launch.
        rank: the rank.
        streams: its stdout and stderr, as far as they come through saferun.
        warn: takes a line.

    Returns:
        The terminal, and its other end, which the caller closes; None and 0: the rank has saferun's own stdin.
    """
    output = config.output
    if output.attach == "off":
        return None, 0
    is_asked = is_asked_for(config, rank)
    # A prompt is of use where it is seen: line editors work if stdin and stdout both are terminals.
    is_seen = any(not stream.is_stderr and os.isatty(stream.fd) for stream in streams)
    if not is_asked and not os.isatty(0):
        return None, 0
    try:
        from saferun.linux.keyboard import StdinTerminal, can_open_keyboard, has_keyboard, may_get_keyboard

        # A rank is in a session of its own, which no shell can stop when it reads in the background: it would take
        # what is typed at the shell.
        if not is_asked and not (may_get_keyboard() and (is_seen or not has_keyboard())):
            return None, 0
        # Where saferun may not read what is typed, no keys would reach a terminal of its own.
        if not is_asked and not can_open_keyboard():
            return None, 0
        terminal = StdinTerminal(*size_beside_prefix(streams))
    except (OSError, ImportError) as error:
        warn(f"no pseudo-terminal for the input of rank {rank}: {error}; it has saferun's own stdin")
        return None, 0
    return terminal, terminal.take_slave()


def size_beside_prefix(streams: Sequence[RankStream]) -> tuple[int, int]:
    """Columns and rows that the prefix leaves to a rank, as the terminals of its output have them."""
    return terminal_size(next((stream.fd for stream in streams if os.isatty(stream.fd)), 1))


def with_columns(environ: dict[str, str], streams: Sequence[RankStream], *, has_terminal: bool) -> dict[str, str]:
    """The environment with the width that the prefix leaves, where it names another one, or stdin has another one.

    Only there: what stands in the environment does not follow when the window gets another size.
    """
    if "COLUMNS" not in environ and (has_terminal or not os.isatty(0)):
        return environ
    widths = [str(terminal_size(stream.fd)[0]) for stream in streams if os.isatty(stream.fd)]
    return {**environ, "COLUMNS": widths[0]} if widths else environ
