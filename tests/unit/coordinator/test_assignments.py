"""Who of a job's hosts gets which ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.coordinator.assignments import (
    HostRecord,
    TaskRecord,
    assign,
    chunk_limit_bytes,
    decode_assignment,
    decode_host_record,
    disagreement,
    encode_assignment,
    encode_host_record,
    label_hosts,
    missing_text,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
TASKS = st.builds(
    TaskRecord, st.integers(0, 9), st.sampled_from(["default", "actor", "learner"]), st.integers(1, 4194304)
)
RECORDS = st.builds(
    HostRecord,
    name=NAMES,
    tasks=st.lists(TASKS, min_size=1, max_size=4).map(tuple),
    addresses=st.lists(NAMES, max_size=3).map(tuple),
    port=st.integers(0, 65535),
    files=NAMES,
    attempt=st.integers(0, 99),
    restarts=st.integers(0, 99),
    most=st.integers(1, 8),
    born=NAMES,
    has_met=st.booleans(),
)
JOBS = st.lists(RECORDS, min_size=1, max_size=6)


@given(JOBS)
def test_ranks_are_contiguous_by_host_and_task(records: list[HostRecord]) -> None:
    """Each rank is somebody's, and in the order of the hosts: torchrun's rule."""
    assignments = assign(records)
    ranks = [task.base_rank + i for assignment in assignments for task in assignment.tasks for i in range(task.nproc)]
    assert ranks == list(range(assignments[0].world_size))
    for assignment in assignments:
        local = [task.local_base + i for task in assignment.tasks for i in range(task.nproc)]
        assert local == list(range(assignment.local_world_size))


@given(JOBS)
def test_ranks_of_a_role_are_contiguous_in_the_same_order(records: list[HostRecord]) -> None:
    """A role is numbered as if it were the job."""
    of_role: dict[str, list[int]] = {}
    sizes: Counter[str] = Counter()
    for record, assignment in zip(records, assign(records), strict=True):
        for task, share in zip(record.tasks, assignment.tasks, strict=True):
            of_role.setdefault(task.role, []).extend(share.role_base + i for i in range(share.nproc))
            sizes[task.role] = share.role_world_size
    assert all(ranks == list(range(sizes[role])) for role, ranks in of_role.items())


@given(JOBS)
def test_the_job_takes_the_highest_attempt(records: list[HostRecord]) -> None:
    """No number is used twice, whoever has been there for how long."""
    assignments = assign(records)
    assert {assignment.attempt for assignment in assignments} == {max(record.attempt for record in records)}
    assert {assignment.restarts for assignment in assignments} == {max(record.restarts for record in records)}


@given(JOBS)
def test_a_job_has_begun_where_a_host_has_met_others_before(records: list[HostRecord]) -> None:
    """Whatever the attempts' numbers, which each host counts by itself: another one may join for the first time."""
    has_begun = any(record.has_met for record in records)
    assert {assignment.has_begun for assignment in assign(records)} == {has_begun}


@given(st.lists(st.sampled_from(["a", "b", "a.0", "a.1", "a.2", "a.1.1", "b.3"]), min_size=1, max_size=7))
@example(["a", "a", "a.1", "a.1.1"])
def test_no_two_hosts_have_one_label(names: list[str]) -> None:
    """Also where a host is called what another one would be labelled."""
    labels = label_hosts(names)
    assert len(set(labels)) == len(labels)
    assert all(label.startswith(name) for name, label in zip(names, labels, strict=True))


def test_a_label_is_the_name_where_that_is_enough() -> None:
    """A number only where it is needed."""
    assert label_hosts(["node1", "node2", "node1"]) == ["node1.0", "node2", "node1.2"]


@given(JOBS)
def test_records_and_places_survive_the_way(records: list[HostRecord]) -> None:
    """They are read as they were written."""
    for record, assignment in zip(records, assign(records), strict=True):
        assert decode_host_record(encode_host_record(record)) == record
        assert decode_assignment(encode_assignment(assignment)) == assignment


def test_a_leader_of_another_state_does_not_say_how_long_hosts_may_be_silent() -> None:
    """Each host goes by its own limit then, as the hosts of such a job do."""
    records = [HostRecord(name, (TaskRecord(1, "default", 7),)) for name in ("node1", "node2")]
    mine = assign(records, probe_after_s=24.0)[1]
    assert mine.probe_after_s == 24.0
    fields = json.loads(encode_assignment(mine))
    del fields["probe_after_s"]
    assert decode_assignment(json.dumps(fields)) == mine._replace(probe_after_s=0.0)
    for wrong in (-1, 1e12, "24", None, True):
        assert decode_assignment(json.dumps({**fields, "probe_after_s": wrong})) is None


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(RECORDS, st.data())
def test_a_malformed_record_is_none(record: HostRecord, data: st.DataObject) -> None:
    """Whatever another host writes, nothing breaks here, and what is accepted is within bounds."""
    fields = json.loads(encode_host_record(record))
    field = data.draw(st.sampled_from(sorted(fields)))
    for mutant in ({**fields, field: data.draw(JSON)}, {key: fields[key] for key in fields if key != field}):
        found = decode_host_record(json.dumps(mutant))
        if found is not None:
            assert all(0 <= task.nproc <= 4096 for task in found.tasks)
            assert found.tasks
            assert assign([found])[0].attempt == found.attempt
            assert decode_host_record(encode_host_record(found)) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": [[4097, "default", 1]]},
        {"tasks": [[4096, "default", 1]] * 17},
        {"attempt": (1 << 20) + 1},
        {"restarts": 1 << 40},
    ],
    ids=str,
)
def test_a_record_that_no_host_can_mean_is_none(changes: dict[str, Any]) -> None:
    """The leader keeps something of each rank, and all hosts adopt the highest numbers."""
    record = HostRecord("node1", (TaskRecord(4096, "default", 1),) * 16, attempt=1 << 20, restarts=1 << 20)
    fields = json.loads(encode_host_record(record))
    assert decode_host_record(json.dumps(fields)) == record
    assert decode_host_record(json.dumps({**fields, **changes})) is None


@given(JOBS, st.data())
def test_a_malformed_place_is_none(records: list[HostRecord], data: st.DataObject) -> None:
    """As with records."""
    fields = json.loads(encode_assignment(assign(records)[0]))
    field = data.draw(st.sampled_from(sorted(fields)))
    found = decode_assignment(json.dumps({**fields, field: data.draw(JSON)}))
    assert found is None or found.host < found.hosts
    rest = decode_assignment(json.dumps({key: fields[key] for key in fields if key != field}))
    assert (rest is None) == (field not in {"has_begun", "probe_after_s"})  # a saferun of another state may lack them


def test_hosts_of_another_state_of_saferun_are_understood() -> None:
    """Some hosts of a job may have been updated, or all while it runs."""
    record = HostRecord("node1", (TaskRecord(1, "default", 1),), has_met=True, serves_rendezvous=True)
    fields = json.loads(encode_host_record(record))
    del fields["has_met"], fields["serves_rendezvous"]
    assert decode_host_record(json.dumps(fields)) == record._replace(has_met=False, serves_rendezvous=False)
    assignment = assign([record])[0]
    fields = json.loads(encode_assignment(assignment))
    del fields["has_begun"]
    assert decode_assignment(json.dumps(fields)) == assignment._replace(has_begun=False)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_json_are_none(content: bytes) -> None:
    """Foreign stores hold anything."""
    assert decode_assignment(content) is None
    assert decode_host_record(content) is None


def test_what_is_too_long_or_too_deep_is_none() -> None:
    """A record is small."""
    record = HostRecord("node1", (TaskRecord(1, "default", 1),))
    assert decode_host_record(encode_host_record(record._replace(files="x" * 5000))) is None
    assert decode_host_record(encode_host_record(record._replace(tasks=record.tasks * 5000))) is None
    assert decode_host_record(b"[" * 100_000) is None
    assert decode_host_record(b" " * (2 << 20)) is None


def test_a_name_from_another_host_cannot_reach_the_terminal_raw() -> None:
    """It is shown to people."""
    record = HostRecord("a\x1b[2Jb", (TaskRecord(1, "default", 1),))
    found = decode_host_record(encode_host_record(record))
    assert found is not None
    assert found.name == r"a\x1b[2Jb"


def test_a_different_number_of_hosts_is_a_disagreement() -> None:
    """Both numbers are said, and by whom."""
    one = HostRecord("node1", (TaskRecord(1, "default", 1),), most=4)
    other = one._replace(name="node2", most=1)
    assert disagreement(one, other) == "node1 was started for 4 hosts, node2 for 1 host"
    assert disagreement(one, one._replace(name="node2")) is None


def test_the_missing_are_named_as_far_as_they_are_known() -> None:
    """By the scheduler's names, else by node rank; not all of a thousand."""
    assert missing_text([1, 3], 4, ["node1", "node2"]) == "2 of 4 hosts: node2, node rank 3"
    assert missing_text(list(range(100)), 200, []).endswith("node rank 15, and 84 more")


@given(st.integers(1, 100_000))
def test_all_parts_together_are_bounded(tasks: int) -> None:
    """The leader holds them all at once; below a certain size a part would say nothing."""
    limit = chunk_limit_bytes(tasks)
    assert 8 << 10 <= limit <= 4 << 20
    assert tasks * limit <= max(64 << 20, tasks * (8 << 10))
