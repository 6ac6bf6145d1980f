"""What stands before a line."""

from __future__ import annotations

import pytest

from saferun.console.prefix import FIELDS, check_template, colored, render_legacy, render_template
from saferun.errors import UsageError


def test_the_default_prefix_names_host_and_rank() -> None:
    """[node3:25]."""
    assert render_template("[{host}:{rank}] ", host="node3", rank=25, local_rank=1, role="w") == "[node3:25] "
    shown = render_template(
        "{host_digits} {rank:>4} {local_rank} {role}", host="gpu-07", rank=2, local_rank=1, role="w"
    )
    assert shown == "07    2 1 w"
    assert render_template("{host_digits}", host="alpha", rank=0, local_rank=0, role="w") == "alpha"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_may_be_used(field: str) -> None:
    """The list in the hint is the list that works."""
    check_template(f"{{{field}}}")


@pytest.mark.parametrize("template", ["{rnk}", "{", "}", "{}", "{0}", "{rank!z}", "{rank.x}", "{rank[0]}", "{host:d}"])
def test_a_template_that_cannot_be_filled_in_is_refused(template: str) -> None:
    """At the start, not in the middle of a rank's first line."""
    with pytest.raises(UsageError, match="--prefix"):
        check_template(template)


def test_torchruns_template_is_filled_in_as_torchrun_does_it() -> None:
    """With string.Template; what it does not know stays."""
    template = "[${role_name}${rank}|${local_rank}|${other}]:$hostname "
    shown = render_legacy(template, hostname="r12i0n8", rank=3, local_rank=1, role="trainer")
    assert shown == "[trainer3|1|${other}]:r12i0n8 "


def test_neighbours_have_different_colours() -> None:
    """That is what the colours are for; an empty prefix has none."""
    assert colored("p", 0).split("p")[0] != colored("p", 1).split("p")[0]
    assert colored("p", 3).endswith("\x1b[0m")
    assert colored("", 3) == ""
