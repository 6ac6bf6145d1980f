"""What a launch leaves in its run directory: a report where something went wrong, and what the checks found always."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.api.report import read_report
from saferun.cli.main import read_config
from saferun.diagnosis.host_fault import BadHost
from saferun.evidence.job_evidence import RankOutput
from saferun.files.run_dir import RunDirectory
from saferun.launch.incident_log import IncidentLog
from saferun.preflight.results import Preflight
from saferun.report.event_json import LaunchEvent
from saferun.watchdog.stragglers import Straggler
from tests.direct_files import DirectFiles
from tests.unit.found_samples import FINISH, RETRY, found, good, infos_of, names
from tests.unit.report.report_checking import checked, checked_preflight
from tests.unit.report.report_samples import EXCEPTION_EVERYWHERE, OUT_OF_MEMORY, evidence_of

GOOD = Preflight(tuple(good("names", names(1), ["node1"])), (), 0.02)


def call(what: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Nothing may go wrong here."""
    assert what
    function(*arguments)


class Launch:
    """A launch that does nothing but write reports."""

    def __init__(self, folder: Path, *options: str) -> None:
        script = folder / "train.py"
        script.touch()
        config = read_config([*options, str(script)], {})
        self.path = folder / "run"
        self.directory = RunDirectory(
            str(self.path),
            wanted=config.output.keep_files,
            host="node1",
            run_id="5f2c1a",
            warn=pytest.fail,
            files=DirectFiles(),
        )
        self.pages = 0
        self.events: list[LaunchEvent] = []
        self.log = IncidentLog(
            config,
            self.directory,
            host="node1",
            run_id="5f2c1a",
            guarded=call,
            on_written=self.add_page,
            notify=self.events.append,
        )

    def add_page(self) -> None:
        self.pages += 1

    def read(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.path.glob("*.*")} - {".gitignore"} if self.path.exists() else set()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.directory.close()


def fail(launch: Launch) -> None:
    launch.log.add(
        "failure",
        evidence_of(),
        EXCEPTION_EVERYWHERE,
        attempt=0,
        outcome="restarted",
        console_lines=["saferun: it failed"],
        directory="",
    )


def test_a_healthy_launch_has_no_report_but_what_the_checks_found(launch: Launch) -> None:
    """And that is not written while ranks are being started."""
    launch.log.set_preflight(GOOD, {})
    assert not launch.log.is_due
    launch.directory.open()
    launch.log.write()
    assert launch.files == set()
    launch.log.finish(0, "succeeded")
    assert launch.files == {"preflight.json"}
    content = checked_preflight(launch.read("preflight.json"))
    assert [result["verdict"] for result in content["results"]] == ["ok"]


def test_what_the_checks_found_can_be_written_at_a_quiet_moment(launch: Launch) -> None:
    """Once: it does not change."""
    launch.log.set_preflight(GOOD, {})
    launch.log.write_preflight()
    assert launch.files == set(), "there is no directory yet, and none is made"
    launch.directory.open()
    launch.log.write_preflight()
    (launch.path / "preflight.json").unlink()
    launch.log.finish(0, "succeeded")
    assert launch.files == set()


def test_a_launch_that_the_checks_end_has_a_report(launch: Launch) -> None:
    """Nothing has been started and there is no directory so far: it is made."""
    launch.log.set_preflight(found(), infos_of())
    assert launch.log.is_due
    launch.log.write()
    assert launch.files == {"report.json", "report.txt", "preflight.json"}
    launch.log.finish(2, "failed")
    report = checked(launch.read("report.json"))
    assert report["preflight"]["verdict"] == "fail"
    assert (report["run"]["outcome"], report["run"]["exit_code"]) == ("failed", 2)
    assert report["incidents"] == []
    assert "hsn0 does not answer" in (launch.path / "report.txt").read_text(encoding="utf-8")
    assert len(checked_preflight(launch.read("preflight.json"))["hosts"]) == 4


def test_a_start_that_succeeded_in_the_end_shows_what_was_decided(launch: Launch) -> None:
    """The newest checks are the ones that count."""
    launch.log.set_preflight(found(), infos_of())
    launch.log.add_decision(RETRY)
    launch.log.set_preflight(GOOD, {})
    launch.directory.open()
    launch.log.finish(0, "succeeded")
    report = checked(launch.read("report.json"))
    assert [(row["attempt"], row["next_step"]) for row in report["decisions"]] == [(0, "retry")]
    assert report["preflight"]["verdict"] == "ok"
    assert report["run"]["outcome"] == "succeeded"
    assert checked_preflight(launch.read("preflight.json"))["hosts"] == []
    text = (launch.path / "report.txt").read_text(encoding="utf-8")
    assert "attempt 0 at " in text, "the row has the time of day, too"


def test_decisions_stand_beside_the_incidents(launch: Launch) -> None:
    launch.directory.open()
    fail(launch)
    launch.log.add_decision(RETRY._replace(next_step="restart"))
    fail(launch)
    launch.log.add_decision(FINISH)
    launch.log.finish(1, "failed")
    report = checked(launch.read("report.json"))
    assert len(report["incidents"]) == 2
    assert [row["next_step"] for row in report["decisions"]] == ["restart", "finish"]


def test_an_end_that_was_asked_for_needs_no_report(launch: Launch) -> None:
    """That there is no further attempt after the user's own signal is no news."""
    launch.directory.open()
    launch.log.add_decision(FINISH)
    assert not launch.log.is_due
    launch.log.finish(130, "stopped")
    assert launch.files == set()


def test_a_host_that_leaves_the_job_has_neither_succeeded_nor_failed(launch: Launch) -> None:
    """A spare has taken its place, and reports how the job ends."""
    launch.directory.open()
    fail(launch)
    launch.log.finish(0, "left")
    report = checked(launch.read("report.json"))
    assert (report["run"]["outcome"], report["run"]["exit_code"]) == ("left", 0)
    end = launch.events[-1]
    assert (end.kind, end.outcome, end.exit_code) == ("end", "left", 0)
    assert end.headline == "this host has left the job (exit code 0)"


@pytest.mark.parametrize(
    ("preflight", "files"), [(GOOD, {"preflight.json"}), (found(), {"report.json", "report.txt", "preflight.json"})]
)
def test_checks_alone_leave_files_where_a_directory_is_given(
    tmp_path: Path, preflight: Preflight, files: set[str]
) -> None:
    launch = Launch(tmp_path, "--preflight", "only", "--run-dir", str(tmp_path / "run"))
    launch.log.set_preflight(preflight, {})
    launch.log.finish(0, "succeeded")
    launch.directory.close()
    assert launch.files == files


@pytest.mark.parametrize("preflight", [GOOD, found()])
def test_where_no_files_are_wanted_there_are_none(tmp_path: Path, preflight: Preflight) -> None:
    """A look at the hosts leaves nothing behind unless it is asked to."""
    for options in (["--preflight", "only"], ["--run-dir", "none"]):
        launch = Launch(tmp_path, *options)
        launch.log.set_preflight(preflight, {})
        launch.log.add_decision(RETRY)
        launch.log.write()
        launch.log.finish(2, "failed")
        launch.directory.close()
        assert not launch.path.exists()


def test_of_a_hang_that_goes_on_for_days_the_first_and_the_last_reports_are_kept(launch: Launch) -> None:
    """Each of them holds the stacks of all ranks, and the report is written again each time."""
    launch.directory.open()
    for number in range(40):
        launch.log.add(
            "hang",
            evidence_of(),
            EXCEPTION_EVERYWHERE,
            attempt=0,
            outcome="continued",
            console_lines=[f"saferun: report {number}"],
            directory="",
        )
    fail(launch)
    launch.log.write()
    incidents = checked(launch.read("report.json"))["incidents"]
    assert [one["kind"] for one in incidents] == ["hang"] * 16 + ["failure"]
    shown = re.findall(r"saferun: report (\d+)", (launch.path / "report.txt").read_text())
    assert list(map(int, shown)) == [*range(8), *range(32, 40)]


SLOW = Straggler((3,), 0.1, 0.7, 60.0)


def test_a_page_is_made_of_hangs_and_failures_and_not_of_slow_ranks(launch: Launch) -> None:
    """The job goes on, and the ranks need the processors."""
    launch.log.add_slow(SLOW, "node1", ["saferun: warning: the others wait for rank 3"], 0)
    launch.log.write()
    assert launch.files == {"report.json", "report.txt"}
    assert launch.pages == 0
    launch.log.add(
        "failure", evidence_of(), EXCEPTION_EVERYWHERE, attempt=0, outcome="ended", console_lines=[], directory=""
    )
    launch.log.write()
    assert launch.pages == 1
    launch.log.finish(1, "failed")
    assert launch.pages == 2


def test_the_hint_of_the_console_is_that_of_events_and_of_the_report(launch: Launch) -> None:
    """Most advice is that of the cause."""
    assert OUT_OF_MEMORY.cause is not None
    advice = OUT_OF_MEMORY.cause.advice
    assert advice
    launch.directory.open()
    launch.log.add("failure", evidence_of(), OUT_OF_MEMORY, attempt=0, outcome="ended", console_lines=[], directory="")
    launch.log.write()
    assert [event.hint for event in launch.events] == [advice]
    failure = read_report(launch.path / "report.json").failure
    assert failure is not None
    assert failure.hint == advice


def test_a_page_at_every_end_is_made_once_and_comes_with_a_report(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--report-html", "always")
    launch.directory.open()
    launch.log.write()
    assert launch.pages == 0
    launch.log.finish(0, "succeeded")
    assert launch.pages == 1
    assert {"report.json", "report.txt"} <= launch.files


BAD = BadHost(5.0, 1, "node3", "gpu", "GPU 0000:3b:00 has fallen off the PCIe bus (Xid 79)", "failure")


def test_a_host_that_was_found_bad_stands_in_the_report_once_for_each_kind_of_fault(launch: Launch) -> None:
    """Also where the launch goes well in the end: whoever runs the next one wants to know."""
    launch.directory.open()
    assert launch.log.add_bad_host(BAD)
    assert not launch.log.add_bad_host(BAD._replace(time=6.0, attempt=2))
    assert launch.log.add_bad_host(BAD._replace(kind="link", reason="hsn0 has no carrier", found_by="checks"))
    launch.log.finish(0, "succeeded")
    report = checked(launch.read("report.json"))
    assert [(row["host"], row["kind"], row["found_by"]) for row in report["bad_hosts"]] == [
        ("node3", "gpu", "failure"),
        ("node3", "link", "checks"),
    ]
    text = (launch.path / "report.txt").read_text(encoding="utf-8")
    assert "--- bad hosts\n" in text
    assert "  node3: GPU 0000:3b:00 has fallen off the PCIe bus (Xid 79)\n" in text
    lines = (launch.path / "node1" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["BadHost", "BadHost"]
    assert read_report(launch.path).bad_hosts[0].kind == "gpu"


def test_bad_hosts_are_bounded_whatever_they_are_called(launch: Launch) -> None:
    launch.directory.open()
    for number in range(2000):
        launch.log.add_bad_host(BAD._replace(host=f"{number}" * 500, reason="x" * 10_000))
    launch.log.finish(1, "failed")
    report = checked(launch.read("report.json"))
    assert 0 < len(report["bad_hosts"]) < 1000
    assert report["bad_hosts_omitted"] == 1000 - len(report["bad_hosts"])


def test_when_the_same_was_seen_before_is_remembered(launch: Launch) -> None:
    """A link that flaps is bad the second time."""
    link = BAD._replace(kind="link")
    assert launch.log.last_seen_bad(link) is None
    assert launch.log.last_seen_bad(link._replace(time=200.0)) == 5.0
    assert launch.log.last_seen_bad(link._replace(time=900.0)) == 200.0
    assert launch.log.last_seen_bad(link._replace(host="node4")) is None


class Text(str):
    """One that shows whether it is still in memory."""

    __slots__ = ("__weakref__",)


def test_of_hundreds_of_failures_the_evidence_of_those_is_kept_that_a_report_has(launch: Launch) -> None:
    """It took two megabytes of memory a restart; the numbers stay those of all."""
    launch.directory.open()
    texts: list[weakref.ref[Text]] = []
    for number in range(200):
        text = Text("/logs/stderr.log")
        evidence = evidence_of()._replace(outputs=(RankOutput(0, (), text, "", 0.0),))
        texts.append(weakref.ref(text))
        launch.log.add(
            "failure",
            evidence,
            EXCEPTION_EVERYWHERE,
            attempt=number,
            outcome="restarted",
            console_lines=[f"saferun: failure {number}"],
            directory="",
        )
        del text, evidence
    gc.collect()
    assert [number for number, text in enumerate(texts) if text() is not None] == [*range(10), *range(160, 200)]
    launch.log.write()
    report = checked(launch.read("report.json"))
    assert [one["attempt"] for one in report["incidents"]] == [*range(10), *range(160, 200)]
    assert report["incidents_omitted"] == 150
    text_file = (launch.path / "report.txt").read_text()
    assert "incidents: 200, of which the first and the last are shown, 50 in all" in text_file
    assert launch.log.counted(199).failures == 200
