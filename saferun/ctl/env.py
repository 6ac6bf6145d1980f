"""``saferunctl env``: which variables a profile sets and why, and which variables of this environment do nothing."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

_PATH_HELP = "a directory or file with more env profiles"
_PROFILE_HELP = "the name of an env profile, as `saferunctl env list` shows it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.set_defaults(env_profile_path=[], vendor="auto", json=False)
    _add_common(parser)
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary, description=summary)
        added.set_defaults(parser=added)
        return added

    action("list", "the env profiles, with what they cost")
    show = action("show", "what a profile sets on this host, and why")
    show.add_argument("profile", help=_PROFILE_HELP)
    explain = action("explain", "what a variable is for, who reads it, and which profiles set it")
    explain.add_argument("variable", help="the name of an environment variable")
    diff = action("diff", "how two profiles differ on this host")
    diff.add_argument("first", help=_PROFILE_HELP)
    diff.add_argument("second", help=_PROFILE_HELP)
    lint = action("lint", "variables that no installed library reads, and values that make no sense")
    lint.add_argument("--env-profile", default="none", help="with the variables of these profiles, as for a launch")
    lint.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="with this variable")
    lint.add_argument("--all", action="store_true", help="also uncertain findings, and all names of what was searched")
    lint.add_argument("--python", default=os.environ.get("PYTHON_EXEC", sys.executable), help="the ranks' interpreter")
    lint.add_argument("script", nargs="?", help="the training script: what it reads is known")
    for parser_of_action in actions.choices.values():
        _add_common(parser_of_action)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """What may stand before the action and behind it."""
    path: dict[str, Any] = {"action": "append", "default": argparse.SUPPRESS, "metavar": "PATH", "help": _PATH_HELP}
    parser.add_argument("--env-profile-path", **path)
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")
    text = "GPU vendor that the env profiles apply to; auto: that of this host"
    parser.add_argument("--vendor", choices=("auto", "nvidia", "amd", "none"), default=argparse.SUPPRESS, help=text)


def run(arguments: argparse.Namespace) -> int:
    """Answer, on stdout. 1 when the lint found something."""
    from saferun.ctl import env_answers  # slow to import

    return env_answers.run(arguments)
