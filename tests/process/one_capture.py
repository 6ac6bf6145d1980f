"""A capture in a process of its own: a request of ``wire`` on stdin, its results on stdout, one JSON line each."""

from __future__ import annotations

import json
import os
import sys
import time

from saferun.captures.wire import CaptureRequest, CoreRequest, request_from, request_value
from saferun.text.decoding import loads

_REQUEST_LIMIT_BYTES = 16 << 20


def encode_request(request: CaptureRequest | CoreRequest) -> bytes:
    """What is to be written to stdin, which is then to be closed."""
    return json.dumps(request_value(request)).encode()


def decode_request(content: bytes) -> CaptureRequest | CoreRequest:
    """The other end of it.

    Raises:
        ValueError: it is no request.
    """
    return request_from(loads(content))


def main() -> int:
    """Read the request, do it, exit with 0; with 2 where it is no request."""
    started_at = time.monotonic()
    from saferun.captures.capture_processes import run_request

    content = sys.stdin.buffer.read(_REQUEST_LIMIT_BYTES)
    try:
        request = decode_request(content)
    except (ValueError, TypeError, KeyError) as error:
        from saferun.errors import SaferunError

        what = f"this is no request to look at processes: {error}"
        sys.stderr.write(f"{SaferunError(what, 'saferunctl stacks PID')}\n")
        return 2
    try:
        run_request(request, _write, started_at)
    except BrokenPipeError:
        return 0  # nobody wants to know any more
    return 0


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


if __name__ == "__main__":
    sys.stdout.flush()
    # Threads of ours may wait in the kernel for others; an ordinary exit would wait for them.
    os._exit(main())
