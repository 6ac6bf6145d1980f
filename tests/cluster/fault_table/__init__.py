"""What saferun says of every fault that this cluster can have, when, and whether that is right.

``python -m tests.cluster faults`` plays the rows one after the other, each on a cluster of its own, prints a table, and
writes it into docs/faults.md with ``--write``. What has to be said of a fault (``Right``) follows from the fault, and
is written down before it is played.

``stage`` plays a row and judges it; ``rows_*`` are the faults; ``page`` is the table.
"""
