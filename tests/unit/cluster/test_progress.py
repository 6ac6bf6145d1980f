"""How long the ranks are watched; ``tests/process/test_progress_watch.py`` has what is seen of real ones."""

from __future__ import annotations

from saferun.cluster.progress import ProgressWatch
from saferun.linux.poller import Poller


def test_a_watch_that_begins_again_knows_nothing_of_the_previous_one() -> None:
    """What ranks did before the doubt says nothing about it; a second doubt meanwhile changes nothing."""
    watch = ProgressWatch(4.0, Poller())
    for began_at in (10.0, 500.0):
        watch.begin(began_at)
        watch.begin(began_at + 1.0)
        progress = watch.progress(began_at + 3.0, runs=True)
        assert (progress.watched_s, progress.still_s, progress.quiet_s) == (3.0, 3.0, 3.0)
        assert progress.unannounced_s == float("inf")
        assert watch.deadline == began_at
        watch.end()
        assert watch.deadline is None
