"""What is looked at before a launch: checks of this host, connections between hosts, and the judgement on all.

Only what cannot work refuses a launch. A check that raises or is late is skipped with its reason; the judge and its
rules are pure.
"""
