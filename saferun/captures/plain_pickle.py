"""Untrusted pickles of a rank as plain values: dicts, lists, tuples, strings, numbers, bools and None.

A pickle is a program that may call whatever it names. Here it may name nothing, and the result is bounded: in length
before it is loaded, and in depth and number when it is copied, since a short pickle may hold one list a million times
in another. The process that loads it has limited memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

LONGEST_BYTES = 64 << 20
_DEEPEST = 24
_MOST_VALUES = 4 << 20
_LARGEST = 1 << 63


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module[:60]}.{name[:60]}")

    def persistent_load(self, pid: object) -> NoReturn:  # noqa: ARG002 - pickle's own signature
        raise ValueError("it refers to something outside")


def read_pickle(content: bytes, longest: int = LONGEST_BYTES) -> Any:  # noqa: ANN401 - any plain value
    """Decode a pickle like JSON: tuples become lists, and keys must be strings.

    Raises:
        ValueError: it is not a pickle, holds other than plain values, or exceeds a bound.
    """
    if len(content) > longest:
        raise ValueError("it is too long")
    try:
        raw = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a malformed pickle may raise anything, MemoryError for a length that is a lie
        raise ValueError(str(error)[:200] or type(error).__name__) from None
    return _Copy().of(raw, _DEEPEST)


class _Copy:
    """Copies a value without shared references."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, raw: object, depth: int) -> Any:  # noqa: ANN401 - any plain value
        """Copy a value.

        Raises:
            ValueError: it is not a plain value, or exceeds a bound.
        """
        self._left -= 1
        if depth <= 0 or self._left < 0:
            raise ValueError("it holds too much")
        if type(raw) is dict:
            return {_key(key): self.of(value, depth - 1) for key, value in raw.items()}
        if type(raw) in {list, tuple}:
            return [self.of(item, depth - 1) for item in raw]  # type: ignore[attr-defined]
        if type(raw) is int and not -_LARGEST <= raw < 2 * _LARGEST:
            raise ValueError("it holds a number that is too large")
        if raw is None or type(raw) in {str, int, float, bool}:
            return raw
        raise ValueError(f"it holds a {type(raw).__name__}")


def _key(raw: object) -> str:
    if type(raw) is not str:
        raise ValueError("it has keys that are not strings")
    return raw
