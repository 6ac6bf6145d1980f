"""Lines that people quoted in public issues, each with what is to be made of it: ``message_lines.txt``.

Half of them, chosen by a hash of their text before any rule was written for them, are kept aside: the rules are not
written after them, and only their rate counts. A third part, ``message_lines_fresh.txt``, was collected and labelled
later, from other issues, and measured once before the rules were mended after it; likewise a fourth, wider part,
``message_lines_wide.txt``, a fifth, ``message_lines_last.txt``, a sixth, ``message_lines_other.txt``, a seventh,
``message_lines_seventh.txt``, an eighth, ``message_lines_eighth.txt``, and a ninth, ``message_lines_ninth.txt``. Of a
tenth part the rules were mended after one half, ``message_lines_tenth.txt``, and are measured by the other,
``message_lines_tenth_aside.txt``, after which none is written; likewise of a fourteenth part,
``message_lines_fourteenth.txt`` and ``message_lines_fourteenth_aside.txt``. Three parts more, the eleventh to the
thirteenth, are as the third. What healthy jobs print, ``ordinary_lines.txt``, is never a cause. This module prints the
rates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from saferun.diagnosis.causes import cause_of, role_of
from saferun.diagnosis.causes import hints as hints_of_causes
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.rule_patterns import patterns_of_lines, patterns_of_rules

PATH = Path(__file__).parent / "message_lines.txt"
LATER = tuple(
    Path(__file__).parent / f"message_lines_{part}.txt"
    for part in ("fresh", "wide", "last", "other", "seventh", "eighth", "ninth", "eleventh", "twelfth", "thirteenth")
)
TENTH = Path(__file__).parent / "message_lines_tenth.txt"
TENTH_ASIDE = Path(__file__).parent / "message_lines_tenth_aside.txt"
FOURTEENTH = Path(__file__).parent / "message_lines_fourteenth.txt"
FOURTEENTH_ASIDE = Path(__file__).parent / "message_lines_fourteenth_aside.txt"
ORDINARY = Path(__file__).parent / "ordinary_lines.txt"
ENDS = {
    "printed": "python_exit",
    "aborted": "abort",
    "killed": "killed_from_outside",
    "terminated": "killed_from_outside",
}
"""What a rank failed of that leaves no message: by how it ended."""
UNKNOWN = {**ENDS, "contained": "python_exit", "exception": "python_exception", "thrown": "abort"}
"""What is said where no rule knows a message."""
STATUSES = {
    "exception": ExitStatus(1, None),
    "thrown": ExitStatus(None, 6),
    "printed": ExitStatus(1, None),
    # By Apptainer, before it ends with its own status.
    "contained": ExitStatus(255, None),
    "aborted": ExitStatus(None, 6),
    "killed": ExitStatus(None, 9),
    "terminated": ExitStatus(None, 15),
}
FEWEST = 150
FEWEST_ORDINARY = 60
WANTED_RATE = 0.9
TENTH_RATE = 0.85
FOURTEENTH_RATE = 0.5
NOT_IN_THE_MESSAGE = {"NVIDIA-NeMo/Megatron-Bridge#3968"}
"""Lines of the tenth part whose cause their text does not have: a file system's own limit on mappings."""
DISPUTED = {
    "NVIDIA/open-gpu-kernel-modules#1230",
    "SmerkyG/gptcore#2",
    "aws/aws-ofi-nccl#803",
    "hiyouga/LlamaFactory#5268",
    "huggingface/datasets#7440",
    "intel/ipex-llm#11877",
    "intel/llm-on-ray#242",
    "leptonai/gpud#1174",
    "open-mpi/ompi#7312",
    "openucx/ucx#8511",
    "sgl-project/sglang#27894",
}
"""Issues of the fourteenth part of whose lines another reading is as good, or which healthy jobs print as well.

Of a kernel log that a rank prints itself it is not certain that the GPU is its own: each rank of the host may print it.
"""


class Message(NamedTuple):
    """One message: how a rank shows it, what it means, where it was found, and a word that the advice must have."""

    shown: str
    class_name: str
    role: str
    source: str
    lines: tuple[str, ...]
    hint: str = ""

    @property
    def is_kept_aside(self) -> bool:
        return hashlib.sha256("\n".join(self.lines).encode()).digest()[0] % 2 == 1

    @property
    def stderr(self) -> tuple[str, ...]:
        if self.shown == "exception":
            frame = '  File "/home/user/job/train.py", line 52, in step'
            return ("Traceback (most recent call last):", frame, "    loss.backward()", *self.lines)
        if self.shown == "thrown":
            head = "terminate called after throwing an instance of 'c10::DistBackendError'"
            return (head, f"  what():  {self.lines[0]}", *self.lines[1:])
        return self.lines


def read_messages(path: Path) -> list[Message]:
    found: list[Message] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("=== "):
            shown, class_name, role, source, *hint = line.split()[1:]
            found.append(Message(shown, class_name, role, source, (), " ".join(hint)))
        elif line and line != "#" and not line.startswith("# "):
            found[-1] = found[-1]._replace(lines=(*found[-1].lines, line))
    return found


MESSAGES = read_messages(PATH)
LATER_MESSAGES = [message for path in LATER for message in read_messages(path)]
TENTH_MESSAGES = read_messages(TENTH)
TENTH_ASIDE_MESSAGES = read_messages(TENTH_ASIDE)
FOURTEENTH_MESSAGES = read_messages(FOURTEENTH)
FOURTEENTH_ASIDE_MESSAGES = read_messages(FOURTEENTH_ASIDE)
ORDINARY_LINES = [
    line for line in ORDINARY.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
]


def cause_in(message: Message, before: tuple[str, ...] = ()) -> Cause:
    end = RankEnd(1, 1, 4001, STATUSES[message.shown], 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, (*before, *message.stderr), "", "", 0.0)
    evidence = Evidence(
        "node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job"
    )
    return cause_of(read_failure(evidence, end, output))


def found_in(message: Message, before: tuple[str, ...] = ()) -> tuple[str, str]:
    cause = cause_in(message, before)
    return cause.class_name, role_of(cause).name.lower()


def misses_of(messages: Iterable[Message]) -> list[str]:
    return [
        f"{message.source}: {message.lines[-1][:100]!r}: {found_in(message)}, not {message.class_name} {message.role}"
        f" {message.hint}"
        for message in messages
        if found_in(message) != (message.class_name, message.role) or message.hint not in cause_in(message).advice
    ]


def misses(*, kept_aside: bool) -> list[str]:
    return misses_of(message for message in MESSAGES if message.is_kept_aside is kept_aside)


def count(*, kept_aside: bool) -> int:
    return sum(message.is_kept_aside is kept_aside for message in MESSAGES)


def test_the_table_is_what_it_promises() -> None:
    """Enough lines, each once and with its source."""
    assert len(MESSAGES) >= FEWEST
    assert all(message.lines and message.shown in STATUSES for message in MESSAGES)
    every = [*MESSAGES, *LATER_MESSAGES, *TENTH_MESSAGES, *TENTH_ASIDE_MESSAGES]
    every += [*FOURTEENTH_MESSAGES, *FOURTEENTH_ASIDE_MESSAGES]
    assert len({message.lines for message in every}) == len(every)
    assert all("#" in message.source or "://" in message.source for message in every)


def test_the_lines_that_the_rules_were_written_after_are_understood() -> None:
    """Each of them, with the class and with the part that it has in the failure of a job."""
    assert misses(kept_aside=False) == []


def test_the_lines_that_were_collected_afterwards_are_understood() -> None:
    """Those that are not are known, and stand here."""
    assert misses_of(LATER_MESSAGES) == []


def test_what_healthy_jobs_print_is_never_a_cause() -> None:
    """A wrong cause is worse than none: it sends a person the wrong way, and decides about another attempt."""
    assert len(set(ORDINARY_LINES)) == len(ORDINARY_LINES) >= FEWEST_ORDINARY
    wrong = [
        f"{shown}: {found[0]}: {line}"
        for shown, expected in ENDS.items()
        for line in ORDINARY_LINES
        if (found := found_in(Message(shown, expected, "culprit", "", (line,))))[0] != expected
    ]
    assert not wrong, "\n".join(wrong)


def test_what_healthy_jobs_print_does_not_hide_an_exception() -> None:
    """Nor does it where several such lines stand before the traceback that ends a rank."""
    for start in range(0, len(ORDINARY_LINES), 10):
        message = Message("exception", "python_exception", "culprit", "", ("KeyError: 'labels'",))
        before = tuple(ORDINARY_LINES[start : start + 10])
        assert found_in(message, before) == ("python_exception", "culprit"), before


def test_what_nccl_warns_of_means_the_same_as_the_last_error_of_an_exception() -> None:
    """What torch quotes behind ``Last error:`` is NCCL's last warning, whatever torch makes of it."""
    head = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
    head += "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
    quoted = [
        message._replace(
            shown="exception",
            lines=(head, "ncclSystemError: System call failed.", "Last error:", message.lines[0].partition("WARN ")[2]),
        )
        for message in MESSAGES
        if message.shown == "printed" and " NCCL WARN " in message.lines[0] and not message.is_kept_aside
    ]
    assert quoted
    for message in quoted:
        assert found_in(message) == (message.class_name, message.role), message.lines[-1]


def test_most_of_the_lines_that_were_kept_aside_are_understood() -> None:
    """Rules that fit only what they were written after are of no use."""
    missed = misses(kept_aside=True)
    assert len(missed) <= (1 - WANTED_RATE) * count(kept_aside=True), "\n".join(missed)


def test_the_open_half_of_the_tenth_part_is_understood_but_for_what_its_lines_do_not_say() -> None:
    """The rules were mended after it."""
    assert misses_of(message for message in TENTH_MESSAGES if message.source not in NOT_IN_THE_MESSAGE) == []


def test_of_the_tenth_part_that_was_kept_aside_most_is_understood_and_nothing_is_mistaken() -> None:
    """An honest "unknown" sends nobody the wrong way, a wrong class does: of those there may be none."""
    missed = [message for message in TENTH_ASIDE_MESSAGES if misses_of([message])]
    assert len(missed) <= (1 - TENTH_RATE) * len(TENTH_ASIDE_MESSAGES), "\n".join(misses_of(missed))
    mistaken = [message for message in missed if found_in(message)[0] != UNKNOWN[message.shown]]
    assert not mistaken, "\n".join(misses_of(mistaken))


def test_the_open_half_of_the_fourteenth_part_is_understood_but_for_what_is_disputed() -> None:
    """The rules were mended after it."""
    assert misses_of(message for message in FOURTEENTH_MESSAGES if message.source not in DISPUTED) == []


def test_of_the_fourteenth_part_that_was_kept_aside_as_much_is_understood_as_the_rules_have_reached() -> None:
    """By layers that no other part has: kernel logs, clients of schedulers, launchers. Only its number is reported."""
    right = sum(not misses_of([message]) for message in FOURTEENTH_ASIDE_MESSAGES)
    assert right >= FOURTEENTH_RATE * len(FOURTEENTH_ASIDE_MESSAGES), f"{right} of {len(FOURTEENTH_ASIDE_MESSAGES)}"


def repetitions(parsed: Any, depth: int = 0) -> Iterator[tuple[int, int]]:
    """How deep each repetition of a pattern stands in others, and how often it may be repeated."""
    for instruction, argument in parsed:
        inner = depth
        if str(instruction) in {"MAX_REPEAT", "MIN_REPEAT"}:
            _, most, _ = argument
            inner += most > 1
            yield inner, int(most)
        parts = argument if isinstance(argument, (tuple, list)) else ()
        for part in parts:
            for one in part if isinstance(part, list) else (part,):
                if isinstance(one, re._parser.SubPattern):  # type: ignore[attr-defined]
                    yield from repetitions(one, inner)


def test_no_rule_takes_long_whatever_a_rank_prints() -> None:
    """Each repetition is bounded, and of two within each other one is small: lines are bounded too."""
    patterns = {pattern.pattern for pattern in patterns_of_rules()}
    hints = [pattern.pattern for pattern, _ in hints_of_causes.HINTS]
    patterns |= {*hints}
    assert len(patterns) > 100
    assert len(hints) > 20
    for pattern in patterns:
        found = list(repetitions(re._parser.parse(pattern)))  # type: ignore[attr-defined]
        assert all(most <= 500 for _, most in found), pattern
        assert all(depth <= 2 for depth, _ in found), pattern


def test_no_pattern_of_a_traceback_takes_long_whatever_a_rank_prints() -> None:
    """Lines and names have bounds of their own, so that a repetition needs none unless it stands in another."""
    patterns = patterns_of_lines()
    assert len(patterns) > 10
    for pattern in patterns:
        found = list(repetitions(re._parser.parse(pattern.pattern)))  # type: ignore[attr-defined]
        assert all(depth <= 2 for depth, _ in found), pattern
        assert all(most <= 600 for depth, most in found if depth > 1), pattern


if __name__ == "__main__":
    for aside in (False, True):
        total, wrong = count(kept_aside=aside), misses(kept_aside=aside)
        print(f"{'kept aside' if aside else 'seen'}: {total - len(wrong)} of {total}")
        if not aside:
            print("\n".join(wrong))
    wrong = misses_of(LATER_MESSAGES)
    print(f"later: {len(LATER_MESSAGES) - len(wrong)} of {len(LATER_MESSAGES)}")
    print("\n".join(wrong))
    for name, part in (
        ("tenth, open", TENTH_MESSAGES),
        ("tenth, kept aside", TENTH_ASIDE_MESSAGES),
        ("fourteenth, open", FOURTEENTH_MESSAGES),
        ("fourteenth, kept aside", FOURTEENTH_ASIDE_MESSAGES),
    ):
        print(f"{name}: {len(part) - len(misses_of(part))} of {len(part)}")
