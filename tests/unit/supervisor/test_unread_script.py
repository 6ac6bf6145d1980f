"""A script that Python cannot read is not started again; a SyntaxError that the script raises is like any other."""

from __future__ import annotations

import pytest

from saferun.evidence.diagnosis_values import Cause, Diagnosis, Traceback
from saferun.model import ExitStatus, RankEnd
from saferun.supervisor.policy import AttemptPolicy, FailureFacts
from saferun.supervisor.policy.attempts import AttemptProgress
from saferun.supervisor.policy.facts import facts_from

LOCATION = '  File "/job/train.py", line 3'
SOURCE = ("    def f(:", "          ^", "SyntaxError: invalid syntax")
UNREAD = (LOCATION, *SOURCE)
AT_ONCE = AttemptProgress(lived_s=0.1)


def facts_of(
    lines: tuple[str, ...] = UNREAD,
    *,
    start: str = "before",
    progress: AttemptProgress | None = AT_ONCE,
    script: str = "train.py",
    class_name: str = "syntax_error",
) -> FailureFacts:
    end = RankEnd(0, 0, 100, ExitStatus(1, None), 1.0, 1.0, stopped_by_us=False)
    cause = Cause(class_name, lines[-1], (0,), lines[-1], "", "train.py:3")
    found = Diagnosis(
        "it failed", end, None, (), (), (), cause=cause, start=start, tracebacks=(Traceback((0, 1), lines),)
    )
    return facts_from(found, progress=progress, script=script)


def steps(facts: FailureFacts, *, always: bool = False) -> list[str]:
    policy = AttemptPolicy(2, always=always, wait=lambda _: 0.0)
    found = [policy.decide(facts, restarts=0)]
    while found[-1].next_step != "finish":
        found.append(policy.decide(facts, restarts=len(found)))
    return [decision.next_step for decision in found]


def test_a_script_that_python_cannot_read_is_never_started_again() -> None:
    """None of it has run, and nothing but an edit changes that; unless the user wants all attempts."""
    assert facts_of().unreadable
    assert facts_of(script="/job/train.py").unreadable
    assert steps(facts_of()) == ["finish"]
    assert steps(facts_of(), always=True) == ["restart", "restart", "finish"]


@pytest.mark.parametrize(
    "facts",
    [
        # raised: by an import, by what it evaluates, by a module that runpy loads
        facts_of(("Traceback (most recent call last):", '  File "/job/train.py", line 9, in <module>', *UNREAD)),
        facts_of(class_name="python_exception"),
        # printed by another process that the script has started, or in a log
        facts_of(('  File "/job/plugin.py", line 3', *SOURCE)),
        facts_of(('  File "<string>", line 3', *SOURCE), script=""),
        # after the start: the script was edited while it ran, and starts itself
        facts_of(start="through"),
        facts_of(start="inside"),
        facts_of(start=""),
        facts_of(progress=AttemptProgress(3000.0, in_window=False)),
        facts_of(progress=AttemptProgress(3.0, has_sent_heartbeat=True)),
        facts_of(progress=AttemptProgress(3.0, collectives=7)),
        facts_of(progress=None),
    ],
)
def test_a_syntax_error_of_a_script_that_has_begun_takes_no_restart_away(facts: FailureFacts) -> None:
    """It may depend on data or on a moment, hours after the start, and torchrun restarts after it."""
    assert not facts.unreadable
    assert steps(facts)[0] == "restart"
