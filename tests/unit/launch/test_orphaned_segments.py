"""Looking at the ranks' shared memory before they are stopped never keeps them from being stopped."""

from __future__ import annotations

import errno
import os

import pytest

from saferun.launch.orphaned_segments import OrphanedSegments
from tests.descriptors import open_descriptors


@pytest.mark.parametrize("call", ["pipe", "fork"])
def test_segments_that_cannot_be_looked_at_are_left(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """No descriptor, or no process: the ranks' signal comes next, and is worth more."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    segments = OrphanedSegments()
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        segments.note([os.getpid()], since=0.0)
    assert not segments.is_noted
    segments.sweep()
    segments.close()
    assert open_descriptors() == before
