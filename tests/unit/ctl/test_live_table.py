"""The table of ``saferunctl status``: from whatever a saferun answers to lines for people."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.ctl.live_table import live_lines
from saferun.text.decoding import MALFORMED

RANK = {"rank": 3, "pid": 77, "state": "D", "output_age_s": 61, "quiet_s": 40, "rss_mib": 2048, "cpu_percent": 7}


def answered(**changes: object) -> dict[str, Any]:
    """An answer of one host with one rank."""
    host = {"host": "node1", "ranks": [RANK], "gpus": [[0, 97, 61440, 81920, 65]], "cpus": 8, "more": 2}
    return {
        "state": "running",
        "attempt": 1,
        "world_size": 8,
        "leader": "node1",
        "is_whole": True,
        "hang_timeout_s": 300,
        "is_hung": False,
        "restarts": 1,
        "hosts": [host],
        "missing": ["node2"],
        **changes,
    }


def test_a_job_as_it_is_shown() -> None:
    assert list(live_lines(answered())) == [
        "running: attempt 1, 8 ranks; last progress 40 s ago (--hang-timeout 300); 1 restart",
        "  no answer yet from node2",
        "node1: 8 processors",
        "  rank  pid            state  output  progress  memory  CPU  processes",
        "     3   77  uninterruptible    61 s      40 s   2 GiB  7 %          -",
        "  … and 2 ranks more",
        "  GPU 0: 97 % busy, 60 GiB of 80 GiB, 65 °C",
    ]


def test_a_hang_and_a_host_that_does_not_lead_are_named() -> None:
    assert "the job hangs: no progress for 40 s" in next(live_lines(answered(is_hung=True)))
    assert any("node1, which collects all hosts, does not" in line for line in live_lines(answered(is_whole=False)))


def test_hosts_that_were_found_bad_are_named_with_the_reason() -> None:
    lines = list(live_lines(answered(bad_hosts=["node2: GPU 3 fell off the bus", "\x1b[31mnode3: its clock"])))
    assert lines[2] == "  bad host: node2: GPU 3 fell off the bus"
    assert "\x1b" not in lines[3]


def test_words_of_another_host_hold_no_control_characters() -> None:
    host = {"host": "a\x1b[2Jb", "ranks": [{**RANK, "state": "\x1b]0;x\x07"}], "stuck_in": "\x1b[31m"}
    assert "\x1b" not in "".join(live_lines(answered(hosts=[host], missing=["\x1b[31m"])))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(RANK)), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(list(answered())), ANYTHING)
def test_whatever_is_answered_is_shown_or_refused(name: str, value: object) -> None:
    try:
        lines = list(live_lines(answered(**{name: value})))
    except MALFORMED:
        return
    assert lines


@pytest.mark.parametrize("content", [{}, {"state": 5}, {"hosts": 3}])
def test_an_answer_that_makes_no_sense_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(MALFORMED):
        list(live_lines(content))
