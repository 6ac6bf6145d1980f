"""What saferun waits for is one line on a terminal that changes in place, below the rows of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.launching import until
from tests.process.test_drawn_bars import shown_lines
from tests.process.test_leftovers_wait import UPLOADING
from tests.process.test_terminal import on_terminal

if TYPE_CHECKING:
    from pathlib import Path

HANGING = """
from rank import *
sys.stderr.write("\\rbar of %d" % RANK)
sys.stderr.flush()
tell("ready")
await_release("go on")
while not os.path.exists(FOLDER + "/release.end"):
    print("moves again", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_hang_that_goes_on_is_counted_in_one_line(tmp_path: Path) -> None:
    options = (
        "--env-profile",
        "minimal",
        "--hang-timeout",
        "1",
        "--external-wait-timeout",
        "0",
        "--prefix",
        "[{rank}] ",
    )
    with on_terminal(tmp_path, HANGING, *options, nproc=2) as (job, terminal):
        job.hear("ready", 2)
        until(lambda: "the job hangs (" in terminal.text, "it is counted")
        until(lambda: shown_lines(terminal)[-1].startswith("saferun: the job hangs ("), "the line is the last")
        assert sorted(shown_lines(terminal)[-3:-1]) == ["[0] bar of 0", "[1] bar of 1"]
        first = shown_lines(terminal)[-1]
        until(lambda: shown_lines(terminal)[-1] != first, "it counts")
        # Reported again after twice and four times the time, in the same place.
        until(lambda: shown_lines(terminal)[-1] >= "saferun: the job hangs (8 s)", "it goes on")
        assert "still hangs" not in terminal.text
        assert sum("the job hangs (" in line for line in shown_lines(terminal)) == 1
        job.release("go on")
        until(lambda: "saferun: job resumed after" in terminal.text, "it is over")
        assert not any("the job hangs (" in line for line in shown_lines(terminal))
        job.release("end")
        assert job.wait() == 0


def test_the_wait_for_what_ranks_left_behind_is_one_line(tmp_path: Path) -> None:
    with on_terminal(tmp_path, UPLOADING, arguments=["session"]) as (job, terminal):
        job.hear("ready")
        until(
            lambda: shown_lines(terminal)[-1:] and "waiting for 1 process" in shown_lines(terminal)[-1], "it is shown"
        )
        job.release("upload")
        assert job.wait() == 0
        assert not any("waiting for" in line for line in shown_lines(terminal))
