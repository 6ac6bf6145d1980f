"""For Python programs: launch a script or a function, and read the report of a run; ``script`` is for what is launched.

The functions are ``saferun.run`` and ``saferun.read_report``; ``import saferun`` loads nothing of this room. A launch
is always a process of its own, never this one.
"""
