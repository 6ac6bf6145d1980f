"""``saferunctl report``: the report of a run, as text, JSON, one HTML page, or a trace for other viewers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from saferun.ctl.answer import answer
from saferun.ctl.output_files import is_stdout, write_output
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import SaferunError, UsageError
from saferun.files.run_dir import shorter_path
from saferun.linux.ownership import open_named

if TYPE_CHECKING:
    from saferun.report.page.run_contents import RunFiles

_MOST_BYTES = 64 << 20
_PAGE, _REPORT = "report.html", "report.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--text", action="store_true", help="print report.txt (the default)")
    kinds.add_argument("--json", action="store_true", help="print report.json")
    kinds.add_argument("--html", action="store_true", help="make report.html again and print its path")
    kinds.add_argument(
        "--format",
        choices=("perfetto", "speedscope"),
        help="perfetto: the timeline, for ui.perfetto.dev and chrome://tracing; speedscope: the stacks, for speedscope",
    )
    parser.add_argument("--output", metavar="FILE", help="write there; - is standard output")
    parser.add_argument("--open", action="store_true", help="make report.html again and open it in a browser")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the report."""
    directory = find_run(arguments.run_dir)
    if arguments.html or (arguments.open and not arguments.format):
        _write_page(directory, arguments.output, is_opened=arguments.open)
    elif arguments.format:
        _write(arguments.output, _trace(directory, arguments.format))
    else:
        name = _REPORT if arguments.json else "report.txt"
        content = _read(directory, name)
        if arguments.json:
            _check_json(directory, content)
        if arguments.output:
            _write(arguments.output, content)
        else:
            answer(content.decode(errors="replace"))
    return 0


def _write_page(directory: Path, output: str | None, *, is_opened: bool) -> None:
    try:
        from saferun.report.page.rendering import PageTooLargeError, render_page
    except ImportError as error:
        raise SaferunError(f"no page can be made: {error}", "install jinja2: pip install jinja2") from None
    files = _files(directory)
    try:
        page = render_page(files)
    except PageTooLargeError as error:
        raise SaferunError(f"{shorter_path(str(directory))}: {error}", "see report.txt there") from None
    path = output or os.path.join(directory, _PAGE)
    # Root makes it for the user whose run it is.
    _write(path, page, owner=-1 if output else files.owner)
    if not is_stdout(path):
        answer(f"{shorter_path(os.path.abspath(path))}\n")
    if is_opened:
        _open_in_browser(path)


def _open_in_browser(path: str) -> None:
    import webbrowser

    if is_stdout(path) or not webbrowser.open(f"file://{os.path.abspath(path)}"):
        raise SaferunError("no browser could be opened", "copy the file to where there is one")


def _trace(directory: Path, kind: str) -> bytes:
    from saferun.report.page.building import PHASES, build_page
    from saferun.report.page.exports import perfetto, speedscope

    page = build_page(_files(directory), _clock, folds=False)
    return json.dumps(perfetto(page, PHASES) if kind == "perfetto" else speedscope(page)).encode() + b"\n"


def _clock(seconds: float) -> str:
    return f"{seconds:.3f}"


def _files(directory: Path) -> RunFiles:
    """What there is of a run.

    Raises:
        UsageError: there is nothing, or its report cannot be read: what is made without it would say nothing of it.
    """
    from saferun.report.page.run_reading import read_run

    try:
        files = read_run(str(directory), patience_s=600.0)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}", "name the directory of a run") from None
    if files.report is None and files.run is None and not files.hosts:
        raise UsageError(
            f"{shorter_path(str(directory))} is not the directory of a run", "name one like saferun-runs/latest"
        )
    if files.report is None and os.path.lexists(path := os.path.join(directory, _REPORT)):
        _read(directory, _REPORT)  # or why it cannot be read
        raise _no_report(path)
    return files


def _check_json(directory: Path, content: bytes) -> None:
    """Nothing that is passed on to a program is half an object."""
    try:
        is_object = isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise _no_report(os.path.join(directory, _REPORT))


def _no_report(path: str) -> UsageError:
    return UsageError(f"{shorter_path(path)} is no report, or not a whole one", "see report.txt there")


def _read(directory: Path, name: str) -> bytes:
    path = os.path.join(directory, name)
    try:
        with open(open_named(path), "rb") as file:
            content = file.read(_MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"there is no {name} in {shorter_path(str(directory))}",
            "it is written at a hang or a failure, with --report-html always at every end; --html works without it",
        ) from None
    except OSError as error:
        raise UsageError(f"{shorter_path(path)}: {error.strerror}", "name another run") from None
    return content


def _write(path: str | None, content: bytes, *, owner: int = -1) -> None:
    """Write a file as a whole, or to standard output."""
    if path is None or is_stdout(path):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    write_output(path, content, owner=owner)
