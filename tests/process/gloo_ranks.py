"""Ranks that connect to each other by gloo, each in the network namespace that it is given: does the job work?

``Ranks`` starts a process that imports torch once, and forks the ranks of each try. As a program, it is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_NEWNET = 0x40000000
_TIMEOUT_S = 3
_LIMIT_S = 30


class Ranks:
    """A process that is asked whether ranks can be connected."""

    def __init__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def errors(self, *ranks: tuple[int, dict[str, str]], master: str = "127.0.0.1") -> list[str]:
        """What each rank of a job failed with; empty: it did not.

        Args:
            ranks: of each the thread whose network namespace it lives in (0: this process's own) and its environment.
            master: the address of rank 0's store.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([master, list(ranks)]) + "\n")
        self._process.stdin.flush()
        answer: list[str] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for line in sys.stdin:
        master, ranks = json.loads(line)
        pipes = []
        for rank, (thread, environ) in enumerate(ranks):
            read_end, write_end = os.pipe()
            if os.fork() == 0:
                signal.alarm(_LIMIT_S)
                os.write(write_end, _join(torch, dist, rank, len(ranks), thread, environ, master).encode()[:4000])
                os._exit(0)
            os.close(write_end)
            pipes.append(read_end)
        said = []
        for pipe in pipes:
            with open(pipe) as file:
                said.append(file.read() or "it was ended")
            os.wait()
        print(json.dumps([one if one != "ok" else "" for one in said]), flush=True)


def _join(torch: Any, dist: Any, rank: int, size: int, thread: int, environ: dict[str, str], master: str) -> str:
    from datetime import timedelta

    try:
        if thread:
            _enter(thread)
        os.environ.update(environ)
        timeout = timedelta(seconds=_TIMEOUT_S)
        store = dist.TCPStore(master, 29517, size, rank == 0, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        # More than one packet, of frames of any size.
        ones = torch.ones(100_000)
        dist.all_reduce(ones)
        assert int(ones[0]) == size
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def _enter(thread: int) -> None:
    fd = os.open(f"/proc/{thread}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    _serve()
