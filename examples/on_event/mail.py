"""Sends events of a launch by mail, through the mail server of this host or of MAIL_SERVER (HOST or HOST:PORT).

MAIL_TO=me@example.org saferun --on-event "python examples/on_event/mail.py" --nproc-per-node 4 train.py
"""

from __future__ import annotations

import json
import os
import smtplib
import sys
from email.message import EmailMessage
from pathlib import Path


def main() -> None:
    """Read the event and send it, with report.txt if there is one."""
    event = json.load(sys.stdin)
    message = EmailMessage()
    message["Subject"] = f"saferun {event['kind']}: {event['headline'][:120]}"
    message["From"] = os.environ.get("MAIL_FROM", os.environ["MAIL_TO"])
    message["To"] = os.environ["MAIL_TO"]
    lines = [event["headline"], event["hint"], f"files: {event['run_dir']}"]
    message.set_content("\n".join(line for line in lines if line))
    report = Path(event["run_dir"]) / "report.txt"
    if event["report"] and report.is_file():
        message.add_attachment(report.read_text(errors="replace")[: 1 << 20], filename="report.txt")
    host, _, port = os.environ.get("MAIL_SERVER", "localhost").partition(":")
    with smtplib.SMTP(host, int(port or 25), timeout=10) as server:
        server.send_message(message)


if __name__ == "__main__":
    main()
