"""What a launch has printed says why it has failed, where it has written no report."""

from __future__ import annotations

import pytest

from saferun.api.launched_run import printed_failure

WARNING = "saferun: --metrics: /nowhere: No such file or directory; the job does not depend on it\n"
FAILURE = "saferun: rank 1 failed first: ValueError: bad batch\n  stopped because of it: rank 0\n"
REFUSAL = "saferun: there is no script x.py\nhint: check the path\n"


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("", ("", "")),
        ("[vm:0] saferun: not its own\n", ("", "")),
        (REFUSAL, ("there is no script x.py", "check the path")),
        (WARNING + FAILURE, ("rank 1 failed first: ValueError: bad batch", "")),
        (FAILURE + WARNING, ("rank 1 failed first: ValueError: bad batch", "")),
        (FAILURE + "hint: fix it\n" + WARNING, ("rank 1 failed first: ValueError: bad batch", "fix it")),
        (
            FAILURE + "saferun: not started again: 1 restart is used up\n" + REFUSAL,
            ("there is no script x.py", "check the path"),
        ),
        (WARNING + "[vm:0] a\n  b\nhint: of a rank\n", (WARNING.removeprefix("saferun: ").rstrip("\n"), "")),
    ],
)
def test_the_last_message_of_several_lines_is_the_failure(stderr: str, expected: tuple[str, str]) -> None:
    """Warnings are single lines."""
    assert printed_failure(stderr) == expected
