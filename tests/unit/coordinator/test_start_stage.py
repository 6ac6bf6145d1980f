"""How far a start had come: what the ranks, the hook, the Flight Recorder and the ranks' store say."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from saferun.cluster.evidence import HostPart, HostPeer, decode_part, encode_part, merge_parts
from saferun.coordinator.init_progress import Stage, read_arrived
from saferun.coordinator.init_progress import start_stage as stage_in_store
from saferun.diagnosis import diagnose
from saferun.diagnosis.start_stage import StoreStage, read_store_stage, stage_by_time, start_stage
from saferun.evidence.job_evidence import (
    Capture,
    CoreDump,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    RankCollectives,
    RankOutput,
    StackDump,
    ThreadStack,
)
from saferun.linux.start_marks import group_times, ranks_with_group
from saferun.model import ExitStatus, RankEnd

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
INIT = Frame("init_process_group", f"{TORCH}/distributed_c10d.py", 1714)
WAIT = Frame("_env_rendezvous_handler", f"{TORCH}/rendezvous.py", 278)
SCRIPT = Frame("main", "/home/user/job/train.py", 12)
IN_INIT = (
    "Traceback (most recent call last):",
    '  File "/home/user/job/train.py", line 12, in main',
    '    dist.init_process_group("gloo")',
    f'  File "{TORCH}/distributed_c10d.py", line 1714, in init_process_group',
    "    default_pg, _ = _new_process_group_helper(",
    "RuntimeError: connectFullMesh failed",
)
ELSEWHERE = (*IN_INIT[:2], "KeyError: 'labels'")


def evidence(*lines: tuple[str, ...], code: int = 1, **more: Any) -> Evidence:
    """Two ranks, of which the first failed and the second was stopped; ``lines`` are their last words."""
    ends = (
        RankEnd(0, 0, 100, ExitStatus(code, None), 10.0, 1e9, stopped_by_us=False),
        RankEnd(1, 1, 101, ExitStatus(None, 15), 11.0, 1e9 + 1, stopped_by_us=True),
    )
    outputs = tuple(RankOutput(rank, said, "", "", 0.0) for rank, said in enumerate(lines))
    return Evidence("node1", 1.0, ends, outputs, (), None, ranks=(0, 1))._replace(**more)


def dump(rank: int, *frames: Frame) -> Capture:
    thread = ThreadStack("MainThread", 100 + rank, is_main=True, active=False, owns_gil=False, frames=frames)
    return Capture(stacks=(StackDump(rank, 100 + rank, True, "python", "py-spy", (thread,)),))


def recorded(*ranks: int) -> Capture:
    group = GroupProgress("0", "default_pg", (0, 1), -1, -1, -1, ())
    return Capture(collectives=tuple(RankCollectives(rank, (group,)) for rank in ranks))


# -------------------------------------------------------------------------------------------------------------- inside


def test_a_rank_that_fails_in_it_has_not_got_through() -> None:
    """Whatever the store says: in it the last steps of gloo and NCCL cannot be seen."""
    through = StoreStage("through", 2, 2)
    assert start_stage(evidence(IN_INIT), store=through) == "inside"
    assert start_stage(evidence(IN_INIT), marked={0, 1}) == "inside"
    assert start_stage(evidence(ELSEWHERE), store=through) == "through"


def test_a_rank_that_is_still_in_it_has_not_got_through() -> None:
    """The others failed while it waited for them."""
    waiting = evidence(ELSEWHERE, capture=dump(1, WAIT, INIT, SCRIPT))
    assert start_stage(waiting, store=StoreStage("through", 2, 2)) == "inside"
    elsewhere = evidence(ELSEWHERE, capture=dump(1, SCRIPT))
    assert start_stage(elsewhere, store=StoreStage("through", 2, 2)) == "through"


def test_a_function_of_the_same_name_is_not_it() -> None:
    """Other libraries have their own."""
    own = evidence(ELSEWHERE, capture=dump(1, INIT._replace(file="/opt/lib/deepspeed/comm/torch.py")))
    assert start_stage(own) == ""


def test_words_of_an_error_that_was_got_over_do_not_count() -> None:
    """Scripts that try again themselves log the traceback of each try; and ranks that we stop say what they like."""
    assert start_stage(evidence((*IN_INIT, *ELSEWHERE)), marked={0, 1}) == "through"
    assert start_stage(evidence((), IN_INIT), marked={0, 1}) == "through"
    assert start_stage(evidence(IN_INIT, code=0), marked={0, 1}) == "through"


def test_a_crash_in_it_is_one_in_it() -> None:
    """A core, or what faulthandler has said."""
    thread = ThreadStack("crashed", 100, is_main=True, active=True, owns_gil=True, frames=(WAIT, INIT, SCRIPT))
    core = CoreDump(0, 100, 11, "/run/core", 1, False, "pystack", (thread,))
    assert start_stage(evidence((), cores=(core,))) == "inside"
    assert start_stage(evidence((), cores=(core._replace(pid=7),))) == ""
    fatal = (
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        f'  File "{TORCH}/distributed_c10d.py", line 1714 in init_process_group',
        '  File "/home/user/job/train.py", line 12 in main',
    )
    assert start_stage(evidence(fatal)) == "inside"


# -------------------------------------------------------------------------------------------------------------- through


@pytest.mark.parametrize(
    "found",
    [
        {"capture": recorded(0, 1)},
        {"outputs": tuple(RankOutput(rank, (f"[rank{rank}]: KeyError: 1",), "", "", 0.0) for rank in (0, 1))},
    ],
)
def test_ranks_that_have_a_process_group_have_got_through(found: dict[str, Any]) -> None:
    """Whatever the store says: they may have met by another one."""
    assert start_stage(evidence()._replace(**found), store=StoreStage("before", 0, 2)) == "through"


def test_all_of_them_together_count() -> None:
    """One is known by the hook, the other by the recorder."""
    assert start_stage(evidence(capture=recorded(1)), marked={0}) == "through"


def test_one_that_has_one_and_one_that_has_none_are_a_failed_start() -> None:
    """Both have the same hook and the same torch. The store knows better."""
    assert start_stage(evidence(ELSEWHERE), marked={1}) == "inside"
    assert start_stage(evidence(ELSEWHERE), marked={1}, store=StoreStage("through", 2, 2)) == "through"
    assert start_stage(evidence(ELSEWHERE), marked={1}, store=StoreStage("before", 0, 2)) == "inside"


def test_another_ranks_number_before_a_line_proves_nothing() -> None:
    """A script may print what others have said."""
    assert start_stage(evidence(("[rank1]: KeyError: 1",))) == ""


@pytest.mark.parametrize("stage", ["before", "inside", "through"])
def test_else_the_store_says_it(stage: str) -> None:
    """And nobody, where that cannot be asked."""
    assert start_stage(evidence(ELSEWHERE), store=StoreStage(stage, 1, 2)) == stage
    assert start_stage(evidence(ELSEWHERE), store=StoreStage()) == ""


# ----------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("stage", ["", "before"])
def test_where_the_ranks_cannot_be_asked_it_is_a_matter_of_time_and_of_progress(stage: str) -> None:
    """A script without torch.distributed that has worked for hours has not failed to start."""
    assert stage_by_time(stage, elapsed_s=119.9, window_s=120.0, has_progressed=False) == "before"
    assert stage_by_time(stage, elapsed_s=120.0, window_s=120.0, has_progressed=False) == "through"
    assert stage_by_time(stage, elapsed_s=1.0, window_s=120.0, has_progressed=True) == "through"


@pytest.mark.parametrize("stage", ["inside", "through"])
def test_what_is_known_is_not_overruled_by_time(stage: str) -> None:
    """A rank may wait for half an hour in it."""
    assert stage_by_time(stage, elapsed_s=1800.0, window_s=120.0, has_progressed=False) == stage
    assert stage_by_time(stage, elapsed_s=1.0, window_s=120.0, has_progressed=True) == stage


# ---------------------------------------------------------------------------------------------------------------- hosts


def part(host: int, start: str) -> HostPart:
    ranks = (2 * host, 2 * host + 1)
    return HostPart(
        host, 0, f"node{host}", 0.0, Evidence(f"node{host}", 0.0, (), (), (), None, ranks=ranks, start=start)
    )


@pytest.mark.parametrize(
    ("starts", "together"),
    [
        (("through", "through"), "through"),
        (("inside", "through"), "inside"),
        (("", "inside"), "inside"),
        (("before", "through"), "inside"),
        (("before", "before"), "before"),
        (("", "through"), ""),
        (("through",), ""),
        (("nonsense", "through"), ""),
    ],
)
def test_hosts_are_through_together(starts: tuple[str, ...], together: str) -> None:
    """One host's ranks inside are a failed start; a host of which nothing has come is not known to be through."""
    parts = [part(host, start) for host, start in enumerate(starts)]
    peers = [HostPeer(host, f"node{host}", (2 * host, 2 * host + 1)) for host in range(2)]
    merged = merge_parts(parts, world_size=4, peers=peers)
    assert merged.start == together
    # The host that leads asks the store as well.
    assert start_stage(merged, store=StoreStage("inside", 3, 4)) == (together if together == "through" else "inside")


@pytest.mark.parametrize("limit_bytes", [100_000, 400])
def test_how_far_it_had_come_is_in_a_hosts_part(limit_bytes: int) -> None:
    """In the smallest as well."""
    decoded = decode_part(encode_part(evidence(IN_INIT, start="inside"), limit_bytes))
    assert decoded is not None
    assert decoded.start == "inside"


def test_the_diagnosis_says_it_too() -> None:
    """The policy decides by it; of crashes and of hangs."""
    assert diagnose(evidence(ELSEWHERE, start="inside")).start == "inside"
    hang = HangVerdict("quiescent", (0, 1), 60.0, certain=True)
    assert diagnose(evidence()._replace(ends=(), hang=hang, start="before")).start == "before"


# ----------------------------------------------------------------------------------------------------------------- hook


def test_the_hooks_sockets_tell_which_ranks_have_a_process_group(tmp_path: Path) -> None:
    """Of the dead as well; rank 1's prefix is the beginning of rank 11's."""
    for name in ("a0r0.100.sock", "a0r11.111.sock", "a0r2.102.stacks", "a1r3.5.sock"):
        (tmp_path / name).touch()
    prefixes = {rank: f"{tmp_path}/a0r{rank}" for rank in (0, 1, 2, 3, 11)}
    assert ranks_with_group(prefixes) == {0, 11}
    assert ranks_with_group({0: "", 1: f"{tmp_path}/gone/a0r1"}) == frozenset()


# ---------------------------------------------------------------------------------------------------------------- store


class FakeStore:
    """A store's keys."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def list_keys(self) -> list[str]:
        return list(self.keys)


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, int]]:
    """A server that takes one request and answers with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 12)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join()


ADDRESSES = tuple(f"default_pg/0//cpu//0/{rank}" for rank in range(2))


@pytest.mark.parametrize(
    ("arrived", "keys", "world_size", "found"),
    [
        (0, (), 2, Stage("before", 0, 2)),
        (1, ADDRESSES[:1], 2, Stage("inside", 1, 2)),
        (2, ADDRESSES[:1], 2, Stage("inside", 2, 2)),
        (2, ADDRESSES, 2, Stage("through", 2, 2)),
        (2, (f"/worker/attempt_0/{ADDRESSES[0]}",), 2, Stage("inside", 2, 2)),
        # NCCL leaves no address; a rank may come twice; other groups' keys are others'.
        (2, (), 2, Stage("through", 2, 2)),
        (3, ("default_pg/1//cpu//0/0",), 2, Stage("through", 2, 2)),
        (1, (), 0, Stage("inside", 1, 0)),
    ],
)
def test_the_store_tells_by_who_has_come_and_what_was_left(
    arrived: int, keys: tuple[str, ...], world_size: int, found: Stage
) -> None:
    """All must have come, and with gloo all must have left their address."""
    with answering(struct.pack("=q", arrived)) as address:
        assert stage_in_store(FakeStore(*keys), address, world_size) == found


def test_a_store_that_cannot_list_its_keys_is_believed_by_its_number() -> None:
    """Older releases of torch cannot."""
    with answering(struct.pack("=q", 2)) as address:
        assert stage_in_store(object(), address, 2) == Stage("through", 2, 2)


def test_what_is_no_store_tells_nothing() -> None:
    """It answers nothing, half an answer, or is not there."""
    for answer in (b"", b"1234"):
        with answering(answer) as address:
            assert read_arrived(address) == -1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = listener.getsockname()
    assert stage_in_store(FakeStore(*ADDRESSES), gone, 2) == Stage("", -1, 2)


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {"stage": "over", "arrived": 1, "world_size": 2},
        {"stage": ["inside"], "arrived": 1, "world_size": 2},
        {"stage": "inside", "arrived": "1", "world_size": 2},
        {"stage": "inside", "arrived": True, "world_size": 2},
        {"stage": "inside"},
    ],
)
def test_an_answer_that_is_none_says_nothing(message: object) -> None:
    """The same as no answer."""
    assert read_store_stage(message) == StoreStage()


def test_an_answer_is_read() -> None:
    """As the coordinator writes it."""
    assert read_store_stage({"op": "start_stage", "attempt": 0, **Stage("inside", 1, 2)._asdict()}) == ("inside", 1, 2)


def test_the_socket_of_the_hook_tells_when_a_rank_had_its_first_process_group(tmp_path: Path) -> None:
    """Of several processes of a rank the first one counts."""
    for name, time in (("a0r1.10.sock", 2000), ("a0r1.11.sock", 1000), ("a0r11.12.sock", 3000), ("a1r2.13.sock", 4000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    prefixes = {rank: f"{tmp_path}/a0r{rank}" for rank in (1, 2, 11)} | {5: ""}
    assert group_times(prefixes) == {1: 1000.0, 11: 3000.0}
