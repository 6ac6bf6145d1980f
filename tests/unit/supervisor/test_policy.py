"""What follows a failed attempt: a retry of its start, a restart, or the end."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saferun.evidence.diagnosis_values import Traceback
from saferun.supervisor.policy import AttemptPolicy, Decision, FailureFacts, Fingerprint
from saferun.supervisor.policy.attempts import INCOMPARABLE, PERMANENT, SETTLED, TRANSIENT, AttemptProgress
from saferun.supervisor.policy.backoff import retry_waits_s
from saferun.supervisor.policy.facts import facts_from
from tests.unit.supervisor.failed_starts import diagnosis

PACKAGE = Path(__file__).parents[3] / "saferun"


def doubling(retry: int) -> float:
    return float(2 ** (retry - 1))


def policy(max_restarts: int = 0, start_retries: int = 3, **more: Any) -> AttemptPolicy:
    return AttemptPolicy(max_restarts, start_retries, wait=doubling, **more)


def failed(class_name: str, rank: int = 3, location: str = "train.py:12", **more: Any) -> FailureFacts:
    """A failed start."""
    prints = Fingerprint(class_name, (rank,), location, is_frame=True)
    facts: dict[str, Any] = {"is_start_over": False, "message": f"{class_name} it was"} | more
    return FailureFacts(class_name, prints, **facts)


def steps(decisions: list[Decision]) -> list[str]:
    return [decision.next_step for decision in decisions]


def run(a_policy: AttemptPolicy, *facts: FailureFacts, hosts: int = 1, least_hosts: int = 1) -> list[Decision]:
    """What is decided until it ends; failures beyond the last are like that."""
    decisions: list[Decision] = []
    restarts = 0
    for index in itertools.count():
        decisions.append(
            a_policy.decide(facts[min(index, len(facts) - 1)], restarts=restarts, hosts=hosts, least_hosts=least_hosts)
        )
        if decisions[-1].next_step == "finish":
            return decisions
        restarts += decisions[-1].next_step == "restart"
        hosts -= decisions[-1].exclude is not None
        assert len(decisions) < 100, "it never ends"
    raise AssertionError


# ------------------------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("class_name", sorted(TRANSIENT))
def test_a_failed_start_is_tried_again_where_its_cause_may_pass(class_name: str) -> None:
    """Also when it fails in the same words: a port in use is in use each time alike, until it is not."""
    decisions = run(policy(), failed(class_name))
    assert steps(decisions) == ["retry", "retry", "retry", "finish"]
    assert [decision.wait_s for decision in decisions[:3]] == [1.0, 2.0, 4.0]
    assert [decision.retry for decision in decisions] == [1, 2, 3, 0]
    assert decisions[-1].message == f"not started again: all 3 retries are used up: {class_name} it was"


@pytest.mark.parametrize("class_name", sorted(PERMANENT))
def test_a_failed_start_is_not_tried_again_where_that_changes_nothing(class_name: str) -> None:
    """A wrong option stays wrong, however often it is tried; nor does --retry-always ask for that."""
    for always in (False, True):
        decision = policy(always=always).decide(failed(class_name, in_init=True))
        assert (decision.next_step, decision.is_plain) == ("finish", True)
        assert decision.message == f"not started again: another try would not change it: {class_name} it was"


def test_the_lists_do_not_contradict_each_other_and_name_what_there_is() -> None:
    """A class on two lists, or one that nobody finds, would be a slip of the pen."""
    assert not TRANSIENT & PERMANENT
    assert not TRANSIENT & INCOMPARABLE
    sources = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "diagnosis").rglob("*.py"))
    # Found by the checks before a start, and put together of two words.
    elsewhere = {"master_unreachable", "cuda_illegal_memory_access", "hip_illegal_memory_access"}
    assert {name for name in TRANSIENT | PERMANENT | INCOMPARABLE if f'"{name}"' not in sources} == elsewhere


def test_nobody_knows_why_and_it_is_tried_again_once() -> None:
    """If it was inside init_process_group: a script that never calls that is never run twice for nothing."""
    decisions = run(policy(), failed("segmentation_fault", in_init=True, rank=0), failed("abort", in_init=True, rank=1))
    assert steps(decisions) == ["retry", "finish"]
    assert decisions[0].message == "starting again in 1.0 s (retry 1 of 1): segmentation_fault it was"
    assert decisions[1].message == "not started again: the retry is used up: abort it was"
    assert steps(run(policy(), failed("python_exit"))) == ["finish"]
    assert steps(run(policy(start_retries=0), failed("abort", in_init=True))) == ["finish"]


def test_a_start_that_lost_a_host_within_init_is_tried_again_once() -> None:
    """An elastic job goes on without it, also where the host was waited for as long as for a hang."""
    lost = failed("host_lost", in_init=True)
    assert steps(run(policy(), lost, lost, hosts=3, least_hosts=2)) == ["retry", "finish"]
    assert steps(run(policy(), failed("host_lost"), hosts=3, least_hosts=2)) == ["finish"]


@pytest.mark.parametrize("started", [True, None])
def test_what_is_not_known_to_be_a_failed_start_is_not_tried_again(started: bool | None) -> None:
    """Hours of training are not run twice because nobody knows; that is what --max-restarts is for."""
    decision = policy().decide(failed("port_in_use", is_start_over=started))
    assert decision.message == "not started again: no restarts were asked for (--max-restarts): port_in_use it was"
    assert decision.is_plain


def test_a_check_may_know_better_than_the_class() -> None:
    """What it calls passing passes, and what it does not does not."""
    assert steps(run(policy(), failed("missing_gpu", transient_override=True)))[:1] == ["retry"]
    assert steps(run(policy(), failed("port_in_use", transient_override=False))) == ["finish"]


def test_each_start_has_its_own_retries() -> None:
    """A start that went well is over; the next one, after a restart, begins to count anew."""
    port = failed("port_in_use")
    running = failed("peer_lost", is_start_over=True)
    decisions = run(policy(max_restarts=1, start_retries=2), port, port, running, port, port, port)
    assert steps(decisions) == ["retry", "retry", "restart", "retry", "retry", "finish"]
    assert [decision.wait_s for decision in decisions] == [1.0, 2.0, 0.0, 1.0, 2.0, 0.0]


def test_a_start_whose_retries_are_used_up_still_has_the_restarts() -> None:
    """As under torchrun, which knows no retries; and the waits go on growing."""
    decisions = run(policy(max_restarts=2, start_retries=1), failed("port_in_use"))
    assert steps(decisions) == ["retry", "restart", "restart", "finish"]
    assert [decision.wait_s for decision in decisions[:3]] == [1.0, 2.0, 4.0]
    assert decisions[1].message == "starting again in 2.0 s (restart 1 of 2): port_in_use it was"


def test_a_port_in_use_asks_for_another_one_where_that_is_free_to_choose() -> None:
    """Where the user named it, all that can be done is to wait."""
    assert policy().decide(failed("port_in_use", port_is_free=True)).new_port
    assert not policy().decide(failed("port_in_use")).new_port
    assert not policy().decide(failed("store_lost", port_is_free=True)).new_port


# ------------------------------------------------------------------------------------------------------------ restarts


def test_without_anything_to_compare_restarts_are_torchruns() -> None:
    """At once, and as many as were asked for."""
    killed = FailureFacts(
        "killed_from_outside", Fingerprint("killed_from_outside"), is_start_over=True, message="SIGKILL"
    )
    decisions = run(policy(max_restarts=3), killed)
    assert steps(decisions) == ["restart", "restart", "restart", "finish"]
    assert [decision.message for decision in decisions] == [
        "starting again at once (restart 1 of 3): SIGKILL",
        "starting again at once (restart 2 of 3): SIGKILL",
        "starting again at once (restart 3 of 3): SIGKILL",
        "not started again: all 3 restarts are used up: SIGKILL",
    ]


AT_ONCE = AttemptProgress(lived_s=2.0)


@pytest.mark.parametrize("class_name", sorted(SETTLED))
@pytest.mark.parametrize("started", [False, True])
def test_what_stands_in_the_script_is_not_started_a_third_time(class_name: str, started: bool) -> None:
    """It failed at once, twice, and nothing but an edit changes it: three more tries would only cost time."""
    decisions = run(policy(max_restarts=5), failed(class_name, is_start_over=started, progress=AT_ONCE))
    assert steps(decisions) == ["restart", "finish"]
    assert decisions[1].message == (
        f"not started again: the same failure twice in a row ({class_name}, rank 3, train.py:12)"
    )
    assert not decisions[1].is_plain


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AT_ONCE, AttemptProgress(300.0)),  # it lived longer
        (AttemptProgress(300.0), AttemptProgress(310.0)),
        (AT_ONCE, AttemptProgress(2.0, in_window=False)),
        (AT_ONCE, AttemptProgress(2.0, has_sent_heartbeat=True)),
        (AT_ONCE, AttemptProgress(2.0, collectives=0)),
        (AttemptProgress(2.0, collectives=100), AttemptProgress(2.0, collectives=101)),
        (None, AT_ONCE),
        (AT_ONCE, None),
        (AttemptProgress(), AT_ONCE),
    ],
)
def test_an_attempt_that_may_have_made_progress_has_all_its_restarts(
    before: AttemptProgress | None, after: AttemptProgress | None
) -> None:
    """As torchrun has it: it goes on from its last checkpoint."""
    first, then = (failed("import_error", in_init=True, progress=progress) for progress in (before, after))
    a_policy = policy(max_restarts=3, start_retries=0)
    assert steps([a_policy.decide(first), a_policy.decide(then, restarts=1)]) == ["restart", "restart"]


def test_no_line_of_a_training_loop_ends_the_restarts() -> None:
    """Nearly everything that passes fails at loss.backward() or next(loader), and each attempt gets a bit further."""
    for class_name in ("python_exception", "assertion_error", "mismatched_collectives", "abort", "python_exit"):
        decisions = run(policy(max_restarts=9), failed(class_name, is_start_over=True, progress=AT_ONCE))
        assert steps(decisions) == ["restart"] * 9 + ["finish"]


@pytest.mark.parametrize(
    ("class_name", "proof"),
    [
        ("nccl_timeout", ""),
        ("collective_timeout", ""),
        ("cuda_error", "RuntimeError: CUDA error: unspecified launch failure"),
        ("cuda_out_of_memory", ""),
        ("gpu_hardware_error", "uncorrectable ECC error"),
        ("device_side_assert", ""),
        ("data_loader_worker_killed", "DataLoader worker (pid(s) 7) exited unexpectedly"),
        ("hang_lock", ""),
        ("hang_missing_collective", ""),
        ("host_oom_kill", ""),
        ("disk_full", "OSError: [Errno 28] No space left on device"),
        ("file_missing", "FileNotFoundError: [Errno 2] No such file or directory: 'shard-17'"),
        ("python_exception", "OSError: [Errno 5] Input/output error: 'shard-17'"),
        ("python_exception", "PermissionError: [Errno 13] Permission denied"),
        ("python_exception", "TimeoutError: no answer"),
        ("python_exception", "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='s3'): Read timed out."),
        ("python_exception", "botocore.exceptions.EndpointConnectionError: Could not connect"),
        ("python_exception", "torch.distributed.DistNetworkError: The client socket has timed out"),
        ("python_exception", "socket.gaierror: [Errno -3] Temporary failure in name resolution"),
        ("python_exception", "urllib3.exceptions.ProtocolError: ('Connection aborted.')"),
        ("python_exception", "RuntimeError: Connection reset by peer"),
        ("import_error", "ModuleNotFoundError: No module named 'flash_attn'"),
        ("usage_error", "python: can't open file '/mnt/train.py': [Errno 2] No such file or directory"),
        ("usage_error", "train.py: error: /mnt/data does not exist"),
    ],
)
def test_what_may_be_transient_never_ends_the_restarts(class_name: str, proof: str) -> None:
    """Wherever it failed and however alike: these are what people write --max-restarts for."""
    own = Traceback((3,), ('  File "distributed_c10d.py", line 17, in init_process_group',))
    facts = facts_from(diagnosis(class_name, proof=proof, tracebacks=(own,)), progress=AT_ONCE)
    assert facts.may_differ
    decisions = run(policy(max_restarts=9, start_retries=0), facts)
    assert steps(decisions) == ["restart"] * 9 + ["finish"]


@pytest.mark.parametrize(
    "proof",
    [
        "train.py: error: unrecognized arguments: --epoch",
        "train.py: error: the following arguments are required: --data",
        "train.py: error: argument --lr: expected one argument",
        "train.py: error: argument --epochs: invalid int value: 'x'",
        "Error: No such option: --epoch",
    ],
)
def test_a_command_line_that_no_file_makes_right_ends_the_restarts(proof: str) -> None:
    facts = facts_from(diagnosis("usage_error", proof=proof, start="before"), progress=AT_ONCE)
    assert not facts.may_differ
    assert steps(run(policy(max_restarts=9), facts)) == ["restart", "finish"]


def test_the_same_failure_of_an_unknown_cause_in_init_is_told_as_such() -> None:
    """After its one retry: the ranks never met, so that none of them can have trained."""
    decisions = run(policy(), failed("segmentation_fault", in_init=True, progress=AT_ONCE))
    assert steps(decisions) == ["retry", "finish"]
    assert "the same failure twice in a row (segmentation_fault, rank 3, train.py:12)" in decisions[1].message


def test_another_failure_between_two_alike_makes_them_two() -> None:
    """Only what comes twice in a row is taken to come forever."""
    ours, other = failed("python_exception", is_start_over=True), failed("abort", is_start_over=True)
    assert steps(run(policy(max_restarts=3), ours, other, ours, ours)) == ["restart", "restart", "restart", "finish"]


@pytest.mark.parametrize(
    "other",
    [
        failed("python_exception", rank=2, is_start_over=True),
        failed("python_exception", location="train.py:13", is_start_over=True),
        failed("abort", is_start_over=True),
    ],
)
def test_another_rank_place_or_class_is_another_failure(other: FailureFacts) -> None:
    """All three together are what it is known by."""
    first = failed("python_exception", is_start_over=True)
    assert steps(run(policy(max_restarts=2), first, other, first)) == ["restart", "restart", "finish"]


def test_ranks_that_fail_alike_are_the_same_failure_whoever_was_seen_to() -> None:
    """Of eight ranks with the same import error some are stopped before they come to it."""
    one, other = Fingerprint("import_error", (0, 3), "a.py:1"), Fingerprint("import_error", (3, 5), "a.py:1")
    assert one.is_same(other)
    assert not one.is_same(other._replace(ranks=(5,)))
    assert not one.is_same(other._replace(ranks=()))
    assert one._replace(ranks=()).is_same(other._replace(ranks=()))


@pytest.mark.parametrize("always", [False, True])
def test_nothing_to_compare_is_never_the_same(always: bool) -> None:
    """A signal from outside has no frame and no message."""
    empty = Fingerprint("unknown", (1,))
    assert not empty.is_same(empty)
    assert not empty.is_same(None)
    silent = FailureFacts("unknown", empty, is_start_over=True)
    assert steps(run(policy(max_restarts=2, always=always), silent)) == ["restart", "restart", "finish"]


def test_retry_always_goes_on_to_the_numbers() -> None:
    """Restarts of what fails alike, and retries of what nobody knows."""
    assert steps(run(policy(max_restarts=3, always=True), failed("import_error", progress=AT_ONCE))) == (
        ["restart"] * 3 + ["finish"]
    )
    assert steps(run(policy(always=True), failed("abort", in_init=True))) == ["retry"] * 3 + ["finish"]


# ----------------------------------------------------------------------------------------------------------------- end


@pytest.mark.parametrize("always", [False, True])
def test_a_user_who_wants_an_end_gets_it(always: bool) -> None:
    """Whatever failed, and whatever is left."""
    facts = failed("port_in_use", restarting_allowed=False, stop_reason="stopped by SIGTERM")
    decision = policy(max_restarts=9, always=always).decide(facts)
    assert (decision.next_step, decision.message) == ("finish", "not started again: stopped by SIGTERM")


def test_reason_is_the_line_without_what_follows() -> None:
    """The report has a column for each."""
    decisions = run(policy(start_retries=1), failed("port_in_use", message="port 29500 is in use"))
    assert decisions[0].message == "starting again in 1.0 s (retry 1 of 1): port 29500 is in use"
    assert decisions[0].reason == "port 29500 is in use"
    assert decisions[1].message == f"not started again: {decisions[1].reason}"


# --------------------------------------------------------------------------------------------------------------- hosts


def on_host(host: int = 2, rank: int = 3, class_name: str = "gpu_hardware_error", **more: Any) -> FailureFacts:
    return failed(class_name, rank, is_start_over=True, host=host, host_label=f"node{host + 1}", **more)


def test_a_host_that_caused_the_same_failure_twice_is_left_out_where_the_rest_suffices() -> None:
    """And named."""
    decisions = run(policy(max_restarts=5, exclude_bad_hosts=True), on_host(), hosts=3, least_hosts=2)
    assert [decision.exclude for decision in decisions] == [None, 2, None, None, None, None]
    assert decisions[1].message == (
        "starting again (restart 2 of 5): without node3, which caused the same failure twice "
        "(gpu_hardware_error, rank 3, train.py:12)"
    )


def test_a_host_whose_failures_may_pass_is_left_out_as_well() -> None:
    """Its GPU is busy again and again."""
    facts = on_host(class_name="gpu_busy")._replace(is_start_over=False)
    decisions = run(policy(exclude_bad_hosts=True), facts, hosts=3, least_hosts=2)
    assert [(decision.next_step, decision.exclude) for decision in decisions[:2]] == [("retry", None), ("retry", 2)]


def test_a_failure_that_goes_on_without_that_host_was_not_its_fault() -> None:
    """Excluding one host after the other would end with the last."""
    facts = [on_host(), on_host(), on_host(host=1, rank=2)]
    decisions = run(policy(max_restarts=4, exclude_bad_hosts=True), *facts, hosts=4, least_hosts=1)
    assert [decision.exclude for decision in decisions] == [None, 2, None, None, None]
    assert decisions[3].message == "starting again (restart 4 of 4): gpu_hardware_error it was, also without node3"


@pytest.mark.parametrize(
    ("options", "host", "hosts", "words"),
    [
        ({}, 2, 3, "gpu_hardware_error it was"),
        ({"exclude_bad_hosts": True}, 2, 2, "; the job needs node3, which cannot be left out"),
        ({"exclude_bad_hosts": True}, 0, 3, "; node1 leads the job and cannot be left out"),
    ],
)
def test_a_host_stays_where_it_must(options: dict[str, bool], host: int, hosts: int, words: str) -> None:
    """Not asked for, the job needs it, or it has the store; the restarts are those that were asked for."""
    decisions = run(policy(max_restarts=2, **options), on_host(host), hosts=hosts, least_hosts=2)
    assert steps(decisions) == ["restart", "restart", "finish"]
    assert {decision.exclude for decision in decisions} == {None}
    assert decisions[1].message.endswith(words)


def test_a_host_without_which_the_others_cannot_meet_again_stays_though_it_fails_twice() -> None:
    """It serves torch's rendezvous."""
    chosen = policy(max_restarts=2, exclude_bad_hosts=True)
    decisions = [
        chosen.decide(on_host(), restarts=restarts, hosts=3, least_hosts=2, needed=(2,)) for restarts in range(2)
    ]
    assert [(decision.next_step, decision.exclude) for decision in decisions] == [("restart", None)] * 2
    assert decisions[1].message.endswith("; the job needs node3, which cannot be left out")


# --------------------------------------------------------------------------------------------------------------- waits


def test_waits_double_and_are_spread_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that fail together do not all come back together."""
    for share, expected in ((0.0, [0.5, 1.0, 2.0]), (1.0, [1.0, 1.5, 2.5])):
        monkeypatch.setattr(random, "uniform", lambda low, high, share=share: low + share * (high - low))
        attempts = AttemptPolicy(0, 3, 0.5)
        attempts.take_waits(retry_waits_s(0.5, 3))
        decisions = run(attempts, failed("port_in_use"))
        assert [decision.wait_s for decision in decisions[:3]] == pytest.approx(expected)


def test_where_no_waits_have_come_they_double_all_the_same() -> None:
    """The process that draws them up may be lost, or late."""
    attempts = AttemptPolicy(0, 4, 0.5)
    assert [decision.wait_s for decision in run(attempts, failed("port_in_use"))[:4]] == [0.5, 1.0, 2.0, 4.0]
    attempts = AttemptPolicy(0, 4, 0.5)
    attempts.take_waits([0.75])
    assert [decision.wait_s for decision in run(attempts, failed("port_in_use"))[:4]] == [0.75, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("comes", [True, False])
def test_no_wait_is_longer_than_a_minute_or_shorter_than_nothing(comes: bool) -> None:
    """Nobody waits for an hour at the hundredth retry."""

    def waits(retries: int, first_s: float) -> list[float]:
        attempts = AttemptPolicy(0, retries, first_s)
        if comes:
            attempts.take_waits(retry_waits_s(first_s, retries))
        return [decision.wait_s for decision in run(attempts, failed("port_in_use"))]

    assert all(wait_s <= 60.0 for wait_s in waits(20, 1.0))
    assert set(waits(3, 0.0)) == {0.0}
    assert waits(1, 90.0)[0] >= 60.0


def test_no_decision_loads_what_draws_up_the_waits() -> None:
    """It takes files, of a file system that may be the reason for the failure, and asyncio."""
    program = (
        "import sys, saferun.supervisor.policy as p\n"
        "a = p.AttemptPolicy(0, 1); f = p.FailureFacts('port_in_use', is_start_over=False)\n"
        "print(a.decide(f).next_step, 'tenacity' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["retry", "False"]
