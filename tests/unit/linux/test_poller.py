"""What is called when several descriptors are ready at once, and one handler gives another's number away."""

from __future__ import annotations

import os

from saferun.linux.poller import Poller


def test_a_descriptor_that_got_the_number_of_a_ready_one_is_not_taken_for_ready() -> None:
    """Its handler would read what is not there: some take an empty read for the end of their process."""
    poller, called = Poller(), list[str]()
    (first, first_end), (second, second_end), (third, third_end) = os.pipe(), os.pipe(), os.pipe()

    def replace() -> None:
        called.append("first")
        os.read(first, 1)
        poller.unwatch(second)
        os.dup2(third, second)
        poller.watch(second, lambda: called.append("third"))

    poller.watch(first, replace)
    poller.watch(second, lambda: called.append("second"))
    os.write(first_end, b"x")
    os.write(second_end, b"x")
    try:
        poller.wait(0)
        assert called == ["first"]
        os.write(third_end, b"x")
        poller.wait(0)
        assert called == ["first", "third"]
    finally:
        poller.close()
        for fd in (first, first_end, second, second_end, third, third_end):
            os.close(fd)
