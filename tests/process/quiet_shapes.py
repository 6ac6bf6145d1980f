"""What ranks do that work without showing it, and what ranks do that hang: programs without torch."""

from __future__ import annotations

# ---------------------------------------------------------------------------------------------------- ranks at work

DOWNLOADS = """
drain(call("drip {} {}"))
"""
DOWNLOADS_BY_UNIX_SOCKET = """
connection = call("drip {} {}", unix=True)
connection.settimeout(60)
drain(connection)
"""
PLAIN_WORK = {
    "downloads 1 kB/s": DOWNLOADS.format(100, 0.1),
    "downloads 1 MB/s": DOWNLOADS.format(100_000, 0.1),
    "downloads 1 kB/s through a Unix socket": DOWNLOADS_BY_UNIX_SOCKET.format(100, 0.1),
    "downloads 1 MB/s through a Unix socket": DOWNLOADS_BY_UNIX_SOCKET.format(100_000, 0.1),
    "uploads": """
connection = call("sink 40000 0.1", SO_SNDBUF=4096)
while True: connection.send(bytes(4000))
""",
    "downloads in a thread": """
def download():
    drain(call("drip 100 0.1"))
in_thread(download).join()
""",
    "compresses now and then in a pool": """
import concurrent.futures, zlib
data = os.urandom(300_000)
def compress():
    while True:
        zlib.compress(data)
        time.sleep(0.5)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    pool.submit(compress).result()
""",
    "writes a file slowly in a thread": """
def write():
    with open(os.environ["SERVER_PATH"] + ".checkpoint", "wb", 0) as file:
        while True:
            file.write(bytes(200))
            time.sleep(0.1)
in_thread(write).join()
""",
}

# -------------------------------------------------------------------------------------------------- ranks that hang

PLAIN_HANGS = {
    "keep-alives": """
def listen():
    drain(call("drip 20 0.5"))
in_thread(listen)
time.sleep(1000)
""",
    "a heartbeat to a server": """
def beat():
    ask(call("answer 100"), 150, 0.7)
in_thread(beat)
time.sleep(1000)
""",
    "asks for work every two seconds": """
ask(call("answer 400"), 200, 2)
""",
    "asks for work through a Unix socket every two seconds": """
ask(call("answer 400", unix=True), 200, 2)
""",
    "is sent what it does not read": """
connection = call("drip 100 0.1")
time.sleep(1000)
""",
    "is asked for metrics": """
listener = socket.create_server(("127.0.0.1", 0))
def fetch():
    connection = socket.create_connection(listener.getsockname())
    drain(connection)
if os.fork() == 0:
    # Not of the rank's family any more.
    if os.fork() == 0: fetch()
    os._exit(0)
os.wait()
def serve():
    connection, _ = listener.accept()
    while True:
        connection.sendall(bytes(20_000))
        time.sleep(1)
in_thread(serve)
time.sleep(1000)
""",
    "a service of its own that it keeps awake": """
ours, theirs = socket.socketpair()
if os.fork() == 0:
    drain(theirs)
def beat():
    while True:
        ours.send(bytes(20))
        time.sleep(0.2)
in_thread(beat)
time.sleep(1000)
""",
    "a thread that polls": """
def poll():
    while True: time.sleep(0.005)
in_thread(poll)
time.sleep(1000)
""",
}

PRELUDE = """
import asyncio, concurrent.futures, hashlib, select, subprocess, zlib
def python(program, *arguments):
    return [sys.executable, "-S", "-c", program, *map(str, arguments)]
def scratch(name):
    return os.environ["SERVER_PATH"] + "." + name + str(os.getpid())
"""
SHAPES = {
    # Downloads
    "download in an event loop": """
async def download():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["SERVER_PORT"]))
    writer.write(b"drip 100 0.1\\n")
    while True: await reader.read(1 << 16)
asyncio.run(download())
""",
    "download through a Unix socket in an event loop": """
async def download():
    reader, writer = await asyncio.open_unix_connection(os.environ["SERVER_PATH"])
    writer.write(b"drip 100 0.1\\n")
    while True: await reader.read(1 << 16)
asyncio.run(download())
""",
    "download with a timeout by select": """
connection = call("drip 100 0.1")
while True:
    select.select([connection], [], [], 30)
    connection.recv(1 << 16)
""",
    "download through a Unix socket by select": """
connection = call("drip 100 0.1", unix=True)
while True:
    select.select([connection], [], [], 30)
    connection.recv(1 << 16)
""",
    "download through IPv6": """
drain(call("drip 100 0.1", address="::1" if os.path.exists("/proc/net/if_inet6") else "127.0.0.1"))
""",
    "download of eight files at a time": """
def download():
    drain(call("drip 20 0.2"))
for thread in [in_thread(download) for _ in range(8)]: thread.join()
""",
    "download of datagrams": """
connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connection.connect(("127.0.0.1", int(os.environ["SERVER_PORT"])))
connection.send(b"drip")
drain(connection)
""",
    "download by a child": """
import subprocess
subprocess.run(python('''
import os, socket
connection = socket.create_connection(("127.0.0.1", int(os.environ["SERVER_PORT"])))
connection.sendall(b"drip 100 0.1\\\\n")
while True: connection.recv(1 << 16)
'''))
""",
    "download through a Unix socket in a thread": """
def download():
    drain(call("drip 100 0.1", unix=True))
in_thread(download).join()
""",
    # Uploads
    "upload in a thread": """
def upload():
    connection = call("sink 40000 0.1", SO_SNDBUF=4096)
    while True: connection.send(bytes(4000))
in_thread(upload).join()
""",
    "slow upload": """
connection = call("sink 4000 0.01")
while True:
    connection.sendall(bytes(200))
    time.sleep(0.1)
""",
    # Databases and services
    "query that reports its progress": """
connection = call("drip 60 0.1")
connection.settimeout(30)
drain(connection)
""",
    "rows of a database": """
ask(call("answer 4000"), 50, 0.1)
""",
    "service that is asked all the time": """
ask(call("answer 300"), 60, 0.1)
""",
    "compile server": """
connection = call("compute 60", unix=True)
connection.recv(1)
""",
    "compile server over TCP": """
connection = call("compute 60")
connection.recv(1)
""",
    # Threads
    "threads that compress": """
data = os.urandom(200_000)
def compress():
    while True:
        zlib.compress(data)
        time.sleep(0.4)
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(compress) for _ in range(4)]: future.result()
""",
    "a native thread that computes": """
def compute():
    while True: hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 50_000)
in_thread(compute).join()
""",
    "a long native call": """
hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 1 << 30)
""",
    "a thread that parses": """
def parse():
    while True:
        burn(0.006)
        time.sleep(0.7)
in_thread(parse).join()
""",
    "a thread that reads a slow pipe": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True:
        os.write(write_end, bytes(50))
        time.sleep(0.1)
def read():
    while True: os.read(read_end, 1000)
in_thread(read).join()
""",
    # Loaders
    "slow loader in a process": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True:
        time.sleep(0.8)
        burn(0.004)
        os.write(write_end, bytes(20))
while True:
    os.read(read_end, 20)
    burn(0.002)
""",
    "loader that downloads": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    connection = call("drip 100 0.1")
    got = 0
    while True: got += len(connection.recv(1 << 16))
os.read(read_end, 20)
""",
    "loader that downloads through a Unix socket": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    drain(call("drip 100 0.1", unix=True))
os.read(read_end, 20)
""",
    # Subprocesses
    "evaluation in a subprocess": """
subprocess.run(python("while True: sum(range(100_000))"))
""",
    "light evaluation in a subprocess": """
subprocess.run(python("import time\\nwhile True: sum(range(300_000)); time.sleep(0.3)"))
""",
    "subprocess that writes slowly": """
program = "import sys, time\\nf = open(sys.argv[1], 'wb', 0)\\nwhile True: f.write(bytes(100)); time.sleep(0.1)"
subprocess.run(python(program, scratch("out")))
""",
    "tests in many short processes": """
while True: subprocess.run(python("sum(range(1_000_000))"))
""",
    # Checkpoints
    "checkpoint to a slow disk": """
with open(scratch("checkpoint"), "wb", 0) as file:
    while True:
        file.write(bytes(2000))
        os.fsync(file.fileno())
        time.sleep(0.2)
""",
    "checkpoint to a slow disk in a thread": """
def write():
    with open(scratch("checkpoint"), "wb", 0) as file:
        while True:
            file.write(bytes(300))
            time.sleep(0.1)
in_thread(write).join()
""",
    "disk that makes the rank wait uninterruptibly": """
fifo = scratch("fifo")
os.mkfifo(fifo)
if os.fork() == 0:
    while True:
        time.sleep(0.15)
        os.close(os.open(fifo, os.O_WRONLY))
while True:
    # Its parent sleeps uninterruptibly until the new process, which waits for a writer, has become the program.
    pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    os.waitpid(pid, 0)
""",
    "disk that makes a thread wait uninterruptibly": """
fifo = scratch("fifo")
os.mkfifo(fifo)
if os.fork() == 0:
    while True:
        time.sleep(0.15)
        os.close(os.open(fifo, os.O_WRONLY))
def write():
    while True:
        pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
        os.waitpid(pid, 0)
in_thread(write).join()
""",
    # Others
    "long steps": """
while True:
    time.sleep(3)
    burn(0.02)
""",
}

HANGS = {
    "waits with a timeout for a silent Unix socket": """
connection = call("drip 1 1000", unix=True)
connection.recv(1)
connection.settimeout(1)
while True:
    try: connection.recv(1 << 16)
    except TimeoutError: pass
""",
    "waits with short timeouts for a silent Unix socket": """
connection = call("drip 1 1000", unix=True)
connection.recv(1)
while True: select.select([connection], [], [], 0.05)
""",
    "waits for a silent server": """
connection = call("drip 1 1000")
connection.recv(1)
connection.recv(1)
""",
    "an event loop with timers": """
async def tick():
    while True: await asyncio.sleep(0.05)
asyncio.run(tick())
""",
    "an event loop that beats": """
async def beat():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["SERVER_PORT"]))
    writer.write(b"answer 60\\n")
    while True:
        await asyncio.sleep(1)
        writer.write(bytes(60))
        await reader.read(1 << 16)
asyncio.run(beat())
""",
    "an event loop that threads wake up": """
def wake(loop):
    while True:
        loop.call_soon_threadsafe(lambda: None)
        time.sleep(0.1)
async def wait():
    in_thread(wake, asyncio.get_running_loop())
    await asyncio.Event().wait()
asyncio.run(wait())
""",
    "ships its log": """
def ship():
    connection = call("sink 10000 0.1")
    while True:
        connection.sendall(bytes(200))
        time.sleep(1)
in_thread(ship)
time.sleep(1000)
""",
    "pushes metrics": """
def push():
    connection = call("sink 10000 0.1")
    while True:
        connection.sendall(bytes(4000))
        time.sleep(5)
in_thread(push)
time.sleep(1000)
""",
    "beats by new connections": """
def beat():
    while True:
        connection = call("answer 2000")
        connection.sendall(bytes(300))
        connection.recv(1 << 16)
        connection.close()
        time.sleep(2)
in_thread(beat)
time.sleep(1000)
""",
    "asks for datagrams": """
connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connection.settimeout(2)
while True:
    connection.sendto(b"x", ("127.0.0.1", 9))
    try: connection.recv(1 << 16)
    except OSError: time.sleep(2)
""",
    "a pool that has nothing to do": """
pool = concurrent.futures.ThreadPoolExecutor(8)
for future in [pool.submit(time.sleep, 0.1) for _ in range(8)]: future.result()
time.sleep(1000)
""",
    "a forked worker that waits for its queue": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True: select.select([read_end], [], [], 5)
time.sleep(1000)
""",
}

SHAPES = {name: PRELUDE + program for name, program in SHAPES.items()}
HANGS = {name: PRELUDE + program for name, program in HANGS.items()}
