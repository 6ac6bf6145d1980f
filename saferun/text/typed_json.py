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

_Decoder = Callable[[Any], Any]


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
    return _decoder_of(shape)(raw)


# What a type means is found out once for each named tuple: a leader decodes the messages of thousands of hosts.


def _decoder_of(shape: Any) -> _Decoder:  # noqa: ANN401 - a type
    known = _decoders.get(shape)
    if known is not None:
        return known
    origin = get_origin(shape)
    if origin is Annotated:
        read: _Decoder = shape.__metadata__[0]
        return read
    if origin is tuple:
        return _decoder_of_tuple(_decoder_of(get_args(shape)[0]))
    if origin is types.UnionType or origin is Union:
        return _decoder_of_optional(_decoder_of(get_args(shape)[0]))
    decoder = _decoders[shape] = _decoder_of_fields(shape)
    return decoder


def _decoder_of_tuple(decode: _Decoder) -> _Decoder:
    def decode_tuple(raw: Any) -> Any:  # noqa: ANN401 - decoded JSON
        if not isinstance(raw, list):
            raise TypeError("a list is wanted")
        return tuple(map(decode, raw[:_ITEMS_LIMIT]))

    return decode_tuple


def _decoder_of_optional(decode: _Decoder) -> _Decoder:
    return lambda raw: None if raw is None else decode(raw)


def _decoder_of_fields(shape: Any) -> _Decoder:  # noqa: ANN401 - a named tuple
    fields: dict[str, _Decoder] = {}

    def decode_fields(raw: Any) -> Any:  # noqa: ANN401 - decoded JSON
        if not fields:
            # Not before there is a decoder of the shape, which may be part of itself.
            hints = get_type_hints(shape, include_extras=True)
            fields.update({name: _decoder_of(hint) for name, hint in hints.items()})
        if isinstance(raw, dict):
            return shape(**{name: decode(raw[name]) for name, decode in fields.items() if name in raw})
        if isinstance(raw, list):
            return shape(*[decode(item) for decode, item in zip(fields.values(), raw, strict=False)])
        raise TypeError("an object is wanted")

    return decode_fields


def _string(raw: Any) -> str:  # noqa: ANN401 - decoded JSON
    if type(raw) is not str:
        raise TypeError("str is wanted")
    short = raw[:_STRING_LIMIT]
    # JSON may carry halves of surrogate pairs, which no file and no terminal takes.
    return short if short.isascii() else short.encode(errors="replace").decode()


def _bool(raw: Any) -> bool:  # noqa: ANN401 - decoded JSON
    if type(raw) is not bool:
        raise TypeError("bool is wanted")
    return raw


def _int(raw: Any) -> int:  # noqa: ANN401 - decoded JSON
    if type(raw) is not int or abs(raw) > _INT_LIMIT:
        raise TypeError("int is wanted")
    return raw


def _float(raw: Any) -> float:  # noqa: ANN401 - decoded JSON
    if type(raw) is int and abs(raw) <= _INT_LIMIT:
        return float(raw)
    if type(raw) is not float or not math.isfinite(raw):
        raise TypeError("float is wanted")
    return raw


_decoders: dict[Any, _Decoder] = {str: _string, bool: _bool, int: _int, float: _float}
"""Those of scalars and named tuples: types that are made for each call would fill the memory."""
