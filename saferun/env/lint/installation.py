"""Where the ranks' software is installed, from their interpreter and the environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping

from saferun.env.lint.families import NCCL_PLUGINS
from saferun.linux.search_path import path_without_first
from saferun.model import Value

# Do not import from the current directory: a json.py there is not Python's. (Older Pythons have no -P for it.)
_ASK = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import json; "
    "sys.stdout.write('\\nsaferun-answer ' + json.dumps([sys.prefix, sys.path]))"
)
_ANSWER = b"\nsaferun-answer "
_ELF = b"\x7fELF"
_SYSTEM_LIBRARIES = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"),
    *("/usr/local/cuda/lib64", "/usr/local/cuda/compat", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"),
    *("/opt/rocm/lib", "/opt/amazon/efa/lib64", "/opt/amazon/efa/lib", "/opt/amazon/openmpi/lib"),
    *("/opt/amazon/ofi-nccl/lib", "/opt/hpcx/ucx/lib", "/opt/hpcx/ompi/lib"),
    *("/opt/hpcx/nccl_rdma_sharp_plugin/lib",),
)
_MAX_DIRECTORIES = 64


class Installation(Value):
    """The directories and files to search.

    Args:
        package_directories: directories of installed packages (``site-packages``).
        source_directories: the user's own code: the script's directory and those in PYTHONPATH.
        library_directories: directories of system libraries, those in LD_LIBRARY_PATH first.
        preloaded: libraries in LD_PRELOAD, and plug-ins of NCCL that are named by their path.
    """

    package_directories: tuple[str, ...]
    source_directories: tuple[str, ...] = ()
    library_directories: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()


def find_installation(
    environ: Mapping[str, str], *, python: str = sys.executable, script: str | None = None, timeout_s: float = 10.0
) -> Installation | None:
    """The software of ranks with this environment and interpreter; None if the interpreter did not respond, or is none.

    Args:
        environ: the ranks' environment.
        python: their interpreter; run in a child unless it is this one. A script in its place is not run.
        script: the training script, whose directory is searched too.
        timeout_s: how long the interpreter may take.
    """
    if python == sys.executable:
        answer: tuple[str, list[str]] | None = _own()
    else:
        # A wrapper may do anything with another start: claim a licence, start a container, overwrite a profile.
        answer = _ask(python, environ, timeout_s) if _is_interpreter(python) else None
    if answer is None:
        return None
    prefix, path = answer
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    own = os.path.dirname(package)
    standard = os.path.dirname(os.__file__)
    packages, sources = [], []
    if script:
        sources.append(os.path.dirname(os.path.abspath(script)))
    for entry in path:
        if not os.path.isdir(entry) or entry.startswith((standard + "/lib-dynload", f"{prefix}/bin")):
            continue
        if entry.rstrip("/").endswith(("site-packages", "dist-packages")):
            packages.append(entry)
        elif not os.path.isfile(f"{entry}/os.py") and not os.path.samefile(entry, own):
            sources.append(entry)  # neither Python's own library nor a checkout of saferun, whose tables name them all
    libraries = [*_split(environ.get("LD_LIBRARY_PATH", "")), f"{prefix}/lib", *_SYSTEM_LIBRARIES]
    preloaded = environ.get("LD_PRELOAD", "").replace(":", " ").split() + [
        environ.get(name, "") for name in NCCL_PLUGINS
    ]
    loaded = [name for name in preloaded if name.startswith("/")]
    return Installation(_few(packages), _few(sources), _few(libraries), _few(loaded))


def _is_interpreter(program: str) -> bool:
    path = shutil.which(program)
    if path is None or not os.path.basename(path).startswith(("python", "pypy")):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False


def _own() -> tuple[str, list[str]]:
    return sys.prefix, path_without_first()


def _ask(python: str, environ: Mapping[str, str], timeout_s: float) -> tuple[str, list[str]] | None:
    import json

    from saferun.linux.child_output import run_program
    from saferun.linux.children import SpawnError

    try:
        output, _status = run_program([python, "-c", _ASK], environ, timeout_s)
        prefix, path = json.loads(output.rpartition(_ANSWER)[2])
        return str(prefix), [str(entry) for entry in path]
    except (SpawnError, ValueError, TypeError):
        return None


def _split(value: str) -> list[str]:
    return [entry for entry in value[:32_768].split(":") if entry.startswith("/")]


def _few(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entries))[:_MAX_DIRECTORIES]
