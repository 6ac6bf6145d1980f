"""What torchrun answers with a traceback and exit code 1, saferun refuses in two lines, before it starts anything.

This is the one intended difference in exit codes: bad input ends with exit code 2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.ports import own_port
from tests.torch.differential import (
    LAUNCHERS,
    TIMEOUT_S,
    Case,
    command,
    end,
    environment,
    filled,
    make_job_folder,
    start_on_files,
    wait_until_gone,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# ``exit_code`` is saferun's where it is not 2. The scripts that are named exist, unless the case is about that.
REFUSED = (
    Case("script_missing", program="nowhere.py"),
    Case("script_missing_by_full_path", program="@job@/nowhere.py"),
    Case("script_without_a_name", program=""),
    Case("folder_without_a_main", program="@job@/records"),
    Case("run_path_script_missing", ("--run-path",), program="@job@/nowhere.py"),
    Case("command_missing", ("--no-python",), program="no-such-command"),
    Case("command_not_executable", ("--no-python",), program="@job@/probe.py"),
    Case("python_missing", env={"PYTHON_EXEC": "@job@/no-python"}),
    Case("command_as_module", ("--no-python", "--module"), program="package.entry"),
    *(Case(f"nproc_{value}", (f"--nproc-per-node={value}",)) for value in ("banana", "0", "-1", "1.5", "")),
    # What this machine lacks, another may have: no usage error.
    Case("nproc_gpu_without_any", ("--nproc-per-node=gpu",), env={"CUDA_VISIBLE_DEVICES": ""}),
    *(Case(f"nnodes_{value}", (f"--nnodes={value}",)) for value in ("0", "-1", "2:1", "0:1", "1:2:3", "many", "")),
    Case("max_restarts_negative", ("--max-restarts=-1",)),
    Case("monitor_interval_negative", ("--monitor-interval=-1",)),
    Case("monitor_interval_no_number", ("--monitor-interval=nan",)),
    Case("shutdown_timeout_negative", ("--shutdown-timeout=-1",)),
    Case("shutdown_timeout_variable_no_number", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}),
    *(Case(f"redirects_{value}", ("-r", value)) for value in ("4", "x", "", "0:4", "0:1,")),
    Case("tee_unknown", ("-t", "5")),
    Case("ranks_filter_no_numbers", ("--local-ranks-filter=all",)),
    Case("rendezvous_option_without_value", ("--rdzv-conf=timeout",)),
    Case("rendezvous_option_without_name", ("--rdzv-conf==5",)),
    Case("rendezvous_option_no_truth", ("--rdzv-backend=c10d", "--rdzv-conf=is_host=maybe")),
    Case("rendezvous_store_unknown", ("--rdzv-backend=c10d", "--rdzv-conf=store_type=moon")),
    Case("rendezvous_backend_unknown", ("--rdzv-backend=pigeons", "--rdzv-endpoint=localhost:0")),
    Case("endpoint_without_port", ("--rdzv-endpoint=localhost",)),
    Case("endpoint_port_too_large", ("--rdzv-endpoint=localhost:99999",)),
    Case("endpoint_port_no_number", ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:http")),
    Case("endpoint_no_host_name", ("--rdzv-endpoint=a b:1",)),
    Case("master_port_too_large", ("--master-port=99999",)),
    Case("master_port_negative", ("--master-port=-1",)),
    Case("log_folder_is_a_file", ("--log-dir=@job@/probe.py",)),
    Case("logs_specs_unknown", ("--logs-specs=nobody",)),
    Case("event_handler_unknown", ("--event-log-handler=nobody",)),
    Case("filtered_copies_without_a_folder", ("--log-dir=/dev/null", "--duplicate-stdout-filters=a")),
    Case("signal_that_cannot_be_handled", ("--signals-to-handle=SIGTERM,SIGKILL",)),
    Case("fewer_devices_than_ranks", ("--virtual-local-rank", "--nproc-per-node=2"), env={"CUDA_VISIBLE_DEVICES": "0"}),
    Case(
        "fewer_devices_than_ranks_for_a_plugin",
        ("--virtual-local-rank", "--nproc-per-node=2", "--logs-specs=nobody"),
        env={"CUDA_VISIBLE_DEVICES": "0"},
    ),
)


class Refusal(NamedTuple):
    """How a launcher ended that was given what it cannot do."""

    exit_code: int
    stdout: str
    stderr: str


def refusal(case: Case, folder: Path) -> Refusal:
    """What saferun says to ``case``. It may start no rank and leave nothing."""
    job = folder / "job"
    shutil.rmtree(job, ignore_errors=True)
    make_job_folder(job)
    port = own_port()
    words = command(case, LAUNCHERS["saferun"], case.nodes[0], job, port)
    process = start_on_files(words, environment(case, job, port), job, 0, case.stdin)
    try:
        exit_code = process.wait(time.monotonic() + TIMEOUT_S)
        assert not wait_until_gone(job)
    finally:
        end([process], job)
    assert os.listdir(job / "records") == [], "a rank was started"
    return Refusal(exit_code, *((job / f"console_0.{name}").read_text() for name in ("stdout", "stderr")))


# One process imports torch for all cases, and a fork of it stands for each launch: each ends before, or because, its
# first rank starts. It reads the cases from stdin and answers with how they ended.
REFUSING = """
import json, os, sys, traceback
from torch.distributed.run import main
answers = {}
for name, (arguments, env) in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        os.environ.update(env)
        console = os.open("refusal", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(console, 1), os.dup2(console, 2)
        code = 0
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers[name] = code, "", open("refusal", errors="replace").read()
print(json.dumps(answers))
"""


def torchrun_refusals(cases: Sequence[Case], folder: Path) -> dict[str, Refusal]:
    """What torchrun says to each case, by the case's name."""
    job = folder / "refused"
    make_job_folder(job)
    port = own_port()
    rows = {
        case.name: (
            [filled(word, job, port) for word in (*case.options, case.program, *case.arguments)],
            {name: filled(value, job, port) for name, value in case.env.items()},
        )
        for case in cases
    }
    try:
        answer = subprocess.run(
            [sys.executable, "-c", REFUSING],
            input=json.dumps(rows),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(Case("refused"), job, port),
            cwd=job / "work",
            timeout=4 * TIMEOUT_S,  # fifty command lines, on a machine that does much else
            check=True,
        )
    finally:
        end([], job)
    return {name: Refusal(*values) for name, values in json.loads(answer.stdout).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with a short name: sockets in it have little room for theirs."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture(scope="module")
def torchruns_answers(folder: Path, request: pytest.FixtureRequest) -> dict[str, Refusal]:
    """How torchrun ended for everything of this run that it is to refuse."""
    ids = {item.name for item in request.session.items if item.path == request.path}
    return torchrun_refusals([case for case in REFUSED if any(f"[{case.name}]" in name for name in ids)], folder)


# Some are refused only once all of torch has been imported.
@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_bad_input_is_refused_in_two_lines(case: Case, folder: Path, torchruns_answers: dict[str, Refusal]) -> None:
    """The one intended difference in exit codes: what cannot be done is said at once, before anything is started."""
    theirs = torchruns_answers[case.name]
    assert theirs.exit_code == 1
    assert "Traceback (most recent call last)" in theirs.stderr
    ours = refusal(case, folder)
    assert re.fullmatch(r"saferun: \S.*\nhint: \S.*\n", ours.stderr), ours.stderr
    assert (ours.exit_code, ours.stdout) == (case.exit_code or 2, "")
