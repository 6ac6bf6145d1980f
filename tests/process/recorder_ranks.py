"""Ranks that answer for torch's Flight Recorder as those of NCCL would: no GPU, no torch and no gloo is in them."""

# Its arguments: the slow rank, or -1; and what goes wrong with its answers: "nothing", "silent", "status", "garbage",
# "no recorder". Steps are a tenth of a second long and begin at the same moment on all ranks, as their clock says.
RECORDER_RANK = """
from rank import *
import json, socket, threading, time

WORLD = int(os.environ["WORLD_SIZE"])
SLOW, FAULT = int(sys.argv[1]), sys.argv[2]
STEP_NS, KEPT = 100_000_000, 100
asked = []

def entries():
    newest = time.time_ns() // STEP_NS
    for step in range(newest - KEPT, newest):
        duration_ms = 3.0 if RANK == SLOW else (26.0 if SLOW >= 0 else 5.0) + (step * 7 + RANK) % 5
        yield {
            "collective_seq_id": step, "p2p_seq_id": 0, "is_p2p": False, "pg_id": 0,
            "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce",
            "time_created_ns": step * STEP_NS, "duration_ms": duration_ms,
            "time_discovered_completed_ns": step * STEP_NS + 90_000_000, "retired": True, "state": "completed",
        }

def answer(request):
    if request == "/handler/":
        return json.dumps(["ping"] if FAULT == "no recorder" else ["ping", "dump_nccl_trace_json"])
    asked.append(request)
    os.write(1, b"asked\\n")
    members = {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(WORLD)))}}
    return json.dumps({"entries": list(entries()), "pg_config": members, "pg_status": {}})

def serve(listener):
    held = []
    while True:
        link = listener.accept()[0]
        request = link.recv(4096).split()[1].decode()
        text = answer(request)
        is_bad = RANK == 1 and "dump" in request
        if is_bad and FAULT == "silent":
            held.append(link)
            continue
        with link:
            text = "{" if is_bad and FAULT == "garbage" else text
            status = "500 No" if is_bad and FAULT == "status" else "200 OK"
            link.sendall(f"HTTP/1.1 {status}\\r\\nContent-Length: {len(text)}\\r\\n\\r\\n{text}".encode())

listener = socket.socket(socket.AF_UNIX)
path = f"{os.environ['SAFERUN_HEARTBEAT_FILE'].removesuffix('.heartbeat')}.{os.getpid()}.sock"
listener.bind(path)
listener.listen(8)
threading.Thread(target=serve, args=(listener,), daemon=True).start()
tell("ready")
while not os.path.exists(FOLDER + "/release.end"):
    time.sleep(0.05)
os.unlink(path)
os._exit(0)
"""
