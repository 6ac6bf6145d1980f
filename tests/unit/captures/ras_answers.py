"""Answers of NCCL's RAS subsystem, hand-written after the format in its source and its user guide."""

from __future__ import annotations

import json
from typing import Any

HOST = "10.0.0.1"
TEXT = b"""NCCL version 2.27.3+cuda12.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         8         7   RUNNING  INCOMPLETE,MISMATCH
    1         4         1         2         2         8   RUNNING      OK

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 105 on node 10.0.0.1 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 106 on node 10.0.0.1 managing GPU 6 (NVML 2)

#0-0 (00a7c35b1e2d4f60) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 105 on node 10.0.0.1

#0-0 (00a7c35b1e2d4f60) ERROR
  Asynchronous error on 1 rank
  Rank 4 reported Remote process error -- GPU 4 managed by process 104 on node 10.0.0.1

Warnings
========

TIMEOUT
  Encountered 1 communication timeout while gathering communicator data

#0-0 (00a7c35b1e2d4f60) MISMATCH
  Communicator ranks have different status
  6 ranks have status RUNNING
  Rank 3 has status FINALIZE -- GPU 3 (NVML 7) managed by process 103 on node 10.0.0.1
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 42
  Rank 3 has launched up to operation 41 -- GPU 3 managed by process 103 on node 10.0.0.1

  Communicator ranks have different Broadcast operation counts
  6 ranks have launched up to operation 3
  Rank 2 has not launched any operations -- GPU 2 managed by process 102 on node 10.0.0.1

"""
OLD_TEXT = b"""NCCL version 2.24.3+cuda12.4 compiled with CUDA 12.4

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 101 on node 10.0.0.1
"""
HEALTHY_TEXT = (
    TEXT.partition(b"    0         1")[0]
    + b"    0         1         1         8         8         8   RUNNING      OK\n\n"
    + b"Errors\n======\n\nWarnings\n========\n\n"
)


def member(rank: int, pid: int = 0, *, state: dict[str, Any] | None = None, **counts: int) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    launched = {"Broadcast": 3, "AllReduce": 42, "Send": rank} | counts
    return {
        "rank": rank,
        "host": HOST,
        "pid": pid or 100 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": status | (state or {}),
        "collective_counts": launched,
    }


def missing(rank: int, *, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {"rank": rank, "host": HOST, "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank, "status": status}


def answer(
    ranks: list[dict[str, Any]],
    gone: list[dict[str, Any]] | None = None,
    *,
    timestamp: str = "2026-01-02 03:04:05",
    **more: Any,
) -> bytes:
    gone = gone or []
    communicator = {
        "hash": "0xa7c35b1e2d4f60",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(gone),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(gone),
        "ranks": ranks,
        "missing_ranks": gone,
    }
    content = {
        "nccl_version": "2.28.9+cuda13.0",
        "timestamp": timestamp,
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return json.dumps(content | more, indent=2).encode()
