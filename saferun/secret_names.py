"""Which names stand for secrets: their values reach neither a report nor another host. Pure."""

from __future__ import annotations

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH", "COOKIE", "DSN")


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name is taken to hold a secret."""
    upper = name.upper()
    return any(word in upper for word in SECRET_WORDS)
