"""The environment of the ranks: profiles, and the lint of what is set.

A variable that the user has set is never changed, and every value that a profile gives is said with its source.
Nothing in here can stop a launch but a profile that was named and cannot be read.
"""
