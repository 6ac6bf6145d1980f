"""How many examples a property gets that needs more than the others do."""

from __future__ import annotations

from hypothesis import settings

_PART = 8


def examples(many: int) -> settings:
    """So many of them; in `make test`, whose profile is "quick" (tests/unit/conftest.py), an eighth."""
    is_quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=many // _PART if is_quick else many, deadline=None)
