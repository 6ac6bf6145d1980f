"""What stands below the traceback that ended a rank: of helpers, of loggers, at exit; and what only looks like it."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.tracebacks import ends_with_traceback, find_python_error
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, evidence
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
MAIN = (HEAD, STEP, "    lr = config['lr']", "KeyError: 'lr'")
TRACKER = (
    HEAD,
    '  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 239, in main',
    "    cache[rtype].remove(name)",
    "KeyError: '/psm_97c77d62'",
)
CHILD = (
    "Process Process-1:",
    HEAD,
    '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap',
    "    self.run()",
    '  File "/home/user/job/child.py", line 4, in pump',
    "    pipe.recv()",
    "EOFError",
)
# A helper that subprocess has started says nothing of itself.
HELPER = CHILD[1:]
WANDB = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded"
LOGGED = ("ERROR:train:upload of the metrics failed; training goes on", HEAD, STEP, WANDB)
STEPS = tuple(f"INFO:train:step {number} loss 0.{number}" for number in range(11, 40))
WHY = "ERROR:train:validation loss is NaN, giving up"


def output(*lines: str, failure: tuple[str, ...] = (), error_message: str = "") -> RankOutput:
    return RankOutput(0, lines, "", error_message, 0.0, failure=failure)


def cause_in(*lines: str, failure: tuple[str, ...] = (), error_message: str = "") -> Cause:
    end, one = end_of(0, code=1), output(*lines, failure=failure, error_message=error_message)
    return cause_of(read_failure(evidence(end, outputs=(one,)), end, one))


def headline(*lines: str) -> str:
    return diagnose(evidence(end_of(0, code=1), outputs=(output(*lines),))).headline


# ------------------------------------------------------------------------------------------------- processes beside it


@pytest.mark.parametrize("names", [1, 3, 20])
def test_what_the_resource_tracker_prints_does_not_replace_what_ended_the_rank(names: int) -> None:
    assert cause_in(*MAIN, *TRACKER * names).message == "KeyError: 'lr'"
    assert headline(*MAIN, *TRACKER * names).endswith("KeyError: 'lr', at train.py:52 in step; exit code 1")
    assert cause_in(*TRACKER * names, *MAIN).message == "KeyError: 'lr'"


def test_nor_is_it_a_cause_where_there_is_no_other_traceback() -> None:
    found = cause_in("loss is NaN, giving up", *TRACKER)
    assert (found.class_name, found.message) == (
        "python_exit",
        "ended with exit code 1 and no traceback; its last line of output: loss is NaN, giving up",
    )
    assert not ends_with_traceback(TRACKER)


def test_what_a_rank_itself_raises_in_that_module_counts() -> None:
    location = '  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 121, in ensure_running'
    assert cause_in(HEAD, STEP, location, "OSError: [Errno 24] Too many open files").class_name == "too_many_open_files"


@pytest.mark.parametrize("children", [1, 2])
def test_a_child_that_fails_after_the_rank_has_is_not_the_cause(children: int) -> None:
    found = cause_in(*MAIN, *CHILD * children)
    assert (found.message, found.location, role_of(found)) == ("KeyError: 'lr'", "train.py:52 in step", Role.CULPRIT)
    assert headline(*MAIN, *CHILD).endswith("KeyError: 'lr', at train.py:52 in step; exit code 1")


def test_a_child_that_fails_long_after_an_error_or_alone_is() -> None:
    """The program had got over the first error."""
    steps = [f"step {number} loss 0.1" for number in range(9)]
    for before in ((), (*MAIN, *steps), ("WARNING:root:no cache", *MAIN)):
        assert cause_in(*before, *CHILD).message == "EOFError"
    # It raises because of the child.
    assert cause_in(*CHILD, *MAIN).message == "KeyError: 'lr'"


# ----------------------------------------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize(
    ("failure", "error_message"),
    [
        (("locals of step (train.py:52): n = 3", "memory then: process 1 GiB"), ""),
        (("locals of Trainer.step (train.py:52): n = 3; m = 4",), ""),
        ((), "KeyError: 'lr'"),
    ],
)
def test_the_traceback_that_was_recorded_is_the_one(failure: tuple[str, ...], error_message: str) -> None:
    """Whatever processes of the rank print after it."""
    many = ["step 7"] * 99
    for lines in ((*MAIN, *HELPER), (*MAIN, "step 7", *HELPER), (*HELPER, *MAIN), (*MAIN, *many, *HELPER)):
        found = cause_in(*lines, failure=failure, error_message=error_message)
        assert (found.message, found.location) == ("KeyError: 'lr'", "train.py:52 in step")


IN_LOADER = '  File "/opt/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1275, in _try_get_data'
RESET = (HEAD, STEP, IN_LOADER, "ConnectionResetError: [Errno 104] Connection reset by peer")
# A signal handler of torch's raises while Python prints the traceback.
INTERRUPTED = (
    "object address  : 0x7f7ee0a24cc0",
    "object type name: ConnectionResetError",
    "lost sys.stderr",
    HEAD,
    STEP,
)


@pytest.mark.parametrize("lines", [(), ("step 7",), INTERRUPTED])
def test_a_traceback_that_was_recorded_and_not_printed_ends_a_rank_with_exit_code_1_alone(
    lines: tuple[str, ...],
) -> None:
    def found(code: int | None = 1, signum: int | None = None) -> Cause:
        end, one = end_of(0, code=code, signum=signum), output(*lines)._replace(traceback=RESET)
        return cause_of(read_failure(evidence(end, outputs=(one,)), end, one))

    assert found().class_name == "data_loader_worker_killed"
    assert found().location == "train.py:52 in step"
    assert found(3).class_name != "data_loader_worker_killed"
    assert found(None, 9).class_name != "data_loader_worker_killed"


def test_a_traceback_that_was_printed_needs_no_recorded_one() -> None:
    end, one = end_of(0, code=1), output(*MAIN)._replace(traceback=RESET)
    assert cause_of(read_failure(evidence(end, outputs=(one,)), end, one)).message == "KeyError: 'lr'"


def test_an_error_file_knows_no_module_of_an_exception() -> None:
    raised = (HEAD, STEP, "configs.BadConfigError: no lr")
    found = cause_in(*raised, *HELPER, error_message="BadConfigError: no lr")
    assert found.message == "configs.BadConfigError: no lr"


@pytest.mark.parametrize("failure", [(), ("memory then: process 1 GiB",), ("locals of step (other.py:52): n = 3",)])
def test_what_was_recorded_of_none_of_them_leaves_the_last(failure: tuple[str, ...]) -> None:
    assert cause_in(*MAIN, *HELPER, failure=failure).message == "EOFError"


def test_what_torchs_hook_has_printed_comes_first() -> None:
    lines = tuple(f"[rank0]: {line}" for line in (HEAD, STEP, "ValueError: bad batch"))
    assert cause_in(*MAIN, *lines, failure=("locals of step (train.py:52): n = 3",)).message == "ValueError: bad batch"


# ---------------------------------------------------------------------------------------------------- the message's end

LOST = "Connection closed by peer"


@pytest.mark.parametrize(
    "after",
    [
        f"INFO:actor:{LOST}",
        f"ERROR:actor.pool:{LOST}",
        f"INFO: {LOST}",
        f"[INFO|trainer.py:1024] 2026-01-01 12:00:00,123 >> {LOST}",
        f"INFO 01-02 12:00:00 core.py:12] {LOST}",
        f"[2026-01-01 12:00:00,123][actor][ERROR] - {LOST}",
        f"[2026-01-01 12:00:00,123] [INFO] [engine.py:9:x] {LOST}",
        f"2026/01/01 12:00:00 INFO mlflow.tracking: {LOST}",
        f"01/02/2026 12:00:00 - ERROR - actor - {LOST}",
        f"COMET ERROR: {LOST}",
        f"swanlab: {LOST}",
        f"/opt/x/y.py:7: UserWarning: {LOST}",
        "COMET ERROR: Failed to send data: HTTPSConnectionPool(host='www.comet.com', port=443): Max retries exceeded",
    ],
)
def test_what_a_logger_or_a_tracker_prints_below_an_exception_is_not_its_message(after: str) -> None:
    found = cause_in(*MAIN, "", after)
    assert (found.class_name, found.message, role_of(found)) == ("python_exception", "KeyError: 'lr'", Role.CULPRIT)
    error = find_python_error([*MAIN, after])
    assert error is not None
    assert (error.messages, error.lines_after) == (("KeyError: 'lr'",), 1)


LONG_MESSAGES = (
    (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.hpp:268, remote process exited",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "Last error:",
        "socketProgressOpt: Call to recv from 10.0.0.2<1> failed : Connection reset by peer",
    ),
    (
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for Config",
        "lr",
        "  Input should be a valid number [type=float_parsing, input_value='a', input_type=str]",
        "    For further information visit https://errors.pydantic.dev/2.5/v/float_parsing",
        "INFO_level",
        "  Field required [type=missing]",
    ),
    (
        "RuntimeError: Error(s) in loading state_dict for Net:",
        '\tMissing key(s) in state_dict: "a.weight".',
        "\tsize mismatch for b.weight: copying a param with shape torch.Size([2]) from checkpoint.",
    ),
    (
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "CalledProcessError: Command '['gcc']' returned non-zero exit status 1.",
        "",
        "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug)!",
    ),
    (
        "RuntimeError: NPU function error: aclrtSetDevice, error code is 507033",
        "[ERROR] 2026-04-08-18:07:20 (PID:12, Device:1, RankID:1) ERR00100 PTA call acl api failed",
    ),
    ("RuntimeError: the server did not start, its log:", "INFO:server:starting", "ERROR:server:no port", "the end"),
    ("RuntimeError: compiler output", "ERROR: no such file", "ERROR: giving up"),
)


@pytest.mark.parametrize("message", LONG_MESSAGES)
def test_a_message_of_many_lines_is_whole(message: tuple[str, ...]) -> None:
    error = find_python_error([HEAD, STEP, *message])
    assert error is not None
    assert error.messages == message


def test_below_torchs_mark_all_belongs_to_the_message() -> None:
    message = ("RuntimeError: two", "INFO:actor:quoted", "ERROR: quoted")
    error = find_python_error([f"[rank0]: {line}" for line in (HEAD, STEP, *message)])
    assert error is not None
    assert error.messages == message


# ---------------------------------------------------------------------------------------------- errors that it got over


def test_an_error_that_was_logged_before_many_steps_is_not_the_cause() -> None:
    found = cause_in(*LOGGED, *STEPS, WHY)
    assert (found.class_name, found.message) == (
        "python_exit",
        f"ended with exit code 1; its last line of output: {WHY}",
    )
    assert found.advice.startswith("an error that it printed before need not be the reason: requests.exceptions.Conn")


@pytest.mark.parametrize("why", ["CRITICAL:train:loss is NaN at step 39", "the loss is worse than before", WHY])
@pytest.mark.parametrize(
    "steps",
    [
        [f"[2026-01-01 12:00:{number},123] step {number} | loss 0.3 |" for number in range(11, 20)],
        [f"Training:  {number}%|####5     | {number}/100 [00:02<00:02, 20.0it/s]" for number in range(11, 20)],
        [f"2026-01-01 12:00:{number},123 - DEBUG - epoch {number}: loss 1e-{number}" for number in range(11, 20)],
        ["INFO: epoch 1", "INFO: epoch 2", "INFO: validated", "INFO: epoch 3", "INFO: epoch 4"],
    ],
)
def test_dates_bars_and_levels_show_that_a_program_goes_on(steps: list[str], why: str) -> None:
    end, one = end_of(0, code=1), output(*LOGGED, *steps, why)
    found = judged_failure(evidence(end, outputs=(one,)), end, one)[1]
    assert (found.class_name, found.message.endswith(why)) == ("python_exit", True)


SHUTS_DOWN = ("INFO: shutting down workers", "INFO: saving logs", "INFO: uploading", "INFO: total time 7 s")
OF_WORKERS = tuple(f"INFO: worker {number} stopped" for number in range(9))
TRIES = tuple(f"INFO: retrying in {number} s" for number in range(9))


@pytest.mark.parametrize(
    "after",
    [
        SHUTS_DOWN,
        (*SHUTS_DOWN, "ERROR: the loss is NaN"),
        (*OF_WORKERS, "ERROR: no data"),
        (*TRIES, "ERROR: no data"),
        STEPS,
        (*STEPS[:2], WHY, "INFO: bye"),
        ("INFO: waiting",) * 9 + (WHY,),
        *(
            (*STEPS, last)
            for last in (
                "ERROR:train:training failed",
                "ERROR:train:giving up",
                "Error: giving up after 5 attempts",
                "closing files",
                "the run was aborted",
                "exiting with code 1",
                "see the log for details",
                "2026-01-01 12:00:00 ERROR main: exiting",
                "ERROR:train:ConnectionError",
                "ERROR:train:stopped by HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded",
                "wandb: ERROR no connection",
            )
        ),
    ],
)
def test_how_a_program_shuts_down_hides_no_error_that_ended_it(after: tuple[str, ...]) -> None:
    assert cause_in(*LOGGED, *after).class_name == "remote_service_error"


@pytest.mark.parametrize("before", ["CRITICAL:train:failed", "FATAL: failed", "ERROR:train:Uncaught exception"])
def test_an_error_that_was_logged_as_fatal_is_the_cause(before: str) -> None:
    assert cause_in(before, *LOGGED[1:], *STEPS, WHY).class_name == "remote_service_error"


def test_steps_without_a_level_or_a_date_are_shown_with_the_error() -> None:
    """They may be the lines of its message."""
    steps = [f"step {number} loss 0.1" for number in range(9)]
    assert cause_in(*LOGGED, *steps, WHY).class_name == "remote_service_error"
    assert f"its last line of output: {WHY}" in headline(*LOGGED, *steps, WHY)


# ------------------------------------------------------------------------------------------------------------- services

FAILS = "wandb: ERROR Error while calling W&B API: internal (<Response [500]>)"
ENDS = ("wandb: Waiting for W&B process to finish... (failed 1).", "wandb: Run summary:", "wandb:   loss 0.3")


@pytest.mark.parametrize(
    "lines",
    [
        ("loss is NaN at step 100, giving up", *ENDS, FAILS),
        ("loss is NaN at step 100, giving up", FAILS),
        # A line that is empty but for the name: what stands at the end of lines is left out.
        ("loss is NaN at step 100, giving up", "wandb:", FAILS),
        (*ENDS, FAILS),
    ],
)
def test_what_wandb_reports_after_the_script_has_ended_is_no_cause(lines: tuple[str, ...]) -> None:
    assert class_of(diagnose(evidence(end_of(0, code=1), outputs=(output(*lines),)))) == "python_exit"


@pytest.mark.parametrize("before", [(), ("step 1 done",), ("loading data", "wandb: Currently logged in as: x")])
def test_what_wandb_reports_where_the_script_says_nothing_is_one(before: tuple[str, ...]) -> None:
    for line in (FAILS, "wandb: ERROR api_key not configured (no-tty). call wandb.login()"):
        assert cause_in(*before, line).class_name == "remote_service_error"


@pytest.mark.parametrize(
    "message",
    [
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "google.auth.exceptions.DefaultCredentialsError: Your default credentials were not found.",
        "google.auth.exceptions.RefreshError: ('invalid_grant: Bad Request', {'error': 'invalid_grant'})",
        "azure.core.exceptions.ClientAuthenticationError: DefaultAzureCredential failed to retrieve a token",
        "huggingface_hub.errors.LocalTokenNotFoundError: Token is required, but no token found.",
        "wandb.errors.errors.AuthenticationError: The API key you provided is either invalid or missing.",
    ],
)
def test_who_has_no_credentials_is_told_to_look_at_the_key(message: str) -> None:
    found = cause_in(HEAD, STEP, message)
    assert found.class_name == "remote_service_error"
    assert found.advice.startswith("look at the token or key")


CACHED = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files. "
    "Checkout your internet connection or see how to run the library in offline mode at 'https://huggingface.co/docs'."
)


@pytest.mark.parametrize(
    "message",
    [
        'botocore.exceptions.ConnectTimeoutError: Connect timeout on endpoint URL: "http://169.254.169.254/credentials/"',
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x.org'): Max retries exceeded with credentials",
        "openai.APIConnectionError: the answer has no token of the 4096 tokens",
        "huggingface_hub.errors.HfHubHTTPError: the tokenizer of access-key-model was not answered",
        CACHED,
    ],
)
def test_who_was_not_reached_is_told_to_look_at_the_network(message: str) -> None:
    found = cause_in(HEAD, STEP, message)
    assert found.class_name == "remote_service_error"
    assert found.advice.startswith("check whether this host reaches the service")


OFFLINE = (
    "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api/models/x: offline mode is "
    "enabled. To disable it, please unset the `HF_HUB_OFFLINE` environment variable."
)
DISABLED = (
    "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and outgoing "
    "traffic has been disabled. To enable hf.co look-ups and downloads online, set 'local_files_only' to False."
)
DIRECT = "The above exception was the direct cause of the following exception:"
LOADING = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cache"
)


@pytest.mark.parametrize("lines", [(OFFLINE,), (DISABLED,), (DISABLED, "", DIRECT, "", HEAD, STEP, LOADING)])
def test_a_job_that_is_set_to_offline_is_told_so(lines: tuple[str, ...]) -> None:
    found = cause_in(HEAD, STEP, *lines)
    assert found.class_name == "remote_service_error"
    assert "was not contacted" in found.message
    assert "did not answer" not in found.message
    assert found.advice.startswith(
        "the job is set to offline (HF_HUB_OFFLINE, local_files_only) and the file is not in"
    )
