"""What the hosts of a job know of one failure or hang: each packs its part, the leader merges the parts. Pure.

A part is bounded by its sender, because the leader of ten thousand hosts has to read all of them, and it is checked by
its reader, because it is made of what programs of the user's wrote. Equal stacks of a host's ranks are in it once.
"""

from __future__ import annotations

from saferun.cluster.evidence.hosts import HostPart, HostPeer
from saferun.cluster.evidence.merging import merge_parts
from saferun.cluster.evidence.packing import decode_part, encode_part
from saferun.cluster.job_values import LostHost

__all__ = ["HostPart", "HostPeer", "LostHost", "decode_part", "encode_part", "merge_parts"]
