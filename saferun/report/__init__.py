"""Diagnoses as text and JSON: the console, report.txt, report.json, run.json.

What is said here comes from evidence only. Every text is bounded, and without secrets and control characters.
"""
