"""Rules that recognize a failure by a message. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from saferun.diagnosis.causes.failure import Failure, cause, own_lines
from saferun.diagnosis.causes.literals import first_match, is_found
from saferun.evidence import Cause
from saferun.model import Value

# What launchers and schedulers write below the reason, also in a line that they have broken.
_OF_A_TOOL = re.compile(
    r"(?:\d{1,6}: )?(?:slurmstepd|srun|prterun|mpirun|mpiexec|orterun)\b\S{0,80}: "
    r"|\[(?:mpiexec|proxy:\S{1,12})@\S{1,80}\] |ABORT {1,2}: |\S{1,120}\.[ch] at line \d"
    r"|(?:See|Run) '(?:docker|podman) "
)
# What torch logs of its process groups; its threads do so while the script goes on, and maybe prints more.
_LOG_OF_TORCH = re.compile(
    r"^\[[EF]\d{0,4} ?\d\d:\d\d:\d\d.{0,80}\b(?:ProcessGroup\w{1,20}|c10d|TCPStore|NCCLUtils|socket)\b"
)
# Lines of torch's, NCCL's and gloo's own messages, also of those that have several.
_OF_TORCH = re.compile(
    r"^(?:Last error:|socket\w{0,20}: |Proxy Call |Call to |(?:CUDA|HIP) kernel errors might |For debugging consider "
    r"|Compile with `TORCH_|Exception raised from |\. This may indicate |To avoid data inconsistency)"
    r"|NCCL WARN |/gloo/|\[c10d\] |\bProcessGroup[A-Z]|\b(?:NCCL|RCCL) error\b|\b(?:nccl|rccl)\w{1,20}Error\b"
    r"|\bDist(?:Backend|Network|Store)Error\b|\bTCPStore\b|\btorch\.(?:cuda\.)?OutOfMemoryError\b"
    r"|\bSocketImpl\(|\bHorovod has been shut down|\b[Cc]oordination service\b|out of memory\. Tried to allocate "
    r"|\bUCX {1,2}ERROR\b|\b(?:nvshmem|NVSHMEM)|\bib(?:v_|gda|rc)\w"
    # TensorFlow's, which goes on without GPUs.
    r"|\b(?:CUDA|HIP) error: (?!.{0,100}cuInit)"
)
# What MPI, launchers and XLA explain in several lines, as the last that they do.
_EXPLAINED = re.compile(
    r"\bMPI(?:\b|_|[A-Z])|\bORTE\b|\bPMIX\b|\bOPAL\b|\bADIOI_|\blsb_launch\b|\bnot enough slots "
    r"|\boversubscribe option |BAD TERMINATION OF|^YOUR APPLICATION TERMINATED|^Primary job {1,2}terminated"
    r"|\bException in device="
)
# How a tool, Python or C++ reports the end of a process, whose reason stands above.
_OF_A_PROCESS = re.compile(
    r"^(?:make(?:\[\d{1,3}\])?: \*\*\* |ninja: build stopped|Command (?:terminated by|exited with)"
    r"|terminate called |Fatal Python error: |(?:Current thread|Thread) 0x|(?:\S{1,120}: line \d{1,6}: {1,8}\d{1,10} )?"
    r"(?:Aborted|Killed|Segmentation fault|Bus error)\b)"
    r"|\bexits with return code = |\bexited with exit code \d|\breturned non-zero exit status "
)
# What Python code raises of a wrong value.
_OF_A_VALUE = re.compile(r"(?:Key|Value|Type|Assertion)Error: ")
_QUOTES_A_VALUE = re.compile(r"(?<!\w)(['\"`])")
# What stands before a quoted piece of a program's data.
_QUOTES_DATA = re.compile(
    r"\b(?:[Ss]ample|[Ll]ine|[Tt]ext|[Ss]tring|[Rr]ecord|[Rr]ow|[Dd]ocument|[Ee]xample|[Pp]rompt|[Ii]nput|[Tt]oken"
    r"|[Ii]tem)s?[ :#=\d]{1,12}(['\"`])"
)
_CONNECTS = re.compile(
    r"/(?:torch/(?:distributed|_C)|mpi4py|horovod|deepspeed/comm|torch_(?:xla|npu)|jax|jaxlib|tensorflow|ray|vllm|sglang"
    r"|urllib3?|http|requests|httpx|httpcore|aiohttp|asyncio|grpc|zmq|multiprocessing|xmlrpc|wandb|botocore"
    r"|huggingface_hub)/|/(?:socket|socketserver|ssl|selectors|ftplib|smtplib)\.py$"
)
_WARNS = re.compile(r"^\[W|(?<!NCCL )\bWARN(?:ING)?\b")
# What stands before the words of a log line.
_LOG_HEAD = re.compile(
    r"(?:\[[^\]]{1,60}\] ?){0,4}[\d:.,/ TZ+-]{0,40}(?:\[?(?:ERROR|CRITICAL|FATAL|[Ee]rror)\]?[ :|-]{1,6}){0,2}"
    r"(?:[\w.]{1,60}(?: ?[:|-] |:(?=[A-Za-z])))?"
)
# That others are lost explains what a library has reported of them; it is no other reason.
_ABOUT_OTHERS = re.compile(
    r"\b(?:[Oo]ther|[Aa]nother|[Rr]emote|[Pp]eer) (?:rank|worker|node|host|process|task)|\b[Pp]eers?\b"
    r"|\b[Cc]ollectives?\b|\b[Aa]ll[-_ ]?(?:[Rr]educe|[Gg]ather)|\b[Bb]arrier\b|\b[Cc]ommunicat|\b[Nn]etwork\b|\bNCCL\b"
    r"|\b[Gg]loo\b"
)
# What a script does before it exits, and words that a reason may have beside that.
_CLEANS_UP = re.compile(
    r"\b(?:[Ss]av(?:ed|ing)|[Cc]los(?:ed|ing)|[Cc]lean(?:ed|ing)[- ]?up|[Uu]pload(?:ed|ing)|[Ff]lush(?:ed|ing)"
    r"|[Dd]estroy(?:ed|ing)|[Rr]eleas(?:ed|ing)|[Dd]ump(?:ed|ing)|[Ee]mergency|[Ee]lapsed|[Tt]ook)\b"
)
_GIVES_A_REASON = re.compile(
    r"\b(?:nan|inf|loss|diverge\w{0,3}|because|since|invalid|missing|not|no|unexpected|unknown|wrong|expected|required"
    r"|than|exceed\w{0,3}|error)\b",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[^\W\d_]{1,40}")
_ENDS = frozenset(
    """abort aborted aborting aborts bye cannot crash crashed exit exited exiting exits fail failed failing fails
    failure gave giving killed killing quit quits quitting shut shutting shutdown stop stopped stopping stops terminate
    terminated terminating""".split()
)
_WITHOUT_REASON = _ENDS | frozenset(
    """a above all an and are as at batch because been below code continue could did do done down due during early epoch
    error errors exception fatal for from general get give go goes going had happened has have here in is it iteration
    its job log logs main must no not now of on our please process program rank ranks run see script so sorry status
    step task the there this to traceback train trainer training up was we were will with worker workers""".split()
)


class TextRule(Value):
    """A message, and what it means.

    Attributes:
        class_name: the class of the cause.
        pattern: found in one line. It may not backtrack: no repetition within a repetition, all bounded. It is
            compiled with its module, at a quiet moment: when a rank has failed, others wait for the verdict.
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
    pattern: re.Pattern[str]
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
    if not any(_quoted_in(line) for line in lines):
        return lines
    blocks = failure.error.blocks if failure.error is not None else ()
    if any(_CONNECTS.search(frame.file) for block in blocks for frame in block.frames):
        return lines
    return tuple(line if is_found(_OF_TORCH, line) else _without_quoted(line) for line in lines)


def _quoted_in(line: str) -> re.Match[str] | None:
    return (_QUOTES_A_VALUE if _OF_A_VALUE.match(line) else _QUOTES_DATA).search(line)


def _without_quoted(line: str) -> str:
    """The line without what stands between its first quotation mark and the last one like it."""
    match = _quoted_in(line)
    if match is None:
        return line
    end = line.rfind(match[1], match.end())
    return line[: match.end()] + line[end:] if end >= 0 else line


def first_line(pattern: re.Pattern[str], lines: Iterable[str]) -> tuple[str, re.Match[str]] | None:
    """The first line in which the pattern is found."""
    if isinstance(lines, tuple):
        return first_match(pattern, lines)
    for line in lines:
        match = pattern.search(line)
        if match is not None:
            return line, match
    return None


def final_lines(failure: Failure) -> tuple[str, ...]:
    """Its very last lines, last line first, up to the last one of the program's own, which is among them."""
    return _up_to_own(failure.closing_lines)


def reported_lines(failure: Failure) -> tuple[str, ...]:
    """Its very last lines, last line first, less those after which a program that exits has said another reason.

    Such a line is something that the program had got over. What torch and NCCL report of themselves is not, in most
    cases, and may be followed by one line of the program's own.
    """
    lines = failure.closing_lines
    return lines if failure.signum else _less_got_over(lines, failure.last_lines)


@lru_cache(maxsize=4)
def _less_got_over(lines: tuple[str, ...], last: tuple[str, ...]) -> tuple[str, ...]:
    """Many rules ask for the same lines."""
    kept = []
    reasons = 0
    for line in lines:
        is_torchs = is_found(_OF_TORCH, line)
        if (
            not reasons
            or (is_torchs and reasons == 1 and _WARNS.search(line) is None)
            or _LOG_OF_TORCH.match(line)
            or is_found(_EXPLAINED, line)
            # What stands below a traceback of rich's is one line, up to the last.
            or line not in last
        ):
            kept.append(line)
        reasons += not is_torchs and bool(own_lines((line,))) and gives_reason(line)
    return tuple(kept)


def gives_reason(line: str) -> bool:
    """Whether a line says more than that the program ends: ``training failed, exiting`` does not."""
    if _OF_A_TOOL.match(line) or is_found(_OF_A_PROCESS, line):
        return False
    if _ABOUT_OTHERS.search(line) or (_CLEANS_UP.search(line) and not _GIVES_A_REASON.search(line)):
        return False
    tokens = [token.lower() for token in _TOKEN.findall(line[_head_length(line) :])]
    return not _WITHOUT_REASON.issuperset(tokens) or _ENDS.isdisjoint(tokens)


def _head_length(line: str) -> int:
    head = _LOG_HEAD.match(line)
    return head.end() if head is not None else 0


@lru_cache(maxsize=4)
def _up_to_own(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Many rules ask for the same lines."""
    own = (index for index, line in enumerate(lines) if _OF_A_TOOL.match(line) is None and own_lines((line,)))
    end = next(own, len(lines))
    return lines[: end + 1]
