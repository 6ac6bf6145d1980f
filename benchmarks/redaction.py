"""How long it takes to leave secrets out: of Flight Recorder files, of everyday texts, and of texts made to take long.

Usage: python benchmarks/redaction.py [ROUNDS]

Times are processor time. For hostile texts the time for twice the length is divided by the time for the length: 2 is
linear, 4 would be quadratic.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from saferun.text.json_redaction import redacted_json_text
from saferun.text.redaction import redacted_text

_MIB = 1 << 20
_HOSTILE = (
    *("key=[", "key=/", "pass:/", "key=(", "-p [", "-u [x", "--token [--x=", "token='", "token='\\'", "key='"),
    *('token="', "token=\n", "--token ", "://", "http://a:b@", "key ", "password a_", "ghp_", "eyJ.", "sk-", "?sig=&"),
    *("-----BEGIN PRIVATE KEY-----", "hooks.slack.com/", "wandb login --", "Authorization: Bearer ", "a.b-c", "s."),
)
_EVERYDAY = (
    "futex(0x7f2c4c0012a8, FUTEX_WAIT_BITSET_PRIVATE, 0, {tv_sec=1, tv_nsec=5}, FUTEX_BITSET_MATCH_ANY) = -1 EAGAIN\n"
    "#12 0x00007f1e in c10d::ProcessGroupNCCL::WorkNCCL::wait (this=0x55, timeout=...) at ProcessGroupNCCL.cpp:712\n"
    '[rank3]:   File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1553, in _call_impl\n'
    "INFO step 1200 loss 2.3112 tokens/s 12345.6 lr 1e-4 max_tokens=512 tokenizer=gpt2 key_padding_mask=None\n"
)


def recorder_file(size_bytes: int) -> str:
    """An answer of torch's Flight Recorder of about so many bytes: many entries, few different names."""
    files = [f"/opt/venv/lib/python3.11/site-packages/torch/distributed/part_{number}.py" for number in range(40)]

    def entry(number: int) -> dict[str, object]:
        calls = [(number + call) % 300 for call in range(16)]
        return {
            "record_id": number,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + number * 1000,
            "input_sizes": [[number % 7 + 1, 4096]],
            "input_dtypes": ["BFloat16"],
            "state": "completed",
            "frames": [{"name": f"call_{one}", "filename": files[one % 40], "line": one} for one in calls],
        }

    one = len(json.dumps(entry(1000))) + 2
    return json.dumps({"version": "2.9", "entries": [entry(number) for number in range(size_bytes // one)]})


def median_s(rounds: int, run: Callable[[], object]) -> float:
    """The median of the processor time of some rounds."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main(rounds: int) -> None:
    """Measure and print."""
    say = sys.stdout.write
    recorded = recorder_file(16 * _MIB)
    parse_s = median_s(rounds, lambda: json.loads(recorded))
    redact_s = median_s(rounds, lambda: redacted_json_text(recorded))
    ratio = redact_s / parse_s
    say(f"Flight Recorder file of {len(recorded) / _MIB:.1f} MiB: {redact_s:.2f} s ({ratio:.1f} times json.loads)\n")
    different = json.dumps([f"text {number} token a/b-{number}" for number in range(60_000)])
    different_s = median_s(rounds, lambda: redacted_json_text(different))
    say(f"JSON of 60,000 different texts, {len(different) / _MIB:.1f} MiB: {different_s:.2f} s\n")
    everyday = _EVERYDAY * (_MIB // len(_EVERYDAY))
    everyday_s = median_s(rounds, lambda: redacted_text(everyday))
    say(f"stacks, system calls and log lines: {everyday_s:.2f} s a MiB\n\n")
    say(f"{'hostile text':32} {'s a MiB':>8} {'twice the length':>17}\n")
    for unit in _HOSTILE:
        text = unit * (_MIB // 4 // len(unit))
        once_s, twice_s = (median_s(rounds, partial(redacted_text, text * times)) for times in (1, 2))
        say(f"{unit!r:32} {once_s * 4:8.2f} {twice_s / max(once_s, 1e-6):17.1f}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
