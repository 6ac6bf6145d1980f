"""How long the environment lint takes: the first time, later, and beside what reading the same bytes costs.

Usage: python benchmarks/lint.py [ROUNDS]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from saferun.env.lint.check import check
from saferun.env.lint.installation import find_installation
from saferun.env.lint.names_in_files import library_strings, source_text
from saferun.env.lint.sources import files_of, find_sources

ENVIRON = {"NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
WRONG = ENVIRON | {"NCCL_TIMEOUT": "1", "TORCH_DISTRIBUTED_DEBG": "1", "TORCH_FLUX_CAPACITOR": "1"}


def measured(rounds: int, run: Callable[[], object], before: Callable[[], object] | None = None) -> str:
    """The median and the best of some rounds, and the median of the processor time, in milliseconds."""
    taken_ms, used_ms = [], []
    for _ in range(rounds):
        if before is not None:
            before()
        started, used = time.perf_counter(), time.process_time()
        run()
        taken_ms.append((time.perf_counter() - started) * 1000)
        used_ms.append((time.process_time() - used) * 1000)
    cpu_ms = statistics.median(used_ms)
    return f"median {statistics.median(taken_ms):7.1f} ms   best {min(taken_ms):7.1f} ms   processor {cpu_ms:7.1f} ms"


def read_everything() -> int:
    """Read the same bytes as a first scan does, and look at none: the limit that the machine sets."""
    installation = find_installation(ENVIRON)
    assert installation is not None
    size_bytes = 0
    for source in find_sources(installation):
        if source.is_central:
            for path, is_library in files_of(source):
                size_bytes += sum(map(len, library_strings(path))) if is_library else len(source_text(path))
    return size_bytes


def main(rounds: int) -> None:
    """Measure and print."""
    cache = tempfile.mkdtemp(prefix="saferun-benchmark-")
    process_environ = WRONG | {"XDG_CACHE_HOME": cache, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-m", "saferun.env.lint"]
    try:

        def forget() -> None:
            shutil.rmtree(cache, ignore_errors=True)

        def lint(environ: dict[str, str]) -> Callable[[], object]:
            return lambda: check(environ, cache_directory=cache)

        print(f"reading alone ({read_everything() / 1e6:.0f} MB)        ", measured(rounds, read_everything))
        print("first scan                      ", measured(rounds, lint(ENVIRON), forget))
        print("first scan, with unknown names  ", measured(rounds, lint(WRONG), forget))
        lint(WRONG)()
        print("later                           ", measured(rounds * 3, lint(ENVIRON)))
        print("later, with unknown names       ", measured(rounds * 3, lint(WRONG)))
        print(
            "later, in a process of its own  ",
            measured(
                rounds, lambda: subprocess.run(command, env=process_environ, check=True, stdout=subprocess.DEVNULL)
            ),
        )
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
