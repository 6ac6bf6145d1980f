"""The files of a launch, and the process that alone writes them.

The loop hands over bytes and never waits for a file system. What fails is tried again, what is missing is counted and
said, and no file is reached through a link that another user has planted.
"""
