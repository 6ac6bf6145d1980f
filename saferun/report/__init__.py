"""Attempts and diagnoses as text."""
