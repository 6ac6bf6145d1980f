"""Which exception a rank's last traceback has shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saferun.launch.failed_rank_files import last_exception

HEAD = "Traceback (most recent call last):"
OUTER, INNER = '  File "a.py", line 3, in <module>', '  File "/b c/d.py", line 71, in step'
COLORED = '  File \x1b[35m"a.py"\x1b[0m, line \x1b[35m3\x1b[0m, in f'
LAST = [HEAD, OUTER, "    step()", INNER, "    raise E", "    ^^^^^^^"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        (["E: no traceback"], []),
        ([*LAST, "torch.OutOfMemoryError: no memory", "upload: done"], ["torch.OutOfMemoryError", "/b c/d.py", 71]),
        ([*LAST, "StopIteration"], ["StopIteration", "/b c/d.py", 71]),
        ([*LAST, "E: 1", "", HEAD, OUTER, "F: 2"], ["F", "a.py", 3]),
        ([f"[rank1]: {line}" for line in [*LAST, "E: 1"]], ["E", "/b c/d.py", 71]),
        ([HEAD, COLORED, "\x1b[1;35mE\x1b[0m: 1"], ["E", "a.py", 3]),
        (LAST, []),
        ([*LAST, ": 1"], []),
        ([HEAD, "E: 1"], []),
        ([HEAD, '  File "a.py", line \u00b2, in f', "E: 1"], []),
        ([f"[rank1]: {HEAD}", OUTER, "E: 1"], []),
    ],
)
def test_the_last_traceback_names_its_exception_and_where_it_was_raised(lines: list[str], found: list[object]) -> None:
    assert last_exception(lines) == found


def test_python_prints_it_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Bad(Exception): pass\ndef step():\n    raise Bad('two\\nlines')\nstep()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert last_exception(done.stderr.splitlines()) == ["Bad", str(script), 3]
