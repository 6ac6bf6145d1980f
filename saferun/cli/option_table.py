"""The README's table of options: ``python -m saferun.cli.option_table`` prints it."""

from __future__ import annotations

from saferun.cli.options import OPTIONS, Option


def option_table() -> str:
    """Every option by task, as Markdown."""
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        groups.setdefault(option.group, []).append(option)
    lines = ["| option | default | what it does |", "| --- | --- | --- |"]
    for group, options in groups.items():
        lines.append(f"| **{group}** | | |")
        lines.extend(_row(option) for option in options)
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    # torchrun's second spelling, with underscores, is said once above the table.
    flags = ", ".join(f"`{flag}`" for flag in option.flags if "_" not in flag)
    default = "" if option.kind == "flag" or option.default in {None, "", ()} else f"`{option.default}`"
    values = f" ({', '.join(option.choices)})" if option.choices else ""
    return f"| {flags} | {default} | {option.help.replace('|', chr(92) + '|')}{values} |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(option_table())
