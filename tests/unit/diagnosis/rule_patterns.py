"""The patterns of all rules that name a cause."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from saferun.diagnosis import causes, frames, job_hosts, tracebacks
from saferun.diagnosis.causes.texts import TextRule
from saferun.diagnosis.lazy_patterns import LazyPattern


def patterns_of_rules() -> list[LazyPattern]:
    """Each pattern once, those that stand alone and those of rules."""
    modules = (import_module(f"{causes.__name__}.{one.name}") for one in pkgutil.iter_modules(causes.__path__))
    values = (value for module in modules for value in vars(module).values())
    found = (pattern for value in values for pattern in _patterns_in(value))
    return list({(pattern.pattern, pattern.flags): pattern for pattern in found}.values())


def patterns_of_lines() -> list[LazyPattern]:
    """Those by which tracebacks, frames and hosts are read, whatever they mean."""
    return [
        pattern
        for module in (frames, job_hosts, tracebacks)
        for value in vars(module).values()
        for pattern in _patterns_in(value)
    ]


def _patterns_in(value: object) -> Iterator[LazyPattern]:
    if isinstance(value, TextRule):
        yield value.pattern
    elif isinstance(value, tuple):
        for one in value:
            yield from _patterns_in(one)
    elif isinstance(value, LazyPattern):
        yield value
