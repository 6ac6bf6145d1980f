"""The facts of a failed attempt that decide about another one, read from its diagnosis."""

from __future__ import annotations

import pytest

from saferun.evidence.diagnosis_values import Traceback
from saferun.evidence.job_evidence import Capture, Evidence, GroupProgress, HostView, RankCollectives
from saferun.supervisor.policy import Fingerprint
from saferun.supervisor.policy.attempts import AttemptProgress
from saferun.supervisor.policy.facts import facts_from, progress_of
from tests.unit.supervisor.failed_starts import diagnosis


def evidence_of(capture: Capture) -> Evidence:
    return Evidence("vm", 0.0, (), (), (), None, capture=capture)


@pytest.mark.parametrize(
    ("start", "started", "in_init"),
    [("", None, False), ("before", False, False), ("inside", False, True), ("through", True, False)],
)
def test_how_far_the_start_had_come_is_what_the_diagnosis_says(
    start: str,
    started: bool | None,
    in_init: bool,
) -> None:
    """What nobody knows is no failed start."""
    facts = facts_from(diagnosis("abort", start=start))
    assert (facts.is_start_over, facts.in_init) == (started, in_init)


def test_a_scripts_own_exception_is_not_raised_in_init_because_others_wait_there() -> None:
    """A KeyError in one rank before it, with the others waiting for it, is as sure as any other."""
    own = Traceback((3,), ("Traceback", '  File "train.py", line 12, in main', "KeyError: 1"))
    others = Traceback((1,), ('  File "distributed_c10d.py", line 17, in init_process_group',))
    assert not facts_from(diagnosis("python_exception", tracebacks=(own, others))).in_init
    assert facts_from(diagnosis("python_exception", tracebacks=(others._replace(ranks=(3,)),))).in_init
    assert not facts_from(diagnosis("python_exit")).in_init


TORCHS = ("Traceback", '  File "t.py", line 1, in main', '  File "/x/torch/distributed/rendezvous.py", line 4, in f')
OWN = ("Traceback", '  File "/x/torch/distributed/rendezvous.py", line 4, in f', '  File "t.py", line 1, in main')


@pytest.mark.parametrize(
    ("class_name", "lines", "proof", "of_start"),
    [
        ("port_in_use", TORCHS, "RuntimeError: the server socket has failed to listen", True),
        ("port_in_use", OWN, "OSError: [Errno 98] Address already in use", False),
        ("master_unreachable", OWN, "torch.distributed.DistNetworkError: The client socket has timed out", True),
        ("nccl_system_error", OWN, "DistBackendError: NCCL error in: init.cu:77, unhandled system error", True),
        ("name_resolution", OWN, "socket.gaierror: [Errno -3] Temporary failure in name resolution", False),
        ("gpu_busy", OWN, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
    ],
)
def test_of_the_start_is_what_torch_raises_where_ranks_meet(
    class_name: str,
    lines: tuple[str, ...],
    proof: str,
    of_start: bool,
) -> None:
    """Others that wait in init_process_group make nobody else's failure one of the start."""
    texts = (Traceback((1,), TORCHS), Traceback((3,), lines))
    for start in ("before", "inside"):
        found = diagnosis(class_name, start=start, proof=proof, tracebacks=texts)
        assert facts_from(found, progress=AttemptProgress(lived_s=1.0)).of_start is of_start


def test_without_a_traceback_it_is_of_the_start_where_a_rank_was_in_it() -> None:
    """NCCL's own lines, and an abort."""
    for start, of_start in (("inside", True), ("before", False)):
        assert (
            facts_from(diagnosis("nccl_system_error", start=start), progress=AttemptProgress(lived_s=1.0)).of_start
            is of_start
        )
    # No rank was started: it is saferun's own failure.
    assert facts_from(diagnosis("port_in_use", start="before"), progress=AttemptProgress()).of_start


@pytest.mark.parametrize(
    "proof",
    [
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        "NET/OFI Unable to register memory (type = 2). RC: 12, Error: Cannot allocate memory",
        "Call to shm_open failed : Permission denied",
        "Error while attaching to shared memory segment /dev/shm/nccl- error: No such file or directory",
    ],
)
def test_a_system_error_of_nccls_that_a_host_is_set_up_for_is_not_retried(proof: str) -> None:
    """No attempt seconds later raises a limit or mounts /dev/shm; restarts go on as under torchrun."""
    facts = facts_from(diagnosis("nccl_system_error", proof=proof))
    assert (facts.is_transient, facts.transient_override, facts.may_differ) == (False, False, True)


def test_other_system_errors_of_nccls_are_retried() -> None:
    for proof in (
        "Call to ibv_create_qp failed",
        "DistBackendError: NCCL error in: init.cu:77, unhandled system error",
    ):
        facts = facts_from(diagnosis("nccl_system_error", proof=proof))
        assert (facts.is_transient, facts.transient_override) == (True, None)
    assert facts_from(diagnosis("host_out_of_memory", proof="Cannot allocate memory")).transient_override is None


def test_a_failure_is_known_by_its_place_else_by_what_it_says_without_its_numbers() -> None:
    """Ports and process numbers differ from attempt to attempt."""
    assert facts_from(diagnosis()).fingerprint == Fingerprint("import_error", (3,), "train.py:12", is_frame=True)
    prints = facts_from(diagnosis(location="", proof="pid 4711: no")).fingerprint
    assert (prints.location, prints.description) == ("pid ####: no", "import_error, rank 3")
    assert not facts_from(diagnosis(location="", proof="")).fingerprint.location
    assert not facts_from(diagnosis("killed_from_outside")).fingerprint.location


def test_many_ranks_are_not_all_named() -> None:
    """A line is a line."""
    many = Fingerprint("abort", tuple(range(100)), "a.py:1", is_frame=True)
    assert many.description == "abort, ranks 0, 1, 2, 3, …, a.py:1"


def test_what_saferun_could_not_do_has_the_class_that_it_is_given() -> None:
    """The store's process was killed: no rank brought that about."""
    found = diagnosis()._replace(cause=None, headline="the store's process ended (killed by SIGKILL)")
    facts = facts_from(found, error_class="store_lost")
    assert (facts.class_name, facts.is_transient, facts.message) == ("store_lost", True, found.headline)
    assert facts_from(found).class_name == "unknown"
    # What a rank is known to have failed of is more than what followed from that.
    assert facts_from(diagnosis(), error_class="store_lost").class_name == "import_error"


def test_a_host_is_blamed_only_if_it_is_one_of_several_and_the_only_one() -> None:
    """Ranks of two hosts that fail alike are no host's fault."""
    hosts = (HostView(0, "node1", (0, 1)), HostView(1, "node2", (2, 3)))
    facts = facts_from(diagnosis(hosts=hosts))
    assert (facts.host, facts.host_label) == (1, "node2")
    assert facts_from(diagnosis(ranks=(1, 3), hosts=hosts)).host is None
    assert facts_from(diagnosis(hosts=(HostView(0, "node1", (0, 1, 2, 3)),))).host is None
    assert facts_from(diagnosis(ranks=(), hosts=hosts)).host is None


def test_how_far_an_attempt_came_is_read_from_its_evidence() -> None:
    """The furthest of all ranks and groups counts."""
    groups = (GroupProgress("0", "pg", (), 41, 41, 40, ()), GroupProgress("1", "pg", (), 7, 7, 7, ()))
    capture = Capture(collectives=(RankCollectives(0, ()), RankCollectives(1, groups)))
    seen = evidence_of(capture)
    assert progress_of(seen, lived_s=3.0, window_s=120.0, has_sent_heartbeat=True) == AttemptProgress(
        3.0, in_window=True, has_sent_heartbeat=True, collectives=41
    )
    assert progress_of(
        evidence_of(Capture()), lived_s=300.0, window_s=120.0, has_sent_heartbeat=False
    ) == AttemptProgress(300.0, in_window=False)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((3,), "node2: its saferun is gone while the host is up: it was killed"),
        ((1, 3), "node1, node2: its saferun is gone while the host is up: it was killed"),
        ((), "its saferun is gone while the host is up: it was killed"),
    ],
)
def test_a_message_about_a_host_names_it(ranks: tuple[int, ...], message: str) -> None:
    """It is read behind "starting again (restart 1 of 2)", where no host is named."""
    views = (HostView(0, "node1", (0, 1)), HostView(1, "node2", (2, 3)))
    found = diagnosis("host_lost", ranks=ranks or (3,))
    assert found.cause is not None
    cause = found.cause._replace(message="its saferun is gone while the host is up: it was killed; more", ranks=ranks)
    facts = facts_from(found._replace(cause=cause, hosts=views))
    assert facts.message == message
