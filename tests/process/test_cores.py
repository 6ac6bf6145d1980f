"""Processes that crash, and what the capture process makes of the cores that they leave."""

from __future__ import annotations

import gzip
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from saferun.captures import cores
from saferun.captures.wire import NOT_READ, CoreRequest, DeadProcess
from saferun.evidence.job_evidence import CoreDump
from saferun.linux.core_files import CoreFile
from saferun.linux.core_notes import CoreError, read_core_notes
from saferun.linux.core_pattern import CorePattern
from saferun.linux.poller import Poller
from tests.breadth import slow_but
from tests.process.core_steps import (
    PATTERN,
    CoreWatch,
    Crew,
    examined,
    functions,
)
from tests.process.launching import DEADLINE_S

pytestmark = pytest.mark.skipif(not PATTERN.is_relative, reason=f"no cores in the directory: {PATTERN.description()}")


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """A crew that leaves nobody behind."""
    crew = Crew(tmp_path)
    try:
        yield crew
    finally:
        crew.close()


@pytest.mark.parametrize("faulthandler", slow_but(["", "1"], "1"))
@pytest.mark.parametrize("how", slow_but(["step", "in_thread"], "step"))
def test_a_segmentation_fault_shows_the_crashed_thread_in_both_languages(
    crew: Crew, how: str, faulthandler: str
) -> None:
    """Faulthandler, on in every rank, raises the signal anew: its calls are not the answer."""
    crew.start(how, environ={"PYTHONFAULTHANDLER": faulthandler})
    crew.crash()
    [look] = crew.examine()
    assert (look.rank, look.pid, look.signum) == (0, crew.pids[0], signal.SIGSEGV)
    assert (look.tool, look.failure, look.address, look.sender_pid) == ("pystack", "", "0x10", 0)
    top, *called = functions(look)
    assert "strlen" in top
    assert look.threads[0].frames[0].native
    assert called.index("read_nothing") < called.index("step")
    assert look.threads[0].is_main is (how == "step")
    others = [frame.function for thread in look.threads[1:] for frame in thread.frames]
    assert ("in_thread" in others) is (how == "in_thread")
    text = (crew.files / "rank_0.core.txt").read_text()
    assert "SIGSEGV" in text
    assert crew.told == [f"reading the core of rank 0 ({look.size_bytes / (1 << 20):.0f} MiB) …"]
    assert "read_nothing" in text


def test_a_core_is_deleted_once_its_stacks_are_taken(crew: Crew) -> None:
    """A core of a rank is as large as its memory, and nobody asked for it."""
    crew.start("step")
    crew.crash()
    assert crew.cores()
    [look] = crew.examine()
    assert not look.kept
    assert look.size_bytes > 1 << 20
    assert crew.cores() == []


def test_a_core_is_named_before_it_is_read(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may end the reading at any moment: the core stays then, and the report says where it is."""
    crew.start("step", "step")
    crew.crash()
    found: list[object] = []

    def read(*_: object, **__: object) -> None:
        raise InterruptedError

    def examine() -> None:
        found.extend(cores.examine_cores(CoreRequest(dead, since=crew.began)))

    monkeypatch.setattr(cores, "read_cores", read)
    dead = tuple(DeadProcess(rank, pid, signal.SIGSEGV, str(crew.directory)) for rank, pid in enumerate(crew.pids))
    with pytest.raises(InterruptedError):
        examine()
    dumps = [one for one in found if isinstance(one, CoreDump) and one.path]
    assert {(one.pid, os.path.basename(one.path)) for one in dumps} == {
        (read_core_notes(str(crew.directory / name)).pid, name) for name in crew.cores()
    }
    assert dumps
    assert all((one.kept, one.failure) == (True, NOT_READ) and one.size_bytes for one in dumps)


def test_a_core_that_the_user_had_switched_on_stays(crew: Crew) -> None:
    """Its stacks are shown all the same; torchrun leaves it as well."""
    crew.start("step")
    crew.crash()
    before = crew.cores()
    assert before
    [look] = crew.examine(soft_limit=1 << 20)
    assert look.kept
    assert look.threads
    assert crew.cores() == before


def test_an_abort_is_the_process_s_own(crew: Crew) -> None:
    """It sent the signal itself, which is no news to anybody."""
    crew.start("give_up")
    crew.crash()
    [look] = crew.examine()
    assert (look.signum, look.sender_pid) == (signal.SIGABRT, 0)
    assert "give_up" in functions(look)


def test_a_signal_from_outside_has_a_sender(crew: Crew) -> None:
    """Who sent it is the first question about a SIGABRT that the process did not send itself."""
    crew.start("stand_by", environ={"PYTHONFAULTHANDLER": ""})
    os.kill(crew.pids[0], signal.SIGABRT)
    crew.crash()
    [look] = crew.examine()
    assert (look.signum, look.sender_pid) == (signal.SIGABRT, os.getpid())


@pytest.mark.slow
def test_of_four_that_crash_at_once_every_core_is_found_or_missed(crew: Crew) -> None:
    """They may all have written to the same name; whose core is gone is told why."""
    crew.start("step", "step", "step", "step")
    crew.crash()
    looks = sorted(crew.examine(), key=lambda look: look.rank)
    assert [look.pid for look in looks] == crew.pids
    read = [look for look in looks if look.threads]
    assert read
    assert all("step" in functions(look) for look in read)
    assert all(look.failure for look in looks if not look.threads)
    assert crew.cores() == []


@pytest.mark.slow
def test_cores_that_come_one_after_another_are_all_saved(crew: Crew) -> None:
    """The kernel deletes a core for the next one of the same name."""
    crew.start("stand_by", "stand_by", "stand_by", environ={"PYTHONFAULTHANDLER": ""})
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    for number, pid in enumerate(crew.pids):
        os.kill(pid, signal.SIGQUIT)
        until = time.monotonic() + DEADLINE_S
        while watch.is_watching and len(watch.paths) <= number:
            assert time.monotonic() < until
            poller.wait(0.1)
    watch.close()
    poller.close()
    crew.crash()
    looks = crew.examine()
    assert sorted(look.pid for look in looks if look.threads) == sorted(crew.pids)


def test_a_file_of_the_user_s_own_called_core_is_left_alone(crew: Crew) -> None:
    """Packages have directories and scripts have files of that name."""
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    (crew.directory / "core").write_text("of the user's own")
    poller.wait(0.1)
    (crew.directory / "core").unlink()
    (crew.directory / "core").mkdir()
    poller.wait(0.1)
    watch.close()
    poller.close()
    assert crew.cores() == ["core"]
    assert watch.paths == []


def test_a_process_without_a_core_is_told_why_limit(crew: Crew) -> None:
    """'No core' alone sends people to search for it."""
    crew.start("step", limit=0)
    crew.crash()
    [look] = crew.examine(hard_limit=0)
    assert (look.path, look.threads) == ("", ())
    assert "the hard limit on cores is 0" in look.failure


def test_a_process_without_a_core_is_told_why_directory(crew: Crew) -> None:
    """The kernel writes where the process is, and says nothing when it cannot."""
    nowhere = Path("/proc")
    crew.start("step", cwd=nowhere)
    crew.crash()
    [look] = crew.examine(cwd=nowhere)
    assert look.path == ""
    assert "/proc" in look.failure


@pytest.mark.parametrize("is_relative", [False, True])
def test_where_the_working_directory_was_deleted_cores_elsewhere_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_relative: bool
) -> None:
    """A job may live on in a directory that was removed. An absolute core_pattern does not depend on it."""
    places = {name: tmp_path / name for name in ("gone", "cores")}
    for place in places.values():
        place.mkdir()
    monkeypatch.chdir(places["gone"])
    places["gone"].rmdir()
    pattern = CorePattern("core" if is_relative else f"{places['cores']}/core.%p")
    monkeypatch.setattr(cores, "read_core_pattern", lambda: pattern)
    request = CoreRequest((DeadProcess(0, 4711, signal.SIGSEGV),), since=time.time(), budget_s=5.0, may_delete=True)
    [look] = examined(request)
    assert ("was deleted" if is_relative else f"no core in {places['cores']}") in look.failure


def test_a_core_that_was_cut_off_is_kept_and_told_as_such(crew: Crew) -> None:
    """No tool reads it; deleting it unread would take away the last trace."""
    crew.start("step", limit=1 << 20)
    crew.crash()
    [look] = crew.examine()
    assert look.kept
    assert look.threads == ()
    assert "truncated" in look.failure
    assert Path(look.path).exists()


def test_the_core_of_a_process_that_changed_its_directory_is_found_below(crew: Crew) -> None:
    """Hydra and its like run each job in a directory of its own."""
    below = crew.directory / "outputs" / "today"
    below.mkdir(parents=True)
    crew.start("step", cwd=below)
    crew.crash()
    [look] = crew.examine()
    assert look.path.startswith(str(below))
    assert "step" in functions(look)
    assert list(below.iterdir()) == []


def test_whatever_else_is_called_core_is_neither_believed_nor_deleted(crew: Crew) -> None:
    """Only the process in a core's notes says whose it is."""
    garbage = crew.directory / "core.saferun.garbage"
    garbage.write_bytes(b"\x7fELF\x02\x01\x01" + os.urandom(4000))
    os.mkfifo(crew.directory / "core.saferun.fifo")
    (crew.directory / "core.saferun.link").symlink_to("/dev/zero")
    (crew.directory / f"core.saferun.{os.getpid()}.0").write_bytes(b"")
    before = crew.cores()
    crew.start("step")
    crew.crash()
    [look] = crew.examine()
    assert "step" in functions(look)
    assert crew.cores() == before


def test_a_core_of_another_run_in_the_same_directory_stays(crew: Crew) -> None:
    """Two jobs may share a directory."""
    crew.start("step", "give_up")
    crew.crash()
    before = {read_core_notes(str(crew.directory / name)).pid for name in crew.cores()}
    # No process has this number: it is beyond what the kernel gives.
    crew.examine(dead=(DeadProcess(0, 1 << 23, signal.SIGSEGV, str(crew.directory)),))
    assert {read_core_notes(str(crew.directory / name)).pid for name in crew.cores()} == before
    assert before


def test_a_core_from_before_the_start_is_not_this_run_s(crew: Crew) -> None:
    """Numbers of processes come again."""
    crew.start("step")
    crew.crash()
    [look] = crew.examine(since=time.time() + 60)
    assert look.path == ""
    assert crew.cores()


def test_the_core_of_a_rank_s_child_is_found_by_its_session(crew: Crew) -> None:
    """A data loader's crash shows only as an exception in its rank."""
    crew.start("in_child")
    crew.crash()
    assert crew.ends[crew.pids[0]].code == 1
    [look] = crew.examine()
    assert look.rank == 0
    assert look.pid != crew.pids[0]
    assert look.signum == signal.SIGSEGV
    assert "step" in functions(look)
    assert (crew.files / f"rank_0.pid_{look.pid}.core.txt").exists()


def test_one_core_of_each_kind_of_crash_is_kept(crew: Crew) -> None:
    """The same crash on 64 ranks is one crash."""
    crew.start("stand_by", "stand_by", "give_up", environ={"PYTHONFAULTHANDLER": ""})
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    for number, pid in enumerate(crew.pids[:2]):
        os.kill(pid, signal.SIGQUIT)
        until = time.monotonic() + DEADLINE_S
        while watch.is_watching and len(watch.paths) <= number:
            assert time.monotonic() < until
            poller.wait(0.1)
    watch.close()
    poller.close()
    crew.crash()
    looks = crew.examine(mode="keep", keep=4)
    kept = [look for look in looks if look.kept]
    assert sorted(look.signum for look in kept) == [signal.SIGQUIT, signal.SIGABRT]
    assert {os.path.dirname(look.path) for look in kept} == {str(crew.files)}
    assert all(read_core_notes(look.path).pid == look.pid for look in kept)
    assert crew.cores() == []


def test_no_more_cores_are_kept_than_asked_for(crew: Crew) -> None:
    """The disk is everybody's."""
    crew.start("give_up")
    crew.crash()
    [look] = crew.examine(mode="keep", keep=0)
    assert not look.kept
    assert "give_up" in functions(look)


def test_a_compressed_core_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of zeros shrink to nothing, and the ranks' checkpoints go to the same file system."""
    packed = tmp_path / "core.gz"
    packed.write_bytes(gzip.compress(bytes(16 << 20)))
    status = packed.stat()
    core = CoreFile(str(packed), None, (status.st_dev, status.st_ino))
    monkeypatch.setattr(cores, "room_bytes", lambda _directory: 4 << 20)
    with pytest.raises(CoreError, match="has no room for it, decompressed"), ExitStack() as stack:
        stack.enter_context(cores._unpacked(core, str(tmp_path), time.monotonic() + 60.0))
    monkeypatch.setattr(cores, "room_bytes", lambda _directory: 32 << 20)
    with cores._unpacked(core, str(tmp_path), time.monotonic() + 60.0) as unpacked:
        assert os.fstat(unpacked.fileno()).st_size == 16 << 20
    assert os.listdir(tmp_path) == ["core.gz"]
