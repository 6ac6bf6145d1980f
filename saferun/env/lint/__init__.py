"""The environment lint: which variables of a job are read by something, and which values make sense.

``families`` says who would read a name, ``knowledge`` and ``settings`` hold what is known of names and values,
``scanner`` finds out what the installed libraries and modules mention, ``host_facts`` what the host has, and ``rules``
(pure) draws the conclusions. ``check`` ties them together, and ``python -m saferun.env.lint`` runs that in a process
of its own, beside the job.
"""
