"""What argparse says of a wrong command line, in plainer words."""

from __future__ import annotations

import re

from saferun.env.profiles.quoting import nearest, quoted
from saferun.errors import UsageError

_NO_NUMBER = re.compile(r"argument (?:-\w/)?(\S+): invalid (int|float) value: '(.*)'", re.DOTALL)
_NUMBERS = {"int": "a whole number", "float": "a number"}
# Of a subcommand or the action of one, whose names are in capitals.
_NO_WORD = re.compile(r"argument ([A-Z]+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


def plain_error(message: str, program: str) -> UsageError:
    """The error of a wrong command line.

    Args:
        message: argparse's.
        program: the command, with the subcommand whose help has more.
    """
    more = f"see {program} --help"
    if found := _NO_NUMBER.fullmatch(message):
        return UsageError(f"{found[1]} {found[3]} is not {_NUMBERS[found[2]]}", more)
    if found := _NO_WORD.fullmatch(message):
        near = nearest(found[2], [word.strip("' ") for word in found[3].split(",")])
        what = f"there is no {found[1].lower()} {quoted(found[2])}"
        return UsageError(what, f"did you mean {near}? {more}" if near else more)
    return UsageError(message, more)
