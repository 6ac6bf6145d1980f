"""For the user's script, inside a rank: progress, long phases, and what a script checks about its own ranks.

Nothing here is imported before the script asks for it, and torch only inside the functions that need it. What reports
to saferun never raises and never waits; outside saferun it does nothing, and the rest works there as well.
"""
