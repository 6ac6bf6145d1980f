"""Checks before a launch: one file each, each with a deadline, each failing as a value."""
