"""The hook in the ranks: what it offers, and that nobody notices it."""

from __future__ import annotations

import ast
import glob
import importlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import saferun

INJECT = Path(saferun.__file__).parent / "inject"
STACKS_SIGNAL = 63
DEADLINE_S = 30.0

# Everything of an interpreter at its start that a script can ask for. The finder that watches for torch is taken out.
PICTURE = r"""
import sys
finders = [finder for finder in sys.meta_path if type(finder).__name__ != "_TorchWatcher"]
modules = sorted(sys.modules)
caches = sorted(sys.path_importer_cache)
import os, signal, threading, traceback, warnings
def failure():
    import no_such_module
try:
    failure()
except ImportError as error:
    told = traceback.format_exception(error)
from_outside = {"SAFERUN_HOOK", "LC_CTYPE"}
print(modules, caches, finders, sys.path, sys.path_hooks, warnings.filters, sys.warnoptions, sys.flags, sep="\n")
print(sorted((name, value) for name, value in os.environ.items() if name not in from_outside))
print([signal.getsignal(number) for number in range(1, 65)])
print([line for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigBlk"))])
print(sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 200))
print([thread.name for thread in threading.enumerate()], len(os.listdir("/proc/self/task")))
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile())
print("".join(told))
import faulthandler
print(faulthandler.is_enabled(), sorted(dir(faulthandler)))
"""


def environ_of(prefix: Path | None, **variables: str) -> dict[str, str]:
    """A plain environment; with a prefix, as saferun changes it."""
    environ = {"PATH": os.environ["PATH"], **variables}
    if prefix is not None:
        rest = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{INJECT}:{rest}" if rest else str(INJECT)
        if not rest:
            environ["SAFERUN_PYTHONPATH"] = "unset" if rest is None else "empty"
        environ["SAFERUN_HOOK"] = str(prefix)
    return environ


def run(
    arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **more,
    )


def hooked_and_plain(arguments: Sequence[str], folder: Path, **variables: str) -> tuple[str, str]:
    """What an interpreter prints, and how it ends, with the hook and without."""
    told = []
    for prefix in (folder / "a0r0", None):
        ended = run(arguments, environ_of(prefix, **variables), folder)
        told.append(re.sub(r"0x[0-9a-f]+", "0x", f"{ended.stdout}\n{ended.stderr}\n{ended.returncode}"))
    return told[0], told[1]


def stacks_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("a0r0.*.stacks"))


# -------------------------------------------------------------------------------------------------------------- unseen


@pytest.mark.parametrize(
    "options",
    [(), ("-P",), ("-W", "error"), ("-X", "dev"), ("-X", "warn_default_encoding"), ("-O",)],
    ids=lambda options: " ".join(options) or "plain",
)
def test_a_script_finds_the_interpreter_that_it_always_had(options: Sequence[str], tmp_path: Path) -> None:
    """Modules, paths, warnings, environment, descriptors, threads, handlers, tracebacks: the hook changes none."""
    script = tmp_path / "script.py"
    script.write_text(PICTURE)
    hooked, plain = hooked_and_plain([*options, str(script)], tmp_path)
    assert hooked == plain
    assert plain.endswith("\n0")
    assert stacks_files(tmp_path)


@pytest.mark.parametrize("way", ["-m", "-c", "directory"])
def test_however_the_program_is_started(way: str, tmp_path: Path) -> None:
    """Python sets sys.path differently for each."""
    (tmp_path / "__main__.py").write_text(PICTURE)
    (tmp_path / "program.py").write_text(PICTURE)
    arguments = {"-m": ["-m", "program"], "-c": ["-c", PICTURE], "directory": [str(tmp_path)]}[way]
    hooked, plain = hooked_and_plain(arguments, tmp_path)
    assert hooked == plain
    assert plain.endswith("\n0")


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_where_python_is_told_to_start_bare_the_hook_is_inert(option: str, tmp_path: Path) -> None:
    told = run([option, "-c", "import sys; print(sorted(sys.modules))"], environ_of(tmp_path / "a0r0"))
    plain = run([option, "-c", "import sys; print(sorted(sys.modules))"], environ_of(None))
    assert (told.stdout, told.stderr, told.returncode) == (plain.stdout, plain.stderr, 0)
    assert not stacks_files(tmp_path)


@pytest.mark.parametrize("value", [None, "", "/user", "/user:/more", "/user::/more"])
def test_the_script_gets_its_pythonpath_back(value: str | None, tmp_path: Path) -> None:
    """What it starts shall find what it would find under torchrun."""
    variables = {} if value is None else {"PYTHONPATH": value}
    code = (
        "import os, sys; print(os.environ.get('PYTHONPATH'), sys.path); os.system('echo ${PYTHONPATH-unset}')\n"
        "print([name for name in os.environ if 'SAFERUN' in name and name != 'SAFERUN_HOOK'])"
    )
    hooked, plain = hooked_and_plain(["-c", code], tmp_path, **variables)
    assert hooked == plain


@pytest.mark.parametrize("value", [None, "", "/user"])
@pytest.mark.parametrize("added", ["/x:$PYTHONPATH", "$PYTHONPATH:/x", "/x"])
def test_a_shell_script_may_add_to_the_path(value: str | None, added: str, tmp_path: Path) -> None:
    """An empty rest of it is the current directory, as in ``export PYTHONPATH=/x:$PYTHONPATH`` where there was none."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import os, sys; print(os.environ['PYTHONPATH'], sys.path)")
    variables = {} if value is None else {"PYTHONPATH": value}
    ends = []
    for prefix in (tmp_path / "a0r0", None):
        done = subprocess.run(
            ["/bin/sh", "-c", f"export PYTHONPATH={added}; exec {sys.executable} sub/train.py"],
            env=environ_of(prefix, **variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        ends.append((done.stdout, done.stderr))
    assert ends[0] == ends[1]


def test_a_wrapper_may_have_put_its_own_path_before_ours(tmp_path: Path) -> None:
    environ = environ_of(tmp_path / "a0r0", PYTHONPATH="/user")
    environ["PYTHONPATH"] = f"/wrapper:{environ['PYTHONPATH']}"
    told = run(["-c", "import os, sys; print(os.environ['PYTHONPATH'], sys.path[1:3])"], environ)
    assert told.stdout == "/wrapper:/user ['/wrapper', '/user']\n"


def test_without_its_variable_the_hook_only_gives_way(tmp_path: Path) -> None:
    """A directory that somebody left on PYTHONPATH must not shadow anything."""
    (tmp_path / "sitecustomize.py").write_text("print('the real one')")
    environ = environ_of(tmp_path / "a0r0", PYTHONPATH=str(tmp_path))
    del environ["SAFERUN_HOOK"]
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"
    plain = run(["-c", code], environ_of(None, PYTHONPATH=str(tmp_path)))
    told = run(["-c", code], environ)
    assert (told.stdout, told.stderr) == (plain.stdout, "")
    assert told.stdout.startswith("the real one\n")
    assert not stacks_files(tmp_path)


@pytest.mark.parametrize(
    "prefix", ["/no/such/directory/a0r0", "relative/a0r0", "/proc/a0r0", "/" + "x" * 5000, "\x01/a", ""]
)
def test_a_useless_prefix_is_passed_over_without_a_word(prefix: str, tmp_path: Path) -> None:
    environ = environ_of(tmp_path / "a0r0")
    environ["SAFERUN_HOOK"] = prefix
    told = run(["-c", "print('fine')"], environ, tmp_path)
    assert (told.stdout, told.stderr, told.returncode) == ("fine\n", "", 0)


# ------------------------------------------------------------------------------------------------------------ the next


@pytest.mark.parametrize(
    "content",
    [
        "import sys\nsys.from_the_real_one = __name__, __file__, sorted(globals())\nimport decimal",
        "1 / 0",
        "import no_such_module",
        "raise ImportError('odd', name='sitecustomize')",
        "this is no Python",
        "import sys\ndel sys.modules['sitecustomize']",
    ],
)
def test_the_sitecustomize_that_ours_hides_runs_as_if_alone(content: str, tmp_path: Path) -> None:
    """With its name, its file, its failures reported in Python's own words, and its consequences."""
    (tmp_path / "sitecustomize.py").write_text(content)
    code = """if True:
        import sys
        module = sys.modules.get("sitecustomize")
        print(getattr(sys, "from_the_real_one", None), module and (module.__file__, module.__spec__))
        print(sorted(sys.modules))
    """
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    hooked, plain = hooked_and_plain(["-c", code], tmp_path, **variables)
    assert hooked == plain
    assert stacks_files(tmp_path)


def test_one_that_ends_the_start_ends_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)")
    hooked, plain = (
        run(["-c", ""], environ_of(prefix, PYTHONPATH=str(tmp_path))) for prefix in (tmp_path / "a0r0", None)
    )
    assert hooked.returncode == plain.returncode != 0
    assert hooked.stderr.endswith("SystemExit: 3\n")


def test_where_there_is_no_other_the_name_is_free(tmp_path: Path) -> None:
    """Importing it fails as it does without the hook, and a script may have a module of that name."""
    told = run(["-c", "import sitecustomize"], environ_of(tmp_path / "a0r0"))
    assert "ModuleNotFoundError: No module named 'sitecustomize'" in told.stderr
    (tmp_path / "sitecustomize.py").write_text("print('the user')")
    told = run(["-c", "import sitecustomize"], environ_of(tmp_path / "a0r0"), tmp_path)
    assert (told.stdout, told.stderr) == ("the user\n", "")


def test_only_what_is_there_already_is_imported() -> None:
    """Every other module would show in sys.modules; even ``from __future__`` would."""
    tree = ast.parse((INJECT / "sitecustomize.py").read_text() + (INJECT / "saferun_hook.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"os", "sys", "faulthandler", "atexit"}
    for_types = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    ]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in for_types]
    assert {"faulthandler", "atexit"} <= set(sys.builtin_module_names)


@pytest.mark.parametrize("name", ["sitecustomize", "saferun_hook", "launcher_hook"])
def test_older_pythons_can_read_it(name: str) -> None:
    """One that cannot complains at each start, and leaves out the user's own: RHEL 8's system Python is 3.6."""
    ast.parse((INJECT / f"{name}.py").read_text(), feature_version=(3, 6))


def test_what_python_imports_first_has_no_syntax_of_python_3() -> None:
    """A shell script that is a rank may start any Python."""
    tree = ast.parse((INJECT / "sitecustomize.py").read_text())
    new = (ast.JoinedStr, ast.AnnAssign, ast.Nonlocal, ast.NamedExpr, ast.Starred, ast.AsyncFunctionDef, ast.Await)
    assert not [node for node in ast.walk(tree) if isinstance(node, new)]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        arguments = function.args
        assert function.returns is None
        assert not arguments.kwonlyargs
        assert not [one for one in arguments.args if one.annotation is not None]


OLD_PYTHONS = [
    path
    for version in ("2.7", "3.5", "3.6", "3.7")
    for path in glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
]


@pytest.mark.skipif(not OLD_PYTHONS, reason="there is no old Python here")
@pytest.mark.parametrize("has_own", [True, False])
def test_an_old_python_runs_the_site_s_own_and_complains_of_nothing(tmp_path: Path, *, has_own: bool) -> None:
    site = tmp_path / "site"
    site.mkdir()
    if has_own:
        (site / "sitecustomize.py").write_text("import sys\nsys.from_the_real_one = __name__\n")
    hook = tmp_path / "hook"
    hook.mkdir()
    for path in INJECT.glob("*.py"):  # Python 2 leaves what it compiles beside the file
        (hook / path.name).write_bytes(path.read_bytes())
    code = """if True:
        import os, sys
        print(getattr(sys, "from_the_real_one", None))
        print(sorted(name for name in sys.modules if "custom" in name or "saferun" in name))
        print([name for name in os.environ if "SAFERUN" in name], os.environ["PYTHONPATH"], "%s" in sys.path)
    """
    for python in OLD_PYTHONS:
        environ = environ_of(tmp_path / "a0r0", PYTHONPATH=str(site))
        environ["PYTHONPATH"] = environ["PYTHONPATH"].replace(str(INJECT), str(hook))
        told = subprocess.run(
            [python, "-c", code % hook], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        wanted = ("sitecustomize", "['sitecustomize']") if has_own else ("None", "[]")
        lines = told.stdout.splitlines()
        assert (lines[0], lines[1], told.stderr) == (*wanted, ""), python
        # What Python 2 prints of several values has brackets around it.
        assert f"{site}" in lines[2], python
        assert "SAFERUN" not in lines[2], python
        assert str(hook) not in lines[2], python


OTHER_PYTHONS = [
    path
    for version in ("3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
    for path in glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
]


@pytest.mark.skipif(not OTHER_PYTHONS, reason="there is no other Python here")
def test_every_python_ends_well(tmp_path: Path) -> None:
    """With what it has compiled before as well. 3.8 and 3.9 call a module at their end that they do not keep alive."""
    hook = tmp_path / "hook"
    shutil.copytree(INJECT, hook, ignore=shutil.ignore_patterns("__pycache__"))
    environ = environ_of(tmp_path / "a0r0")
    environ["PYTHONPATH"] = environ["PYTHONPATH"].replace(str(INJECT), str(hook))
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for python in OTHER_PYTHONS:
        for _ in range(5):
            done = subprocess.run(
                [python, "-c", "import threading"],
                env=environ,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, ""), python


# -------------------------------------------------------------------------------------------------------------- stacks


def ask_for_stacks(child: subprocess.Popen[str], pid: int, path: Path, wanted: str) -> str:
    """Sends the signal until the stack shows the function: the child is on its way there."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert child.poll() is None
        os.kill(pid, STACKS_SIGNAL)
        text = path.read_text()
        if wanted in text:
            return text
        time.sleep(0.01)
    raise AssertionError(f"{wanted!r} never came")


@pytest.mark.parametrize(
    "wait",
    ["import time; time.sleep(60)", "import ctypes\n    while True: ctypes.PyDLL(None).sleep(60)", "while True: pass"],
    ids=["sleep", "holding the lock", "spinning"],
)
def test_a_signal_has_the_stacks_written_wherever_the_process_is(wait: str, tmp_path: Path) -> None:
    """No ptrace, no cooperation of the interpreter; also where C code holds its lock."""
    code = f"def stuck_here():\n    {wait}\nprint('ready', flush=True)\nstuck_here()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ_of(tmp_path / "a0r0"), stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            text = ask_for_stacks(child, child.pid, tmp_path / f"a0r0.{child.pid}.stacks", "in stuck_here")
            assert "most recent call first" in text
        finally:
            child.kill()


def test_a_forked_child_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    """Data-loader workers are forked: they inherit the handler, and would write into their parent's file."""
    code = """if True:
        import os, signal, time
        def in_the_child():
            time.sleep(60)
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            in_the_child()
        os.waitpid(child, 0)
    """
    environ = environ_of(tmp_path / "a0r0")
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            ask_for_stacks(parent, child, tmp_path / f"a0r0.{child}.stacks", "in in_the_child")
            assert (tmp_path / f"a0r0.{parent.pid}.stacks").read_text() == ""
            os.kill(child, signal.SIGKILL)
        finally:
            parent.kill()


def test_a_descriptor_that_the_script_closed_and_uses_itself_is_left_alone(tmp_path: Path) -> None:
    """After a fork ours is opened anew under its number; by then the number may be the script's."""
    code = """if True:
        import os
        ours = [int(n) for n in os.listdir("/proc/self/fd") if int(n) >= 200 and os.path.exists(f"/proc/self/fd/{n}")]
        os.close(ours[0])
        read, write = os.pipe()
        os.dup2(write, ours[0])
        if not os.fork():
            os.write(ours[0], b"still mine")
            os._exit(0)
        os.wait()
        print(len(ours), os.read(read, 100))
    """
    told = run(["-c", code], environ_of(tmp_path / "a0r0"))
    assert (told.stdout, told.stderr) == ("1 b'still mine'\n", "")


def test_the_script_may_use_faulthandler_as_ever(tmp_path: Path) -> None:
    code = "import faulthandler as f; f.enable(); print(f.is_enabled()); f.dump_traceback(); f.unregister(10)"
    hooked, plain = hooked_and_plain(["-c", code], tmp_path)
    assert hooked == plain
    code = "import sys; print('faulthandler' in sys.modules)"
    told = run(["-X", "faulthandler", "-c", code], environ_of(tmp_path / "a0r0"))
    assert told.stdout == "True\n"


@pytest.mark.parametrize("limit", [8, 64, 1024])
def test_a_low_limit_of_open_files_leaves_the_low_numbers_to_the_script(limit: int, tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    code = "import os; print(os.open('/dev/null', os.O_RDONLY))"
    told = [run(["-c", code], environ_of(prefix), preexec_fn=lower).stdout for prefix in (tmp_path / "a0r0", None)]
    assert told[0] == told[1] != ""
    assert stacks_files(tmp_path)


def test_an_executed_program_does_not_inherit_our_file(tmp_path: Path) -> None:
    code = "import os; os.execvp('ls', ['ls', '/proc/self/fd'])"
    told = run(["-c", code], environ_of(tmp_path / "a0r0"))
    assert not [number for number in map(int, told.stdout.split()) if number >= 200]


def test_the_files_of_the_dead_do_not_pile_up(tmp_path: Path) -> None:
    """A job may start children without number, each with its file; what holds stacks is evidence and stays."""
    hook = importlib.import_module("saferun.inject.saferun_hook")
    gone = 2**22 + 1  # no kernel has a process of that number
    for name in (f"a0r0.{gone}.stacks", f"a0r0.{os.getpid()}.stacks", f"a0r1.{gone}.stacks", "a0r0.heartbeat"):
        (tmp_path / name).touch()
    (tmp_path / f"a0r0.{gone + 1}.stacks").write_text("Thread 0x1")
    hook._sweep(f"{tmp_path}/a0r0")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        f"a0r0.{os.getpid()}.stacks",
        f"a0r1.{gone}.stacks",
        f"a0r0.{gone + 1}.stacks",
        "a0r0.heartbeat",
    }


def test_a_rank_with_very_many_children_looks_at_some_files_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sixteenth of them had looked at the files of all: work that grew with the square of their number."""
    hook = importlib.import_module("saferun.inject.saferun_hook")
    for number in range(1000):
        (tmp_path / f"a0r0.{number}.stacks").touch()
    asked: list[str] = []

    def exists(path: str) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr(hook.os.path, "exists", exists)
    hook._sweep(f"{tmp_path}/a0r0")
    assert 0 < len(asked) <= 128


# ------------------------------------------------------------------------------------------------------- watching torch


THEIRS = "def _register_process_group(*a, **k): raise ValueError('theirs')"


def write_torch(folder: Path, register: str = THEIRS) -> None:
    """What there is of torch that the hook touches, made of Python."""
    c10d = f"""
import torch._C._distributed_c10d
from . import config
{register}
def init_process_group():
    return _register_process_group('name', 'group')
"""
    for name, content in {
        "torch/__init__.py": "",
        "torch/_C/__init__.py": "",
        "torch/_C/_distributed_c10d.py": "",
        "torch/distributed/__init__.py": "from . import distributed_c10d\nfrom . import rpc",
        "torch/distributed/distributed_c10d.py": c10d,
        "torch/distributed/config.py": "",
        "torch/distributed/rpc.py": "",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    "register",
    [
        "def _register_process_group(*a, **k): return a, k",
        "from torch.distributed.elsewhere import nothing",
        THEIRS,
        "",
    ],
)
def test_a_torch_that_is_otherwise_than_we_think_works_as_without_us(register: str, tmp_path: Path) -> None:
    """Private names come and go; a missing one costs the Flight Recorder and nothing else."""
    write_torch(tmp_path, register)
    code = """if True:
        import torch.distributed as dist
        first = None
        for _ in range(2):
            try:
                print(dist.distributed_c10d.init_process_group())
            except Exception as error:
                first = first or error
                last = error
        if first:
            raise last.with_traceback(last.__traceback__.tb_next)
    """
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    hooked, plain = hooked_and_plain(["-c", code], tmp_path, **variables)
    assert hooked == plain


def test_until_there_is_a_process_group_torch_is_left_alone(tmp_path: Path) -> None:
    """Importing torch starts no thread: in a process with threads a fork is warned of."""
    write_torch(tmp_path)
    code = """if True:
        import os, sys
        import torch.distributed as dist
        print(dist.distributed_c10d._register_process_group.__module__, len(os.listdir("/proc/self/task")))
        try:
            dist.distributed_c10d.init_process_group()
        except ValueError as error:
            print(error)
        print(dist.distributed_c10d._register_process_group.__module__)
    """
    told = run(["-c", code], environ_of(tmp_path / "a0r0", PYTHONPATH=str(tmp_path)))
    assert told.stdout == "saferun_hook 1\ntheirs\ntorch.distributed.distributed_c10d\n"
    assert told.stderr == ""


def test_the_server_is_left_out_where_threads_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies of a thread that it is refused, and the rank with it."""
    hook = importlib.import_module("saferun.inject.saferun_hook")
    texts = {"/proc/loadavg": "0.0 0.0 0.0 1/900 4711", "/proc/self/cgroup": "0::/job/step\n3:pids:/old\n"}
    monkeypatch.setattr(hook, "_read", lambda path: texts.get(path, ""))
    monkeypatch.setattr(os, "sysconf", lambda _name: -1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert hook._has_room_for(10)
    for group in ("/sys/fs/cgroup/job", "/sys/fs/cgroup/job/step", "/sys/fs/cgroup", "/sys/fs/cgroup/pids/old"):
        texts |= {f"{group}/pids.max": "2000\n", f"{group}/pids.current": "1200\n"}
        assert not hook._has_room_for(10), group
        texts |= {f"{group}/pids.current": "1100\n"}
        assert hook._has_room_for(10), group
        texts |= {f"{group}/pids.max": "max\n"}
        assert hook._has_room_for(1000), group
    monkeypatch.setattr(os, "sysconf", lambda _name: 1700)
    assert not hook._has_room_for(10)
    monkeypatch.setattr(os, "sysconf", lambda _name: 1800)
    assert hook._has_room_for(10)


@pytest.mark.parametrize(("processors", "most", "has_room"), [(128, 2048, False), (128, 16384, True), (8, 2048, True)])
def test_the_server_takes_a_small_part_of_the_threads_that_a_container_has(
    monkeypatch: pytest.MonkeyPatch, processors: int, most: int, has_room: bool
) -> None:
    """Podman's limit is 2048: on 128 processors the servers of 8 ranks took half of it from data loaders."""
    hook = importlib.import_module("saferun.inject.saferun_hook")
    group = "/sys/fs/cgroup/pids"
    texts = {f"{group}/pids.max": f"{most}\n", f"{group}/pids.current": "300\n"}
    monkeypatch.setattr(hook, "_read", lambda path: texts.get(path, ""))
    monkeypatch.setattr(os, "sysconf", lambda _name: -1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert hook._has_room_for(processors) == has_room


def test_a_server_that_is_left_out_for_want_of_room_leaves_an_empty_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By which a report says so. It has the name of the socket, since it too marks that there is a process group."""
    hook = importlib.import_module("saferun.inject.saferun_hook")
    monkeypatch.setattr(hook, "_has_room_for", lambda _threads: False)
    for _ in range(2):  # also of a process that had the number before
        hook._serve(f"{tmp_path}/a0r0", os.getpid())
    assert [(path.name, path.is_file(), path.stat().st_size) for path in tmp_path.iterdir()] == [
        (f"a0r0.{os.getpid()}.sock", True, 0)
    ]


# ----------------------------------------------------------------------------------------------------------- heartbeat


def test_a_heartbeat_touches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a0r0.heartbeat"
    monkeypatch.setenv("SAFERUN_HEARTBEAT_FILE", str(path))
    saferun.heartbeat()
    os.utime(path, (1, 1))
    saferun.heartbeat()
    assert abs(path.stat().st_mtime - time.time()) < DEADLINE_S


@pytest.mark.parametrize("value", ["", "/no/such/directory/file", "\x01", "relative/none"])
def test_a_heartbeat_never_raises(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path is one, too
    monkeypatch.setenv("SAFERUN_HEARTBEAT_FILE", value)
    saferun.heartbeat()
    monkeypatch.delenv("SAFERUN_HEARTBEAT_FILE")
    saferun.heartbeat()
