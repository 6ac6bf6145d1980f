"""Connections between hosts before the ranks start: who listens, who probes, over which routes.

Every probe has a deadline, and none of them speaks to a port that is not saferun's own.
"""
