"""The man pages of both commands, as roff with the macros of man(7), from the tables of options and subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from saferun import __version__
from saferun.cli.help import PLACES
from saferun.cli.options import OPTIONS, Option

_ABOUT_CTL = (
    "It needs no running saferun, and changes nothing but what a subcommand is for. A run is named by its directory, "
    "its name below saferun-runs, its id, or the beginning of either."
)
_CODES = (
    ("0", "done, or the answer is good news"),
    ("1", "the answer is bad news: a host that is not fit, a finding, a run that does not answer"),
    ("2", "a usage error"),
)


def man_page() -> str:
    """saferun(1)."""
    lines = _head("saferun", "start the ranks of a distributed PyTorch job, and report what went wrong")
    lines += [".SH SYNOPSIS", ".B saferun", _text("[options] script [script arguments]"), ".SH DESCRIPTION"]
    lines.append(_text(PLACES))
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        groups.setdefault(option.group, []).append(option)
    for group, options in groups.items():
        lines.append(f'.SH "{_text(group.upper())}"')
        for option in options:
            choices = f"{{{','.join(map(str, option.choices))}}}" if option.choices else ""
            value = "" if option.kind == "flag" else choices or option.metavar or option.dest.upper()
            lines += _item([flag for flag in option.flags if "_" not in flag], value, option.help)
    return _joined([*lines, ".SH SEE ALSO", ".BR saferunctl (1),", ".BR torchrun"])


def ctl_man_page() -> str:
    """saferunctl(1): all subcommands, with their arguments."""
    from saferun.ctl import SUBCOMMANDS

    lines = _head("saferunctl", "inspect a host, settings and runs of saferun, and end running jobs")
    lines += [".SH SYNOPSIS", ".B saferunctl", "\\fIVERB\\fR [arguments]", ".SH DESCRIPTION", _text(_ABOUT_CTL)]
    lines.append(".SH SUBCOMMANDS")
    for subcommand in SUBCOMMANDS:
        parser = argparse.ArgumentParser()
        subcommand.load().add_arguments(parser)
        lines += _subcommand(
            parser, f"saferunctl {subcommand.name}", subcommand.summary, takes_more=subcommand.takes_more
        )
    lines.append(".SH EXIT STATUS")
    for code, text in _CODES:
        lines += [".TP", f"\\fB{code}\\fR", _text(text)]
    return _joined([*lines, ".SH SEE ALSO", ".BR saferun (1)"])


def _subcommand(
    parser: argparse.ArgumentParser, command: str, summary: str, *, takes_more: bool = False
) -> Iterator[str]:
    """A section of a subcommand, or of an action of it. What argparse itself shows differs between Pythons."""
    synopsis = ["[options]"]
    items: list[str] = []
    sections: list[str] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            synopsis.append(f"{action.metavar} [arguments]")
            helps = {one.dest: one.help or "" for one in action._choices_actions}  # noqa: SLF001 - as above
            for name, inner in action.choices.items():
                sections += _subcommand(inner, f"{command} {name}", helps.get(name, ""))
        elif action.help != argparse.SUPPRESS and "-h" not in action.option_strings:
            value = _value(action)
            flags = [flag for flag in action.option_strings if "_" not in flag]
            if not flags:
                synopsis.append(value)
            elif action.required:
                synopsis.append(f"{flags[-1]} {value}")
            items += _item(flags, value, (action.help or "") % vars(action))
    synopsis += ["[options of saferun]"] if takes_more else []
    yield f'.SS "{_text(command)}"'
    yield _text(f"{summary}.")
    yield from (".PP", f"\\fB{_text(command)}\\fR {_text(' '.join(synopsis))}")
    yield from items
    if parser.epilog:
        yield from (".PP", _text(" ".join(parser.epilog.split())))
    yield from sections


def _value(action: argparse.Action) -> str:
    """How what is given to an option or as an argument is called; empty for a switch."""
    if action.nargs == 0:
        return ""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices is not None else ""
    name = choices or str(action.metavar or action.dest.upper())
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _head(command: str, purpose: str) -> list[str]:
    return [f'.TH {command.upper()} 1 "" "saferun {__version__}"', ".SH NAME", _text(f"{command} - {purpose}")]


def _item(flags: list[str], value: str, about: str) -> list[str]:
    names = [f"\\fB{_text(flag)}\\fR" for flag in flags]
    label = " ".join([*([", ".join(names)] if names else []), *([f"\\fI{_text(value)}\\fR"] if value else [])])
    return [".TP", label, _text(about)] if about else [".TP", label]


def _text(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _joined(lines: list[str]) -> str:
    return "\n".join([*lines, ""])
