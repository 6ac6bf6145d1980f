"""What goes wrong on the network that carries collectives: InfiniBand, RoCE, EFA, UCX, NVSHMEM, MPI. Pure.

Sources: ibv_poll_cq(3) and ibv_modify_qp(3) of rdma-core; messages of NCCL's and RCCL's network code, of aws-ofi-nccl,
libfabric, UCX, NVSHMEM, DeepEP, Open MPI and MPICH, as they stand in public issues.
"""

from __future__ import annotations

import signal

from saferun.diagnosis.causes.failure import Failure, cause
from saferun.diagnosis.causes.texts import TextRule, by_text, first_line
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_CHECK_LINK = (
    "check whether the peer's rank or host has failed; else the link between both: ibstat, `saferunctl doctor`, the "
    "switch; on RoCE NCCL_IB_GID_INDEX and NCCL_IB_TC, on EFA the security group (all traffic within it)"
)
_CHECK_ROUTE = (
    "check whether the hosts reach each other on that interface (ping, firewall, MTU) and whether NCCL_SOCKET_IFNAME, "
    "NCCL_IB_HCA and NCCL_IB_GID_INDEX name the right ones; on a network of separate rails set NCCL_CROSS_NIC=0"
)
# ibv_wc_status. A flushed request follows from another error of the same connection.
_FLUSHED = 5
_STATUS = {
    1: "a length error on this side",
    2: "an error of the queue pair on this side",
    4: "a memory protection error on this side (GPUDirect RDMA)",
    9: "the peer rejected the request",
    10: "the peer denied access to its memory (GPUDirect RDMA)",
    11: "an error on the peer's side",
    12: "the peer did not answer (transport retries exceeded)",
    13: "the peer was not ready (receiver-not-ready retries exceeded)",
}
_COMPLETION = LazyPattern(
    r"NET/IB\w{0,8} ?: ?Got completion (?:from peer )?(?:(?!with )(\S{1,120}) )?with "
    r"(?:error |status=)(?:IBV_WC_\w{1,20}\()?(\d{1,3})\b"
)
_HCA = LazyPattern(r"\bhca (\w{1,40})")
# errno(3) of connect(2) where nothing answers; what a peer itself does (refuses, resets) is not among them.
_UNREACHABLE = (
    r"(?:No route to host|(?:Network|Host) is (?:unreachable|down)|[Cc]onnection timed out"
    r"|Network dropped connection)"
)
# ucs_status_string() of UCX: the peer, or the way to it.
_UCS_STATUS = (
    r"(?:[Ee]ndpoint timeout|[Tt]imed out|timeout error|retry count exceeded|Connection reset by remote peer"
    r"|Destination is unreachable|no .{1,60} transport to|Endpoint is not connected|Remote (?:access"
    r"|operation|I/O) error|is unreachable)"
)
# ibv_wc_status_str() of rdma-core, which UCX, NIXL, Mooncake and others quote. A flushed request is none of them.
_WC_STATUS = (
    r"(?:[Ll]ocal (?:length|QP operation|protection|access|RDD violation|EEC operation) error"
    r"|[Mm]emory management operation error|[Bb]ad response error"
    r"|[Rr]emote (?:invalid request|access|operation|aborted) error|(?:[Tt]ransport|RNR) retry counter exceeded)"
)
_FABRIC = (
    TextRule(
        "peer_lost",
        LazyPattern(
            r"\b(?:Work Request Flushed Error|WR flushed error|IBV_WC_WR_FLUSH_ERR|NIXL_ERR_REMOTE_DISCONNECT)\b"
            # Mooncake's RPC.
            r"|\b(?:read|write|send|recv) rpc \w{2,8} failed, error msg: ?(?:End of file|Connection reset|Broken pipe)"
        ),
        "lost its RDMA connection to another rank",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(rf"\b({_WC_STATUS})"),
        "RDMA failed: {0}",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(r"(?<![\w -])([\w -]{1,80})(?: on (\w{1,40}:\d{1,3})/(?:IB|RoCE))? \(synd "),
        lambda _, match: f"UCX: {match[1].strip()}{f' on {match[2]}' if match[2] else ''}",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            rf"\b\w{{1,40}}\.c:\d{{1,5}} {{1,8}}(?:UCX {{1,4}})?(?:E(?:rror|RROR)|F(?:atal|ATAL)):? "
            rf"(.{{0,160}}{_UCS_STATUS})"
        ),
        "UCX: {0}",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(r"\bmlx[45]: .{1,120}got completion with error"),
        "RDMA failed: the driver of the network adapter got an error from the fabric",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"\bNIXL_ERR_(?:BACKEND|NOT_FOUND|CANCELED|UNKNOWN)"
            r"|NET/OFI .{0,60}completed with error.{0,200}|Unresponsive receiver|[Uu]nreachable remote"
            r"|:efa:cq:.{0,160}\berr: \d"
        ),
        lambda _, match: f"{'NIXL' if match[0].startswith('NIXL') else 'EFA'}: the peer did not answer",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"NET/IB\w{0,8} ?: (\S{1,60}) ?(?:Got )?async (?:error |fatal )?event(?: on \w{1,12}(?: \(\w{1,20}\))?)?: "
            r"(.{0,60}(?:error|fatal|violation).{0,40})"
        ),
        "the RDMA port {0} of this host reported: {1}",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        # The driver in the kernel log, the tools of perftest, librdmacm, Mooncake.
        LazyPattern(
            r"\b(mlx[45]_core [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f.]{2,6}\b.{0,80}"
            r"(?:[Hh]ealth compromised|[Ll]ink down|[Ff]atal|timeout).{0,60}"
            r"|Failed status [1-9]\d?: wr_id\b.{0,60}|Unexpected CM event\b.{0,40}"
            r"|RDMA_CM_EVENT_(?:UNREACHABLE|REJECTED|(?:ADDR|ROUTE|CONNECT)_ERROR)\b.{0,40}"
            r"|[Ff]ailed to (?:retrieve|get|open|describe) (?:the )?(?:remote segment|segment desc\w{0,12})\b.{0,80})"
        ),
        "RDMA failed: {0}",
        _CHECK_LINK,
        must_be_last=True,
    ),
    TextRule(
        "fabric_error",
        # NCCL before 2.5 names no adapter.
        LazyPattern(r"NET/IB ?: Got async event ?: (.{0,60}(?:error|fatal|violation).{0,40})"),
        "an RDMA port of this host reported: {0}",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"\b(UCX (?:endpoint|ep|worker|request|listener|connection) "
            r"(?:(?:create|creation|close|flush|connect|send|recv|progress) )?(?:failed|error|disconnected)\b.{0,80})"
        ),
        "{0}",
        _CHECK_LINK,
        must_be_last=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"ibv_modify_qp failed|mlx5dv_devx_obj_modify|[Ff]ailed to modify QP|[Uu]nable to create ah\b"
            r"|ibv_create_ah\b.{0,240} failed|ibgda_\w{1,30} failed on "
        ),
        "the RDMA connection to another rank could not be set up",
        _CHECK_ROUTE,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"/transport/\S{0,120}: (?:non-zero status|NULL value|init failed|[Uu]nable to \w).{0,160}"
            r"|non-zero status: \d{1,6} .{0,20}\bnvshmem\b.{0,60}\bfailed|\bnvshmem (?:setup|detect) \w{1,20} failed"
            r"|NVSHMEM (?:API called before|(?:initialization|bootstrap) failed|error\b)"
        ),
        "NVSHMEM could not connect the ranks",
        "look at NVSHMEM's first message; RDMA devices, their permissions (IBGDA) and NVSHMEM_IB_GID_INDEX",
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        # What libfabric warns of when it begins, in its part core, is of providers that it then does without.
        LazyPattern(
            r"libfabric:\S{1,80}:(?:ep_ctrl|ep_data|cq|eq|av|mr):\S{1,80}<warn> ?(?!.{0,200}[Mm]emory)"
            r"(.{0,80}(?:[Ff]ailed|[Uu]nable to|[Cc]annot|[Ee]rror).{0,120})"
            r"|\b(rdma_(?:resolve_addr|resolve_route|connect|bind_addr|accept)\b.{0,20}[Ff]ailed.{0,100})"
        ),
        lambda _, match: f"the network library failed: {match[1] or match[2]}",
        _CHECK_ROUTE,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(r"communicator encountered a fatal error \(detected in ncclIb"),
        "RDMA failed: an adapter of this host reported a fatal error",
        _CHECK_LINK,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            rf"(?:(?<!failed to )[Cc]onnect to|Call to (?:connect|recv|send)) .{{0,160}}{_UNREACHABLE}"
            r"|WARN (?:Net ?: )?Connect to .{1,80} failed ?: Connection refused"
        ),
        "another rank's host cannot be reached",
        _CHECK_ROUTE,
        in_last_lines=True,
    ),
    TextRule(
        "fabric_error",
        LazyPattern(
            r"failed to TCP connect to a peer MPI process|[Uu]nable to connect to (?:the peer|rank \d)"
            r"|process or daemon was unable to complete a TCP connection|MPI processes are unable to reach each other"
            r"|ORTE_ERROR_LOG: Unreachable\b|Returned \"Unreachable\" \(-\d|\bOFI poll failed\b|_handle_cq_error\b"
        ),
        "MPI cannot reach another rank",
        _CHECK_ROUTE,
        in_last_lines=True,
    ),
)
# What goes on over another transport.
_NOT_NEEDED = r"(?!.{0,120}(?:[Uu]sing |[Ff]all|[Ii]nstead|TCP|[Ss]kip|[Dd]isabl|[Ww]ithout GPU|[Nn]ot needed))"
_SYSTEM = (
    TextRule(
        "nccl_system_error",
        LazyPattern(
            r"(?:ibv_(?:create|reg|alloc)\w{1,40}(?:\(.{0,240}\))? failed|NET/OFI Unable to register memory"
            r"|libfabric:\S{1,160}<warn> |^Unable to (?:write to EQ|register)).{0,160}"
            r"(?:Cannot allocate memory|RC: 12\b|errno 12\b)"
        ),
        "RDMA cannot lock the memory that it needs",
        "raise the limit of locked memory to unlimited for the ranks (`ulimit -l`; docker: --ulimit memlock=-1; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK of slurmd)",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(
            r"\b(ibv_(?!poll|modify)\w{1,40})(?:\(.{0,240}\))? failed.{0,160}"
            r"|NET/OFI (?:OFI )?(fi_\w{1,40})\(?\)? call failed.{0,160}"
        ),
        lambda _, match: f"an RDMA call failed: {match[1] or match[2]}",
        "look at the RDMA devices that this process sees: ibv_devinfo, fi_info, /dev/infiniband in the container, "
        "nvidia_peermem or DMA-BUF for GPUDirect",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(
            r"\b(?:[Ff]ailed|[Uu]nable|[Cc]annot|[Cc]ould not)(?: to)? (?:create|allocate|register|open|query|get)\b"
            r".{0,60}?\b(QP|queue pair|CQ|completion queue|MR|memory region|PD|protection domain|RDMA device|HCA"
            r"|RNIC|IB device|device (?:mlx\d|bnxt_re|efa|irdma|erdma|hns|rxe|siw|rocep)\w{0,20})\b"
            rf"|\b[Nn]o (?:\w{{1,12}} )?(RNIC|HCA|RDMA (?:device|NIC|adapter)|IB device)s?\b{_NOT_NEEDED}"
            r"|\b(DMA[ -]?BUF|nvidia[_-]peermem)\b.{0,40}\b(?:required|needed|missing|not (?:loaded|found))\b"
            rf"{_NOT_NEEDED}"
            r"|\bUCX {1,3}(?:ERROR|FATAL) {1,3}(?!.{0,160}(?:[Ii][Pp][Cc]|cuda\w{0,20}\())(.{1,160})"
        ),
        lambda _, match: f"RDMA cannot be used as it must: {next(filter(None, match.groups()))}",
        "look at the RDMA devices that this process sees: ibv_devinfo, /dev/infiniband in the container, `ulimit -l`, "
        "nvidia_peermem or DMA-BUF for GPUDirect",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(r"\b[Ff]ailed to get (IB devices) list\b|\bcan't open (UMAD port)\b"),
        lambda _, match: f"RDMA cannot be used as it must: {match[1] or match[2]}",
        "look at the RDMA devices that this process sees: ibv_devinfo, /dev/infiniband in the container",
        must_be_last=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(r"NET/OFI (?:Couldn't|Unable to|Failed to|Creating) .{1,200}"),
        "NCCL's plugin for EFA failed",
        "look at the versions of aws-ofi-nccl, libfabric and the EFA driver, and whether /dev/infiniband is there",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(
            r"\bCall to shm_open failed ?: Permission denied"
            r"|\bcreating shared memory segment .{0,160}[Pp]ermission denied"
        ),
        "NCCL may not use its file in /dev/shm: permission denied",
        "another user has left a file of that name, or only others may write there: `ls -ld /dev/shm /dev/shm/nccl*` "
        "shows the owners; /dev/shm must have mode 1777, and what ended jobs have left can be removed",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(r"Error while attaching to shared memory segment.{0,160}No such file"),
        "ranks of one host do not see each other's shared memory",
        "give all containers of a host one IPC namespace (--ipc=host), or each its own NCCL_HOSTID",
        in_last_lines=True,
    ),
    TextRule(
        "nccl_system_error",
        LazyPattern(
            r"WARN (?:Call to (?!recv|send|connect)(\w{1,40}) .{0,120}failed|Socket creation failed).{0,160}"
            r"|WARN \w{0,40}:? ?Connect to .{0,120}failed : (?:Software caused|Cannot assign).{0,80}"
            r"|WARN \w{0,40}:? ?(?:Accept|Bind|Listen)\w{0,20} .{0,60}?failed ?:.{0,160}"
            r"|neither AF_INET"
        ),
        "NCCL: a system call failed",
        "look at the message: permissions, address families, limits of this host or container",
        in_last_lines=True,
    ),
)
# Open MPI's and MPICH's own words for calls that failed, and PSM's: behind what says that a peer cannot be reached.
_MPI = (
    TextRule(
        "mpi_error",
        LazyPattern(r"[Nn]ot enough slots (?:are )?available|\boversubscribe option to ignore the"),
        "mpirun cannot start so many processes: there are not enough slots",
        "give the hosts as many slots as ranks (hostfile: slots=N), or start one launcher per host",
        in_last_lines=True,
    ),
    TextRule(
        "mpi_error",
        LazyPattern(
            r"\*\*\* An error occurred in (MPI_\w{1,40})|Fatal error in (?:internal_|P(?=MPI_))?(MPI_\w{1,40}"
            r"|\w{1,40}(?=: .{1,60} error stack:))"
            r"|Local abort before (MPI_INIT) completed"
            r"|\b(ORTE|PRTE|PRRTE) daemon has unexpectedly failed\b"
            r"|\bNo components were able to be opened in the (\w{1,20}) framework"
            r"|\b([A-Z]ML \w{1,12}) cannot be selected"
            r"|It looks like ((?:\w{1,20} ){0,2}\w{1,20}) failed for some reason"
            r"|\b(lsb_launch|ORTE|PRTE|PRRTE|[Mm]pi(?:run|exec))\b.{0,40}"
            r"(?:unable to (?:reliably )?|failed to )start (?:one or more |the |a )?(?:remote )?daemons?\b"
            r"|\b(PM[Ii](?:2|x|X)?_\w{1,30}) failed|\b(?:OPAL|ORTE|PRTE) ERROR: [A-Z][\w ]{2,40} in file (\S{1,80})"
            # MPICH's error stack: function(line)....: what.
            r"|\b([A-Za-z_]\w{1,60})\(\d{1,6}\)\.{2,60}: .{0,160}\bfailed\b"
            r"|\b(MPID\w{1,60})\(\d{1,6}\): .{0,160}\bfailed\b"
            r"|Assertion failed in file src/(mpi\w{0,12})/"
        ),
        lambda _, match: f"MPI failed in {next(filter(None, match.groups()))}",
        "look at MPI's first message; where MPI is not started by its own launcher, it needs the PMI or PMIx of the "
        "scheduler (srun --mpi=pmix)",
        in_last_lines=True,
    ),
    TextRule(
        "mpi_error",
        # What a program may get over: shared memory or a component that is replaced.
        LazyPattern(
            r"\b(?:ORTE|PRTE|PMIX|OPAL)_ERROR_LOG: (?!Success)([A-Z][\w -]{2,60} in file)\b"
            r"|\bPMIX ERROR: (?!ERROR in file|SUCCESS)([A-Z][\w -]{2,60}) in file\b"
            # Hydra, the launcher of MPICH and Intel MPI; HPE's MPT; Open MPI's use of UCX.
            r"|^\[(?:mpiexec|proxy:\S{1,12})@\S{1,80}\] (\w{1,60} \(.{1,160}\): unable to .{1,120})"
            r"|^slurmstepd\S{0,80}: error: {1,3}(mpi/pm\w{1,8}: .{1,160})|^\[cli_\d{1,8}\]: (.{0,60}\berror\b.{0,60})"
            r"|\bMPT ERROR: (.{1,120})|\bpml_ucx\.c:\d{1,5} {1,4}Error: (.{1,120})"
        ),
        lambda _, match: f"MPI failed in {next(filter(None, match.groups()))}",
        "look at MPI's first message; where MPI is not started by its own launcher, it needs the PMI or PMIx of the "
        "scheduler (srun --mpi=pmix)",
        must_be_last=True,
    ),
    TextRule(
        "mpi_error",
        LazyPattern(r"\bMPI [Ee]rror\b(?!s?:? ?0)"),
        "MPI failed",
        "look at MPI's first message, and whether the other ranks were there",
        in_last_lines=True,
    ),
    TextRule(
        "mpi_error",
        LazyPattern(r"PSM[23]? (?:error handler: |can't open|could not|was unable to|failed to) (.{1,120})"),
        "Omni-Path (PSM) could not start: {0}",
        "look at the adapter (opainfo, hfi1_status), at its number of contexts, and at /dev/shm",
        in_last_lines=True,
    ),
)
_DASHES = LazyPattern(r"\s{0,8}-{60,400}\s{0,8}$")
_MPI_TERMS = LazyPattern(r"\b(?:Open ?MPI|OMPI|MPI|PRRTE|PRTE|ORTE|PMIx|mpirun|mpiexec|orted|prted|lsb_launch)\b")
_GOES_ON = LazyPattern(r"WARNING|\b(?:instead|lower|performance|will be (?:used|disabled|ignored)|degraded)\b")
_LINES_AFTER_HELP = 4
_DEEP_EP = LazyPattern(r"DeepEP (?:(\w{1,20}) .{0,60}timeout|(?:error: .{0,20})?timeout)")
_GPU_STOPPED = LazyPattern(r"CUDA error|unspecified launch failure|illegal instruction|DeepEP")


def fabric_error(failure: Failure) -> Cause | None:
    """The network between ranks did not carry a request: the peer is gone, or what lies between is broken."""
    found = first_line(_COMPLETION, (*failure.messages, *failure.closing_lines))
    if found is None:
        return by_text(failure, _FABRIC)
    line, match = found
    hca = _HCA.search(line)
    status = int(match[2])
    what = _STATUS.get(status, f"status {status} of ibv_poll_cq")
    where = f"{f' with {match[1]}' if match[1] else ''}{f' through {hca[1]}' if hca is not None else ''}"
    message = f"RDMA failed{where}: {what}"
    if status == _FLUSHED:
        return cause(failure, "peer_lost", f"lost its RDMA connection{where}", _CHECK_LINK, proof=line)
    return cause(failure, "fabric_error", message, _CHECK_LINK, proof=line)


def rdma_system_error(failure: Failure) -> Cause | None:
    """This host does not let a communication library do what it must: locked memory, devices, shared memory."""
    return by_text(failure, _SYSTEM)


def mpi_error(failure: Failure) -> Cause | None:
    """MPI failed, and does not say that a peer cannot be reached."""
    return by_text(failure, _MPI) or _mpi_help(failure)


def _mpi_help(failure: Failure) -> Cause | None:
    """What Open MPI and PRRTE explain between two dashed lines, where that is the last that was printed."""
    if not failure.died_silently or failure.signum not in {0, signal.SIGABRT}:
        return None
    lines = failure.last_lines
    text = [line for line in lines if line.strip()]
    dashed = [index for index, line in enumerate(text) if _DASHES.match(line)]
    if not dashed:
        return None
    # The lower dashed line may be missing where the launcher was stopped while it printed.
    closed = len(dashed) > 1 and len(text) - dashed[-1] <= _LINES_AFTER_HELP
    start, end = (dashed[-2], dashed[-1]) if closed else (dashed[-1], len(text))
    block = text[start + 1 : end]
    if not block or not any(map(_MPI_TERMS.search, block)) or any(map(_GOES_ON.search, block)):
        return None
    message = f"MPI did not start or go on: {' '.join(line.strip() for line in block[:2])}"
    advice = (
        "look at what MPI explains in the rank's last lines, and whether every host has the same MPI and can be reached"
    )
    return cause(failure, "mpi_error", message, advice, proof=block[0])


def expert_timeout(failure: Failure) -> Cause | None:
    """DeepEP waited for other ranks; its kernels print that and then stop the GPU, whose error follows."""
    is_gpus = failure.died_silently or first_line(_GPU_STOPPED, failure.messages) is not None
    lines = (*failure.messages, *failure.closing_lines, *(failure.lines if is_gpus else ()))
    found = first_line(_DEEP_EP, lines)
    if found is None:
        return None
    message = f"DeepEP timeout: another rank did not come to {found[1][1] or 'the exchange of tokens'}"
    advice = "look at what the other ranks did; one that has no tokens must take part too"
    return cause(failure, "collective_timeout", message, advice, proof=found[0])
