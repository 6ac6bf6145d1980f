"""One launch on this host: the loop, and the parts that live beside it.

The loop carries out what the supervisor decides. Once the ranks run it waits for nothing but its poller, and opens no
regular file.
"""
