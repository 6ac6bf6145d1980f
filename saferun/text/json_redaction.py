"""Redaction of JSON that another program wrote, as a text: all but its secrets stays as it is. Pure."""

from __future__ import annotations

import json
import re

from saferun.text.redaction import hides, redacted_json, redacted_text
from saferun.text.token_shapes import Shape

_STRING = r'"(?:[^"\\]|\\.)*+"'
# A string and, if it is a key, its value: another string, or the bracket that begins it.
_PIECE = Shape(rf"({_STRING})(?:(\s*+:\s*+)({_STRING}|[\[{{])?)?", re.DOTALL)
_MOST_PIECES, _MOST_CHARACTERS = 1 << 16, 4 << 20


class TooManyTextsError(ValueError):
    """It has too many distinct strings to be redacted in reasonable time."""


class _NestedError(Exception):
    """The value of a secret's key is a list or an object."""


def redacted_json_text(json_text: str) -> str:
    """JSON without the secrets in its strings.

    Strings in the JSON of tools repeat; each distinct one is redacted once. 16 MiB take less than a second.

    Args:
        json_text: valid JSON; for anything else the result is undefined.

    Raises:
        TooManyTextsError: it has too many distinct strings.
        ValueError: it is not JSON.
    """
    known: dict[str, str] = {}
    size = 0

    def piece(match: re.Match[str]) -> str:
        whole = match.group()
        redacted = known.get(whole)
        if redacted is None:
            nonlocal size
            size += len(whole)
            if len(known) >= _MOST_PIECES or size > _MOST_CHARACTERS:
                raise TooManyTextsError("it has too many distinct strings")
            redacted = known[whole] = _redacted_piece(*match.groups())
        return redacted

    try:
        return _PIECE().sub(piece, json_text)
    except _NestedError:
        return json.dumps(redacted_json(json.loads(json_text)))


def _redacted_piece(name: str, colon: str | None, value: str | None) -> str:
    if colon is None:
        return _redacted_string(name)
    if value is None or not value.startswith('"'):
        if value is not None and hides(_text_of(name), ()):
            raise _NestedError
        return f"{_redacted_string(name)}{colon}{value or ''}"
    if not hides(_text_of(name), _text_of(value)):
        return f"{_redacted_string(name)}{colon}{_redacted_string(value)}"
    [shown] = redacted_json({_text_of(name): _text_of(value)}).values()
    return f"{_redacted_string(name)}{colon}{value if shown == _text_of(value) else json.dumps(shown)}"


def _redacted_string(string: str) -> str:
    text = _text_of(string)
    redacted = redacted_text(text)
    return string if redacted == text else json.dumps(redacted)


def _text_of(string: str) -> str:
    text: str = json.loads(string, strict=False) if "\\" in string else string[1:-1]
    return text
