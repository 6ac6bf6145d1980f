"""The table of options in docs/options.md.

``python -m tests.option_table`` prints it, and with the path of the document replaces the one there.
"""

from __future__ import annotations

from saferun.cli.options import OPTIONS, Option

_HEAD = "| option | default | what it does |\n| --- | --- | --- |\n"


def option_table() -> str:
    """Every option by task, as Markdown."""
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        groups.setdefault(option.group, []).append(option)
    lines = []
    for group, options in groups.items():
        lines.append(f"| **{group}** | | |")
        lines.extend(_row(option) for option in options)
    return _HEAD + "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """A document with the table of today in the place of the one in it."""
    before, head, rest = page.partition(_HEAD)
    if not head:
        return page
    _, gap, after = rest.partition("\n\n")
    return before + option_table() + gap[1:] + after


def _row(option: Option) -> str:
    # torchrun's second spelling, with underscores, is said once above the table.
    flags = ", ".join(f"`{flag}`" for flag in option.flags if "_" not in flag)
    default = "" if option.kind == "flag" or option.default in {None, "", ()} else f"`{_shown(option.default)}`"
    values = f" ({', '.join(option.choices)})" if option.choices else ""
    return f"| {flags} | {default} | {option.help.replace('|', chr(92) + '|')}{values} |"


def _shown(default: object) -> str:
    """A default as it is written on the command line."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    import sys
    from pathlib import Path

    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(option_table())
