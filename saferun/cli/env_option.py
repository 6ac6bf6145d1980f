"""``--env NAME=VALUE`` and ``--env NAME``: variables for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from saferun.env.profiles.templates import literal
from saferun.errors import UsageError, printable
from saferun.text.redaction import redacted_environ


def read_env(
    texts: Iterable[str], environ: Mapping[str, str], print_message: Callable[[str], None], *, on_command_line: bool
) -> tuple[tuple[str, str], ...]:
    """The name and value of each ``--env``.

    As ``docker run --env`` does, a name alone takes the value that the variable has here, as it is; one that is not set
    here stays out.

    Args:
        texts: what was given.
        environ: saferun's own environment.
        print_message: takes one line each: what stays out, and which secrets every user of this host can read.
        on_command_line: whether they stand where ``ps`` shows them.

    Raises:
        UsageError: one that is empty.
    """
    pairs: list[tuple[str, str]] = []
    seen: list[str] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not text:
            raise UsageError(
                "--env is empty", "write --env NAME=VALUE, or --env NAME; to remove a variable, use --unset NAME"
            )
        if equals:
            pairs.append((name, value))
            if on_command_line and redacted_environ({name: value}) != {name: value}:
                seen.append(name)
        elif name in environ:
            pairs.append((name, literal(environ[name])))
        else:
            print_message(f"saferun: --env {printable(name)}: it is not set in this environment, and is left out")
    if seen:
        names = ", ".join(dict.fromkeys(seen))
        print_message(
            f"saferun: everyone on this host can read the value of {printable(names)} in ps; export it, and write "
            f"--env {printable(seen[0])}"
        )
    return tuple(pairs)
