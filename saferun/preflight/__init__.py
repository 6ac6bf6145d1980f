"""The preflight checks: of this host, of the connections between hosts, and the judgement on all of them.

A new check is a file in ``checks/`` and a line in the tuple in ``checks/all_checks.py``.

Only what cannot work refuses a launch. A check that raises or is late is skipped with its reason; the judge and its
rules are pure.
"""
