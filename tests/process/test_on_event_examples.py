"""The examples for --on-event send what they say, to a server on this host."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "on_event"
EVENT = {
    "schema": "saferun.event/1",
    "kind": "failure",
    "run_id": "5f2c1a",
    "run_dir": "/nowhere/run",
    "host": "node1",
    "attempt": 0,
    "time": 1.0,
    "headline": "rank 1 failed first: ValueError: bad batch",
    "hint": "look at the data",
    "ranks": [1],
    "exit_code": 1,
    "outcome": "ended",
    "report": "/nowhere/run/report.json",
}


def run(name: str, event: dict[str, Any], **environ: str) -> None:
    subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        input=json.dumps(event).encode(),
        env={**os.environ, **environ},
        check=True,
        timeout=60,
    )


def test_slack_gets_the_headline_and_nothing_about_a_good_end() -> None:
    bodies: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        run("slack.py", EVENT, SLACK_WEBHOOK_URL=url)
        run("slack.py", {**EVENT, "kind": "end", "outcome": "succeeded"}, SLACK_WEBHOOK_URL=url)
        server.shutdown()
    (body,) = bodies
    assert "rank 1 failed first: ValueError: bad batch" in body["text"]
    assert "look at the data" in body["text"]


def test_a_mail_has_the_headline_as_its_subject(tmp_path: Path) -> None:
    """A module of the same name stands for the mail server."""
    (tmp_path / "smtplib.py").write_text(
        "class SMTP:\n"
        "    def __init__(self, *where, timeout): self.where = where\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        f"    def send_message(self, message): open({str(tmp_path / 'sent')!r}, 'w').write(message.as_string())\n"
    )
    run("mail.py", EVENT, MAIL_TO="me@example.org", PYTHONPATH=str(tmp_path))
    sent = (tmp_path / "sent").read_text()
    assert "Subject: saferun failure: rank 1 failed first: ValueError: bad batch" in sent
    assert "To: me@example.org" in sent
