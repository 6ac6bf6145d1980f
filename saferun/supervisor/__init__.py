"""The state machine of one host's launch: events in, actions out. Pure.

Nothing here waits, starts, reads or writes; the loop in ``launch`` carries out what is decided here. Every phase but
RUNNING and WAITING has a deadline.
"""
