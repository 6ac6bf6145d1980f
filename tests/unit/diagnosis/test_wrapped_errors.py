"""Exceptions whose first line has not the reason: of torch.compile, Ray, distributed checkpoints, inner launchers."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of
from tests.unit.diagnosis.test_causes import found_in as cause_in

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CALL = "    run()"


def found_in(*message: str) -> Cause:
    return cause_in(evidence_of(ExitStatus(1, None), (HEAD, STEP, CALL, *message)))


# -------------------------------------------------------------------------------------------------------- torch.compile

RAISED = "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"


def test_what_a_backend_has_raised_stands_in_the_headline() -> None:
    reason = "AssertionError: expected size 4==8, stride 1==1 at dim=0"
    found = found_in(RAISED, reason, "", "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace")
    assert found.message == f"{RAISED} {reason}"
    assert found.proof == RAISED
    assert found_in(RAISED).message == RAISED


def test_a_headline_is_of_bounded_length_and_has_no_other_line() -> None:
    assert len(found_in(RAISED, f"ValueError: {'x' * 900}").message) == 200
    assert found_in("ValueError: the step raised: an error", "KeyError: 1").message.endswith("raised: an error")


# ------------------------------------------------------------------------------------------------------------------ Ray

TASK = (
    "ray.exceptions.RayTaskError(ValueError): ray::f() (pid=1, ip=10.0.0.1)",
    '  File "/home/user/job/data.py", line 9, in f',
    '    raise ValueError("bad shard")',
)


def test_the_error_of_a_ray_task_stands_in_the_headline() -> None:
    found = found_in(*TASK, "ValueError: bad shard")
    assert found.message == "ValueError: bad shard (in a Ray task)"
    assert found.proof == "ValueError: bad shard"
    assert found.class_name == "python_exception"


@pytest.mark.parametrize("name", ["ShardError", "data.ShardError"])
def test_it_is_the_last_one_of_that_name(name: str) -> None:
    """Ray names the class without its module, Python with it."""
    head = TASK[0].replace("ValueError", "ShardError")
    found = found_in(head, *TASK[1:], f"{name}: first", *TASK[1:], f"{name}: bad shard", "of node 3: no file")
    assert found.message == f"{name}: bad shard (in a Ray task)"


def test_where_it_is_not_shown_the_headline_is_as_before() -> None:
    assert found_in(*TASK).message == TASK[0]
    assert found_in(*TASK, "TypeError: bad shard").message == TASK[0]
    assert found_in(TASK[0], "  ValueError: in a line of the source").message == TASK[0]


# ---------------------------------------------------------------------------------------------- distributed checkpoints

UTILS = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 162, in reduce'
MISSING = "RuntimeError: Missing key in checkpoint state_dict: optimizer.state."
FAILED = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([{}])"


def of_rank(rank: int, message: str = MISSING) -> tuple[str, ...]:
    return (f"Traceback (most recent call last): (RANK {rank})", UTILS, "    data = map_fun()", message)


def test_the_reason_of_a_checkpoint_that_fails_stands_in_the_headline() -> None:
    lines = (FAILED.format("0, 1"), *of_rank(0), *of_rank(1, "KeyError: 'other'"))
    found = found_in(*lines)
    assert found.message == f"{MISSING} (CheckpointException of ranks 0-1)"
    assert found.proof == MISSING
    assert "the checkpoint fits this model" in found.advice
    assert found.ranks == (1,)
    headline = diagnose(evidence_of(ExitStatus(1, None), (HEAD, STEP, CALL, *lines))).headline
    assert MISSING in headline
    assert "its last line of output" not in headline or "KeyError: 'other'" in headline


def test_a_reason_without_advice_of_its_own_has_the_old_one() -> None:
    found = found_in(FAILED.format("3"), *of_rank(3, "FileNotFoundError: [Errno 2] No such file: '/ckpt/.metadata'"))
    assert found.message.startswith("FileNotFoundError: [Errno 2] No such file: '/ckpt/.metadata' (CheckpointException")
    assert found.message.endswith("of rank 3)")
    assert found.advice.startswith("the checkpoint does not fit the model, or is not whole")


def test_a_checkpoint_that_fails_without_a_reason_is_shown_as_before() -> None:
    for line in (FAILED.format("0, 1"), FAILED.format("")):
        assert found_in(line).message == line
        assert found_in(line).advice.startswith("the checkpoint does not fit the model, or is not whole")


# ------------------------------------------------------------------------------------------------------ inner launchers


def report_of(signum: int, name: str) -> tuple[str, ...]:
    """What torchrun prints of a worker that a signal has ended."""
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "============================================================",
        "train.py FAILED",
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "Root Cause (first observed failure):",
        "[0]:",
        f"  exitcode  : -{signum} (pid: 123)",
        "  error_file: <N/A>",
        f"  traceback : Signal {signum} ({name}) received by PID 123",
    )


def test_a_worker_of_an_inner_torchrun_that_was_killed_is_looked_for_in_the_kernel_log() -> None:
    found = found_in(*report_of(9, "SIGKILL"))
    assert found.class_name == "worker_failed"
    assert "dmesg" in found.advice
    assert "further up" not in found.advice


@pytest.mark.parametrize(("signum", "name"), [(7, "SIGBUS"), (11, "SIGSEGV"), (15, "SIGTERM")])
def test_one_that_crashed_was_not_killed(signum: int, name: str) -> None:
    """Also where one before it was."""
    for before in ((), ("  traceback : Signal 9 (SIGKILL) received by PID 122",)):
        found = cause_in(evidence_of(ExitStatus(1, None), (*before, HEAD, STEP, CALL, *report_of(signum, name))))
        assert (found.class_name, "dmesg" in found.advice) == ("worker_failed", False)


def test_what_torchrun_has_killed_itself_after_the_first_failure_was_not_killed_by_the_kernel() -> None:
    first = (
        "[0]:",
        "  exitcode  : 1 (pid: 4)",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://x",
    )
    killed = ("[1]:", "  exitcode  : -9 (pid: 5)", "  traceback : Signal 9 (SIGKILL) received by PID 5")
    name, line, title, failures, _, heading = report_of(9, "SIGKILL")[:6]
    for report in ((name, line, title, failures, *killed, line, heading, *first, line), (name, failures, *killed)):
        found = found_in(*report)
        assert found.class_name == "worker_failed"
        assert "further up" in found.advice
        assert "dmesg" not in found.advice


# ----------------------------------------------------------------------------------------------------------- raise from

DIRECT = ("", "The above exception was the direct cause of the following exception:", "")
DATA = '  File "/home/user/job/data.py", line 12, in rows'
BUILDER = '  File "/opt/venv/lib/python3.11/site-packages/datasets/builder.py", line 1598, in _prepare_split_single'
GENERATING = "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset"


def raised_from(origin: tuple[str, ...], *message: str, frame: str = DATA) -> Cause:
    return found_in_lines(HEAD, frame, "    f()", *origin, *DIRECT, HEAD, STEP, CALL, BUILDER, *message)


def found_in_lines(*lines: str) -> Cause:
    return cause_in(evidence_of(ExitStatus(1, None), lines))


@pytest.mark.parametrize("origin", ["KeyError: 'text'", "AssertionError: labels", "AssertionError"])
def test_a_data_set_that_the_users_code_fails_to_make_is_not_said_to_be_broken(origin: str) -> None:
    """Then nothing in the cache is at fault, and the line of that code is to be named."""
    found = raised_from((origin,), GENERATING)
    assert found.message == f"{GENERATING} (raised from {origin})"
    assert (found.location, found.advice) == ("data.py:12 in rows", "")


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("pyarrow.lib.ArrowInvalid: Not an Arrow file", "delete it from the cache"),
        ("datasets.table.CastError: Couldn't cast", "differ in their columns or types"),
        ("TypeError: Couldn't cast array of type string to int64", "differ in their columns or types"),
        ("datasets.arrow_writer.SchemaInferenceError: Please pass `features` or at least one example", "no example"),
    ],
)
def test_what_helps_against_a_failed_data_set_depends_on_what_it_was_raised_from(origin: str, words: str) -> None:
    assert words in raised_from((origin,), GENERATING).advice


def test_a_data_set_that_fails_for_an_unknown_reason_has_the_old_advice() -> None:
    assert "delete it from the cache" in found_in(GENERATING).advice


TARGET = "hydra.errors.InstantiationException: Error in call to target 'models.Net':"


def test_what_a_target_of_hydra_has_raised_stands_in_the_headline() -> None:
    found = raised_from(("KeyError: 'width'",), TARGET, "KeyError('width')", "full_key: model")
    assert found.message == f"{TARGET} KeyError('width')"
    assert (found.location, found.advice) == ("data.py:12 in rows", "")


def test_arguments_that_a_target_of_hydra_does_not_know_stand_in_the_configuration() -> None:
    line = "Net.__init__() got an unexpected keyword argument 'widht'"
    found = raised_from((f"TypeError: {line}",), TARGET, f'TypeError("{line}")', "full_key: model")
    assert found.message.endswith(f'TypeError("{line}")')
    assert found.advice.startswith("look at the configuration")


def test_an_exception_is_shown_with_the_one_that_it_was_raised_from() -> None:
    """It stays at its own line: the program has chosen its words."""
    found = raised_from(("KeyError: 'lr'",), "RuntimeError: the optimizer cannot be made")
    assert found.message == (
        "RuntimeError: the optimizer cannot be made (raised from KeyError: 'lr' at data.py:12 in rows)"
    )
    assert found.location == "train.py:52 in step"
    found = raised_from(("KeyError: 'lr'",), "RuntimeError: no optimizer", frame=STEP)
    assert found.message == "RuntimeError: no optimizer (raised from KeyError: 'lr')"


@pytest.mark.parametrize(
    "message",
    ["RuntimeError: no batch: the shard 17 is empty", "RuntimeError: no batch: ValueError('the shard 17 is empty')"],
)
def test_words_that_a_message_has_already_are_not_repeated(message: str) -> None:
    assert raised_from(("ValueError: the shard 17 is empty",), message).message == message


def test_of_exceptions_that_wrap_each_other_the_one_with_a_reason_is_named() -> None:
    lines = (HEAD, DATA, "KeyError: 'text'", *DIRECT, HEAD, STEP, GENERATING, *DIRECT, HEAD, STEP)
    assert "(raised from KeyError: 'text'" in found_in_lines(*lines, "ValueError: no data").message
    context = "During handling of the above exception, another exception occurred:"
    assert found_in_lines(HEAD, DATA, "KeyError: 'text'", context, HEAD, STEP, "ValueError: no").message == (
        "ValueError: no"
    )


@pytest.mark.parametrize("message", [TARGET, GENERATING, "RuntimeError: no optimizer"])
def test_an_origin_whose_traceback_is_cut_by_other_lines_is_not_known(message: str) -> None:
    """A process may print into another one's traceback; what is known of the last exception is shown all the same."""
    found = raised_from(("step 5 of 7", "KeyError: 'lr'"), message)
    assert (found.class_name, found.message) == ("python_exception", message)
    assert found.location == "train.py:52 in step"


def test_an_error_of_a_child_below_a_traceback_that_is_cut_is_judged_all_the_same() -> None:
    child = ("-- Process 0 terminated with the following error:", HEAD, DATA, "KeyError: 'lr'")
    assert found_in("step 5 of 7", *child).message == "KeyError: 'lr'"


def test_a_class_that_is_defined_in_a_function_is_named_as_any_other() -> None:
    local = "models.make.<locals>.inner.<locals>.LayerError: no width"
    assert raised_from((local,), "RuntimeError: no net").message.startswith(
        f"RuntimeError: no net (raised from {local}"
    )
    assert raised_from((local,), TARGET).message == f"{TARGET} (raised from {local})"
    assert found_in(local).message == local
    assert found_in("main.<locals>.StopTraining").message == "main.<locals>.StopTraining"


# ----------------------------------------------------------------------------------------------------------- assertions


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("AssertionError: Rank 11: found NaN in local grad norm in backward pass", "the training diverges"),
        ("AssertionError: libcuda.so cannot found!", "TRITON_LIBCUDA_PATH"),
        ("AssertionError: checkpoint world size 8 does not match 16", "the checkpoint fits this model"),
        ("AssertionError: world size 6 must be divisible by 4", "the number of ranks"),
        ("AssertionError: 3 batches, expected 4", "look at what the assertion at that line checks"),
        ("AssertionError", "look at what the assertion at that line checks"),
    ],
)
def test_an_assertion_whose_words_are_known_has_the_advice_of_other_exceptions(message: str, words: str) -> None:
    found = found_in(message)
    assert found.class_name == "assertion_error"
    assert words in found.advice


def test_what_a_program_prints_below_an_assertion_gives_no_advice() -> None:
    """Nothing marks the end of a message, unless its first line announces others or torch has marked all of them."""
    last = "loss is NaN in grad"
    lines = (HEAD, STEP, CALL, "AssertionError: bad", last)
    assert "the assertion at that line" in found_in_lines(*lines).advice
    assert "the training diverges" in found_in_lines(*(f"[rank0]: {line}" for line in lines)).advice
    assert "the training diverges" in found_in("AssertionError: the step is bad:", last).advice
