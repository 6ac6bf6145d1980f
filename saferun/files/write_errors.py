"""Files of a launch that cannot be written: which they are now, and what the user hears of it."""

from __future__ import annotations

from collections.abc import Callable

from saferun.errors import SaferunError

WHAT_REMAINS = "what files do not keep is on the console, unless it is redirected to them alone (-r)"


class WriteErrors:
    """The files that cannot be written. The user gets one line about the first one, as the others follow from it.

    Args:
        warn: takes a line; a second argument is what to do about it.
    """

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._failing: set[str] = set()
        self._missing_bytes = 0
        self._has_warned = False
        self._has_recovered = False
        self.refusal: SaferunError | None = None
        """Why the launch cannot be: no file matters any more."""

    @property
    def has_any(self) -> bool:
        """Whether there are files that cannot be written now, and are tried again."""
        return bool(self._failing)

    def has(self, path: str) -> bool:
        """Whether this one is among them."""
        return path in self._failing

    def add(self, path: str) -> None:
        """This file cannot be written now, without a line about it."""
        self._failing.add(path)

    def warn_once(self, path: str, error: OSError, hint: str = "", remains: str = WHAT_REMAINS) -> None:
        """A file cannot be written (any more): print so, if it is the first one."""
        if not self._has_warned and self.refusal is None:
            self._has_warned = True
            message = f"{path}: {error.strerror}; {remains}"
            self._warn(message, *([hint] if hint else []))

    def on_failed(self, path: str, error: OSError, is_tried_again: bool) -> None:  # noqa: FBT001 - by Files
        """Take what ``Files.on_failed`` says."""
        if is_tried_again:
            self._failing.add(path)
        self.warn_once(path, error)

    def on_written(self, path: str, missing_bytes: int) -> None:
        """Take what ``Files.on_written`` says. When all can be written again, the user hears that once."""
        self._failing.discard(path)
        self._missing_bytes += missing_bytes
        if self._failing or self._has_recovered:
            return
        self._has_recovered = True
        missing = (
            f"{self._missing_bytes} bytes are missing in them, which they note"
            if self._missing_bytes
            else ("nothing is missing in them")
        )
        self._warn(f"{path}: files are written again; {missing}")
