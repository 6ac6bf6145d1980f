"""report.html is made by a process of its own: it is there after a failure, and what happens to it costs no more."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.process.launching import END_AS_TOLD, STAY, Job, customized, in_saferun, running, until

FAIL = """
from rank import *
print("<script>window.hostile = 1</script>", file=sys.stderr)
tell("ready")
await_release("end")
if RANK == 1:
    raise ValueError("bad batch <b>")
stay()
"""
PREFLIGHT_OFF = ("--preflight", "off")
LATE = "not made in time"
# On a machine that is busy with other tests a page may take longer than a launch waits for it.
PATIENT = in_saferun("import saferun.launch.page_part as part; part.PATIENCE_S = 50.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def patient(folder: Path) -> dict[str, str]:
    """An environment in which the end of a launch waits for the page however long that takes."""
    folder.mkdir()
    return customized(folder, PATIENT)


def broken(folder: Path, source: str, *, waits: bool = False) -> dict[str, str]:
    """An environment in which this happens when saferun, or what it forks, imports jinja2."""
    finder = f"""
import os, signal, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "jinja2":
{textwrap.indent(source, " " * 12)}
if sys.orig_argv[1:3] == ["-m", "saferun"]:
    sys.meta_path.insert(0, Finder())
"""
    folder.mkdir()
    return customized(folder, finder + (PATIENT if waits else ""))


def fail(job: Job) -> int:
    """Have rank 1 raise, and wait for the end."""
    job.hear("ready", 2)
    job.release("end")
    return job.wait()


def page_makers(job: Job) -> list[int]:
    """The processes that make a page."""
    return job.called("sr-page")


def page_of(job: Job) -> str:
    path = job.run_dir / "report.html"
    return path.read_text() if path.exists() else ""


def test_a_failure_leaves_a_page_in_the_run_directory(folder: Path) -> None:
    """Of the end of the launch: with its exit code, and readable by its user only."""
    with running(folder, FAIL, *PREFLIGHT_OFF, nproc=2, environ=patient(folder), store=False) as job:
        assert fail(job) == 1
        page = page_of(job)
        assert "<h1>Rank 1 " in page
        assert "ValueError: bad batch &lt;b&gt;" in page
        assert "failed, exit code 1" in page
        assert "&lt;script&gt;window.hostile" in page
        assert "<script>window.hostile" not in page
        assert (job.run_dir / "report.html").stat().st_mode & 0o777 == 0o600
        assert "report.html" not in job.err


@pytest.mark.slow
def test_a_hang_that_is_only_reported_has_a_page_while_the_job_goes_on(folder: Path) -> None:
    """And the process that made it is gone again."""
    options = ("--hang-timeout", "1", *PREFLIGHT_OFF)
    with running(folder, STAY, *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        until(lambda: page_of(job), "a page")
        assert "when this page was made" not in page_of(job)
        assert "Hang" in page_of(job)
        until(lambda: not page_makers(job), "the end of sr-page")
        job.send(signal.SIGINT)
        job.wait()


@pytest.mark.parametrize(
    ("options", "code", "has_page"),
    [
        pytest.param((), "0", False, marks=pytest.mark.slow),
        (("--report-html", "always"), "0", True),
        pytest.param(("--report-html", "failure"), "3", True, marks=pytest.mark.slow),
        (("--report-html", "off"), "3", False),
        pytest.param(("--run-dir", "none"), "3", False, marks=pytest.mark.slow),
    ],
)
def test_when_there_is_a_page(folder: Path, options: tuple[str, ...], code: str, has_page: bool) -> None:
    environ = patient(folder)
    with running(
        folder, END_AS_TOLD, *options, *PREFLIGHT_OFF, nproc=2, arguments=(code, code), environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == (1 if code != "0" else 0)
        pages = list(folder.rglob("report.html"))
        assert len(pages) == has_page
        assert "report.html" not in job.err
        if has_page:
            assert ("Succeeded" if code == "0" else "Failure") in pages[0].read_text()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'jinja2'\")", "ModuleNotFoundError: No module named 'jinja2'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process that makes it was ended"),
        pytest.param("time.sleep(1000)", LATE, marks=pytest.mark.slow),
        pytest.param("signal.pause()", LATE, marks=pytest.mark.slow),
        pytest.param("held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError", marks=pytest.mark.slow),
        pytest.param("while True: pass", LATE, marks=pytest.mark.slow),
        pytest.param("sys.exit(0)", "the process that makes it was ended", marks=pytest.mark.slow),
    ],
    ids=["missing", "killed", "sleeps", "pauses", "takes memory", "spins", "exits"],
)
def test_a_page_that_cannot_be_made_costs_one_line(folder: Path, source: str, reason: str) -> None:
    """The launch ends with the same exit code and the same files, and leaves no process behind."""
    environ = broken(folder, source, waits=reason != LATE)
    with running(folder, FAIL, *PREFLIGHT_OFF, nproc=2, environ=environ, store=False) as job:
        assert fail(job) == 1
        lines = [line for line in job.err.splitlines() if "report.html" in line]
        assert lines == [f"saferun: no report.html: {reason}; saferunctl report --html makes it"]
        assert page_of(job) == ""
        assert (job.run_dir / "report.json").exists()
        assert "ValueError: bad batch" in (job.run_dir / "report.txt").read_text()


def test_an_impatient_user_does_not_wait_for_the_page(folder: Path) -> None:
    """A signal while it is waited for ends the wait."""
    with running(folder, FAIL, *PREFLIGHT_OFF, nproc=2, environ=broken(folder, "time.sleep(1000)"), store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        until(lambda: job.has_happened("Decision"), "the end of the launch")
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "saferun: no report.html: not waited for" in job.err


def test_no_process_is_left_where_saferun_is_killed_while_it_waits(folder: Path) -> None:
    with running(folder, FAIL, *PREFLIGHT_OFF, nproc=2, environ=broken(folder, "time.sleep(1000)"), store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        until(lambda: page_makers(job), "the process that makes the page")
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        until(lambda: not page_makers(job), "its end")
