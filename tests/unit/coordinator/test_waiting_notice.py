"""What keeps the hosts from meeting, and when the tasks of this host are to hear of it."""

from __future__ import annotations

import pytest

from saferun.coordinator.waiting_notice import WaitingNotice

BEGAN_AT = 1000.0
EVERY_S = 30.0


@pytest.mark.parametrize(("is_fault", "after_s", "is_due"), [(True, 3, True), (True, 1, False), (False, 3, False)])
def test_what_waiting_will_hardly_mend_is_reported_sooner(*, is_fault: bool, after_s: float, is_due: bool) -> None:
    """An unknown name, no route; that somebody comes late is reported after half a minute."""
    notice = WaitingNotice(BEGAN_AT, EVERY_S)
    notice.set_status("the name node1 cannot be resolved on this host", is_fault=is_fault)
    assert (notice.due_message(BEGAN_AT + after_s) is not None) is is_due
    assert notice.due_message(BEGAN_AT + after_s) is None


def test_a_message_says_how_long_it_has_lasted_and_whether_others_only_come_late() -> None:
    """The display counts on, and the user of one host alone learns how to do without the others."""
    notice = WaitingNotice(BEGAN_AT, EVERY_S)
    notice.wait_for("1 of 2 hosts: node2")
    message = {"op": "waiting", "text": "waiting for 1 of 2 hosts: node2", "waited_s": 60, "for_others": True}
    assert notice.due_message(BEGAN_AT + 60.0) == message
    notice.set_status("node1 refuses connections")
    assert notice.due_message(BEGAN_AT + 120.0) == {
        **message,
        "text": "node1 refuses connections",
        "waited_s": 120,
        "for_others": False,
    }


def test_a_message_that_stays_the_same_is_repeated_ever_more_rarely() -> None:
    notice = WaitingNotice(BEGAN_AT, EVERY_S)
    notice.wait_for("1 of 2 hosts: node2")
    due = [after_s for after_s in range(1, 1000) if notice.due_message(BEGAN_AT + after_s) is not None]
    assert due == [30, 60, 120, 240, 480, 960]
