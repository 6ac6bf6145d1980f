"""Every job runs under saferun as it runs under the installed torch's torchrun.

Each case is launched once by each, and everything that a rank or a user can see of it is compared: all environment
variables, arguments, the interpreter's and the kernel's settings, what reaches the console and the log folder, error
files and exit codes. ``SAFERUN_PARITY_SUBJECT=torchrun`` compares torchrun with itself, which shows what is chance.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.torch.differential import ALLOWED, Allowed, Case, differences, launch, read_consoles
from tests.torch.differential_cases import CASES
from tests.torch.observation import Observation, with_names
from tests.torch.recording import Recordings, Scene, restored

SUBJECT = os.environ.get("SAFERUN_PARITY_SUBJECT", "saferun")
RECORDINGS = Recordings.of_installed_torch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with a short name: sockets in it have little room for theirs."""
    return tmp_path_factory.mktemp("d")


# Those that differ most, with some of each section of the table. Where the ranks or the launcher import all of torch, a
# case costs as much as ten others: one of these is here.
FAST = (
    "two_ranks",
    "ranks_by_cpus",
    "standalone_ignores_all_addresses",
    "c10d_endpoint",
    "store_not_shared",
    "one_job_a_process_under_a_scheduler",
    "pet_variables",
    "stale_variables_of_an_outer_launch",
    "virtual_local_rank_of_given_devices",
    "logs_specs_plugin_that_changes_variables",
    "script_arguments",
    "module",
    "shell_script",
    "settings_of_the_process_are_inherited",
    "exit_code_3",
    "fails_once",
    "sigterm",
    "terminal",
    "tee",
    "redirects_by_rank",
    "line_prefix",
    "events_of_a_failure",
)


@pytest.mark.parametrize("case", slow_but(CASES, *FAST), ids=[case.name for case in CASES])
def test_a_job_runs_as_it_does_under_torchrun(case: Case, folder: Path) -> None:
    """Whoever changes one word on a command line may not have to change anything else."""
    port = own_port()
    if recording := RECORDINGS.find(case):
        reference = restored(recording, Scene.of(case, folder, port))
    else:
        reference = live(case, folder, port)
    found = differences(reference, launch(case, SUBJECT, folder, port), (*ALLOWED, *case.allowed))
    if found:
        pytest.fail("\n".join([*found, "its console:", read_consoles(folder / "job")]), pytrace=False)


def live(case: Case, folder: Path, port: int) -> Observation:
    """What torchrun does on this machine now."""
    reference = launch(case, "torchrun", folder, port)
    # The reference has to show what the case is about, or both could be wrong alike.
    assert reference["exit codes"] == [case.exit_code] * len(case.nodes)
    assert reference["ranks that wrote a record"] == case.ranks * case.attempts
    return reference


RECORDED = [case for case in CASES if RECORDINGS.find(case)]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED or [None], ids=lambda case: case.name if case else "none")
def test_torchrun_does_what_was_recorded_of_it(case: Case | None, folder: Path) -> None:
    """A recording that is no longer true would have saferun do what torchrun does not."""
    if case is None:
        pytest.skip("nothing is recorded of this release of torch and Python")
    port = own_port()
    scene = Scene.of(case, folder, port)
    recording = RECORDINGS.find(case)
    assert recording is not None
    found = differences(live(case, folder, port), restored(recording, scene), (*ALLOWED, *case.allowed))
    if found:
        pytest.fail("\n".join(["torchrun and what was recorded of it (here):", *found]), pytrace=False)


def test_where_torchrun_is_recorded_every_case_is() -> None:
    """A case without a recording runs torchrun each time, which nobody would notice but by the time it takes."""
    # How many processors this machine has is part of some.
    missing = {case.name for case in CASES if not RECORDINGS.find(case) and "sched_setaffinity" not in case.setup}
    if RECORDINGS:
        assert not missing, "cases, probe or harness have changed: run `python -m tests.torch.record`"


SEEN = {"exit codes": [0], "rank 0: environment: RANK": "0", "rank 1: environment: RANK": "1"}


@pytest.mark.parametrize("path", SEEN)
def test_one_changed_or_missing_value_is_one_difference(path: str) -> None:
    """A comparison that overlooks something proves nothing."""
    assert differences(SEEN, SEEN, ()) == []
    assert len(differences(SEEN, SEEN | {path: "9"}, ())) == 1
    assert len(differences(SEEN, {name: value for name, value in SEEN.items() if name != path}, ())) == 1
    assert len(differences(SEEN, SEEN | {"rank 1: environment: MORE": ""}, ())) == 1


def test_an_exception_is_for_the_path_it_names() -> None:
    """A pattern that matches the beginning of a path may not excuse the rest."""
    more = SEEN | {"rank 1: environment: SAFERUN_X": "", "rank 1: environment: SAFERUN_X: more": ""}
    assert len(differences(SEEN, more, (Allowed(r"rank \d: environment: SAFERUN_\w+", "marks"),))) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [("29500", "<the case's port>"), ("40001", "<free port>"), ("80", "80"), ("70000", "70000"), ("x", "x"), ("", "")],
)
def test_only_what_has_the_form_of_a_free_port_passes_for_one(given: str, named: str) -> None:
    """Where random values are taken for equal, wrong ones may not be."""
    record = {"error file can be written": False}
    assert with_names({"MASTER_PORT": given}, record, 29500)["MASTER_PORT"] == named
