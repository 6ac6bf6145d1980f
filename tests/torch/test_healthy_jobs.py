"""Real gloo jobs that are slow or uneven and well: none of them may be called a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.torch.watching import report_of, watched

BEGIN = """
import os, subprocess, sys, tempfile, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
RANK = dist.get_rank()
def meet():
    dist.all_reduce(torch.ones(1))
meet()
"""
END = """
meet()
print("well", flush=True)
os._exit(0)
"""
# Each lasts more than two hang timeouts.
HANG_TIMEOUT_S = 3
JOBS = {
    "steps of two seconds": """
for _ in range(4):
    end = time.monotonic() + 0.02
    model = torch.randn(128, 128)
    while time.monotonic() < end:
        model = model @ model.softmax(0)
    time.sleep(2)
    meet()
""",
    "rank 0 evaluates while the others wait": """
if RANK == 0:
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)])
    end = time.monotonic() + 7
    with torch.no_grad():
        while time.monotonic() < end:
            scores = [layers(torch.randn(32, 64)).softmax(-1).sum().item() for _ in range(50)]
            best = max(scores)
""",
    "rank 0 writes a large checkpoint": """
if RANK == 0:
    weights = torch.randn(8 << 20)
    end = time.monotonic() + 7
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            torch.save(weights, folder + "/checkpoint.pt")
            fd = os.open(folder + "/checkpoint.pt", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
""",
    "all ranks burn processor time in Python": """
end = time.monotonic() + 7
while time.monotonic() < end:
    sum(range(1000))
""",
    "a slow loader": """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        time.sleep(2)
        return torch.randn(64)
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
    meet()
""",
    "a busy subprocess": """
if RANK == 0:
    subprocess.run([sys.executable, "-c", "import time; e = time.time() + 7\\nwhile time.time() < e: pass"], check=True)
""",
    "rank 0 downloads": """
if RANK == 0:
    import socket
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        if os.fork() == 0:
            # A server of nobody's: neither this rank nor a child of it.
            connection, _ = listener.accept()
            for _ in range(70):
                connection.sendall(bytes(100))
                time.sleep(0.1)
        os._exit(0)
    os.wait()
    address = listener.getsockname()
    listener.close()
    connection = socket.create_connection(address)
    while connection.recv(1 << 16): pass
""",
    "rank 0 compresses in threads and writes the result": """
if RANK == 0:
    import concurrent.futures, zlib
    weights = torch.randn(1 << 16).numpy().tobytes()
    end = time.monotonic() + 8
    def save(number):
        with open(f"/tmp/{os.getpid()}.{number}", "wb", 0) as file:
            os.unlink(file.name)
            while time.monotonic() < end:
                content = zlib.compress(weights)
                for start in range(0, 4000, 1000):
                    file.write(content[start : start + 1000])
                    time.sleep(0.2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
""",
    "a compiler": """
if RANK == 0:
    source = "\\n".join(
        f"template<int N> struct S{i} {{ static const int v = S{i}<N-1>::v + 1; }};"
        f"template<> struct S{i}<0> {{ static const int v = 0; }}; int v{i} = S{i}<800>::v;"
        for i in range(60)
    )
    with tempfile.TemporaryDirectory() as folder:
        open(folder + "/kernel.cpp", "w").write(source)
        end = time.monotonic() + 7
        while time.monotonic() < end:
            subprocess.run(["c++", "-c", "-O1", "-o", folder + "/kernel.o", folder + "/kernel.cpp"], check=True)
""",
}


# tests/process/test_watch_run.py has all of these as ranks without torch.
@pytest.mark.parametrize("hook", slow_but(["hooked", "unhooked"], "unhooked"))
@pytest.mark.parametrize("what", slow_but(JOBS, "rank 0 downloads"))
def test_it_is_no_hang(tmp_path: Path, what: str, hook: str) -> None:
    """A false alarm in the night costs more trust than ten pictures win. /proc has to be enough to know."""
    script = tmp_path / "train.py"
    script.write_text(BEGIN + JOBS[what] + END)
    options = ("--hang-timeout", str(HANG_TIMEOUT_S), *(("--no-inject",) if hook == "unhooked" else ()))
    with watched(tmp_path / "job", script, nproc=2, options=options) as job:
        assert job.wait(120) == 0, job.err
        assert job.out.count("well") == 2
        assert report_of(job) == {}, job.err
