"""The rank's own entry point for ``--run-path``: ``runpy.run_path`` with exceptions recorded, as torchrun does it.

It runs in the rank, not in the coordinator; it lives here because it imports torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress


def main() -> None:
    """Run ``sys.argv[2]`` as ``__main__`` with the arguments that follow.

    ``sys.argv[1]`` is the directory that is searched first for modules; empty: the working directory.
    """
    # The script sees the path that it would see under torchrun: no directory of ours in front. Python has followed the
    # links in it already.
    first = sys.path[0] if sys.path else ""
    if first and os.path.realpath(first) == os.path.dirname(os.path.realpath(__file__)):
        sys.path[0] = sys.argv[1]
        with suppress(OSError):  # the working directory was removed
            sys.path[0] = sys.argv[1] or os.getcwd()
    from torch.distributed.elastic.multiprocessing.errors import record

    script, *arguments = sys.argv[2:]
    # torchrun's ranks of this kind are multiprocessing children: their sys.stdin is empty, and descriptor 0 is not.
    with suppress(OSError):
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the script runs

    def run_script() -> None:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    record(run_script)()


if __name__ == "__main__":
    main()
