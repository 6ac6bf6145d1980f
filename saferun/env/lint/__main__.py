"""``python -m saferun.env.lint``: lint this process's environment, in parallel with a job and at the lowest priority.

Prints one JSON object: ``findings`` (objects with the fields of ``Finding``), ``libraries`` and ``modules`` (what was
searched) and ``unsearched``. Exits with 0 whatever it finds.
"""

from __future__ import annotations

import json
import os
import sys

from saferun.env.lint.check import check


def main(arguments: list[str]) -> int:
    """Lint, and print.

    Args:
        arguments: the interpreter of the ranks and their script; both are optional.
    """
    os.nice(19)  # the ranks are starting
    python = arguments[0] if arguments else sys.executable
    result = check(dict(os.environ), python=python, script=arguments[1] if len(arguments) > 1 else None)
    answer = {
        "findings": [finding._asdict() for finding in result.findings],
        "libraries": result.known.libraries,
        "modules": result.known.modules,
        "unsearched": result.known.unsearched,
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
