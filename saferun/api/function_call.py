"""A function that ranks call: how it gets to them, and how what they return comes back."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from saferun.api.rank_function import (
    CALL_NAME,
    failure_name,
    open_private,
    read_private,
    result_name,
    write_private,
)
from saferun.errors import SaferunError, UsageError


class FunctionCall(NamedTuple):
    """A call that ranks can make.

    Attributes:
        path: of a directory of this user, with the call, and with what the ranks return.
        directory: the same, opened.
    """

    path: str
    directory: int

    @property
    def program(self) -> list[str]:
        """What each rank runs, as on saferun's command line."""
        return ["--module", "saferun.api.rank_function", self.path]

    def values(self) -> tuple[Any, ...]:
        """What the ranks returned, in their order. Only files of this user are unpickled.

        Raises:
            SaferunError: it cannot be pickled.
        """
        with os.scandir(self.directory) as entries:
            names = {entry.name for entry in entries if entry.name.startswith(("result_", "failure_"))}
        values = []
        for rank in sorted({int(name.partition("_")[2]) for name in names}):
            if failure_name(rank) in names:
                text = read_private(failure_name(rank), self.directory).decode(errors="replace")
                hint = "return numbers, strings, lists or CPU tensors; the ranks themselves ended well"
                raise SaferunError(text, hint)
            values.append(pickle.loads(read_private(result_name(rank), self.directory)))  # noqa: S301
        return tuple(values)


@contextmanager
def function_call(function: Callable[..., object], args: Sequence[Any]) -> Iterator[FunctionCall]:
    """The call of a function; its files are there until the end of the context.

    Raises:
        UsageError: ranks cannot get the function or the arguments.
    """
    path = tempfile.mkdtemp(prefix="saferun-call-")
    try:
        directory = open_private(path)
        try:
            write_private(CALL_NAME, pickle.dumps((sys.path, _pickled(function, tuple(args)))), directory)
            yield FunctionCall(path, directory)
        finally:
            os.close(directory)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _pickled(function: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    """The call: by reference where ranks can import the function, else by cloudpickle.

    Raises:
        UsageError: neither is possible.
    """
    is_found = _is_importable(function)
    try:
        if is_found:
            return pickle.dumps((function, args))
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} cannot be imported by the ranks: it is defined in a notebook, in __main__ or in a function",
            "move it into a module, or install cloudpickle",
        ) from None
    except Exception as error:
        raise UsageError(f"the arguments cannot be pickled: {error}", "pass numbers, strings or lists") from None
    try:
        content: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(f"the function cannot be pickled: {error}", "move it into a module") from None
    return content


def _is_importable(function: Callable[..., object]) -> bool:
    """Whether the name of a function leads to it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or module == "__main__":
        return False
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function
