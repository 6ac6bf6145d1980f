"""Every rank prints numbered lines as fast as it can, to see what becomes of them. Needs no torch.

Run it:

    saferun --nproc_per_node 2 examples/print_a_lot.py --lines 100000 --length 120 --stream both

Expect all lines of every rank, whole and in order: each says its rank, its stream and its number, and has exactly
--length bytes before the newline. (The two streams of a rank have no order between them.)
"""

import argparse
import os

LINES_PER_WRITE = 1000
SHORTEST_LINE = 32
STREAMS = {"stdout": [1], "stderr": [2], "both": [1, 2]}
STREAM_NAMES = {1: "out", 2: "err"}


def write_all(descriptor: int, block: bytes) -> None:
    """Writes the whole block: a single write may take less."""
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def main() -> None:
    """Prints the lines, past Python's text streams: what is measured is what happens to them afterwards."""
    parser = argparse.ArgumentParser(description="Every rank prints many lines.")
    parser.add_argument("--lines", type=int, default=1000, help="lines a rank and stream")
    parser.add_argument("--length", type=int, default=80, help="bytes a line, without the newline")
    parser.add_argument("--stream", choices=STREAMS, default="stdout")
    args = parser.parse_args()
    if args.length < SHORTEST_LINE:
        parser.error(f"--length must be at least {SHORTEST_LINE}")

    rank = int(os.environ.get("RANK", "0"))
    descriptors = STREAMS[args.stream]
    heads = {descriptor: f"rank {rank} {STREAM_NAMES[descriptor]} line " for descriptor in descriptors}
    for first in range(0, args.lines, LINES_PER_WRITE):
        numbers = range(first, min(first + LINES_PER_WRITE, args.lines))
        for descriptor in descriptors:
            head = heads[descriptor]
            lines = (f"{head}{number:09d} ".ljust(args.length, "x") + "\n" for number in numbers)
            write_all(descriptor, "".join(lines).encode())


if __name__ == "__main__":
    main()
