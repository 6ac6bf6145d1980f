"""Named tuples from untrusted JSON that ``text/decoding`` has decoded. Pure.

A shape is a named tuple whose fields are strings, numbers, bools, tuples of one shape (``tuple[X, ...]``), other
named tuples, or ``X | None``. A named tuple is a list of its fields in order, or an object with their names; missing
fields get their defaults. What does not fit is an error, and everything else is bounded. ``Annotated[X, read]`` has
bounds of its own: ``read`` converts the decoded value.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from saferun.text.decoding import MALFORMED, display_text, measure, number, text

_STRING_LIMIT = 4096
_ITEMS_LIMIT = 8192
_INT_LIMIT = 1 << 63
_SCALARS = frozenset({str, bool, int, float})

_hints: dict[type, dict[str, Any]] = {}


# What follows decodes fields with bounds of their own: ``Annotated[int, number_of(65535)]``.


def number_of(high: int = _INT_LIMIT, low: int = 0) -> Callable[[object], int]:
    """What decodes a number within inclusive bounds."""
    return lambda value: number(value, low, high)


def seconds_of(high: float, low: float = 0.0) -> Callable[[object], float]:
    """What decodes a number of seconds within inclusive bounds."""
    return lambda value: measure(value, low, high)


def text_of(longest: int) -> Callable[[object], str]:
    """What decodes a text of at most so many characters."""
    return lambda value: text(value, longest)


def line_of(longest: int) -> Callable[[object], str]:
    """What decodes a line for people, which is cut after so many characters."""
    return lambda value: display_text(value, longest)


def list_of(shape: Any, most: int, *, skips: bool = False) -> Callable[[object], tuple[Any, ...]]:  # noqa: ANN401 - a type
    """What decodes a list of one shape, which is cut after so many items. ``skips``: leaves out what does not fit."""

    def decode(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError("a list is wanted")
        if skips:
            return tuple(item for raw in value[:most] if (item := fit_or(shape, raw, None)) is not None)
        return tuple(fit(shape, raw) for raw in value[:most])

    return decode


def fit_or(shape: Any, raw: Any, otherwise: Any) -> Any:  # noqa: ANN401 - as of ``fit``
    """The same as ``fit``, and ``otherwise`` for what does not fit."""
    try:
        return fit(shape, raw)
    except MALFORMED:
        return otherwise


def fit(shape: Any, raw: Any) -> Any:  # noqa: ANN401 - a type and a value of it
    """Convert decoded JSON to a shape; strings and lists that are too long are cut.

    Args:
        shape: a named tuple, a scalar, or a tuple of them.
        raw: the decoded JSON.

    Raises:
        ValueError: it does not fit.
        TypeError: likewise.
    """
    origin = get_origin(shape)
    if origin is Annotated:
        return shape.__metadata__[0](raw)
    if origin is tuple:
        if not isinstance(raw, list):
            raise TypeError("a list is wanted")
        item_shape = get_args(shape)[0]
        return tuple(fit(item_shape, item) for item in raw[:_ITEMS_LIMIT])
    if origin is types.UnionType or origin is Union:
        return None if raw is None else fit(get_args(shape)[0], raw)
    if shape is float and type(raw) is int and abs(raw) <= _INT_LIMIT:
        return float(raw)
    if shape not in _SCALARS:
        return _fit_fields(shape, raw)
    if type(raw) is not shape or not _is_bounded(raw):
        raise TypeError(f"{shape.__name__} is wanted")
    if shape is not str:
        return raw
    short: str = raw[:_STRING_LIMIT]
    # JSON may carry halves of surrogate pairs, which no file and no terminal takes.
    return short if short.isascii() else short.encode(errors="replace").decode()


def _is_bounded(raw: Any) -> bool:  # noqa: ANN401 - a scalar of JSON
    if type(raw) is int:
        return abs(raw) <= _INT_LIMIT
    return type(raw) is not float or math.isfinite(raw)


def _fit_fields(shape: Any, raw: Any) -> Any:  # noqa: ANN401 - a named tuple
    hints = _hints.get(shape)
    if hints is None:
        hints = _hints[shape] = get_type_hints(shape, include_extras=True)
    if isinstance(raw, dict):
        return shape(**{name: fit(hint, raw[name]) for name, hint in hints.items() if name in raw})
    if isinstance(raw, list):
        return shape(*(fit(hint, item) for hint, item in zip(hints.values(), raw, strict=False)))
    raise TypeError("an object is wanted")
