"""What detection sees above saferun: a shell at a terminal, and a container that was entered from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.cluster.schedulers import Ancestry, started_by
from saferun.linux.procfs import children_of

SEE = """
from saferun.cluster.placement.pmi import processes_above
above = processes_above()
print([[list(line) for line in above.lines], sorted(above.at_terminal), above.entered], flush=True)
"""
REPOSITORY = Path(__file__).parents[2]
_USER = () if os.geteuid() == 0 else ("--user",)


def seen(text: str) -> Ancestry:
    import ast

    lines, at_terminal, entered = ast.literal_eval(text)
    return Ancestry(lines, at_terminal, entered)


def test_a_shell_that_reads_from_a_terminal_is_seen() -> None:
    """And one that reads a script from a pipe is not: ``srun bash < script``."""
    terminal, slave = os.openpty()
    read, write = os.pipe()
    command = f"'{sys.executable}' -c '{SEE}'; exit\n".encode()
    try:
        for end, stdin in ((terminal, slave), (write, read)):
            with subprocess.Popen(
                ["sh"], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY
            ) as shell:
                os.write(end, command)
                assert shell.stdout is not None
                text = shell.stdout.readline().decode()
            above = seen(text)
            assert list(above.lines[0]) == ["sh"]
            assert (0 in above.at_terminal) == (end == terminal)
            if end == terminal:
                assert started_by(above) == (False, "an interactive shell")
    finally:
        for descriptor in (terminal, slave, read, write):
            os.close(descriptor)


@pytest.fixture
def container() -> Iterator[int]:
    """The number of the first process of a container, as it is outside."""
    make = ("unshare", *(("--user", "--map-root-user") if _USER else ()), "--pid", "--fork", "--mount-proc")
    with subprocess.Popen(
        [*make, "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (first,) = children_of(process.pid)
        yield first
        assert process.stdin is not None
        process.stdin.close()


def test_what_was_started_in_a_container_from_outside_is_told_from_its_own_processes(container: int) -> None:
    """As ``docker exec`` and ``kubectl exec`` start it, by itself or in a shell."""
    enter = ("nsenter", "--target", str(container), "--pid", "--mount", *_USER)
    for words in ((sys.executable, "-c", SEE), ("sh", "-c", '"$@"; true', "sh", sys.executable, "-c", SEE)):
        inside = subprocess.run(
            [*enter, "sh", "-c", f'cd {REPOSITORY}; exec "$@"', "sh", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        above = seen(inside.stdout)
        assert above.entered
        assert started_by(above)[0] is False
    make = ("unshare", *(("--user", "--map-root-user") if _USER else ()), "--pid", "--fork", "--mount-proc")
    for words in ((sys.executable, "-c", SEE), ("sh", "-c", '"$@"; true', "sh", sys.executable, "-c", SEE)):
        own = subprocess.run([*make, *words], capture_output=True, text=True, check=True, cwd=REPOSITORY)
        assert not seen(own.stdout).entered
