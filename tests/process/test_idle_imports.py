"""What the supervisor imports while ranks run comes from memory: another process has read it, or it is absent."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

from tests.process.launching import customized, in_saferun, printed_by, running

if TYPE_CHECKING:
    from pathlib import Path

# A loop that has code read by forks of this process, as the examiner's children do it.
LOOP = """
import os, sys, time
from saferun.linux.poller import Poller
from saferun.launch.idle_imports import IdleImports
from saferun.linux.helper import NoHelperError
from saferun.linux.held_code import ImportRecorder

def write(content):
    while content:
        content = content[os.write(1, content):]

def read_by_a_fork(names, budget_s):
    asked.append(list(names))
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.dup2(write_end, 1)
        os.closerange(3, 20)
        in_fork(names)
        os._exit(0)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return read_end

def in_fork(names):
    ImportRecorder().write(names, write)

def turn_until(condition):
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at, "it never happened"
        due = imports.deadline
        poller.wait(None if due is None else max(0.0, due - time.monotonic()))
        imports.tick(time.monotonic())

opened = []
def note(event, args):
    # Where there is no memfd_create, its stand-in lies in memory too; /proc is the kernel's own.
    if event in ("open", "os.listdir") and not str(args[0]).startswith(("/dev/shm/saferun-", "/proc/")):
        opened.append(args[0])
sys.addaudithook(note)

asked, said = [], []
poller = Poller()

def make(wanted, ask=read_by_a_fork, reader_runs=lambda: False, hurry=lambda: None):
    return IdleImports(
        "",
        lambda: said.append("imported"),
        poller=poller,
        ask=ask,
        hurry=hurry,
        reader_runs=reader_runs,
        wanted=wanted,
    )
"""


# The process that reads waits until something is written to ``hold_write``.
HELD = """
hold_read, hold_write = os.pipe()
os.dup2(hold_read, 100)
os.set_inheritable(100, True)

def in_fork(names):
    os.read(100, 1)
    ImportRecorder().write(names, write)
"""


def run(program: str) -> str:
    """What a program that has a loop like the supervisor's prints."""
    return printed_by(LOOP + dedent(program))


def test_modules_are_imported_from_memory_and_then_it_is_said() -> None:
    """What cannot be imported does not keep the others from it, and none of it opens a file here."""
    out = run(
        """
        imports = make(["colorsys", "no_such_module", "email.utils", "textwrap"])
        imports.seal()
        imports.begin()
        del opened[:]
        turn_until(lambda: said)
        import colorsys, email.utils
        print(said, opened, colorsys.__name__, colorsys.rgb_to_hsv(1, 1, 1), email.__path__[0].endswith("email"))
        print(email.utils.__file__ == email.__path__[0] + "/utils.py", imports.deadline)
        """
    )
    assert out == "['imported'] [] colorsys (0.0, 0.0, 1) True\nTrue None\n"


def test_what_has_been_imported_is_not_held_as_code_any_longer() -> None:
    """A module keeps its loader, and the code that it was made of would take as much memory as the module."""
    out = run(
        """
        imports = make(["colorsys"])
        imports.seal()
        imports.begin()
        turn_until(lambda: said)
        import colorsys
        held = [value for value in vars(colorsys.__loader__).values() if len(value) > 0]
        print(held, type(colorsys.__loader__).__module__, colorsys.rgb_to_hsv(1, 1, 1))
        """
    )
    assert out == "[] saferun.linux.held_code (0.0, 0.0, 1)\n"


def test_what_needs_them_early_is_called_when_they_are_there() -> None:
    """A rank that fails at once is reported with all that belongs to it."""
    out = run(
        """
        imports = make(["colorsys"])
        imports.need(lambda: said.append("at once: nothing is sealed"))
        imports.seal()
        imports.need(lambda: said.append(f"later: {__import__('colorsys').__name__}"))
        imports.need(lambda: said.append("and the next one"))
        del opened[:]
        before = list(said)
        turn_until(lambda: len(said) == 3)
        imports.need(lambda: said.append("at once: it is there"))
        print(before, said[1:], len(asked), opened)
        """
    )
    assert out == (
        "['at once: nothing is sealed'] ['later: colorsys', 'and the next one', 'at once: it is there'] 1 []\n"
    )


def test_a_module_that_nobody_has_thought_of_is_read_by_another_process_too() -> None:
    """It costs the loop a moment, and still no file is opened."""
    out = run(
        """
        imports = make(["colorsys"])
        imports.seal()
        imports.begin()
        turn_until(lambda: said)
        del opened[:]
        import json.tool
        try:
            import no_such_module
        except ModuleNotFoundError as error:
            print(error)
        print(json.tool.__name__, opened)
        """
    )
    assert out == "no_such_module is not in memory\njson.tool []\n"


def test_a_module_that_comes_too_late_for_the_loop_does_not_cost_the_others() -> None:
    """A slow reader keeps the loop waiting once. Whoever waits for what it reads still gets it."""
    out = run(
        HELD
        + dedent("""
        import saferun.launch.idle_imports as idle
        idle._FETCH_S = 0.1
        imports = make(["colorsys"], reader_runs=lambda: True)
        imports.seal()
        for name in ("json.tool", "json.scanner_of_another_kind"):
            try:
                __import__(name)
            except ImportError as error:
                said.append(str(error))
        imports.need(lambda: said.append(__import__("colorsys").__name__))
        before = len(said)
        os.write(hold_write, bytes(2))
        turn_until(lambda: len(said) > before)
        print(said, asked)
        """)
    )
    assert out == (
        "['json.tool is not in memory', 'json.scanner_of_another_kind is not in memory', 'colorsys']"
        " [['json.tool'], ['colorsys']]\n"
    )


def test_where_nothing_can_be_read_imports_fail_and_nobody_waits_for_ever() -> None:
    """A file system that died while the ranks started. When it answers again, all is as it should be."""
    out = run(
        """
        import saferun.launch.idle_imports as idle
        idle._PATIENCE_S = idle._AGAIN_S = idle._FETCH_S = idle._BUSY_PATIENCE_S = 0.2

        hold_read, hold_write = os.pipe()
        os.dup2(hold_read, 100), os.dup2(hold_write, 101)
        os.set_inheritable(100, True)

        def in_fork(names):
            os.close(101)
            os.read(100, 1)  # what does not answer
            ImportRecorder().write(names, write)

        def call():
            try:
                import colorsys
            except ImportError as error:
                said.append(str(error))

        imports = make(["colorsys"])
        imports.seal()
        imports.need(call)
        del opened[:]
        turn_until(lambda: said)
        imports.need(call)
        os.close(hold_write), os.close(101)
        imports.begin()
        turn_until(lambda: "imported" in said)
        call()
        print(said, opened, "colorsys" in sys.modules)
        """
    )
    assert out == "['colorsys is not in memory', 'colorsys is not in memory', 'imported'] [] True\n"


def test_on_a_busy_machine_the_code_is_waited_for_longer() -> None:
    """Whoever reads it may only wait for a processor. Once that cannot be the reason, nobody waits any longer."""
    out = run(
        HELD
        + dedent("""
        import saferun.launch.idle_imports as idle
        idle._PATIENCE_S = idle._RECHECK_S = 0.1
        looks = []

        def busy():
            looks.append(len(said))
            if len(looks) == 3:
                os.write(hold_write, b"x")  # it gets a processor
            return 99.0

        idle.runnable_per_processor = busy
        def call():
            import colorsys
            said.append("called")

        imports = make(["colorsys"])
        imports.seal()
        imports.need(call)
        turn_until(lambda: said)
        print(said, looks[:3])
        """)
    )
    assert out == "['called'] [0, 0, 0]\n"


def test_a_process_that_reads_and_runs_is_waited_for_longest() -> None:
    """Its processors may be limited where those of the machine are idle; no file keeps it waiting."""
    out = run(
        """
        import saferun.launch.idle_imports as idle
        idle._PATIENCE_S, idle._RECHECK_S, idle._BUSY_PATIENCE_S, idle._RUNNING_PATIENCE_S = 0.1, 0.05, 0.1, 3.0
        idle.runnable_per_processor = lambda: 0.0
        hold_read, hold_write = os.pipe()
        os.set_inheritable(hold_read, True)
        looks = []

        def in_fork(names):
            os.read(hold_read, 1)

        def runs():
            looks.append(time.monotonic() - began)
            return len(said) == 0

        def call():
            try:
                import colorsys
            except ImportError as error:
                said.append(str(error))

        began = time.monotonic()
        imports = make(["colorsys"], reader_runs=runs)
        imports.seal()
        imports.need(call)
        turn_until(lambda: said)
        print(said, len(looks) > 1, looks[0] < 3.0 <= looks[-1])
        os.close(hold_write)
        """
    )
    assert out == "['colorsys is not in memory'] True True\n"


def test_a_machine_that_is_busy_for_ever_is_not_waited_for() -> None:
    out = run(
        """
        import saferun.launch.idle_imports as idle
        idle._PATIENCE_S, idle._RECHECK_S, idle._BUSY_PATIENCE_S = 0.1, 0.05, 0.3
        idle.runnable_per_processor = lambda: 99.0

        def in_fork(names):
            import signal
            signal.pause()

        def call():
            try:
                import colorsys
            except ImportError as error:
                said.append(str(error))

        forked = []
        def ask(names, budget_s):
            read_end, write_end = os.pipe()
            forked.append(os.fork())
            if forked[-1] == 0:
                in_fork(names)
            os.close(write_end)
            os.set_blocking(read_end, False)
            return read_end

        imports = make(["colorsys"], ask)
        imports.seal()
        imports.need(call)
        turn_until(lambda: said)
        print(said)
        for pid in forked:
            os.kill(pid, 9)
        """
    )
    assert out == "['colorsys is not in memory']\n"


def test_a_reader_that_is_killed_is_asked_again() -> None:
    """Half of the code is no code."""
    out = run(
        """
        import saferun.launch.idle_imports
        saferun.launch.idle_imports._AGAIN_S = 0.05

        def in_fork(names):
            if len(asked) == 1:
                ImportRecorder().write(names, lambda content: write(content[: len(content) // 2]))
                os._exit(1)
            ImportRecorder().write(names, write)

        imports = make(["colorsys"])
        imports.begin()
        turn_until(lambda: said)
        print(said, len(asked), "colorsys" in sys.modules)
        """
    )
    assert out == "['imported'] 2 True\n"


def test_where_nobody_can_read_for_it_the_supervisor_reads_itself() -> None:
    """No process can be forked: reports would be missing in every such launch."""
    out = run(
        """
        def nobody(names, budget_s):
            raise NoHelperError("no processes")

        imports = make(["colorsys"], nobody)
        imports.begin()
        turn_until(lambda: said)
        import colorsys, json.tool
        print(said, "HeldModules" in map(lambda finder: type(finder).__name__, sys.meta_path))
        """
    )
    assert out == "['imported'] False\n"


def test_where_every_reader_was_lost_nobody_waits_and_no_file_is_opened() -> None:
    """Whatever ended each of them: a failure is reported without what is missing, and at once."""
    out = run(
        """
        from saferun.linux.helper import NoHelperLeftError

        def none_left(names, budget_s):
            raise NoHelperLeftError("none is left")

        def call():
            try:
                import colorsys
            except ImportError as error:
                said.append(str(error))

        imports = make(["colorsys"], none_left)
        imports.seal()
        del opened[:]
        imports.need(call)
        imports.need(call)
        print(said, opened)
        """
    )
    assert out == "['colorsys is not in memory', 'colorsys is not in memory'] []\n"


def test_where_the_reader_is_lost_nothing_is_read_from_files_meanwhile() -> None:
    """It may have been lost to the very file system from which the supervisor would read."""
    out = run(
        """
        import saferun.launch.idle_imports
        saferun.launch.idle_imports._PATIENCE_S = saferun.launch.idle_imports._AGAIN_S = 0.2
        saferun.launch.idle_imports._BUSY_PATIENCE_S = 0.2
        is_lost = True

        def lost_for_now(names, budget_s):
            if is_lost:
                raise OSError("the examiner does not answer")
            return read_by_a_fork(names, budget_s)

        def call():
            try:
                import colorsys
            except ImportError as error:
                said.append(str(error))

        imports = make(["colorsys"], lost_for_now)
        imports.seal()
        del opened[:]
        imports.need(call)
        turn_until(lambda: said)
        imports.begin()
        is_lost = False
        turn_until(lambda: "imported" in said)
        print(said, opened, "colorsys" in sys.modules)
        """
    )
    assert out == "['colorsys is not in memory', 'imported'] [] True\n"


def test_whoever_reads_is_made_to_hurry_as_soon_as_somebody_waits() -> None:
    """Until then it leaves the processors to the ranks."""
    out = run(
        HELD
        + dedent("""
        imports = make(["colorsys"], hurry=lambda: said.append("hurry"))
        imports.begin()
        before = list(said)
        imports.need(lambda: said.append("needed"))
        os.write(hold_write, b"x")
        turn_until(lambda: "imported" in said)
        imports.need(lambda: said.append("there"))
        print(before, said, len(asked))
        """)
    )
    assert out == "[] ['hurry', 'needed', 'imported', 'there'] 1\n"


def test_what_is_being_read_is_not_asked_for_a_second_time() -> None:
    """The descriptor of the first answer would be ready forever, and nobody's."""
    out = run(
        """
        is_lost = True

        def lost_at_first(names, budget_s):
            if is_lost:
                raise OSError("the examiner does not answer")
            return read_by_a_fork(names, budget_s)

        imports = make(["colorsys"], lost_at_first)
        imports.begin()
        again_at = imports.deadline
        is_lost = False
        imports.need(lambda: said.append("needed"))
        imports.tick(again_at)
        turn_until(lambda: "imported" in said)
        print(said, len(asked), poller._handlers)
        """
    )
    assert out == "['needed', 'imported'] 1 {}\n"


def test_where_files_in_memory_have_no_room_the_code_is_kept_all_the_same() -> None:
    """A limit on the size of files holds for them too, and a memory cgroup may be full: no launch ends by that."""
    out = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        names = ["colorsys", "email.utils", "textwrap"]
        imports = make(names)
        imports.begin()
        del opened[:]
        turn_until(lambda: said)
        print(said, opened, all(name in sys.modules for name in names))
        """
    )
    assert out == "['imported'] [] True\n"


def test_a_fork_imports_from_files() -> None:
    """It may hang: that costs what it was forked for."""
    out = run(
        """
        imports = make([])
        imports.seal()
        imports.close()
        sys.stdout.flush()
        if os.fork() == 0:
            import colorsys
            print("imported", colorsys.__name__, flush=True)
            os._exit(0)
        os.wait()
        try:
            import colorsys
        except ImportError as error:
            print(error)
        """
    )
    assert out == "imported colorsys\ncolorsys is not in memory\n"


def test_shared_libraries_are_loaded_from_memory() -> None:
    """And keep no descriptor. Whether a module of Python's is one depends on how Python was built."""
    out = run(
        """
        import importlib.machinery, importlib.util, os
        names = ("_lsprof", "_crypt", "_curses", "audioop", "_queue", "_uuid", "_bisect", "_xxtestfuzz", "xxlimited")
        def is_library(name):
            spec = None if name in sys.modules else importlib.util.find_spec(name)
            return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
        two = [*filter(is_library, names)][:2]
        imports = make(two)
        imports.begin()
        del opened[:]
        turn_until(lambda: said)
        print([sys.modules[name].__name__ for name in two] == two, [path for path in opened if "lib" in str(path)])
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kept = [os.readlink(link) for link in links if os.path.islink(link)]
        print([path for path in kept if any(name in path for name in two)])
        """
    )
    assert out == "True []\n[]\n"


# Whether a module of Python's is a library depends on how Python was built.
LIBRARY = """
import importlib.machinery, importlib.util
from saferun.linux import memory_file

names = ("_lsprof", "_crypt", "_curses", "audioop", "_queue", "_uuid", "_bisect", "_xxtestfuzz", "xxlimited")
def is_library(name):
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
name = next(filter(is_library, names))

def refuse(*_, **__):
    raise OSError(38, "Function not implemented")
"""


def test_where_no_memory_can_be_executed_libraries_are_loaded_from_their_files() -> None:
    """A container that refuses memfd_create, and whose /dev/shm is mounted noexec: Docker's and Kubernetes' default."""
    out = run(
        LIBRARY
        + """
plain = os.statvfs
class NoExec:
    f_flag = os.ST_NOEXEC
memory_file._memfd = refuse
os.statvfs = lambda path: NoExec if path == "/dev/shm" else plain(path)
create = sys.modules["_imp"].create_dynamic
def from_disk(spec, *more):
    tried.append(spec.origin)
    return create(spec, *more)
tried = []
sys.modules["_imp"].create_dynamic = from_disk
imports = make([name])
imports.begin()
turn_until(lambda: said)
print(name in sys.modules, [path for path in tried if path.startswith("/proc/")])
"""
    )
    assert out == "True []\n"


def test_a_library_that_cannot_be_loaded_from_memory_is_loaded_from_its_file() -> None:
    """Where /proc is not mounted no path leads to a memory file; a security module may refuse to execute one."""
    out = run(
        LIBRARY
        + """
create = sys.modules["_imp"].create_dynamic
def no_proc(spec, *more):
    if spec.origin.startswith("/proc/"):
        raise ImportError("cannot open shared object file", name=spec.name)
    return create(spec, *more)
sys.modules["_imp"].create_dynamic = no_proc
imports = make([name])
imports.begin()
turn_until(lambda: said)
module = sys.modules[name]
print(os.path.isfile(module.__file__), module.__file__ == module.__spec__.origin)
"""
    )
    assert out == "True True\n"


# A message, the time and an action ask for what nobody can read, as long as ranks run.
MISSING = (
    "import sys, saferun.launch.idle_imports as idle\n"
    "    import saferun.launch.orphans as orphans, saferun.launch.preflight_part as checks\n"
    "    idle.IdleImports._request = lambda self: None\n"
    "    idle.IdleImports._fetch = lambda self, name: False\n"
    "    plain_tick, plain_signal = orphans.Orphans.tick, checks.PreflightPart.begin_beside\n"
    "    asked = [0]\n"
    "    def tick(self, now):\n"
    "        asked[0] += 'saferun.linux.held_code' in sys.modules\n"
    "        if asked[0] % 2:\n"
    "            import saferun.never_read_by_time\n"
    "        plain_tick(self, now)\n"
    "    def check_beside(self, plan):\n"
    "        import saferun.never_read_by_a_handler\n"
    "    orphans.Orphans.tick, checks.PreflightPart.begin_beside = tick, check_beside"
)


def test_a_module_that_is_missing_ends_no_launch(tmp_path: Path) -> None:
    """Wherever in the loop it is asked for: one line says so, and what needs it is absent."""
    program = "from rank import *\ntell('ready')\nawait_release('end')"
    environ = customized(tmp_path, in_saferun(MISSING))
    with running(tmp_path / "run", program, nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 0
        assert job.err.count("saferun.never_read_by_time is not in memory: the launch goes on without it\n") == 1
        assert job.err.count("cannot check this host: saferun.never_read_by_a_handler is not in memory: ") == 1
        assert "Traceback" not in job.err
