"""Modules for the supervisor are read by a child of the examiner, which takes its time until they are waited for."""

from __future__ import annotations

import json
from textwrap import dedent

from tests.process.launching import printed_by

# A supervisor's end of the examiner, and what reads the whole answer to a request.
ASKING = """
import json, os, sys, time
from functools import partial
import saferun.captures.examiner_process as process
from saferun.captures.examiner import Answer, Examiner
from saferun.linux.held_code import HeldModules
from saferun.linux.poller import Poller

poller, happened, answers = Poller(), [], {}

def loaded(_value):
    process.write(json.dumps(sorted(sys.modules)).encode())

examiner = Examiner(
    os.environ,
    poller,
    warn=happened.append,
    on_begun=partial(happened.append, "begun"),
    on_ready=partial(happened.append, "ready"),
    kinds={"loaded": loaded},
    modules=["colorsys", "no_such_module"],
)

def turn_until(condition):
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at, (happened, list(answers))
        poller.wait(0.05)

def ask(kind, value=None):
    answers.pop(kind, None)
    return Answer(
        examiner, poller, kind, value, 60.0, partial(answers.__setitem__, kind), limit_bytes=1 << 26, is_urgent=False
    )
"""


def run(program: str) -> object:
    """What a program with an examiner prints last, as JSON."""
    return json.loads(printed_by(ASKING + dedent(program)))


def test_the_examiner_has_no_modules_that_only_the_supervisor_needs() -> None:
    """They would take memory on every host, for the whole launch. Those of its own requests it has."""
    found = run("""
        examiner.begin()
        turn_until(lambda: "begun" in happened)
        ask("code", ["textwrap", "email.utils"])
        turn_until(lambda: "code" in answers and "ready" in happened)
        ask("loaded")
        turn_until(lambda: "loaded" in answers)
        names = json.loads(answers["loaded"])
        wanted = ["colorsys", "email.utils", "saferun.captures.stacks"]
        print(json.dumps([[name in names for name in wanted], happened]))
    """)
    assert found == [[True, False, True], ["begun", "ready"]]


def test_the_order_of_modules_has_dependencies_first() -> None:
    """One at a time is imported in the supervisor, whose loop waits for it."""
    found = run("""
        examiner.begin()
        ask("code", ["email.message", "no_such_module", "saferun.captures.stacks"])
        turn_until(lambda: "code" in answers)
        held = HeldModules(lambda _: False)
        held.feed(answers["code"])
        held.seal()
        most = 0
        for name in held.order:
            before = set(sys.modules)
            __import__(name)
            most = max(most, len(set(sys.modules) - before - {name.rpartition(".")[0]}))
        print(json.dumps(most))
    """)
    assert found == 1


def test_modules_that_the_examiner_has_by_then_are_read_for_the_supervisor_too() -> None:
    """It asks again where the first child was lost; what a module depends on may be in the examiner by then."""
    found = run("""
        examiner.begin()
        turn_until(lambda: "ready" in happened)
        ask("code", ["saferun.captures.stacks"])
        turn_until(lambda: "code" in answers)
        held = HeldModules(lambda _: False)
        held.feed(answers["code"])
        before = "saferun.captures.stacks" in sys.modules
        held.seal()
        import saferun.captures.stacks
        print(json.dumps([before, type(saferun.captures.stacks.__loader__).__module__]))
    """)
    assert found == [False, "saferun.linux.held_code"]


def test_the_child_takes_its_time_until_it_is_told_to_hurry() -> None:
    """Beside the ranks' start it leaves the processor to them; with a failure at hand nothing is left."""
    found = run("""
        process._pause_s = lambda took_s: 1000.0
        names = ["colorsys", "textwrap", "email.utils"]
        examiner.begin()
        ask("code", names)
        give_up_at = time.monotonic() + 1
        turn_until(lambda: time.monotonic() > give_up_at)
        before = "code" in answers
        examiner.hurry()
        turn_until(lambda: "code" in answers)
        ask("code", names)  # and so do those that come later
        turn_until(lambda: "code" in answers)
        print(json.dumps([before, happened]))
    """)
    assert found == [False, ["begun"]]


def test_one_module_is_read_without_a_pause() -> None:
    """The loop itself waits for it."""
    found = run("""
        process._pause_s = lambda took_s: 1000.0
        examiner.begin()
        ask("code", ["colorsys"])
        turn_until(lambda: "code" in answers)
        print(json.dumps(happened))
    """)
    assert found == ["begun"]


def test_a_request_that_cannot_be_killed_costs_no_other_one() -> None:
    """It blocks in the kernel; the examiner goes on, and has its modules ready."""
    found = run("""
        import signal
        process._kill, process._MARGIN_S = (lambda pid: None), 0.1
        examiner._kinds["stuck"] = lambda value: signal.pause()
        examiner.begin()
        Answer(examiner, poller, "stuck", None, 0.1, print, is_urgent=False)
        give_up_at = time.monotonic() + 1
        turn_until(lambda: time.monotonic() > give_up_at and "ready" in happened)
        ask("loaded")
        turn_until(lambda: "loaded" in answers)
        print(json.dumps(happened))
    """)
    assert found == ["begun", "ready"]


def test_an_examiner_that_cannot_give_memory_back_is_ready_all_the_same() -> None:
    found = run("""
        sys.modules["saferun.linux.heap"] = None
        examiner.begin()
        turn_until(lambda: "ready" in happened)
        ask("loaded")
        turn_until(lambda: "loaded" in answers)
        print(json.dumps(happened))
    """)
    assert found == ["begun", "ready"]
