"""What a rank failed of, told by what it said, how it ended, its core and the kernel."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import RULES, Role, cause_of, role_of
from saferun.diagnosis.causes.failure import Rule, read_failure
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import CoreDump, Evidence, Frame, OomKill, RankOutput, ThreadStack
from saferun.model import ExitStatus, RankEnd

RECORDED = Path(__file__).parent / "recorded_failures"
PID = 4001


class Recorded(NamedTuple):
    """What a real program said at its end, and what is to be made of it."""

    class_name: str
    status: ExitStatus
    words: str
    place: str
    kernel_lines: tuple[str, ...]
    lines: tuple[str, ...]


def recorded(name: str) -> Recorded:
    head, _, stderr = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("--- stderr\n")
    fields: dict[str, list[str]] = {}
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        fields.setdefault(key.removesuffix(":"), []).append(value)
    kind, number = fields["status"][0].split()
    status = ExitStatus(int(number), None) if kind == "code" else ExitStatus(None, int(number))
    lines = tuple(line.rstrip() for line in stderr.splitlines() if line.strip())
    return Recorded(
        fields["class"][0], status, fields["words"][0], fields["place"][0], tuple(fields.get("kernel", ())), lines
    )


def evidence_of(
    status: ExitStatus,
    lines: tuple[str, ...] = (),
    *,
    core: CoreDump | None = None,
    oom: OomKill | None = None,
    kernel_lines: tuple[str, ...] = (),
    stdout: tuple[str, ...] = (),
    error_message: str = "",
) -> Evidence:
    return Evidence(
        "node1",
        90.0,
        (RankEnd(1, 1, PID, status, 100.0, 1.7e9, stopped_by_us=False),),
        (RankOutput(1, lines, "", error_message, 0.0, stdout),),
        (),
        None,
        ranks=(0, 1),
        cores=(core,) if core is not None else (),
        oom=oom,
        kernel_lines=kernel_lines,
        supervisor_pid=77,
        script="train.py",
        cwd="/home/user/job",
    )


def found_in(evidence: Evidence) -> Cause:
    output = evidence.outputs[0] if evidence.outputs else None
    return cause_of(read_failure(evidence, evidence.ends[0], output))


def diagnosed(evidence: Evidence) -> Diagnosis:
    return diagnose(evidence)


def core_of(*frames: Frame, signum: int = 11, sender_pid: int = 0, other: tuple[Frame, ...] = ()) -> CoreDump:
    threads = [ThreadStack("crashed", 7, is_main=not other, active=True, owns_gil=False, frames=frames)]
    if other:
        threads.append(ThreadStack("MainThread", PID, is_main=True, active=False, owns_gil=True, frames=other))
    return CoreDump(1, PID, signum, "/run/core.4001", 1 << 20, True, "pystack", tuple(threads), sender_pid)


def native(function: str, file: str = "/opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so") -> Frame:
    return Frame(function, file, 0, native=True)


USER = Frame("step", "/home/user/job/train.py", 52)
LIBRARY = Frame("forward", "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125)
SEGV = ExitStatus(None, 11)


def name_of(rule: Rule) -> str:
    return str(getattr(rule, "__name__", rule))


# ------------------------------------------------------------------------------------------------- recorded evidence


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.txt")))
def test_what_real_programs_said_is_understood(name: str) -> None:
    """Words of torch, NCCL, CUDA, HIP, glibc, Slurm, Python; ``near_miss``: words that must not be believed."""
    sample = recorded(name)
    cause = found_in(evidence_of(sample.status, sample.lines, kernel_lines=sample.kernel_lines))
    assert cause.class_name == sample.class_name
    assert sample.words in cause.message
    assert cause.location == sample.place
    assert cause.advice or cause.class_name in {"python_exit", "python_exception"}  # the message says it
    assert "\n" not in cause.message + cause.proof + cause.advice


def test_an_option_of_the_launcher_behind_the_script_is_recognised() -> None:
    sample = recorded("bad_option_of_saferun")
    cause = found_in(evidence_of(sample.status, sample.lines))
    assert cause.advice == "--nproc_per_node is an option of saferun: write it before the script's name"
    sample = recorded("bad_option")
    assert found_in(evidence_of(sample.status, sample.lines)).advice == "check the arguments after the script's name"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.txt")))
def test_a_proof_is_a_line_that_somebody_wrote(name: str) -> None:
    """Nothing is made up."""
    sample = recorded(name)
    cause = found_in(evidence_of(sample.status, sample.lines, kernel_lines=sample.kernel_lines))
    proof = cause.proof.removesuffix("…")
    assert any(proof in line for line in (*sample.lines, *sample.kernel_lines)) or not proof


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_rule_has_recorded_evidence(rule: Rule) -> None:
    """A rule that nothing fires is none. Those that need a core or a signal alone have tests of their own."""
    if name_of(rule) in {"sent_by_another_process", "broken_pipe"}:
        return
    samples = [recorded(path.stem) for path in RECORDED.glob("*.txt")]
    fired = 0
    for sample in samples:
        evidence = evidence_of(sample.status, sample.lines, kernel_lines=sample.kernel_lines)
        fired += rule(read_failure(evidence, evidence.ends[0], evidence.outputs[0])) is not None
    assert fired


def test_the_coloured_and_prefixed_words_are_the_same_words() -> None:
    """Loggers paint what they write, and torch puts the rank before it."""
    sample = recorded("cuda_out_of_memory")
    painted = tuple(f"\x1b[31m{line}\x1b[0m" for line in sample.lines)
    assert (
        found_in(evidence_of(sample.status, painted)).message
        == found_in(evidence_of(sample.status, sample.lines)).message
    )


def test_what_an_error_file_says_counts_where_stderr_says_nothing() -> None:
    """A rank under @record whose stderr went elsewhere."""
    cause = found_in(evidence_of(ExitStatus(1, None), error_message="RuntimeError: CUDA error: invalid device ordinal"))
    assert cause.class_name == "missing_gpu"
    cause = found_in(evidence_of(ExitStatus(1, None), error_message="KeyError: 'labels'"))
    assert (cause.class_name, cause.message) == ("python_exception", "KeyError: 'labels'")


def test_several_calls_of_torchs_detail_mode_name_both_ranks() -> None:
    """Neither of the two is more wrong than the other."""
    sample = recorded("gloo_detail_mismatch")
    assert found_in(evidence_of(sample.status, sample.lines)).ranks == (0, 1)


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    """The rank that says so is the one that waited."""
    sample = recorded("monitored_barrier")
    assert found_in(evidence_of(sample.status, sample.lines)).ranks == (1,)


def test_ranks_that_share_a_gpu_are_told_so() -> None:
    """A smaller batch would not help them."""
    alone, shared = recorded("cuda_out_of_memory"), recorded("cuda_out_of_memory_shared_gpu")
    assert "LOCAL_RANK" not in found_in(evidence_of(alone.status, alone.lines)).advice
    assert "LOCAL_RANK" in found_in(evidence_of(shared.status, shared.lines)).advice


def test_a_store_that_was_reached_under_one_kind_of_address_is_not_nameless() -> None:
    """A host with IPv4 alone has no IPv6 address: torch says so each time, and goes on."""
    sample = recorded("store_name_unknown")
    address = "(no-such-host.invalid, 29512)"
    unresolved = (
        f"[W1121 11:42:24.03 socket.cpp:764] [c10d] The IPv6 network addresses of {address} cannot be retrieved"
    )
    unresolved += " (gai error: -2 - Name or service not known)."
    refused = "[W1121 11:42:24.04 socket.cpp:697] [c10d] The client socket has failed to connect to [node1]:29512 for"
    refused += f" {address} (errno: 111 - Connection refused)."
    end = sample.lines[-4:]
    assert found_in(evidence_of(sample.status, (unresolved, refused, *end))).class_name == "rendezvous_store_failure"
    assert found_in(evidence_of(sample.status, (unresolved, *end))).class_name == "name_unknown"


def test_a_name_is_told_where_the_message_has_it() -> None:
    """It is the name that is to be mended."""
    message = "ConnectionError: HTTPSConnectionPool(host='data.example', port=443): Max retries exceeded (Caused by "
    message += (
        "NameResolutionError(\"Failed to resolve 'data.example' ([Errno -3] Temporary failure in name resolution)\"))"
    )
    cause = found_in(evidence_of(ExitStatus(1, None), error_message=message))
    assert (cause.class_name, cause.message) == ("name_resolution", "the name service did not answer: data.example")


# -------------------------------------------------------------------------------------------------------------- cores


def test_a_core_names_the_native_call_and_the_line_that_called_it() -> None:
    """``exit code -11`` helps nobody."""
    core = core_of(
        native("void at::native::add_kernel<float>(at::TensorIteratorBase&, c10::Scalar const&)"), LIBRARY, USER
    )
    found = diagnosed(evidence_of(ExitStatus(None, 11, core_dumped=True), core=core))
    assert found.cause is not None
    assert found.cause.message == "segmentation fault in at::native::add_kernel (libtorch_cpu.so)"
    assert found.cause.location == "train.py:52 in step"
    assert found.core is core
    assert found.headline == (
        "rank 1 (node1, local rank 1, pid 4001) failed first, 10.0 s after the start: segmentation fault in "
        "at::native::add_kernel (libtorch_cpu.so), called from train.py:52 in step; killed by SIGSEGV (core dumped)"
    )


def test_the_machinery_of_an_abort_is_not_where_it_happened() -> None:
    """Every abort goes through raise and abort."""
    libc = "/lib/x86_64-linux-gnu/libc.so.6"
    frames = [native(name, libc) for name in ("__pthread_kill_implementation", "raise", "abort")]
    frames += [native("std::terminate()", "/lib/libstdc++.so.6"), native("image_decode", "/opt/libdecode.so"), USER]
    cause = found_in(evidence_of(ExitStatus(None, 6), core=core_of(*frames, signum=6)))
    assert cause.message == "abort in image_decode (libdecode.so)"


def test_a_core_of_c_calls_alone_is_completed_by_faulthandler() -> None:
    """The debugger knows the native calls, Python's own report the line."""
    lines = recorded("segmentation_fault").lines
    cause = found_in(evidence_of(SEGV, lines, core=core_of(native("string_at_impl", "/usr/lib/_ctypes.so"))))
    assert cause.message == "segmentation fault in string_at_impl (_ctypes.so)"
    assert cause.location == "train.py:40 in step"


def test_a_crash_in_a_thread_without_python_tells_where_the_main_thread_was() -> None:
    """It is all that leads to the user's code."""
    core = core_of(native("prefetch_loop"), other=(LIBRARY, USER))
    found = diagnosed(evidence_of(SEGV, core=core))
    assert "segmentation fault in prefetch_loop" in found.headline
    assert "with the main thread at train.py:52 in step" in found.headline


def test_a_copy_to_a_bad_address_names_who_made_it() -> None:
    """The C library's copy is where most crashes end, and nobody's fault."""
    libc = "/lib/x86_64-linux-gnu/libc.so.6"
    core = core_of(native("__memmove_avx_unaligned_erms", libc), native("at::native::copy_impl(at::Tensor&)"), USER)
    words = found_in(evidence_of(SEGV, core=core)).message
    assert words == "segmentation fault in memmove, called by at::native::copy_impl (libtorch_cpu.so)"
    alone = core_of(native("__strlen_evex", libc), USER)
    assert found_in(evidence_of(SEGV, core=alone)).message == "segmentation fault in strlen"


def test_an_abort_that_python_was_asked_for_is_not_in_the_interpreter() -> None:
    """The line of the script says it better."""
    libc = "/lib/x86_64-linux-gnu/libc.so.6"
    frames = (native("raise", libc), native("abort", libc), native("cfunction_vectorcall", "/usr/lib/libpython3.11.so"))
    cause = found_in(evidence_of(ExitStatus(None, 6), core=core_of(*frames, USER, signum=6)))
    assert cause.message == "abort"


def test_a_core_without_names_says_nothing_wrong() -> None:
    """Stripped libraries give addresses."""
    cause = found_in(evidence_of(SEGV, core=core_of(native("0x00007f5be77fe6c0"), native("??"))))
    assert cause.message == "segmentation fault"


def test_a_core_of_another_process_is_not_the_ranks() -> None:
    """A data-loader worker's core lies beside it."""
    core = core_of(native("decode"))._replace(pid=5555)
    found = diagnosed(evidence_of(SEGV, core=core))
    assert found.core is None
    assert found.cause is not None
    assert found.cause.message == "segmentation fault"


@pytest.mark.parametrize(("sender", "who"), [(1234, "pid 1234"), (4000, "rank 0 (pid 4000)")])
def test_a_crash_signal_that_another_process_sent_is_no_crash(sender: int, who: str) -> None:
    """The core knows who it was."""
    evidence = evidence_of(ExitStatus(None, 6), core=core_of(USER, signum=6, sender_pid=sender))
    evidence = evidence._replace(
        ends=(*evidence.ends, RankEnd(0, 0, 4000, ExitStatus(0, None), 101.0, 1.7e9, stopped_by_us=False))
    )
    cause = found_in(evidence)
    assert (cause.class_name, cause.message) == ("killed_from_outside", f"SIGABRT sent by {who}")


@pytest.mark.parametrize("sender", [0, PID, 77])
def test_signals_of_its_own_of_the_kernels_and_of_ours_are_not_from_outside(sender: int) -> None:
    """abort() sends the signal to itself."""
    cause = found_in(evidence_of(ExitStatus(None, 6), core=core_of(USER, signum=6, sender_pid=sender)))
    assert cause.class_name == "abort"


# --------------------------------------------------------------------------------------------------------- OOM killer

GIB = 1 << 30


def test_the_oom_killer_is_named_with_its_limit() -> None:
    """A killed process cannot say why."""
    oom = OomKill("cgroup", 64 * GIB, 61 * GIB, (PID,), 1, "/sys/fs/cgroup/job/memory.events")
    cause = found_in(evidence_of(ExitStatus(None, 9), oom=oom))
    assert cause.class_name == "host_oom_kill"
    assert cause.message == "killed by the kernel's OOM killer (cgroup limit 64 GiB, it used 61 GiB)"
    assert cause.proof == "/sys/fs/cgroup/job/memory.events"


@pytest.mark.parametrize(
    ("oom", "class_name"),
    [
        (OomKill("cgroup", 64 * GIB, 0, (), 1, ""), "host_oom_kill"),
        # In a container the kernel log has other numbers than the processes themselves.
        (OomKill("cgroup", 64 * GIB, 0, (991,), 1, ""), "host_oom_kill"),
        (OomKill("host", 0, 0, (), 1, ""), "host_oom_kill"),
        (OomKill("host", 0, 0, (999,), 1, ""), "killed_from_outside"),
        (OomKill("cgroup", 64 * GIB, 0, (), 0, ""), "killed_from_outside"),
    ],
)
def test_the_oom_killer_is_blamed_where_it_was_at_work(oom: OomKill, class_name: str) -> None:
    """Not for every SIGKILL while memory was short somewhere."""
    assert found_in(evidence_of(ExitStatus(None, 9), oom=oom)).class_name == class_name


def test_a_crash_is_no_oom_kill_however_many_there_were() -> None:
    """The OOM killer sends SIGKILL and nothing else."""
    oom = OomKill("cgroup", 64 * GIB, 0, (), 5, "")
    assert found_in(evidence_of(SEGV, oom=oom)).class_name == "segmentation_fault"


def test_a_loader_worker_that_the_oom_killer_took_is_told_as_such() -> None:
    """Workers are killed as often as ranks, and the rank says only ``Killed``."""
    sample = recorded("loader_worker_killed")
    oom = OomKill("host", 0, 0, (17847,), 1, "dmesg")
    cause = found_in(evidence_of(sample.status, sample.lines, oom=oom))
    assert cause.class_name == "host_oom_kill"
    assert "its data-loader worker 17847 was killed by the kernel's OOM killer" in cause.message


# -------------------------------------------------------------------------------------------------------- other signals


@pytest.mark.parametrize(
    ("signum", "class_name"),
    [
        (signal.SIGHUP, "killed_from_outside"),
        (signal.SIGINT, "killed_from_outside"),
        (signal.SIGUSR1, "killed_from_outside"),
        (signal.SIGXCPU, "killed_from_outside"),
        (signal.SIGPIPE, "broken_pipe"),
        (signal.SIGBUS, "bus_error"),
        (signal.SIGSYS, "killed_from_outside"),
        (34, "unknown"),
    ],
)
def test_signals_without_a_word(signum: int, class_name: str) -> None:
    """What the signal itself says."""
    cause = found_in(evidence_of(ExitStatus(None, int(signum))))
    assert cause.class_name == class_name
    assert cause.message


def test_no_output_at_all_is_no_obstacle() -> None:
    """Its output may have gone to files of its own."""
    evidence = evidence_of(SEGV)._replace(outputs=())
    assert found_in(evidence).class_name == "segmentation_fault"


def test_victims_and_timeouts_weigh_less_than_what_a_rank_brings_about_alone() -> None:
    """The order in which the root is looked for."""
    by_name = {name: found_in(evidence_of(recorded(name).status, recorded(name).lines)) for name in NAMED}
    assert {name: role_of(cause) for name, cause in by_name.items()} == NAMED


NAMED = {
    "key_error": Role.CULPRIT,
    "killed": Role.CULPRIT,
    "exit_code_3": Role.CULPRIT,
    "nccl_timeout": Role.TIMEOUT,
    "gloo_timeout": Role.TIMEOUT,
    "store_clients_missing": Role.TIMEOUT,
    "connection_reset_in_python": Role.TIMEOUT,
    "gloo_peer_closed": Role.VICTIM,
    "gloo_peer_reset": Role.VICTIM,
    "nccl_remote_error": Role.VICTIM,
    "nccl_communicator_aborted": Role.VICTIM,
    "store_gone": Role.VICTIM,
}


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        ("EOFError", "connection_lost"),  # multiprocessing.connection: the other process has ended
        ("EOFError: EOF when reading a line", "python_exception"),
        ("EOFError: Ran out of input", "python_exception"),
        ("EOFError: Compressed file ended before the end-of-stream marker was reached", "python_exception"),
    ],
)
def test_the_end_of_a_file_is_no_lost_connection(message: str, class_name: str) -> None:
    """A rank that may not read from the keyboard is no victim of another."""
    lines = ("Traceback (most recent call last):", '  File "/home/user/train.py", line 3, in <module>', message)
    cause = found_in(evidence_of(ExitStatus(1, None), lines))
    assert (cause.class_name, cause.message) == (class_name, message)
    assert ("connected to" in cause.advice) == (class_name == "connection_lost")


BROKEN_PIPE = "BrokenPipeError: [Errno 32] Broken pipe"
PIPES = {
    "a program's input": (
        ('  File "/home/user/train.py", line 9, in step', "    viewer.stdin.write(frame)"),
        Role.CULPRIT,
    ),
    "its marks": (
        ('  File "/home/user/train.py", line 9, in step', "    viewer.stdin.flush()", "    ^^^^^^^^^^^^^^^^^^^^"),
        Role.CULPRIT,
    ),
    "communicate": (
        (
            '  File "/home/user/train.py", line 9, in step',
            "    subprocess.run(command, input=text)",
            '  File "/usr/lib/python3.11/subprocess.py", line 2095, in _communicate',
            "    input_view[self._input_offset : self._input_offset + _PIPE_BUF])",
        ),
        Role.CULPRIT,
    ),
    "a socket": (('  File "/home/user/train.py", line 9, in step', "    peer.sendall(gradients)"), Role.TIMEOUT),
    "no source": (('  File "/home/user/train.py", line 9, in step',), Role.TIMEOUT),
    "torch's store": (
        (
            '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/rpc.py", line 9, in send',
            "    self.stdin.write(message)",
        ),
        Role.TIMEOUT,
    ),
}


@pytest.mark.parametrize("what", PIPES)
def test_a_pipe_to_a_process_of_its_own_is_no_connection_to_another_rank(what: str) -> None:
    """The cause is this rank's then: no other rank gets time to show one."""
    call, role = PIPES[what]
    lines = ("Traceback (most recent call last):", *call, BROKEN_PIPE)
    cause = found_in(evidence_of(ExitStatus(1, None), lines))
    assert role_of(cause) is role
    assert cause.class_name == ("python_exception" if role is Role.CULPRIT else "connection_lost")
    assert "process" in cause.advice or role is Role.TIMEOUT


SHAPES = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "RuntimeError: shape '[2, 3]' is invalid for input of size 7",
    "RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1",
    "RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 3 but got size 4",
    "ValueError: operands could not be broadcast together with shapes (2,) (3,)",
)


@pytest.mark.parametrize("message", SHAPES)
def test_the_advice_on_shapes_is_about_shapes(message: str) -> None:
    lines = ("Traceback (most recent call last):", '  File "/home/user/train.py", line 3, in <module>', message)
    cause = found_in(evidence_of(ExitStatus(1, None), lines))
    assert cause.class_name == "python_exception"
    assert "shapes" in cause.advice


def test_a_process_of_the_rank_that_was_killed_may_have_been_the_oom_killers() -> None:
    """Nothing else says so: the rank itself only reports the signal."""
    raised = "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL"
    lines = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 6, in step', raised)
    cause = found_in(evidence_of(ExitStatus(1, None), lines))
    assert cause.class_name == "worker_failed"
    assert cause.advice.startswith("check dmesg for the OOM killer; ")


def test_why_a_process_failed_counts_more_than_that_its_launcher_reports_it() -> None:
    """``make``, ``mpirun`` and ``time`` have the last word, and know nothing."""
    lines = ("cp: error writing '/data/x': No space left on device", "make: *** [Makefile:3: data] Error 1")
    assert found_in(evidence_of(ExitStatus(2, None), lines)).class_name == "disk_full"


def test_a_task_that_crashed_is_the_cause_of_what_the_scheduler_cancelled_for_it() -> None:
    cancelled = "slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-11-25T20:22:22 ***"
    found = found_in(evidence_of(ExitStatus(1, None), ("srun: error: node1: task 3: Bus error", cancelled)))
    assert found.class_name == "worker_failed"
    assert found_in(evidence_of(ExitStatus(1, None), (cancelled,))).class_name == "killed_from_outside"
    ended_with_it = (cancelled, "srun: error: node1: task 3: Segmentation fault")
    assert found_in(evidence_of(ExitStatus(1, None), ended_with_it)).class_name == "killed_from_outside"
