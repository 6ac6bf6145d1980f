"""``saferunctl core``: where a process was in its code when it left a core."""

from __future__ import annotations

import argparse
import os
import time

from saferun.ctl.answer import answer, answer_json, plain
from saferun.errors import UsageError
from saferun.linux.core_notes import CoreError, open_regular, read_core_notes
from saferun.text.evidence_redaction import threads_without_secrets
from saferun.text.redaction import redacted_text

_BUDGET_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("file", metavar="FILE", help="the core")
    parser.add_argument("--exe", metavar="PROGRAM", help="program that left the core, if the core names another")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--gdb", action="store_true", help="also read it with gdb; otherwise gdb is used only if necessary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the core and print its stacks; 1 where there are none to be had."""
    from saferun.captures.core_reading import CoreJob, core_headline, read_cores, stack_lines  # slow to import

    path = os.path.realpath(arguments.file)
    executable = os.path.realpath(arguments.exe) if arguments.exe else ""
    if executable and not os.path.isfile(executable):
        raise UsageError(f"{arguments.exe} is not a file", "--exe takes the path of the program that left the core")
    try:
        fd = open_regular(path, named=True)
        notes = read_core_notes(fd)
    except CoreError as error:
        raise UsageError(
            f"{arguments.file} cannot be read as a core: {error}",
            "see where the kernel puts cores: cat /proc/sys/kernel/core_pattern",
        ) from None
    [reading] = read_cores([CoreJob(fd, notes, executable)], time.monotonic() + _BUDGET_S, gdb=arguments.gdb)
    os.close(fd)
    if not reading.threads:
        hint = "install pystack (pip install pystack) or gdb; with --exe name the program that left the core"
        if notes.is_cut_off:
            hint = "have the disk, and ulimit -c, allow a whole core: one that was cut off is of no use"
        raise UsageError(f"there are no stacks in {arguments.file}: {redacted_text(reading.failure)}", hint)
    threads = threads_without_secrets(reading.threads)
    if arguments.json:
        answer_json(
            {
                "core": path,
                "headline": core_headline(notes),
                "size_bytes": notes.size_bytes,
                "tool": reading.tool,
                "failure": reading.failure,
                "threads": [plain(thread) for thread in threads],
                "output": reading.output if arguments.gdb else "",
            }
        )
        return 0
    lines = [core_headline(notes), f"core {path} ({notes.size_bytes / 1e6:.1f} MB), read by {reading.tool}"]
    lines += [reading.failure] if reading.failure else []
    text = "\n".join([*lines, *stack_lines(threads)]) + "\n"
    if arguments.gdb and reading.output:
        text += f"\n{reading.output}"
    answer(text)
    return 0
