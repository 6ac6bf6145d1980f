"""``python -m saferun``: the same as the ``saferun`` command."""

from saferun.cli import main

if __name__ == "__main__":
    main()
