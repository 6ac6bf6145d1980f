"""Several hosts of one job: where they come from, how they meet, and their messages.

A host speaks for itself and host 0 decides. What comes from another host is bounded and checked before it is
believed, and whatever is wrong with it ends nothing.
"""
