"""What ``saferunctl env`` answers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from textwrap import wrap

import saferun
from saferun.cli.env_option import read_env
from saferun.cli.rank_command import check_script
from saferun.config import EnvironConfig
from saferun.console.stderr import print_error
from saferun.ctl.answer import answer, answer_json
from saferun.env.apply import apply, files_of_user, host_vendor, installed_versions, resolve_environ
from saferun.env.lint.check import check
from saferun.env.lint.explanation import explanation, probably_meant
from saferun.env.lint.findings import one_line, shown
from saferun.env.lint.known_names import KnownNames
from saferun.env.profiles import ProfileSet, default_search_path, load_profiles, user_directory
from saferun.env.profiles.profile_text import diff_lines, explain_lines, list_lines, show_lines, variable_names
from saferun.env.profiles.quoting import quoted
from saferun.files.run_dir import shorter_path
from saferun.model import RankAssignment
from saferun.text.wording import count_text

# Who asks for it wants a whole answer, on a busy machine and from a slow file system, too.
_SEARCH_S = 120.0
_MOST_NAMES = 5
_BUILT_IN = "configs"


def run(arguments: argparse.Namespace) -> int:
    """Answer, on stdout. 1 when the lint found something."""
    if arguments.action == "lint":
        return _lint(arguments)
    vendor, versions = host_vendor(arguments.vendor), installed_versions(os.environ)
    has_directory = user_directory(os.environ) in files_of_user(os.environ, vendor)
    profiles = load_profiles(default_search_path(arguments.env_profile_path, os.environ, with_user=has_directory))
    match arguments.action:
        case "list":
            lines = list_lines(profiles)
        case "show":
            lines = show_lines(profiles, arguments.profile, vendor=vendor, versions=versions)
        case "explain":
            return _explain(arguments, profiles)
        case _:
            lines = diff_lines(profiles, arguments.first, arguments.second, vendor=vendor, versions=versions)
    _answer(arguments, lines)
    return 0


def _answer(arguments: argparse.Namespace, lines: Sequence[str], **more: object) -> None:
    lines = [line.replace(f"({_BUILT_IN}/", f"({_profiles_folder()}/") for line in lines]
    if arguments.json:
        answer_json({"action": arguments.action, "lines": list(lines), **more})
    else:
        answer("".join(f"{line}\n" for line in lines))


def _profiles_folder() -> str:
    """Where the profiles that come with saferun are: in the wheel within the package, else beside it."""
    package = os.path.dirname(os.path.abspath(saferun.__file__))
    directories = (os.path.join(package, _BUILT_IN), os.path.join(os.path.dirname(package), _BUILT_IN))
    return next((shorter_path(directory) for directory in directories if os.path.isdir(directory)), _BUILT_IN)


def _explain(arguments: argparse.Namespace, profiles: ProfileSet) -> int:
    """Explain a variable. 1 where nothing is known of it."""
    name: str = arguments.variable
    lines = explain_lines(profiles, name)
    known = explanation(name)
    if known and name in os.environ:
        known.append(f"    here: {name}={shown(name, os.environ[name])}")
    if known or lines:
        _answer(arguments, [*known, *([""] if known and lines else []), *(lines or ["    no env profile sets it"])])
        return 0
    near = probably_meant(name, variable_names(profiles))
    _answer(arguments, [f"nothing is known of {quoted(name)}", *([f"did you mean {near}?"] if near else [])])
    return 1


def _lint(arguments: argparse.Namespace) -> int:
    if arguments.script is not None:
        check_script(arguments.script)
    pairs = read_env(arguments.env, os.environ, print_error, on_command_line=True)
    config = EnvironConfig(
        profiles=tuple(name for name in arguments.env_profile.split(",") if name),
        profile_path=tuple(arguments.env_profile_path),
        env=pairs,
        unset=(),
        vendor=arguments.vendor,
        lint=True,
    )
    environ = dict(os.environ)
    resolution = resolve_environ(config, environ)
    host = os.uname().nodename
    apply(resolution, environ, RankAssignment(0, 0, 0), host=host, world_size=1, run_dir=None, rank_dir=None)
    result = check(environ, python=arguments.python, script=arguments.script, budget_s=_SEARCH_S)
    found = result.findings if arguments.all else result.when_asked
    lines = [one_line(finding) for finding in found]
    lines += searched_lines(result.known, everything=arguments.all, has_found=bool(found))
    _answer(arguments, lines, findings=[finding._asdict() for finding in found])
    return 1 if found else 0


def searched_lines(known: KnownNames, *, everything: bool, has_found: bool = False) -> list[str]:
    """What the answer is based on, after ``no problems found`` if there are none.

    Args:
        known: what was searched.
        everything: with the names of all libraries and packages.
        has_found: whether problems were found.
    """
    if not (known.libraries or known.unsearched):
        searched = "no library or package was searched"
        return [searched if has_found else "no problems found: no variable is set that the lint checks"]
    all_clear = [] if has_found else ["no problems found"]
    families = sorted(family for family, libraries in known.owners.items() if libraries)
    among = f", among them those that read the variables of {', '.join(families)}" if families else ""
    libraries = count_text(len(known.libraries), "library", "libraries")
    lines = [*all_clear, f"searched: {libraries} and {count_text(len(known.modules), 'Python package')}{among}"]
    if known.unsearched:
        lines.append(f"not found or not searched: {_first(known.unsearched, everything=everything)}")
    if everything:
        names = ", ".join((*known.libraries, *known.modules))
        lines += wrap(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _first(names: Sequence[str], *, everything: bool) -> str:
    first = names if everything else names[:_MOST_NAMES]
    return ", ".join(first) + (f" and {len(names) - len(first)} more (--all)" if len(first) < len(names) else "")
