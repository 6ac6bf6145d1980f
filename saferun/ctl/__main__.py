"""``python -m saferun.ctl``: the same as the ``saferunctl`` command."""

import sys

from saferun.ctl import main

if __name__ == "__main__":
    sys.exit(main())
