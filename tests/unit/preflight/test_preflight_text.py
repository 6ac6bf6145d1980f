"""What the user reads of the checks: only what is wrong, once, however many hosts there are; and the whole table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.preflight.findings_text import decision_text, host_ranges, result_lines, show, table_lines
from saferun.preflight.results import Cell, CheckResult, MatrixRow, Preflight
from tests.unit.found_samples import (
    FINISH,
    OPEN_FILES,
    RETRY,
    SHM_HINT,
    WORDS,
    cut_off,
    dead_nic,
    found,
    good,
    hosts_of,
    infos_of,
    small_shm,
    well,
)

NEEDED = "and NCCL and data loaders of 8 ranks need more"
TABLE = """\
fail     links          node3         hsn0 does not answer (timeout) from 3 of 3 hosts; its eth0 does
                                      hint: check the cable, the switch port and the VLAN of node3's hsn0, and
                                      firewalls, or run with --nic eth0
warn     shared_memory  node1, node2  /dev/shm has only 64 MiB, and NCCL and data loaders of 8 ranks need more
                                      hint: give it more (docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir
                                      with medium: Memory on /dev/shm)
skipped  gpus           node1         the GPUs' driver could not be asked
ok       names          all 4 hosts   node1 is 10.0.0.1 (node1)
ok       open_files     node1         a process may open 1048576 files
ok       versions       all 4 hosts   saferun 0.1.0, python 3.11.9, torch 2.13.0

interfaces as the other hosts reach them:
host   eth0                      hsn0
node1  ok 3/3, 21 µs, 11.8 GB/s  ok 3/3, 21 µs, 11.8 GB/s
node2  ok 3/3, 21 µs, 11.8 GB/s  ok 3/3, 21 µs, 11.8 GB/s
node3  ok 3/3, 80 µs, 1.1 GB/s   timeout 0/3
node4  ok 3/3, 21 µs, 11.8 GB/s  ok 3/3, 21 µs, 11.8 GB/s

4 hosts, 6 checks in 0.43 s: 1 failed, 2 warnings, 1 skipped, 9 ok"""


# -------------------------------------------------------------------------------------------------------------- console


def test_only_what_is_wrong_is_told_failures_first() -> None:
    """A console that tells of everything is not read."""
    results = [*good("names", "fine", ["node1"]), small_shm("node1"), dead_nic("node3")]
    assert result_lines(results) == [
        f"saferun: node3: {WORDS}",
        "hint: check the cable, the switch port and the VLAN of node3's hsn0, and firewalls, or run with --nic eth0",
        f"saferun: warning: node1: /dev/shm has only 64 MiB, {NEEDED}",
        f"hint: {SHM_HINT}",
    ]
    assert result_lines(good("names", "fine", hosts_of(4))) == []


def test_what_has_no_host_and_no_hint_is_one_line() -> None:
    """On one host there are no names to be told, and some things have no remedy."""
    assert result_lines([CheckResult("clock", "warn", "the clocks differ by 3 s")]) == [
        "saferun: warning: the clocks differ by 3 s"
    ]


def test_the_same_of_several_hosts_is_said_once() -> None:
    """Eight hosts from one image have the same fault."""
    hosts = [host for host in hosts_of(9) if host != "node2"]
    assert result_lines([small_shm(host) for host in hosts])[0] == (
        f"saferun: warning: node1, node3-node9 (8 hosts): /dev/shm has only 64 MiB, {NEEDED}"
    )


def test_a_hint_that_names_its_host_is_for_all_of_them() -> None:
    """Else every host would have a sentence of its own."""
    lines = result_lines([dead_nic("node3"), dead_nic("node4")])
    assert lines == [
        f"saferun: node3, node4: {WORDS}",
        "hint: check the cable, the switch port and the VLAN of <host>'s hsn0, and firewalls, or run with --nic eth0",
    ]


def test_many_that_differ_in_a_number_only_are_one_sentence() -> None:
    """Free space is never the same twice."""
    lines = result_lines([small_shm(host, f"{size} MiB") for size, host in enumerate(hosts_of(1000), 60)])
    assert lines[0] == (
        f"saferun: warning: node1-node1000 (1000 hosts): /dev/shm has only 60 MiB, {NEEDED} "
        "(node1; the others' numbers differ)"
    )
    assert len(lines) == 2


def test_numbers_in_names_are_no_mere_numbers() -> None:
    """hsn0 and hsn1 are two cables."""
    results = [
        CheckResult("links", "fail", f"{nic} does not answer", host=host)
        for nic, host in (("hsn0", "node1"), ("hsn1", "node2"), ("hsn2", "node3"))
    ]
    assert len(result_lines(results)) == 3


def test_two_hosts_that_differ_in_a_number_keep_their_own() -> None:
    """There is room for both."""
    lines = result_lines([small_shm("node1", "60 MiB"), small_shm("node2", "61 MiB")])
    assert [line for line in lines if line.startswith("saferun")] == [
        f"saferun: warning: node1: /dev/shm has only 60 MiB, {NEEDED}",
        f"saferun: warning: node2: /dev/shm has only 61 MiB, {NEEDED}",
    ]


def test_there_are_never_more_than_a_screenful() -> None:
    """A thousand hosts may each have a trouble of their own; failures are told before warnings."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    failures = [
        CheckResult("links", "fail", f"cable {b}-{a} is dead", "h", host=f"{a}{b}") for a in letters for b in "xyz"
    ]
    warnings = [CheckResult("disk", "warn", f"disk-{a} is full", "h", host=a) for a in letters]
    lines = result_lines([*warnings, *failures])
    assert len(lines) == 25
    assert lines[0] == "saferun: ax: cable x-a is dead"
    assert lines[-1] == "saferun: 66 more failures and 26 more warnings"


def test_what_is_left_out_is_counted() -> None:
    failures = [CheckResult("links", "fail", f"{name} is dead", host="node1") for name in "abcdefghijklm"]
    warnings = [CheckResult("disk", "warn", f"{name} is full", host="node1") for name in "ab"]
    assert result_lines([*warnings, *failures])[-1] == "saferun: 1 more failure and 2 more warnings"


def test_what_another_host_says_cannot_reach_the_terminal() -> None:
    """Its words are text from outside, and may hold secrets of the environment."""
    (line,) = result_lines([CheckResult("x", "fail", "a\x1b[2Jb\nc API_TOKEN=abc123", host="n\x1b]0;x")])
    assert line == "saferun: n?]0;x: a?[2Jb?c API_TOKEN=<redacted>"


# ---------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([], "no host"),
        (["node3"], "node3"),
        (["node2", "node1"], "node1, node2"),
        (["node1", "node2", "node3"], "node1-node3 (3 hosts)"),
        (["node9", "node10", "node11"], "node9-node11 (3 hosts)"),
        (["node09", "node10", "node8"], "node8, node09, node10 (3 hosts)"),
        (["gpu1.a.org", "gpu2.a.org", "gpu3.a.org"], "gpu1.a.org-gpu3.a.org (3 hosts)"),
        (["a1.x", "a2.y", "a3.x"], "a1.x, a3.x, a2.y (3 hosts)"),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.0.1, 10.0.0.2, 10.0.0.3 (3 hosts)"),
        (["login", "node1", "node1"], "login, node1"),
    ],
)
def test_hosts_are_told_by_their_numbers(hosts: list[str], words: str) -> None:
    """A thousand names are no answer."""
    assert host_ranges(hosts) == words


def test_hosts_without_order_are_cut_and_counted() -> None:
    words = host_ranges([f"node{number}" for number in range(0, 2000, 2)])
    assert words.startswith("node0, node2, node4, ")
    assert words.endswith(", … (1000 hosts)")
    assert len(words) <= 60


@given(st.lists(st.text(max_size=30), max_size=30), st.integers(20, 200))
def test_hosts_of_any_name_are_told(hosts: list[str], width: int) -> None:
    """Names come from other hosts."""
    assert host_ranges(hosts, width).isprintable()


# ---------------------------------------------------------------------------------------------------------------- table


def test_the_table_has_a_line_a_check_and_the_matrix() -> None:
    assert "\n".join(table_lines(found(), infos_of(), width=120)) == TABLE


def test_on_one_host_there_is_neither_a_column_of_hosts_nor_a_matrix() -> None:
    one = Preflight((*good("open_files", OPEN_FILES, [""]), small_shm("")), (), 0.02)
    assert table_lines(one, {}, width=0) == [
        f"warn  shared_memory  /dev/shm has only 64 MiB, {NEEDED}",
        f"                     hint: {SHM_HINT}",
        f"ok    open_files     {OPEN_FILES}",
        "",
        "2 checks in 0.02 s: 1 warning, 1 ok",
    ]


def test_what_is_about_no_single_host_is_about_the_job() -> None:
    apart = CheckResult("clock", "warn", "the clocks of node1 and node2 are 3 s apart")
    lines = table_lines(Preflight((apart,), (), 0.02), infos_of(), width=120)
    assert lines[0] == "warn  clock  the job  the clocks of node1 and node2 are 3 s apart"


def test_hosts_that_do_alike_are_one_row_where_there_are_many() -> None:
    """A thousand rows of which one matters are not read."""
    lines = table_lines(found(1000), infos_of(1000), width=120)
    assert len(lines) < 20
    assert "host                                      eth0                          hsn0" in lines
    assert "node3                                     ok 999/999, 80 µs, 1.1 GB/s   timeout 0/999" in lines
    assert lines.index(next(line for line in lines if "timeout 0/999" in line)) < lines.index(
        "node1, node2, node4-node1000 (999 hosts)  ok 999/999, 21 µs, 11.8 GB/s  ok 999/999, 21 µs, 11.8 GB/s"
    )
    assert "all 1000 hosts" in "\n".join(lines)


def test_a_row_of_many_hosts_has_the_least_and_the_most() -> None:
    rows = [
        MatrixRow(host, (Cell("eth0", "ok", 4, 4, 1e-5 * number, 1e9 * number),))
        for number, host in enumerate(hosts_of(16), 1)
    ]
    lines = table_lines(Preflight((), tuple(rows)), {}, width=120)
    assert "node1-node16 (16 hosts)  ok 4/4, 10-160 µs, 1-16 GB/s" in lines


def test_a_matrix_without_likeness_is_cut_with_what_is_wrong_first() -> None:
    """Whatever the hosts do, the answer ends."""
    rows = [MatrixRow(host, (Cell(f"eth{index}", "ok", 1, 1),)) for index, host in enumerate(hosts_of(200))]
    lines = table_lines(Preflight((), (*rows, cut_off("node777"))), {}, width=120)
    assert "… and 161 more hosts" in lines
    assert next(line for line in lines if line.startswith("node")).startswith("node777")


def test_an_interface_that_nobody_tried_is_no_trouble() -> None:
    """It has no numbers, and stands behind what is wrong."""
    untried = [MatrixRow(host, (Cell("eth0", "untested", 0, 0),)) for host in hosts_of(20)]
    lines = table_lines(Preflight((), (*untried, cut_off("node777"))), {}, width=120)
    rows = [line for line in lines if line.startswith("node")]
    assert rows[0].startswith("node777")
    assert rows[1].startswith("node1-node20 (20 hosts)  untested  ")


def test_more_interfaces_than_fit_stand_below_each_other() -> None:
    """A host may have nine; a terminal is never wide enough."""
    nics = [f"hsn{number}" for number in range(9)]
    lines = table_lines(Preflight((), tuple(well(host, nics=nics) for host in hosts_of(4))), {}, width=80)
    assert max(map(len, lines)) <= 80
    heads = [line.split()[1:] for line in lines if line.startswith("host")]
    assert [nic for head in heads for nic in head] == nics
    assert len(heads) > 1


def test_long_words_are_wrapped_beside_their_check() -> None:
    words = "a sentence that goes on and on " * 5
    lines = table_lines(Preflight((CheckResult("names", "fail", words, words),)), {}, width=60)
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(("fail  names", " " * 13)) for line in lines[:-2])
    (line, hint, *_) = table_lines(Preflight((CheckResult("names", "fail", words, words),)), {}, width=0)
    assert line.endswith(words.strip())
    assert hint.strip() == f"hint: {words.strip()}"


def test_interfaces_to_use_are_suggested() -> None:
    lines = table_lines(found()._replace(nic=("hsn0", "hsn1")), infos_of(), width=120)
    assert "the interfaces to use: --nic hsn0,hsn1" in lines


def test_doctor_answers_with_the_table_or_with_json() -> None:
    assert show(found(), infos_of(), as_json=False) == TABLE + "\n"
    assert show(found(), infos_of(), as_json=True).startswith('{\n "schema": "saferun.preflight/1"')


# ------------------------------------------------------------------------------------------------------------ decisions


def test_a_decision_is_one_line_with_its_reason() -> None:
    assert decision_text(FINISH) == (
        "attempt 1 (syntax_error): not started again: the same failure twice in a row (syntax_error, rank 3, "
        "train.py:12)"
    )
    assert "\n" not in decision_text(RETRY._replace(message="a\nb"))
