"""Programs that have hooks of their own, print errors which they handle, are measured or fork work as without ours."""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from saferun.inject import saferun_hook
from tests.unit.inject.test_hook import environ_of, hooked_and_plain, run, write_torch


def test_a_hook_of_the_site_that_calls_the_interpreters_is_called_once(tmp_path: Path) -> None:
    """A ``.pth`` file sets it before ours; an upload or a mail in it would be repeated hundreds of times."""
    site = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path / "user")}))
    site.mkdir(parents=True)
    (site / "of_the_site.py").write_text(
        "import sys\n"
        "def hook(*error):\n"
        "    print('of the site')\n"
        "    sys.__excepthook__(*error)\n"
        "sys.excepthook = hook\n"
    )
    (site / "of_the_site.pth").write_text("import of_the_site\n")
    program = "import sys\nprint(sys.excepthook is sys.__excepthook__)\n1 / 0\n"
    ends = []
    for prefix in (tmp_path / "a0r0", None):
        environ = environ_of(prefix, PYTHONUSERBASE=str(tmp_path / "user"))
        # An interpreter of a virtual environment has no directory of the user's.
        interpreter = getattr(sys, "_base_executable", sys.executable)
        done = subprocess.run(
            [interpreter, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        ends.append((done.stdout, done.stderr, done.returncode))
    assert ends[0] == ends[1]
    assert ends[1][0] == "False\nof the site\n"
    assert (tmp_path / "a0r0.failure").exists()


PRINTS_A_HANDLED_ERROR = """
import gc, sys, weakref
class Batch: pass
def train():
    before = locals()
    batch = Batch()
    alive = weakref.ref(batch)
    try:
        1 / 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    del batch
    gc.collect()
    print(alive(), before)
train()
"""


def test_an_error_that_a_script_handles_and_prints_keeps_nothing_alive(tmp_path: Path) -> None:
    """As after a GPU that was out of memory: what the function deletes is freed, though it goes on."""
    hooked, plain = hooked_and_plain(["-c", PRINTS_A_HANDLED_ERROR], tmp_path)
    assert hooked == plain
    assert "None {}" in plain
    assert (tmp_path / "a0r0.failure").exists()


def test_what_stays_of_the_hook_names_no_file(tmp_path: Path) -> None:
    """Coverage wants to read the files of all that has run; that of the hook may be gone by then."""
    program = (
        "import os, sys\n"
        "finder = next(one for one in sys.meta_path if type(one).__name__ == '_TorchWatcher')\n"
        "for function in (finder.find_spec, finder._check, sys.excepthook, type(os.fsync).__call__):\n"
        "    print(function.__code__.co_filename)\n"
    )
    ended = run(["-c", program], environ_of(tmp_path / "a0r0"), tmp_path)
    assert ended.stdout == "<saferun>\n" * 4, ended.stderr
    assert saferun_hook._hide_file.__code__.co_filename == saferun_hook.__file__, "only where it is at work"


@pytest.mark.parametrize(
    ("wanted", "value", "enabled"), [("1", None, True), ("1", "", False), ("1", "1", True), (None, None, False)]
)
def test_a_crash_prints_stacks_unless_the_user_has_another_wish(
    wanted: str | None, value: str | None, enabled: bool, tmp_path: Path
) -> None:
    """By a call in the rank alone: children would inherit the variable, and Python forgets what the handlers were."""
    program = (
        "import faulthandler, os, signal\n"
        "old = signal.signal(signal.SIGABRT, lambda *_: None)\n"
        "print(faulthandler.is_enabled(), old, [name for name in os.environ if 'FAULT' in name])\n"
        "signal.signal(signal.SIGABRT, old)\n"
    )
    names = {"SAFERUN_FAULTHANDLER": wanted, "PYTHONFAULTHANDLER": value}
    variables = {name: given for name, given in names.items() if given is not None}
    ended = run(["-c", program], environ_of(tmp_path / "a0r0", **variables), tmp_path)
    before = "None" if value else str(int(signal.SIG_DFL))
    left = [] if value is None else ["PYTHONFAULTHANDLER"]
    assert ended.stdout == f"{enabled} {before} {left}\n", ended.stderr


SYNC = """
import os, pickle, sys, tempfile
inner, outer = os.pipe()
class Files:
    sync = os.fsync
assert Files().sync(1) is None and pickle.loads(pickle.dumps(os.fsync)) is os.fsync and "built-in" in repr(os.fsync)
for stream in (1, sys.stdout, 2, outer, 99, tempfile.TemporaryFile(), "x"):
    for call in (os.fsync, os.fdatasync):
        try:
            print(call(stream), call.__name__)
        except (OSError, TypeError, AttributeError) as error:
            print(type(error).__name__, getattr(error, "errno", 0), call.__name__)
print(call(fd=1), call.__module__)
"""


def test_stdout_can_be_synced_as_the_file_that_it_is_under_torchrun(tmp_path: Path) -> None:
    """``sys.stdout.flush(); os.fsync(sys.stdout.fileno())`` fails for a pipe. All other files keep their answers."""
    script = tmp_path / "sync.py"
    script.write_text(SYNC)
    hooked = run([str(script)], environ_of(tmp_path / "a0r0"), tmp_path)
    good = ["None fsync", "None fdatasync"]
    assert hooked.stdout.splitlines() == [
        *good * 3,
        "OSError 22 fsync",
        "OSError 22 fdatasync",
        "OSError 9 fsync",
        "OSError 9 fdatasync",
        *good,
        "TypeError 0 fsync",
        "TypeError 0 fdatasync",
        "None os",
    ], hooked.stderr


@pytest.mark.parametrize("before", ["faulthandler.enable(open('crash.log', 'w'))", "sys.stderr = object()"])
def test_what_a_site_has_done_about_crashes_stays(before: str, tmp_path: Path) -> None:
    """Its own file for the stacks, or a stderr that faulthandler refuses: failures are recorded all the same."""
    site = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path / "user")}))
    site.mkdir(parents=True)
    (site / "of_the_site.pth").write_text(f"import faulthandler, sys; {before}\n")
    environ = environ_of(tmp_path / "a0r0", PYTHONUSERBASE=str(tmp_path / "user"), SAFERUN_FAULTHANDLER="1")
    interpreter = getattr(sys, "_base_executable", sys.executable)
    for program in ("1 / 0", "import ctypes; ctypes.string_at(0)"):
        subprocess.run([interpreter, "-c", program], env=environ, cwd=tmp_path, stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "a0r0.failure").exists()
    if "crash.log" in before:
        assert "Segmentation fault" in (tmp_path / "crash.log").read_text()


def test_forked_children_start_servers_only_if_there_is_room_for_those_of_all(tmp_path: Path) -> None:
    """They may all do so at the same moment, and each sees room for its own threads; a refused one ends the process."""
    write_torch(tmp_path, "def _register_process_group(*a): pass")
    program = """if True:
        import os, sys
        finder = next(one for one in sys.meta_path if type(one).__name__ == "_TorchWatcher")
        names = finder._check.__globals__
        names["_has_room_for"] = lambda threads: print(threads // max(9, os.cpu_count()))
        sys.modules["ctypes"] = None
        import torch.distributed as dist
        hold, release = os.pipe()
        counted, counts = os.pipe()
        for _ in range(3):
            if not os.fork():
                os.close(release)
                os.read(hold, 1)
                dist.distributed_c10d.init_process_group()
                sys.stdout.flush()
                os.write(counts, b".")
                os._exit(0)
        os.write(release, b"...")
        os.close(release)
        dist.distributed_c10d.init_process_group()
        sys.stdout.flush()
        for _ in range(3):
            os.read(counted, 1)  # until then this process neither ends nor reaps a child, which changes the number
    """
    ended = run(["-c", program], environ_of(tmp_path / "a0r0", PYTHONPATH=str(tmp_path)), tmp_path)
    assert sorted(ended.stdout.split()) == ["1", "3", "3", "3"], ended.stderr
