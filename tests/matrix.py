"""saferun with the releases of torch and Python that it works with: six jobs with each.

    python -m tests.matrix               # all of it; builds what is missing below .matrix/
    python -m tests.matrix 2.15          # the rows whose torch or Python starts with one of these

The jobs are a demo, a hang, a crash, a restart, and two hosts that meet, by torch's c10d rendezvous and as a
static job.

Each row is a virtual environment of its own, kept below ``.matrix/`` until ``make clean``: a release of torch without
its optional packages, and saferun from this checkout. A row whose interpreter or wheel this machine cannot have is told
in one line and is no failure; a job that does not end as it should is one.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import debian_python
from tests.ports import own_port

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".matrix"
# Every Python that torch has wheels for, with the newest torch; every torch with the Python of the development tools.
ROWS = (
    ("3.11", "2.4.1"),
    ("3.11", "2.8.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.15.0"),
    ("3.12", "2.15.0"),
    ("3.13", "2.15.0"),
    ("3.14", "2.15.0"),
)
# What torch imports at its start, and what saferun needs beside torch.
_PLAIN = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_OURS = tuple(package for package in _PROJECT["dependencies"] if not package.startswith("torch"))
_TESTING = ("pytest>=9,<10", "pytest-xdist", "hypothesis", "jsonschema", "pyte", "prometheus-client")
_BUILD_S = 1800.0
_RUN_S = 180.0
_LATE_FILES_S = 20


class UnavailableError(Exception):
    """This machine cannot have a row. The text is its reason."""


class Run(NamedTuple):
    """How a command ended."""

    code: int
    output: str


def run(command: Sequence[str], *, timeout_s: float = _RUN_S, cwd: Path | None = None) -> Run:
    """Run a command, with its two streams as one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SAFERUN_", "PET_", "PYTHON"))}
    environ |= {"SAFERUN_LINT": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Run(-1, (error.stdout or b"").decode(errors="replace") + f"\nnot over after {timeout_s:g} s")
    return Run(ended.returncode, ended.stdout.decode(errors="replace"))


# ----------------------------------------------------------------------------------------------------- environments


def interpreter(version: str) -> str:
    """An interpreter of this release, wherever people have them; else the one of a newer Debian.

    Raises:
        UnavailableError: there is none.
    """
    found = shutil.which(f"python{version}")
    paths = [found] if found else []
    paths += sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")), reverse=True)
    for path in paths:
        says = run([path, "-c", "import sys, venv, ctypes, ssl; print('%d.%d' % sys.version_info[:2])"])
        if says == (0, f"{version}\n"):
            return path
    try:
        return str(debian_python.python(version, DIRECTORY / f"debian-python{version}"))
    except debian_python.NotHadError as error:
        raise UnavailableError(f"no Python {version} here: {error}") from error


def environment(python: str, torch: str) -> Path:
    """The interpreter of a row's environment, which is built if need be.

    Raises:
        UnavailableError: it cannot be built here.
    """
    folder = DIRECTORY / f"python{python}-torch{torch}"
    inner, stamp = folder / "bin" / "python", folder / "complete"
    if stamp.exists() and stamp.read_text() == str(folder):
        return inner
    command = interpreter(python)
    print(f"  building {folder.relative_to(ROOT)}", flush=True)
    # Debian's Python has no ensurepip, and the pip of the development tools will do.
    _must([command, "-m", "venv", "--clear", "--without-pip", str(folder)])
    install = [sys.executable, "-m", "pip", "--python", str(inner), "install", "--quiet"]
    # Gigabytes: kept where they are installed, and not in pip's cache as well.
    _must([*install, "--no-cache-dir", "--no-deps", f"torch=={torch}"])
    _must([*install, *_PLAIN, *_OURS, *_TESTING])
    _add_cuda(inner, torch, install)
    _must([*install, "--no-deps", "--editable", str(ROOT)])
    imported = run([str(inner), "-c", "import torch.distributed as d; print(d.is_gloo_available())"], cwd=DIRECTORY)
    if imported.code != 0 or "True" not in imported.output:
        raise UnavailableError(f"torch {torch} cannot be imported: {_last_line(imported.output)}")
    stamp.write_text(str(folder))
    return inner


def _add_cuda(inner: Path, torch: str, install: Sequence[str]) -> None:
    """The libraries that a CUDA build of torch is linked with: one copy for all Pythons, and none for a CPU build."""
    asks = "import importlib.metadata as m; print(*(m.requires('torch') or ()), sep=chr(10))"
    requirements = run([str(inner), "-c", asks]).output.splitlines()
    wanted = [line for line in requirements if line.startswith(("nvidia-", "cuda-toolkit"))]
    if not wanted:
        return
    shared = DIRECTORY / f"cuda-of-torch{torch}"
    if not (shared / "complete").exists():
        shutil.rmtree(shared, ignore_errors=True)
        _must([*install, "--no-cache-dir", "--target", str(shared), *wanted])
        (shared / "complete").touch()
    packages = run([str(inner), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output.strip()
    with contextlib.suppress(FileExistsError):
        os.symlink(shared / "nvidia", Path(packages) / "nvidia")


def _must(command: Sequence[str]) -> None:
    ended = run(command, timeout_s=_BUILD_S)
    if ended.code != 0:
        words = next((line for line in ended.output.splitlines() if line.startswith("ERROR")), _last_line(ended.output))
        raise UnavailableError(f"`{' '.join(command[-3:])}`: {words}")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


# ------------------------------------------------------------------------------------------------------------- jobs


class JobFailedError(Exception):
    """A job did not do what it should. The text says what, and shows its output."""


def _job(inner: Path, folder: Path, *arguments: str) -> Run:
    return run([str(inner), "-m", "saferun", "--nproc-per-node", "2", *arguments], cwd=folder)


def _need(condition: object, what: str, ended: Run) -> None:
    if not condition:
        raise JobFailedError(f"{what}; exit code {ended.code}; output:\n{ended.output[-6000:]}")


def _report(folder: Path, ended: Run) -> dict[str, object]:
    path = folder / "saferun-runs" / "latest" / "report.json"
    _need(path.exists(), "no report.json", ended)
    report: dict[str, object] = json.loads(path.read_text())
    return report


def demo(inner: Path, folder: Path) -> None:
    """A training ends with 0 and says that it has learned."""
    ended = _job(inner, folder, str(ROOT / "examples/train_ddp.py"), "--epochs", "1", "--steps", "40")
    _need(ended.code == 0, "the training failed", ended)
    _need("loss" in ended.output and ":0] done" in ended.output, "no prefixed output", ended)


def crash(inner: Path, folder: Path) -> None:
    """A crash in C is told with the rank, its signal and its Python frame."""
    ended = _job(inner, folder, str(ROOT / "examples/crash_segv.py"))
    _need(ended.code != 0, "a crash ended with 0", ended)
    _need("rank 1" in ended.output and "SIGSEGV" in ended.output, "the crash is not told", ended)
    _need("crash_segv.py" in json.dumps(_report(folder, ended)), "no frame of the script in the report", ended)


def hang(inner: Path, folder: Path) -> None:
    """A hang is told with the rank that stays away and the function in which it is."""
    options = ("--hang-timeout", "5", "--external-wait-timeout", "0", "--on-hang", "stop")
    ended = _job(inner, folder, *options, str(ROOT / "examples/hang.py"), "--how", "poll")
    _need(ended.code > 0, "a hang that was to be stopped did not end with an exit code of a failure", ended)
    _need("rank 1" in ended.output, "the rank is not named", ended)
    _need("wait_for_a_batch_that_never_comes" in ended.output, "its function is not named", ended)


def restart(inner: Path, folder: Path) -> None:
    """The first attempt fails, the second one succeeds."""
    ended = _job(inner, folder, "--max-restarts", "1", str(ROOT / "examples/fail_once.py"))
    _need(ended.code == 0, "the second attempt failed", ended)
    _need("attempt 1 is done" in ended.output, "there was no second attempt", ended)
    _need("ConnectionError" in ended.output, "the first failure is not told", ended)


def c10d(inner: Path, folder: Path) -> None:
    """Two hosts meet by torch's c10d rendezvous, which works without the rest of torch, and meet again."""
    alone = "from saferun.coordinator.torch_store import import_store_class as f; print(f('c10d'))"
    ended = run([str(inner), "-c", alone], cwd=folder)
    _need(ended.code == 0, "the rendezvous cannot be imported without the rest of torch", ended)
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--rdzv-id", "matrix")
    _two_hosts(inner, folder, place, place)


def static(inner: Path, folder: Path) -> None:
    """Two static hosts meet, and meet again. The second one does without torch, but for a torch that is too old."""
    ask = "from saferun.coordinator.torch_store import import_store_class as f; torch = f('store', serves=False)[1]"
    check = f"import sys; {ask}; sys.exit(('torch' in sys.modules) is not torch.startswith('2.4.'))"
    ended = run([str(inner), "-c", check], cwd=folder)
    _need(ended.code == 0, "the second host needs torch, or does without it where it cannot", ended)
    place = ("--master-addr", "127.0.0.1", "--master-port", str(own_port()))
    _two_hosts(inner, folder, (*place, "--node-rank", "0"), (*place, "--node-rank", "1"))


def _two_hosts(inner: Path, folder: Path, *places: tuple[str, ...]) -> None:
    script = str(ROOT / "examples/fail_once.py")
    options = ("--nnodes", "2", "--max-restarts", "1", "--run-dir")
    with ThreadPoolExecutor(2) as hosts:
        runs = [
            hosts.submit(_job, inner, folder, *place, *options, str(folder / name), script)
            for name, place in zip("ab", places, strict=True)
        ]
        for host in runs:
            ended = host.result()
            _need(ended.code == 0, "the hosts did not meet, or not again", ended)
            _need("attempt 1 is done" in ended.output, "there was no second attempt", ended)


def unit(inner: Path, folder: Path) -> None:
    """The unit tests pass with this Python."""
    del folder
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "3", "--dist", "loadfile", "tests/unit"]
    ended = run([str(inner), *words], cwd=ROOT, timeout_s=_BUILD_S)
    _need(ended.code == 0, "unit tests fail", ended)


JOBS: tuple[Callable[[Path, Path], None], ...] = (demo, crash, hang, restart, c10d, static)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        yield Path(name)
        # On a busy machine the writer process may still write when its saferun has ended.
        for _ in range(_LATE_FILES_S):
            shutil.rmtree(name, ignore_errors=True)
            if not os.path.exists(name):
                os.mkdir(name)
                break
            time.sleep(1.0)


def try_row(python: str, torch: str) -> int:
    """Run the jobs of one row. Returns how many failed."""
    name = f"Python {python}, torch {torch}"
    try:
        inner = environment(python, torch)
    except UnavailableError as error:
        print(f"{name}: not tried: {error}", flush=True)
        return 0
    failures = 0
    jobs = JOBS if f"{sys.version_info.major}.{sys.version_info.minor}" == python else (*JOBS, unit)
    for job in jobs:
        started_at = time.monotonic()
        try:
            with _folder() as folder:
                job(inner, folder)
        except JobFailedError as error:
            failures += 1
            print(f"{name}: {job.__name__} FAILED: {error}", flush=True)
        else:
            print(f"{name}: {job.__name__} passed ({time.monotonic() - started_at:.0f} s)", flush=True)
    return failures


def main() -> int:
    """Run what is asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(description="saferun with several releases of torch and Python")
    parser.add_argument("versions", nargs="*", help="begin of a torch or Python release; default: all rows")
    parser.add_argument("--build", action="store_true", help="only build the environments")
    options = parser.parse_args()
    DIRECTORY.mkdir(exist_ok=True)
    chosen = [
        row for row in ROWS if not options.versions or any(part.startswith(tuple(options.versions)) for part in row)
    ]
    if options.build:
        for python, torch in chosen:
            try:
                print(environment(python, torch), flush=True)
            except UnavailableError as error:
                print(f"Python {python}, torch {torch}: {error}", flush=True)
        return 0
    failures = sum(try_row(python, torch) for python, torch in chosen)
    print(f"{failures} jobs failed" if failures else "no job failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
