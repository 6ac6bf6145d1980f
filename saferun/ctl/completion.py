"""``saferunctl completion``: completion for bash, zsh and fish, made from the table of options.

``share/`` has that and the man pages (:func:`shared_files`); ``python -m saferun.ctl.completion .`` writes it. Shells
read those files: completion starts no Python. shtab, which ``--print-completion`` uses, has nothing for fish and man.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from saferun.cli.options import OPTIONS, Option
from saferun.ctl.man_pages import ctl_man_page, man_page
from saferun.errors import printable_lines

SHELLS = ("bash", "zsh", "fish")
_QUESTIONS = (
    ("--help", "show the common options and exit"),
    ("--help-all", "show all options and exit"),
    ("--version", "show the version and exit"),
)
# What an option takes that is no file.
_NUMBERS = frozenset({"int", "float"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to run the script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(printable_lines(completion(arguments.shell)))
    return 0


def shared_files() -> dict[str, str]:
    """Every file of ``share/``: its path there, and its content."""
    return {
        "share/bash-completion/completions/saferun": completion("bash"),
        "share/bash-completion/completions/saferunctl": completion("bash"),
        "share/zsh/site-functions/_saferun": completion("zsh"),
        "share/fish/vendor_completions.d/saferun.fish": completion("fish", "saferun"),
        "share/fish/vendor_completions.d/saferunctl.fish": completion("fish", "saferunctl"),
        "share/man/man1/saferun.1": man_page(),
        "share/man/man1/saferunctl.1": ctl_man_page(),
    }


def completion(shell: str, command: str = "") -> str:
    """The script for a shell.

    Args:
        shell: one of ``SHELLS``.
        command: ``saferun`` or ``saferunctl``, for fish; empty: both.
    """
    if shell == "bash":
        return _bash()
    if shell == "zsh":
        return _zsh()
    parts = {"saferun": _fish, "saferunctl": _fish_ctl}
    return "".join(parts[name]() for name in parts if command in {"", name})


def _name(option: Option) -> str:
    """How an option is usually written: the second spelling, with underscores, is torchrun's."""
    return next(flag for flag in option.flags if flag.startswith("--"))


def _has_file(option: Option) -> bool:
    return option.kind not in _NUMBERS and not option.choices


def _subcommands() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The subcommands of saferunctl: what each is for, and the words that may follow it."""
    from saferun.ctl import SUBCOMMANDS

    found = {}
    for subcommand in SUBCOMMANDS:
        parser = argparse.ArgumentParser(prog=subcommand.name)
        subcommand.load().add_arguments(parser)
        further: list[str] = []
        for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
            further += [flag for flag in action.option_strings if flag.startswith("--") and "_" not in flag]
            if not action.option_strings and action.choices is not None:
                further += map(str, action.choices)
        found[subcommand.name] = (subcommand.summary, tuple(further))
    return found


# ---------------------------------------------------------------------------------------------------- bash

_BASH = """\
# bash completion for saferun and saferunctl; made by saferun.ctl.completion
_saferun() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" i=1
    COMPREPLY=()
    # Behind the script everything is the script's.
    while (( i < COMP_CWORD )); do
        case "${{COMP_WORDS[i]}}" in
            {switches}|--*=*|=) ;;
            -*) [[ ${{COMP_WORDS[i+1]}} == "=" ]] && (( i++ )); (( i++ )) ;;
            *) return ;;
        esac
        (( i++ ))
    done
    # bash makes a word of the equal sign.
    [[ $cur == "=" ]] && cur=""
    [[ $prev == "=" ]] && prev="${{COMP_WORDS[COMP_CWORD-2]}}"
    case "$prev" in
{cases}
        {values}) return ;;
    esac
    if [[ $cur == -*_* ]]; then
        COMPREPLY=( $(compgen -W "{underscored}" -- "$cur") )
    elif [[ $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{flags}" -- "$cur") )
    fi
}}
_saferunctl() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{subcommands} --help --version" -- "$cur") )
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{subcommand_cases}
    esac
}}
complete -o default -F _saferun saferun
complete -o default -F _saferunctl saferunctl
"""


def _bash() -> str:
    switches = [flag for option in OPTIONS if option.kind == "flag" for flag in option.flags]
    chosen = [option for option in OPTIONS if option.choices]
    others = [flag for option in OPTIONS if option.kind != "flag" and not option.choices for flag in option.flags]
    subcommands = _subcommands()
    reply = 'COMPREPLY=( $(compgen -W "{}" -- "$cur") )'
    return _BASH.format(
        switches="|".join([*switches, "-h", *(flag for flag, _ in _QUESTIONS)]),
        cases="\n".join(
            f"        {'|'.join(option.flags)}) {reply.format(' '.join(map(str, option.choices or ())))}; return ;;"
            for option in chosen
        ),
        values="|".join(others),
        flags=" ".join([*map(_name, OPTIONS), *(flag for flag, _ in _QUESTIONS)]),
        underscored=" ".join(flag for option in OPTIONS for flag in option.flags if "_" in flag),
        subcommands=" ".join(subcommands),
        subcommand_cases="\n".join(
            f"        {subcommand}) {reply.format(' '.join(further))} ;;"
            for subcommand, (_, further) in subcommands.items()
            if further
        ),
    )


# ---------------------------------------------------------------------------------------------------- zsh


def _zsh_text(text: str) -> str:
    for char in "\\:[]":
        text = text.replace(char, f"\\{char}")
    return text.replace("'", "'\\''")


def _zsh() -> str:
    lines = [
        "#compdef saferun saferunctl",
        "# made by saferun.ctl.completion",
        "_saferun_options() {",
        "  _arguments \\",
    ]
    lines += [f"    '{flag}[{text}]' \\" for flag, text in _QUESTIONS]
    for option in OPTIONS:
        value = ""
        if option.kind != "flag":
            what = (
                f"({' '.join(map(str, option.choices))})" if option.choices else "_files" if _has_file(option) else " "
            )
            value = f":{_zsh_text(option.metavar or option.dest)}:{what}"
        equals = "" if option.kind == "flag" else "="
        lines.append(f"    '*{_name(option)}{equals}[{_zsh_text(option.help)}]{value}' \\")
    lines += [
        "    '1:script:_files' '*::arguments:_files'",
        "}",
        "_saferunctl_subcommands() {",
        "  local -a subcommands=(",
    ]
    subcommands = _subcommands()
    lines += [f"    '{subcommand}:{_zsh_text(text)}'" for subcommand, (text, _) in subcommands.items()]
    lines += [
        "  )",
        "  if (( CURRENT == 2 )); then _describe subcommand subcommands; return; fi",
        "  case $words[2] in",
    ]
    lines += [
        f"    {subcommand}) compadd -- {' '.join(further)} ;;"
        for subcommand, (_, further) in subcommands.items()
        if further
    ]
    lines += ["  esac", "  _files", "}"]
    lines.append('if [[ $service == saferunctl ]]; then _saferunctl_subcommands "$@"; else _saferun_options "$@"; fi')
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------- fish


def _fish_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _fish() -> str:
    lines = ["# made by saferun.ctl.completion"]
    lines += [f"complete -c saferun -l {flag[2:]} -d '{_fish_text(text)}'" for flag, text in _QUESTIONS]
    for option in OPTIONS:
        value = ""
        if option.choices:
            value = f" -x -a '{' '.join(map(str, option.choices))}'"
        elif option.kind != "flag":
            value = " -r" if _has_file(option) else " -x"
        lines.append(f"complete -c saferun -l {_name(option)[2:]}{value} -d '{_fish_text(option.help)}'")
    return "\n".join(lines) + "\n"


def _fish_ctl() -> str:
    lines = ["# made by saferun.ctl.completion"]
    for subcommand, (text, further) in _subcommands().items():
        lines.append(f"complete -c saferunctl -n __fish_use_subcommand -a {subcommand} -d '{_fish_text(text)}'")
        seen = f"'__fish_seen_subcommand_from {subcommand}'"
        for word in further:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c saferunctl -n {seen} {what}")
    return "\n".join(lines) + "\n"


def _write(root: Path) -> None:
    for name, content in shared_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
