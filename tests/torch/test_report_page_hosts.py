"""report.html of a job of several hosts: the leader has it made, of the run directory that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from saferun.report.page.run_reading import read_run
from saferun.report.page.timeline import build_timelines
from tests.process.launching import customized, in_saferun
from tests.torch.several import hosts

FAIL = """
from rank import *
print("rank", RANK, "is here", file=sys.stderr)
tell("ready")
await_release("end")
if RANK == 3:
    raise ValueError("bad batch")
stay()
"""


@pytest.mark.slow
def test_the_leader_alone_has_a_page_made_and_it_has_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    """However many hosts fail, there is one page of the job."""
    run_dir = tmp_path / "run"
    custom = tmp_path / "patient"
    custom.mkdir()
    environ = customized(custom, in_saferun("import saferun.launch.page_part as part; part.PATIENCE_S = 50.0"))
    options = ("--run-dir", str(run_dir), "--preflight", "off")
    with hosts(tmp_path, FAIL, *options, nproc=2, environs=lambda _: environ) as jobs:
        for job in jobs:
            job.hear("ready", 2)
        jobs[1].release("end")
        assert [job.wait() for job in jobs] == [1, 1]
        pages = list(tmp_path.rglob("report.html"))
        assert pages == [run_dir / "report.html"]
        page = pages[0].read_text()
        assert "<h1>Rank 3 " in page
        assert "4 on 2 hosts" in page
        for words in ("rank 0 is here", "rank 3 is here", "ValueError: bad batch"):
            assert words in page
        assert "report.html" not in jobs[0].err + jobs[1].err
        whole, _ = build_timelines(read_run(str(run_dir)).hosts, None, None)
        assert whole is not None
        assert sorted(rank for row in whole.rows for rank in row.ranks) == [0, 1, 2, 3]
