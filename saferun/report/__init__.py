"""Diagnoses as text and JSON: the console, report.txt, report.json, run.json.

Every statement comes from evidence. Every text is bounded, and without secrets and control characters.
"""
