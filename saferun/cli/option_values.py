"""What is said of an option's value that is no number, or that was meant to be the script."""

from __future__ import annotations

import os
import re

from saferun.cli.options import Option

# Longer ones are no duration that a person writes.
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]{1,7})", re.IGNORECASE | re.ASCII)
_UNITS = {"s": ("second", 1), "m": ("minute", 60), "h": ("hour", 3600), "d": ("day", 86400)}
_UNIT_NAMES = {
    **{unit: unit for unit in _UNITS},
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
}
_COUNTED = frozenset({"nnodes", "nproc_per_node"})


def no_number(option: Option, text: str) -> tuple[str, str]:
    """What a text is not, which is no value of an option that takes a number; and a hint."""
    is_seconds = option.metavar == "SECONDS"
    kind = "whole number" if option.kind == "int" else "number"
    if is_seconds:
        return f"is not a {kind} of seconds", _seconds_hint(text)
    return f"is not a {kind}", f"write it like {'29500' if option.dest == 'master_port' else '2'}"


def _seconds_hint(text: str) -> str:
    found = _DURATION.fullmatch(text.strip())
    unit = _UNIT_NAMES.get(found[2].lower()) if found is not None else None
    if found is None or unit is None:
        return "write it like 300"
    name, factor = _UNITS[unit]
    amount = float(found[1])
    seconds = f"{amount * factor:.10g}"
    if factor == 1:
        return f"write it without the unit: {seconds}"
    return f"{found[1]} {name} is {seconds}" if amount == 1 else f"{found[1]} {name}s are {seconds}"


def may_be_script(text: str) -> bool:
    """Whether the value of an option may be the script, which stands where the value was left out."""
    return text.endswith(".py") or os.path.isfile(text)


def value_and_script(option: Option) -> str:
    """How an option is written with its value before a script."""
    value = "N" if option.dest in _COUNTED else option.metavar or "VALUE"
    if option.choices is not None:
        value = f"{{{','.join(option.choices)}}}"
    return f"{option.name} {value} SCRIPT"
