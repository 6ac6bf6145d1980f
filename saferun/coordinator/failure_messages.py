"""Why the hosts of a rendezvous get no assignments, as they tell each other in the control store."""

from __future__ import annotations

import json

from saferun.cluster.join_messages import EndNote
from saferun.coordinator.rendezvous_round import JoinFailedError, JoinFailure
from saferun.coordinator.store_client import FORGED, StoreClient
from saferun.text.decoding import MALFORMED, display_text, loads
from saferun.text.typed_json import fit

LONGEST_MESSAGE = 4096
_NAMED = ("incomplete", "needless", "again", "gone")  # what comes from outside need not be hashable


def failure_text(error: JoinFailedError, *, is_again: bool = False) -> str:
    """The error as ``read_failure`` reads it: what, hint, its kind, and who has ended the job.

    The kind is true for a usage error. Older releases know no other one, and take them all for no usage error.
    ``is_again``: whoever reads it is to meet the others again.
    """
    kind: str | bool = "again" if is_again else error.is_usage or error.kind or False
    message: list[object] = [error.what[:LONGEST_MESSAGE], error.hint[:LONGEST_MESSAGE]]
    if error.end is not None:
        return json.dumps([*message, kind, error.end._asdict()])
    return json.dumps([*message, kind] if kind else message)


def publish_failure(client: StoreClient, prefix: str, error: JoinFailedError) -> None:
    """Let all hosts of a rendezvous fail, with the same message."""
    text = failure_text(error)
    if client.create(f"{prefix}fail", text) == FORGED:
        client.set(f"{prefix}fail", text)


def read_failure(text: bytes | None) -> JoinFailedError | None:
    """What ``publish_failure`` has written; None: nothing that can be read."""
    if text is None:
        return None
    try:
        what, hint, *more = loads(text, longest=4 * LONGEST_MESSAGE)
        what, hint = display_text(what, LONGEST_MESSAGE), display_text(hint, LONGEST_MESSAGE)
        end: EndNote | None = fit(EndNote, more[1]) if len(more) > 1 else None
        found = more[0] if more else False
        kind: JoinFailure = "usage" if found is True else found if found in _NAMED else ""
        return JoinFailedError(what, hint, kind=kind, is_published=True, end=end)
    except MALFORMED:
        return None
