"""``saferun --help`` and ``--help-all``, made from the table of options, without argparse."""

from __future__ import annotations

import os
import sys

from saferun.cli.options import OPTIONS, Option
from saferun.console.stderr import print_error
from saferun.errors import SaferunError

COMMON = (
    *("nnodes", "nproc_per_node", "node_rank", "scheduler", "hosts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone", "master_addr", "master_port"),
    *("max_restarts", "start_retries", "shutdown_timeout"),
    *("module", "no_python"),
    *("log_dir", "redirects", "tee", "run_dir", "prefix"),
    *("preflight", "nic"),
    *("hang_timeout", "on_hang", "cores"),
    *("env_profile", "env", "config", "dry_run"),
)
"""What ``--help`` shows; ``--help-all`` shows every option."""

_HEAD = """\
usage: saferun [options] script [script arguments]

Start the ranks of a distributed PyTorch job on this host, and report what went wrong.
"""
_QUESTIONS = (
    ("-h, --help", "show the common options and exit"),
    ("--help-all", "show all options and exit"),
    ("--version", "show the version and exit"),
)
_COMMON_TAIL = "saferun --help-all shows all options, saferun --version the version."
PLACES = (
    "Every option can also be written with underscores (--nproc_per_node). Except for --print-completion, "
    "--show-config and --dry-run, it can also be set in the environment as SAFERUN_<NAME> and, except for --config, in "
    "a YAML file (--config). The variable of --secret-file is SAFERUN_JOB_SECRET_FILE."
)
"""Where options can stand besides the command line."""
_TAIL = f"{PLACES} Those marked * also take PET_<NAME>, as under torchrun."
_SAFERUNCTL = (
    "See also saferunctl: 'saferunctl stacks' shows where each rank of a run is in its code, 'saferunctl doctor' tests "
    "hosts without a job, 'saferunctl core' reads core files, 'saferunctl env' explains the environment."
)
_NARROWEST, _WIDEST = 50, 110
_INDENT = 26


def help_text(*, everything: bool = False, width: int = 80) -> str:
    """What the options are good for, by task.

    Args:
        everything: all options, and not only the common ones.
        width: of the terminal, in columns.
    """
    width = max(_NARROWEST, min(width, _WIDEST))
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        if everything or option.dest in COMMON:
            groups.setdefault(option.group, []).append(option)
    lines = [_HEAD]
    for flags, text in _QUESTIONS:
        lines += _entry(flags, text, width)
    for group, options in groups.items():
        lines += ["", f"{group}:"]
        for option in options:
            lines += _entry(_flags(option), _text(option, everything=everything), width)
    lines.append("")
    if not everything:
        lines += _wrapped(_COMMON_TAIL, width)
    lines += [*(_wrapped(_TAIL, width) if everything else ()), *_wrapped(_SAFERUNCTL, width)]
    return "\n".join(lines) + "\n"


def show_help(flag: str) -> int:
    """Print it as the flag asks.

    Returns:
        The exit code.
    """
    text = help_text(everything=flag == "--help-all", width=terminal_width())
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, AttributeError) as error:  # Python has no object for a stream that is closed
        # What is left in the buffer must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):  # else the reader has seen enough
            why = getattr(error, "strerror", None) or "it is closed"
            print_error(SaferunError(f"standard output cannot be written: {why}", "see where it leads"))
            return 1
    return 0


def terminal_width() -> int:
    """Columns of the terminal that stdout is; 80 where it is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or 80
    except (OSError, ValueError):
        return 80


def _flags(option: Option) -> str:
    # The second spelling, with underscores, is said once below.
    flags = ", ".join(flag for flag in option.flags if "_" not in flag)
    if option.kind == "flag":
        return flags
    value = f"{{{','.join(option.choices)}}}" if option.choices else option.metavar or option.dest.upper()
    return f"{flags} {value}"


def _text(option: Option, *, everything: bool) -> str:
    default = option.default
    if isinstance(default, tuple):
        default = ",".join(default)
    elif isinstance(default, float):
        default = f"{default:g}"
    has_default = option.kind != "flag" and default not in {None, ""} and "(default:" not in option.help
    return option.help + (f" (default: {default})" if has_default else "") + (" *" if everything and option.pet else "")


def _entry(left: str, text: str, width: int) -> list[str]:
    indent = " " * _INDENT
    lines = [indent + line for line in _wrapped(text, width - _INDENT)]
    if len(left) <= _INDENT - 4:
        return [f"  {left:<{_INDENT - 2}}{lines[0][_INDENT:]}", *lines[1:]]
    return [f"  {left}", *lines]


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most this width; what is longer than a line stands alone. textwrap would import re."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
