"""Lines of tools and libraries that a program may get over, and plain words that any program uses, are no cause."""

from __future__ import annotations

import re

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.communication import _BY_ANY_PROGRAM
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.gpu_evidence import RankGpu
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.failed_jobs import class_of, evidence

HEAD = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step')
WHY = "error: validation loss is NaN at step 100, giving up"
PEER = (
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "/home/user/job/train.py", line 52, in step',
    "[rank1]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
)


def end_of(rank: int, code: int = 1, at: float = 100.0) -> RankEnd:
    return RankEnd(rank, rank, 4000 + rank, ExitStatus(code, None), at, 1.7e9 + at, stopped_by_us=False)


def found_in(*lines: str, code: int = 1, gpus: tuple[RankGpu, ...] = ()) -> Cause:
    end = end_of(1, code)
    output = RankOutput(1, lines, "", "", 0.0)
    facts = Evidence("node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job")
    return cause_of(read_failure(facts._replace(capture=facts.capture._replace(gpus=gpus)), end, output))


# What tools say of which a script may make nothing, and what is made of it where nothing follows.
OF_TOOLS = (
    ("squeue: error: Unable to contact slurm controller (connect failure)", "scheduler_error"),
    ("slurmstepd: error: task_g_set_affinity: affinity setup failed", "scheduler_error"),
    ("[n:1] PMIX ERROR: UNREACHABLE in file gds_shmem.c at line 12", "mpi_error"),
    ("[n:1] [[1,0],0] ORTE_ERROR_LOG: Not found in file base.c at line 12", "mpi_error"),
    ("curl: (7) Failed to connect to 169.254.169.254 port 80: Connection refused", "remote_service_error"),
    ("fatal: unable to access 'https://example.com/x.git/': Could not resolve host", "remote_service_error"),
    ("wandb: ERROR Error while calling W&B API: project not found (<Response [404]>)", "remote_service_error"),
    ("wandb: ERROR api_key not configured (no-tty). call wandb.login()", "remote_service_error"),
    ("Connection to 10.0.0.1 closed by remote host.", "ssh_unreachable"),
    ("Unable to allocate 12.0 GiB for an array with shape (5, 6) and data type float64", "host_out_of_memory"),
    ("Cannot find libnccl.so.2 in the system", "import_error"),
    ("Error: watcher: Too many open files", "too_many_open_files"),
    ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "file_system_error"),
    ("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=chrome,pid=1,uid=0", "host_oom_kill"),
    ("kworker/0:1: page allocation failure: order:4, mode:0x40cc0", "host_out_of_memory"),
    ("cgroup: fork rejected by pids controller in /user.slice", "process_limit"),
    ("pull access denied for image, repository does not exist", "container_error"),
    ("fuse: mount failed: Permission denied", "container_error"),
    ("mlx5_core 0000:4b:00.0 eth2: Link down", "fabric_error"),
)


@pytest.mark.parametrize("line", [line for line, _ in OF_TOOLS])
def test_what_a_tool_reports_before_the_programs_own_last_line_is_not_why_it_ended(line: str) -> None:
    """Its own line says why; the job went on after the tool's."""
    for lines in ((line, "step 1 done", WHY), (line, WHY)):
        found = found_in(*lines)
        assert found.class_name == "python_exit"
        assert found.message.endswith(WHY)


@pytest.mark.parametrize(("line", "class_name"), OF_TOOLS)
def test_what_a_tool_reports_last_is_believed(line: str, class_name: str) -> None:
    assert found_in("step 1 done", line).class_name == class_name


def test_lines_that_a_launcher_writes_below_the_reason_do_not_hide_it() -> None:
    lines = ("squeue: error: Unable to contact slurm controller", "srun: error: n1: task 0: Exited with exit code 1")
    assert found_in(*lines).class_name == "scheduler_error"


def test_the_rank_that_ended_by_its_own_line_is_the_culprit_though_a_tool_had_failed() -> None:
    outputs = (
        RankOutput(0, (OF_TOOLS[0][0], "step 1 done", WHY), "", "", 0.0),
        RankOutput(1, PEER, "", "", 0.0),
    )
    found = diagnose(evidence(end_of(0), end_of(1, at=100.3), outputs=outputs))
    assert class_of(found) == "python_exit"
    assert found.cause is not None
    assert found.cause.ranks == (0,)


# ------------------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize(
    "line",
    [
        "ERROR  : Loss is NaN; stopping",
        "FATAL: unable to open dataset index /data/idx",
        "FATAL: while training step 5: gradient is NaN",
        "FATAL: Image 123 of the batch is corrupt",
        "FATAL: Container class has no attribute foo",
        "fuse: warning: library too old, some operations may not work",
    ],
)
def test_levels_and_words_of_a_training_script_are_not_apptainers(line: str) -> None:
    for lines in ((line,), (line, "stopping", "bye")):
        assert found_in(*lines).class_name == "python_exit"


def test_the_same_forms_are_apptainers_where_the_status_is() -> None:
    for line in ("FATAL: while extracting x.sif: no such file", "ERROR  : Failed creating directory /x"):
        assert found_in(line, code=255).class_name == "container_error"


def test_a_manifest_of_a_data_set_is_none_of_an_image() -> None:
    found = found_in(*HEAD, "ValueError: manifest for dataset train not found in /data")
    assert found.class_name == "python_exception"
    assert found_in("manifest for org/image:1.2 not found: manifest unknown").class_name == "container_error"


# ---------------------------------------------------------------------------------------------------------- network


def test_a_file_that_is_called_a_segment_is_no_remote_memory() -> None:
    assert found_in(*HEAD, "FileNotFoundError: failed to open segment /data/train/seg-3.tar").class_name == (
        "file_missing"
    )
    for line in ("Failed to get segment desc of node2", "failed to open remote segment node2:12345"):
        assert found_in(*HEAD, f"RuntimeError: {line}").class_name == "fabric_error"


@pytest.mark.parametrize(
    "message", ["ValueError: mlx5_core option timeout is unknown", "ValueError: UCX transport is set by an error in x"]
)
def test_the_name_of_a_network_library_alone_is_no_error_of_the_network(message: str) -> None:
    assert found_in(*HEAD, message).class_name == "python_exception"


def test_what_ucx_and_the_driver_print_is_one() -> None:
    lines = ("UCX endpoint create failed: failed to create ep", "mlx5_core 0000:4b:00.0: Fatal error 3 detected")
    assert [found_in(line).class_name for line in lines] == ["fabric_error"] * 2


# --------------------------------------------------------------------------------------------- services and victims


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: could not connect to the rendezvous server",
        "ConnectionError: Failed to connect to server rank0:1234",
        "RuntimeError: could not connect to the parameter server",
    ],
)
def test_a_server_of_the_job_is_no_service_outside_it(message: str) -> None:
    assert found_in(*HEAD, message).class_name != "remote_service_error"


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: could not connect to the tracking server",
        "ValueError: server returned status code 503 for url https://x/y",
    ],
)
def test_a_service_outside_the_job_is_still_one(message: str) -> None:
    assert found_in(*HEAD, message).class_name == "remote_service_error"


def test_a_wrong_value_without_an_address_is_none() -> None:
    assert found_in(*HEAD, "ValueError: unknown status code 503").class_name == "python_exception"


def test_heartbeats_that_the_program_itself_counts_are_its_own_error() -> None:
    for words in ("missed too many heartbeats", "stopped sending heartbeats"):
        assert found_in(*HEAD, f"RuntimeError: inference server {words}").class_name == "python_exception"
    library = '  File "/opt/lib/python3.11/site-packages/jax/_src/distributed.py", line 52, in step'
    for message in (
        "RuntimeError: task 3 missed too many heartbeats",
        "XlaRuntimeError: task 3 stopped sending heartbeats",
    ):
        assert found_in(HEAD[0], library, message).class_name == "peer_lost"


def test_what_a_library_says_of_another_rank_is_quoted_with_what_stands_around_it() -> None:
    found = found_in(*HEAD, "RuntimeError: NCCL: rank 3 gave up because another rank has failed at step 7")
    assert found.message == (
        "lost another rank, as it says: RuntimeError: NCCL: rank 3 gave up because another rank has failed at step 7"
    )
    long = found_in(*HEAD, f"RuntimeError: {'x ' * 200} MPI: another rank has failed {'y ' * 200}").message
    assert len(long) < 240


def test_plain_words_are_searched_for_only_where_few_lines_have_them() -> None:
    """Of a thousand ranks with two hundred such lines each took seconds."""
    line = "step 7 | lm loss: 2.3 | other processes on the worker: 3 |"
    literals = _BY_ANY_PROGRAM.pattern.literals
    assert literals
    assert not any(literal in line for literal in literals)
    parsed = re._parser.parse(_BY_ANY_PROGRAM.pattern.pattern)  # type: ignore[attr-defined]
    # What all branches begin with stands before them.
    ((_, branches),) = [argument for kind, argument in parsed if str(kind) == "BRANCH"]
    starts = [branch[0] for branch in branches]
    assert len(starts) == 3
    assert not any("REPEAT" in str(kind) for kind, _ in starts)


# --------------------------------------------------------------------------------------------------------------- GPUs

XID = "NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, name=python3, GPU has an error"


def test_a_kernel_log_that_each_rank_of_a_host_prints_blames_none_but_the_owner() -> None:
    gpus = (RankGpu(0, "0000:9b:00.0"), RankGpu(1, "0000:3b:00.0"))
    assert found_in(XID, gpus=gpus).class_name == "python_exit"
    assert found_in(XID).class_name == "python_exit"
    assert found_in(XID, gpus=(RankGpu(1, "0000:9b:00.0"), RankGpu(0, "0000:3b:00.0"))).class_name == (
        "gpu_hardware_error"
    )
