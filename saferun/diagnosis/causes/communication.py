"""What goes wrong between ranks: collectives, NCCL, gloo; and how victims of it sound. Pure.

Sources: messages of torch's process groups and TCPStore (2.4 to 2.13), of NCCL (``ncclGetErrorString``) and of gloo.
"""

from __future__ import annotations

import re

from saferun.diagnosis.causes.failure import Failure, cause
from saferun.diagnosis.causes.quotations import without_quotations
from saferun.diagnosis.causes.texts import TextRule, by_text, final_lines, first_line, reported_lines
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause
from saferun.text.wording import ranks_text

# --------------------------------------------------------------------------------------------------- mismatched calls

_SAME_ORDER = (
    "all ranks must call the same collectives, in the same order, with the same sizes: compare their code paths"
)
_DETAIL = LazyPattern(
    r"[Rr]ank (\d{1,6}) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d{1,19}), OpType=(\w{1,60})"
    r"(?:, TensorShape=(\[[\d, ]{0,80}\]))?"
)
_MISMATCHES = (
    TextRule(
        "mismatched_collectives",
        LazyPattern(r"op\.preamble\.length <= op\.nbytes\. (\d{1,19}) vs (\d{1,19})"),
        "a collective's sizes differ between ranks: {0} bytes came, where it expects {1}",
        _SAME_ORDER,
    ),
    TextRule(
        "mismatched_collectives",
        LazyPattern(
            r"Detected mismatch between collectives on ranks|Received data size doesn't match expected size"
            r"|distributed collective mismatch|[Mm]ismatched collective detected|collective mismatch error"
        ),
        "the ranks called different collectives",
        _SAME_ORDER,
        in_last_lines=True,
    ),
    TextRule(
        "mismatched_collectives",
        LazyPattern(r"receiv(?:ed|ing) (\d{1,19}) bytes instead of (\d{1,19})"),
        "the ranks' calls differ: {0} bytes came, where {1} are expected",
        _SAME_ORDER,
        in_last_lines=True,
    ),
    TextRule(
        "mismatched_collectives",
        LazyPattern(r"disagreement between rank ?(\d{1,6}) and rank ?(\d{1,6})"),
        "ranks {0} and {1} gather different parameters: they run different parts of the model",
        "every rank must run the same modules in the same order (experts and branches, and the number of batches too)",
        must_be_last=True,
    ),
    TextRule(
        "mismatched_collectives",
        LazyPattern(r"Rank (\d{1,6}) has different values for (.{1,160})"),
        "rank {0}'s state differs from the others': {1}",
        "load the same checkpoint on every rank, and make the same number of steps",
        must_be_last=True,
    ),
    TextRule(
        "mismatched_collectives",
        LazyPattern(
            r"DDP expects same model across all ranks"
            r"|appears not to match (?:sizes|strides) of the same param in process"
        ),
        "the model differs between ranks",
        "build the same model on every rank: no layer may depend on the rank or on its data",
        must_be_last=True,
    ),
)


# No model is without parameters, or has so many: what another rank was to send has not come.
_NO_COUNT = LazyPattern(
    r"DDP expects same model across all ranks, but Rank \d{1,6} has \d{1,19} params, while rank (\d{1,6}) has "
    r"inconsistent (?:0|-\d{1,19}|\d{8,19}) params"
)
_NO_COUNT_ADVICE = (
    "rank {0} hangs, has ended or is not reached: look at what it did; where it waits as well, test the connection "
    "between the GPUs (NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 does without direct access)"
)


def mismatched_collectives(failure: Failure) -> Cause | None:
    """Ranks that call different collectives, as the library found out."""
    found = by_text(failure, _MISMATCHES)
    if found is None or _NO_COUNT.search(found.proof):
        return None
    calls = sorted({(int(match[1]), match[2], match[3], match[4] or "") for match in _DETAIL.finditer(found.proof)})
    # The other rank's line may be cut off; the line itself is longer than the proof.
    for line in failure.messages:
        calls = sorted({*calls, *((int(m[1]), m[2], m[3], m[4] or "") for m in _DETAIL.finditer(line))})
    if len(calls) < 2:  # noqa: PLR2004 - a comparison needs two
        return found
    sides = ", ".join(f"rank {rank} {op} {shape}".rstrip() for rank, _, op, shape in calls)
    message = f"different collectives under number {calls[0][1]}: {sides}"
    return found._replace(message=message, ranks=tuple(sorted({rank for rank, *_ in calls})))


# ------------------------------------------------------------------------------------------------------------ timeouts

_WATCHDOG = LazyPattern(
    r"Watchdog caught collective operation timeout(?:: WorkNCCL\((?:SeqNum=(\d{1,19}))?(?:, )?(?:OpType=(\w{1,60}))?)?"
)
# torch >= 2.14, backend nccl2.
_ABORTING = LazyPattern(
    r"(?:Aborting process|aborting the communicator) due to timeout on rank \d|watchdog detected operation timeout"
    r"|\bNCCL operation timed out"
)
# What its heartbeat monitor logs; where another rank has timed out it names that.
_OWN_TIMEOUT = LazyPattern(r"due to a collective timeout from this local rank")
# What is said beside the reason, which may stand further up.
_ENDED_BY_WATCHDOG = LazyPattern(
    r"(?:error or timeout\) detected by watchdog at work: |Timeout at NCCL work: "
    r"|failure detected by watchdog at work sequence id: )(\d{1,19})"
    r"|NCCL operations have failed or timed out|we are taking the entire process down"
)
_RAN_FOR = LazyPattern(r"ran for (\d{1,12}) milliseconds before timing out")
_STUCK_WATCHDOG = LazyPattern(
    r"watchdog got stuck for (\d{1,9}) seconds|Heartbeat monitor timed out!|watchdog hang"
    r"|detected no heartbeat of its watchdog"
)
_TIMEOUT_ADVICE = (
    "one rank did not reach it, or the network is stuck: check what the other ranks did; if it is only slow, raise the "
    "timeout of init_process_group"
)
_STUCK_ADVICE = (
    "a CUDA or NCCL call does not return: look at what the ranks did, at the GPUs' state and at the kernel log"
)


def _missing_count(failure: Failure) -> tuple[str, re.Match[str]] | None:
    return first_line(_NO_COUNT, (*failure.messages, *final_lines(failure)))


def nccl_timeout(failure: Failure) -> Cause | None:
    """NCCL or RCCL waited for other ranks until its watchdog gave up."""
    lines = (*failure.messages, *failure.context, *reported_lines(failure))
    if _missing_count(failure) is not None:
        # Its watchdog says why, further up.
        lines = (*lines, *reversed(failure.lines))
    found = first_line(_WATCHDOG, lines)
    if found is not None:
        line, match = found
        ran = _RAN_FOR.search(line)
        number = f" number {match[1]}" if match[1] else ""
        lasted = f" within {int(ran[1]) / 1000:.0f} s" if ran is not None else ""
        message = f"NCCL timeout: {match[2] or 'a collective'}{number} did not complete{lasted}"
        return cause(failure, "nccl_timeout", message, _TIMEOUT_ADVICE, proof=line)
    found = first_line(_ABORTING, lines)
    if found is not None:
        return cause(
            failure, "nccl_timeout", "NCCL timeout: a collective did not complete", _TIMEOUT_ADVICE, proof=found[0]
        )
    found = first_line(_STUCK_WATCHDOG, lines)
    if found is not None:
        lasted = f" for {found[1][1]} s" if found[1][1] else ""
        return cause(failure, "nccl_timeout", f"NCCL's watchdog was stuck{lasted}", _STUCK_ADVICE, proof=found[0])
    found = first_line(_OWN_TIMEOUT, lines)
    if found is None:
        return None
    message = "NCCL timeout: a collective did not complete"
    return watchdog_ended(failure) or cause(failure, "nccl_timeout", message, _TIMEOUT_ADVICE, proof=found[0])


def watchdog_ended(failure: Failure) -> Cause | None:
    """NCCL's watchdog ended the process, and no line is left that says why."""
    found = first_line(_ENDED_BY_WATCHDOG, (*failure.messages, *reported_lines(failure)))
    if found is None:
        return None
    number = f" number {found[1][1]}" if found[1][1] else ""
    message = f"NCCL timeout: collective{number} did not complete, or failed"
    return cause(failure, "nccl_timeout", message, _TIMEOUT_ADVICE, proof=found[0])


_BARRIER = LazyPattern(r"[Rr]anks? (\d{1,6}(?:, ?\d{1,6}){0,200}) failed to pass monitoredBarrier in (\d{1,12}) ms")
_GLOO_TIMEOUT = LazyPattern(
    r"Timed out waiting (\d{1,12})ms for (?:send|recv) operation to complete|Application timeout caused pair closure"
)
# torch.distributed.rpc.
_RPC_TIMEOUT = LazyPattern(r"\bRPC ran for more than (?:the )?(?:set )?timeout(?: \((\d{1,12}) ms\))?|\bRPCErr:1:")
_RPC_ADVICE = (
    "look at what the other rank did: it is busy, hangs or has failed; for calls that take long raise rpc_timeout"
)


def collective_timeout(failure: Failure) -> Cause | None:
    """Gloo waited for other ranks until the timeout of the process group, or a collective ended without their data."""
    lines = (*failure.messages, *failure.context, *reported_lines(failure))
    found = first_line(_BARRIER, lines)
    if found is not None:
        ranks = tuple(sorted({int(rank) for rank in found[1][1].split(",")}))
        message = f"{ranks_text(ranks)} did not come to monitored_barrier within {int(found[1][2]) / 1000:g} s"
        return cause(failure, "collective_timeout", message, _TIMEOUT_ADVICE, proof=found[0])._replace(ranks=ranks)
    found = first_line(_RPC_TIMEOUT, (*failure.messages, *failure.context, *final_lines(failure)))
    if found is not None:
        within = f" within {int(found[1][1]) / 1000:g} s" if found[1][1] else ""
        message = f"an RPC to another rank did not complete{within}"
        return cause(failure, "collective_timeout", message, _RPC_ADVICE, proof=found[0])
    found = _missing_count(failure)
    if found is not None:
        message = f"the number of parameters of rank {found[1][1]}'s model did not arrive"
        return cause(failure, "collective_timeout", message, _NO_COUNT_ADVICE.format(found[1][1]), proof=found[0])
    found = first_line(_GLOO_TIMEOUT, lines)
    if found is not None:
        within = f" within {int(found[1][1]) / 1000:g} s" if found[1][1] else ""
        message = f"gloo timeout: another rank did not come to the collective{within}"
        return cause(failure, "collective_timeout", message, _TIMEOUT_ADVICE, proof=found[0])
    return None


# ---------------------------------------------------------------------------------------------------------------- NCCL

_LAST_ERROR = LazyPattern(r"\s{0,40}Last error:\s{0,40}(.{0,200})")
# ncclGetErrorString() as it stands behind the name of a call or of a test.
_CALL = r"(?:NCCL|RCCL|\bnccl[A-Z]\w{1,40}|Proxy Service).{0,120}"
# Warnings of jobs that go on: NCCL does without what it warns of.
_NCCL_GOES_ON = (
    r"(?!.{0,200}(?:[Ff]ailed to open lib|[Ff]all(?:ing|s)? ?back|instead|[Ii]gnor|[Uu]sing |[Dd]isabl|[Rr]etr|lead to"
    r"|[Ww]ill continue|[Nn]o plugin|[Pp]erformance|SHARP|[Cc]oll[Nn]et))"
)
_NCCL_DEBUG = (
    "nccl.*.log in the rank's directory names the call that failed (env profile production), else NCCL_DEBUG=WARN"
)
_NCCL = (
    TextRule(
        "import_error",
        # As vLLM puts it, which goes on without NCCL only where it needs none.
        LazyPattern(r"\bCannot find (lib\w{1,30}\.so[\d.]{0,12}) in the system\b"),
        "a library cannot be found: {0}",
        "install it, or add its directory to LD_LIBRARY_PATH; VLLM_NCCL_SO_PATH names NCCL's for vLLM",
        must_be_last=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(r"Duplicate GPU detected|Multiple [Rr]anks are using the same GPU"),
        "two ranks use the same GPU",
        "give each rank its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group",
        in_last_lines=True,
    ),
    TextRule(
        "network_interface",
        LazyPattern(r"no socket interface found"),
        "NCCL found no network interface to use",
        "look at NCCL_SOCKET_IFNAME: `ip addr` shows the names of this host",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(
            rf"(?:nccl|rccl)SystemError|{_CALL}(?:unhandled system error"
            rf"|Failed to execute operation .{{1,60}} retcode 2\b|.{{1,60}}\bres=2\b)"
        ),
        "NCCL system error",
        f"{_NCCL_DEBUG}; look at /dev/shm, at the network interface (NCCL_SOCKET_IFNAME) and at `ulimit -l`",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(
            rf"ncclUnhandledCudaError|unhandled cuda error"
            rf"|{_CALL}(?:Failed to execute operation .{{1,60}} retcode 1|\bres=1)\b"
        ),
        "NCCL: a CUDA call failed",
        f"{_NCCL_DEBUG}; most often the GPU is out of memory, or an earlier kernel failed",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(r"\b((?:nccl|rccl)(?:InternalError|InvalidUsage|InvalidArgument))\b"),
        "NCCL error {0}",
        _NCCL_DEBUG,
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(
            r"(?:NCCL WARN (?=(?:ncclS|s)ocket\w{1,40}: |Bootstrap Root)|(?:init|bootstrap)\.cc:\d{1,5} NCCL WARN )"
            rf"{_NCCL_GOES_ON}(.{{1,200}})"
        ),
        "NCCL could not set up its communicator: {0}",
        "check whether another program connects to the ranks, such as a scanner, and compare the versions of NCCL",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(
            rf"{_CALL}\b(internal error|invalid (?:argument|usage)|(?:no|unknown) (?:algorithm"
            rf"|protocol).{{0,40}}available"
            r"|Failed to execute operation .{1,60} retcode [345]\b)"
        ),
        "NCCL: {0}",
        _NCCL_DEBUG,
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(
            rf"NCCL WARN {_NCCL_GOES_ON}((?:Error ?:|.{{0,120}}\b(?:[Ff]ailed|fatal|[Mm]ismatch|not found"
            rf"|[Aa]borted)\b)"
            r".{0,200})"
        ),
        "NCCL: {0}",
        _NCCL_DEBUG,
        in_last_lines=True,
    ),
    TextRule(
        "nccl_error",
        LazyPattern(r"\b(?:NCCL|RCCL) [Ee]rror\b"),
        "NCCL error",
        _NCCL_DEBUG,
        in_last_lines=True,
    ),
)


@without_quotations
def nccl_error(failure: Failure) -> Cause | None:
    """NCCL or RCCL failed by itself."""
    found = by_text(failure, _NCCL)
    if found is None:
        return None
    detail = _last_error(failure.messages)
    return found._replace(message=f"{found.message.rstrip()}: {detail}") if detail else found


def _last_error(lines: tuple[str, ...]) -> str:
    """What stands after ``Last error:``, in the same line or the next."""
    for index, line in enumerate(lines):
        match = _LAST_ERROR.match(line)
        if match is not None:
            after = lines[index + 1] if index + 1 < len(lines) else ""
            return (match[1] or after).strip()[:200]
    return ""


# ------------------------------------------------------------------------------------------------------------- victims

_ELSEWHERE = "look at the rank that ended first; where it was on another host, at the output there"
_VICTIMS = (
    TextRule(
        "store_lost",
        LazyPattern(
            r"Connection was likely closed|(?:recvValue\w{0,20}|recvVector|recvBytes|sendBytes|sendValue) failed"
            r"|DistNetworkError.{0,200}(?:Broken pipe|Connection reset)|Remote peer closed the connection"
            r"|store->.{0,200}(?:Connection reset|Broken pipe|Connection closed)|TCPStore server has shut down"
            r"|DistNetworkError.{0,80}[Ff]ailed to recv, got 0 bytes"
        ),
        "lost its connection to the store",
        _ELSEWHERE,
        in_context=True,
        in_last_lines=True,
        of_connections=True,
    ),
    TextRule(
        "peer_lost",
        LazyPattern(
            r"Connection closed by (?:remote )?peer|(?:Read|Write|Connection) error \[.{0,120}\]:\d{1,5}: "
            r"|gloo/.{0,120}(?:Connection reset|Broken pipe|Socket closed|Connection aborted|Connection timed out)"
            r"|remote process exited or there was a network error|ncclRemoteError"
            r"|socketProgress.{0,160}(?:Connection reset|Connection closed|Broken pipe)"
            r"|Call to (?:recv|send|connect) .{0,120}failed : (?:Connection reset|Connection refused|Broken pipe)"
            r"|Could not receive type from localRank \d"
            r"|Socket recv failed while polling for opId|Proxy Call to rank \d{1,6} failed"
            r"|Failed to execute operation \w{1,40} from rank \d{1,6}, retcode 6\b"
            r"|Error encountered progressing operation=\w{1,20}, res=6\b"
            r"|lost communication with a remote daemon|Communication error with rank \d"
            r"|peer process has unexpectedly disconnected|Horovod has been shut down"
            r"|\boriginated at tensorpipe/"
            r"|reached monitoredBarrier, but received errors while waiting for send/recv from rank \d"
            r"|^Transport endpoint is not connected"
            # JAX and TensorFlow; Ray.
            r"|\bunhealthy \(stopped sending heartbeats\)"
            r"|\bmarked dead because .{0,40}\bmissed too many heartbeats\b(?!.{0,120}\bgoes on\b)"
            r"|\b[Ss]ocket (?:recv|send|receive|accept|poll) (?:error|failed)\b"
            r"|errors_impl\.UnavailableError|\bgrpc error: ?(?:Connect Failed|Socket closed|Deadline Exceeded)"
        ),
        "lost its connection to another rank",
        _ELSEWHERE,
        in_context=True,
        in_last_lines=True,
        of_connections=True,
    ),
    TextRule(
        "communicator_aborted",
        LazyPattern(
            r"NCCL communicator (?:was aborted|encountered error set by)"
            r"|Observed flight recorder dump signal from another|(?:process|communicator) due to error on rank \d"
            r"|Received a (?:dump|global|timeout) .{0,80}from (?!this local).{0,40}rank"
        ),
        "its NCCL communicator was aborted, because another rank's was",
        _ELSEWHERE,
        in_context=True,
        in_last_lines=True,
        of_connections=True,
    ),
    TextRule(
        "worker_stopped",
        LazyPattern(
            r"DataLoader worker \(pid(?:\(s\))? (\d{1,10})\) is killed by signal: (Terminated|Interrupt|Hangup)"
        ),
        "its data-loader worker {0} was stopped ({1})",
        "find what stopped it: a scheduler, another launcher, a user",
        in_context=True,
        of_connections=True,
    ),
)


def _around(match: re.Match[str]) -> str:
    return match.string[max(match.start() - _CHARS_AROUND, 0) : match.end() + _CHARS_AROUND]


_CHARS_AROUND = 80
# Plain words, which any program may use: they count where what raised them is a library that connects ranks.
_BY_ANY_PROGRAM = TextRule(
    "peer_lost",
    LazyPattern(
        r"\b(?:[Aa]nother|[Rr]emote|[Oo]ther) (?:task|rank|worker|process|node|host)s?\b.{0,40}"
        # The space makes a literal that few lines have.
        r"(?: died| has failed| crashed| disconnected"
        r"|,? (?:exited|terminated) (?:unexpectedly|abnormally|prematurely))\b"
        r"|\bstopped sending heartbeats\b|\bmissed too many heartbeats\b(?!.{0,120}\bgoes on\b)"
    ),
    lambda _, match: f"lost another rank, as it says: {_around(match)}",
    _ELSEWHERE,
    in_context=True,
    in_last_lines=True,
)
_CONNECTS_RANKS = LazyPattern(
    r"/(?:torch/(?:distributed|_C)|mpi4py|horovod|deepspeed/comm|oneccl\w{0,20}|torch_(?:xla|npu)|jax|jaxlib|tensorflow|ray"
    r"|nixl|ucp|cupy/nccl|bagua|vllm|sglang)/"
)
_NAMES_A_LIBRARY = LazyPattern(
    r"\b(?:NCCL|RCCL|HCCL|CCL|oneCCL|MPI|UCX|NIXL|[Gg]loo|Horovod|JAX|XLA|Xla\w{1,30}|[Cc]oordination service"
    r"|DistBackendError|ray\.|jaxlib\.|tensorflow\.|torch\.distributed\.|horovod\.|mpi4py\.|/job:)"
)


def victim(failure: Failure) -> Cause | None:
    """It failed only because another rank did."""
    return _victim(failure) if _is_of_connections(failure) else _unquoted_victim(failure)


def _victim(failure: Failure) -> Cause | None:
    return by_text(failure, _VICTIMS) or _victim_by_its_message(failure)


_unquoted_victim = without_quotations(_victim)


def tells_of_a_lost_peer(lines: tuple[str, ...]) -> bool:
    """Whether any of these lines says that it has lost another rank, or the store."""
    return any(first_line(rule.pattern, lines) for rule in _VICTIMS)


def _victim_by_its_message(failure: Failure) -> Cause | None:
    found = by_text(failure, (_BY_ANY_PROGRAM,))
    if found is None:
        return None
    return found if _is_of_connections(failure) or _NAMES_A_LIBRARY.search(found.proof) else None


def _is_of_connections(failure: Failure) -> bool:
    """Whether a library that connects ranks is among the calls."""
    blocks = failure.error.blocks if failure.error is not None else ()
    return any(_CONNECTS_RANKS.search(frame.file) for block in blocks for frame in block.frames)
