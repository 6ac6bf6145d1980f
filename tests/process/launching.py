"""saferun as a real process, and what is left when it has ended.

``running`` starts one launch in a folder of its own and ends whatever is left of it, whichever way the test goes; a
launch that has ended and left something behind fails its test there. Ranks say where they are through a FIFO, and wait
for files that the test makes: no test sleeps and hopes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from tests.process.marks import numbers_in_use, pids_whose_environ_has
from tests.transitions import assert_all_listed, events_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).parents[2]
T = TypeVar("T")
SAFERUN = (sys.executable, "-m", "saferun")
# A passing test takes a small part of it, on a busy machine too.
DEADLINE_S = 60.0
_LOOK_AGAIN_S = 0.005
HELPERS_END_S = 5.0
"""Helpers that were ended with saferun may wait for a processor before they are gone."""
_RANK = Path(__file__).with_name("rank.py")
_MARK = "LAUNCHING_MARK"
_WANT_LOGS = frozenset({"-r", "-t", "--redirects", "--tee", "--local-ranks-filter"})

# A program whose ranks stay until they are ended.
STAY = """
from rank import *
tell("ready")
stay()
"""

# A program whose ranks end as their argument says as soon as they may.
END_AS_TOLD = """
from rank import *
how = sys.argv[1 + RANK]
if how == "stubborn":
    ignore(signal.SIGTERM, signal.SIGINT)
tell("ready")
await_release("end")
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
if how in ("stay", "stubborn"):
    stay()
sys.exit(int(how))
"""


class Word(NamedTuple):
    """What a process of a launch said."""

    rank: int
    attempt: int
    pid: int
    word: str


class Stat(NamedTuple):
    """What /proc/PID/stat says. ``cpu_s`` is user and system time together; ``start_ticks`` tells pids apart."""

    state: str
    cpu_s: float
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """State and CPU time of a process; None where there is none (a zombie counts as none)."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = content[content.rfind(b")") + 2 :].split()
    if fields[0] in b"ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Stat(fields[0].decode(), cpu_s, int(fields[19]))


def kill(pid: int, signum: int) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def state_of(pid: int) -> str:
    """The state letter of a process; empty where it is gone."""
    stat = read_stat(pid)
    return stat.state if stat else ""


def now_ticks() -> int:
    """The time as ``Stat.start_ticks`` counts it."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def printed_by(program: str) -> str:
    """What a Python program prints that has saferun's modules, and ends well."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], T], what: str, *, timeout_s: float = DEADLINE_S) -> T:
    """Wait for a condition to become true, and return what it returned."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        cpu_s = time.thread_time()
        if result := condition():
            return result
        assert time.monotonic() < give_up_at, f"never happened within {timeout_s:g} s: {what}"
        # Whoever looks takes processor time from what it waits for: not more than a fifth of one.
        time.sleep(max(_LOOK_AGAIN_S, 4 * (time.thread_time() - cpu_s)))


def command_line(pid: int) -> str:
    """The command line of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """What ``ps`` calls a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def is_in_write(pid: int) -> bool:
    """Whether a process sleeps in a write to a full pipe."""
    try:
        return "pipe_write" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False


def is_coordinator(pid: int) -> bool:
    """Whether a process is a coordinator, and not one that a coordinator has forked."""
    program = "saferun/coordinator/__main__.py"
    return program in command_line(pid) and program not in command_line(parent_of(pid))


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


# Of each launch of a test that fails: the last characters that are shown.
_SHOWN_STDERR = 6000


class Job:
    """One launch.

    Args:
        folder: a folder of the test's own. saferun's working directory is ``folder/job``, its TMPDIR ``folder/tmp``.
        process: saferun, or what becomes saferun by exec.
        mark: stands in the environment of every process of the launch that has not changed it.
        environ: saferun's whole environment.
        older: the numbers of the processes that there were before.
    """

    def __init__(
        self,
        folder: Path,
        process: subprocess.Popen[bytes],
        mark: str,
        environ: dict[str, str],
        older: frozenset[str],
    ) -> None:
        self.folder = folder
        self.environ = environ
        self.process = process
        self._mark = mark
        self._older = older
        self._words_fd = os.open(folder / "words", os.O_RDWR | os.O_NONBLOCK)
        self._half_word = b""
        self._unheard: list[Word] = []
        self._told: dict[int, int] = {}
        stat = read_stat(process.pid)
        self._start_ticks = stat.start_ticks if stat is not None else now_ticks()
        self._spared: set[int] = set()

    # ------------------------------------------------------------------------------------------------- what it says

    @property
    def out(self) -> str:
        """What is on stdout so far, where it is the default file."""
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What is on stderr so far, where it is the default file."""
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        """The newest run directory in the default place."""
        return self.folder / "job" / "saferun-runs" / "latest"

    def events(self) -> list[dict[str, Any]]:
        """What the run directory says has happened, as far as it is written."""
        return [event for path in self.run_dir.glob("*/events.jsonl") for event in events_of(path)]

    def has_happened(self, event: str, **fields: object) -> bool:
        """Whether events.jsonl holds such an event."""
        return any(entry["event"] == event and fields.items() <= entry.items() for entry in self.events())

    def rank_file(self, rank: int, name: str, attempt: int = 0) -> bytes:
        """The content of a rank's file in the run directory."""
        (path,) = self.run_dir.glob(f"*/attempt_{attempt}/rank_{rank}/{name}")
        return path.read_bytes()

    # ------------------------------------------------------------------------------------------------- handshakes

    def hear(self, word: str, count: int = 1, *, timeout_s: float = DEADLINE_S) -> list[Word]:
        """Wait until processes of the launch have said a word so many times; each is heard once."""

        def heard() -> list[Word]:
            # Looked at first: what it says last may come between the two.
            has_ended = self.process.poll() is not None
            self._listen()
            found = [said for said in self._unheard if said.word == word][:count]
            assert not has_ended or len(found) == count, self._story(f"ended before {word!r}")
            return found if len(found) == count else []

        try:
            found = until(heard, f"{count} x {word!r}", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(self._story(str(error))) from None
        for said in found:
            self._unheard.remove(said)
        return found

    def said(self, word: str | None = None) -> list[Word]:
        """What has been said and not yet heard: this word, or everything."""
        self._listen()
        return [said for said in self._unheard if word in {said.word, None}]

    def release(self, name: str) -> None:
        """Let those go on that wait for the name."""
        (self.folder / f"release.{name}").touch()

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._words_fd, 1 << 16):
                *lines, self._half_word = (self._half_word + chunk).split(b"\n")
                for line in lines:
                    rank, attempt, pid, word = line.decode().split(" ", 3)
                    self._unheard.append(Word(int(rank), int(attempt), int(pid), word))
                    stat = read_stat(int(pid))
                    # Younger than the launch: a number from another pid namespace may be anybody's here.
                    if stat is not None and stat.start_ticks >= self._start_ticks:
                        self._told.setdefault(int(pid), stat.start_ticks)

    # ------------------------------------------------------------------------------------------------- life and end

    def send(self, signum: int) -> None:
        """Send a signal to saferun."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code of saferun, negative where a signal ended it."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._story(f"saferun had not ended within {timeout_s:g} s")) from None

    def spare(self, pid: int) -> None:
        """This process is none of the launch's, though it carries the mark."""
        self._spared.add(pid)

    def processes(self) -> list[int]:
        """Every living process of the launch: those that carry its mark, and those that have ever said a word."""
        self._listen()
        told = [pid for pid, start in self._told.items() if (stat := read_stat(pid)) and stat.start_ticks == start]
        marked = pids_whose_environ_has(f"{_MARK}={self._mark}", self._older)
        return sorted({*told, *marked} - self._spared)

    def coordinator(self) -> int | None:
        """The pid of the process that serves the store, once there is one."""
        return next((pid for pid in self.processes() if is_coordinator(pid)), None)

    def reaper(self) -> int | None:
        """The pid of the process that ends a run whose supervisor was killed."""
        return next(iter(self.called("sr-reaper")), None)

    def called(self, name: str) -> list[int]:
        """The pids of its living processes that ``ps`` calls so."""
        return [pid for pid in self.processes() if name_of(pid) == name]

    def left(self) -> list[str]:
        """What is left of an ended launch: processes, and files outside of the run directory."""
        self._listen()
        words = {said.pid: said.word for said in self._unheard}
        lines = {pid: command_line(pid) for pid in self.processes()}
        # One that has been killed, and has given back its memory already, lives no more.
        left = [f"process {pid} ({words.get(pid, '?')}): {line}" for pid, line in lines.items() if line]
        # Not rglob: what is being removed meanwhile is no error.
        for folder, folders, names in os.walk(self.folder / "tmp"):
            if not _WANT_LOGS.isdisjoint(cast("list[str]", self.process.args)):
                # As under torchrun they stay where the user has named no directory.
                folders[:] = [name for name in folders if not name.startswith("saferun-logs-")]
            left += [f"file {folder}/{name}" for name in names]
            left += [f"folder {folder}"] if Path(folder) != self.folder / "tmp" else []
        return left + [f"folder {path}" for path in self.scratch_folders()]

    def scratch_folders(self) -> list[Path]:
        """Where saferun puts private directories for sockets, and for files while ``TMPDIR`` cannot be used."""
        found = []
        for path in (self.folder / "job" / "saferun-runs").glob("*/run.json"):
            with contextlib.suppress(OSError, ValueError):
                name = f"saferun-{json.loads(path.read_text())['run_id']}"
                found += [Path(directory) / name for directory in ("/tmp", "/var/tmp", "/dev/shm", self.folder / "job")]
        return sorted({path for path in found if path.is_dir()})

    def scratch_folder(self) -> Path:
        """The only one of them, once run.json says where it is: that comes a moment after the ranks have started."""
        (folder,) = until(self.scratch_folders, "a private directory")
        return folder

    def assert_nothing_left(self, timeout_s: float = 0.0) -> None:
        """Fail where something lives on, or lies about, after so many seconds."""
        give_up_at = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_AGAIN_S)
        assert not left, self._story("left behind: " + "; ".join(left))

    def _story(self, what: str) -> str:
        living = [f"{pid} {stat.state} {command_line(pid)}" for pid in self.processes() if (stat := read_stat(pid))]
        texts = [
            f"{name}:\n{(self.folder / name).read_text(errors='replace')[-3000:]}" for name in ("stdout", "stderr")
        ]
        return "\n".join([what, f"unheard: {self._unheard}", "living:", *living, *texts])

    def end(self) -> None:
        """End all that is left, by whatever means."""
        give_up_at = time.monotonic() + DEADLINE_S
        while pids := [*self.processes(), *([self.process.pid] if self.process.poll() is None else [])]:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < give_up_at, f"processes that cannot be ended: {pids}"
            time.sleep(_LOOK_AGAIN_S)
        self.process.wait()
        os.close(self._words_fd)
        for path in self.scratch_folders():
            shutil.rmtree(path, ignore_errors=True)


def customized(folder: Path, source: str, name: str = "sitecustomize.py") -> dict[str, str]:
    """An environment in which every Python process imports such a module instead of its own."""
    (folder / "custom").mkdir()
    (folder / "custom" / name).write_text(source)
    return {"PYTHONPATH": f"{folder / 'custom'}{os.pathsep}{REPOSITORY}"}


def in_saferun(source: str) -> str:
    """A sitecustomize that does something in saferun itself, and not in what it starts."""
    return f"import sys\nif sys.orig_argv[1:3] == ['-m', 'saferun']:\n    {source}\n"


@contextlib.contextmanager
def running(
    folder: Path,
    program: str,
    *options: str,
    nproc: int | None = 1,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    store: bool = True,
    before: Sequence[str] = (),
    launcher: Sequence[str] = SAFERUN,
    script: Sequence[str] = ("train.py",),
    sweeps: bool = True,
    **popen: Any,
) -> Iterator[Job]:
    """Start a launch; afterwards nothing of it is left.

    Args:
        folder: an empty folder.
        program: Python source that every rank runs; ``rank`` can be imported from it.
        options: saferun's options.
        nproc: how many ranks; None leaves that to the options.
        arguments: the program's arguments.
        environ: changes of saferun's environment.
        store: whether saferun serves the store. A test that does not look at it saves the coordinator's import.
        before: a command that ends by executing the rest of its arguments, in saferun's place.
        launcher: the command that stands for saferun.
        script: what stands for the program on the command line.
        sweeps: whether the launch has to leave nothing behind once saferun has ended.
        popen: further arguments of Popen. stdout and stderr are files unless given.
    """
    for name in ("job", "tmp"):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "words")
    shutil.copy(_RANK, folder / "job" / "rank.py")
    (folder / "job" / "train.py").write_text(program)
    mark = os.urandom(8).hex()
    count = () if nproc is None else ("--nproc-per-node", str(nproc))
    command = [*before, *launcher, *count, *options, *script, *arguments]
    own_store = {} if store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    whole_environ = clean_environ(folder, mark, own_store, environ or {})
    older = numbers_in_use()
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(
            command,
            cwd=folder / "job",
            env=whole_environ,
            **{**streams, **popen},
        )
    job = Job(folder, process, mark, whole_environ, older)
    try:
        yield job
        if sweeps:
            job.wait()
            # saferun waits half a second for the end of its helpers; on a busy machine one may be later.
            job.assert_nothing_left(HELPERS_END_S)
        if (folder / "stderr").exists():
            # Python goes on without what ``in_saferun`` was to do, and the test would be one of a healthy job.
            assert "Error in sitecustomize" not in job.err
        assert_all_listed(job.run_dir)
    except Exception:
        if (folder / "stderr").exists():
            print(f"---- stderr of {folder.name}\n{job.err[-_SHOWN_STDERR:]}")
        raise
    finally:
        job.end()


def clean_environ(folder: Path, mark: str, *changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would change a launch, and with what the tests need."""
    foreign = ("PET_", "SAFERUN_", "TORCHELASTIC_", "TORCH_ELASTIC_", "MASTER_")
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"}
    names = ranks | {"NO_COLOR", "PYTHON_EXEC", "PYTHONUNBUFFERED", "COLUMNS", "LINES"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in names}
    environ |= {
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(folder / "tmp"),
        "TERM": "xterm",
        # Its scan would be the most expensive part of a test, and leave a cache at home.
        "SAFERUN_LINT": "off",
        "LAUNCHING_FOLDER": str(folder),
        _MARK: mark,
    }
    for change in changes:
        environ |= change
    return environ


def without(capabilities: Iterable[int]) -> list[str]:
    """A command before saferun that gives capabilities up, so that root is refused what any user is refused.

    Source: capabilities(7). 1 is CAP_DAC_OVERRIDE, 2 CAP_DAC_READ_SEARCH.
    """
    drop = "".join(f"libc.prctl(24, {number}, 0, 0, 0);" for number in capabilities)
    source = f"import ctypes, os, sys; libc = ctypes.CDLL(None); {drop} os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", source]


def in_mounts(*mounts: tuple[str, str], directory: str | None = None) -> list[str]:
    """A command before saferun that mounts file systems which only saferun and its children see.

    Args:
        mounts: pairs of a mount point and the options of a tmpfs, as ``("/tmp", "size=1m")``.
        directory: the working directory, entered afterwards.
    """
    lines = [f"mount -t tmpfs -o {options} none '{path}'" for path, options in mounts]
    lines += [f"cd '{directory}'"] if directory else []
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ["unshare", *user, "--mount", "sh", "-c", " && ".join([*lines, 'exec "$@"']), "sh"]


def two_lines(text: str) -> tuple[str, str]:
    """The two lines of an error, which have to be all there is: what happened, and what to do."""
    lines = text.splitlines()
    assert len(lines) == 2, text
    what, hint = lines
    assert what.startswith("saferun: "), text
    assert hint.startswith("hint: "), text
    return what.removeprefix("saferun: "), hint.removeprefix("hint: ")


def kill_reapers(job: Job, most: int = 100) -> int:
    """Kill so many reapers one after the other, or until there is no other one. Returns how many."""
    given_up = "is not started any more"
    gone: set[int | None] = {None}
    while len(gone) <= most and given_up not in job.err:
        gone.add(reaper := job.reaper())
        assert reaper is not None
        os.kill(reaper, signal.SIGKILL)
        until(lambda: given_up in job.err or job.reaper() not in gone, "another reaper, or none")
    return len(gone) - 1
