"""A host whose name servers never answer: one host needs no name, and its ranks start at once."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.process.launching import running

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="other name servers take a mount namespace, and root"
)
# In namespaces of its own: nobody but the silent socket is asked, and nothing else knows this host's name.
WITHIN = (
    "hostname nobody-knows-this && mount --make-rprivate / && mount --bind {folder}/resolv.conf /etc/resolv.conf"
    ' && mount --bind {folder}/hosts /etc/hosts && exec "$@"'
)


@pytest.mark.parametrize("options", [(), ("--preflight", "off"), ("--master-port", "29519")])
def test_a_resolver_that_never_answers_keeps_one_host_from_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    """And nobody asks it: its socket has received nothing when all is over."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.53", 53))
        silent.setblocking(False)
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
        before = ("unshare", "--mount", "--uts", "sh", "-c", WITHIN.format(folder=tmp_path), "sh")
        with running(tmp_path / "run", "from rank import *\ntell('ran')", *options, nproc=2, before=before) as job:
            assert job.wait() == 0, job.err
            assert len(job.said("ran")) == 2
        with pytest.raises(BlockingIOError):
            silent.recv(512)
