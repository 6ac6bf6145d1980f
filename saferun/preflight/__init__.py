"""The preflight checks: of this host, of the connections between hosts, and the judgement on all of them.

A new check is a file in ``checks/`` (copy ``clock.py``) and a line in ``CHECKS`` (``checks/all_checks.py``). It takes a
``CheckContext`` (``checks/context.py``), by whose ``path`` it reads files, and returns ``ok``, ``skipped``, ``warning``
or ``failure`` (``checks/answers.py``).

Only what cannot work refuses a launch. A check that raises or is late is skipped with its reason; the judge and its
rules are pure.
"""
