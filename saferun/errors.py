"""Errors meant for the person at the terminal: what happened, then what to do about it."""

from __future__ import annotations

EXIT_USAGE = 2
"""The exit code for bad input, and for what the checks before a start find."""
EXIT_INTERRUPTED = 130
"""The exit code at a SIGINT that ``--signals-to-handle`` leaves out, and at one before the launch begins."""


class suppress:  # noqa: N801 - it is contextlib's, whose import every start would pay for
    """Passes over exceptions of these kinds, as ``contextlib.suppress`` does."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Nothing is to be prepared."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        """Whether the exception ends here."""
        return kind is not None and issubclass(kind, self._kinds)


class SaferunError(Exception):
    """Something the user can act on.

    Args:
        what: what happened, one line, without a final full stop.
        hint: what to do, one line.
        exit_code: the exit code of saferun when this ends a launch.
        class_name: the class of the cause, where another try may help; else empty.
    """

    def __init__(self, what: str, hint: str, exit_code: int = 1, class_name: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.exit_code = exit_code
        self.class_name = class_name

    def __str__(self) -> str:
        """The two lines as they are printed."""
        return f"saferun: {printable(self.what)}\nhint: {printable(self.hint)}"


class UsageError(SaferunError):
    """Bad input: a wrong option, a missing script, a malformed file. Exit code 2."""

    def __init__(self, what: str, hint: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(what, hint, exit_code)


def printable(text: str) -> str:
    """A text as one line that a terminal only prints: what it quotes may hold line breaks or escape sequences."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines. All that saferun itself prints on a terminal passes here or there."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))
