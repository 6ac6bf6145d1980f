"""What the directories and files of a launch are called within those of a job."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.files.place_in_job import PlaceInJob

ALONE = PlaceInJob("20260101-120000-abcdef", "node3")


def joined(place: PlaceInJob = ALONE, **more: Any) -> PlaceInJob:
    arguments = {"host": "node3", "is_part": False, "task": 0, "tasks": 1, "hosts": None, "is_late": False, **more}
    return place.joined(arguments.pop("name", "job-7"), **arguments)


def test_a_host_has_the_names_that_the_job_gives_it() -> None:
    place = joined(host="node3.0")
    assert (place.name, place.host) == ("job-7", "node3.0")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "../up", "a\nb", "x" * 128])
def test_a_name_of_another_host_that_is_no_file_s_does_not_count(name: str) -> None:
    """It could lead to another directory."""
    place = joined(name=name, host=name)
    assert (place.name, place.host) == (ALONE.name, ALONE.host)
    assert joined(hosts=["node4", name]).hosts == ()


def test_each_process_of_a_host_has_files_of_its_own() -> None:
    """They share the host's directory; the first one's files have plain names."""
    first, second = (joined(task=task, tasks=2) for task in (0, 1))
    assert [first.own_name("events.jsonl"), second.own_name("events.jsonl")] == ["events.jsonl", "events.task_1.jsonl"]
    assert first.has_neighbours
    assert not joined().has_neighbours


@pytest.mark.parametrize(
    ("hosts", "is_part", "known"),
    [
        (["node4", "node5"], False, ("node3", "node4", "node5")),
        ([], False, ("node3",)),
        (None, False, ()),
        (["node4"], True, ()),
    ],
)
def test_only_the_host_that_leads_knows_the_directories_of_all(
    hosts: list[str] | None, is_part: bool, known: tuple[str, ...]
) -> None:
    assert joined(hosts=hosts, is_part=is_part).hosts == known


def test_the_first_meeting_decides_whether_the_job_was_under_way_before() -> None:
    """Later the files in the directory are its own in any case."""
    assert ALONE.is_late is None
    for is_late in (False, True):
        assert joined(joined(is_late=is_late), is_late=not is_late).is_late is is_late
