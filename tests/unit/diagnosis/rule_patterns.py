"""The patterns of all rules that name a cause."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module

from saferun.diagnosis import causes
from saferun.diagnosis.causes.texts import TextRule


def patterns_of_rules() -> list[re.Pattern[str]]:
    """Each pattern once, those that stand alone and those of rules."""
    modules = (import_module(f"{causes.__name__}.{one.name}") for one in pkgutil.iter_modules(causes.__path__))
    values = (value for module in modules for value in vars(module).values())
    return list(dict.fromkeys(pattern for value in values for pattern in _patterns_in(value)))


def _patterns_in(value: object) -> Iterator[re.Pattern[str]]:
    if isinstance(value, TextRule):
        yield value.pattern
    elif isinstance(value, tuple):
        for one in value:
            yield from _patterns_in(one)
    elif isinstance(value, re.Pattern):
        yield value
