"""What ``--trace-calls`` loads into a rank: a record that outlives the process, and that the script never notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun.captures.call_rings import RINGS_BYTES, SIZE_BYTES
from saferun.captures.last_calls import read_calls
from saferun.inject import saferun_calls
from tests.process.launching import state_of, until
from tests.unit.inject.test_hook import INJECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from saferun.evidence.call_evidence import RankCalls, ThreadCalls

DEADLINE_S = 60.0
SEVERAL = (
    pytest.param("calls", id="calls"),
    pytest.param("lines", id="lines"),
)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory for the record, as the hook has it."""
    folder = Path(f"/dev/shm/saferun-test-{os.getpid()}-{tmp_path.name}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def environ_of(memory: Path, wanted: Sequence[str], *, what: str = "calls") -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(INJECT),
        "SAFERUN_HOOK": str(memory / "a0r0"),
        "SAFERUN_TRACE": "\n".join((what, *wanted)),
    }


def start(
    tmp_path: Path, memory: Path, source: str, *, wanted: Sequence[str] = (), what: str = "calls"
) -> subprocess.Popen[str]:
    """A script that records the calls of its own directory."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environ_of(memory, wanted or [str(tmp_path)], what=what),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def run(
    tmp_path: Path, memory: Path, source: str, *, wanted: Sequence[str] = (), what: str = "calls", code: int = 0
) -> tuple[str, RankCalls]:
    """What such a script prints, and what it has recorded when it has ended."""
    with start(tmp_path, memory, source, wanted=wanted, what=what) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (code, "")
    return out, recorded(memory, process.pid)


def recorded(memory: Path, pid: int) -> RankCalls:
    calls = read_calls(0, pid, str(memory / "a0r0"), ended_at=time.monotonic())[0]
    assert calls.failure == ""
    return calls


def main_of(calls: RankCalls) -> ThreadCalls:
    assert calls.main is not None
    return calls.main


def steps(calls: RankCalls, thread: ThreadCalls) -> list[str]:
    """Such as ``call step``, ``return step``."""
    names = [calls.function(event) for event in thread.events]
    return [
        f"{event.kind} {name.name if name is not None else '?'}" + (f":{event.line}" if event.line else "")
        for event, name in zip(thread.events, names, strict=True)
    ]


READY = "import ctypes, os, signal, sys, threading, time\n"


# ----------------------------------------------------------------------------------------------------- it outlives them


def ended_by(tmp_path: Path, memory: Path, end: str, signum: int) -> list[str]:
    source = f"{READY}def step():\n    {end}\ndef outer():\n    step()\nouter()\n"
    out, calls = run(tmp_path, memory, source, code=-signum)
    assert out == ""
    return steps(calls, main_of(calls))


def test_the_record_outlives_sigkill(tmp_path: Path, memory: Path) -> None:
    """The out-of-memory killer asks nobody."""
    found = ended_by(tmp_path, memory, "os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL)
    assert found == ["call <module>", "call outer", "call step"]


def test_the_record_outlives_a_crash_in_c(tmp_path: Path, memory: Path) -> None:
    """Nothing has to be flushed."""
    found = ended_by(tmp_path, memory, "ctypes.string_at(0)", signal.SIGSEGV)
    assert found == ["call <module>", "call outer", "call step"]


def test_a_process_that_holds_the_gil_in_c_is_read_without_its_help(tmp_path: Path, memory: Path) -> None:
    """No Python code runs in it any more, and no signal handler of Python's."""
    source = f"{READY}def step():\n    print('ready', flush=True)\n    ctypes.PyDLL(None).sleep(1000)\nstep()\n"
    with start(tmp_path, memory, source) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            until(lambda: state_of(process.pid) == "S", "it sleeps")
            (calls,) = read_calls(0, process.pid, str(memory / "a0r0"))
            assert steps(calls, main_of(calls)) == ["call <module>", "call step"]
        finally:
            process.kill()


# ----------------------------------------------------------------------------------------------------- what it records


@pytest.mark.parametrize("what", SEVERAL)
def test_generators_exceptions_and_recursion_are_calls_and_ends(tmp_path: Path, memory: Path, what: str) -> None:
    """A generator returns with each value, and is called for the next one."""
    source = """
    def numbers():
        yield 1
    def bad():
        raise ValueError
    def down(n):
        return n and down(n - 1)
    def step():
        list(numbers())
        try:
            bad()
        except ValueError:
            pass
        down(2)
    step()
    """
    _, calls = run(tmp_path, memory, source, what=what)
    main = main_of(calls)
    found = [step for step in steps(calls, main) if not step.startswith("line")]
    left = "raise bad" if sys.version_info >= (3, 12) else "return bad"
    assert found == [
        *("call <module>", "call step", "call numbers", "return numbers", "call numbers", "return numbers"),
        *("call bad", left, *["call down"] * 3, *["return down"] * 3, "return step", "return <module>"),
    ]
    assert main.total == len(found)
    lines = [step for step in steps(calls, main) if step.startswith("line")]
    assert ("line step:13" in lines) == (what == "lines")
    assert bool(lines) == (what == "lines")


def test_each_thread_has_a_ring_of_its_own(tmp_path: Path, memory: Path) -> None:
    """And many threads, one after the other, take the places of those that are gone."""
    source = f"""{READY}
def work(name):
    if name == "last":
        print("ready", flush=True)
        time.sleep(1000)
for number in range(200):
    thread = threading.Thread(target=work, args=(number,))
    thread.start()
    thread.join()
threading.Thread(target=work, args=("last",), daemon=True).start()
time.sleep(1000)
"""
    with start(tmp_path, memory, source) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            tasks = f"/proc/{process.pid}/task"
            # A thread that was joined may live for a moment longer in the kernel.
            until(lambda: len(os.listdir(tasks)) == 2, "the main thread and the last one are left")
            (calls,) = read_calls(0, process.pid, str(memory / "a0r0"))
            living = {int(name) for name in os.listdir(tasks)}
        finally:
            process.kill()
    threads = {thread.tid: steps(calls, thread) for thread in calls.threads}
    assert calls.note == ""
    assert threads[process.pid] == ["call <module>"]
    (other,) = living - {process.pid}
    assert threads[other] == ["call work"]
    gone = [found for tid, found in threads.items() if tid not in living]
    assert gone
    assert all(found == ["call work", "return work"] for found in gone)


def test_more_threads_at_a_time_than_there_are_rings_are_counted(tmp_path: Path, memory: Path) -> None:
    """Their calls are lost, and that is said."""
    source = f"""{READY}
barrier = threading.Barrier(81)
def work():
    barrier.wait()
for _ in range(80):
    threading.Thread(target=work).start()
barrier.wait()
"""
    _, calls = run(tmp_path, memory, source)
    assert calls.note == "17 threads had no room"


def test_only_the_newest_events_are_kept(tmp_path: Path, memory: Path) -> None:
    """The number of all of them is known."""
    source = "def step(n): pass\nfor number in range(1000): step(number)\n"
    _, calls = run(tmp_path, memory, source)
    main = main_of(calls)
    assert (main.total, len(main.events)) == (2002, 255)
    assert [event.before_s for event in main.events] == sorted((one.before_s for one in main.events), reverse=True)


def test_a_forked_child_leaves_its_parents_record_alone(tmp_path: Path, memory: Path) -> None:
    """It shares the mapping."""
    source = f"""{READY}
def step(): pass
step()
if os.fork() == 0:
    for _ in range(1000): step()
    os._exit(0)
os.wait()
step()
print(sys.getprofile())
"""
    out, calls = run(tmp_path, memory, source)
    assert steps(calls, main_of(calls)) == ["call <module>", *["call step", "return step"] * 2, "return <module>"]
    assert ("profile" in out) == (sys.version_info < (3, 12))


def test_packages_are_chosen_by_name(tmp_path: Path, memory: Path) -> None:
    """And others are not recorded, wherever they are."""
    for name in ("mine", "other"):
        (tmp_path / f"{name}.py").write_text("def step(): pass\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "__init__.py").write_text("")
    (tmp_path / "deep" / "er.py").write_text("def step(): pass\n")
    source = "import mine, other, deep.er, json\nfor one in (mine, other, deep.er): one.step()\njson.dumps([])\n"
    _, calls = run(tmp_path, memory, source, wanted=["mine", "deep"])
    assert {Path(function.file).name for function in calls.functions} == {"mine.py", "__init__.py", "er.py"}
    _, calls = run(tmp_path, memory, source, wanted=["train"])
    assert {Path(function.file).name for function in calls.functions} == {"train.py"}


def test_names_that_find_no_room_end_nothing(tmp_path: Path, memory: Path) -> None:
    """A script may make functions without end."""
    source = """
    name = "f" * 150
    for number in range(5000):
        names = {}
        exec(compile(f"def {name}{number}(): pass", __file__, "exec"), {"__name__": "__main__"}, names)
        names[f"{name}{number}"]()
    print("done")
    """
    out, calls = run(tmp_path, memory, source)
    assert out == "done\n"
    assert calls.threads


# ----------------------------------------------------------------------------------------------------- never noticed

LOOK = """
import os, sys, threading, traceback
def fail():
    import no_such_module
try:
    fail()
except ImportError as error:
    print(traceback.format_exception(error))
print(sorted(name for name in os.environ), sys.path, sorted(sys.modules), threading.active_count())
print(sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 200), os.open("/dev/null", os.O_RDONLY))
print(len(os.listdir("/proc/self/task")), sys.gettrace(), sys.excepthook is sys.__excepthook__)
"""


@pytest.mark.parametrize("what", ["calls"])
def test_a_script_finds_what_it_always_had(tmp_path: Path, memory: Path, what: str) -> None:
    """Modules, descriptors, environment, tracebacks; on Python 3.11 only the profile function can be seen."""
    out, _ = run(tmp_path, memory, LOOK, what=what)
    environ = {"PATH": os.environ["PATH"]}
    command = [sys.executable, str(tmp_path / "train.py")]
    plain = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out == plain.stdout


@pytest.mark.parametrize(
    "spoil",
    [
        "no_directory",
        "not_a_directory",
        "no_room",
        "broken",
        "missing",
    ],
)
def test_a_script_runs_where_nothing_can_be_recorded(tmp_path: Path, memory: Path, spoil: str) -> None:
    """Without a word."""
    script = tmp_path / "train.py"
    script.write_text("def step(): print('done')\nstep()\n")
    environ = environ_of(memory, [str(tmp_path)])
    command = [sys.executable, str(script)]
    if spoil == "no_directory":
        environ["SAFERUN_HOOK"] = str(memory / "nowhere" / "a0r0")
    elif spoil == "not_a_directory":
        environ["SAFERUN_HOOK"] = "/dev/null/a0r0"
    elif spoil == "no_room":
        command = ["sh", "-c", f"ulimit -f 10; exec {sys.executable} {script}"]
    else:
        copy = tmp_path / "hook"
        copy.mkdir()
        for name in ("sitecustomize.py", "saferun_hook.py"):
            (copy / name).write_text((INJECT / name).read_text())
        if spoil == "broken":
            (copy / "saferun_calls.py").write_text("def begin(")
        environ["PYTHONPATH"] = str(copy)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not list(memory.glob("*.calls"))


def test_a_script_goes_on_where_the_file_is_deleted(tmp_path: Path, memory: Path) -> None:
    """A cleaner of temporary directories may do that."""
    source = f"""
    import os
    def step(): pass
    os.unlink({str(memory)!r} + f"/a0r0.{{os.getpid()}}.calls")
    for _ in range(1000): step()
    print("done")
    """
    with start(tmp_path, memory, source) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (0, "done\n", "")
    assert read_calls(0, process.pid, str(memory / "a0r0")) == []


def test_what_a_signal_handler_raises_reaches_the_script(tmp_path: Path, memory: Path) -> None:
    """The handler may run while a call is recorded, and what it raises is not a mistake of the record."""
    source = f"""{READY}
class Alarm(Exception): pass
def on_alarm(*_): raise Alarm
def step(): pass
signal.signal(signal.SIGALRM, on_alarm)
seen = 0
while seen < 20:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        while True: step()
    except Alarm:
        seen += 1
print(seen)
"""
    out, _ = run(tmp_path, memory, source)
    assert out == "20\n"


def test_a_recursion_without_end_ends_as_it_does_without_the_record(tmp_path: Path, memory: Path) -> None:
    """Python 3.11 drops a profile function that is called at the limit, and that is said."""
    source = """
    def down(n): return down(n + 1)
    try:
        down(0)
    except RecursionError as error:
        print(error)
    """
    out, calls = run(tmp_path, memory, source)
    assert out.startswith("maximum recursion depth exceeded")
    assert ("recursion limit" in calls.note) == (sys.version_info < (3, 12))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="newer Pythons have tools beside each other")
def test_a_profiler_of_the_script_takes_the_place_of_the_record(tmp_path: Path, memory: Path) -> None:
    """There is one profile function; the record steps aside, and says so."""
    source = """
    import cProfile
    def step(): pass
    profiler = cProfile.Profile()
    profiler.enable()
    step()
    profiler.disable()
    print(sum(entry.callcount for entry in profiler.getstats() if "step" in str(entry.code)))
    """
    out, calls = run(tmp_path, memory, source)
    assert out == "1\n"
    assert "has taken over the hook for calls" in calls.note


@pytest.mark.parametrize("what", SEVERAL)
def test_trace_functions_of_the_script_work(tmp_path: Path, memory: Path, what: str) -> None:
    """Debuggers and coverage use them."""
    source = """
    import sys
    seen = []
    def trace(frame, event, argument):
        seen.append(event)
        return trace
    def step(): return 1
    sys.settrace(trace)
    step()
    sys.settrace(None)
    print(seen)
    """
    out, _ = run(tmp_path, memory, source, what=what)
    assert out == "['call', 'line', 'return']\n"


def test_the_file_has_its_full_size_from_the_start(tmp_path: Path, memory: Path) -> None:
    """A page that is missing when it is written to would kill the rank."""
    run(tmp_path, memory, "pass\n")
    (path,) = memory.glob("*.calls")
    status = path.stat()
    assert (status.st_size, status.st_blocks * 512, status.st_mode & 0o777) == (SIZE_BYTES, SIZE_BYTES, 0o600)
    assert (saferun_calls._RINGS, saferun_calls._SIZE) == (RINGS_BYTES, SIZE_BYTES)
    assert SIZE_BYTES < 400 << 10
