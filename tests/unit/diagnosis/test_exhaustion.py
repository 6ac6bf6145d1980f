"""What a host has run out of, and what only sounds like it: locks, sockets, memory of a GPU, objects that are gone."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd

HEAD = "Traceback (most recent call last):"
DIRECT = "The above exception was the direct cause of the following exception:"
STANDARD = "/usr/lib/python3.11"
BUSY = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
UNCONNECTED = "OSError: [Errno 107] Transport endpoint is not connected"


def at(source: str, file: str = "/home/user/job/train.py", function: str = "step") -> tuple[str, ...]:
    """A frame of a traceback, with the lines of the source that it quotes."""
    return (f'  File "{file}", line 52, in {function}', *(f"    {line}" for line in source.splitlines()))


def found_in(*lines: str, code: int = 1) -> Cause:
    end = RankEnd(1, 1, 4001, ExitStatus(code, None), 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, lines, "", "", 0.0)
    evidence = Evidence(
        "node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job"
    )
    return cause_of(read_failure(evidence, end, output))


# ---------------------------------------------------------------------------------------------------- calls that block


@pytest.mark.parametrize(
    "call",
    [
        at("fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        at("fcntl.flock(\n    lock, fcntl.LOCK_EX | fcntl.LOCK_NB\n)\n^^^^^^^^^^^^"),
        at("fcntl.lockf(self.fd, flags)"),
        at("data = os.read(pipe, 4096)"),
        at("os.write(self._wakeup, b'1')"),
        at("sock.recv(4)"),
        at("data = self._sock.recv_into(buffer)"),
        at("conn, _ = listener.accept()"),
        (*at("acquire(lock)"), *at("fcntl.flock(handle, flags)", "/venv/site-packages/portalocker/portalocker.py")),
        at("", f"{STANDARD}/socket.py", "readinto"),
    ],
    ids=lambda call: call[-1].strip()[:40],
)
def test_a_call_that_would_have_to_wait_is_no_limit_of_processes(call: tuple[str, ...]) -> None:
    """The system has one number for both."""
    found = found_in(HEAD, *call, BUSY)
    assert (found.class_name, found.message) == ("python_exception", BUSY)
    assert found.advice.startswith("the call would have to wait: another process holds the lock")


def test_a_lock_that_led_to_an_exception_of_a_library_is_none_either() -> None:
    call = at("fcntl.flock(handle, flags)")
    raised = (HEAD, *at("raise AlreadyLocked(exc)"), "portalocker.exceptions.AlreadyLocked: locked")
    assert found_in(HEAD, *call, BUSY, DIRECT, *raised).class_name == "python_exception"


@pytest.mark.parametrize(
    "call",
    [
        at("self.pid = os.fork()", f"{STANDARD}/multiprocessing/popen_fork.py", "_launch"),
        at("self.pid = _fork_exec(", f"{STANDARD}/subprocess.py", "_execute_child"),
        at("", f"{STANDARD}/subprocess.py", "_execute_child"),
        at("proc = subprocess.Popen(['read_data', 'write('])"),
        at("pid = os.posix_spawn(path, argv, env)"),
        at("threading.Thread(target=read).start()"),
        at("pool.imap(spread(files))"),
        at("loss.backward()"),
    ],
    ids=lambda call: call[-1].strip()[:40],
)
def test_a_process_that_is_refused_is_a_limit_of_processes(call: tuple[str, ...]) -> None:
    assert found_in(HEAD, *call, BUSY).class_name == "process_limit"


def test_a_process_that_is_refused_below_an_exception_is_one_too() -> None:
    call = at("self.pid = os.fork()", f"{STANDARD}/multiprocessing/popen_fork.py", "_launch")
    raised = (HEAD, *at("raise RuntimeError('no workers') from exc"), "RuntimeError: no workers")
    assert found_in(HEAD, *call, BUSY, DIRECT, *raised).class_name == "process_limit"


# -------------------------------------------------------------------------------------------------------- file systems


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (at("sock.shutdown(2)"), UNCONNECTED),
        (at("self.conn.shutdown(socket.SHUT_RDWR)"), UNCONNECTED),
        (at("peer = conn.getpeername()"), UNCONNECTED),
        (at("self._sock.shutdown(how)", f"{STANDARD}/asyncio/selector_events.py", "write_eof"), UNCONNECTED),
        (at("return self._sslobj.unwrap()", f"{STANDARD}/ssl.py", "unwrap"), UNCONNECTED),
        (at("server.connect(address)"), "OSError: [Errno 112] Host is down"),
        (at("s.setsockopt(SOL_SOCKET, SO_BINDTODEVICE, name)"), "OSError: [Errno 19] No such device"),
        (at("sock.setsockopt(level, 15, 1)"), "OSError: [Errno 95] Operation not supported"),
        (at("sock.sendall(data)"), "OSError: [Errno 108] Cannot send after transport endpoint shutdown"),
    ],
    ids=lambda value: str(value[-1]).strip()[:40] if isinstance(value, tuple) else value[9:18],
)
def test_a_socket_that_fails_is_no_file_system(call: tuple[str, ...], message: str) -> None:
    found = found_in(HEAD, *call, message)
    assert (found.class_name, found.message) == ("python_exception", message)


def test_a_socket_that_fails_while_an_exception_is_handled_is_none_either() -> None:
    context = "During handling of the above exception, another exception occurred:"
    raised = (HEAD, *at("raise TrainingError"), "train.TrainingError: step 7 failed")
    assert found_in(HEAD, *at("sock.shutdown(2)"), UNCONNECTED, context, *raised).class_name == "python_exception"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (at("data = file.read()"), UNCONNECTED),
        (at("for name in os.listdir(self.socket_directory):"), f"{UNCONNECTED}: '/mnt/bucket/data'"),
        (at("os.stat(path)"), "OSError: [Errno 112] Host is down: '/mnt/share'"),
        (at("fcntl.flock(file, fcntl.LOCK_EX)"), "OSError: [Errno 95] Operation not supported"),
        (at("os.sendfile(out, source, 0, 4096)"), "OSError: [Errno 5] Input/output error"),
        (at("sock_file = open(path)"), "OSError: [Errno 30] Read-only file system: '/run/job.sock'"),
        (at("loss.backward()"), UNCONNECTED),
        (at("self.socket_file.write(b)"), "OSError: [Errno 5] Input/output error"),
    ],
    ids=lambda value: str(value[-1]).strip()[:40] if isinstance(value, tuple) else value[9:18],
)
def test_a_file_system_that_fails_is_found_as_before(call: tuple[str, ...], message: str) -> None:
    assert found_in(HEAD, *call, message).class_name == "file_system_error"


# ------------------------------------------------------------------------------------------------------- shared memory

OBJECT = "RuntimeError: unable to open shared memory object </torch_30997_2076642173> in read-write mode"


def test_an_object_in_shared_memory_that_is_gone_does_not_mean_that_it_is_full() -> None:
    """More room would change nothing."""
    found = found_in(HEAD, *at("batch = next(loader)"), f"{OBJECT}: No such file or directory (2)")
    assert found.class_name == "file_missing"
    assert found.message.startswith("an object in shared memory is gone")
    assert "--shm-size" not in found.advice
    assert "RemoveIPC" in found.advice


def test_nor_does_one_that_may_not_be_opened() -> None:
    found = found_in(HEAD, *at("batch = next(loader)"), f"{OBJECT}: Permission denied (13)")
    assert found.class_name == "python_exception"


@pytest.mark.parametrize(
    ("reason", "class_name"),
    [
        ("", "shared_memory_exhausted"),
        (": No space left on device (28)", "shared_memory_exhausted"),
        (": Too many open files (24)", "too_many_open_files"),
    ],
)
def test_why_an_object_in_shared_memory_cannot_be_opened_counts(reason: str, class_name: str) -> None:
    assert found_in(HEAD, *at("batch = next(loader)"), f"{OBJECT}{reason}").class_name == class_name


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: Not enough memory in the GPU for the KV pool",
        "RuntimeError: Insufficient memory on cuda:0 for the optimizer",
        "RuntimeError: Failed to allocate 1073741824 bytes from the symmetric heap",
        "RuntimeError: unable to allocate 64 GiB of HBM",
        "RuntimeError: ran out of memory on device 3",
        "RuntimeError: out of symmetric memory: unable to allocate 512 MiB",
    ],
)
def test_memory_of_a_gpu_is_none_of_the_host(message: str) -> None:
    """Fewer workers of a data loader give a GPU nothing."""
    found = found_in(HEAD, *at("pool.init()"), message)
    assert found.class_name in {"python_exception", "cuda_out_of_memory"}
    assert "workers" not in found.advice


def test_a_gpu_that_is_named_has_none_left() -> None:
    """Where it is only mentioned, nothing is said."""
    for message in ("Not enough memory in the GPU for the KV pool", "Insufficient memory on cuda:0 for the optimizer"):
        assert found_in(HEAD, *at("pool.init()"), f"ValueError: {message}").class_name == "cuda_out_of_memory"
    message = "RuntimeError: unable to allocate 64 GiB of pinned memory for the GPU"
    assert found_in(HEAD, *at("pool.init()"), message).class_name == "python_exception"


def test_what_a_symmetric_heap_needs_is_told() -> None:
    message = "RuntimeError: Failed to allocate 1073741824 bytes from the symmetric heap"
    assert "NVSHMEM_SYMMETRIC_SIZE" in found_in(HEAD, *at("pool.init()"), message).advice


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Not enough memory to hold the data set",
        "RuntimeError: Not enough host memory to offload what the GPU does not hold",
        "RuntimeError: not enough RAM for the cache of cuda:0",
        "RuntimeError: unable to allocate 64 GiB",
        "OSError: Insufficient memory",
        "ValueError: Not enough memory to load the model on device cpu",
        "ray.exceptions.OutOfMemoryError: Task on a GPU was killed due to the node running low on memory.",
    ],
)
def test_memory_of_the_host_is_found_as_before(message: str) -> None:
    assert found_in(HEAD, *at("pool.init()"), message).class_name == "host_out_of_memory"


# ------------------------------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            at("sl = self._semlock = _multiprocessing.SemLock(", f"{STANDARD}/multiprocessing/synchronize.py"),
            "OSError: [Errno 28] No space left on device",
        ),
        (
            at("self._fd = _posixshmem.shm_open(", f"{STANDARD}/multiprocessing/shared_memory.py"),
            "OSError: [Errno 28] No space left on device: '/psm_97c77d62'",
        ),
    ],
)
def test_no_room_for_a_semaphore_is_no_full_disk(call: tuple[str, ...], message: str) -> None:
    """The C library makes semaphores and shared memory in /dev/shm, and its error has no path that says so."""
    assert found_in(HEAD, *at("lock = ctx.Lock()"), *call, message).class_name == "shared_memory_exhausted"


def test_no_room_for_a_file_is_a_full_disk_also_below_a_lock() -> None:
    lines = (HEAD, *at("with lock:", f"{STANDARD}/multiprocessing/synchronize.py"), *at("torch.save(state, path)"))
    assert found_in(*lines, "OSError: [Errno 28] No space left on device").class_name == "disk_full"


NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2028, unhandled system error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "Last error:",
    "Error while creating shared memory segment /dev/shm/nccl-c8G2vd (size 5767520)",
)


def test_shared_memory_that_nccl_may_not_use_is_not_full() -> None:
    """Older releases of NCCL say why in the warning above the one that their exception quotes."""
    denied = "node1:12:34 [0] include/shm.h:48 NCCL WARN Call to shm_open failed : Permission denied"
    found = found_in(denied, HEAD, *at("dist.barrier()"), *NCCL_ERROR)
    assert (found.class_name, "permission denied" in found.message) == ("nccl_system_error", True)
    assert "ls -ld /dev/shm" in found.advice
    assert found_in(HEAD, *at("dist.barrier()"), *NCCL_ERROR).class_name == "shared_memory_exhausted"
