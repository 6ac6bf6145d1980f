"""Secrets do not reach a report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH", "COOKIE", "DSN")
REDACTED = "<redacted>"


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name is taken to hold a secret."""
    upper = name.upper()
    return any(word in upper for word in _SECRET_WORDS)


def redacted_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of secrets left out."""
    return {name: REDACTED if is_secret(name) else value for name, value in environ.items()}


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of options that hold secrets: ``--api-key=…``, ``--token …``, ``KEY=…``."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            shown.append(REDACTED)
            hide_next = False
            continue
        hide_next = False
        if equals and is_secret(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(argument)
            hide_next = argument.startswith("--") and is_secret(argument)
    return shown
