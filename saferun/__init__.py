"""saferun: a launcher for distributed PyTorch jobs that says what went wrong, and where."""

__version__ = "0.1.0"
