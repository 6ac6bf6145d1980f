"""The environment lint: which variables of a job some installed software reads, and which values are valid.

``families`` maps names to the libraries that read them, ``knowledge`` and ``settings`` hold facts about names and
values, ``scanner`` finds the names in installed libraries and modules, ``host_facts`` collects facts of the host, and
``rules`` (pure) derives the findings. ``check`` runs all of it, and ``python -m saferun.env.lint`` does so in a
separate process, in parallel with the job.
"""
