"""The name of the user whom this process works for, for people on other hosts."""

from __future__ import annotations

import os

_LONGEST_NAME = 100


def user_name() -> str:
    """The name; the number of a user who has none here, as in a container."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name[:_LONGEST_NAME]
    except KeyError:
        return str(os.geteuid())
