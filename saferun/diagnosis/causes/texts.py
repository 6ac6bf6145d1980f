"""Rules that recognize a failure by a message. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from saferun.diagnosis.causes.failure import Failure, cause, own_lines
from saferun.diagnosis.causes.reasons import (
    ABOUT_OTHERS,
    OF_A_PROCESS,
    OF_A_TOOL,
    gives_reason,
    is_of_its_own,
    names_reason,
)
from saferun.diagnosis.lazy_patterns import LazyPattern, first_match, is_found
from saferun.evidence.diagnosis_values import Cause
from saferun.model import Value

# What torch logs of its process groups; its threads do so while the script goes on, and maybe prints more.
_LOG_OF_TORCH = LazyPattern(
    r"^\[[EF]\d{0,4} ?\d\d:\d\d:\d\d.{0,80}\b(?:ProcessGroup\w{1,20}|c10d|TCPStore|NCCLUtils|socket)\b"
)
# Lines of torch's, NCCL's and gloo's own messages, also of those that have several.
_OF_TORCH = LazyPattern(
    r"^(?:Last error:|socket\w{0,20}: |Proxy Call |Call to |(?:CUDA|HIP) kernel errors might |For debugging consider "
    r"|Compile with `TORCH_|Exception raised from |\. This may indicate |To avoid data inconsistency)"
    r"|NCCL WARN |\bNET/\w|/gloo/|\[c10d\] |\bProcessGroup[A-Z]|\b(?:NCCL|RCCL) error\b|\b(?:nccl|rccl)\w{1,20}Error\b"
    r"|\bDist(?:Backend|Network|Store)Error\b|\bTCPStore\b|\btorch\.(?:cuda\.)?OutOfMemoryError\b"
    r"|\bSocketImpl\(|\bHorovod has been shut down|\b[Cc]oordination service\b|out of memory\. Tried to allocate "
    r"|\bUCX {1,2}ERROR\b|\b(?:nvshmem|NVSHMEM)|\bib(?:v_|gda|rc)\w"
    # TensorFlow's, which goes on without GPUs.
    r"|\b(?:CUDA|HIP) error: (?!.{0,100}cuInit)"
)
# What MPI, launchers and XLA explain in several lines, as the last that they do.
_EXPLAINED = LazyPattern(
    r"\bMPI(?:\b|_|[A-Z])|\bORTE\b|\bPMIX\b|\bOPAL\b|\bADIOI_|\blsb_launch\b|\bnot enough slots "
    r"|\boversubscribe option |BAD TERMINATION OF|^YOUR APPLICATION TERMINATED|^Primary job {1,2}terminated"
    r"|\bException in device="
)
# What Python code raises of a wrong value.
_OF_A_VALUE = LazyPattern(r"(?:Key|Value|Type|Assertion)Error: ")
# A quotation, with what names it as an exception; its last mark ends no word within.
_QUOTED = LazyPattern(r"(\w(?:Error|Exception)\()?(?<!\w)(['\"`]).{0,500}?\2(?!\w)")
# A quoted piece of a program's data.
_DATA = LazyPattern(
    r"\b((?:[Ss]ample|[Ll]ine|[Tt]ext|[Ss]tring|[Rr]ecord|[Rr]ow|[Dd]ocument|[Ee]xample|[Pp]rompt|[Ii]nput|[Tt]oken"
    r"|[Ii]tem)s?[ :#=\d]{1,12})(['\"`]).{0,500}?\2(?!\w)"
)
# Code that connects says so, and quotes why it could not.
_OF_A_CALL = LazyPattern(
    r"\b(?:all[-_ ]?(?:reduce|gather|to[-_ ]?all)|reduce[-_ ]?scatter|broadcast|barrier|scatter|gather|send|recv)"
    r"|fail|resolve|connect|\bbind|\bserve"
)
_CONNECTS = LazyPattern(
    r"/(?:torch/(?:distributed|_C)|mpi4py|horovod|deepspeed/comm|torch_(?:xla|npu)|jax|jaxlib|tensorflow|ray|vllm|sglang"
    r"|urllib3?|http|requests|httpx|httpcore|aiohttp|asyncio|grpc|zmq|multiprocessing|xmlrpc|wandb|botocore"
    r"|huggingface_hub)/|/(?:socket|socketserver|ssl|selectors|ftplib|smtplib)\.py$"
)
_WARNS = LazyPattern(r"^\[W|(?<!NCCL )\bWARN(?:ING)?\b")


class TextRule(Value):
    """A message, and what it means.

    Attributes:
        class_name: the class of the cause.
        pattern: found in one line. It may not backtrack: no repetition within a repetition, all bounded.
        message: the cause in short; ``{0}`` is the pattern's first group. A function takes the failure and the
            match.
        advice: what to do.
        in_context: whether an exception during whose handling the last one was raised counts too.
        in_last_lines: whether the rank's last lines count where no exception explains the end; see ``reported_lines``.
        must_be_last: of these lines only those count after which the program has written nothing of its own: for
            what a program may get over, as a tool that it runs, or a library, reports it.
        of_connections: of the messages of exceptions only what ``of_connections`` leaves counts.
    """

    class_name: str
    pattern: LazyPattern
    message: str | Callable[[Failure, re.Match[str]], str]
    advice: str
    in_context: bool = False
    in_last_lines: bool = False
    must_be_last: bool = False
    of_connections: bool = False


def by_text(failure: Failure, rules: Iterable[TextRule]) -> Cause | None:
    """The cause by the first rule that matches."""
    for rule in rules:
        found = first_line(rule.pattern, _messages(failure, rule, failure.messages))
        if found is None and rule.in_context:
            found = first_line(rule.pattern, _messages(failure, rule, failure.context))
        if found is None and rule.in_last_lines:
            found = first_line(rule.pattern, reported_lines(failure))
        if found is None and rule.must_be_last:
            found = first_line(rule.pattern, final_lines(failure))
        if found is not None:
            line, match = found
            message = rule.message
            text = message(failure, match) if callable(message) else message.format(*match.groups(""))
            return cause(failure, rule.class_name, text, rule.advice, proof=line)
    return None


def _messages(failure: Failure, rule: TextRule, lines: tuple[str, ...]) -> tuple[str, ...]:
    return of_connections(failure, lines) if rule.of_connections else lines


def of_connections(failure: Failure, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Messages of exceptions without what they quote: the words of a lost connection may stand in it.

    Code that checks a value, or fails on a piece of its data, quotes it. What is left out counts all the same where a
    library that connects is among the calls, or names itself.
    """
    if not any(mark in line for line in lines for mark in "'\"`"):
        return lines
    blocks = failure.error.blocks if failure.error is not None else ()
    if any(_CONNECTS.search(frame.file) for block in blocks for frame in block.frames):
        return lines
    return tuple(line if is_found(_OF_TORCH, line) else _without_quoted(line) for line in lines)


def _without_quoted(line: str) -> str:
    """The line without each piece of data that it quotes, and, of a wrong value, without what else it quotes."""
    line = _DATA.sub(r"\1\2\2", line)
    if not _OF_A_VALUE.match(line) or _OF_A_CALL.search(_QUOTED.sub("", line)):
        return line
    return _QUOTED.sub(lambda match: match[0] if match[1] else 2 * match[2], line)


def first_line(pattern: LazyPattern, lines: Iterable[str]) -> tuple[str, re.Match[str]] | None:
    """The first line in which the pattern is found."""
    if isinstance(lines, tuple):
        return first_match(pattern, lines)
    for line in lines:
        match = pattern.search(line)
        if match is not None:
            return line, match
    return None


def in_all(failure: Failure, pattern: LazyPattern) -> tuple[str, re.Match[str]] | None:
    """The first line with the pattern, of the messages of exceptions; of the last lines where there is none."""
    return first_line(pattern, (*failure.messages, *failure.context, *reported_lines(failure)))


def final_lines(failure: Failure) -> tuple[str, ...]:
    """Its very last lines, last line first, up to the last one of the program's own, which is among them."""
    return _up_to_own(failure.closing_lines)


def reported_lines(failure: Failure) -> tuple[str, ...]:
    """Its very last lines, last line first, less those after which a program that exits has said another reason.

    Such a line is something that the program had got over. What torch, NCCL and gloo report of themselves, and words
    about other ranks, seldom are: the very last words must be such a reason, and none that may follow from these.
    """
    lines = failure.closing_lines
    return lines if failure.signum else _less_got_over(lines, failure.last_lines)


@lru_cache(maxsize=4)
def _less_got_over(lines: tuple[str, ...], last: tuple[str, ...]) -> tuple[str, ...]:
    """Many rules ask for the same lines."""
    end = next((line for line in lines if _is_own(line)), "")
    ends_by_itself = is_of_its_own(end)
    kept = []
    has_reason = has_error = False
    for line in lines:
        is_torchs = is_found(_OF_TORCH, line)
        if is_torchs or ABOUT_OTHERS.search(line):
            is_over = ends_by_itself and line != end
        else:
            is_over = has_reason or (has_error and _WARNS.search(line) is not None)
        # What stands below a traceback of rich's is one line, up to the last.
        if not is_over or _LOG_OF_TORCH.match(line) or is_found(_EXPLAINED, line) or line not in last:
            kept.append(line)
        if not is_torchs and own_lines((line,)):
            has_reason = has_reason or names_reason(line)
            has_error = has_error or gives_reason(line)
    return tuple(kept)


def _is_own(line: str) -> bool:
    return OF_A_TOOL.match(line) is None and not is_found(OF_A_PROCESS, line) and bool(own_lines((line,)))


@lru_cache(maxsize=4)
def _up_to_own(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Many rules ask for the same lines."""
    own = (index for index, line in enumerate(lines) if OF_A_TOOL.match(line) is None and own_lines((line,)))
    end = next(own, len(lines))
    return lines[: end + 1]
