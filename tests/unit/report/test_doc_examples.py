"""The examples in the documents are what saferun prints today."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.job_evidence import Capture, Evidence, Frame, StackDump
from saferun.model import ExitStatus, RankEnd
from saferun.preflight.checks import clock
from saferun.preflight.findings_text import result_lines, table_lines
from saferun.report.console_text import failure_text, hang_text, peer_text
from tests.unit.found_samples import FINISH, RETRY, found, infos_of
from tests.unit.host_samples import failed
from tests.unit.preflight.host_roots import Root
from tests.unit.report import preflight_examples
from tests.unit.report.report_samples import (
    ALL_REDUCE,
    FILES,
    QUIET,
    SEGFAULT,
    SITE,
    dump_of,
    evidence_with,
    output_of,
    recorder_of,
    sleeping,
    snapshot_of,
    stopped,
    thread_of,
)

ROOT = Path(__file__).parents[3]
PYTHON = "/usr/lib/python3.11"
LOADER = f"{SITE}/utils/data/dataloader.py"
WRAPPER = Frame("wrapper", f"{SITE}/distributed/c10d_logger.py", 83)
ALL_REDUCE_213 = ALL_REDUCE._replace(line=3252)


def hang_of_a_worker() -> Evidence:
    """``examples/hang.py --how loader``: a data-loader worker of rank 3 waits for a lock."""
    file = "/home/me/examples/hang.py"
    module = Frame("<module>", file, 159)
    waiting = (module, Frame("main", file, 154), WRAPPER, ALL_REDUCE_213)
    loading = (
        module,
        Frame("main", file, 153),
        Frame("load_from_a_worker_that_deadlocks", file, 118),
        Frame("_BaseDataLoaderIter.__next__", LOADER, 741),
        Frame("_MultiProcessingDataLoaderIter._next_data", LOADER, 1520),
        Frame("_MultiProcessingDataLoaderIter._get_data", LOADER, 1480),
        Frame("_MultiProcessingDataLoaderIter._try_get_data", LOADER, 1320),
        Frame("Queue.get", f"{PYTHON}/multiprocessing/queues.py", 113),
        Frame("_ConnectionBase.poll", f"{PYTHON}/multiprocessing/connection.py", 257),
        Frame("Connection._poll", f"{PYTHON}/multiprocessing/connection.py", 440),
        Frame("wait", f"{PYTHON}/multiprocessing/connection.py", 947),
        Frame("_PollLikeSelector.select", f"{PYTHON}/selectors.py", 415),
    )
    worker = (
        Frame("_worker_loop", f"{SITE}/utils/data/_utils/worker.py", 349),
        Frame("_MapDatasetFetcher.fetch", f"{SITE}/utils/data/_utils/fetch.py", 54),
        Frame("<listcomp>", f"{SITE}/utils/data/_utils/fetch.py", 54),
        Frame("DatasetThatDeadlocks.__getitem__", file, 112),
    )
    capture = Capture(
        processes=(
            *(snapshot_of(rank) for rank in range(3)),
            snapshot_of(3, "poll", "do_poll"),
            snapshot_of(3)._replace(pid=14560, ppid=4003, is_rank=False, name="pt_data_worker"),
        ),
        stacks=(
            *(dump_of(rank, waiting) for rank in range(3)),
            dump_of(3, loading),
            StackDump(3, 14560, False, "pt_data_worker", "py-spy", (thread_of(worker),)),
        ),
        collectives=tuple(recorder_of(rank, 3 if rank == 3 else 4, 4, completed=3) for rank in range(4)),
    )
    verdict = QUIET._replace(ranks=(0, 1, 2, 3), lasted_s=17.0)
    return evidence_with(4, host="vm", script=file, capture=capture, hang=verdict)


def exception_in_one_rank() -> Evidence:
    """``examples/crash.py --how raise``: rank 3 raises, rank 2 has lost its connection to it."""
    file = "/home/me/examples/crash.py"
    waiting = (Frame("<module>", file, 167), Frame("main", file, 162), WRAPPER, ALL_REDUCE_213)
    traceback = (
        "Traceback (most recent call last):",
        '  File "examples/crash.py", line 167, in <module>',
        "    main()",
        '  File "examples/crash.py", line 161, in main',
        "    WAYS[args.how]()",
        '  File "examples/crash.py", line 55, in raise_an_exception',
        '    print(batch["labels"])',
        "          ~~~~~^^^^^^^^^^",
        "KeyError: 'labels'",
    )
    lost = (
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "examples/crash.py", line 167, in <module>',
        "[rank2]:     main()",
        '[rank2]:   File "examples/crash.py", line 162, in main',
        "[rank2]:     dist.all_reduce(torch.ones(1))",
        f'[rank2]:   File "{SITE}/distributed/c10d_logger.py", line 83, in wrapper',
        "[rank2]:     return func(*args, **kwargs)",
        f'[rank2]:   File "{SITE}/distributed/distributed_c10d.py", line 3252, in all_reduce',
        "[rank2]:     work.wait()",
        "[rank2]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12688",
    )
    path = "saferun-runs/20261123-054927-28cf86/vm/attempt_0/rank_3/stderr.log"
    end = RankEnd(3, 3, 29653, ExitStatus(1, None), 103.9, 1.7e9, stopped_by_us=False, clock="05:49:30")
    return evidence_with(
        4,
        host="vm",
        started_at=100.0,
        script="examples/crash.py",
        cwd="/home/me",
        ends=(end, *(stopped(rank)._replace(at=104.5) for rank in range(3))),
        outputs=(
            *(output_of(rank, ()) for rank in range(2)),
            output_of(2, lost),
            output_of(3, traceback)._replace(stderr_path=path),
        ),
        capture=Capture(
            processes=tuple(snapshot_of(rank, "munmap" if rank == 2 else "futex", "") for rank in range(3)),
            stacks=(dump_of(0, waiting), dump_of(1, waiting), dump_of(2, ())),
        ),
    )


def printed_hang() -> list[str]:
    evidence = hang_of_a_worker()
    assert evidence.hang is not None
    files = "saferun-runs/20261122-132849-fd892c"
    return hang_text(diagnose(evidence), evidence.hang, host="vm", files=files, on_hang="report", count=1, next_s=15.0)


def printed_crash() -> list[str]:
    files = "saferun-runs/20261123-054927-28cf86"
    return failure_text(
        diagnose(exception_in_one_rank()),
        files=files,
        attempt=0,
        max_restarts=0,
        restarting=False,
        is_above=lambda _: True,
    )


def printed_examples_of_the_report() -> list[list[str]]:
    hang = hang_text(sleeping(8), QUIET, host="node1", files=FILES, on_hang="report", count=1, next_s=600.0)
    crash = failure_text(SEGFAULT, files=FILES, attempt=0, max_restarts=0, restarting=False)
    bad_batch = diagnose(failed())
    whole = failure_text(bad_batch, files=FILES, attempt=0, max_restarts=0, restarting=False)
    peer = peer_text(bad_batch, leader="node1", files="/scratch/saferun-runs/7")
    decisions = [f"saferun: {row.message}" for row in (RETRY, FINISH)]
    return [
        hang,
        crash,
        whole[:1],
        peer,
        result_lines(found().results),
        decisions,
        table_lines(found(), infos_of(), width=120),
    ]


def blocks_of(page: str) -> list[str]:
    """The examples of a page that are no commands to be typed, no file and no list of files."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console)?\n(.*?)\n```", text, re.DOTALL)
    return [block for block in blocks if re.search(r"^saferun: |^(?:ok|fail)  ", block, re.MULTILINE)]


def joined(lines: list[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def test_every_example_of_the_report_page_is_printed_today() -> None:
    """An example that is no longer true is worse than none."""
    assert blocks_of("docs/report.md") == [joined(lines) for lines in printed_examples_of_the_report()]


@pytest.mark.parametrize("page", ["docs/retries.md"])
def test_examples_of_decisions_are_printed_today(page: str) -> None:
    assert blocks_of(page) == [joined([f"saferun: {row.message}" for row in (RETRY, FINISH)])]


def test_the_hang_of_the_page_is_printed_today() -> None:
    (block,) = blocks_of("docs/hangs.md")
    assert block.partition("…\n")[2] == joined(printed_hang())


def test_the_crash_of_the_readme_is_printed_today() -> None:
    (block,) = blocks_of("README.md")
    assert block.partition("…\n")[2] == joined(printed_crash())


def without_command(block: str) -> str:
    """An example without the lines that the user has typed."""
    return "\n".join(line for line in block.splitlines() if not line.startswith("$ "))


def test_the_warning_of_the_checks_page_is_printed_today() -> None:
    block = blocks_of("docs/checks.md")[0]
    assert without_command(block) == joined(result_lines(preflight_examples.found().results))


def test_the_table_of_the_checks_page_is_printed_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``…`` stands for lines that the page leaves out."""
    then = SimpleNamespace(time=lambda: 1795266219.0, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(clock, "time", then)
    shown = clock.check_clock(Root(tmp_path).context())._replace(name="clock")
    printed = joined(table_lines(preflight_examples.found(shown), preflight_examples.infos(), width=120))
    beginning, end = without_command(blocks_of("docs/checks.md")[1]).split("\n…\n")
    assert printed.startswith(f"{beginning}\n")
    assert printed.endswith(f"\n{end}")
