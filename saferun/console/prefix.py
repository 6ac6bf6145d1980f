"""The prefix of a line: its template, fields and colour."""

from __future__ import annotations

from saferun.errors import UsageError

FIELDS = ("host", "host_digits", "rank", "local_rank", "role")
# Readable on light and dark backgrounds, neighbours easy to tell apart.
_COLORS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


def check_template(template: str) -> None:
    """Raise UsageError unless every field of a ``--prefix`` template is known."""
    try:
        render_template(template, host="h", rank=0, local_rank=0, role="r")
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        fields = " ".join(f"{{{field}}}" for field in FIELDS)
        raise UsageError(
            f"--prefix {template!r} cannot be filled in ({type(error).__name__}: {error})",
            f"its fields are {fields}; write {{{{ for a brace, and 'none' for no prefix",
        ) from None


def render_template(template: str, *, host: str, rank: int, local_rank: int, role: str) -> str:
    """Fill in a ``--prefix`` template."""
    digits = "".join(char for char in host if char.isdigit())
    return template.format_map(
        {"host": host, "host_digits": digits or host, "rank": rank, "local_rank": local_rank, "role": role}
    )


def render_legacy(template: str, *, hostname: str, rank: int, local_rank: int, role: str) -> str:
    """Fill in torchrun's template (``${role_name} ${rank} ${local_rank} ${hostname}``).

    It is that of ``--log-line-prefix-template`` and of TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.
    """
    from string import Template

    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=hostname)


def colored(prefix: str, rank: int) -> str:
    """The prefix in its rank's colour."""
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{prefix}\x1b[0m" if prefix else prefix
