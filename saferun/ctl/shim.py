"""``saferunctl shim``: writes a ``torchrun`` that is saferun, and a start-up hook that has Python run saferun instead.

What it prints is for a shell: ``eval "$(saferunctl shim DIR)"``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from saferun.ctl.answer import answer
from saferun.errors import UsageError, suppress

_MARK = "# made by saferunctl shim"
_HOOK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inject", "launcher_hook.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("directory", metavar="DIR", help="where to write it; the directory is made if necessary")
    parser.add_argument("--force", action="store_true", help="overwrite files that are not saferunctl's")


def run(arguments: argparse.Namespace) -> int:
    """Write it, and print how it is used."""
    directory = os.path.abspath(arguments.directory)
    if os.pathsep in directory:
        what = f"{directory}: PATH and PYTHONPATH can have no directory with {os.pathsep!r} in its name"
        raise UsageError(what, "name another directory")
    hook = os.path.join(directory, "python")
    files = ((os.path.join(directory, "torchrun"), 0o755), (os.path.join(hook, "sitecustomize.py"), 0o644))
    for path, _ in files:
        if not arguments.force and os.path.lexists(path) and not _is_ours(path):
            raise UsageError(
                f"{path} is there already, and is not one of saferunctl's",
                "name another directory, or overwrite it with --force",
            )
    path = hook
    try:
        texts = (_torchrun_text(), _hook_text())
        os.makedirs(hook, exist_ok=True)
        for (path, mode), text in zip(files, texts, strict=True):
            _write(path, text, mode)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a directory that you can write to") from None
    answer(
        '# for tools that call torchrun; use it by: eval "$(saferunctl shim DIR)"\n'
        f'export PATH={shlex.quote(directory)}:"$PATH"\n'
        f"# for python -m torch.distributed.run, accelerate launch and fabric run with {sys.executable}\n"
        f'export PYTHONPATH={shlex.quote(hook)}"${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    )
    return 0


def _is_ours(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return _MARK in stream.read(4096)
    except OSError:
        return False


def _torchrun_text() -> str:
    return f'#!/bin/sh\n{_MARK}: torchrun is saferun\nexec {shlex.quote(sys.executable)} -m saferun "$@"\n'


def _hook_text() -> str:
    with open(_HOOK, encoding="utf-8") as stream:
        text = stream.read()
    return f"{_MARK}\n" + text.replace('PREFIX = ""', f"PREFIX = {sys.prefix!r}", 1)


def _write(path: str, text: str, mode: int) -> None:
    """Write it as a whole, or not at all."""
    part = f"{path}.{os.getpid()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
