"""All ranks of a group meet in the store: a barrier for any backend, which names who is missing, and a health check."""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    import torch
    from torch.distributed import ProcessGroup

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_MOST_NAMED = 32

_counts: dict[tuple[str, tuple[int, ...]], int] = {}  # how often this process has met others for a purpose


class RanksMissingError(TimeoutError):
    """Not all ranks have come in time.

    Attributes:
        ranks: those that have not.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StoreMeeting:
    """One meeting of the ranks of a group: each can leave something, and read what others have left.

    The keys of a meeting are removed at the next one of its kind, when all ranks have left it, or by ``remove``.

    Args:
        purpose: all ranks meet for the same purpose in the same order.
        group: the group; None: all ranks.
        timeout_s: how long others are waited for, from now on.
    """

    def __init__(self, purpose: str, group: ProcessGroup | None, timeout_s: float) -> None:
        self.ranks: tuple[int, ...] = (0,)
        if "torch" not in sys.modules:
            self.rank, self._store = 0, None  # then there is no process group either
            return
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not (dist.is_available() and dist.is_initialized()):
            self.rank, self._store = 0, None
            return
        self.rank = dist.get_rank()
        self.ranks = _ranks_of(group)
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in this group")
        store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name
        self._store = store
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._what = purpose
        kind = (purpose, self.ranks)
        number = _counts[kind] = _counts.get(kind, 0) + 1
        members = "-".join(map(str, self.ranks)) if len(self.ranks) <= _MOST_NAMED else str(hash(self.ranks))
        self._base = f"saferun/{purpose}/{members}"
        self._number = number

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._base}/{self._number if number is None else number}/{name}"

    def leave(self, content: bytes = b"1") -> None:
        """Leave something for the others."""
        if self._store is not None:
            self._store.set(self._key(str(self.rank)), content or b"\0")

    def await_all(self) -> None:
        """Wait until all have left something.

        Raises:
            RanksMissingError: some have not in time.
        """
        missing = list(self.ranks)
        pause_s = _LEAST_PAUSE_S
        while self._store is not None:
            # One by one, since a store says only whether all of several keys are there.
            while missing and self._store.check([self._key(str(missing[-1]))]):
                missing.pop()
            if not missing:
                break
            if time.monotonic() >= self._until:
                missing = [rank for rank in missing if not self._store.check([self._key(str(rank))])]
                if missing:
                    raise RanksMissingError(self._text(missing), missing)
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        self._remove_last()

    def read(self, rank: int) -> bytes:
        """What a rank has left; only after ``await_all``."""
        content: bytes = self._store.get(self._key(str(rank))) if self._store is not None else b""
        return content

    def _text(self, missing: list[int]) -> str:
        came = len(self.ranks) - len(missing)
        named = ", ".join(map(str, missing[:_MOST_NAMED])) + (" …" if len(missing) > _MOST_NAMED else "")
        who = f"rank{'s' if len(missing) > 1 else ''} {named}"
        return f"{self._what}: {who} did not come within {self._timeout_s:g} s; {came} of {len(self.ranks)} ranks did"

    def remove(self, rank: int) -> None:
        """Remove what a rank has left, where this one alone reads it."""
        self._delete(self._key(str(rank)))

    def _remove_last(self) -> None:
        """All have come to this meeting, so all have left the previous one."""
        if self._store is not None and self._number > 1:
            self._delete(self._key(str(self.rank), self._number - 1))

    def _delete(self, key: str) -> None:
        if self._store is not None:
            try:
                self._store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                pass  # some stores cannot


def barrier(timeout_s: float = 60.0, group: ProcessGroup | None = None, what: str = "barrier") -> None:
    """Wait until all ranks of a group are here; for any backend, also one that hangs.

    It meets in the store and does not use the backend: it synchronizes no GPU. Costs some round trips to the store for
    each rank of the group (0.1 ms each on one host), and up to 50 ms of waiting.

    Args:
        timeout_s: how long to wait for the others.
        group: the group; None: all ranks. Without a process group it does nothing.
        what: its name in the error; the ranks of a group call it by the same names in the same order.

    Raises:
        RanksMissingError: some did not come in time. They are named, on each rank that did.
    """
    meeting = StoreMeeting(what, group, timeout_s)
    meeting.leave()
    meeting.await_all()


def all_reduce_check(timeout_s: float = 60.0, group: ProcessGroup | None = None) -> float:
    """Run one small all_reduce, and check its sum: does communication work, and between all ranks?

    It first makes sure that all ranks are there, and then who has come through. Costs one all_reduce of 8 bytes and two
    barriers of this module; with NCCL the first one of a group makes its communicator.

    Args:
        timeout_s: for each of the three steps.
        group: the group; None: all ranks. Without a process group it does nothing.

    Returns:
        how many seconds the all_reduce took.

    Raises:
        RanksMissingError: some did not come, or did not come through.
        RuntimeError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0.0
    barrier(timeout_s, group, "all_reduce_check, before")
    ranks = _ranks_of(group)
    value = torch.tensor([dist.get_rank() + 1], dtype=torch.int64, device=_device(group))
    began = time.monotonic()
    work = dist.all_reduce(value, group=group, async_op=True)
    pause_s = _LEAST_PAUSE_S
    while work is not None and not work.is_completed() and time.monotonic() - began < timeout_s:
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
    took_s = time.monotonic() - began
    meeting = StoreMeeting("all_reduce_check, after", group, timeout_s)
    if work is None or work.is_completed():
        meeting.leave()
    meeting.await_all()
    if work is not None:
        work.wait()
    found, wanted = int(value.item()), sum(ranks) + len(ranks)
    if found != wanted:
        raise RuntimeError(f"all_reduce_check: the sum of {len(ranks)} ranks is {found} instead of {wanted}")
    return took_s


def _ranks_of(group: ProcessGroup | None) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(range(dist.get_world_size())) if group is None else tuple(dist.get_process_group_ranks(group))


def _device(group: ProcessGroup | None) -> torch.device:
    import torch
    import torch.distributed as dist

    is_on_gpu = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
