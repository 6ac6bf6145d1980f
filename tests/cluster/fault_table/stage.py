"""A fault under way: a cluster, a job over its hosts, what happens to them, and which console says what, and when."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.cluster.jobs import Job, Way, by_hand, ranks_on, start
from tests.process.launching import is_coordinator

if TYPE_CHECKING:
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host
    from tests.cluster.machines.process import Process

_LOOK_AGAIN_S = 0.02
# A launcher may put a host's name before each line.
_LAUNCHERS_PREFIX = re.compile(r"^node\d+: (?=saferun: |hint: |  )", re.MULTILINE)
# What a launcher or the shell itself may say is nothing that is judged.
_OURS = re.compile(r"^saferun: (.*)", re.MULTILINE)
# Where all is well, only where the settings come from is said, and what the machine of these tests does to them.
_HARMLESS = re.compile(
    r"\d+ hosts? \(.* from .*|saferun on \S+ \(pid \d+\) waits for I/O.*|.*this launch's saferun waits.*"
)
# Said of any fault, these would be defects.
NEVER = ("^Traceback", r"\bNone\b", "was killed by somebody")


class Right(NamedTuple):
    """What is right of a fault.

    Attributes:
        says: the sentence with its cause, behind ``saferun: ``, a regular expression; empty where there is no fault.
        hint: what is advised below it; None where no advice is due.
        on: names of the consoles that have to say it; of all of them where empty.
        codes: exit code of every launcher, or by console.
        words_s: how late the sentence may come after the fault.
        end_s: how late the last launcher may end.
        never: what no console may say.
        also: what else some console has to say.
        times: how often a console may say it: where it is that of several hosts, each of them may.
        sentences: how many sentences of saferun's own a console may hold after the fault, at most.
        hints: how many lines of advice.
        left: whether processes and files may be left on the hosts.
    """

    says: str = ""
    hint: str | None = None
    on: tuple[str, ...] = ()
    codes: int | Mapping[str, int] | None = 1
    words_s: float = 10.0
    end_s: float = 20.0
    never: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    times: int = 1
    sentences: int = 3
    hints: int = 1
    left: bool = False


class Row(NamedTuple):
    """A fault, how the job was started, what is right, and what torchrun did when the same was done to it.

    Attributes:
        name: for the command line.
        fault: for people.
        launch: how the job was started.
        play: starts the job, and makes the fault.
        right: what has to come of it.
        or_right: what else may come of it, where chance decides who is first.
        torchrun: what it did.
        hosts: how many there are.
        slurm: whether they have Slurm.
        cap_s: when the row is given up.
    """

    name: str
    fault: str
    launch: str
    play: Callable[[Stage], None]
    right: Right
    torchrun: str = ""
    hosts: int = 3
    slurm: bool = False
    cap_s: float = 240.0
    or_right: tuple[Right, ...] = ()


class Result(NamedTuple):
    """What came of a row; ``wrong`` is empty where all was right."""

    row: Row
    words: str
    words_s: float | None
    end_s: float | None
    codes: str
    wrong: tuple[str, ...]
    load: float
    consoles: str


class Stage:
    """What a row plays on.

    Args:
        cluster: hosts that nothing has happened to yet.
        folder: an empty folder that all hosts share.
        row: what is played, and what is waited for.
    """

    def __init__(self, cluster: Cluster, folder: Path, row: Row) -> None:
        self.cluster = cluster
        self.folder = folder
        self.hosts = cluster.hosts
        self.consoles: dict[str, Process] = {}
        self.jobs: list[Job] = []
        self.fault_at = time.monotonic()
        self.expected_ranks = 0
        self.remarks: list[str] = []
        self._outcomes = [_Outcome(right) for right in (row.right, *row.or_right)]
        self._seen: dict[str, int] = {}
        self._ended_at: dict[str, float] = {}
        self._give_up_at = time.monotonic() + row.cap_s

    # ----------------------------------------------------------------------------------------------------- starting

    def host(self, name: str) -> Host:
        """A host by its name."""
        return self.cluster[name]

    def by_hand(
        self, program: str, *options: object, hosts: Sequence[Host] | None = None, name: str = "", **more: Any
    ) -> Job:
        """One saferun per host, each with a console of its own; the fault counts from here unless one is made later."""
        chosen = list(self.hosts if hosts is None else hosts)
        job = by_hand(self.cluster, self._new_folder(name), program, *map(str, options), hosts=chosen, **more)
        return self.take(job, [f"{name}{host.name}" for host in chosen])

    def launch(self, way: Way, program: str, *options: object, name: str = "", nproc: int = 1, **more: Any) -> Job:
        """By a launcher, which has the one console."""
        job = start(self.cluster, way, self._new_folder(name), program, *map(str, options), nproc=nproc, **more)
        return self.take(job, [f"{name}{way.launcher}"])

    def srun(self, program: str, *options: object, tasks: int = 1, **more: Any) -> Job:
        """By srun."""
        return self.launch(Way("srun", tasks), program, *options, nproc=tasks, **more)

    def take(self, job: Job, names: Sequence[str]) -> Job:
        """The consoles of a job that was started otherwise."""
        is_first = not self.jobs
        self.jobs.append(job)
        self.consoles.update(zip(names, job.processes, strict=True))
        if is_first:
            self.fault()
        return job

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / (name.strip() or "job")
        folder.mkdir(exist_ok=True)
        return folder

    # ---------------------------------------------------------------------------------------------------- the fault

    def fault(self) -> None:
        """It happens now: seconds count from here, and what was said before is not judged."""
        self._seen = {name: len(process.err) for name, process in self.consoles.items()}
        self.fault_at = time.monotonic()

    def steps(self, attempt: int = 0) -> None:
        """Wait until every rank has done some steps."""
        self.jobs[-1].hear("steps", self.expected_ranks or len(self.hosts), attempt=attempt)

    def rank(self, name: str) -> int:
        """Pid of the first rank on a host."""
        return ranks_on(self.host(name))[0]

    def saferun(self, name: str) -> int:
        """Pid of a host's supervisor, which is older than what it forks."""
        return self.host(name).pids(r"-m saferun ")[0]

    def coordinator(self, name: str) -> int:
        """Pid of a host's coordinator."""
        (pid,) = filter(is_coordinator, self.host(name).pids(r"coordinator/__main__\.py"))
        return pid

    def reaper(self, name: str) -> int:
        """Pid of what ends a run whose supervisor is killed; 0 where there is none."""
        for pid in self.host(name).pids():
            try:
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "sr-reaper":
                    return pid
            except OSError:
                continue
        return 0

    # ------------------------------------------------------------------------------------------------------ looking

    def said(self, name: str) -> str:
        """What a console has said since the fault, without output of ranks."""
        text = self.consoles[name].err[self._seen.get(name, 0) :]
        text = _LAUNCHERS_PREFIX.sub("", text.replace("\r\n", "\n"))
        return "\n".join(line for line in text.splitlines() if not line.startswith("["))

    def look(self) -> None:
        """Note who has said it, and who has ended, by now."""
        now = time.monotonic()
        for name, process in self.consoles.items():
            if name not in self._ended_at and process.poll() is not None:
                self._ended_at[name] = now
            for outcome in self._outcomes:
                outcome.note(name, self.said(name), now)

    def await_said(self, pattern: str, *names: str) -> None:
        """Wait until these consoles, or any where none is named, have said something."""
        while True:
            self.look()
            found = [bool(re.search(pattern, self.said(name), re.MULTILINE)) for name in names or self.consoles]
            if all(found) if names else any(found):
                return
            if time.monotonic() > self._give_up_at or len(self._ended_at) == len(self.consoles):
                return
            time.sleep(_LOOK_AGAIN_S)

    def for_a_while(self, seconds: float) -> None:
        """Look on for so long: what must not come would have come by then."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(_LOOK_AGAIN_S)

    def release(self, name: object) -> None:
        """Let the ranks of all jobs go on that wait for this name."""
        for job in self.jobs:
            job.release(name)

    def await_end(self, *but: str) -> None:
        """Until all launchers have ended, but these; or the row is given up."""
        while True:
            self.look()
            if all(name in self._ended_at for name in self.consoles if name not in but):
                return
            if time.monotonic() > self._give_up_at:
                return
            time.sleep(_LOOK_AGAIN_S)

    def await_end_of_one_job(self) -> None:
        """Until all launchers of one of the jobs have ended; or the row is given up."""
        while True:
            self.look()
            if any(all(process.poll() is not None for process in job.processes) for job in self.jobs):
                return
            if time.monotonic() > self._give_up_at:
                return
            time.sleep(_LOOK_AGAIN_S)

    # ------------------------------------------------------------------------------------------------------ judging

    def result(self, row: Row) -> Result:
        """What came of it: the first of the outcomes that are right, or what is wrong by the one that is expected."""
        load = os.getloadavg()[0]
        self.await_end()
        left = self._left()
        results = [self._compared(row, outcome, load, left) for outcome in self._outcomes]
        return next((result for result in results if not result.wrong), results[0])

    def _compared(self, row: Row, outcome: _Outcome, load: float, left: Sequence[str]) -> Result:
        right = outcome.right
        wanted = right.on or tuple(self.consoles)
        after = {name: at - self.fault_at for name, at in outcome.said_at.items()}
        ends = [at - self.fault_at for at in self._ended_at.values()]
        end_s = max(ends, default=0.0) if len(self._ended_at) == len(self.consoles) else None
        said = {name: self.said(name) for name in self.consoles}
        codes = {name: process.returncode for name, process in self.consoles.items()}
        wrong = list(self.remarks)
        for name in wanted if right.says else ():
            wrong += outcome.judge(name, said[name], after.get(name))
        for name, text in said.items():
            wrong += _too_much(name, text, right)
        texts = list(said.values())
        wrong += [f"no console says {also!r}" for also in right.also if not any(_has(also, text) for text in texts)]
        if end_s is None:
            wrong.append(f"not ended: {', '.join(name for name in self.consoles if name not in self._ended_at)}")
        elif end_s > right.end_s:
            wrong.append(f"ended after {end_s:.1f} s, not {right.end_s:g}")
        wrong += _other_codes(codes, right)
        wrong += [] if right.left else left
        words_s = min((after[name] for name in wanted if name in after), default=None)
        words = next((outcome.words(said[name]) for name in wanted if name in after), "")
        consoles = "\n".join(f"===== {name} ({codes[name]})\n{one.err}" for name, one in self.consoles.items())
        shown = ", ".join(map(str, _unique(codes.values())))
        return Result(row, words, words_s, end_s, shown, tuple(wrong), load, consoles)

    def _left(self) -> list[str]:
        give_up_at = time.monotonic() + 15
        while True:
            on = [host for host in self.hosts if host.is_on]
            left = [f"{host.name} {pid}" for host in on for pid in host.pids(r"saferun|program\.py")]
            left += [f"{host.name} {p}" for host in on for d in ("/tmp", "/dev/shm") for p in _saferuns(host, d)]
            if not left or time.monotonic() > give_up_at:
                return [f"left behind: {', '.join(left)}"] if left else []
            time.sleep(0.2)


class _Outcome:
    """Something that may come of a row, and which consoles have said its sentence by now.

    Attributes:
        right: what it is.
        said_at: by console, when it was first seen to have said it: monotonic seconds.
    """

    def __init__(self, right: Right) -> None:
        self.right = right
        self.said_at: dict[str, float] = {}
        self._says = re.compile(rf"^saferun: (?:warning: )?(?:{right.says})", re.MULTILINE) if right.says else None

    def note(self, name: str, said: str, now: float) -> None:
        """Note that a console has said it, if it has."""
        if self._says is not None and name not in self.said_at and self._says.search(said):
            self.said_at[name] = now

    def words(self, said: str) -> str:
        """The line that was expected."""
        found = self._says.search(said) if self._says is not None else None
        return said[found.start() :].partition("\n")[0].removeprefix("saferun: ") if found else ""

    def judge(self, name: str, said: str, after_s: float | None) -> list[str]:
        """What is wrong with what a console has said, which is to say it."""
        if after_s is None or self._says is None:
            return [f"{name} does not say it"]
        wrong = []
        if after_s > self.right.words_s:
            wrong.append(f"{name} says it after {after_s:.1f} s, not {self.right.words_s:g}")
        if (count := len(self._says.findall(said))) > self.right.times:
            wrong.append(f"{name} says it {count} times")
        if self.right.hint is not None and not re.search(rf"^hint: .*(?:{self.right.hint})", said, re.MULTILINE):
            wrong.append(f"{name} does not advise {self.right.hint!r}")
        return wrong


def _has(pattern: str, text: str) -> bool:
    return bool(re.search(pattern, text, re.MULTILINE))


def _too_much(name: str, said: str, right: Right) -> list[str]:
    """What a console should not have said, or not so often."""
    wrong = [f"{name} says {never!r}" for never in (*NEVER, *right.never) if _has(never, said)]
    ours = [line for line in _OURS.findall(said) if not _HARMLESS.match(line)]
    most = right.sentences if right.says else 0
    if len(ours) > most:
        wrong.append(f"{name}: {len(ours)} sentences, not {most} at most")
    if (hints := said.count("\nhint: ")) > right.hints:
        wrong.append(f"{name}: {hints} hints, not {right.hints} at most")
    return wrong


def _other_codes(codes: Mapping[str, int | None], right: Right) -> list[str]:
    """Exit codes that are not the right ones."""
    if right.codes is None:
        return []
    wanted = {name: right.codes if isinstance(right.codes, int) else right.codes.get(name, 1) for name in codes}
    return [f"{name} ends with {code}, not {wanted[name]}" for name, code in codes.items() if code != wanted[name]]


def _saferuns(host: Host, directory: str) -> list[str]:
    return [f"{directory}/{path.name}" for path in host.path(directory).glob("*saferun*")]


def _unique(values: Any) -> list[Any]:
    found = list(values)
    return found[:1] if len(set(found)) == 1 else found
