"""What ranks print in order, and that nothing of it stays in the store. Without torch: the store is a dictionary."""

from __future__ import annotations

import pytest

from saferun.api.script import rank_prints
from saferun.api.script.rank_meeting import StoreMeeting

RANKS = (0, 1, 2)


class Store(dict[str, bytes]):
    """As much of torch's store as a meeting uses."""

    def set(self, key: str, content: bytes) -> None:
        self[key] = content

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Job:
    """Ranks in one process, which come one after the other; the first one comes last, since it waits for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.rank, self.calls = Store(), 0, 0
        job = self

        class Meeting(StoreMeeting):
            def __init__(self, purpose: str, group: object, timeout_s: float) -> None:
                assert group is None
                self.ranks, self.rank, self._store = RANKS, job.rank, job.store
                self._until, self._timeout_s, self._what = 0.0, timeout_s, purpose
                self._base, self._number = f"saferun/{purpose}", job.calls

        monkeypatch.setattr(rank_prints, "StoreMeeting", Meeting)

    def print_in_order(self, *ranks: int) -> None:
        self.calls += 1
        for rank in sorted(ranks, reverse=True):
            self.rank = rank
            rank_prints.print_in_order("I am", rank)


def test_the_first_rank_removes_what_it_has_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It alone reads it, and the store of a long job would fill with it."""
    job = Job(monkeypatch)
    for _ in range(3):
        job.print_in_order(*RANKS)
        assert job.store == {}
    assert capsys.readouterr().out == "rank 0: I am 0\nrank 1: I am 1\nrank 2: I am 2\n" * 3


def test_a_rank_that_has_not_come_keeps_the_others_from_neither_print_nor_removal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(monkeypatch)
    job.print_in_order(0, 2)
    assert job.store == {}
    assert capsys.readouterr().out == "rank 0: I am 0\nrank 1: (has not come)\nrank 2: I am 2\n"


def test_a_store_that_removes_nothing_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_store: Store, _key: str) -> bool:
        raise NotImplementedError

    monkeypatch.setattr(Store, "delete_key", refuse)
    Job(monkeypatch).print_in_order(*RANKS)
    assert capsys.readouterr().out.count("I am") == len(RANKS)
