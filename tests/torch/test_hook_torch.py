"""The hook and the Flight Recorder in real gloo jobs, which are started by hand as saferun starts ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import saferun
from saferun.captures.flight_recorder import capture_flight_recorder
from saferun.captures.wire import CaptureTarget
from saferun.diagnosis.collectives import CollectiveFindings, compare
from saferun.evidence.job_evidence import RankCollectives
from tests.breadth import slow_but

INJECT = Path(saferun.__file__).parent / "inject"
# Sixty processes with torch take a quiet machine of two processors 20 s.
DEADLINE_S = 600.0

SETUP = """
import ctypes, gc, os, sys, time
import torch
import torch.distributed as dist
"""
# One rank needs no port; several meet in a file.
ALONE = SETUP + "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"


def environ_of(folder: Path, rank: int, *, hooked: bool = True) -> dict[str, str]:
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "RANK": str(rank)}
    if hooked:
        environ |= {"PYTHONPATH": str(INJECT), "SAFERUN_HOOK": f"{folder}/a0r{rank}"}
    return environ


def run(code: str, folder: Path, *, hooked: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environ_of(folder, 0, hooked=hooked) | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextlib.contextmanager
def ranks(folder: Path, code: str, number: int = 3) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that run the code after they have met; it finds ``rank`` and ``x``, three ones."""
    meet = f"""
rank = int(os.environ['RANK'])
dist.init_process_group('gloo', init_method='file://{folder}/store', rank=rank, world_size={number})
x = torch.ones(3)
"""
    script = folder / "script.py"
    script.write_text(SETUP + meet + code)
    children = []
    try:
        for rank in range(number):
            with (folder / f"stderr.{rank}").open("w") as stderr:
                child = subprocess.Popen(
                    [sys.executable, str(script)],
                    env=environ_of(folder, rank),
                    cwd=folder,
                    stdout=stderr,
                    stderr=stderr,
                    text=True,
                )
            children.append(child)
        yield children
    finally:
        # All stand still before the first one is ended: otherwise the others complain of its lost connections.
        for child in children:
            child.send_signal(signal.SIGSTOP)
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def capture(folder: Path, children: Sequence[subprocess.Popen[str]], wait_s: float = 5.0) -> list[RankCollectives]:
    captured = []
    for rank, child in enumerate(children):
        target = CaptureTarget(rank, child.pid, f"{folder}/a0r{rank}")
        captured.append(capture_flight_recorder(target, time.monotonic() + wait_s)[0])
    return captured


def await_findings(
    folder: Path, children: Sequence[subprocess.Popen[str]], enough: Callable[[CollectiveFindings], object]
) -> CollectiveFindings:
    """Looks until the ranks are where the test wants them, and then are there still."""
    end = time.monotonic() + DEADLINE_S
    found = CollectiveFindings()
    seen = 0
    while time.monotonic() < end:
        assert all(child.poll() is None for child in children), [p.read_text() for p in folder.glob("stderr.*")]
        found = compare(capture(folder, children), range(len(children)))
        seen = seen + 1 if enough(found) else 0
        if seen > 1:
            return found
        time.sleep(0.2)
    raise AssertionError(found)


def stderr_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("stderr.*"))


# ---------------------------------------------------------------------------------------------------------------- jobs


@pytest.mark.slow
def test_the_rank_that_did_not_call_is_named(tmp_path: Path) -> None:
    code = "for _ in range(4): dist.all_reduce(x)\nif rank == 1: time.sleep(1000)\ndist.all_reduce(x)"
    with ranks(tmp_path, code) as children:
        found = await_findings(tmp_path, children, lambda found: found.missing and len(found.waiting) == 2)
    assert found.lines == (
        "rank 1 has not called collective 5 (all_reduce) of group default_pg that ranks 0, 2 wait in; it is 1 behind",
    )
    assert found.culprits == (1,)
    assert not found.unavailable
    assert stderr_of(tmp_path) == ""


# Importing torch is what takes time: one job is well, then waits for rank 0, and then forever.
IN_TURN = """
small, pair = dist.new_group([0, 2]), dist.new_group([1, 2], group_desc="pair")
several = [torch.ones(3) for _ in range(3)]
dist.barrier()
if rank != 1: dist.all_reduce(x, group=small)
if rank != 0: dist.broadcast(x, 1, group=pair)
dist.all_gather(several, x)
dist.scatter(x, several if rank == 0 else None, 0)
dist.gather(x, several if rank == 0 else None, 0)
dist.all_gather_object([None] * 3, {"rank": "x" * rank})
dist.broadcast_object_list([{"rank": rank}], 0)
dist.all_to_all_single(torch.ones(6), torch.ones(6))
if rank == 0: dist.send(x, 1)
if rank == 1: dist.recv(x, 0)
dist.monitored_barrier()
dist.all_reduce(x)
print(rank, "is there", flush=True)
while not os.path.exists("go on"): time.sleep(0.01)
if rank == 0:
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: None)
    print("it sleeps", flush=True)
    # Until the signal comes.
    ctypes.PyDLL(None).sleep(1000)
dist.barrier()
dist.broadcast(x, 0) if rank == 2 else dist.all_reduce(x)
"""


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CollectiveFindings]:
    """What is found of the job while it is well, while rank 0 stays away, and when it hangs for good."""
    folder = tmp_path_factory.mktemp("job")
    found = {}
    with ranks(folder, IN_TURN) as children:
        found["well"] = await_findings(folder, children, lambda _: stderr_of(folder).count("is there") == 3)
        (folder / "go on").touch()
        found["missing"] = await_findings(
            folder,
            children,
            lambda found: found.missing and len(found.waiting) == 2 and "it sleeps" in stderr_of(folder),
        )

        def is_mismatched(found: CollectiveFindings) -> object:
            # Again and again: the first may come a moment too early.
            children[0].send_signal(signal.SIGUSR1)
            return found.mismatched

        found["mismatched"] = await_findings(folder, children, is_mismatched)
    return found


@pytest.mark.slow
def test_the_rank_that_called_something_else_is_named(in_turn: dict[str, CollectiveFindings]) -> None:
    """By how many called the other."""
    found = in_turn["mismatched"]
    (line,) = found.lines
    assert re.fullmatch(
        r"rank 2 called broadcast of shape \[3\] as collective \d+ of group default_pg "
        r"where ranks 0-1 called all_reduce of shape \[3\]",
        line,
    )
    assert found.culprits == (2,)


def test_a_rank_answers_while_c_code_holds_the_interpreters_lock(in_turn: dict[str, CollectiveFindings]) -> None:
    """The server's threads are torch's own; no Python runs in them."""
    found = in_turn["missing"]
    assert found.culprits == (0,)
    (line,) = found.lines
    assert re.fullmatch(
        r"rank 0 has not called collective \d+ \(barrier\) of group default_pg that ranks 1-2 wait in; it is 1 behind",
        line,
    )


def test_a_job_that_is_well_gives_no_finding(in_turn: dict[str, CollectiveFindings]) -> None:
    """Collectives of all kinds, in several groups, with sizes that rightly differ."""
    found = in_turn["well"]
    assert found.lines == ()
    assert found.waiting == ()
    assert {stand.group: len(stand.progress) for stand in found.groups} == {"default_pg": 3, "1": 2, "pair": 2}


@pytest.mark.slow
def test_the_member_of_a_smaller_group_that_waits_is_told(tmp_path: Path) -> None:
    """Rank 1 is no member of the group, and is not blamed."""
    code = """
small = dist.new_group([0, 2])
dist.all_reduce(x)
if rank == 2: dist.all_reduce(x, group=small)
if rank == 0: dist.all_reduce(x, group=small); time.sleep(1000)
if rank == 2: dist.all_reduce(x, group=small)
time.sleep(1000)
"""
    with ranks(tmp_path, code) as children:
        found = await_findings(tmp_path, children, lambda found: found.missing)
    assert found.lines == (
        "rank 0 has not called collective 2 (all_reduce) of group 1 that rank 2 waits in; it is 1 behind",
    )


# ------------------------------------------------------------------------------------------------------------ one rank


LISTENING = """
import socket
def is_answered(pid):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"{PREFIX}.{pid}.sock")
        link.sendall(b"POST /handler/ping HTTP/1.0\\r\\n\\r\\n")
        return b"pong" in link.recv(1000)
"""


@pytest.mark.slow
def test_the_server_comes_with_the_first_process_group(tmp_path: Path) -> None:
    """Not with the import: until then the process has one thread, and may fork unwarned."""
    code = f"""{SETUP}
PREFIX = "{tmp_path}/a0r0"
{LISTENING}
assert len(os.listdir("/proc/self/task")) == 1 and not os.path.exists(f"{{PREFIX}}.{{os.getpid()}}.sock")
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
assert is_answered(os.getpid())
assert dist.distributed_c10d._register_process_group is torch._C._distributed_c10d._register_process_group
named = f"{{PREFIX}}.{{os.getpid()}}."
sockets = [line.split()[6] for line in open("/proc/net/unix") if named in line and line.split()[3] == "00010000"]
mine = {{named + "stacks", *(f"socket:[{{inode}}]" for inode in sockets)}}
links = [f"/proc/self/fd/{{n}}" for n in os.listdir("/proc/self/fd")]
paths = {{os.path.basename(link): os.readlink(link) for link in links if os.path.islink(link)}}
ours = [n for n, path in paths.items() if path in mine]
flags = [open(f"/proc/self/fdinfo/{{n}}").read().split("flags:")[1].split()[0] for n in ours]
assert len(ours) == 2 and all(int(n) >= 200 for n in ours), paths
assert all(int(flag, 8) & os.O_CLOEXEC for flag in flags), (ours, flags)
os._exit(0)
"""
    ended = run(code, tmp_path)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


@pytest.mark.slow
@pytest.mark.parametrize("level", slow_but(["INFO", "WARNING", "ERROR"], "INFO"))
def test_no_line_of_the_servers_log_reaches_the_script(level: str, tmp_path: Path) -> None:
    """It warns that it listens, that it is destroyed, that it shuts down; and torch's own lines are all kept."""
    code = f"{ALONE}dist.all_reduce(torch.ones(3))\ngc.collect()\ndist.destroy_process_group()"
    hooked, plain = (run(code, tmp_path, hooked=hooked, TORCH_CPP_LOG_LEVEL=level) for hooked in (True, False))
    lines = [{line.partition("]")[0].split()[-1] for line in ended.stderr.splitlines()} for ended in (hooked, plain)]
    assert "WorkerServer" not in hooked.stderr
    assert lines[0] == lines[1]
    assert hooked.returncode == plain.returncode == 0
    assert list(tmp_path.glob("*.sock"))


ENDS = {
    "return": "gc.collect(); dist.destroy_process_group()",
    "sys.exit": "gc.collect(); dist.destroy_process_group(); sys.exit(3)",
    "exception": "gc.collect(); dist.destroy_process_group(); raise ValueError('mine')",
    "_exit": "os._exit(4)",
    "signal": "os.kill(os.getpid(), 15)",
    "forked": "pid = os.fork(); pid or os._exit(5); os.waitpid(pid, 0); gc.collect(); dist.destroy_process_group()",
}
ENDED = {"return": 0, "sys.exit": 3 << 8, "exception": 1 << 8, "_exit": 4 << 8, "signal": 15, "forked": 0}


@pytest.mark.slow
def test_what_a_program_puts_in_place_of_torchs_registration_stays(tmp_path: Path) -> None:
    """A vendor's plugin sees each of its process groups."""
    code = f"""{SETUP}
import torch.distributed.distributed_c10d as c10d
before, seen = c10d._register_process_group, []
def register(*arguments, **named):
    seen.append(1)
    return before(*arguments, **named)
c10d._register_process_group = register
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
print(len(seen), c10d._register_process_group is register, flush=True)
os._exit(0)
"""
    plain, hooked = run(code, tmp_path, hooked=False), run(code, tmp_path)
    assert (hooked.stdout, hooked.returncode) == (plain.stdout, 0)
    assert hooked.stdout.endswith("True\n")


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["-v 8000000", "-d 8000000"])
def test_a_limit_on_memory_costs_the_server_alone(limit: str, tmp_path: Path) -> None:
    """Each of the server's threads takes a stack; one that is refused would end the rank."""
    (tmp_path / "alone.py").write_text(f"{ALONE}print('fine', flush=True)\nos._exit(0)\n")
    shell = f"ulimit -s 1000000 {limit}; exec {sys.executable} alone.py"
    environ = environ_of(tmp_path, 0)
    ended = subprocess.run(
        ["bash", "-c", shell],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("fine\n", 0)
    assert [path.is_socket() for path in tmp_path.glob("*.sock")] == [False], "a mark in its place"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_process_ends_as_ever_in_six_ways(times: int, tmp_path: Path) -> None:
    """Every child has a server of its own, and Python's and torch's whole clean-up runs over it."""
    code = f"""{SETUP}
own = ""
for _ in range({times}):
    ways = {{}}
    for way, end in {ENDS!r}.items():
        pid = os.fork()
        if not pid:
            own = end
            break
        ways[pid] = way
    if own:
        break
    for pid, way in ways.items():
        print(way, os.waitpid(pid, 0)[1], flush=True)
if own:
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    assert os.path.exists(f"{tmp_path}/a0r0.{{os.getpid()}}.sock")
    exec(own)
"""
    ended = run(code, tmp_path)
    assert ended.returncode == 0
    assert set(ended.stdout.splitlines()) == {f"{way} {status}" for way, status in ENDED.items()}
    assert len(ended.stdout.splitlines()) == 6 * times
    assert "WorkerServer" not in ended.stderr
    assert ended.stderr.count("ValueError: mine") == times
    assert "sitecustomize" not in ended.stderr


@pytest.mark.slow
def test_an_exec_gives_the_name_free(tmp_path: Path) -> None:
    """The number stays the same, and the next program finds the old program's socket there."""
    code = f"{ALONE}print(os.path.exists(f'{tmp_path}/a0r0.{{os.getpid()}}.sock'), flush=True)\n"
    again = f"os.environ |= dict(PYTHONPATH={str(INJECT)!r}, SAFERUN_HOOK='{tmp_path}/a0r0')\n"
    again += f"os.execv(sys.executable, [sys.executable, '-c', {code + 'os._exit(0)'!r}])"
    ended = run(code + again, tmp_path)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True\nTrue\n", "", 0)


@pytest.mark.slow
@pytest.mark.parametrize("length", slow_but([200, 60], "200"))
def test_a_path_that_is_too_long_costs_the_server_alone(length: int, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    too_long = len(f"{folder}/a0r0.12345.sock") > 107
    ended = run(f"{ALONE}dist.all_reduce(torch.ones(3))\nprint('fine')\nsys.stdout.flush()\nos._exit(0)", folder)
    assert (ended.stdout, ended.stderr) == ("fine\n", "")
    assert [path.suffix for path in sorted(folder.iterdir())] == ([".stacks"] if too_long else [".sock", ".stacks"])


@pytest.mark.slow
def test_spawned_and_forked_workers_of_a_loader_are_as_ever(tmp_path: Path) -> None:
    code = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    for way in ("fork", "spawn"):
        loader = DataLoader(list(range(8)), num_workers=2, batch_size=2, multiprocessing_context=way)
        print(sum(int(batch.sum()) for batch in loader))
    gc.collect()
    dist.destroy_process_group()
"""
    script = tmp_path / "script.py"
    script.write_text(SETUP + code)
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environ_of(tmp_path, 0),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("28\n28\n", "", 0)


@pytest.mark.parametrize("who", slow_but(["torch", "a socket"], "a socket"))
def test_what_a_dead_process_left_refuses_at_once(tmp_path: Path, who: str) -> None:
    """Nobody tidies up after a SIGKILL; the number may be somebody else's by then."""
    path = tmp_path / f"a0r0.{os.getpid()}.sock"
    if who == "torch":
        ended = run(f"{ALONE}print(os.getpid(), flush=True)\nos.kill(os.getpid(), 9)", tmp_path)
        (tmp_path / f"a0r0.{int(ended.stdout)}.sock").rename(path)
    else:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
            left.listen()
    # Whoever waited for an answer would wait forever.
    never = time.monotonic() + 100_000.0
    captured, content = capture_flight_recorder(CaptureTarget(0, os.getpid(), f"{tmp_path}/a0r0"), never)
    assert (captured.failure, content) == ("its socket cannot be used: Connection refused", b"")
