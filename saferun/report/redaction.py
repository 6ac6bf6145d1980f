"""Secrets do not reach a report. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from saferun.secret_names import SECRET_WORDS, is_secret

__all__ = ["REDACTED", "is_secret", "redacted_arguments", "redacted_environ", "redacted_text"]

REDACTED = "<redacted>"
_QUOTED = r"""'[^']*'|"[^"]*\""""
_SECRET_NAME = rf"[\w.-]{{0,64}}(?:{'|'.join(SECRET_WORDS)})[\w.-]{{0,64}}"


# Compiled when they are first needed: most command lines need none of them.


@cache
def _assignments() -> re.Pattern[str]:
    """NAME=VALUE anywhere in an argument, where commas, semicolons or white space separate several."""
    return re.compile(rf"([^\s,;=]+)=({_QUOTED}|[^\s,;]*)")


@cache
def _options() -> re.Pattern[str]:
    """--token VALUE within a text: the command of a shell is a single argument."""
    return re.compile(rf"((?<![\w.-])-{_SECRET_NAME}\s+)(?!--)(?:{_QUOTED}|[^\s;&|]+)", re.IGNORECASE)


@cache
def _headers() -> re.Pattern[str]:
    """A header of HTTP, as a line or within a dictionary."""
    return re.compile(
        rf"""((?<![\w.-])(?:(?:proxy-)?authorization|(?:set-)?cookie|x-{_SECRET_NAME})['"]?\s*:\s*['"]?)"""
        r"""(?:(?:bearer|basic|digest|token)\s+)?[^\s'",]+""",
        re.IGNORECASE,
    )


@cache
def _passwords() -> re.Pattern[str]:
    """The password in a URL."""
    return re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")


def redacted_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of secrets left out."""
    return {name: REDACTED if is_secret(name) else redacted_text(value) for name, value in environ.items()}


def redacted_text(text: str) -> str:
    """A text without the values that it gives to secret names and without passwords in URLs."""
    if "=" in text:
        text = _assignments().sub(_assignment, text)
    if is_secret(text):
        text = _headers().sub(rf"\1{REDACTED}", _options().sub(rf"\1{REDACTED}", text))
    return _passwords().sub(rf"\1:{REDACTED}", text) if "://" in text else text


def _assignment(match: re.Match[str]) -> str:
    name, value = match.groups()
    if is_secret(name):
        return f"{name}={REDACTED}"
    return f"{name}={_assignments().sub(_assignment, value)}"


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of options that hold secrets: ``--api-key=…``, ``--token …``, ``KEY=…``."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("--"):
            shown.append(REDACTED)
            hide_next = False
            continue
        name, equals, value = argument.partition("=")
        inner, inner_equals, _ = value.partition("=")
        if equals and is_secret(name) and not _has_space(name):
            shown.append(f"{name}={REDACTED}")
        elif inner_equals and is_secret(inner) and not _has_space(name + inner):
            shown.append(f"{name}={inner}={REDACTED}")  # --env=API_KEY=…, where … may hold anything
        else:
            shown.append(redacted_text(argument))
        hide_next = not equals and argument.startswith("-") and is_secret(argument)
    return shown


def _has_space(text: str) -> bool:
    return any(map(str.isspace, text))
