"""What NCCL's RAS subsystem answers, as text or as JSON, and which ranks differ from the others in it. Pure.

Whatever answers is untrusted: everything is bounded and checked.

Sources: NCCL, ``src/ras/client_support.cc`` (2.24 to 2.31), and the user guide's page on RAS. Counts are of launched
calls: while a call hangs that all ranks have launched, they are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from saferun.errors import printable
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess
from saferun.model import Value
from saferun.text.decoding import loads

LONGEST_BYTES = 8 << 20
_MOST_COMMUNICATORS = 4096
_MOST_RANKS = 1 << 17
_MOST_LINES = 1 << 18
_MOST_OUTLIERS = 16
_MOST_PROCESSES = 8
_LONGEST_NAME = 64
_HIGHEST = 1 << 62
# All ranks of a communicator call these; sends and receives are each rank's own.
_COMPARED = frozenset({"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "collective"})
_NO_ERROR = frozenset({0, 7})
"""``ncclSuccess`` and ``ncclInProgress``."""
_LOST = frozenset({"unanswering", "dead"})

# NCCL 2.28.9 leaves out commas. In JSON nothing else can be missing between these.
_NO_COMMA = re.compile(r'([}\]"0-9el])([^\S\n]*+\n\s*+)(?=["{\[])')
_GROUP = re.compile(r"\s*(\d{1,9})\s+\d{1,9}\s+\d{1,9}\s+[\d-]{1,20}\s+(\d{1,9})\s+\d{1,9}\s+[A-Z]+\s+[A-Z,]+\s*\Z")
_COMMUNICATOR = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)\s*\Z")
_RANK = re.compile(
    r"  Rank (\d{1,9})(?: (?:has |reported )?(.{1,80}?))? -- GPU (\d{1,4})(?: \(NVML \d{1,4}\))? managed by "
    r"process (\d{1,9}) on node ([0-9A-Fa-f.:%]{2,64})\s*\Z"
)
_PROCESS = re.compile(r"  Process (\d{1,9}) on node ([0-9A-Fa-f.:%]{2,64}) managing GPUs? .{0,400}\Z")
_COUNTS_OF = re.compile(r"  Communicator ranks have different (\w{1,32}) operation counts\s*\Z")
_SEVERAL_COUNT = re.compile(
    r"  \d{1,9} ranks have (?:launched up to operation (\d{1,18})|not launched any operations)\s*\Z"
)
_SEVERAL_STATUS = re.compile(r"  \d{1,9} ranks have status ([A-Z]{1,16})\s*\Z")
_ONE_COUNT = re.compile(r"launched up to operation (\d{1,18})\Z")


class RasRank(Value):
    """A member of a communicator.

    Attributes:
        process: who it is.
        gpu: the number of its GPU in its process.
        status: ``INIT``, ``RUNNING``, ``FINALIZE``, ``ABORT``; of one without data ``NOCOMM`` (it is no member any
            more), ``unanswering``, ``dead``; empty: unknown.
        counts: how many calls of each kind it has launched, as far as known; of calls that all members make.
        error: in words; empty: none.
        launched: how many calls of any kind; -1: unknown.
    """

    process: NcclProcess
    gpu: int
    status: str
    counts: Mapping[str, int]
    error: str = ""
    launched: int = -1


class RasCommunicator(Value):
    """A communicator. ``size`` is 0 where unknown.

    ``ranks`` are its members; in a text only those that differ from most. ``counts`` has all numbers of each call.
    """

    name: str
    size: int
    ranks: tuple[RasRank, ...]
    counts: Mapping[str, set[int]]


class RasAnswer(Value):
    """An answer. ``timestamp`` is empty in a text. ``lost`` are processes without data, of no known communicator."""

    timestamp: str
    communicators: tuple[RasCommunicator, ...]
    lost: tuple[RasRank, ...] = ()

    @property
    def processes(self) -> set[tuple[str, int]]:
        """Host and pid of all that are named."""
        ranks = (*self.lost, *(rank for one in self.communicators for rank in one.ranks))
        return {(rank.process.host, rank.process.pid) for rank in ranks}


def read_ras(content: bytes) -> RasAnswer:
    """Decode an answer.

    Raises:
        ValueError: it is none.
    """
    if len(content) > LONGEST_BYTES:
        raise ValueError(f"it is longer than {LONGEST_BYTES >> 20} MiB")
    text = content.decode(errors="replace")
    start = text.find("{")
    if start >= 0 and not text[:start].strip():
        return _from_json(text)
    if "NCCL version" not in text[:4096]:
        raise ValueError("it is not NCCL's RAS that answers")
    return _from_text(text)


# ----------------------------------------------------------------------------------------------------------------- JSON


def _from_json(text: str) -> RasAnswer:
    try:
        content = loads(text, longest=LONGEST_BYTES)
    except ValueError:
        content = loads(_NO_COMMA.sub(r"\1,\2", text), longest=2 * LONGEST_BYTES)
    if not isinstance(content, dict) or not isinstance(content.get("communicators"), list):
        raise ValueError("it has no list of communicators")  # noqa: TRY004 - what was read is wrong, not the caller
    communicators = []
    left = _MOST_RANKS
    for raw in content["communicators"][:_MOST_COMMUNICATORS]:
        if not isinstance(raw, dict):
            continue
        ranks = [_member(one) for one in _objects(raw.get("ranks"), left)]
        ranks += [_missing(one) for one in _objects(raw.get("missing_ranks"), left)]
        left = max(0, left - len(ranks))
        counts: dict[str, set[int]] = {}
        for rank in ranks:
            for call, count in rank.counts.items():
                counts.setdefault(call, set()).add(count)
        communicators.append(RasCommunicator(_name(raw.get("hash")), _number(raw.get("size"), 0), tuple(ranks), counts))
    return RasAnswer(_name(content.get("timestamp")), tuple(communicators))


def _objects(value: object, most: int) -> list[dict[str, Any]]:
    return [one for one in value[:most] if isinstance(one, dict)] if isinstance(value, list) else []


def _member(raw: Mapping[str, Any]) -> RasRank:
    state = raw.get("status")
    state = state if isinstance(state, dict) else {}
    init = _number(state.get("init_state"), -1)
    if state.get("abort_flag") is True:
        status = "ABORT"
    elif True in {state.get("finalize_called") is True, state.get("destroy_flag") is True}:
        status = "FINALIZE"
    else:
        status = "RUNNING" if init == 0 else "INIT" if init > 0 else ""
    errors = [_number(state.get(name), 0) for name in ("init_state", "async_error")]
    error = next((f"error {number}" for number in errors if number not in _NO_ERROR), "")
    counts = raw.get("collective_counts")
    known = counts if isinstance(counts, dict) else {}
    valid = {call: count for call, count in known.items() if _number(count, -1) >= 0}
    compared = {call: count for call, count in valid.items() if call in _COMPARED}
    launched = sum(valid.values()) if valid else -1
    return RasRank(_process(raw), _number(raw.get("cuda_dev"), -1), status, compared, error, launched)


def _missing(raw: Mapping[str, Any]) -> RasRank:
    state = raw.get("status")
    state = state if isinstance(state, dict) else {}
    status = "NOCOMM" if state.get("unresponsive") is False else ""
    if state.get("unresponsive") is True:
        status = "unanswering"
    if state.get("considered_dead") is True:
        status = "dead"
    return RasRank(_process(raw), _number(raw.get("cuda_dev"), -1), status, {})


def _process(raw: Mapping[str, Any]) -> NcclProcess:
    return NcclProcess(_number(raw.get("rank"), -1), _name(raw.get("host")), _number(raw.get("pid"), -1))


def _number(value: object, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value <= _HIGHEST else otherwise


def _name(value: object) -> str:
    return printable(value[:_LONGEST_NAME]).removeprefix("0x") if isinstance(value, str) else ""


# ----------------------------------------------------------------------------------------------------------------- text


class _Text:
    """A reader of lines."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.lost: list[RasRank] = []
        self.ranks: dict[str, list[RasRank]] = {}
        self.counts: dict[str, dict[str, set[int]]] = {}
        self.size_of: dict[str, int] = {}
        self._section = ""
        self._name = ""
        self._call = ""
        self._status = ""
        self._count = -1

    def take(self, line: str) -> None:
        """Read the next line."""
        if match := _GROUP.match(line):
            self.sizes[match[1]] = int(match[2])
        elif match := _COMMUNICATOR.match(line):
            self._section, self._name = match[3], match[2].lstrip("0") or "0"
            self._call, self._status, self._count = "", "unanswering" if match[3] == "INCOMPLETE" else "", -1
            self.size_of[self._name] = self.sizes.get(match[1], 0)
            self.ranks.setdefault(self._name, [])
            self.counts.setdefault(self._name, {})
        elif line.strip() in {"INCOMPLETE", "DEAD"}:
            self._section, self._name = line.strip(), ""
        elif match := _PROCESS.match(line):
            if not self._name and self._section in {"INCOMPLETE", "DEAD"}:
                status = "dead" if self._section == "DEAD" else "unanswering"
                self.lost.append(RasRank(NcclProcess(-1, match[2], int(match[1])), -1, status, {}))
        elif self._name:
            self._of_communicator(line)

    def _of_communicator(self, line: str) -> None:
        if match := _COUNTS_OF.match(line):
            self._call, self._status, self._count = match[1] if match[1] in _COMPARED else "", "", -1
        elif match := _SEVERAL_COUNT.match(line):
            self._launched(int(match[1] or 0))
        elif match := _SEVERAL_STATUS.match(line):
            self._status, self._call = match[1], ""
        elif match := _RANK.match(line):
            self._rank(match)

    def _launched(self, count: int) -> None:
        self._count = count
        if self._call:
            self.counts[self._name].setdefault(self._call, set()).add(count)

    def _rank(self, match: re.Match[str]) -> None:
        remark = match[2] or ""
        process = NcclProcess(int(match[1]), match[5], int(match[4]))
        status, error, counts = self._status, "", {}
        if self._section == "ERROR":
            error = printable(remark) or "an error"
        elif remark.startswith("status "):
            status = remark.removeprefix("status ")
        elif remark == "not launched any operations":
            self._launched(0)
        elif one := _ONE_COUNT.match(remark):
            self._launched(int(one[1]))
        if self._call and self._count >= 0 and self._section == "MISMATCH":
            counts = {self._call: self._count}
            status = ""
        self.ranks[self._name].append(RasRank(process, int(match[3]), status, counts, error))


def _from_text(text: str) -> RasAnswer:
    reader = _Text()
    for line in text.split("\n", _MOST_LINES)[:_MOST_LINES]:
        reader.take(line[:600])
    named = list(reader.ranks.items())[:_MOST_COMMUNICATORS]
    communicators = (
        RasCommunicator(name, reader.size_of[name], tuple(ranks[:_MOST_RANKS]), reader.counts[name])
        for name, ranks in named
    )
    return RasAnswer("", tuple(communicators), tuple(reader.lost[:_MOST_RANKS]))


# ------------------------------------------------------------------------------------------------------------- outliers


def outliers(answer: RasAnswer) -> tuple[NcclOutlier, ...]:
    """Which ranks differ from the others, the lost ones first."""
    found = [*_by_status("", 0, answer.lost)]
    for one in answer.communicators:
        found += _by_status(one.name, one.size, one.ranks)
        found += _by_counts(one)
    is_timed = bool(answer.timestamp)
    found = [one._replace(is_timed=is_timed) for one in found]
    order = ("dead", "unanswering", "failed", "finalizing", "aborted", "left", "behind", "ahead")
    return tuple(sorted(found, key=lambda one: (order.index(one.kind), -one.size))[:_MOST_OUTLIERS])


def lasting(first: Iterable[NcclOutlier], second: Iterable[NcclOutlier]) -> tuple[NcclOutlier, ...]:
    """Those of the second answer that were in the first one too: counts that still grow are no hang's."""

    def key(one: NcclOutlier) -> tuple[object, ...]:
        kind = "lost" if one.kind in _LOST else one.kind
        return one.communicator, kind, one.processes, one.message

    known = {key(one) for one in first}
    return tuple(one for one in second if key(one) in known)


def _by_status(name: str, size: int, ranks: Iterable[RasRank]) -> Iterable[NcclOutlier]:
    kinds = {
        "dead": "dead",
        "unanswering": "unanswering",
        "FINALIZE": "finalizing",
        "ABORT": "aborted",
        "NOCOMM": "left",
    }
    found: dict[str, list[NcclProcess]] = {}
    members = 0
    for rank in ranks:
        members += 1
        if rank.status in kinds:
            found.setdefault(kinds[rank.status], []).append(rank.process)
        if rank.error:
            found.setdefault("failed", []).append(rank.process)
    for kind, processes in found.items():
        # A communicator that all its members leave is at its end.
        if kind in _LOST or kind == "failed" or not name or len(processes) < max(members, size):
            yield _outlier(name, size, kind, processes)


def _by_counts(one: RasCommunicator) -> Iterable[NcclOutlier]:
    for call, counts in one.counts.items():
        most = max(counts)
        counted = [rank for rank in one.ranks if call in rank.counts]
        behind = [rank for rank in counted if rank.counts[call] < most]
        ahead = [rank for rank in counted if rank.counts[call] == most]
        members = one.size or len(counted)
        if behind and 2 * len(behind) < members:
            least = min(rank.counts[call] for rank in behind)
            message = f"{least} {call}, and others {most}"
            yield _outlier(one.name, one.size, "behind", [rank.process for rank in behind], message)
        elif ahead and len(counts) > 1:
            yield _outlier(
                one.name, one.size, "ahead", [rank.process for rank in ahead], f"{most} {call}, and others fewer"
            )


def _outlier(name: str, size: int, kind: str, processes: list[NcclProcess], message: str = "") -> NcclOutlier:
    distinct = sorted(set(processes))
    return NcclOutlier(name, size, kind, tuple(distinct[:_MOST_PROCESSES]), len(distinct), message)
