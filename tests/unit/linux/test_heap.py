"""What is free inside the heap goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from saferun.linux import heap

HOLES = """
from saferun.linux.heap import trim_heap

def resident_kb():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1])

blocks = [bytes(600) for _ in range(100_000)]
kept = blocks[::100]
del blocks
before = resident_kb()
assert trim_heap()
print(before - resident_kb())
"""


def test_free_memory_between_used_blocks_goes_back() -> None:
    """Blocks over 512 bytes are malloc's own."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20_000


def test_other_c_libraries_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "libc", SimpleNamespace())
    assert not heap.trim_heap()
