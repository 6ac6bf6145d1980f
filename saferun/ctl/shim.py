"""``saferunctl shim``: makes a directory with a ``torchrun`` that is saferun, for tools that call it by name."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from saferun.ctl.answer import answer
from saferun.errors import UsageError, suppress

_MARK = "# made by saferunctl shim"
_NAME = "torchrun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("directory", metavar="DIR", help="where to write it; made if need be")
    parser.add_argument("--force", action="store_true", help="overwrite a torchrun that is not one of saferunctl's")


def run(arguments: argparse.Namespace) -> int:
    """Write it, and print how it is used."""
    directory = os.path.abspath(arguments.directory)
    path = os.path.join(directory, _NAME)
    if not arguments.force and os.path.lexists(path) and not _is_ours(path):
        raise UsageError(f"{path} is there already, and is not one of saferunctl's", "name another directory")
    try:
        os.makedirs(directory, exist_ok=True)
        _write(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a directory that you can write to") from None
    answer(
        f"{path}\n"
        f"put it first on the PATH: export PATH={shlex.quote(directory)}:$PATH\n"
        "what runs `python -m torch.distributed.run` does not find it there: run `python -m saferun` instead\n"
    )
    return 0


def _is_ours(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return _MARK in stream.read(4096)
    except OSError:
        return False


def _write(path: str) -> None:
    """Write it as a whole, or not at all."""
    text = f'#!/bin/sh\n{_MARK}: torchrun is saferun\nexec {shlex.quote(sys.executable)} -m saferun "$@"\n'
    part = f"{path}.{os.getpid()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o755)
    try:
        with open(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
