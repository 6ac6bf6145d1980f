"""Sends events of a launch to a Slack channel.

    SLACK_WEBHOOK_URL=https://hooks.slack.com/services/... \
        saferun --on-event "python examples/on_event/slack.py" --nproc-per-node 4 train.py

A launch that ends well is not worth a message: its event is left out.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def text_of(event: dict[str, Any]) -> str:
    """The message for one event."""
    lines = [f"*{event['kind']}* on {event['host']}: {event['headline']}"]
    lines += [event["hint"]] if event["hint"] else []
    lines += [f"`{event['report']}`"] if event["report"] else []
    return "\n".join(lines)


def main() -> None:
    """Read the event and send it."""
    event = json.load(sys.stdin)
    if event["kind"] == "end" and event["outcome"] == "succeeded":
        return
    request = urllib.request.Request(  # noqa: S310 - the address is the user's own
        os.environ["SLACK_WEBHOOK_URL"],
        json.dumps({"text": text_of(event)}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310


if __name__ == "__main__":
    main()
