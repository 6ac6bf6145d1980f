"""A function that ranks call: how it gets to them, and how what they return comes back."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from saferun.api.rank_function import (
    CALL_NAME,
    failure_name,
    name_of,
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
            SaferunError: it cannot be pickled or unpickled.
        """
        with os.scandir(self.directory) as entries:
            names = {entry.name for entry in entries if entry.name.startswith(("result_", "failure_"))}
        values = []
        hint = "return numbers, strings, lists or CPU tensors; the ranks themselves ended well"
        for rank in sorted({int(name.partition("_")[2]) for name in names}):
            if failure_name(rank) in names:
                text = read_private(failure_name(rank), self.directory).decode(errors="replace")
                raise SaferunError(text, hint)
            content = read_private(result_name(rank), self.directory)
            try:
                values.append(pickle.loads(content))  # noqa: S301 - see above
            except Exception as error:  # whatever a class of the program's raises
                text = f"what rank {rank} returned cannot be unpickled: {type(error).__name__}: {error}"
                raise SaferunError(text, hint) from error
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
    """The call: by reference where ranks can import the function and what is in the arguments, else by cloudpickle.

    Raises:
        UsageError: neither is possible.
    """
    content = _by_reference((function, args))
    if content:
        return content
    what = name_of(function)
    why = "it, or what it holds, is defined in a notebook, in __main__ or in a function, or cannot be pickled"
    if _by_reference(function):
        try:
            pickle.dumps(args)
        except Exception as error:  # code of the program's runs
            raise UsageError(f"the arguments cannot be pickled: {error}", "pass numbers, strings or lists") from None
        what, why = f"what is in the arguments of {what}", "it is defined in a notebook or in __main__"
    try:
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        hint = "move it into a module, or install cloudpickle"
        raise UsageError(f"{what} cannot be imported by the ranks: {why}", hint) from None
    try:
        by_value: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(f"the function cannot be pickled: {error}", "move it into a module") from None
    return by_value


def _by_reference(value: object) -> bytes:
    """Pickle what ranks can import, or all that it consists of: a partial, a method, an object with ``__call__``.

    Returns:
        Nothing where they cannot.
    """
    content = io.BytesIO()
    try:
        _ByReference(content).dump(value)
    except Exception:  # code of the program's runs
        return b""
    return content.getvalue()


class _ByReference(pickle.Pickler):
    """A pickler that refuses what is defined in ``__main__``, which is another module in the ranks."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - as pickle has it
        # By its name: a class, a function, or what a decorator like functools.cache has made of one.
        is_of_main = False
        with suppress(Exception):  # its attributes may be code of the program's
            is_of_main = hasattr(obj, "__qualname__") and getattr(obj, "__module__", None) == "__main__"
        if is_of_main:
            raise pickle.PicklingError(obj.__qualname__)
        return NotImplemented
